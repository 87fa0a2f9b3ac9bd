"""Attention of several sessions at once, segment by segment: a shared segment is read once for all that hold it.

The algebra is FlashInfer's cascade attention (arXiv 2501.01005) and Hydragen's (arXiv 2402.05099): rows of
all sessions attend a shared part together, each session its own tail, and partial results are merged by
running maximum and sum.

Letters: N sessions, n of them in one group, H query heads, Hk KV heads, R = H / Hk, S tokens of one part,
D head dim, Dv value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import mlx.core as mx

from .batch_cache import BatchLayerCache, SegmentGroup
from .kernels import merge_state_ops
from .layer_cache import STACKED_TOKENS, layer_kv, stack_tails
from .parts import LOWEST, compute_dtype, exponential, part_output, part_scores


class _Partial(NamedTuple):
    """Maxima and sums [N, Hk, R] and outputs [N, Hk, R, Dv], not normalized; a sum of 0 marks no tokens."""

    maxima: mx.array
    sums: mx.array
    outputs: mx.array


def attend_together(
    queries: mx.array, batch: BatchLayerCache, *, scale: float, sinks: mx.array | None, unpack: bool
) -> mx.array:
    """One query per session over its segments and its tail.

    Shapes:
        queries: [N, H, 1, D]; sinks: [H] logits without a value
        returns: [N, H, 1, Dv]

    With `unpack` each segment's layer is dequantized, transiently and once for all sessions, which pays
    for many rows; else `quantized_matmul` reads the packed bytes.
    """
    num_sessions, num_heads, _, head_dim = queries.shape
    num_kv_heads = batch.spec.n_kv_heads
    compute = compute_dtype(queries.dtype)
    rows = (queries.astype(compute) * scale).reshape(num_sessions, num_kv_heads, -1, head_dim)
    partials = [partial for group in batch.groups for partial in _group_partials(rows, group, batch, unpack)]
    partials.append(_tail_partial(rows, batch))
    if sinks is not None:
        like = partials[0]
        maxima = mx.broadcast_to(sinks.astype(compute).reshape(num_kv_heads, -1), like.maxima.shape)
        partials.append(_Partial(maxima, mx.ones_like(like.sums), mx.zeros_like(like.outputs)))
    maxima, sums = (mx.stack([p[i].flatten() for p in partials]) for i in (0, 1))
    outputs = mx.stack([p.outputs.reshape(-1, p.outputs.shape[-1]) for p in partials])
    merged = merge_state_ops(maxima, sums, outputs, queries.dtype)
    return merged.reshape(num_sessions, num_heads, 1, -1)


def _group_partials(rows: mx.array, group: SegmentGroup, batch: BatchLayerCache, unpack: bool) -> Iterator[_Partial]:
    """The rows of the sessions that read one segment, all at once, block by block; other sessions' entries are marked
    empty."""
    num_sessions, num_kv_heads, gqa_factor, _ = rows.shape
    kv, count, folded = layer_kv(group.segment, batch.layer), len(group.rows), group.fold(rows)
    first = group.segment.stop - kv.num_rows  # the token of the block's first row
    stops = [group.segment.start + length for length in group.lengths]
    oldest = [batch.rows[row].oldest for row in group.rows]
    for block, length in kv.first(max(stops) - first):
        begins, ends = ([min(max(0, token - first), length) for token in tokens] for tokens in (oldest, stops))
        first += block.num_rows
        scores = part_scores(folded, block.keys, length, is_unpacked=unpack)
        is_partly_seen = min(ends) < length or max(begins) > 0
        is_seen = _between(begins, ends, length, gqa_factor) if is_partly_seen else None
        maxima, weights, sums = _exponentials(scores if is_seen is None else mx.where(is_seen, scores, LOWEST))
        if is_seen is not None and any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            # A row that sees nothing here has its maximum at LOWEST and weights of 1.
            weights = mx.where(is_seen, weights, 0)
            sums = mx.sum(weights.astype(mx.float32), axis=-1, keepdims=True)
        outputs = part_output(weights, block.values, length, is_unpacked=unpack)
        shape = (num_kv_heads, count, gqa_factor)
        partial = _Partial(
            maxima.reshape(shape).swapaxes(0, 1),
            sums.reshape(shape).swapaxes(0, 1),
            outputs.reshape(*shape, -1).swapaxes(0, 1),
        )
        if count < num_sessions:
            index = group.places(num_sessions)
            partial = _Partial(*(mx.concatenate([array, mx.zeros_like(array[:1])])[index] for array in partial))
        yield partial


def _between(starts: list[int], stops: list[int], length: int, gqa_factor: int) -> mx.array:
    """Which of `length` tokens each session's rows see: [n * R, length]."""
    token, begin, end = mx.arange(length), mx.array(starts)[:, None], mx.array(stops)[:, None]
    return mx.repeat((token >= begin) & (token < end), gqa_factor, axis=0)


def _tail_partial(rows: mx.array, batch: BatchLayerCache) -> _Partial:
    """Every session over its own private tail. Each holds one token at least, the one of this step."""
    if (longest := max(cache.tail_rows for cache in batch.rows)) <= STACKED_TOKENS:
        return _short_tails(rows, batch, longest)
    return _long_tails(rows, batch)


def _short_tails(rows: mx.array, batch: BatchLayerCache, longest: int) -> _Partial:
    """Tails of a few hundred rows are copied side by side: that costs less than operations for every session."""

    def side_by_side(role: Literal["keys", "values"]) -> mx.array:
        return stack_tails(batch.rows, role)[:, :, :longest].astype(rows.dtype)

    scores = rows @ side_by_side("keys").swapaxes(-1, -2)
    starts = [max(0, cache.oldest - cache.tail_start) for cache in batch.rows]
    is_seen = _between(starts, [cache.tail_rows for cache in batch.rows], longest, 1)[:, None, None]
    maxima, weights, sums = _exponentials(mx.where(is_seen, scores, LOWEST))
    return _Partial(maxima[..., 0], sums[..., 0], weights @ side_by_side("values"))


def _long_tails(rows: mx.array, batch: BatchLayerCache) -> _Partial:
    tails = [cache.tail() for cache in batch.rows]  # of a window what is seen
    longest = max(keys.shape[2] for keys, _ in tails)
    scores = []
    for row, (keys, _) in enumerate(tails):
        found = rows[row : row + 1] @ keys.astype(rows.dtype).swapaxes(-1, -2)
        missing = longest - found.shape[-1]
        scores.append(mx.pad(found, [(0, 0)] * 3 + [(0, missing)], constant_values=LOWEST) if missing else found)
    maxima, weights, sums = _exponentials(mx.concatenate(scores))
    outputs = [
        weights[row : row + 1, ..., : values.shape[2]] @ values.astype(rows.dtype)
        for row, (_, values) in enumerate(tails)
    ]
    return _Partial(maxima[..., 0], sums[..., 0], mx.concatenate(outputs))


def _exponentials(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Row maxima [.., 1], exp(score - maximum) in the scores' dtype, and its sums [.., 1] in float32."""
    maxima = mx.max(scores, axis=-1, keepdims=True)
    weights = exponential(scores - maxima)
    return maxima.astype(mx.float32), weights, mx.sum(weights.astype(mx.float32), axis=-1, keepdims=True)
