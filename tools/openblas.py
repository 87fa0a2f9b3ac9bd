"""Prints the `env …` prefix that puts OpenBLAS under MLX's Linux CPU wheel; on macOS nothing.

The wheel links the reference BLAS; preloading OpenBLAS makes float32 matmul tens of times faster.
Run it with the Python that will be prefixed:  eval "$(python tools/openblas.py) python …"
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

LIBRARY = "libopenblas.so.0"
PROBE = "import ctypes; ctypes.CDLL(None).openblas_get_config"  # raises unless it was preloaded


def first_in(variable: str, value: Path | str) -> str:
    return ":".join(filter(None, [str(value), os.environ.get(variable, "")]))


def is_loadable(variables: dict[str, str]) -> bool:
    result = subprocess.run([sys.executable, "-c", PROBE], env=os.environ | variables, capture_output=True)
    return result.returncode == 0


def wheel_variables() -> dict[str, str]:
    """cmeel-openblas brings no libgfortran; MLX's wheel brings one, under a name of its own."""
    site = Path(sysconfig.get_paths()["platlib"])
    links, bundled = Path(sys.prefix, "lib", "openblas"), site / "mlx_cpu.libs"
    found = {"libgfortran.so.5": next(bundled.glob("libgfortran-*.so.5*"), None)}
    found[LIBRARY] = next((site / "cmeel.prefix" / "lib").glob(LIBRARY), None)
    for name, target in found.items():
        if target is None:
            return {}
        links.mkdir(exist_ok=True)
        (links / name).unlink(missing_ok=True)
        (links / name).symlink_to(target)
    # The bare library name: LD_PRELOAD would split a path at a space.
    return {"LD_LIBRARY_PATH": first_in("LD_LIBRARY_PATH", f"{links}:{bundled}")}


if sys.platform == "linux":
    preload = {"LD_PRELOAD": first_in("LD_PRELOAD", LIBRARY)}
    variables = preload if is_loadable(preload) else wheel_variables() | preload
    if is_loadable(variables):
        print("env", *(f"{name}={shlex.quote(value)}" for name, value in variables.items()))
    else:
        print(f"no {LIBRARY}: right, but slow (Debian: apt install libopenblas0-pthread)", file=sys.stderr)
