"""One part of the context against rows of queries: scores on its packed keys, outputs of its packed values.

Letters: Hk KV heads, M rows (query heads of one KV head, times queries, times sessions), D head dim.
"""

from __future__ import annotations

import functools
import math
import platform

import mlx.core as mx

from .quantize import Plane, QuantizedTensor, pad_last, planes, unpack

LOWEST = -3.0e38  # finite: infinity minus infinity would be NaN
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def exponential(x: mx.array) -> mx.array:
    """e to the power of `x`. MLX's own is not vectorized on x86, where the C library's power is twice as fast."""
    is_slow = _IS_X86 and x.dtype == mx.float32 and mx.default_device().type == mx.cpu
    return mx.power(math.e, x) if is_slow else mx.exp(x)


def compute_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """float32 on the CPU, whose half-precision quantized matmul is emulated and sums in half precision."""
    return mx.float32 if mx.default_device().type == mx.cpu else dtype


def _operands(tensor: QuantizedTensor, num_tokens: int, compute: mx.Dtype) -> list[Plane]:
    """Packed words, scales and biases to compute on, for at least `num_tokens` rows; of nested precision twice.

    Slicing is free on a GPU. The CPU copies a slice of packed words, so there the whole buffer is read and the
    surplus dropped from the result, unless more than half of it would be surplus.
    """
    is_sliced = mx.default_device().type == mx.gpu or num_tokens * 2 < tensor.num_tokens
    num_tokens = num_tokens if is_sliced else tensor.num_tokens
    packed, scales, biases = tensor.first(num_tokens)
    residual = None if tensor.residual is None else tensor.residual[:, :, :num_tokens]
    return planes(packed, scales.astype(compute), biases.astype(compute), residual)


def part_scores(rows: mx.array, keys: QuantizedTensor, num_tokens: int, *, is_unpacked: bool = False) -> mx.array:
    """`rows` [1, Hk, M, D] against one part's keys: [1, Hk, M, num_tokens]; `is_unpacked` unpacks them first."""
    plan, shift = keys.plan, None
    if keys.basis is not None:
        rows, shift = keys.basis.queries(rows), keys.basis.shift(rows)
    if is_unpacked or not plan.is_quantized or keys.is_cheap_to_unpack:
        scores = rows @ unpack(keys, num_tokens).astype(rows.dtype).swapaxes(-1, -2)
    else:
        rows = pad_last(rows, plan.padded_dim, mode="constant")
        products = (
            mx.quantized_matmul(rows, *plane, True, plan.group_size, plan.bits)[..., :num_tokens]
            for plane in _operands(keys, num_tokens, rows.dtype)
        )
        scores = functools.reduce(mx.add, products)
    return scores if shift is None else scores + shift.astype(scores.dtype)


def part_output(weights: mx.array, values: QuantizedTensor, num_tokens: int, *, is_unpacked: bool = False) -> mx.array:
    """`weights` [1, Hk, M, num_tokens] times one part's values: [1, Hk, M, Dv]; `is_unpacked` unpacks them first."""
    plan = values.plan
    if is_unpacked or not plan.is_quantized or values.is_cheap_to_unpack:
        output = weights @ unpack(values, num_tokens).astype(weights.dtype)
    else:
        operands = _operands(values, num_tokens, weights.dtype)
        weights = pad_last(weights, operands[0][0].shape[2], mode="constant")
        products = (
            mx.quantized_matmul(weights, *plane, False, plan.group_size, plan.bits)[..., : plan.head_dim]
            for plane in operands
        )
        output = functools.reduce(mx.add, products)
    return output if values.basis is None else values.basis.outputs(output)
