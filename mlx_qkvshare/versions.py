"""What is installed here."""

from __future__ import annotations

import importlib.metadata
import platform


def versions() -> dict[str, str]:
    names = ("mlx-qkvshare", "mlx", "mlx-lm", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {"python": platform.python_version(), **found}
