"""Where the package keeps what it writes for a user, and how a small file is written whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def default_cache_dir() -> Path:
    """The user's folder for converted models and for what was measured on this machine."""
    folder = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / folder / "mlx_qkvshare"


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one. Makes the folder; raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
