"""`SharedPrefix`: what one holder retains of the shared context, and the budgeted rows of its private tail."""

from __future__ import annotations

import collections
import itertools
import weakref
from dataclasses import dataclass
from typing import Protocol

from .errors import RevokedError
from .policy import Access
from .segment import SegmentView


@dataclass(eq=False)
class Holding:
    """The manager's side of a `SharedPrefix`, so that it survives whatever order garbage is collected in."""

    holder: int
    access: Access
    views: tuple[SegmentView, ...] = ()
    private_rows: int = 0
    is_busy: bool = False
    is_released: bool = False
    revoked_from: int | None = None
    """The first token of what was revoked under the holder; `views` end there, and may not be read."""
    tail_domains: frozenset[str] = frozenset()
    """Of tokens in the private tail that were written elsewhere before; a copy of the tail has them as well."""


class PrefixOwner(Protocol):
    """What a prefix asks of its manager."""

    dropped: collections.deque[int]

    def tail_bytes(self, num_rows: int) -> int: ...
    def charge_private(self, holding: Holding, num_rows: int) -> None: ...
    def trim_private(self, holding: Holding, num_rows: int) -> None: ...
    def fork_prefix(self, holding: Holding, access: Access) -> SharedPrefix: ...
    def write_in(self, holding: Holding, domain: str) -> None: ...
    def truncate_prefix(self, holding: Holding, num_tokens: int) -> None: ...
    def release_prefix(self, holder: int) -> None: ...


class SharedPrefix:
    """One holder's retained views, contiguous from token 0, and the budgeted rows of its private tail.

    Made by the manager (`match_prefix`, `get_shared_kv_cache`) or by `fork`; released by `release` or
    when it is garbage collected. Holding one adds no KV bytes.
    """

    def __init__(self, owner: PrefixOwner, holding: Holding):
        self._owner, self.holding = owner, holding
        # The collector may run while this thread holds the manager's lock, so it only leaves a note.
        note = weakref.finalize(self, owner.dropped.append, holding.holder)
        note.atexit = False  # a scheduler's thread may still be at work then

    def __repr__(self) -> str:
        return f"SharedPrefix({self.num_tokens} tokens in {len(self.holding.views)} segments)"

    @property
    def access(self) -> Access:
        return self.holding.access

    @property
    def views(self) -> tuple[SegmentView, ...]:
        """Raises `RevokedError` when what was held was revoked."""
        self.require_readable()
        return self.holding.views

    def require_readable(self) -> None:
        """Raise `RevokedError` when what was held was revoked."""
        if (start := self.holding.revoked_from) is not None:
            raise RevokedError(
                f"[SharedPrefix] expected a context to read, got one that was revoked from token {start}"
            )

    @property
    def num_tokens(self) -> int:
        views = self.holding.views
        return views[-1].stop if views else 0

    @property
    def token_ids(self) -> list[int]:
        return list(itertools.chain.from_iterable(view.token_ids for view in self.views))

    @property
    def shared_bytes(self) -> int:
        """Bytes of the segments that are read; they exist once however many prefixes read them."""
        return sum(view.segment.nbytes for view in self.views)

    @property
    def private_bytes(self) -> int:
        """Bytes budgeted for the private tail."""
        return self._owner.tail_bytes(self.holding.private_rows)

    @property
    def is_busy(self) -> bool:
        """Is the holder in the middle of a call? Compaction by others then leaves its views alone."""
        return self.holding.is_busy

    @is_busy.setter
    def is_busy(self, value: bool) -> None:
        self.holding.is_busy = value

    def reserve_tail(self, num_rows: int) -> None:
        """Budget a private tail of `num_rows` rows. Raises `BudgetExceededError` before anything grows."""
        if num_rows > self.holding.private_rows:
            self._owner.charge_private(self.holding, num_rows)

    def trim_tail(self, num_rows: int) -> None:
        """Give back what is budgeted beyond `num_rows` rows."""
        self._owner.trim_private(self.holding, num_rows)

    def release_tail(self) -> None:
        self._owner.charge_private(self.holding, 0)

    def fork(self, access: Access | None = None) -> SharedPrefix:
        """Another holder of the same views, with the same access or one that may read them too (`AccessError`)."""
        return self._owner.fork_prefix(self.holding, access or self.access)

    def write_in(self, domain: str) -> None:
        """Write what follows into `domain`. Raises `InvalidValueError` for one that may not be read."""
        self._owner.write_in(self.holding, domain)

    def truncate(self, num_tokens: int) -> None:
        """Hold the first `num_tokens` tokens only, or fewer where the model cannot go on from there (`readable`)."""
        self._owner.truncate_prefix(self.holding, num_tokens)

    def release(self) -> None:
        """Give everything back. Twice is harmless."""
        self._owner.release_prefix(self.holding.holder)
