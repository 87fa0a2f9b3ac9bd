"""What is installed here."""

from __future__ import annotations

import functools
import importlib.metadata
import platform


@functools.cache  # reading them takes as long as hashing 7 MB
def versions() -> dict[str, str]:
    names = ("mlx-qkvshare", "mlx", "mlx-lm", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {"python": platform.python_version(), **found}
