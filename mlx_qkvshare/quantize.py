"""Packing K and V rows into `mx.quantize`'s affine layout, and back.

Letters: Hk KV heads, T tokens, D head dim, P padded dim, G group size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from .spec import TensorPlan


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """One layer's packed keys or values. Never written to after it is built.

    Shapes:
        packed: [1, Hk, T, P * bits / 32] uint32, or [1, Hk, T, D] in `dtype` when bits is 16
        scales, biases: [1, Hk, T, P / G] in `dtype`, or None when bits is 16
    """

    plan: TensorPlan
    dtype: mx.Dtype
    packed: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None

    @property
    def num_tokens(self) -> int:
        return self.packed.shape[2]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return tuple(a for a in (self.packed, self.scales, self.biases) if a is not None)

    @property
    def is_cheap_to_unpack(self) -> bool:
        """Whole bytes on a CPU: converting them costs less than `quantized_matmul`, which goes value by value."""
        return self.plan.bits == 8 and self.dtype == mx.float32 and mx.default_device().type == mx.cpu

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    def first(self, num_tokens: int) -> tuple[mx.array, Any, Any]:
        """`packed`, `scales` and `biases` of the first `num_tokens` rows; all of them are the arrays themselves."""
        whole = (self.packed, self.scales, self.biases)
        if num_tokens == self.num_tokens:
            return whole
        return tuple(None if a is None else a[:, :, :num_tokens] for a in whole)  # type: ignore[return-value]


def pad_last(x: mx.array, width: int, *, mode: Literal["constant", "edge"]) -> mx.array:
    """Widen the last axis of `x` to `width`: "constant" adds zeros, "edge" repeats the last channel."""
    missing = width - x.shape[-1]
    return x if missing == 0 else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], mode=mode)


def quantize(x: mx.array, plan: TensorPlan) -> QuantizedTensor:
    """Pack `x` [1, Hk, T, D] by `plan`. Lazy: evaluate before it is shared."""
    if not plan.is_quantized:
        return QuantizedTensor(plan, x.dtype, mx.contiguous(x))
    # Padding by the edge channel keeps the last group's range tight; its products meet zeros in the query.
    padded = pad_last(x, plan.padded_dim, mode="edge")
    packed, scales, biases = mx.quantize(padded, group_size=plan.group_size, bits=plan.bits)
    return QuantizedTensor(plan, x.dtype, packed, scales, biases)


def dequantize(tensor: QuantizedTensor, num_tokens: int | None = None) -> mx.array:
    """The first `num_tokens` rows (default all) in full precision: [1, Hk, num_tokens, D]."""
    plan, stop = tensor.plan, tensor.num_tokens if num_tokens is None else num_tokens
    packed, scales, biases = tensor.first(stop)
    if not plan.is_quantized:
        return packed
    if tensor.is_cheap_to_unpack:
        # MLX's CPU kernel unpacks value by value; whole bytes convert three times faster.
        codes = packed.view(mx.uint8).reshape(*scales.shape, plan.group_size).astype(mx.float32)
        full = (codes * scales[..., None] + biases[..., None]).flatten(-2)
    else:
        full = mx.dequantize(packed, scales, biases, group_size=plan.group_size, bits=plan.bits)
    return full[..., : plan.head_dim]


def join(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Concatenate along T by moving packed words: nothing is requantized."""
    first = tensors[0]
    columns = zip(*(t.arrays for t in tensors), strict=True)
    return QuantizedTensor(first.plan, first.dtype, *(mx.concatenate(list(c), axis=2) for c in columns))


def checksum(arrays: Iterable[mx.array]) -> str:
    """A digest of every byte, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        # bfloat16 has no buffer protocol; any 2-byte view shows the same bytes
        plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        digest.update(np.array(plain, copy=False).data)
    return digest.hexdigest()
