"""MLX's own Metal kernels, from the headers in its wheel, as functions of arrays.

Each function runs a kernel as MLX dispatches it and returns (result, what MLX computes on the CPU). The kernels are
the unmodified text of the headers, so these calls test the simulator, not the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import metalsim
import mlx.core as mx
import numpy as np

_FOLDER = "mlx/backend/metal/kernels/"
_ATTENTION = (_FOLDER + "utils.h", _FOLDER + "sdpa_vector.h")
_QUANTIZED = tuple(_FOLDER + name for name in ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"))
_SOFTMAX = (_FOLDER + "utils.h", _FOLDER + "softmax.h")
TYPE_NAMES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}
GROUP_SIZE = 64

Pair = tuple[mx.array, mx.array]


@dataclass(frozen=True)
class Output:
    """A buffer that the kernel writes."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.size

    def array(self, data: bytes) -> mx.array:
        return mx.array(np.frombuffer(data, np.uint8)).view(self.dtype).reshape(self.shape)


Argument = mx.array | np.generic | Output | None


def launch(
    function: str,
    template: str,
    headers: tuple[str, ...],
    arguments: Sequence[Argument],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    settings: metalsim.Settings,
    constants: tuple[tuple[int, bool | int], ...] = (),
) -> tuple[list[mx.array], metalsim.Report]:
    """A kernel of the headers; `arguments` stand at buffers 0, 1, ..., None at one that is not used."""
    source = metalsim.KernelSource(
        function, function, template_arguments=f"<{template}>", includes=headers, constants=constants
    )
    buffers = []
    for index, argument in enumerate(arguments):
        name = f"argument {index}"
        if isinstance(argument, Output):
            data = b"\xff" * argument.num_bytes
            buffers.append(metalsim.Buffer(index, name, data, writable=True, initialised=False))
        else:
            buffers.append(metalsim.Buffer(index, name, _bytes(argument)))
    library = metalsim.build(source, settings.mode, settings.cache)
    contents, report = metalsim.launch(library, buffers, grid, threadgroup, settings)
    return [a.array(contents[i]) for i, a in enumerate(arguments) if isinstance(a, Output)], report


def run(*call: Any, **options: Any) -> list[mx.array]:
    """The outputs of `launch`."""
    return launch(*call, **options)[0]


def _bytes(argument: mx.array | np.generic | None) -> bytes:
    if argument is None:
        return bytes(64)
    if isinstance(argument, np.generic):
        return argument.tobytes()
    argument = mx.contiguous(argument)
    return np.array(argument.view(mx.uint16) if argument.dtype == mx.bfloat16 else argument).tobytes()


def _normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def _quantized(rows: mx.array, bits: int) -> tuple[tuple[mx.array, ...], mx.array]:
    """(codes, scales, biases), and the float32 values they stand for."""
    codes, scales, biases = mx.quantize(rows, group_size=GROUP_SIZE, bits=bits)
    in_float32 = (scales.astype(mx.float32), biases.astype(mx.float32))
    return (codes, scales, biases), mx.dequantize(codes, *in_float32, group_size=GROUP_SIZE, bits=bits)


# ----------------------------------------------------------------------------------------------- attention

_NO_MASK = ((20, False), (21, False), (22, False), (23, False), (24, False), (25, False))
_BLOCKS = 32


@dataclass(frozen=True)
class Shape:
    """Attention of one token: KV heads, query heads of each, tokens, head dim."""

    heads: int = 2
    groups: int = 4
    tokens: int = 131
    head_dim: int = 128

    def inputs(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        keys, values = (_normal((1, self.heads, self.tokens, self.head_dim), dtype) for _ in range(2))
        return _normal((1, self.heads * self.groups, 1, self.head_dim), dtype), keys, values

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def expected(self, arrays: tuple[mx.array, ...]) -> mx.array:
        return mx.fast.scaled_dot_product_attention(*(a.astype(mx.float32) for a in arrays), scale=self.scale)

    def strides(self) -> list[np.generic]:
        """Head and token strides of keys, then of values, in elements."""
        return [np.int64(self.tokens * self.head_dim), np.int64(self.head_dim)] * 2


def sdpa_vector(dtype: mx.Dtype, settings: metalsim.Settings) -> Pair:
    shape = Shape()
    arrays = shape.inputs(dtype)
    expected = shape.expected(arrays)
    sizes = [np.int32(shape.groups), np.int32(shape.tokens), *shape.strides(), np.float32(shape.scale)]
    arguments = [*arrays, Output(expected.shape, dtype), *sizes, *[None] * 7]
    grid = (expected.shape[1] * 1024, 1, 1)
    template = f"{TYPE_NAMES[dtype]}, {shape.head_dim}, {shape.head_dim}"
    (out,) = run("sdpa_vector", template, _ATTENTION, arguments, grid, (1024, 1, 1), settings, _NO_MASK)
    return out, expected


def sdpa_vector_2pass_1(
    shape: Shape, arrays: tuple[mx.array, ...], settings: metalsim.Settings
) -> tuple[list[mx.array], metalsim.Report]:
    """The pass that reads keys and values: partial outputs, sums and maxima of every block."""
    dtype, heads = arrays[0].dtype, shape.heads * shape.groups
    outputs = [Output((heads, _BLOCKS, shape.head_dim), dtype), *[Output((heads, _BLOCKS), mx.float32)] * 2]
    sizes = [np.int32(shape.tokens), *shape.strides(), np.float32(shape.scale)]
    return launch(
        "sdpa_vector_2pass_1",
        f"{TYPE_NAMES[dtype]}, {shape.head_dim}, {shape.head_dim}",
        _ATTENTION,
        [*arrays, *outputs, None, *sizes, *[None] * 6],
        (shape.heads * 32, shape.groups, _BLOCKS),
        (32, shape.groups, 1),
        settings,
        (*_NO_MASK, (26, _BLOCKS)),
    )


def sdpa_vector_2pass(dtype: mx.Dtype, settings: metalsim.Settings) -> Pair:
    shape = Shape()
    arrays = shape.inputs(dtype)
    expected = shape.expected(arrays)
    partials, _ = sdpa_vector_2pass_1(shape, arrays, settings)
    arguments = [*partials, Output(expected.shape, dtype), np.int32(_BLOCKS)]
    grid, template = (expected.shape[1] * 1024, 1, 1), f"{TYPE_NAMES[dtype]}, {shape.head_dim}"
    (out,) = run("sdpa_vector_2pass_2", template, _ATTENTION, arguments, grid, (1024, 1, 1), settings)
    return out, expected


# -------------------------------------------------------------------------------------------- quantization


def affine_qmv(dtype: mx.Dtype, bits: int, settings: metalsim.Settings) -> Pair:
    inner, outer = 512, 64
    x = _normal((1, inner), dtype)
    weights, dense = _quantized(_normal((outer, inner), dtype), bits)
    arguments = [*weights, x, Output((1, outer), dtype), np.int32(inner), np.int32(outer), *[None] * 8]
    template = f"{TYPE_NAMES[dtype]}, {GROUP_SIZE}, {bits}, false"
    grid = (32, 2 * outer // 8, 1)
    (out,) = run("affine_qmv_fast", template, _QUANTIZED, arguments, grid, (32, 2, 1), settings)
    return out, x.astype(mx.float32) @ dense.T


def affine_qmm(dtype: mx.Dtype, bits: int, settings: metalsim.Settings) -> Pair:
    """With simdgroup matrices, and a last tile of rows that is not full."""
    rows, inner, outer = 40, 128, 64
    x = _normal((rows, inner), dtype)
    weights, dense = _quantized(_normal((outer, inner), dtype), bits)
    sizes = [np.int32(inner), np.int32(outer), np.int32(rows)]
    arguments = [*weights, x, Output((rows, outer), dtype), *sizes, *[None] * 8]
    template = f"{TYPE_NAMES[dtype]}, {GROUP_SIZE}, {bits}, true, false"
    grid = (outer, 2 * 2, 2)
    (out,) = run("affine_qmm_t", template, _QUANTIZED, arguments, grid, (32, 2, 2), settings)
    return out, x.astype(mx.float32) @ dense.T


def affine_quantize(dtype: mx.Dtype, bits: int, settings: metalsim.Settings) -> list[Pair]:
    """Codes, scales and biases; bit for bit the same in float32."""
    x = _normal((32, 256), dtype)
    expected = mx.quantize(x, group_size=GROUP_SIZE, bits=bits)
    arguments = [x, *(Output(array.shape, array.dtype) for array in expected)]
    template = f"{TYPE_NAMES[dtype]}, {GROUP_SIZE}, {bits}"
    outputs = run("affine_quantize", template, _QUANTIZED, arguments, (128, 32, 1), (128, 1, 1), settings)
    return list(zip(outputs, expected, strict=True))


def affine_dequantize(dtype: mx.Dtype, bits: int, settings: metalsim.Settings) -> Pair:
    x = _normal((32, 256), dtype)
    weights, _ = _quantized(x, bits)
    template = f"{TYPE_NAMES[dtype]}, {GROUP_SIZE}, {bits}"
    grid = (256 * bits // 8, 32, 1)
    arguments = [*weights, Output(x.shape, dtype)]
    (out,) = run("affine_dequantize", template, _QUANTIZED, arguments, grid, (64, 1, 1), settings)
    return out, mx.dequantize(*weights, group_size=GROUP_SIZE, bits=bits)


def softmax(dtype: mx.Dtype, settings: metalsim.Settings) -> Pair:
    rows, length = 3, 1000
    x = _normal((rows, length), dtype)
    arguments = [x, Output(x.shape, dtype), np.int32(length)]
    template = f"{TYPE_NAMES[dtype]}, float"
    grid, threadgroup = (rows * 256, 1, 1), (256, 1, 1)
    (out,) = run("softmax_single_row", template, _SOFTMAX, arguments, grid, threadgroup, settings)
    return out, mx.softmax(x.astype(mx.float32), axis=-1)
