"""What is installed here, and on what."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# x86 has a name and numbers that tell two of one name apart; ARM has numbers alone.
_CPU_FIELDS = ("model name", "cpu family", "model", "CPU implementer", "CPU part")


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


@functools.cache
def cpu_model() -> str:
    """What the CPU calls itself; "" where the system does not tell."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        first, _, _ = _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")
        pairs = (line.partition(":") for line in first.splitlines())
        found = {name.strip(): value.strip() for name, _, value in pairs}
        return " ".join(found[name] for name in _CPU_FIELDS if name in found)
    return ""
