"""The kernel path of attention: `attend_part` on every segment and tail, then `merge_state` over all of them.

Letters: N sessions, n of them in one group, H query heads, Hk KV heads, R = H / Hk, L new tokens, S splits, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from .batch_cache import BatchLayerCache, SegmentGroup, group_segments
from .kernels import merge_state
from .layer_cache import STACKED_TOKENS, LayerCache, stack_tails
from .part_kernel import Partial, attend_part
from .quantize import QuantizedTensor
from .spec import FULL_PRECISION_BITS, TensorPlan


def attend_with_kernel(
    queries: mx.array, cache: LayerCache | BatchLayerCache, *, scale: float, sinks: mx.array | None
) -> mx.array:
    """Causal attention of the last L tokens of one session, or of one token of every session of a batch.

    Shapes:
        queries: [N, H, L, D]; sinks: [H] logits without a value
        returns: [N, H, L, Dv]
    """
    num_sessions, num_heads, num_queries, head_dim = queries.shape
    caches = cache.rows if isinstance(cache, BatchLayerCache) else [cache]
    groups = cache.groups if isinstance(cache, BatchLayerCache) else group_segments(caches)
    num_kv_heads = cache.spec.n_kv_heads
    rows = (queries * scale).reshape(num_sessions, num_kv_heads, -1, head_dim)
    partials = [_group_partial(rows, group, cache.layer) for group in groups]
    partials.extend(_tail_partials(rows, caches, num_queries))
    if sinks is not None:
        maxima = mx.broadcast_to(
            sinks.reshape(num_kv_heads, -1, 1), (num_kv_heads, num_heads // num_kv_heads, num_queries)
        )
        maxima = mx.broadcast_to(maxima.astype(mx.float32), (num_sessions, *maxima.shape)).reshape(1, -1)
        empty = mx.zeros_like(partials[0].outputs[:1])
        partials.append(Partial(maxima, mx.ones_like(maxima), empty))
    maxima, sums, outputs = (mx.concatenate(list(column)) for column in zip(*partials, strict=True))
    merged = merge_state(maxima, sums, outputs, queries.dtype)
    return merged.reshape(num_sessions, num_heads, num_queries, -1)


def _group_partial(rows: mx.array, group: SegmentGroup, layer: int) -> Partial:
    """One launch for all sessions that read the segment; the entries of the others are marked empty."""
    num_sessions, num_kv_heads, per_head, _ = rows.shape
    kv, count = group.segment.layers[layer], len(group.rows)
    spans = mx.array([[[0, length] for length in group.lengths for _ in range(per_head)]], mx.int32)
    partial = attend_part(group.fold(rows), kv.keys, kv.values, spans, max(group.lengths))

    def unfold(array: mx.array) -> mx.array:
        """[S, Hk * n * R * L, ..] to [S, N * Hk * R * L, ..]."""
        array = array.reshape(array.shape[0], num_kv_heads, count, per_head, *array.shape[2:]).swapaxes(1, 2)
        if count < num_sessions:
            array = mx.concatenate([array, mx.zeros_like(array[:, :1])], axis=1)[:, group.places(num_sessions)]
        return array.reshape(array.shape[0], num_sessions * num_kv_heads * per_head, *array.shape[4:])

    return Partial(*map(unfold, partial))


def _tail_partials(rows: mx.array, caches: Sequence[LayerCache], num_queries: int) -> Iterator[Partial]:
    """The private tails: side by side in one launch while they are short, else one after another."""
    lengths = [cache.tail_tokens for cache in caches]
    per_head = rows.shape[2]

    def spans(length: int) -> list[list[int]]:
        """Row (r, l) sees all up to its own token."""
        return [[0, length - num_queries + row % num_queries + 1] for row in range(per_head)]

    if len(caches) == 1 or max(lengths) <= STACKED_TOKENS:
        keys, values = (_plain(stack_tails(caches, role)) for role in ("keys", "values"))
        yield attend_part(rows, keys, values, mx.array([spans(n) for n in lengths], mx.int32), max(lengths))
        return
    each = [
        attend_part(
            rows[row : row + 1], _plain(cache.keys), _plain(cache.values), mx.array([spans(length)], mx.int32), length
        )
        for row, (cache, length) in enumerate(zip(caches, lengths, strict=True))
    ]
    num_splits = max(partial.maxima.shape[0] for partial in each)

    def padded(array: mx.array) -> mx.array:
        missing = num_splits - array.shape[0]
        return mx.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array

    yield Partial(*(mx.concatenate([padded(a) for a in column], axis=1) for column in zip(*each, strict=True)))


def _plain(rows: mx.array | None) -> QuantizedTensor:
    """Full-precision rows [B, Hk, T, D] as the kernel takes them."""
    assert rows is not None
    head_dim = rows.shape[-1]
    return QuantizedTensor(TensorPlan(head_dim, FULL_PRECISION_BITS, head_dim, head_dim), rows.dtype, rows)
