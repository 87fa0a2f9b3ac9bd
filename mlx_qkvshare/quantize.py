"""Packing K and V rows into `mx.quantize`'s affine layout, and back; and the changes of basis that rows are packed in.

Letters: Hk KV heads, T tokens, D head dim, P padded dim, G group size, M rows of queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from .digest import digest_buffers
from .spec import TensorPlan

Factors = Sequence[mx.array | None]
"""Of every layer's keys, [1, Hk, 1, D] or None: see `calibrate`."""


@dataclass(frozen=True, eq=False)
class Basis:
    """Rows are packed as rotate((row - centre) * scale), where fewer values stand out, and attended there.

    A rotation of keys and queries leaves scores as they are, one of values is undone on the output (QuaRot, arXiv
    2404.00456); a centre that is taken from all keys shifts a query's scores by query . centre, which is added back;
    channels of keys may be scaled as long as those of queries are divided (SmoothQuant, arXiv 2211.10438). All of it is
    exact but for the rounding of codes.

    Shapes:
        centre: [1, Hk, 1, D], of keys only: the mean of `num_sampled` rows of the segment in slot `origin`
        scale: [1, Hk, 1, D], of keys only
    """

    is_rotated: bool = False
    centre: mx.array | None = None
    scale: mx.array | None = None
    origin: int = 0
    num_sampled: int = 0

    def enter(self, rows: mx.array) -> mx.array:
        """Rows [1, Hk, T, D] as they are packed, in float32."""
        rows = rows.astype(mx.float32)
        rows = rows if self.centre is None else rows - self.centre
        rows = rows if self.scale is None else rows * self.scale
        return rotate(rows) if self.is_rotated else rows

    def leave(self, rows: mx.array) -> mx.array:
        rows = rotate(rows) if self.is_rotated else rows
        rows = rows if self.scale is None else rows / self.scale.astype(rows.dtype)
        return rows if self.centre is None else rows + self.centre.astype(rows.dtype)

    def queries(self, rows: mx.array) -> mx.array:
        """Queries [.., Hk, M, D] for keys as they are packed."""
        rows = rows if self.scale is None else rows / self.scale.astype(rows.dtype)
        return rotate(rows) if self.is_rotated else rows

    def shift(self, rows: mx.array) -> mx.array | None:
        """What queries [.., Hk, M, D] miss of each of their scores: [.., Hk, M, 1]."""
        if self.centre is None:
            return None
        return mx.sum(rows.astype(mx.float32) * self.centre, axis=-1, keepdims=True)

    def outputs(self, rows: mx.array) -> mx.array:
        """Weighted sums of values as they are packed, in the model's own basis."""
        return rotate(rows) if self.is_rotated else rows

    def is_like(self, other: Basis | None) -> bool:
        """May rows of both stand side by side?"""
        return other is not None and (self.origin, self.is_rotated) == (other.origin, other.is_rotated)


def rotate(x: mx.array) -> mx.array:
    """A Walsh-Hadamard transform of the last axis, its own inverse; in blocks where the width is no power of two."""
    width = x.shape[-1]
    block = width & -width
    if block == width:
        return mx.hadamard_transform(x)
    return mx.hadamard_transform(x.reshape(*x.shape[:-1], -1, block)).reshape(x.shape)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """One layer's packed keys or values. Never written to after it is built.

    Shapes:
        packed: [1, Hk, T, P * bits / 32] uint32, or [1, Hk, T, D] in `dtype` when bits is 16
        scales, biases: [1, Hk, T, P / G] in `dtype`, or None when bits is 16
        residual: [1, Hk, T, P / 8] uint32: of nested precision the lower four bits of every code of 8, whose upper four
            `packed` has. By itself `packed` with `scales` and `biases` is an ordinary tensor of 4 bits, the base.
    """

    plan: TensorPlan
    dtype: mx.Dtype
    packed: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    basis: Basis | None = None
    residual: mx.array | None = None

    @property
    def num_tokens(self) -> int:
        return self.packed.shape[2]

    @property
    def bits(self) -> int:
        """Those that a full read has: the plan is that of `packed`."""
        return self.plan.bits if self.residual is None else 2 * self.plan.bits

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        centre = None if self.basis is None else self.basis.centre
        return tuple(a for a in (self.packed, self.scales, self.biases, centre, self.residual) if a is not None)

    @property
    def base(self) -> QuantizedTensor:
        """The tensor without its residual, over the same arrays."""
        return self if self.residual is None else dataclasses.replace(self, residual=None)

    @property
    def is_cheap_to_unpack(self) -> bool:
        """Whole bytes on a CPU: converting them costs less than `quantized_matmul`, which goes value by value."""
        return self.bits == 8 and self.dtype == mx.float32 and mx.default_device().type == mx.cpu

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    def first(self, num_tokens: int) -> tuple[mx.array, Any, Any]:
        """`packed`, `scales` and `biases` of the first `num_tokens` rows; all of them are the arrays themselves."""
        whole = (self.packed, self.scales, self.biases)
        if num_tokens == self.num_tokens:
            return whole
        return tuple(None if a is None else a[:, :, :num_tokens] for a in whole)  # type: ignore[return-value]

    def of_heads(self, heads: slice) -> QuantizedTensor:
        """Some of the KV heads, as views."""
        basis = self.basis
        if basis is not None:
            centre, scale = (None if a is None else a[:, heads] for a in (basis.centre, basis.scale))
            basis = dataclasses.replace(basis, centre=centre, scale=scale)
        names = ("packed", "scales", "biases", "residual")
        arrays: dict[str, Any] = {name: getattr(self, name) for name in names}
        views: dict[str, Any] = {name: None if array is None else array[:, heads] for name, array in arrays.items()}
        return dataclasses.replace(self, **views, basis=basis)


def pad_last(x: mx.array, width: int, *, mode: Literal["constant", "edge"]) -> mx.array:
    """Widen the last axis of `x` to `width`: "constant" adds zeros, "edge" repeats the last channel."""
    missing = width - x.shape[-1]
    return x if missing == 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], mode=mode)


def quantize(
    x: mx.array, plan: TensorPlan, basis: Basis | None = None, *, is_fitted: bool = False, is_nested: bool = False
) -> QuantizedTensor:
    """Pack `x` [1, Hk, T, D] by `plan`, in `basis`. Lazy: evaluate before it is shared.

    `is_fitted` fits each group's range for the least squared error instead of taking its ends. `is_nested` splits codes
    of 8 bits into a base and a residual.
    """
    if not plan.is_quantized:
        return QuantizedTensor(plan, x.dtype, mx.contiguous(x))
    rows = x if basis is None else basis.enter(x).astype(x.dtype)
    # Padding by the edge channel keeps the last group's range tight; its products meet zeros in the query.
    padded = pad_last(rows, plan.padded_dim, mode="edge")
    if is_fitted:
        packed, scales, biases = quantize_fitted(padded, plan.group_size, plan.bits)
    else:
        packed, scales, biases = mx.quantize(padded, group_size=plan.group_size, bits=plan.bits)
    if is_nested:
        assert plan.bits == 8, plan
        packed, scales, biases, residual = _nest(padded, scales, biases)
        return QuantizedTensor(dataclasses.replace(plan, bits=4), x.dtype, packed, scales, biases, basis, residual)
    return QuantizedTensor(plan, x.dtype, packed, scales, biases, basis)


_BASE_OFFSET = 7.5 / 16
"""Codes c = 16 * high + low are read as high * S + B, plus low * S / 16 - 7.5 / 16 * S: the base has the middle of the
16 codes that it stands for."""


def _nest(x: mx.array, scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Codes of 8 bits on the grid of `scales` and `biases`: their base, its scales and biases, and the residual."""
    step = scales.astype(mx.float32)
    scales, biases = 16 * scales, (biases.astype(mx.float32) + 7.5 * step).astype(x.dtype)  # 16 times is exact
    # The bias is rounded, in half precision by more than a code perhaps, so codes are the nearest of what is stored.
    start = (biases.astype(mx.float32) - 7.5 * step)[..., None]
    groups = x.astype(mx.float32).reshape(*scales.shape, -1)
    codes = mx.clip(mx.round((groups - start) / step[..., None]), 0, 255).astype(mx.uint8)
    codes = codes.reshape(*x.shape[:-1], -1, 2)  # two codes to a byte of either plane, the first one lowest
    even, odd = codes[..., 0], codes[..., 1]
    high, low = (even >> 4) | (odd & 240), (even & 15) | (odd << 4)
    return high.view(mx.uint32), scales, biases, low.view(mx.uint32)


Plane = tuple[mx.array, Any, Any]
"""Packed words, scales and biases, as `mx.quantized_matmul` takes them."""


def planes(packed: mx.array, scales: mx.array, biases: mx.array, residual: mx.array | None) -> list[Plane]:
    """What is to be read one after another and summed up: the base, and its residual if there is one."""
    base = (packed, scales, biases)
    return [base] if residual is None else [base, (residual, scales / 16, scales * -_BASE_OFFSET)]


def _whole(packed: mx.array, scales: mx.array, biases: mx.array, residual: mx.array) -> Plane:
    """Base and residual as `mx.quantize` packs 8 bits, with float32 scales and biases: in half precision they would
    be rounded once more."""
    high, low = packed.view(mx.uint8), residual.view(mx.uint8)
    even, odd = (high << 4) | (low & 15), (high & 240) | (low >> 4)
    scales = scales.astype(mx.float32)
    words = mx.stack([even, odd], axis=-1).flatten(-2).view(mx.uint32)
    return words, scales / 16, biases.astype(mx.float32) - scales * _BASE_OFFSET


_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a group's range: few codes are better spent on its middle


def quantize_fitted(x: mx.array, group_size: int, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """`mx.quantize` with ranges that are clipped where that lowers the squared error, then refitted to the codes."""
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, group_size)
    most = 2**bits - 1
    low, high = mx.min(groups, axis=-1, keepdims=True), mx.max(groups, axis=-1, keepdims=True)
    middle = (low + high) / 2

    def codes(scale: mx.array, bias: mx.array) -> mx.array:
        return mx.clip(mx.round((groups - bias) / scale), 0, most)

    def clipped(share: float) -> tuple[mx.array, mx.array, mx.array]:
        scale = mx.maximum((high - low) / most, 1e-7) * share
        bias = middle - (middle - low) * share
        error = mx.sum(mx.square(codes(scale, bias) * scale + bias - groups), axis=-1, keepdims=True)
        return error, scale, bias

    best = clipped(_SHRINK[0])
    for share in _SHRINK[1:]:
        tried = clipped(share)
        is_better = tried[0] < best[0]
        best = tuple(mx.where(is_better, new, old) for new, old in zip(tried, best, strict=True))  # type: ignore[assignment]
    _, scale, bias = best
    mean_value = mx.mean(groups, axis=-1, keepdims=True)
    for _ in range(2):  # least squares: the line through (code, value)
        code = codes(scale, bias)
        mean = mx.mean(code, axis=-1, keepdims=True)
        centred = code - mean
        spread = mx.sum(centred * centred, axis=-1, keepdims=True)
        slope = mx.sum(centred * groups, axis=-1, keepdims=True) / mx.maximum(spread, 1e-9)
        scale = mx.where((spread > 0) & (slope > 0), slope, scale)
        bias = mean_value - scale * mean
    # Rounded as they are stored first, so that the codes are the nearest of what will be read.
    stored = [a.astype(x.dtype) for a in (scale, bias)]
    packed = pack_codes(codes(*(a.astype(mx.float32) for a in stored)).reshape(x.shape), bits)
    return packed, stored[0].squeeze(-1), stored[1].squeeze(-1)


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Codes [.., P] as `mx.quantize` packs them: one stream of bits, lowest first, in words of 32."""
    codes = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, 32)  # 32 codes fill `bits` words
    words = [mx.zeros(codes.shape[:-1], mx.uint32) for _ in range(bits)]
    for index in range(32):
        word, offset = divmod(index * bits, 32)
        code = codes[..., index]
        words[word] = words[word] | (code << offset)
        if offset + bits > 32:
            words[word + 1] = words[word + 1] | (code >> (32 - offset))
    return mx.stack(words, axis=-1).flatten(-2)


def dequantize(tensor: QuantizedTensor, num_tokens: int | None = None) -> mx.array:
    """The first `num_tokens` rows (default all) in full precision: [1, Hk, num_tokens, D]."""
    rows = unpack(tensor, num_tokens)
    return rows if tensor.basis is None else tensor.basis.leave(rows)


def unpack(tensor: QuantizedTensor, num_tokens: int | None = None) -> mx.array:
    """The first `num_tokens` rows (default all) in the basis that they are packed in: [1, Hk, num_tokens, D]."""
    plan, stop = tensor.plan, tensor.num_tokens if num_tokens is None else num_tokens
    packed, scales, biases = tensor.first(stop)
    if not plan.is_quantized:
        return packed
    if tensor.residual is not None:
        packed, scales, biases = _whole(packed, scales, biases, tensor.residual[:, :, :stop])
    if tensor.is_cheap_to_unpack:
        # MLX's CPU kernel unpacks value by value; whole bytes convert three times faster.
        codes = packed.view(mx.uint8).reshape(*scales.shape, plan.group_size).astype(mx.float32)
        full = (codes * scales[..., None] + biases[..., None]).flatten(-2)
    else:
        full = mx.dequantize(packed, scales, biases, group_size=plan.group_size, bits=tensor.bits).astype(tensor.dtype)
    return full[..., : plan.head_dim]


def join(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Concatenate along T by moving packed words: nothing is requantized."""
    first = tensors[0]
    columns = zip(*((t.packed, t.scales, t.biases, t.residual) for t in tensors), strict=True)
    joined: list[Any] = [None if c[0] is None else mx.concatenate(list(c), axis=2) for c in columns]
    return QuantizedTensor(first.plan, first.dtype, joined[0], joined[1], joined[2], first.basis, joined[3])


def checksum(arrays: Iterable[mx.array]) -> str:
    """A digest of every byte, in order."""
    return digest_buffers([buffer_of(array) for array in arrays])


def buffer_of(array: mx.array) -> memoryview:
    """Its bytes as they are in memory, not copied: what is written to them is in the array."""
    # bfloat16 has no buffer protocol; any 2-byte view shows the same bytes
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(plain, copy=False).reshape(-1).view(np.uint8).data
