"""A cheap look at what packing does to attention, when a segment is sealed: where it does too much, bits are raised.

Letters: H query heads, Hk KV heads, R = H / Hk, n queries, T tokens of the segment, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from .parts import compute_dtype, part_output, part_scores
from .segment import KVBlock
from .spec import FULL_PRECISION_BITS, LayerPlan


class Looked(NamedTuple):
    """What a layer's attention was asked for a context's last n tokens: `queries` [1, H, n, D], not scaled yet."""

    queries: mx.array
    scale: float


@dataclass(frozen=True)
class Guard:
    """When packed rows are not good enough.

    max_error: of attention over the segment, the relative error of the outputs of its last tokens. Where recall was
        destroyed it was above 0.5, where nothing was lost below (benchmarks/README.md). A reconstruction error of keys
        tells nothing: it is lower for the model that breaks.
    max_outlier: where no query could be seen (latent attention, models outside the fused route): how far the widest
        group's range of keys may stand out of the median one at fewer than 8 bits.
    """

    max_error: float = 0.5
    max_outlier: float = 30.0

    def is_bad(self, error: float | None, outlier: float, plan: LayerPlan) -> bool:
        if error is not None:
            return not error <= self.max_error  # NaN is bad, too
        return plan.keys.bits < 8 and not outlier <= self.max_outlier


class Raised(NamedTuple):
    """A layer of a segment that the guard packed with `bits` instead of those asked for, and what it saw with these."""

    slot: int
    layer: int
    bits: int
    error: float | None
    outlier: float


def attention_error(looked: Looked, keys: mx.array, values: mx.array, blocks: Sequence[KVBlock]) -> float:
    """Relative error of the outputs of the last n tokens, over `keys` and `values` [1, Hk, T, D] as `blocks` have
    them, against themselves: root of the sum of squares over all heads."""
    num_kv_heads, num_tokens = keys.shape[1:3]
    num_queries = min(looked.queries.shape[2], num_tokens)
    compute = compute_dtype(keys.dtype)
    queries = looked.queries[:, :, -num_queries:].astype(compute) * looked.scale
    rows = queries.reshape(1, num_kv_heads, -1, queries.shape[-1])
    stops = mx.arange(num_tokens - num_queries, num_tokens)[:, None]
    is_seen = mx.tile(mx.arange(num_tokens) <= stops, (rows.shape[2] // num_queries, 1))

    def weights(scores: mx.array) -> mx.array:
        return mx.softmax(mx.where(is_seen, scores, mx.finfo(scores.dtype).min), axis=-1, precise=True)

    left, energy = mx.array(0.0), mx.array(0.0)
    # On a CPU packed rows are unpacked first: head by head, so that a seal's peak stays where it is.
    step = num_kv_heads if mx.default_device().type == mx.gpu else 1
    for first in range(0, num_kv_heads, step):
        heads = slice(first, first + step)
        of_heads = [KVBlock(block.keys.of_heads(heads), block.values.of_heads(heads)) for block in blocks]
        exact = weights(rows[:, heads] @ keys[:, heads].astype(compute).swapaxes(-1, -2))
        exact = (exact @ values[:, heads].astype(compute)).astype(mx.float32)
        scores = [part_scores(rows[:, heads], block.keys, block.num_rows) for block in of_heads]
        packed, start, error = weights(mx.concatenate(scores, axis=-1)), 0, exact
        for block in of_heads:
            part = packed[..., start : start + block.num_rows]
            error = error - part_output(part, block.values, block.num_rows).astype(mx.float32)
            start += block.num_rows
        left, energy = left + mx.sum(mx.square(error)), energy + mx.sum(mx.square(exact))
        mx.eval(left, energy)
    return float(mx.sqrt(left / mx.maximum(energy, 1e-30)).item())  # type: ignore[arg-type]


def key_outlier(blocks: Sequence[KVBlock]) -> float:
    """The widest range of a group of packed keys, in medians of all their ranges; 1 where none is packed."""
    scales = [block.keys.scales for block in blocks if block.keys.scales is not None]
    if not scales:
        return 1.0
    ranges = mx.abs(scales[-1].astype(mx.float32))
    return float((mx.max(ranges) / mx.maximum(mx.median(ranges), 1e-30)).item())  # type: ignore[arg-type]


def raised_bits(plan: LayerPlan) -> int:
    """The next bits to try: 8, then full precision."""
    return 8 if min(plan.keys.bits, plan.values.bits) < 8 else FULL_PRECISION_BITS
