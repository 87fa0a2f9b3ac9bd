"""Static checks that the build for running does not make."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from .compiler import PREAMBLE, KernelSource, default_cache, language_flags, require_toolchain, run_clang, translate

_WARNINGS = ["conversion", "uninitialized", "sometimes-uninitialized", "conditional-uninitialized"]
_WARNINGS += ["unused-value", "array-bounds"]
# Of the conversions only those to bfloat matter: Metal makes none implicitly, Clang does.
_WORRYING = re.compile(" to '.*bfloat|uninitialized|unused|out of bounds|past the end")


def complaints(source: KernelSource, cache: Path | None = None) -> list[str]:
    """Lines of the compiler that say what Metal would reject or what is surely wrong; empty for a good kernel.

    Pointers without an address space, implicit conversions to bfloat, uses of uninitialised variables, constant
    indices out of range. MLX's preamble is replaced by a small one: a kernel that uses more of it than
    its types is not judged.

    Raises:
        CompileError: the text cannot even be preprocessed.
        ToolchainMissing: there is no clang-19.
    """
    require_toolchain()
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    others = tuple(header for header in source.includes if header not in PREAMBLE)
    strict = replace(source, includes=("msl/strict_preamble.h", *others))
    text = translate(strict, cache, generic_pointers=False)
    flags = [*language_flags(generic_pointers=False), "-fsyntax-only", "-Wno-everything", "-ferror-limit=50"]
    flags += [f"-W{warning}" for warning in _WARNINGS]
    messages = run_clang([*flags, "-"], source.name, text, check=False).stderr
    return [line for line in messages.splitlines() if _is_complaint(line, source.file)]


def _is_complaint(line: str, file: str) -> bool:
    """Errors count wherever they are: one in a header can be the kernel's doing."""
    return "error:" in line or ("warning:" in line and line.startswith(file) and bool(_WORRYING.search(line)))
