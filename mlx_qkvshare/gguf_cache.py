"""Converted models on disk: each is built once, appears whole or not at all, and carries a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from .errors import ModelLoadError
from .fingerprint import digest_arrays

MANIFEST = "qkvshare-manifest.json"
_FORMAT = 1
_PARTIAL = ".partial-"
_STALE_SECONDS = 24 * 3600
_HASHED_BYTES = 32 << 20


def converted(folder: Path, name: str, build: Callable[[Path], None]) -> Path:
    """`folder / name`, built by `build(path)` unless a whole copy stands there already.

    The copy is made beside its place and renamed into it, so a crash leaves no half model; of two
    processes that build at once, one wins and both return a whole copy. A damaged copy is replaced.

    Raises:
        ModelLoadError: the folder cannot be written to.
    """
    target = folder / name
    if is_whole(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        work = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
    except OSError as error:
        raise ModelLoadError(f"[cache] {folder}: cannot write here ({error}); give another cache_dir") from error
    try:
        build(work / "model")
        _write_manifest(work / "model")
        _publish(work / "model", target)
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"[cache] {target}: cannot be written ({error}); give another cache_dir") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _publish(work: Path, target: Path) -> None:
    for attempt in range(3):
        try:
            os.replace(work, target)
            return
        except OSError:  # a folder stands there: another process was first, or it is damaged
            if is_whole(target):
                return
            if attempt == 2 or not target.exists():
                raise
            os.replace(target, work.with_name(f"damaged-{attempt}"))


def _sweep(folder: Path) -> None:
    """Remove what killed processes left behind; a day is longer than any conversion."""
    for partial in folder.glob(f"{_PARTIAL}*"):
        if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(partial, ignore_errors=True)


def _file_record(path: Path) -> dict[str, object]:
    """Size, and for the small files (config, tokenizer) a hash. Weights are checked by content once they are loaded."""
    num_bytes = path.stat().st_size
    is_hashed = path.suffix == ".json" and num_bytes <= _HASHED_BYTES
    return {"bytes": num_bytes, "blake2b": hashlib.blake2b(path.read_bytes()).hexdigest() if is_hashed else None}


def _write_manifest(target: Path) -> None:
    files = {path.name: _file_record(path) for path in sorted(target.iterdir())}
    arrays: list[tuple[str, mx.array]] = []
    for path in sorted(target.glob("model*.safetensors")):
        loaded = mx.load(str(path))
        assert isinstance(loaded, dict)
        arrays += loaded.items()
    manifest = {"format": _FORMAT, "files": files, "weights": digest_arrays(arrays)}
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _read_manifest(target: Path) -> dict | None:
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == _FORMAT else None


def is_whole(target: Path) -> bool:
    """Whether the manifest is there and every file has its size, and the small ones their hash. A few milliseconds."""
    manifest = _read_manifest(target)
    if manifest is None:
        return False
    try:
        return all(_file_record(target / name) == record for name, record in manifest["files"].items())
    except OSError:
        return False


def recorded_weights(target: Path) -> str | None:
    """The digest of the weights as they were written (`fingerprint.digest_arrays`), or None for other folders."""
    manifest = _read_manifest(target)
    return None if manifest is None else manifest["weights"]
