"""The manager's table of segments: a tree matched by tokens, evicted from its leaves, compacted by moving words.

A segment's parent is the one that it was computed behind. The tree is matched as a radix tree is
(SGLang, arXiv 2312.07104), but a child may leave its parent at any token, since views have lengths.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from .errors import HandoffError, InvalidValueError
from .policy import Access
from .quantize import join
from .segment import (
    KVBlock,
    LayerKV,
    LayerState,
    SegmentView,
    SharedSegment,
    layers_checksum,
    readable,
    residuals_checksum,
    seal_keys,
    truncate_views,
)
from .spec import CacheSpec


@dataclass(frozen=True)
class SharedSlot:
    """An allocated place for a segment of `num_tokens` tokens: its id and exact packed bytes."""

    slot: int
    num_tokens: int
    nbytes: int


class Sealed(NamedTuple):
    """What tells a sealed segment from others at its place, but for its `origins`."""

    token_ids: tuple[int, ...]
    checksum: str
    residual_checksum: str | None
    own_domains: frozenset[str]
    domains: frozenset[str]
    origins: tuple[str, ...] = ()

    @classmethod
    def of(cls, segment: SharedSegment) -> Sealed:
        return cls(*(getattr(segment, name) for name in cls._fields))

    @property
    def keys(self) -> set[str]:
        """See `seal_keys`."""
        return seal_keys((self.checksum, *self.origins), self.own_domains, self.domains)

    def is_like(self, other: Sealed) -> bool:
        return self[:-1] == other[:-1]


@dataclass(eq=False)
class Record:
    """One row of the table. `segment` is None between allocation and store; `holders` are the manager's ids."""

    slot: SharedSlot
    counted_bytes: int
    parent: int | None = None
    segment: SharedSegment | None = None
    children: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)
    last_used: int = 0

    @property
    def is_evictable(self) -> bool:
        return self.segment is not None and not self.holders

    @property
    def domains(self) -> frozenset[str]:
        """Those of the segment; none while nothing is stored."""
        return frozenset() if self.segment is None else self.segment.domains

    @property
    def residual_bytes(self) -> int:
        return 0 if self.segment is None else self.segment.residual_bytes

    def put(self, segment: SharedSegment) -> None:
        """Store `segment`, and count its bytes."""
        self.slot = dataclasses.replace(self.slot, nbytes=segment.nbytes)
        self.segment, self.counted_bytes = segment, segment.nbytes


class SegmentTable:
    """Slots by id. Not locked: the manager locks."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.records: dict[int, Record] = {}
        self.roots: set[int] = set()
        self._moved: dict[int, tuple[int, int]] = {}  # compacted slot -> (slot that took its words, first token in it)
        self._ids = itertools.count(1)  # never reused: a stale id can only be missing, never another segment

    def record(self, slot: int) -> Record:
        record = self.records.get(slot)
        if record is None:
            raise InvalidValueError(f"[SegmentTable] slot {slot}: expected a live slot, got a freed one")
        return record

    def siblings(self, record: Record) -> set[int]:
        return self.roots if record.parent is None else self.records[record.parent].children

    def allocate(self, num_tokens: int, nbytes: int, counted_bytes: int) -> SharedSlot:
        slot = SharedSlot(next(self._ids), num_tokens, nbytes)
        self.records[slot.slot] = Record(slot, counted_bytes)
        return slot

    def fill(self, record: Record, segment: SharedSegment, parent: int | None) -> None:
        record.segment, record.counted_bytes, record.parent = segment, record.slot.nbytes, parent
        self.siblings(record).add(record.slot.slot)

    # --- matching ------------------------------------------------------------------------------------

    def longest(
        self, wanted: tuple[int, ...], access: Access, behind: tuple[SegmentView, ...] = ()
    ) -> tuple[SegmentView, ...]:
        """Views of the longest stored prefix of `wanted` that continues `behind` (or starts at token 0), that a model
        can go on from, and that `access` may find by its tokens."""
        if not behind:
            return self._longest(wanted, access, self.roots, ())
        last = behind[-1].segment
        if access.may_find(last.own_domains, last.domains):
            # It may itself go on beyond its view, so it is a candidate like its children.
            found = self._longest(wanted, access, {last.slot}, behind[:-1])
        else:
            found = self._longest(wanted, access, self.records[last.slot].children, behind)
        return found if found and found[-1].stop >= behind[-1].stop else behind

    def _longest(
        self, wanted: tuple[int, ...], access: Access, candidates: Iterable[int], before: tuple[SegmentView, ...]
    ) -> tuple[SegmentView, ...]:
        best = readable(before, self.spec)
        for slot in candidates:
            record = self.records[slot]
            segment = record.segment
            if segment is None or segment.start > _stop(before):
                continue
            if not access.may_find(segment.own_domains, segment.domains):
                continue
            length = common_prefix(segment.token_ids, wanted, segment.start)
            if length == 0:
                continue
            views = (*truncate_views(before, segment.start), SegmentView(segment, length))
            views = self._longest(wanted, access, record.children, views)
            if _stop(views) > _stop(best):
                best = views
        return best

    def standing(self, behind: SegmentView | None, sealed: Sealed) -> SharedSegment | None:
        """The segment of these tokens, bytes and domains that was computed behind `behind`, if there is one."""
        slots = self.roots if behind is None else self.records[behind.segment.slot].children
        start = 0 if behind is None else behind.stop
        for slot in sorted(slots):
            segment = self.records[slot].segment
            if segment is not None and segment.start == start and Sealed.of(segment).is_like(sealed):
                return segment
        return None

    def resolve(self, spans: Iterable[tuple[int, int]]) -> tuple[SegmentView, ...]:
        """The chain named by (slot, length) pairs; slots that were compacted meanwhile are followed.

        Raises `HandoffError` when a slot is gone, a length is off, or the spans leave a gap.
        """
        views: list[SegmentView] = []
        for named, length in spans:
            slot, first = self._moved.get(named, (named, 0))
            record = self.records.get(slot)
            if record is None or record.segment is None:
                raise HandoffError(f"[resolve] slot {named}: expected a live segment, got a freed slot")
            segment, length = record.segment, first + length
            if not first < length <= segment.num_tokens:
                limit = segment.num_tokens - first
                raise HandoffError(f"[resolve] slot {named}: expected a length in 1..{limit}, got {length - first}")
            expected = _stop(views)
            if segment.start + first != expected:
                raise HandoffError(
                    f"[resolve] slot {named}: expected a span from token {expected}, got {segment.start + first}"
                )
            behind = views[-1].segment if views else None
            if behind is not segment and record.parent != (behind.slot if behind else None):
                raise HandoffError(
                    f"[resolve] slot {named}: expected a segment computed behind {behind}, got another's"
                )
            if behind is segment:  # two compacted neighbours are one longer view now
                views.pop()
            views.append(SegmentView(segment, length))
        return tuple(views)

    def chain(self, record: Record) -> tuple[SegmentView, ...]:
        """Views of the segment and of what it was computed behind, from token 0 on."""
        views: list[SegmentView] = []
        stop = record.slot.num_tokens + (record.segment.start if record.segment else 0)
        at: Record | None = record
        while at is not None and at.segment is not None:
            views.append(SegmentView(at.segment, stop - at.segment.start))
            stop, at = at.segment.start, self.records.get(at.parent) if at.parent is not None else None
        return tuple(reversed(views))

    def stored(self, slot: int) -> SharedSegment:
        """The segment in `slot`, or what it was joined into."""
        slot, _ = self._moved.get(slot, (slot, 0))
        segment = self.record(slot).segment
        if segment is None:
            raise InvalidValueError(f"[SegmentTable] slot {slot}: expected a stored segment, got an empty slot")
        return segment

    def branches(self, keys: set[str]) -> list[Record]:
        """The segments that have one of `keys`, and all that was computed behind them, parents first."""
        stored = [record for record in self.records.values() if record.segment is not None]
        found = [record for record in stored if record.segment is not None and record.segment.keys & keys]
        for record in found:  # grows
            found += [self.records[child] for child in record.children if self.records[child] not in found]
        return sorted(found, key=lambda it: (it.segment.start if it.segment else 0, it.slot.slot))

    # --- leaving -------------------------------------------------------------------------------------

    def evictable_leaves(self) -> list[Record]:
        """Least recently used first. Leaves only, so that no segment outlives the tokens it was computed behind."""
        leaves = [r for r in self.records.values() if r.is_evictable and not r.children]
        return sorted(leaves, key=lambda r: r.last_used)

    def evict(self, record: Record) -> None:
        assert record.is_evictable and not record.children, (record.holders, record.children)
        slot = record.slot.slot
        self.siblings(record).discard(slot)
        del self.records[slot]
        self._moved = {old: new for old, new in self._moved.items() if new[0] != slot}

    def join(self, first: SharedSegment, second: SharedSegment) -> SharedSegment:
        """Replace two neighbours by one segment that holds their words; its holders are set by the manager."""
        layers = tuple(_join_rows(*pair) for pair in zip(first.layers, second.layers, strict=True))
        mx.eval([kv.arrays for kv in layers])
        left, right = self.records[first.slot], self.records[second.slot]
        nbytes = sum(layer.nbytes for layer in layers)
        checksum, residual_checksum = layers_checksum(layers), residuals_checksum(layers)
        # From here on no step takes time, so that an interrupt finds the table before or after.
        slot = self.allocate(first.num_tokens + second.num_tokens, nbytes, nbytes).slot
        joined = dataclasses.replace(
            first, slot=slot, token_ids=first.token_ids + second.token_ids, layers=layers,
            checksum=checksum, residual_checksum=residual_checksum, origins=first.seals + second.seals,
        )  # fmt: skip
        record = self.records[slot]
        record.children, record.last_used = right.children, right.last_used
        self.siblings(left).discard(first.slot)
        self.fill(record, joined, left.parent)
        for child in record.children:
            self.records[child].parent = slot
        del self.records[first.slot], self.records[second.slot]
        origins = {first.slot: 0, second.slot: first.num_tokens}
        for old, (target, offset) in list(self._moved.items()):
            if target in origins:
                self._moved[old] = (slot, origins[target] + offset)
        self._moved |= {old: (slot, offset) for old, offset in origins.items()}
        return joined


def _join_rows(first: LayerKV | LayerState, second: LayerKV | LayerState) -> LayerKV:
    """The blocks of both; the two that meet become one."""
    assert isinstance(first, LayerKV) and isinstance(second, LayerKV)
    left, right = first.blocks[-1], second.blocks[0]
    met = KVBlock(join([left.keys, right.keys]), join([left.values, right.values]))
    return LayerKV((*first.blocks[:-1], met, *second.blocks[1:]))


def can_join(first: SharedSegment, second: SharedSegment) -> bool:
    """Are they of the same domains, and the rows where they meet packed alike in every layer?"""
    pairs = zip(first.layers, second.layers, strict=True)
    return (first.own_domains, first.domains) == (second.own_domains, second.domains) and all(
        isinstance(a, LayerKV) and isinstance(b, LayerKV) and a.blocks[-1].is_like(b.blocks[0]) for a, b in pairs
    )


def _stop(views: Iterable[SegmentView]) -> int:
    return max((view.stop for view in views), default=0)


def common_prefix(stored: Sequence[int], wanted: Sequence[int], start: int = 0) -> int:
    """How many tokens of `stored` equal `wanted` from `start` on. Tokens decide, not hashes."""
    limit = min(len(stored), len(wanted) - start)
    if limit <= 0 or stored[:limit] == wanted[start : start + limit]:
        return max(0, limit)
    return next(i for i in range(limit) if stored[i] != wanted[start + i])
