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
from .spec import FULL_PRECISION_BITS, LayerPlan, QuantSpec


class Looked(NamedTuple):
    """What a layer's attention was asked for a context's last n tokens: `queries` [1, H, n, D], not scaled yet."""

    queries: mx.array
    scale: float

    def last(self, num_queries: int) -> Looked:
        return Looked(self.queries[:, :, -num_queries:], self.scale)

    def rows(self, num_kv_heads: int, num_tokens: int, compute: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Scaled queries [1, Hk, M, D] of the last tokens of `num_tokens`, M = R * n, and what each sees: [M, T]."""
        num_queries = min(self.queries.shape[2], num_tokens)
        queries = self.queries[:, :, -num_queries:].astype(compute) * self.scale
        rows = queries.reshape(1, num_kv_heads, -1, queries.shape[-1])
        stops = mx.arange(num_tokens - num_queries, num_tokens)[:, None]
        return rows, mx.tile(mx.arange(num_tokens) <= stops, (rows.shape[2] // num_queries, 1))


def seen_weights(scores: mx.array, is_seen: mx.array) -> mx.array:
    """Attention weights of `scores` [.., M, T] on what is seen [M, T]."""
    return mx.softmax(mx.where(is_seen, scores, mx.finfo(scores.dtype).min), axis=-1, precise=True)


@dataclass(frozen=True)
class Guard:
    """When packed rows are not good enough.

    max_error: of attention over the segment, the relative error of the outputs of its last tokens. Where recall was
        destroyed it was above 0.5, where nothing was lost below (benchmarks/README.md). A reconstruction error of keys
        tells nothing: it is lower for the model that breaks.
    max_outlier: where no query could be seen (latent attention, models outside the fused route, `serve`): how far the
        loudest channel of keys may stand out of the median one at fewer than 8 bits in the model's own basis.
    """

    max_error: float = 0.5
    max_outlier: float = 30.0

    def is_due(self, quant: QuantSpec) -> bool:
        """Is there anything to fear? From 8 bits on, in a basis of their own, keys were never seen to lose anything,
        and a look costs a step of decoding."""
        return quant.is_packed and not (quant.fewest_bits >= 8 and quant.is_centred and quant.is_rotated)


class Raised(NamedTuple):
    """A layer of a segment that the guard packed with these bits instead of those asked for, and what it saw with
    those: the error of attention, or where no query was seen how far the loudest channel stands out."""

    slot: int
    layer: int
    k_bits: int
    v_bits: int
    error: float | None
    outlier: float | None


def attention_error(looked: Looked, keys: mx.array, values: mx.array, blocks: Sequence[KVBlock]) -> float:
    """Relative error of the outputs of the last n tokens, over `keys` and `values` [1, Hk, T, D] as `blocks` have
    them, against themselves: root of the sum of squares over all heads."""
    (num_kv_heads, num_tokens), compute = keys.shape[1:3], compute_dtype(keys.dtype)
    rows, is_seen = looked.rows(num_kv_heads, num_tokens, compute)
    left, energy = mx.array(0.0), mx.array(0.0)
    # On a CPU packed rows are unpacked first: head by head, so that a seal's peak stays where it is.
    step = num_kv_heads if mx.default_device().type == mx.gpu else 1
    for first in range(0, num_kv_heads, step):
        heads = slice(first, first + step)
        of_heads = [KVBlock(block.keys.of_heads(heads), block.values.of_heads(heads)) for block in blocks]
        exact = seen_weights(rows[:, heads] @ keys[:, heads].astype(compute).swapaxes(-1, -2), is_seen)
        exact = (exact @ values[:, heads].astype(compute)).astype(mx.float32)
        scores = [part_scores(rows[:, heads], block.keys, block.num_rows) for block in of_heads]
        packed, start, error = seen_weights(mx.concatenate(scores, axis=-1), is_seen), 0, exact
        for block in of_heads:
            part = packed[..., start : start + block.num_rows]
            error = error - part_output(part, block.values, block.num_rows).astype(mx.float32)
            start += block.num_rows
        left, energy = left + mx.sum(mx.square(error)), energy + mx.sum(mx.square(exact))
        mx.eval(left, energy)
    return float(mx.sqrt(left / mx.maximum(energy, 1e-30)).item())  # type: ignore[arg-type]


def channel_outlier(keys: mx.array) -> float:
    """The loudest channel of `keys` [1, Hk, T, D], in medians of all channels."""
    channels = mx.max(mx.abs(keys.astype(mx.float32)), axis=(0, 2)).flatten()
    return float((mx.max(channels) / mx.maximum(mx.median(channels), 1e-30)).item())  # type: ignore[arg-type]


def raised_bits(plan: LayerPlan) -> int:
    """The next bits to try: 8, then full precision."""
    return 8 if min(plan.keys.bits, plan.values.bits) < 8 else FULL_PRECISION_BITS
