"""What a launch found: faults, counts, and the exceptions that carry them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .instructions import Place

Mode = Literal["fast", "random", "race", "asan", "count"]
MODES: tuple[Mode, ...] = ("fast", "random", "race", "asan")  # that look for faults


class FaultKind(enum.Enum):
    """Kinds of fault, in the order of `FaultKind` in engine/engine.h."""

    OUT_OF_BOUNDS = "out of bounds"
    DATA_RACE = "data race"
    DIVERGENCE = "divergence"
    UNINITIALISED_READ = "uninitialised read"
    UNWRITTEN_OUTPUT = "unwritten output"
    WRITE_TO_INPUT = "write to input"
    MISALIGNED = "misaligned access"
    OVER_LIMIT = "over a limit of Metal"
    INACTIVE_LANE = "read of an inactive lane"
    TIMEOUT = "timeout"
    SANITIZER = "undefined behaviour"


@dataclass(frozen=True)
class Fault:
    """One finding.

    `variable` is the buffer or threadgroup variable ("" if unknown), `line` the place as `name.metal:line`, with
    "near" in front where the compiler has moved the access, `code` the text of that line; `other_*` the other access
    of a race.
    """

    kind: FaultKind
    variable: str
    detail: str
    line: str = ""
    code: str = ""
    other_line: str = ""
    other_code: str = ""
    threadgroup: tuple[int, int, int] | None = None
    thread: int | None = None

    def __str__(self) -> str:
        what = self.kind.value + (f" on '{self.variable}'" if self.variable else "")
        where = f" {'' if self.line.startswith('near') else 'at '}{self.line} `{self.code}`" if self.line else ""
        other = f", the other access is at {self.other_line} `{self.other_code}`" if self.other_line else ""
        who = f" [threadgroup {self.threadgroup}, thread {self.thread}]" if self.threadgroup else ""
        return f"{what}{where}: {self.detail}{other}{who}"


@dataclass(frozen=True)
class Traffic:
    """Bytes of one buffer: its size, and how many were read and written, repeats included (race mode only)."""

    size: int
    read: int
    written: int


@dataclass(frozen=True)
class Report:
    """Counts and faults of one launch.

    `barriers`: threadgroup barriers passed, summed over threadgroups; `simd_operations`: simdgroup operations,
    summed over simdgroups; `threadgroup_bytes`: threadgroup memory of one threadgroup; `traffic` and
    `threadgroup_traffic` are counted in race mode, `executed`, the instructions of all lanes by place and class, in
    count mode.
    """

    kernel: str
    mode: Mode
    barriers: int = 0
    simd_operations: int = 0
    switches: int = 0
    threadgroups: int = 0
    threadgroup_bytes: int = 0
    traffic: dict[str, Traffic] = field(default_factory=dict)
    threadgroup_traffic: Traffic = Traffic(0, 0, 0)
    seconds: float = 0.0
    faults: tuple[Fault, ...] = ()
    executed: Mapping[tuple[Place, str], int] = field(default_factory=dict)

    def instructions(self, function: str | None = None) -> Counter[str]:
        """By class, of all lanes; of one function of the kernel's text, inlined or not, if it is named."""
        total: Counter[str] = Counter()
        for (place, kind), count in self.executed.items():
            if function is None or place.function == function:
                total[kind] += count
        return total


class MetalSimError(Exception):
    """Anything that this package finds."""


class ToolchainMissing(MetalSimError):
    """clang-19 is not installed, or the machine is not x86-64 Linux."""


class CompileError(MetalSimError, RuntimeError):
    """The kernel is not valid; `diagnostics` is all that the compiler said. A RuntimeError, as MLX's own is."""

    def __init__(self, kernel: str, first_error: str, diagnostics: str = "") -> None:
        super().__init__(f"[{kernel}] does not compile: {first_error}")
        self.kernel = kernel
        self.diagnostics = diagnostics or first_error


class KernelFault(MetalSimError):
    """A launch with at least one fault; `kind` is that of the first, `report` holds all."""

    def __init__(self, report: Report) -> None:
        super().__init__("\n".join(f"[{report.kernel}] {report.mode} mode: {fault}" for fault in report.faults))
        self.report = report
        self.kind = report.faults[0].kind

    @property
    def kinds(self) -> set[FaultKind]:
        return {fault.kind for fault in self.report.faults}
