"""One launch of a built kernel: buffers that end at an inaccessible page, the engine's structs, the report."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from .compiler import Library, runner
from .faults import Fault, FaultKind, KernelFault, Mode, Report, Traffic
from .instructions import Instrumented, executed
from .memory import GuardedBytes

_MAX_FAULTS = 16  # of engine/engine.h
_FIFO, _RANDOM_LANE, _RANDOM_SIMDGROUP = range(3)
_KINDS = tuple(FaultKind)
# What UndefinedBehaviorSanitizer says when it means a kind of fault that has a name of its own.
_UNDEFINED = {"out of bounds": FaultKind.OUT_OF_BOUNDS, "misaligned address": FaultKind.MISALIGNED}


@dataclass(frozen=True)
class Settings:
    """How kernels are run.

    `seed`: of the schedule in mode "random", and of what integer outputs hold before they are written;
    `cache`: folder of built kernels, by default one in the temporary folder; `fast_ulp`: error given to the
    functions of metal::fast, in units in the last place; `flush_denormals`: float32 denormals are zero, as on Apple
    GPUs; `seconds`: a launch that takes longer is a fault.

    Raises:
        ValueError: an unknown mode.
    """

    mode: Mode = "fast"
    seed: int = 0
    cache: Path | None = None
    fast_ulp: int = 0
    flush_denormals: bool = True
    seconds: int = 60

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"[Settings] expected a mode of {get_args(Mode)}, got {self.mode!r}")


@dataclass(frozen=True)
class Buffer:
    """What stands at `[[buffer(index)]]`: `data`, of which byte `origin` is the one the kernel's pointer names.

    A kernel may write to it if `writable`; `initialised` says whether what it holds may be read before.
    """

    index: int
    name: str
    data: bytes
    writable: bool = False
    initialised: bool = True
    origin: int = 0


# ------------------------------------------------------------------------------- structs of engine/engine.h


class _Fault(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("kind", "has_thread")),
        *((name, ctypes.c_uint64) for name in ("pc", "other_pc")),
        *((name, ctypes.c_uint32) for name in ("line", "other_line")),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32),
        ("variable", ctypes.c_char * 64),
        ("detail", ctypes.c_char * 192),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("size", "origin")),
        *((name, ctypes.c_uint32) for name in ("index", "writable", "initialised", "reserved")),
        *((name, ctypes.c_uint64) for name in ("bytes_read", "bytes_written")),
        ("name", ctypes.c_char * 64),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("policy", "flush_denormals", "num_buffers", "cpu_seconds")),
        ("seed", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(_Buffer)),
        *((name, ctypes.c_uint64) for name in ("barriers", "simd_ops", "switches", "threadgroups")),
        *((name, ctypes.c_uint64) for name in ("threadgroup_bytes", "threadgroup_read", "threadgroup_written")),
        *((name, ctypes.c_uint32) for name in ("num_faults", "finished")),
        ("faults", _Fault * _MAX_FAULTS),
    ]


# ---------------------------------------------------------------------------------------------------- launch


def launch(
    library: Library,
    buffers: Sequence[Buffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    settings: Settings,
) -> tuple[dict[int, bytes], Report]:
    """Run a kernel; (contents of writable buffers by index, report).

    `grid` and `threadgroup` count threads, as in `mx.fast.metal_kernel`.

    Raises:
        KernelFault: at least one fault was found.
    """
    plan = _Launch(grid=tuple(grid), threadgroup=tuple(threadgroup), seed=settings.seed)
    plan.policy = _FIFO
    if settings.mode == "random":
        plan.policy = (_RANDOM_LANE, _RANDOM_SIMDGROUP)[settings.seed % 2]
    plan.flush_denormals = settings.flush_denormals
    plan.cpu_seconds = settings.seconds
    plan.num_buffers = len(buffers)
    table = (_Buffer * len(buffers))()
    for entry, buffer in zip(table, buffers, strict=True):
        entry.index, entry.size, entry.origin = buffer.index, len(buffer.data), buffer.origin
        entry.writable, entry.initialised = buffer.writable, buffer.initialised
        entry.name = buffer.name.encode()[:63]
    plan.buffers = table
    begin = time.perf_counter()
    run = _run_in_runner if settings.mode == "asan" else _run_here
    contents, more_faults = run(library, plan, table, buffers, settings)
    report = _report(library, plan, table, settings.mode, more_faults, time.perf_counter() - begin)
    if report.faults:
        raise KernelFault(report)
    return {b.index: data for b, data in zip(buffers, contents, strict=True) if b.writable}, report


@functools.cache
def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.msl_struct_sizes.restype = ctypes.c_uint64
    assert library.msl_struct_sizes() == ctypes.sizeof(_Launch) + ctypes.sizeof(_Buffer), "structs differ from engine.h"
    return library


def _counters(library: Library) -> ctypes.Array[ctypes.c_uint64]:
    """One for each basic block, in the library's own memory."""
    kind = ctypes.c_uint64 * len(library.blocks)
    return kind.in_dll(_loaded(library.path), Instrumented.COUNTERS) if library.blocks else kind()


def _run_here(
    library: Library, plan: _Launch, table: ctypes.Array[_Buffer], buffers: Sequence[Buffer], settings: Settings
) -> tuple[list[bytes], list[Fault]]:
    # Race mode names writes to inputs itself, and all of them.
    protects = settings.mode != "race"
    memory = [GuardedBytes(b.data, read_only=protects and not b.writable) for b in buffers]
    try:
        for entry, guarded in zip(table, memory, strict=True):
            entry.data = guarded.address
        counters = _counters(library)
        ctypes.memset(counters, 0, ctypes.sizeof(counters))
        _loaded(library.path).msl_launch(ctypes.byref(plan))
        detail = "bytes next to the buffer were written"
        faults = [
            Fault(FaultKind.OUT_OF_BOUNDS, buffer.name, detail)
            for buffer, guarded in zip(buffers, memory, strict=True)
            if not guarded.is_intact()
        ]
        return [guarded.data() for guarded in memory], faults
    finally:
        for guarded in memory:
            guarded.free()


def _run_in_runner(
    library: Library, plan: _Launch, table: ctypes.Array[_Buffer], buffers: Sequence[Buffer], settings: Settings
) -> tuple[list[bytes], list[Fault]]:
    options = "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:symbolize=0"
    environment = {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": "halt_on_error=0", "PATH": "/usr/bin:/bin"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launch"
        file.write_bytes(b"".join([bytes(plan), bytes(table), *(b.data for b in buffers)]))
        command = [str(runner(settings.cache)), str(library.path), str(file)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=settings.seconds)
        except subprocess.TimeoutExpired:
            return [], [Fault(FaultKind.TIMEOUT, "", f"still running after {settings.seconds} s")]
        after = file.read_bytes()
    ctypes.memmove(ctypes.byref(plan), after, ctypes.sizeof(plan))
    ctypes.memmove(table, after[ctypes.sizeof(plan) :], ctypes.sizeof(table))
    contents, position = [], ctypes.sizeof(plan) + ctypes.sizeof(table)
    for buffer in buffers:
        contents.append(after[position : position + len(buffer.data)])
        position += len(buffer.data)
    faults = [*_undefined_behaviour(library, result.stderr), *_changed_inputs(buffers, contents)]
    if result.returncode and not plan.num_faults and not faults:
        faults.append(Fault(FaultKind.SANITIZER, "", f"exit status {result.returncode}: {result.stderr[-2000:]}"))
    return contents, faults


def _undefined_behaviour(library: Library, messages: str) -> list[Fault]:
    faults = {}
    for file, line, detail in re.findall(r"^(\S+?):(\d+):\d+: runtime error: (.*)$", messages, re.MULTILINE):
        kind = next((kind for word, kind in _UNDEFINED.items() if word in detail), FaultKind.SANITIZER)
        faults[file, line] = Fault(kind, "", detail, *library.place(file, int(line)))
    return list(faults.values())


def _changed_inputs(buffers: Sequence[Buffer], contents: list[bytes]) -> list[Fault]:
    changed = (b for b, after in zip(buffers, contents, strict=True) if not b.writable and after != b.data)
    return [Fault(FaultKind.WRITE_TO_INPUT, b.name, "its bytes have changed") for b in changed]


def _report(
    library: Library, plan: _Launch, table: ctypes.Array[_Buffer], mode: Mode, more: list[Fault], seconds: float
) -> Report:
    raw = [plan.faults[i] for i in range(plan.num_faults)]
    places = library.places_of([pc for fault in raw for pc in (fault.pc, fault.other_pc) if pc])
    faults = [_fault(library, fault, places) for fault in raw]
    return Report(
        kernel=library.source.name,
        mode=mode,
        barriers=plan.barriers,
        simd_operations=plan.simd_ops,
        switches=plan.switches,
        threadgroups=plan.threadgroups,
        threadgroup_bytes=plan.threadgroup_bytes,
        traffic={b.name.decode(): Traffic(b.size, b.bytes_read, b.bytes_written) for b in table if mode == "race"},
        threadgroup_traffic=Traffic(plan.threadgroup_bytes, plan.threadgroup_read, plan.threadgroup_written),
        seconds=seconds,
        faults=(*faults, *more),
        executed=executed(library.blocks, list(_counters(library))) if library.blocks else {},
    )


def _fault(library: Library, raw: _Fault, places: dict[int, tuple[str, str]]) -> Fault:
    def place(pc: int, line: int) -> tuple[str, str]:
        found = places.get(pc, ("", ""))
        return library.place(library.source.file, line) if line and not found[0] else found

    return Fault(
        _KINDS[raw.kind],
        raw.variable.decode(),
        raw.detail.decode(errors="replace"),
        *place(raw.pc, raw.line),
        *place(raw.other_pc, raw.other_line),
        tuple(raw.threadgroup) if raw.has_thread else None,
        raw.thread if raw.has_thread else None,
    )
