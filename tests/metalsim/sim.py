"""`mx.fast.metal_kernel` on the engine: the same signature, the same generated text."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import re
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .compiler import KernelSource, build
from .dispatch import Buffer, Settings, launch
from .faults import Mode, Report
from .frontend import Parameter, kernel_parameters

_real_metal_kernel = mx.fast.metal_kernel
_FLOATS = (mx.float32, mx.float16, mx.bfloat16, mx.complex64)


@dataclass
class Session:
    """What `install` runs kernels with, and the reports of the launches so far."""

    settings: Settings
    reports: list[Report] = field(default_factory=list)


_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("metalsim_session", default=None)


@contextlib.contextmanager
def install(mode: Mode = "fast", *, available: bool = False, **settings: Any) -> Iterator[Session]:
    """Run every kernel that is made with `mx.fast.metal_kernel` inside on the engine.

    Args:
        mode: "fast", "random", "race", "asan" or "count".
        available: `mx.metal.is_available()` answers True inside.
        settings: the other fields of `Settings`.

    Kernels run when they are called: inside `mx.compile` that is not possible, `mx.disable_compile()` is the way out.
    A kernel object made inside keeps running on the engine afterwards, in mode "fast"; one made before is MLX's own,
    so a library that caches its kernel objects has to forget them first.
    """
    session = Session(Settings(mode=mode, **settings))
    kernel, is_available = mx.fast.metal_kernel, mx.metal.is_available
    token = _session.set(session)
    mx.fast.metal_kernel = MetalKernel
    if available:
        mx.metal.is_available = lambda: True
    try:
        yield session
    finally:
        mx.fast.metal_kernel, mx.metal.is_available = kernel, is_available
        _session.reset(token)


class MetalKernel:
    """A kernel object as `mx.fast.metal_kernel` makes it, that runs on the engine.

    Runs in the mode of the `install` that is active at the call, else in mode "fast". `report` is that of the last
    launch without a fault.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object | None = None,
    ) -> None:
        options = {} if compile_options is None else {"compile_options": compile_options}
        self._real = _real_metal_kernel(
            name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs, **options
        )
        self.name = name
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.ensure_row_contiguous = ensure_row_contiguous
        self.report: Report | None = None
        self._sources: dict[str, KernelSource] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | bool | int | float],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, bool | int | mx.Dtype]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Run the kernel now and return its outputs; `stream` is without meaning here.

        Raises:
            ValueError: what MLX refuses.
            CompileError, KernelFault: what the engine finds.
        """
        arrays = [self._bound(value) for value in inputs]
        source = self.source(
            inputs=arrays,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
            template=template,
            init_value=init_value,
        )
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{source.text}\n```")
        session = _session.get()
        settings = session.settings if session else Settings()
        library = build(source, settings.mode, settings.cache, fast_ulp=settings.fast_ulp)
        parameters = kernel_parameters(source.text, source.function) or []
        buffers = [buffer for p in parameters if (buffer := self._input_buffer(p, arrays)) is not None]
        shapes = list(zip(self.output_names, output_shapes, output_dtypes, strict=True))
        indices = {p.name: p.buffer for p in parameters if p.buffer is not None}
        for name, shape, dtype in shapes:
            data = _initial_bytes(shape, dtype, init_value, settings.seed)
            buffers.append(Buffer(indices[name], name, data, writable=True, initialised=init_value is not None))
        contents, self.report = launch(library, buffers, grid, threadgroup, settings)
        if session:
            session.reports.append(self.report)
        return [_to_array(contents[indices[name]], shape, dtype) for name, shape, dtype in shapes]

    def source(self, *, inputs: Sequence[mx.array | bool | int | float], **call: Any) -> KernelSource:
        """The text that MLX generates for a call with these arguments."""
        arrays = [self._as_array(value) for value in inputs]
        call = {name: value for name, value in call.items() if value is not None}
        key = repr(([(a.shape, a.dtype) for a in arrays], call))
        if key not in self._sources:
            self._sources[key] = _exported_source(self.name, self._real, arrays, call)
        return self._sources[key]

    @staticmethod
    def _as_array(value: mx.array | bool | int | float) -> mx.array:
        return value if isinstance(value, mx.array) else mx.array(value)

    def _bound(self, value: mx.array | bool | int | float) -> mx.array:
        """The array as MLX hands it to the kernel: copied only if it has to be row-contiguous and is not."""
        array = self._as_array(value)
        mx.eval(array)
        if self.ensure_row_contiguous and array.size and not _view(array).c_contiguous:
            array = mx.contiguous(array)
            mx.eval(array)
        return array

    def _input_buffer(self, parameter: Parameter, arrays: list[mx.array]) -> Buffer | None:
        """The buffer of a parameter that is an input, its shape, strides or number of dimensions."""
        if parameter.buffer is None or parameter.name in self.output_names:
            return None
        for name, array in zip(self.input_names, arrays, strict=True):
            if parameter.name == name:
                return Buffer(parameter.buffer, name, *_span(array))
            facts: dict[str, np.ndarray] = {
                f"{name}_shape": np.array(array.shape, np.int32),
                f"{name}_strides": np.array([s // array.itemsize for s in _strides(array)], np.int64),
                f"{name}_ndim": np.array(array.ndim, np.int32),
            }
            if parameter.name in facts:
                return Buffer(parameter.buffer, parameter.name, facts[parameter.name].tobytes())
        raise AssertionError(f"parameter {parameter.name!r} of {self.name!r} is no input and no output")


# -------------------------------------------------------------------------------------------- MLX's own text


def _exported_source(name: str, kernel: Any, arrays: list[mx.array], call: dict[str, Any]) -> KernelSource:
    """Function name and text are stored in an exported graph, each behind its length as 64 bits."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.mlxfn"
        mx.export_function(str(file), lambda *inputs: kernel(inputs=list(inputs), **call), *arrays)
        graph = file.read_bytes()
    begin = graph.index(b"custom_kernel_", graph.index(b"CustomKernel"))
    (length,) = struct.unpack_from("<Q", graph, begin - 8)
    function = graph[begin : begin + length].decode()
    (length,) = struct.unpack_from("<Q", graph, begin + len(function))
    begin += len(function) + 8
    text = graph[begin : begin + length].decode()
    arguments = re.search(rf"decltype\({re.escape(function)}(<.*?>)\)", text)
    return KernelSource(name, function, text, arguments[1] if arguments else "")


# ----------------------------------------------------------------------------------------- arrays and bytes


def _view(array: Any) -> memoryview:
    """MLX's stubs do not say that an array has Python's buffer interface."""
    return memoryview(array)


def _strides(array: mx.array) -> tuple[int, ...]:
    """In bytes."""
    return tuple(_view(array).strides or ()) if array.ndim else ()


def _span(array: mx.array) -> tuple[bytes, bool, bool, int]:
    """(bytes, writable, initialised, origin) of an input: the memory between its first and its last element."""
    if not array.size:
        return b"", False, True, 0
    steps = [stride * (n - 1) for stride, n in zip(_strides(array), array.shape, strict=True)]
    before = -sum(step for step in steps if step < 0)
    after = sum(step for step in steps if step > 0) + array.itemsize
    # numpy knows no bfloat16; a view of it shares the memory.
    view = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    first = view.__array_interface__["data"][0]
    return ctypes.string_at(first - before, before + after), False, True, before


def _initial_bytes(shape: Sequence[int], dtype: mx.Dtype, init_value: float | None, seed: int) -> bytes:
    """What an output holds at first: MLX leaves it undefined without `init_value`, so NaN or random integers."""
    if init_value is not None:
        # mx.full makes float32 where bool is asked for
        return _span(mx.contiguous(mx.broadcast_to(mx.array(init_value).astype(dtype), shape)))[0]
    size = int(np.prod(shape)) * dtype.size
    return b"\xff" * size if dtype in _FLOATS else np.random.default_rng(seed).bytes(size)


def _to_array(data: bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
