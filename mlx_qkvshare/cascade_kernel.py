"""The kernel path of attention: `attend_part` on every segment and tail, then `merge_state` over all of them.

Letters: N sessions, n of them in one group, H query heads, Hk KV heads, R = H / Hk, L new tokens, M = R * L rows,
S splits, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from .batch_cache import BatchLayerCache, SegmentGroup, group_segments
from .kernels import merge_state, merge_state_ops
from .layer_cache import STACKED_TOKENS, LayerCache, layer_kv, stack_tails
from .part_kernel import Partial, attend_part, attend_part_ops
from .quantize import QuantizedTensor
from .spec import full_precision


def attend_with_kernel(
    queries: mx.array,
    cache: LayerCache | BatchLayerCache,
    *,
    scale: float,
    sinks: mx.array | None,
    window: int | None = None,
    soft_cap: float = 0.0,
) -> mx.array:
    """Causal attention of the last L tokens of one session, or of one token of every session of a batch.

    Shapes:
        queries: [N, H, L, D]; sinks: [H] logits without a value
        returns: [N, H, L, Dv]

    With `window` a token sees itself and the `window - 1` tokens before it: of what no row sees nothing is read. With
    `soft_cap` scores become cap * tanh(score / cap), the sinks apart.
    """
    part = functools.partial(attend_part, soft_cap=soft_cap)
    return _Cascade(part, merge_state, window).attend(queries, cache, scale, sinks)


def attend_with_kernel_ops(
    queries: mx.array,
    cache: LayerCache | BatchLayerCache,
    *,
    scale: float,
    sinks: mx.array | None,
    window: int | None = None,
    soft_cap: float = 0.0,
) -> mx.array:
    """The ops twin of `attend_with_kernel`: the same parts, by the twins of its two kernels."""
    part = functools.partial(attend_part_ops, soft_cap=soft_cap)
    return _Cascade(part, merge_state_ops, window).attend(queries, cache, scale, sinks)


class _Cascade(NamedTuple):
    """The way from parts to the whole: what attends one part, what merges them, and how far back tokens see."""

    part: Callable[[mx.array, QuantizedTensor, QuantizedTensor, mx.array, int], Partial]
    merge: Callable[[mx.array, mx.array, mx.array, mx.Dtype], mx.array]
    window: int | None

    def attend(
        self, queries: mx.array, cache: LayerCache | BatchLayerCache, scale: float, sinks: mx.array | None
    ) -> mx.array:
        num_sessions, num_heads, num_queries, head_dim = queries.shape
        caches = cache.rows if isinstance(cache, BatchLayerCache) else [cache]
        groups = cache.groups if isinstance(cache, BatchLayerCache) else group_segments(caches)
        num_kv_heads = cache.spec.n_kv_heads
        rows = (queries * scale).reshape(num_sessions, num_kv_heads, -1, head_dim)
        stops = [it.offset for it in caches]
        partials = [*self._segments(rows, groups, cache.layer, stops, num_queries)]
        partials.extend(self._tails(rows, caches, stops, num_queries))
        if sinks is not None:
            maxima = mx.broadcast_to(
                sinks.reshape(num_kv_heads, -1, 1), (num_kv_heads, num_heads // num_kv_heads, num_queries)
            )
            maxima = mx.broadcast_to(maxima.astype(mx.float32), (num_sessions, *maxima.shape)).reshape(1, -1)
            empty = mx.zeros_like(partials[0].outputs[:1])
            partials.append(Partial(maxima, mx.ones_like(maxima), empty))
        maxima, sums, outputs = (mx.concatenate(list(column)) for column in zip(*partials, strict=True))
        merged = self.merge(maxima, sums, outputs, queries.dtype)
        return merged.reshape(num_sessions, num_heads, num_queries, -1)

    def _segments(
        self, rows: mx.array, groups: Sequence[SegmentGroup], layer: int, stops: Sequence[int], num_queries: int
    ) -> Iterator[Partial]:
        """One launch for all sessions that see something of a segment; the entries of the others are marked empty."""
        num_sessions, num_kv_heads, num_rows, _ = rows.shape
        for group in groups:
            segment, kv = group.segment, layer_kv(group.segment, layer)
            start = segment.stop - kv.num_rows
            for block in kv.blocks:
                ends = (min(segment.start + length - start, block.num_rows) for length in group.lengths)
                reads = [(start, max(0, end), stops[row]) for row, end in zip(group.rows, ends, strict=True)]
                start += block.num_rows
                sight = _sight(tuple(reads), num_queries, num_rows, self.window)
                if sight is None:
                    continue
                seeing = _chosen(group, sight.places)
                keys, values = (_tokens_from(tensor, sight.first) for tensor in (block.keys, block.values))
                spans = sight.spans.reshape(1, -1, 2)
                partial = self.part(seeing.fold(rows), keys, values, spans, sight.num_tokens)
                shape, places = (num_kv_heads, len(seeing.rows), num_rows), seeing.places(num_sessions)
                yield Partial(*(_unfold(array, shape, places) for array in partial))

    def _tails(
        self, rows: mx.array, caches: Sequence[LayerCache], stops: Sequence[int], num_queries: int
    ) -> Iterator[Partial]:
        """The private tails: side by side in one launch while they are short, else one after another."""
        reads = [(cache.tail_start, cache.tail_rows, stop) for cache, stop in zip(caches, stops, strict=True)]
        together = len(caches) == 1 or max(cache.tail_rows for cache in caches) <= STACKED_TOKENS
        steps = [slice(None)] if together else [slice(row, row + 1) for row in range(len(caches))]
        each = []
        for step in steps:
            sight = _sight(tuple(reads[step]), num_queries, rows.shape[2], self.window)
            if sight is None:  # only a session that decodes alone may have no tail
                return
            tails = (_plain(stack_tails(caches[step], role)) for role in ("keys", "values"))
            keys, values = (_tokens_from(tail, sight.first) for tail in tails)
            each.append(self.part(rows[step], keys, values, sight.spans, sight.num_tokens))
        yield each[0] if together else _side_by_side(each)


class _Sight(NamedTuple):
    """What the rows of several sessions see of a part.

    `places`: of those sessions that see a token of it at all; `first`: the first token that any of their rows sees;
    `num_tokens`: from there on up to the last that any sees; `spans` [n, M, 2] int32 count from `first`, too.
    """

    places: tuple[int, ...]
    first: int
    num_tokens: int
    spans: mx.array


@functools.lru_cache(maxsize=64)  # the same for every layer of a step
def _sight(
    reads: tuple[tuple[int, int, int], ...], num_queries: int, num_rows: int, window: int | None
) -> _Sight | None:
    """What rows (r, l) see of a part, None if nothing.

    `reads` hold for every session where the part starts, how many of its tokens it reads, and where it stops itself.
    """
    assert window is None or window > 0, window
    seen = []
    for start, length, stop in reads:
        ends = range(stop - num_queries + 1 - start, stop + 1 - start)
        begins = [0 if window is None else min(max(end - window, 0), length) for end in ends]
        seen.append([(begin, max(begin, min(end, length))) for begin, end in zip(begins, ends, strict=True)])
    places = tuple(place for place, spans in enumerate(seen) if any(begin < end for begin, end in spans))
    if not places:
        return None
    spans = [(begin, end) for place in places for begin, end in seen[place] if begin < end]
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    repeats = num_rows // num_queries
    shifted = [[(begin - first, end - first) for begin, end in seen[place]] * repeats for place in places]
    return _Sight(places, first, last - first, mx.array(shifted, mx.int32))


def _chosen(group: SegmentGroup, places: tuple[int, ...]) -> SegmentGroup:
    """The group of only those of its sessions that stand at `places` in it."""
    if len(places) == len(group.rows):
        return group
    rows, lengths = (tuple(column[place] for place in places) for column in (group.rows, group.lengths))
    return SegmentGroup(group.segment, rows, lengths)


def _unfold(array: mx.array, shape: tuple[int, int, int], places: mx.array) -> mx.array:
    """[S, Hk * n * M, ..] to [S, N * Hk * M, ..]; `shape` is (Hk, n, M), `places` [N] are as of `SegmentGroup`."""
    array = array.reshape(array.shape[0], *shape, *array.shape[2:]).swapaxes(1, 2)
    if shape[1] < places.size:
        array = mx.concatenate([array, mx.zeros_like(array[:, :1])], axis=1)[:, places]
    return array.flatten(1, 3)


def _side_by_side(partials: Sequence[Partial]) -> Partial:
    """Partials of one session each, of different numbers of splits, as one of all sessions."""
    num_splits = max(partial.maxima.shape[0] for partial in partials)

    def padded(array: mx.array) -> mx.array:
        missing = num_splits - array.shape[0]
        return mx.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array

    return Partial(*(mx.concatenate([padded(a) for a in column], axis=1) for column in zip(*partials, strict=True)))


def _tokens_from(tensor: QuantizedTensor, first: int) -> QuantizedTensor:
    """The tokens from `first` on, as views."""
    if first == 0:
        return tensor
    packed, scales, biases, residual = (
        array if array is None else array[:, :, first:]
        for array in (tensor.packed, tensor.scales, tensor.biases, tensor.residual)
    )
    assert packed is not None
    return QuantizedTensor(tensor.plan, tensor.dtype, packed, scales, biases, tensor.basis, residual)


def _plain(rows: mx.array) -> QuantizedTensor:
    """Full-precision rows [B, Hk, T, D] as the kernel takes them."""
    return QuantizedTensor(full_precision(rows.shape[-1]), rows.dtype, rows)
