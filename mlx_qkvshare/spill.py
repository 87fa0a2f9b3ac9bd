"""`SpillStore`: what a manager evicts goes to disk, and comes back when a prompt begins like it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .card import Card, CardSegment, are_hidden
from .digest import digest_text
from .errors import (
    BudgetExceededError,
    CardError,
    FingerprintMismatchError,
    InvalidValueError,
    QKVShareError,
    RevokedError,
)
from .manager import SharedKVCacheManager
from .policy import Access
from .prefix import SharedPrefix
from .segment import SegmentView, readable
from .store import CARD, CardStore, segment_file, segments_of
from .store_files import is_half_written, is_whole, removed
from .table import common_prefix
from .versions import versions


@dataclass(frozen=True)
class _Known:
    """A card as it was read from the file with this inode: who writes another puts another file in its place."""

    inode: int
    path: Path
    card: Card
    keys: frozenset[str]


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
        self._known: dict[str, _Known] = {}
        with contextlib.suppress(BlockingIOError), self._locked(alone=True, waits=False):
            self._sweep()
            self._trim()
        self._readable_cards()  # the first prompt need not wait for that

    def save(self, *args: Any, **options: Any) -> Card:
        raise CardError("[SpillStore] expected what a manager evicts, got a card to keep: a `CardStore` has no cap")

    def add(self, *args: Any, **options: Any) -> None:
        self.save()

    @property
    def used_bytes(self) -> int:
        """Of all files that are ours."""
        used = 0
        for folder, suffix in self._kinds:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if is_whole(entry.name, suffix) or is_half_written(entry.name, suffix):
                        with contextlib.suppress(FileNotFoundError):
                            used += entry.stat(follow_symlinks=False).st_size
        return used

    # --- out ---------------------------------------------------------------------------------------

    def keep(self, manager: SharedKVCacheManager, views: Sequence[SegmentView]) -> bool:
        """Write the chain that ends with an evicted segment; False where it cannot be kept, which is never an error:
        no room under `max_bytes`, a full disk, or others reading what would have to go."""
        try:
            if any(are_hidden(view.segment.token_ids) for view in views):
                return False  # no prompt begins like it
            files = [segment_file(view.segment) for view in views]
            segments = segments_of(views, files, keep_tokens=True)
            name = digest_text(",".join(segment.digest for segment in segments))
            stop = views[-1].stop
            card = Card(name, "", 0, manager.spec, manager.quant, segments, stop, versions=versions())
            sizes = {header.digest: header.file_bytes for header, _ in files}
            card_bytes = len(card.encoded())

            def missing_bytes() -> int:
                return card_bytes + sum(size for digest, size in sizes.items() if not self._is_whole(digest))

            with self._writing(), self._alone_if_can() as is_alone:
                if self._has_revoked(view.segment for view in views):
                    return False
                if self._is_covered(card):
                    return True
                if card_bytes + sum(sizes.values()) > self.max_bytes:
                    return False
                if is_alone:
                    self._trim(missing_bytes)
                if self.used_bytes + missing_bytes() > self.max_bytes:
                    return False
                self._write_segments(files)
                self._write_card(card)
                return True
        except (OSError, QKVShareError):
            return False

    def _is_covered(self, chain: Card) -> bool:
        """Does a card that is there begin with this chain? It counts as used now."""
        for path, card in self._readable_cards():
            if card.segments[0].digest != chain.segments[0].digest:
                continue
            num_lengths = len(chain.segments) - 1  # the last one is there whole, however much of it is read
            lengths = [[it.length for it in one.segments[:num_lengths]] for one in (card, chain)]
            digests = [[it.digest for it in one.segments[: len(chain.segments)]] for one in (card, chain)]
            if lengths[0] == lengths[1] and digests[0] == digests[1]:
                if not all(self._is_whole(digest) for digest in digests[1]):
                    return False
                os.utime(path)
                return True
        return False

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        """One writes at a time: those who cannot be alone would count the same room twice. Who writes waits for nobody
        who writes."""
        return self._locked(alone=True, name=".write")

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

    def _trim(self, missing_bytes: Callable[[], int] = lambda: 0) -> None:
        """Make room for so many bytes: what no card names goes first, then the least recently used cards."""
        used = self.used_bytes
        if used + missing_bytes() <= self.max_bytes:
            return
        cards = sorted(self._readable_cards(), key=lambda it: it[0].stat().st_mtime_ns)
        known = {path for path, _ in cards}
        names = collections.Counter(digest for _, card in cards for digest in card.digests)
        for path in self._our_files():
            if used + missing_bytes() <= self.max_bytes:
                return
            if path not in known and path.stem not in names:
                used -= removed(path)
        for path, card in cards:
            if used + missing_bytes() <= self.max_bytes:
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
                if (card.segments[0].token_ids or ())[:1] != wanted[:1]:
                    continue  # which tells most of them
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
            with self._locked():
                loaded = self._load(manager, cut)
            with loaded:
                os.utime(path)
                return loaded.prefix.fork(access)
        except (BudgetExceededError, FingerprintMismatchError, RevokedError):
            return None  # others may have the room, or the key factors, or have revoked it meanwhile
        except (CardError, OSError):
            with contextlib.suppress(QKVShareError):
                removed(path)
            return None

    def _readable_cards(self) -> list[tuple[Path, Card]]:
        """Those that are there and may be read; each is read from disk once."""
        known, found = self._known, dict[str, _Known]()
        with os.scandir(self._cards) as entries:
            inodes = sorted((entry.name, entry.inode()) for entry in entries if is_whole(entry.name, CARD))
        for name, inode in inodes:
            if name in known and known[name].inode == inode:
                found[name] = known[name]
            else:
                path = self._cards / name
                with contextlib.suppress(OSError, CardError):
                    card = self._read_card(path)
                    keys = frozenset().union(*(segment.keys for segment in card.segments))
                    found[name] = _Known(inode, path, card, keys)
        self._known, revoked = found, self._revoked_keys()
        return [(it.path, it.card) for it in found.values() if it.card.segments and revoked.isdisjoint(it.keys)]


def _beginning(card: Card, wanted: tuple[int, ...], access: Access, manager: SharedKVCacheManager) -> Card | None:
    """The part of the card that `wanted` begins with, that `access` may find, and that a model can go on from.

    A segment that others leave half-way is there whole, and may go on further than what follows it in the card.
    """
    cuts: tuple[_Cut, ...] = ()
    found: list[tuple[_Cut, ...]] = []
    for segment in card.segments:
        ids = segment.token_ids
        if ids is None or not access.may_find(segment.own_domains, segment.domains):
            break
        length = common_prefix(ids, wanted, segment.start)
        if length:
            found.append(readable((*cuts, _Cut(segment, length)), manager.spec))
        if length < segment.length:
            break
        cuts = (*cuts, _Cut(segment, segment.length))
    best = max(found, key=lambda it: sum(cut.length for cut in it), default=())
    segments = tuple(dataclasses.replace(cut.segment, length=cut.length) for cut in best)
    return dataclasses.replace(card, segments=segments) if segments else None
