"""`BatchLayerCache`: one attention layer's caches of several sessions that take a decode step together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .errors import InvalidValueError
from .layer_cache import LayerCache, placeholder
from .segment import SharedSegment


@dataclass(frozen=True, eq=False)
class SegmentGroup:
    """A segment and the sessions of a batch that read it: their rows in the batch, and how many tokens each reads."""

    segment: SharedSegment
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    def fold(self, rows: mx.array) -> mx.array:
        """The rows of these sessions, out of all [N, Hk, M, D], for one attention: [1, Hk, n * M, D]."""
        num_sessions, num_kv_heads, _, head_dim = rows.shape
        chosen = rows if len(self.rows) == num_sessions else rows[mx.array(self.rows)]
        return chosen.swapaxes(0, 1).reshape(1, num_kv_heads, -1, head_dim)

    def places(self, num_sessions: int) -> mx.array:
        """For each of all sessions its place among these, or n, the place behind them, if it is not one."""
        places = {row: place for place, row in enumerate(self.rows)}
        return mx.array([places.get(row, len(self.rows)) for row in range(num_sessions)])


def group_segments(caches: Sequence[LayerCache]) -> tuple[SegmentGroup, ...]:
    """Every distinct segment once, with all that read it; `caches` are one layer's, a row each.

    One that some read in full and others the base of is two.
    """
    readers: dict[SharedSegment, list[tuple[int, int]]] = {}
    for row, cache in enumerate(caches):
        for segment, length in cache.spans():
            readers.setdefault(segment, []).append((row, length))
    groups = []
    for segment, found in readers.items():
        rows, lengths = zip(*found, strict=True)
        groups.append(SegmentGroup(segment, rows, lengths))
    return tuple(groups)


class BatchLayerCache:
    """mlx-lm's cache contract for one token of each of N sessions. Lives for one step.

    Every session keeps its own `LayerCache`: new rows go to its own tail, nothing is padded or copied.
    `offset` is an array [N], as mlx-lm's batch caches have it, so that RoPE turns every row by its own.
    """

    def __init__(self, rows: Sequence[LayerCache], groups: dict[int, tuple[SegmentGroup, ...]], offset: mx.array):
        self.rows, self.offset = list(rows), offset
        self.layer, self.spec = rows[0].layer, rows[0].spec
        self._groups = groups  # by window; all layers of a step share this dictionary

    @property
    def groups(self) -> tuple[SegmentGroup, ...]:
        """The segments that layers of this window read in this step, found once for all of them."""
        if self.spec.window not in self._groups:
            self._groups[self.spec.window] = group_segments(self.rows)
        return self._groups[self.spec.window]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values` [N, Hk, 1, D], a row to every session; return tagged placeholders."""
        if keys.shape[0] != len(self.rows) or keys.shape[2] != 1:
            expected = f"({len(self.rows)}, Hk, 1, D)"
            raise InvalidValueError(f"[BatchLayerCache] keys: expected {expected}, got {tuple(keys.shape)}")
        for row, cache in enumerate(self.rows):
            cache.append(keys[row : row + 1], values[row : row + 1])
        longest = max(cache.num_keys for cache in self.rows)
        return placeholder(self, keys, longest, "k"), placeholder(self, values, longest, "v")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """One new token each: attention itself knows where a window begins, and `can_batch` that it is the layer's."""
        assert N == 1, N

    def mark_routed(self, num_rows: int) -> None:
        """Batches are made only of caches that are known to be routed."""

    @property
    def state(self) -> list[Any]:
        return [cache.state for cache in self.rows]


def bytes_read(caches: Sequence[Sequence[Any]]) -> int:
    """KV bytes that one step reads: every distinct segment once, and every private tail or state.

    `caches` holds each session's list of layers.
    """
    parts: dict[int, int] = {}
    tails = 0
    for layers in caches:
        for cache in layers:
            if not isinstance(cache, LayerCache):
                tails += sum(array.nbytes for array in cache.cache)  # a state
                continue
            for kv, rows in cache.parts():
                parts[id(kv)] = max(parts.get(id(kv), 0), kv.nbytes * rows // kv.num_rows)
            tails += sum(array.nbytes for array in cache.tail()) if cache.tail_tokens else 0
    return sum(parts.values()) + tails
