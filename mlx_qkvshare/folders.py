"""Where the package keeps what it writes for a user, and how a file is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def default_cache_dir() -> Path:
    """The user's folder for converted models, for what was measured on this machine, and for cards."""
    folder = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / folder / "mlx_qkvshare"


def default_store_dir() -> Path:
    """The user's folder of cards."""
    return default_cache_dir() / "cards"


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` at the end of the block: a reader sees the old one or the new
    one. It has the suffix of `path`, whose folder is made. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(name, path)
        sync_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """The names in it survive a power cut from here on. Raises `OSError`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
