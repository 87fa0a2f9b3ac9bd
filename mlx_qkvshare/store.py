"""`CardStore`: contexts in a folder, which survive restarts, crashes and each other.

Every segment is one file named by its content, every card a small one that names its segments. Files appear whole under
their names or not at all. Who writes or reads holds the folder's lock together with others, who removes holds it alone;
the system lets go of it when a process dies. So nothing goes while somebody is about to name or to read it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import mlx.core as mx

from .card import MAX_CARD_BYTES, Card, CardSegment, are_hidden, check_fit, decode, tokens_digest
from .digest import digest_text, is_digest
from .errors import (
    CardCorruptError,
    CardError,
    CardFormatError,
    CardNotFoundError,
    CardWriteError,
    HandoffError,
    InvalidValueError,
    RevokedError,
)
from .folders import sync_folder, written_whole
from .manager import SharedKVCacheManager
from .package import HandoffPackage, Span
from .policy import EVERYTHING
from .prefix import SharedPrefix
from .segment import SegmentView, SharedSegment
from .segment_file import SegmentHeader, describe, read_arrays, read_header, verify_arrays, write_segment
from .segment_layout import Layers, build_layers, check_factors_of, check_layout
from .store_files import half_written, identity, locked, our_files, plain_file, removed
from .table import SharedSlot
from .versions import versions

CARD, _SEGMENT = ".json", ".safetensors"
SegmentFile = tuple[SegmentHeader, list[mx.array]]


class Packed(Protocol):
    """A session."""

    def package_state(self) -> HandoffPackage: ...


@dataclass(frozen=True)
class LoadedCard:
    """A card whose segments stand in a manager, held by `prefix`; `AgentSession.receive_state(package)` goes on from
    it. In a `with` block they are let go of at its end."""

    card: Card
    package: HandoffPackage
    prefix: SharedPrefix
    linked_tokens: int
    """Tokens that stood in the manager already."""

    def __enter__(self) -> LoadedCard:
        return self

    def __exit__(self, *details: object) -> None:
        self.prefix.release()


class CardStore:
    """Cards in `folder`, which is made if need be. Any threads and processes may use one folder.

    Raises `CardError` where the folder cannot be used.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._cards, self._segments, self._revoked = (self.folder / it for it in ("cards", "segments", "revoked"))
        self._kinds = ((self._cards, CARD), (self._segments, _SEGMENT))
        self._verified: dict[str, tuple[int, int, int]] = {}  # segment -> inode, size and time when it was whole
        try:
            for path in (self.folder, self._cards, self._segments):
                if not path.is_dir():
                    path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (self._revoked, self._cards, self._segments):
                if path.is_symlink():
                    raise CardError(f"[CardStore] {path}: expected a folder, got a link")
            for path in (self._cards, self._segments):
                path.chmod(0o700)
            sync_folder(self.folder)
        except OSError as error:
            raise CardError(f"[CardStore] {folder}: expected a folder to write to: {error}") from error

    # --- looking: no model, no manager -------------------------------------------------------------

    def look(self) -> tuple[list[Card], list[CardError | RevokedError]]:
        """All cards, in the order of their names, and what is wrong with the files that cannot be read."""
        cards: list[Card] = []
        errors: list[CardError | RevokedError] = []
        with self._locked():
            for path in our_files(self._cards, CARD):
                try:
                    card = self._read_card(path)
                    self._check_name(card, path)
                    self._require_valid(card.name, *card.segments)
                    cards.append(card)
                except FileNotFoundError:
                    continue  # somebody has removed it
                except (CardError, RevokedError) as error:
                    errors.append(error)
        return sorted(cards, key=lambda card: card.name), errors

    def names(self) -> list[str]:
        """Of all cards that can be read, in order."""
        return [card.name for card in self.look()[0]]

    def inspect(self, name: str) -> Card:
        """What the card says. Raises `CardNotFoundError`, `CardCorruptError` or `CardFormatError`."""
        with self._locked():
            return self._card(name)

    def verify(self, name: str) -> Card:
        """Read every byte of the card and its segments. Raises as `inspect`."""
        with self._locked():
            return self._verified_card(name)

    def _verified_card(self, name: str) -> Card:
        card = self._card(name)
        for segment in card.segments:
            with self._opened(segment, card) as (file, header):
                verify_arrays(file, header)
        return card

    def stored_bytes(self, name: str) -> int:
        """Of the card's file and of those that it names. Raises as `inspect`."""
        with self._locked():
            card = self._card(name)
            paths = {self._card_path(name), *(self._segment_path(it.digest) for it in card.segments)}
            try:
                return sum(path.lstat().st_size for path in paths)
            except OSError as error:
                raise CardCorruptError(f"[card {name!r}] expected the files of its segments: {error}") from error

    def saved_at(self, name: str) -> float:
        """When the card was written, in seconds since the epoch."""
        with self._locked():
            self._card(name)
            return self._card_path(name).stat().st_mtime

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[tuple[Card, Callable[[CardSegment], AbstractContextManager[BinaryIO]]]]:
        """The card, and what opens one of its segments' files, all of it verified; nothing of it goes meanwhile.

        Raises as `inspect`.
        """
        with self._locked():
            card = self._verified_card(name)
            yield card, lambda segment: plain_file(self._segment_path(segment.digest))

    # --- out ---------------------------------------------------------------------------------------

    def save(
        self, manager: SharedKVCacheManager, name: str, source: Packed | HandoffPackage, *, keep_tokens: bool = True
    ) -> Card:
        """Keep the context of a session, which is sealed, or of a package under `name`, in place of what was there.

        Without `keep_tokens` neither tokens nor messages are written, but a digest of the tokens: the context can be
        gone on from, not computed again, and its last token's logits are not to be had without a prompt.

        Raises:
            CardWriteError: no room, or no right to write; what was under `name` is still there, whole.
            HandoffError: the package's segments are gone, or another manager's.
            IntegrityError: a segment's bytes are not those that were sealed.
        """
        self._card_path(name)  # which is a name
        package = source if isinstance(source, HandoffPackage) else source.package_state()
        if package.manager != manager.id:
            raise HandoffError(f"[save_card] manager: expected {manager.id}, got {package.manager}")
        prefix = manager.get_shared_kv_cache(package.slots, access=EVERYTHING)
        try:
            with self._locked():
                self._require_valid(name, *(view.segment for view in prefix.views))
                files = [segment_file(view.segment) for view in prefix.views]
                segments = segments_of(prefix.views, files, keep_tokens=keep_tokens)
                self._write_segments(files)
                has_all = all(segment.token_ids is not None for segment in segments)
                card = Card(
                    name, package.sender, package.hops, manager.spec, package.quant, segments,
                    package.base_tokens if has_all else prefix.num_tokens, package.messages if has_all else (),
                    package.is_role_due, versions(),
                )  # fmt: skip
                self._write_card(card)
                return card
        except OSError as error:
            raise CardWriteError(f"[save_card] {name!r}: {error}; what was kept before is whole") from error
        finally:
            prefix.release()

    def _write_card(self, card: Card) -> None:
        with written_whole(self._card_path(card.name)) as partial:
            partial.write_bytes(card.encoded())

    def _write_segments(self, files: Iterable[SegmentFile]) -> None:
        """Those that are not there yet."""
        for header, arrays in files:
            path = self._segment_path(header.digest)
            if not self._is_whole(header.digest):
                with written_whole(path) as partial, open(partial, "wb") as file:
                    write_segment(file, header, arrays)
                self._verified[header.digest] = identity(path.stat())

    def _is_whole(self, digest: str) -> bool:
        """Is this segment stored, as it must be? Its bytes are read once, and again when the file has changed."""
        try:
            with plain_file(self._segment_path(digest)) as file:
                status = os.fstat(file.fileno())
                if self._verified.get(digest) != identity(status):
                    verify_arrays(file, read_header(file, digest, status.st_size))
                    self._verified[digest] = identity(status)
                return True
        except (OSError, CardError):
            return False

    def add(self, card: Card, copy: Callable[[CardSegment, BinaryIO], None], *, replace: bool = False) -> None:
        """Keep `card`, of whose segments `copy(segment, file)` writes the files. All is verified before anything of it
        has a name here, and after a failure the store is as it was. It holds the store alone.

        Raises:
            CardError: the name is taken, and not to be replaced.
            RevokedError: of what it holds something was revoked in this store.
            CardCorruptError, CardFormatError: what was copied is not what the card says.
            CardWriteError: no room, or no right to write.
        """
        path = self._card_path(card.name)
        try:
            with self._locked(alone=True), contextlib.ExitStack() as files:
                self._require_valid(card.name, *card.segments)
                if os.path.lexists(path) and not replace:
                    raise CardError(f"[CardStore] {card.name!r}: expected a free name, got one that is taken")
                files.enter_context(written_whole(path)).write_bytes(card.encoded())  # first in, last to get its name
                for segment in card.distinct_segments:
                    partial = files.enter_context(written_whole(self._segment_path(segment.digest)))
                    with open(partial, "wb") as file:
                        copy(segment, file)
                    with self._opened(segment, card, partial) as (whole, header):
                        verify_arrays(whole, header)
        except OSError as error:
            raise CardWriteError(f"[CardStore] {card.name!r}: {error}; what was kept before is whole") from error

    # --- in ----------------------------------------------------------------------------------------

    def load(self, manager: SharedKVCacheManager, name: str) -> LoadedCard:
        """Bring the card's segments into `manager`, or link those that stand there already.

        Everything is checked before anything is counted, and after a failure all is as it was.

        Raises:
            CardNotFoundError, CardCorruptError, CardFormatError: see `inspect`.
            FingerprintMismatchError: the card was made for another model, layout, quantization or key factors.
            ContextLimitError: it is longer than the model's context.
            BudgetExceededError: its bytes do not fit; nothing was loaded.
        """
        with self._locked():
            return self._load(manager, self._card(name))

    def _load(self, manager: SharedKVCacheManager, card: Card) -> LoadedCard:
        """`load`, for who holds the lock."""
        check_fit(card, manager.spec, manager.quant)
        for segment in card.segments:
            with self._opened(segment, card) as (_, header):
                check_factors_of(header, manager.key_factors)
        prefix = manager.standing((it.sealed, it.length) for it in card.segments)
        slots: list[SharedSlot] = []
        try:
            linked = prefix.num_tokens
            missing = card.segments[len(prefix.views) :]
            if sum(segment.nbytes for segment in missing) > manager.stats().free_bytes:
                manager.require_room(sum(segment.nbytes for segment in missing))
                for segment in missing:  # others will have to go: not for bytes that are damaged
                    with self._opened(segment, card) as (file, header):
                        verify_arrays(file, header)
            slots = manager.reserve_slots([(segment.num_tokens, segment.nbytes) for segment in missing])
            mx.clear_cache()  # its buffers may be too large
            layers = [self._read_layers(segment, card, manager) for segment in missing]
            contents = [(it.sealed, it.length, its_layers) for it, its_layers in zip(missing, layers, strict=True)]
            manager.link(prefix, slots, contents)
        except BaseException:
            for slot in slots:
                manager.free_slot(slot)
            prefix.release()
            raise
        return LoadedCard(card, _package_of(card, manager, prefix), prefix, linked)

    def _read_layers(self, segment: CardSegment, card: Card, manager: SharedKVCacheManager) -> Layers:
        with self._opened(segment, card) as (file, header):
            return build_layers(header, read_arrays(file, header), manager.spec, manager.key_factors)

    @contextlib.contextmanager
    def _opened(
        self, segment: CardSegment, card: Card, path: Path | None = None
    ) -> Iterator[tuple[BinaryIO, SegmentHeader]]:
        """A segment's file, behind its header, which is what the card says."""
        try:
            with plain_file(path or self._segment_path(segment.digest)) as file:
                header = read_header(file, segment.digest, os.fstat(file.fileno()).st_size)
                for field, found, expected in (
                    ("fingerprint", header.fingerprint, card.spec.fingerprint.digest),
                    ("quant", header.quant, card.quant),
                    *((it, getattr(header, it), getattr(segment, it)) for it in _SHARED_FIELDS),
                ):
                    if found != expected:
                        raise CardCorruptError(
                            f"[segment {segment.digest}] {field}: expected {expected} as the card says, got {found}"
                        )
                check_layout(header, card.spec)
                yield file, header
        except OSError as error:
            raise CardCorruptError(f"[segment {segment.digest}] expected a file to read: {error}") from error

    def _card(self, name: str) -> Card:
        path = self._card_path(name)
        try:
            card = self._read_card(path)
        except FileNotFoundError as error:
            raise CardNotFoundError(f"[CardStore] expected a card named {name!r}, got none") from error
        self._check_name(card, path)
        self._require_valid(name, *card.segments)
        return card

    def _check_name(self, card: Card, path: Path) -> None:
        if self._card_path(card.name) != path:
            raise CardCorruptError(f"[card {path.stem}] name: expected another than {card.name!r}")

    def _read_card(self, path: Path) -> Card:
        try:
            with plain_file(path) as file:
                raw = file.read(MAX_CARD_BYTES + 1)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CardCorruptError(f"[card {path.stem}] expected a file to read: {error}") from error
        if len(raw) > MAX_CARD_BYTES:
            raise CardFormatError(f"[card {path.stem}] size: expected up to {MAX_CARD_BYTES} bytes, got more")
        return decode(raw, path.stem)

    # --- away --------------------------------------------------------------------------------------

    def rm(self, name: str) -> None:
        """Forget the card, even a damaged one. Its segments stay until `gc`. Raises `CardNotFoundError`."""
        try:
            with self._locked():
                self._card_path(name).unlink()
                sync_folder(self._cards)
        except FileNotFoundError as error:
            raise CardNotFoundError(f"[CardStore] expected a card named {name!r}, got none") from error
        except OSError as error:
            raise CardWriteError(f"[CardStore] {name!r}: {error}") from error

    def revoke(self, keys: Collection[str]) -> tuple[tuple[str, ...], int]:
        """Refuse what has one of `keys` (`seal_keys`) from now on, and remove the cards that name it, with it and what
        was computed behind it, and segments that no card names, which may be it: the names of the cards, and the bytes
        freed. It waits for who is writing or reading now. Raises `CardWriteError`, which says how far it came."""
        names, gone, kept, freed, is_refused, are_known = [], set(), set(), 0, False, True
        try:
            with self._locked(alone=True):
                self._revoked.mkdir(mode=0o700, exist_ok=True)
                for key in keys:
                    os.close(os.open(self._revoked / key, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
                sync_folder(self._revoked)  # first: after a crash the rest is refused, if it is there
                is_refused, keys_gone = True, self._revoked_keys()
                for path in our_files(self._cards, CARD):
                    try:
                        card = self._read_card(path)
                    except CardError:
                        are_known = False  # a newer version may read it
                        continue
                    chain = [segment.digest for segment in card.segments]
                    revoked = [not keys_gone.isdisjoint(segment.keys) for segment in card.segments]
                    if any(revoked):
                        names.append(card.name)
                        freed += removed(path)
                        gone.update(chain[revoked.index(True) :])
                    else:
                        kept.update(chain)
                if are_known:
                    gone.update(path.stem for path in our_files(self._segments, _SEGMENT))
                freed += self._sweep() + sum(removed(self._segment_path(it)) for it in gone - kept)
                return tuple(sorted(names)), freed
        except OSError as error:
            what = "nothing of it is read again" if is_refused else "it is not revoked here"
            raise CardWriteError(f"[revoke] {error}; {what}") from error

    def _revoked_keys(self) -> set[str]:
        try:
            return set(os.listdir(self._revoked))
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise CardError(f"[CardStore] {self._revoked}: expected a folder to read: {error}") from error

    def _has_revoked(self, segments: Iterable[CardSegment | SharedSegment]) -> bool:
        keys = self._revoked_keys()
        return bool(keys) and any(not keys.isdisjoint(segment.keys) for segment in segments)

    def _require_valid(self, name: str, *segments: CardSegment | SharedSegment) -> None:
        if self._has_revoked(segments):
            raise RevokedError(f"[CardStore] {name!r}: expected a context to keep, got one that was revoked")

    def gc(self) -> int:
        """Remove the segments that no card names, and what crashes left; the bytes freed. It waits for who is writing
        or reading now.

        Raises `CardError` where a card cannot be read: what it names is unknown. `rm` or a newer version helps.
        """
        with self._locked(alone=True):
            freed = self._sweep()
            named = {
                segment.digest for path in our_files(self._cards, CARD) for segment in self._read_card(path).segments
            }
            return freed + sum(removed(path) for path in our_files(self._segments, _SEGMENT) if path.stem not in named)

    def sweep(self) -> int:
        """Remove what crashes left half-written; the bytes freed. It waits for who is writing or reading now."""
        with self._locked(alone=True):
            return self._sweep()

    def _sweep(self) -> int:
        return sum(removed(path) for folder, suffix in self._kinds for path in half_written(folder, suffix))

    # --- files -------------------------------------------------------------------------------------

    def _card_path(self, name: str) -> Path:
        """By a digest: names differ in ways that file systems do not keep apart, and are no paths."""
        if not isinstance(name, str):
            raise InvalidValueError(f"[CardStore] name: expected a str, got {name!r}")
        return self._cards / f"{digest_text(name)}{CARD}"

    def _segment_path(self, digest: str) -> Path:
        assert is_digest(digest), digest
        return self._segments / f"{digest}{_SEGMENT}"

    def _our_files(self) -> list[Path]:
        """All that is named as ours, with what crashes left half-written."""
        return [path for kind in self._kinds for path in (*our_files(*kind), *half_written(*kind))]

    @contextlib.contextmanager
    def _locked(self, *, alone: bool = False, waits: bool = True, name: str = ".lock") -> Iterator[None]:
        with locked(self.folder, alone=alone, waits=waits, name=name):
            yield


_SHARED_FIELDS = (
    "start", "num_tokens", "tokens_digest", "checksum", "residual_checksum", "own_domains", "domains", "nbytes",
)  # fmt: skip


def segment_file(segment: SharedSegment) -> SegmentFile:
    return describe(segment, tokens_digest(segment.token_ids))


def segments_of(
    views: Sequence[SegmentView], files: Sequence[SegmentFile], *, keep_tokens: bool
) -> tuple[CardSegment, ...]:
    """The segments of a card on `views`, which are in `files`."""
    chain: list[CardSegment] = []
    for view, (header, _) in zip(views, files, strict=True):
        segment = view.segment
        is_kept = keep_tokens and not are_hidden(segment.token_ids)
        chain.append(CardSegment(
            header.digest, chain[-1].digest if chain else None, segment.start, view.length, segment.num_tokens,
            segment.token_ids if is_kept else None, header.tokens_digest,
            segment.checksum, segment.residual_checksum,
            header.own_domains, header.domains, segment.origins, segment.nbytes,
        ))  # fmt: skip
    return tuple(chain)


def _package_of(card: Card, manager: SharedKVCacheManager, prefix: SharedPrefix) -> HandoffPackage:
    return HandoffPackage(
        manager=manager.id,
        sender=card.agent,
        sender_id=secrets.token_hex(8),
        sequence=1,
        fingerprint=manager.spec.fingerprint,
        quant=card.quant,
        spans=tuple(Span.of(view) for view in prefix.views),
        base_tokens=card.base_tokens,
        messages=card.messages,
        hops=card.hops,
        is_role_due=card.is_role_due,
    )
