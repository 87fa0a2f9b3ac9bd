"""Kernels compiled to shared objects with upstream Clang, kept in a cache folder."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .faults import CompileError, Mode, ToolchainMissing
from .frontend import entry_point, kernel_parameters, rewrite
from .instructions import Block, instrument

_HERE = Path(__file__).resolve().parent
_SHIM, ENGINE = _HERE / "shim", _HERE / "engine"
MLX_HEADERS = Path(mx.__file__).parent / "include"
PREAMBLE = ("mlx/backend/metal/kernels/utils.h",)  # what MLX puts in front of every custom kernel
_CLANG, _SYMBOLIZER = "clang++-19", "llvm-symbolizer-19"

_EXTENSIONS = "+cl_khr_fp16,+__opencl_c_program_scope_global_variables,+__cl_clang_function_pointers"
_GENERIC_POINTERS = "+__opencl_c_generic_address_space"
_LANGUAGE = ["-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "--target=x86_64-linux-gnu", "-march=x86-64-v3"]
# Every operation on bfloat rounds, as in Metal; C would round once per expression.
_LANGUAGE += ["-Xclang", "-fbfloat16-excess-precision=none"]
# Uninitialised private variables hold NaN. The Thread Sanitizer pass skips accesses wider than 16 bytes, hence no
# vectorization; the second access of a read-modify-write must not be skipped either.
_COMMON = ["-fPIC", "-fdenormal-fp-math=ieee", "-Wno-everything"]
_PATTERN = ["-ftrivial-auto-var-init=pattern"]
_RACE = ["-fsanitize=thread", "-fno-vectorize", "-fno-slp-vectorize"]
_RACE += ["-mllvm", "-tsan-instrument-read-before-write=1", "-mllvm", "-tsan-instrument-func-entry-exit=0"]
_ASAN = ["-fsanitize=address,undefined", "-fno-sanitize=vptr,function", "-fno-omit-frame-pointer"]
# What the text means to a GPU: address spaces, no vectors that it does not name, no 64-bit counters of loops; and
# loops unrolled where the number of turns is constant.
_COUNT = ["-O2", "-g1", "-Xclang", "-ffake-address-space-map", "-fno-vectorize", "-fno-slp-vectorize"]
_COUNT += ["-mllvm", "-indvars-widen-indvars=0", "-mllvm", "-unroll-runtime=0"]
_COMPILE = {
    "fast": ["-O2", "-g1", *_PATTERN],
    "race": ["-O1", "-g1", *_PATTERN, *_RACE],
    "asan": ["-O1", "-g", *_PATTERN, *_ASAN],
    "count": _COUNT,
}
_ENGINE_PARTS = ("engine.cpp", "faults.cpp", "launch.cpp")
_OBJECTS = {
    "fast": {name: ["-O2"] for name in _ENGINE_PARTS},
    "count": {name: ["-O2"] for name in _ENGINE_PARTS},
    "race": {name: ["-O2"] for name in (*_ENGINE_PARTS, "memcheck.cpp")},
    "asan": {name: ["-O1", "-g", "-fsanitize=address"] for name in _ENGINE_PARTS},
}
_LINK = {"fast": [], "count": [], "race": [], "asan": ["-fsanitize=address,undefined"]}
# The compiler's words for what Metal calls otherwise, in its messages.
_WORDS = {"__global": "device", "__local": "threadgroup", "__private": "thread", "__constant": "constant"}
_WORDS["__bf16"] = "bfloat"


@dataclass(frozen=True)
class KernelSource:
    """A Metal kernel function.

    `text` follows the headers of `includes`; `template_arguments` is "" or such as "<float, 128>". Lines of `text`
    are named `name.metal:line` in messages.
    """

    name: str
    function: str
    text: str = ""
    template_arguments: str = ""
    includes: tuple[str, ...] = PREAMBLE
    constants: tuple[tuple[int, bool | int], ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}.metal"

    def full_text(self) -> str:
        includes = "".join(f'#include "{header}"\n' for header in self.includes)
        return f'{includes}#line 1 "{self.file}"\n{self.text}'


@dataclass(frozen=True)
class Library:
    """A kernel built for one mode ("fast" serves "random" as well)."""

    source: KernelSource
    mode: Mode
    path: Path

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The instructions of every basic block; only in mode "count"."""
        return pickle.loads(self.path.with_suffix(".blocks").read_bytes()) if self.mode == "count" else ()

    def places_of(self, offsets: list[int]) -> dict[int, tuple[str, str]]:
        """(`file:line`, its text) of instructions, by their offsets into the shared object; ("", "") if unknown.

        An instruction that the compiler has moved has no line; that of one shortly before it stands in, marked "near".
        """
        if not offsets:
            return {}
        tried = {offset: [max(0, offset - back) for back in range(0, 64, 4)] for offset in offsets}
        addresses = [hex(address) for addresses in tried.values() for address in addresses]
        command = [_SYMBOLIZER, f"--obj={self.path}", "--functions=none", "--inlines", *addresses]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        # A block of frames, innermost first, for each address.
        blocks = iter([self._place_of_frames(block.split()) for block in output.strip().split("\n\n")])
        found = {offset: [next(blocks) for _ in addresses] for offset, addresses in tried.items()}
        return {offset: places[0] if places[0][0] else _first_known(places) for offset, places in found.items()}

    def _place_of_frames(self, frames: list[str]) -> tuple[str, str]:
        places = [frame.rsplit(":", 2)[:2] for frame in frames if not frame.startswith(("??", str(_SHIM)))]
        places = [place for place in places if place[1] != "0"]
        own = [place for place in places if Path(place[0]).name == self.source.file]
        file, line = next(iter(own or places), ("", "0"))
        return self.place(file, int(line)) if file else ("", "")

    def place(self, file: str, line: int) -> tuple[str, str]:
        """(`file:line`, its text) of a line of the kernel's own text, or of a header."""
        path, name = Path(file), Path(file).name
        text = self.source.text if name == self.source.file else path.read_text() if path.is_file() else ""
        lines = text.splitlines()
        return f"{name}:{line}", lines[line - 1].strip() if 0 < line <= len(lines) else ""


def _first_known(places: list[tuple[str, str]]) -> tuple[str, str]:
    place, code = next((known for known in places if known[0]), ("", ""))
    return (f"near {place}", code) if place else ("", "")


def require_toolchain() -> None:
    """Raise ToolchainMissing, saying what is missing, unless kernels can be built here."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise ToolchainMissing(f"needs x86-64 Linux, this is {platform.machine()} {platform.system()}")
    for program in (_CLANG, _SYMBOLIZER):
        if shutil.which(program) is None:
            raise ToolchainMissing(f"needs {program}: apt-get install clang-19 llvm-19 libclang-rt-19-dev")


def default_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"metalsim-{os.getuid()}"


def language_flags(*, generic_pointers: bool) -> list[str]:
    extensions = "-cl-ext=-all," + _EXTENSIONS + ("," + _GENERIC_POINTERS if generic_pointers else "")
    return [*_LANGUAGE, "-Xclang", extensions]


def translate(
    source: KernelSource, cache: Path, *, generic_pointers: bool = True, defines: tuple[str, ...] = ()
) -> str:
    """C++ for OpenCL with the entry point; line numbers are those of the source.

    Raises:
        CompileError: the text cannot be preprocessed or rewritten, or has no such kernel.
    """
    flags = [*language_flags(generic_pointers=generic_pointers), "-I", str(_SHIM), "-I", str(MLX_HEADERS)]
    flags += [f"-D{define}" for define in defines]
    preprocessed = run_clang([*flags, "-E", "-"], source.name, source.full_text()).stdout
    # The preamble is long and the same for all kernels: its rewritten text is kept.
    split = preprocessed.index(f'# 1 "{source.file}"')
    head, tail = preprocessed[:split], preprocessed[split:]
    parameters = kernel_parameters(tail, source.function) or kernel_parameters(head, source.function)
    if parameters is None:
        raise CompileError(source.name, f"no kernel function {source.function!r}")
    kept = cache / f"{_digest(head, source.constants, _fingerprint())}.head"
    try:
        if not kept.exists():
            scratch = kept.with_suffix(f".{os.getpid()}")
            scratch.write_text(rewrite(head, dict(source.constants), part=0))
            scratch.replace(kept)
        text = kept.read_text() + rewrite(tail, dict(source.constants), part=1)
    except ValueError as error:
        raise CompileError(source.name, str(error)) from error
    return text + entry_point(source.function + source.template_arguments, parameters)


def build(source: KernelSource, mode: Mode, cache: Path | None = None, *, fast_ulp: int = 0) -> Library:
    """Compile a kernel for a mode, or find it in the cache.

    Raises:
        CompileError: the kernel is not valid.
        ToolchainMissing: there is no clang-19.
    """
    require_toolchain()
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    kind: Mode = "fast" if mode == "random" else mode
    path = cache / f"{_digest(source, kind, fast_ulp, _fingerprint())}.so"
    if not path.exists():
        defines = (f"MSL_FAST_ULP={fast_ulp}",) if fast_ulp else ()
        _compile(source, kind, translate(source, cache, defines=defines), path)
    return Library(source, kind, path)


def build_ir(source: KernelSource, text: str, cache: Path | None = None) -> Library:
    """A library for mode "fast" from LLVM's text of a kernel with its entry point, see air.py; `source` names it."""
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{_digest(text, _fingerprint())}.so"
    if not path.exists():
        objects = [_built(cache, name, ["-fPIC", "-c", *_OBJECTS["fast"][name]]) for name in _ENGINE_PARTS]
        objects.append(_built(cache, "air.cpp", ["-fPIC", "-c", "-O2", "-march=x86-64-v3"]))
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            code, library = Path(folder) / "kernel.ll", Path(folder) / "kernel.so"
            code.write_text(text)
            flags = ["-shared", "-fPIC", "-O2", "-march=x86-64-v3", "-Wno-everything", "-Wl,-z,defs"]
            files = ["-x", "ir", str(code), "-x", "none", *map(str, objects), "-lm"]
            run_clang([*flags, *files, "-o", str(library)], source.name)
            library.replace(path)
    return Library(source, "fast", path)


def runner(cache: Path | None = None) -> Path:
    """The program that runs libraries of mode "asan"."""
    cache = cache or default_cache()
    return _built(cache, "runner.cpp", ["-O1", "-g", "-fsanitize=address,undefined"], suffix="")


def _compile(source: KernelSource, kind: Mode, text: str, path: Path) -> None:
    objects = [_built(path.parent, name, ["-fPIC", "-c", *flags]) for name, flags in _OBJECTS[kind].items()]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, kernel, library = (Path(folder) / name for name in ("kernel.cl", "kernel.o", "kernel.so"))
        code.write_text(text)
        flags = [*language_flags(generic_pointers=True), *_COMMON, *_COMPILE[kind]]
        if kind == "count":
            found = instrument(run_clang([*flags, "-S", "-emit-llvm", str(code), "-o", "-"], source.name).stdout, _SHIM)
            path.with_suffix(".blocks").write_bytes(pickle.dumps(found.blocks))
            code = code.with_suffix(".ll")
            code.write_text(found.text)
            flags = ["-O1", "-Xclang", "-disable-llvm-passes", "-fPIC", "-march=x86-64-v3", "-Wno-everything"]
        run_clang([*flags, "-c", str(code), "-o", str(kernel)], source.name)
        run_clang(["-shared", "-o", str(library), str(kernel), *map(str, objects), *_LINK[kind], "-lm"], source.name)
        library.replace(path)


def _built(cache: Path, name: str, flags: list[str], suffix: str = ".o") -> Path:
    """A part of the engine, compiled once per cache."""
    path = cache / f"{_digest(name, flags, _fingerprint())}{suffix}"
    if not path.exists():
        scratch = path.with_suffix(f".{os.getpid()}")
        run_clang(["-std=c++17", *flags, str(ENGINE / name), "-o", str(scratch)], name)
        scratch.replace(path)
    return path


@functools.cache
def _fingerprint() -> str:
    """Of everything but the kernel that a built library depends on."""
    files = [path for path in sorted(_HERE.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    return _digest(mx.__version__, *(path.read_bytes() for path in files))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def run_clang(
    arguments: list[str], kernel: str, text: str | None = None, *, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """A run of the compiler over `text`; with `check` its first error line becomes a CompileError."""
    result = subprocess.run([_CLANG, *arguments], capture_output=True, text=True, input=text, check=False)
    for word, metal_word in _WORDS.items():
        result.stderr = result.stderr.replace(word, metal_word)
    if check and result.returncode:
        errors = [line for line in result.stderr.splitlines() if "error:" in line]
        errors.sort(key=lambda line: not line.startswith(f"{kernel}.metal"))  # its own lines say most
        raise CompileError(kernel, next(iter(errors), result.stderr[-500:]), result.stderr)
    return result
