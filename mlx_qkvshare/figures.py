"""What a manager tells of itself: bytes now, counts since it was made, each for who may know of them."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .guard import Raised
from .packing import GuardReport
from .policy import Access
from .table import Record

_KEPT_RAISED = 256


@dataclass(frozen=True)
class ManagerStats:
    """`used + free == budget` and `used == evictable + protected`; private tails are protected bytes.

    The guard tried `num_guarded_layers` layers as they were sealed (none where there is nothing to fear), found
    `worst_attention_error` in what it let pass, and gave more bits to `num_raised_layers`, the last of which are in
    `raised`. Of the evictions `num_spilled` are kept on disk; `num_returned` times a match came back from there.
    """

    budget_bytes: int
    used_bytes: int
    free_bytes: int
    evictable_bytes: int
    protected_bytes: int
    private_bytes: int
    num_segments: int
    num_holders: int
    num_hits: int
    num_misses: int
    reused_tokens: int
    num_evictions: int
    num_spilled: int
    num_returned: int
    num_compactions: int
    num_guarded_layers: int
    num_raised_layers: int
    worst_attention_error: float
    raised: tuple[Raised, ...]
    dropped_residual_bytes: int


class Tally:
    """Counts by the domains of what was counted. Not locked: the manager locks."""

    def __init__(self) -> None:
        self._counts: dict[frozenset[str], collections.Counter[str]] = {}
        self._worst: dict[frozenset[str], float] = {}
        self._raised: collections.deque[tuple[frozenset[str], Raised]] = collections.deque(maxlen=_KEPT_RAISED)

    def count(self, domains: Iterable[str], **counts: int) -> None:
        """By the names of the fields of `ManagerStats`."""
        self._counts.setdefault(frozenset(domains), collections.Counter()).update(counts)

    def guarded(self, domains: frozenset[str], report: GuardReport) -> None:
        self.count(domains, num_guarded_layers=report.num_guarded, num_raised_layers=len(report.raised))
        self._worst[domains] = max(self._worst.get(domains, 0.0), report.worst_error)
        self._raised.extend((domains, raised) for raised in report.raised)

    def stats(
        self, access: Access, budget_bytes: int, free_bytes: int, records: Iterable[Record], tails: Sequence[int]
    ) -> ManagerStats:
        """Of the `records` that `access` may read, and of its holders, the bytes of whose tails are `tails`."""
        sees_all = access.reads is None
        seen = [it for it in records if sees_all or (it.segment is not None and access.may_read(it.domains))]
        private = sum(tails)
        evictable = sum(record.counted_bytes for record in seen if record.is_evictable)
        protected = sum(record.counted_bytes for record in seen if not record.is_evictable) + private
        used = budget_bytes - free_bytes if sees_all else evictable + protected
        counts: collections.Counter[str] = collections.Counter()
        for domains, counted in self._counts.items():
            counts.update(counted if access.may_read(domains) else {})
        fields: dict[str, Any] = {name: counts[name] for name in _COUNTED}
        return ManagerStats(
            budget_bytes=budget_bytes,
            used_bytes=used,
            free_bytes=budget_bytes - used,
            evictable_bytes=evictable,
            protected_bytes=protected,
            private_bytes=private,
            num_segments=sum(record.segment is not None for record in seen),
            num_holders=len(tails),
            worst_attention_error=max((it for of, it in self._worst.items() if access.may_read(of)), default=0.0),
            raised=tuple(raised for of, raised in self._raised if access.may_read(of)),
            **fields,
        )


_COUNTED = (
    "num_hits", "num_misses", "reused_tokens", "num_evictions", "num_spilled", "num_returned", "num_compactions",
    "num_guarded_layers", "num_raised_layers", "dropped_residual_bytes",
)  # fmt: skip
