"""MLX's kernels as Apple's compiler left them, run on the engine: a second opinion on the simulator's front end.

The macOS wheel of MLX carries `mlx.metallib`, thousands of kernel functions in AIR, which is LLVM bitcode with
intrinsics of its own. `build` turns one of them into a library that `launch` runs like any other:

1. `llvm-dis` prints it as text, whose target becomes this machine's.
2. Function constants get their values. Threadgroup variables become visible from outside, so that no optimizer takes
   them for one thread's own.
3. An entry point is written from the kernel's metadata, which names every argument's buffer or built-in value.
4. Clang compiles it and links it with the engine and with engine/air.cpp, which has the intrinsics.

The wheel is downloaded into the cache folder, never into the checkout, and read there.
"""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx

from .compiler import ENGINE, KernelSource, Library, build_ir, default_cache, require_toolchain
from .faults import CompileError, ToolchainMissing

_DISASSEMBLER = "llvm-dis-19"
_PLATFORM, _METALLIB = "macosx_14_0_arm64", "mlx/lib/mlx.metallib"
_FUNCTIONS_AT, _BITCODE_AT = 0x18, 0x48  # in the metallib's header
_DATA_LAYOUT = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-i128:128-f80:128-n8:16:32:64-S128"
_MULTIPLY = "@air.simdgroup_matrix_8x8_multiply_accumulate.v64f32.v64f32.v64f32.v64f32"
# A function of C++ cannot take such vectors as AIR passes them; it gets their address.
_MULTIPLY_BODY = f"""
declare void @air.multiply_accumulate(ptr)
define internal <64 x float> {_MULTIPLY}(<64 x float> %left, <64 x float> %right, <64 x float> %sum) {{
  %all = alloca [3 x <64 x float>]
  %at.right = getelementptr <64 x float>, ptr %all, i64 1
  %at.sum = getelementptr <64 x float>, ptr %all, i64 2
  store <64 x float> %left, ptr %all
  store <64 x float> %right, ptr %at.right
  store <64 x float> %sum, ptr %at.sum
  call void @air.multiply_accumulate(ptr %all)
  %result = load <64 x float>, ptr %at.sum
  ret <64 x float> %result
}}"""


class WheelMissing(Exception):
    """The macOS wheel of MLX cannot be downloaded here; the message says why."""


def require_disassembler() -> None:
    """Raise ToolchainMissing, saying what is missing, unless AIR can be built here."""
    require_toolchain()
    if shutil.which(_DISASSEMBLER) is None:
        raise ToolchainMissing(f"needs {_DISASSEMBLER}: apt-get install llvm-19")


@functools.cache
def wheel(cache: Path | None = None) -> Path:
    """The macOS wheel of the MLX that is installed, 45 MB; downloaded once per cache.

    Raises:
        WheelMissing: there is none of this version, or no network.
    """
    folder = (cache or default_cache()) / "wheels"
    pattern = f"mlx_metal-{mx.__version__}-*{_PLATFORM}.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--retries", "1", "--timeout", "20", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", _PLATFORM, "--dest", str(folder), f"mlx-metal=={mx.__version__}"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        except subprocess.TimeoutExpired as error:
            raise WheelMissing(f"mlx-metal {mx.__version__}: not downloaded after {error.timeout} s") from error
        if result.returncode:
            reason = next(iter(result.stderr.strip().splitlines()[-1:]), f"pip ended with {result.returncode}")
            raise WheelMissing(f"mlx-metal {mx.__version__}: {reason}")
    return next(folder.glob(pattern))


@functools.cache
def functions(cache: Path | None = None) -> dict[str, memoryview]:
    """The bitcode of every function of MLX's metallib, by name."""
    with zipfile.ZipFile(wheel(cache)) as archive:
        data = memoryview(archive.read(_METALLIB))
    (table,), (bitcode,) = (struct.unpack_from("<Q", data, at) for at in (_FUNCTIONS_AT, _BITCODE_AT))
    (count,) = struct.unpack_from("<I", data, table)
    found, entry = {}, table + 4
    for _ in range(count):
        tags, at = {}, entry + 4
        while (tag := bytes(data[at : at + 4])) != b"ENDT":  # each a name of four letters, a length and as many bytes
            (length,) = struct.unpack_from("<H", data, at + 4)
            tags[tag] = data[at + 6 : at + 6 + length]
            at += 6 + length
        (*_, offset), (size,) = struct.unpack("<3Q", tags[b"OFFT"]), struct.unpack("<Q", tags[b"MDSZ"])
        found[bytes(tags[b"NAME"]).rstrip(b"\0").decode()] = data[bitcode + offset : bitcode + offset + size]
        entry += struct.unpack_from("<I", data, entry)[0]
    return found


def disassembled(name: str, cache: Path | None = None) -> str:
    """A function of the metallib as LLVM's text.

    Raises:
        CompileError: the metallib has no such function.
    """
    bitcode = functions(cache).get(name)
    if bitcode is None:
        raise CompileError(name, "no such function in MLX's metallib")
    return subprocess.run([_DISASSEMBLER, "-o", "-"], input=bitcode, capture_output=True, check=True).stdout.decode()


def build(source: KernelSource, name: str, cache: Path | None = None) -> Library:
    """A library for mode "fast" of the metallib's function `name`, which stands for `source`.

    Raises:
        CompileError: there is no such function, or one that uses what is not known here.
        ToolchainMissing, WheelMissing: it cannot be had here.
    """
    require_disassembler()
    text = disassembled(name, cache)
    unknown = set(re.findall(r"^declare .*@air\.([\w.]+)\(", text, re.MULTILINE)) - _intrinsics()
    if unknown:
        raise CompileError(name, f"not in engine/air.cpp: {', '.join(sorted(unknown))}")
    return build_ir(source, retargeted(text, name, dict(source.constants)), cache)


def retargeted(text: str, name: str, constants: dict[int, bool | int]) -> str:
    """LLVM's text of a function of AIR for this machine, with the engine's entry point."""

    def constant(match: re.Match[str]) -> str:
        if int(match["index"]) not in constants:
            raise CompileError(name, f"function constant {match['index']} has no value")
        return f"{match['before']}constant {match['type']} {int(constants[int(match['index'])])},"

    text = re.sub(r"^target datalayout = .*$", f'target datalayout = "{_DATA_LAYOUT}"', text, flags=re.MULTILINE)
    text = re.sub(r"^target triple = .*$", 'target triple = "x86_64-unknown-linux-gnu"', text, flags=re.MULTILINE)
    initializer = r"^(?P<before>@\S+\.MTL_FC_INIT_(?P<index>\d+)_\S+ = .*)"
    initializer += r"externally_initialized constant (?P<type>i\d+) undef,"
    text = re.sub(initializer, constant, text, flags=re.MULTILINE)
    text = text.replace("= internal unnamed_addr addrspace(3) global", "= addrspace(3) global")
    text = re.sub(rf"^declare .*{re.escape(_MULTIPLY)}\(.*$", _MULTIPLY_BODY, text, flags=re.MULTILINE)
    return text + _entry_point(text, name)


def _entry_point(text: str, name: str) -> str:
    """`msl_entry` of engine.h, which loads every argument of the kernel."""
    nodes = dict(re.findall(r"^!(\d+) = (?:distinct )?!\{(.*)\}$", text, re.MULTILINE))
    (kernel,) = re.findall(r"^!air\.kernel = !\{!(\d+)\}$", text, re.MULTILINE)
    arguments = re.findall(r"!(\d+)", nodes[re.findall(r"!(\d+)", nodes[kernel])[1]])
    parameters = re.search(rf"^define .*@{re.escape(name)}\((.*)\) ", text, re.MULTILINE)
    assert parameters is not None, name
    types = re.findall(r"(?:^|, )(ptr(?: addrspace\(\d\))?|<\d+ x i32>|i32|i16)(?= )", parameters[1])
    if len(types) != len(arguments):
        raise CompileError(name, f"{len(arguments)} arguments, of which {len(types)} have a type known here")
    lines, values, offsets = [], [], _context_offsets()
    for i, (kind, argument) in enumerate(zip(types, arguments, strict=True)):
        node = nodes[argument]
        buffer, builtin = re.search(r'"air\.location_index", i32 (\d+)', node), re.search(r'"air\.(\w+)"', node)
        if buffer and "addrspace(3)" not in kind:
            place = f"%arguments, i64 {8 * int(buffer[1])}"
        elif builtin and builtin[1] in offsets:
            place = f"%context, i64 {offsets[builtin[1]]}"
        else:
            raise CompileError(name, f"argument {i} is not known here: {node}")
        lines += [f"  %at{i} = getelementptr i8, ptr {place}", f"  %value{i} = load {kind}, ptr %at{i}, align 4"]
        values.append(f"{kind} %value{i}")
    lines += [f"  call void @{name}({', '.join(values)})", "  ret void", "}", ""]
    return "\n".join(["define void @msl_entry(ptr %arguments, ptr %context) {", *lines])


@functools.cache
def _intrinsics() -> set[str]:
    names = re.findall(r'^AIR\(\w+, \w+, "([\w.]+)"', (ENGINE / "air.cpp").read_text(), re.MULTILINE)
    return {_MULTIPLY.removeprefix("@air."), *names}


@functools.cache
def _context_offsets() -> dict[str, int]:
    """Where `Context` of engine.h holds a built-in value; all of them are made of 32-bit numbers."""
    body = re.search(r"struct Context \{(.*?)\};", (ENGINE / "engine.h").read_text(), re.DOTALL)
    assert body is not None
    offsets, at = {}, 0
    for field, size in re.findall(r"(\w+)(?:\[(\d)\])?[,;]", body[1]):
        offsets[field] = at
        at += 4 * int(size or 1)
    return offsets
