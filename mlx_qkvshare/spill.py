"""`SpillStore`: what a manager evicts goes to disk, and comes back when a prompt begins like it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .card import Card, CardSegment, tokens_digest
from .errors import BudgetExceededError, CardError, FingerprintMismatchError, InvalidValueError, QKVShareError
from .fingerprint import digest_text
from .manager import SharedKVCacheManager
from .policy import Access
from .prefix import SharedPrefix
from .segment import SegmentView, readable
from .segment_file import describe
from .store import CARD, CardStore, removed
from .table import Sealed, common_prefix
from .versions import versions


@dataclass(frozen=True)
class _Cut:
    """The first `length` tokens of a stored segment."""

    segment: CardSegment
    length: int


class SpillStore(CardStore):
    """A folder of its own, for `SharedKVCacheManager(spill=...)`, that never has more than `max_bytes`.

    Every evicted chain is a card; the least recently used go first, whatever model they are of. What is counted are the
    files that are there, at every call, so that nothing of an earlier run or of another process is missed; files that
    are none of ours are neither counted nor removed. Processes and managers may share a folder.

    Raises `CardError` where the folder cannot be used.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int):
        if not isinstance(max_bytes, int) or max_bytes <= 0:
            raise InvalidValueError(f"[SpillStore] max_bytes: expected an int > 0, got {max_bytes!r}")
        super().__init__(folder)
        self.max_bytes = max_bytes
        self._known: dict[Path, tuple[tuple[int, int], Card]] = {}
        with contextlib.suppress(BlockingIOError), self._locked(alone=True, waits=False):
            self._sweep()
            self._trim(max_bytes)

    @property
    def used_bytes(self) -> int:
        """Of all files that are ours."""
        return sum(path.lstat().st_size for path in self._our_files())

    # --- out ---------------------------------------------------------------------------------------

    def keep(self, manager: SharedKVCacheManager, views: Sequence[SegmentView]) -> bool:
        """Write the chain that ends with an evicted segment; False where it cannot be kept, which is never an error:
        no room under `max_bytes`, a full disk, or others reading what would have to go."""
        try:
            if any(self._is_revoked(view.segment) for view in views):
                return False
            headers = [describe(view.segment, tokens_digest(view.segment.token_ids))[0] for view in views]
            name = digest_text(",".join(header.digest for header in headers))
            with self._alone_if_can() as is_alone:
                if self._is_covered(views):
                    return True
                sizes = {header.digest: header.file_bytes for header in headers}
                card_bytes = 2048 + 16 * sum(view.segment.num_tokens for view in views)
                needed = card_bytes + sum(sizes[it] for it in sizes if not self._segment_path(it).exists())
                if needed > self.max_bytes:
                    return False
                if self.used_bytes + needed > self.max_bytes:
                    if not is_alone:
                        return False
                    self._trim(self.max_bytes - card_bytes - sum(sizes.values()))
                    needed = card_bytes + sum(sizes[it] for it in sizes if not self._segment_path(it).exists())
                    if self.used_bytes + needed > self.max_bytes:
                        return False
                segments = self._write_chain(views, keep_tokens=True)
                card = Card(name, "", 0, manager.spec, manager.quant, segments, sum(v.length for v in views))
                self._write_card(dataclasses.replace(card, versions=versions()))
                return True
        except (OSError, QKVShareError):
            return False

    def _is_covered(self, views: Sequence[SegmentView]) -> bool:
        """Does a card that is there begin with this chain? It counts as used now."""
        for path, card in self._readable_cards():
            pairs = list(zip(card.segments, views, strict=False))
            is_same = all(segment.sealed.is_like(Sealed.of(view.segment)) for segment, view in pairs)
            if len(pairs) == len(views) and is_same and all(s.length == v.length for s, v in pairs[:-1]):
                os.utime(path)
                return True
        return False

    @contextlib.contextmanager
    def _alone_if_can(self) -> Iterator[bool]:
        """The lock, alone if nobody has it: an eviction must not wait for a reader, who may wait for the manager."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._locked(alone=True, waits=False))
                is_alone = True
            except BlockingIOError:
                stack.enter_context(self._locked())
                is_alone = False
            yield is_alone

    def _trim(self, max_bytes: int) -> None:
        """Remove cards, the least recently used first, until `max_bytes` are left; before them, what no card names."""
        cards = sorted(self._readable_cards(), key=lambda it: it[0].stat().st_mtime_ns)
        known = {path for path, _ in cards}
        names = collections.Counter(digest for _, card in cards for digest in card.digests)
        used = self.used_bytes
        for path in self._our_files():
            is_named = path in known or path.stem in names
            if not is_named and used > max_bytes:
                used -= removed(path)
        for path, card in cards:
            if used <= max_bytes:
                return
            used -= removed(path)
            names.subtract(card.digests)
            used -= sum(removed(self._segment_path(it)) for it in card.digests if names[it] == 0)

    # --- in ----------------------------------------------------------------------------------------

    def find(
        self, manager: SharedKVCacheManager, token_ids: Sequence[int], access: Access, *, longer_than: int
    ) -> SharedPrefix | None:
        """Bring back the longest kept beginning of `token_ids` that `access` may find, if it has more than
        `longer_than` tokens. None, too, where it does not fit the budget or is damaged: it is gone then."""
        wanted, best = tuple(token_ids), None
        with self._locked():
            for path, card in self._readable_cards():
                if (card.spec, card.quant) != (manager.spec, manager.quant):
                    continue
                cut = _beginning(card, wanted, access, manager)
                if cut is not None and cut.num_tokens > longer_than:
                    best, longer_than = (path, cut), cut.num_tokens
        if best is None:
            return None
        path, cut = best
        try:
            manager.make_room_for((it.sealed, it.length, it.nbytes) for it in cut.segments)
            with self._load(manager, cut) as loaded:
                os.utime(path)
                return loaded.prefix.fork(access)
        except (BudgetExceededError, FingerprintMismatchError):
            return None  # others may have the room, or the key factors
        except (CardError, OSError):
            with contextlib.suppress(QKVShareError):
                removed(path)
            return None

    def _readable_cards(self) -> Iterator[tuple[Path, Card]]:
        """Those that are there and may be read; each is read from disk once."""
        paths = self._files(self._cards, CARD)
        self._known = {path: self._known[path] for path in paths if path in self._known}
        for path in paths:
            with contextlib.suppress(OSError, CardError):
                status = path.stat()
                identity = status.st_ino, status.st_size
                if path not in self._known or self._known[path][0] != identity:
                    self._known[path] = identity, self._read_card(path)
                card = self._known[path][1]
                if not any(self._is_revoked(segment) for segment in card.segments):
                    yield path, card


def _beginning(card: Card, wanted: tuple[int, ...], access: Access, manager: SharedKVCacheManager) -> Card | None:
    """The part of the card that `wanted` begins with, that `access` may find, and that a model can go on from."""
    cuts: tuple[_Cut, ...] = ()
    for segment in card.segments:
        ids = segment.token_ids
        if ids is None or not access.may_find(segment.own_domains, segment.domains):
            break
        length = common_prefix(ids, wanted, segment.start)
        if length:
            cuts = (*cuts, _Cut(segment, length if length < segment.length else segment.length))
        if length < segment.length:
            break
    cuts = readable(cuts, manager.spec)
    segments = tuple(dataclasses.replace(cut.segment, length=cut.length) for cut in cuts)
    return dataclasses.replace(card, segments=segments) if segments else None
