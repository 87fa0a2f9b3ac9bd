"""The files of a store: found, opened, locked and removed by nobody else's name than a digest's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .digest import is_digest
from .errors import CardCorruptError, CardError, CardWriteError


def is_whole(name: str, suffix: str) -> bool:
    """Is a file of this name one that is named by a digest?"""
    return name.endswith(suffix) and is_digest(name.removesuffix(suffix))


def is_half_written(name: str, suffix: str) -> bool:
    """Is it what `written_whole` left of one in a crash?"""
    return name.startswith(".") and name.endswith(suffix) and is_digest(name[1:].split(".")[0])


def our_files(folder: Path, suffix: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_whole(path.name, suffix))


def half_written(folder: Path, suffix: str) -> list[Path]:
    return [path for path in folder.iterdir() if is_half_written(path.name, suffix)]


@contextlib.contextmanager
def plain_file(path: Path) -> Iterator[BinaryIO]:
    """A plain file, not a link or a pipe, to read. Raises `OSError` and `CardCorruptError`."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CardCorruptError(f"[CardStore] {path.name}: expected a plain file, got another kind")
        yield file


@contextlib.contextmanager
def locked(folder: Path, *, alone: bool = False, waits: bool = True, name: str = ".lock") -> Iterator[None]:
    """Hold a lock of the folder's, together with others or alone.

    Raises `CardError`, and `BlockingIOError` where it does not wait and would have to.
    """
    try:
        handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CardError(f"[CardStore] {folder}: expected a folder to lock: {error}") from error
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if waits else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)  # which also lets go of the lock


def identity(status: os.stat_result) -> tuple[int, int, int]:
    """Inode, size and time: another one is another content."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def removed(path: Path) -> int:
    """The bytes that went; 0 where others were faster. Raises `CardWriteError`."""
    try:
        size = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise CardWriteError(f"[CardStore] {path.name}: {error}") from error
    return size
