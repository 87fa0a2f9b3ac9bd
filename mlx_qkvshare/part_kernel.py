"""`attend_part`: the kernel that attends one part of the context for many rows at once, and its ops twin.

Letters: B batch, Hk KV heads, M rows of a KV head (query heads, times queries, times sessions), T tokens of the part,
Dk and Dv head dims, S splits of the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from .kernels import build_kernel
from .parts import LOWEST, exponential, part_output, part_scores
from .quantize import QuantizedTensor
from .spec import TensorPlan

THREADGROUP_BYTES = 32 * 1024  # Metal's limit
_TILE_TOKENS = 32
_SPLIT_TOKENS = 256
_MAX_SPLITS = 64
_BLOCK_ROWS = 16  # rows of a thread, times four columns in registers
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # few, as each is a kernel of its own


class Partial(NamedTuple):
    """Softmax attention over a part, not normalized. A sum of 0 marks a row that saw no token.

    Shapes: maxima and sums [S, B * Hk * M] float32; outputs [S, B * Hk * M, Dv] float32
    """

    maxima: mx.array
    sums: mx.array
    outputs: mx.array


@dataclass(frozen=True)
class TilePlan:
    """How many rows a threadgroup takes, and how its threads share them; see `metal/attend_part.metal`."""

    rows: int
    blocks: int
    simdgroups: int
    threadgroup_bytes: int

    @classmethod
    def choose(cls, keys: TensorPlan, values: TensorPlan, num_rows: int) -> TilePlan:
        """The smallest number of rows that takes all `num_rows` at once, or the largest that fits a threadgroup."""
        fitting = [plan for rows in _ROWS if (plan := cls._of(keys, values, rows)).is_possible]
        return next((plan for plan in fitting if plan.rows >= num_rows), fitting[-1])

    @property
    def is_possible(self) -> bool:
        return self.threadgroup_bytes <= THREADGROUP_BYTES and self.simdgroups <= 8

    @classmethod
    def _of(cls, keys: TensorPlan, values: TensorPlan, rows: int) -> TilePlan:
        k, v = _packing(keys, 32), _packing(values, 4)
        blocks, units, chunks = -(-rows // _BLOCK_ROWS), k.dim // 32, v.dim // 4
        share = units if units <= 4 else -(-units // 2)
        simdgroups = max(share, -(-chunks * blocks // 32))
        row_words = max(k.row_words, v.row_words)
        groups = max(k.dim // k.group, v.dim // v.group)
        quads = -(-rows // 4)  # rows come four at a time
        scores = 16 * _TILE_TOKENS * (quads | 1)
        writers = min(simdgroups, units)
        scores *= writers if writers * scores <= 4096 else 1
        arrays = (
            *(4 * rows * k.dim, 16 * units * quads),  # queries and their sums
            *(scores, 16 * quads),  # scores, and factors of the rows
            *(4 * (_TILE_TOKENS * row_words + 1), 4 * _TILE_TOKENS * groups, 4 * _TILE_TOKENS * groups),  # the stage
            16 * 32 * simdgroups,  # outputs of the threads
        )
        return cls(rows, blocks, simdgroups, sum(-(-size // 16) * 16 for size in arrays))


class _Packing(NamedTuple):
    bits: int
    group: int
    dim: int
    row_words: int  # of a staged row, odd


def _packing(plan: TensorPlan, multiple: int) -> _Packing:
    """What the kernel's template needs to know; rows that are not packed are padded to `multiple` in registers."""
    if plan.is_quantized:
        return _Packing(plan.bits, plan.group_size, plan.padded_dim, plan.padded_dim * plan.bits // 32 | 1)
    dim = -(-plan.head_dim // multiple) * multiple
    return _Packing(16, dim, dim, 1)


def attend_part(
    rows: mx.array,
    keys: QuantizedTensor,
    values: QuantizedTensor,
    spans: mx.array,
    num_tokens: int,
    *,
    soft_cap: float = 0.0,
) -> Partial:
    """Attend the first `num_tokens` tokens of a part; every packed byte is read once for up to 32 rows.

    (At head dim 128; with more rows arithmetic takes far longer than a second reading.)

    Shapes:
        rows: [B, Hk, M, Dk], scaled queries
        keys, values: of the part, `packed` [B, Hk, T, ..]; strided views are read as they are
        spans: [B, M, 2] int32: the first token that a row sees, and the first behind it that it does not
    """
    basis, values_basis, shift = keys.basis, values.basis, None
    if basis is not None:
        assert soft_cap == 0 or basis.centre is None, "capped scores cannot be shifted afterwards"
        rows, shift = basis.queries(rows), basis.shift(rows)
    batch, num_heads, num_rows, _ = rows.shape
    k, v = _packing(keys.plan, 32), _packing(values.plan, 4)
    tile = TilePlan.choose(keys.plan, values.plan, num_rows)
    num_splits = max(1, min(-(-num_tokens // _SPLIT_TOKENS), _MAX_SPLITS))
    threads, groups, total = 32 * tile.simdgroups, -(-num_rows // tile.rows), batch * num_heads * num_rows
    width = values.plan.head_dim
    maxima, sums, outputs = build_kernel("attend_part", _INPUTS, ("maxima", "sums", "outputs"))(
        inputs=[
            mx.contiguous(rows),
            *_operands(keys),
            *_operands(values),
            mx.contiguous(spans),
            mx.array(num_tokens, mx.int32),
            mx.array(num_rows, mx.int32),
            mx.array(soft_cap, mx.float32),
        ],
        template=[
            ("T", rows.dtype),
            ("ROWS", tile.rows),
            ("BLOCKS", tile.blocks),
            ("SIMDGROUPS", tile.simdgroups),
            ("K_BITS", k.bits),
            ("K_GROUP", k.group),
            ("K_DIM", k.dim),
            ("K_WIDTH", keys.plan.head_dim),
            ("V_BITS", v.bits),
            ("V_GROUP", v.group),
            ("V_DIM", v.dim),
            ("V_WIDTH", width),
        ],
        grid=(threads * num_splits, batch * num_heads, groups),
        threadgroup=(threads, 1, 1),
        output_shapes=[(num_splits, total), (num_splits, total), (num_splits, total, width)],
        output_dtypes=[mx.float32] * 3,
    )
    if shift is not None:
        maxima = maxima + shift.reshape(1, total)
    return Partial(maxima, sums, outputs if values_basis is None else values_basis.outputs(outputs))


_INPUTS = (
    "queries",
    *("keys", "key_scales", "key_biases"),
    *("values", "value_scales", "value_biases"),
    *("spans", "num_tokens", "num_rows", "soft_cap"),
)


def _operands(tensor: QuantizedTensor) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases; for what is not packed the kernel looks at the first only."""
    assert tensor.residual is None, "the kernel reads one plane of codes: hand it the base, or take another route"
    if tensor.scales is None or tensor.biases is None:
        return tensor.packed, tensor.packed, tensor.packed
    return tensor.packed, tensor.scales, tensor.biases


def attend_part_ops(
    rows: mx.array,
    keys: QuantizedTensor,
    values: QuantizedTensor,
    spans: mx.array,
    num_tokens: int,
    *,
    soft_cap: float = 0.0,
) -> Partial:
    """The ops twin of `attend_part`, in one split."""
    rows = rows.astype(mx.float32)
    scores = part_scores(rows, keys, num_tokens, is_unpacked=True)
    if soft_cap > 0:
        scores = soft_cap * mx.tanh(scores / soft_cap)
    token, bounds = mx.arange(num_tokens), spans[:, None]
    is_seen = (token >= bounds[..., :1]) & (token < bounds[..., 1:])
    scores = mx.where(is_seen, scores, LOWEST)
    maxima = mx.max(scores, axis=-1, keepdims=True)
    weights = mx.where(is_seen, exponential(scores - maxima), 0)
    outputs = part_output(weights, values, num_tokens, is_unpacked=True)
    total = math.prod(rows.shape[:3])
    return Partial(maxima.reshape(1, total), mx.sum(weights, axis=-1).reshape(1, total), outputs.reshape(1, total, -1))
