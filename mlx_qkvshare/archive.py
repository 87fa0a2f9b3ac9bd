"""A card and its segments as one file, to be carried elsewhere.

An uncompressed zip in the one form that we write: the card, then its segments, each under its digest, and as the zip's
comment a digest of all before it. Nothing from it is ever a path, and nothing is unpacked to more than it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from .card import MAX_CARD_BYTES, Card, CardSegment, decode
from .digest import DIGEST_BYTES, digest_region, joined
from .errors import CardCorruptError, CardError, CardFormatError, CardWriteError, InvalidValueError
from .folders import written_whole
from .segment_file import read_header
from .store import CardStore

_CARD = "card.json"
_COPIED_BYTES = 1 << 20
_COMMENT_BYTES = 2 * DIGEST_BYTES
_END_BYTES = 22  # of a zip's last record, the comment aside
_BROKEN = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError),
    *(EOFError, ValueError, LookupError, OverflowError, struct.error),
)


def export_card(store: CardStore, name: str, path: str | os.PathLike[str]) -> Card:
    """Write the card and all that it names to `path`, in place of what is there; only its owner may read it.

    Equal cards give equal files.

    Raises:
        CardNotFoundError, CardCorruptError, CardFormatError: as `CardStore.verify`; nothing was written.
        CardWriteError: no room, or no right to write; what was at `path` is still there, whole.
    """
    with store.reading(name) as (card, opened):
        try:
            with written_whole(Path(path)) as partial, open(partial, "rb+") as file:
                with zipfile.ZipFile(file, "w") as archive:
                    archive.comment = b"0" * _COMMENT_BYTES
                    archive.writestr(_member(_CARD), card.encoded())
                    for segment in card.distinct_segments:
                        with opened(segment) as source:
                            _add(archive, _name(segment), source)
                num_bytes = file.seek(0, os.SEEK_END) - _COMMENT_BYTES
                file.flush()
                found = _digest(file, num_bytes)
                file.seek(num_bytes)
                file.write(found)
            return card
        except OSError as error:
            raise CardWriteError(f"[export_card] {os.fspath(path)!r}: {error}") from error


def import_card(
    store: CardStore, path: str | os.PathLike[str], name: str | None = None, *, replace: bool = False
) -> Card:
    """Keep the card that `export_card` wrote to `path`, under `name` or under its own.

    Every byte is verified before anything is named in the store; after a failure the store is as it was.

    Raises:
        CardCorruptError: the file or what is in it has changed.
        CardFormatError: it is none of ours.
        CardError: it cannot be read; or a card of this name is there, and not to be replaced.
        RevokedError: of what it holds something was revoked in the store.
        CardWriteError: no room in the store, or no right to write there.
    """
    if name is not None and not isinstance(name, str):
        raise InvalidValueError(f"[import_card] name: expected a str, got {name!r}")
    with _opened(path) as (archive, card):

        def copy(segment: CardSegment, target: BinaryIO) -> None:
            member = archive.getinfo(_name(segment))
            with _typed(path), archive.open(member) as source:
                # A header that its name vouches for says how long the member is.
                header = read_header(cast(BinaryIO, source), segment.digest, member.file_size)
                target.write(header.encoded)
                shutil.copyfileobj(source, target, _COPIED_BYTES)

        card = card if name is None else dataclasses.replace(card, name=name)
        store.add(card, copy, replace=replace)
        return card


def _add(archive: zipfile.ZipFile, name: str, source: BinaryIO) -> None:
    member = _member(name)
    member.file_size = os.fstat(source.fileno()).st_size
    with archive.open(member, "w") as target:
        shutil.copyfileobj(source, target, _COPIED_BYTES)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[zipfile.ZipFile, Card]]:
    """An archive of ours, whose bytes are those that were written, and the card in it."""
    where = f"[import_card] {os.fspath(path)!r}"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CardError(f"{where}: expected a file to read: {error}") from error
    status = os.fstat(handle)
    num_bytes = status.st_size - _COMMENT_BYTES
    if not stat.S_ISREG(status.st_mode) or num_bytes < _END_BYTES:
        os.close(handle)
        raise CardFormatError(f"{where}: expected an exported card, got another kind of file")
    with open(handle, "rb") as file:
        expected, found = os.pread(handle, _COMMENT_BYTES, num_bytes), _digest(file, num_bytes)
        if found != expected:
            raise CardCorruptError(f"{where}: expected {expected!r}, the digest of all before it, got {found!r}")
        with _typed(path):
            archive = zipfile.ZipFile(file)
            card = _card_in(archive, num_bytes)
        yield archive, card


def _card_in(archive: zipfile.ZipFile, num_bytes: int) -> Card:
    """The card, of which and of whose segments, in their order, all members are."""
    members = archive.infolist()
    for member in members:
        ours = _member(member.filename)
        if any(getattr(member, it) != getattr(ours, it) for it in _FIXED):
            raise CardFormatError(f"[import_card] expected members as we write them, got {member!r}")
    if sum(member.file_size for member in members) > num_bytes:
        raise CardFormatError(f"[import_card] expected members of up to {num_bytes} bytes, got more")
    if not members or members[0].filename != _CARD or members[0].file_size > MAX_CARD_BYTES:
        raise CardFormatError(f"[import_card] expected {_CARD!r} first, got {members[:1]}")
    card = decode(archive.read(members[0]), "in the archive")
    names = [_CARD, *map(_name, card.distinct_segments)]
    for expected, found in itertools.zip_longest(names, (member.filename for member in members)):
        if found != expected:
            raise CardFormatError(f"[import_card] expected the member {expected!r}, got {found!r}")
    return card


def _member(name: str) -> zipfile.ZipInfo:
    """A plain file that is not compressed, of no date."""
    member = zipfile.ZipInfo(name)
    member.create_system, member.external_attr = 3, (stat.S_IFREG | 0o600) << 16
    return member


_FIXED = ("orig_filename", "date_time", "compress_type", "create_system", "external_attr", "flag_bits", "comment")


def _name(segment: CardSegment) -> str:
    return f"segments/{segment.digest}.safetensors"


def _digest(file: BinaryIO, num_bytes: int) -> bytes:
    return joined([digest_region(file.fileno(), 0, num_bytes)]).encode()


@contextlib.contextmanager
def _typed(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except _BROKEN as error:
        raise CardFormatError(f"[import_card] {os.fspath(path)!r}: expected an exported card: {error!r}") from error
