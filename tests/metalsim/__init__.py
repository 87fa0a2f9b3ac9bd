"""Metal kernels on Linux: the text that MLX would compile, run and checked on the CPU.

A kernel made with `mx.fast.metal_kernel` inside `install(mode)` runs on the engine:

    with metalsim.install("race", available=True) as session:
        outputs = library_that_has_a_metal_kernel(...)
    session.reports[-1].traffic["keys"].read

Modes: "fast" (one schedule), "random" (schedules by seed), "race" (every access checked against every other, whatever
the schedule), "asan" (AddressSanitizer and UndefinedBehaviorSanitizer), and "count" (instructions of all lanes, in
`session.reports[-1].instructions()`). A fault raises `KernelFault`, text that is not valid Metal `CompileError`.
"""

from .compiler import KernelSource, Library, build, require_toolchain
from .dispatch import Buffer, Settings, launch
from .faults import (
    MODES,
    CompileError,
    Fault,
    FaultKind,
    KernelFault,
    MetalSimError,
    Mode,
    Report,
    ToolchainMissing,
    Traffic,
)
from .instructions import Place
from .sim import MetalKernel, Session, install
from .strict import complaints

__all__ = [
    "MODES",
    "Buffer",
    "CompileError",
    "Fault",
    "FaultKind",
    "KernelFault",
    "KernelSource",
    "Library",
    "MetalKernel",
    "MetalSimError",
    "Mode",
    "Place",
    "Report",
    "Session",
    "Settings",
    "ToolchainMissing",
    "Traffic",
    "build",
    "complaints",
    "install",
    "launch",
    "require_toolchain",
]
