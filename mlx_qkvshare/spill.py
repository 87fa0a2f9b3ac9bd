"""`SpillStore`: what a manager evicts goes to disk, and comes back when a prompt begins like it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .card import Card, CardSegment
from .errors import (
    BudgetExceededError,
    CardError,
    FingerprintMismatchError,
    InvalidValueError,
    QKVShareError,
    RevokedError,
)
from .fingerprint import digest_text
from .manager import SharedKVCacheManager
from .policy import Access
from .prefix import SharedPrefix
from .segment import SegmentView, readable
from .store import CARD, CardStore, SegmentFile, removed, segment_file, segments_of
from .table import common_prefix
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
            self._trim()

    @property
    def used_bytes(self) -> int:
        """Of all files that are ours."""
        return sum(path.lstat().st_size for path in self._our_files())

    # --- out ---------------------------------------------------------------------------------------

    def keep(self, manager: SharedKVCacheManager, views: Sequence[SegmentView]) -> bool:
        """Write the chain that ends with an evicted segment; False where it cannot be kept, which is never an error:
        no room under `max_bytes`, a full disk, or others reading what would have to go."""
        try:
            files = [segment_file(view.segment) for view in views]
            segments = segments_of(views, files, keep_tokens=True)
            name = digest_text(",".join(segment.digest for segment in segments))
            stop = views[-1].stop
            card = Card(name, "", 0, manager.spec, manager.quant, segments, stop, versions=versions())
            with self._alone_if_can() as is_alone:
                if self._has_revoked(view.segment for view in views):
                    return False
                if self._is_covered(card):
                    return True
                if len(card.encoded()) + sum(header.file_bytes for header, _ in files) > self.max_bytes:
                    return False
                if is_alone:
                    self._trim(lambda: self._missing_bytes(card, files))
                if self.used_bytes + self._missing_bytes(card, files) > self.max_bytes:
                    return False
                self._write_segments(files)
                self._write_card(card)
                return True
        except (OSError, QKVShareError):
            return False

    def _is_covered(self, chain: Card) -> bool:
        """Does a card that is there begin with this chain? It counts as used now."""
        for path, card in self._readable_cards():
            num_lengths = len(chain.segments) - 1  # the last one is there whole, however much of it is read
            lengths = [[it.length for it in one.segments[:num_lengths]] for one in (card, chain)]
            digests = [[it.digest for it in one.segments[: len(chain.segments)]] for one in (card, chain)]
            if lengths[0] == lengths[1] and digests[0] == digests[1]:
                if not all(self._is_whole(digest) for digest in digests[1]):
                    return False
                os.utime(path)
                return True
        return False

    def _missing_bytes(self, card: Card, files: Iterable[SegmentFile]) -> int:
        """Of the files that would have to be written."""
        sizes = {header.digest: header.file_bytes for header, _ in files}
        missing = sum(sizes[digest] for digest in sizes if not self._segment_path(digest).exists())
        return missing + len(card.encoded())

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
        cards = sorted(self._readable_cards(), key=lambda it: it[0].stat().st_mtime_ns)
        known = {path for path, _ in cards}
        names = collections.Counter(digest for _, card in cards for digest in card.digests)
        used = self.used_bytes
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
        except (BudgetExceededError, FingerprintMismatchError, RevokedError):
            return None  # others may have the room, or the key factors, or have revoked it meanwhile
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
                if not self._has_revoked(card.segments):
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
