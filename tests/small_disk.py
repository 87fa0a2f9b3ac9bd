"""A real file system of a few MB to run something on until it is full: in a mount namespace of its own on Linux, which
needs no root where users may have one, in a disk image on macOS."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_NO_MOUNT = 77
_MOUNT = f'mount -t tmpfs -o size="$1" none "$2" || exit {_NO_MOUNT}; shift 2; exec "$@"'


def run_on_small_disk(folder: Path, num_bytes: int, command: Sequence[str], **options) -> str | None:
    """Run `command` while `folder` is an empty file system of `num_bytes`; None, or why there can be none.

    Raises `CalledProcessError` where the command fails.
    """
    if sys.platform == "darwin":
        return _on_an_image(folder, num_bytes, command, **options)
    for flags in ("-Urm", "-m"):
        if (unshare := shutil.which("unshare")) is None:
            return "no unshare"
        line = [unshare, flags, "sh", "-c", _MOUNT, "sh", str(num_bytes), str(folder), *command]
        done = subprocess.run(line, capture_output=True, text=True, **options)
        if done.returncode == 0:
            return None
        # unshare itself ends with 1 where it may not make a namespace, and says so
        if done.returncode != _NO_MOUNT and not done.stderr.startswith("unshare:"):
            raise subprocess.CalledProcessError(done.returncode, line, done.stdout, done.stderr)
    return done.stderr.strip()


def _on_an_image(folder: Path, num_bytes: int, command: Sequence[str], **options) -> str | None:
    image = folder.with_suffix(".dmg")
    create = ["hdiutil", "create", "-size", f"{num_bytes // 1024}k", "-fs", "HFS+", "-volname", "small", str(image)]
    attach = ["hdiutil", "attach", "-nobrowse", "-mountpoint", str(folder), str(image)]
    for line in (create, attach):
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip()
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, **options)
    finally:
        subprocess.run(["hdiutil", "detach", "-force", str(folder)], check=True, capture_output=True)
    return None
