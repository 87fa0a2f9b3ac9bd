"""What a kernel executes, by class: its optimised LLVM IR, with a counter in every basic block.

An instruction of a vector counts once for each element, a load or store once for each 16 bytes, and what stands for
one hardware instruction (simdgroup operations, barriers, `exp`) once. Free: phi, truncation, casts without effect,
what moves elements between registers, constant offsets of addresses. Classes: `float`, `integer`, `wide` (integers of
64 bits), `compare` (and choose), `convert`, `special` (divisions, roots, library functions), `address` (indices made
64 bits wide, pointers moved), `load` and `store` with the address space, `branch`, `simd`, `barrier`, `atomic`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """The innermost function of the kernel's own text or of MLX's headers, and the line there (0: unknown)."""

    function: str
    line: int


Block = Counter[tuple[Place, str]]  # how often an instruction of a class stands there

_FLOAT = {"fadd", "fsub", "fmul", "fneg"}
_INTEGER = {"add", "sub", "mul", "shl", "lshr", "ashr", "and", "or", "xor"}
_COMPARE = {"icmp", "fcmp", "select"}
_CONVERT = {"uitofp", "sitofp", "fptoui", "fptosi", "fpext", "fptrunc"}
_SPECIAL = {"fdiv", "frem", "udiv", "sdiv", "urem", "srem"}  # a GPU has several instructions for each
_FREE = {"phi", "trunc", "bitcast", "addrspacecast", "ptrtoint", "inttoptr", "freeze", "alloca", "ret", "unreachable"}
_FREE |= {"extractelement", "insertelement", "shufflevector", "extractvalue", "insertvalue"}
_SPACES = {"": "private", "1": "device", "2": "constant", "3": "threadgroup", "4": "generic"}
_ENGINE = {"__msl_threadgroup_barrier": "barrier", "__msl_simd_post": "simd", "__msl_simd_barrier": "simd"}
_NO_CODE = ("llvm.lifetime.", "llvm.assume", "llvm.experimental.noalias", "__msl_")
_ONE_INSTRUCTION = {"simd.h", "matrix.h", "atomic.h"}  # of the shim: their calls of the engine are all that counts

_INSTRUCTION = re.compile(r"  (?:%\S+ = )?(?:(?:tail|musttail|notail) )?([a-z]\w*)(.*)")
_TYPE = re.compile(r"(?:<(\d+) x )?\b(i\d+|half|bfloat|float|double|ptr)\b")
_NODE = re.compile(r"(!\d+) = (?:distinct )?!DI\w+\((.*)\)")
_FIELD = re.compile(r'(\w+): ("[^"]*"|[^,]+)')


@dataclass(frozen=True)
class Instrumented:
    """`text` counts the runs of each basic block in COUNTERS, 64-bit integers; `blocks` is what they hold."""

    COUNTERS = "msl_block_counts"
    text: str
    blocks: tuple[Block, ...]


def instrument(text: str, shim: Path) -> Instrumented:
    """IR with counters, from IR that has line numbers and address spaces.

    Raises:
        ValueError: an instruction of unknown class.
    """
    nodes = {node: dict(_FIELD.findall(rest)) for node, rest in _NODE.findall(text)}
    lines: list[str] = []
    blocks: list[Block] = []
    scope = ""  # the function's own node; "" outside of those that count
    begins = False
    for line in text.splitlines():
        if line.startswith("define "):
            scope = "" if "@msl_entry(" in line else line.rsplit("!dbg ", 1)[1].split()[0]
        begins = begins or line.startswith("define ") or re.match(r"\w+:", line) is not None
        match = _INSTRUCTION.match(line)
        if scope and match and begins and match[1] != "phi":
            lines += _increment(len(blocks))
            blocks.append(Counter())
            begins = False
        lines.append(line)
        if scope and match and match[1] != "phi":
            _count(blocks[-1], match[1], match[2], list(_frames(nodes, scope, line)), shim)
        scope = "" if line == "}" else scope
    lines.append(f"@{Instrumented.COUNTERS} = global [{len(blocks)} x i64] zeroinitializer")
    return Instrumented("\n".join(lines) + "\n", tuple(blocks))


def executed(blocks: tuple[Block, ...], runs: list[int]) -> Block:
    """Instructions of all lanes together."""
    total: Block = Counter()
    for block, times in zip(blocks, runs, strict=True):
        for key, count in block.items():
            total[key] += count * times
    return total


def _increment(block: int) -> list[str]:
    counter = f"ptr getelementptr (i64, ptr @{Instrumented.COUNTERS}, i64 {block})"
    old, new = f"%runs.{block}", f"%more.{block}"
    return [f"  {old} = load i64, {counter}", f"  {new} = add i64 {old}, 1", f"  store i64 {new}, {counter}"]


def _frames(nodes: Mapping[str, dict[str, str]], scope: str, line: str) -> Iterator[tuple[Path, Place]]:
    """(file, place) of an instruction's line and of the calls that were inlined around it, from within."""
    found = re.search(r"!dbg (!\d+)", line)
    location = nodes[found[1]] if found else {"scope": scope, "line": "0"}
    while True:
        function = nodes[location["scope"]]
        while "name" not in function:  # a block in it
            function = nodes[function["scope"]]
        file = nodes[function["file"]]
        path = Path(file["directory"].strip('"'), file["filename"].strip('"'))
        yield path, Place(function["name"].strip('"').split("<")[0], int(location["line"]))
        if "inlinedAt" not in location:
            return
        location = nodes[location["inlinedAt"]]


def _count(block: Block, opcode: str, rest: str, frames: list[tuple[Path, Place]], shim: Path) -> None:
    files = [path.name for path, _ in frames if path.is_relative_to(shim)]
    own = next((place for path, place in frames if not path.is_relative_to(shim)), None)
    kind, times = _class_of_call(rest) if opcode == "call" else _class_of(opcode, rest)
    is_part = kind not in ("simd", "barrier", "atomic") and not _ONE_INSTRUCTION.isdisjoint(files)
    if own and kind and not is_part:
        block[own, kind] += times


def _class_of(opcode: str, rest: str) -> tuple[str, int]:
    types = _TYPE.findall(rest.split(", !")[0])
    lanes = max((int(count or 1) for count, _ in types), default=1)
    if opcode in _FREE or (opcode == "br" and not rest.startswith(" i1")):
        return "", 0
    if opcode in ("br", "switch"):
        return "branch", 1
    if opcode in ("load", "store"):
        size = lanes * {"half": 2, "bfloat": 2, "float": 4}.get(types[0][1], 0) or lanes * _integer_bytes(types[0][1])
        space = re.findall(r"ptr(?: addrspace\((\d)\))? [%@]", rest)[-1]
        return f"{opcode} {_SPACES[space]}", -(-size // 16)
    if opcode == "getelementptr":
        return ("address", 1) if re.search(r"i\d+ %", rest) else ("", 0)
    if opcode in ("sext", "zext"):
        return ("address" if rest.split(", !")[0].endswith("i64") else "integer"), lanes
    if opcode in _INTEGER:
        return ("wide" if types[0][1] == "i64" else "integer"), lanes
    for kind, opcodes in (("float", _FLOAT), ("compare", _COMPARE), ("convert", _CONVERT), ("special", _SPECIAL)):
        if opcode in opcodes:
            return kind, lanes
    raise ValueError(f"instruction of unknown class: {opcode}{rest}")


def _integer_bytes(kind: str) -> int:
    return 8 if kind in ("ptr", "double") else max(1, int(kind[1:]) // 8)


def _class_of_call(rest: str) -> tuple[str, int]:
    match = re.search(r"@([\w.$]+)\((.*)", rest)
    if match is None:
        raise ValueError(f"call of unknown class: {rest}")
    name = match[1]
    if name in _ENGINE:
        return _ENGINE[name], 1
    if name.startswith(_NO_CODE):
        return "", 0
    if name.startswith(("llvm.mem",)):
        size = re.search(r", i64 (\d+), i1", rest)
        space = re.findall(r"ptr(?: addrspace\((\d)\))? ", match[2])[0]
        if size is None or name.startswith("llvm.memmove"):
            raise ValueError(f"call of unknown class: {rest}")
        return f"store {_SPACES[space]}", -(-int(size[1]) // 16)
    if name.startswith("llvm."):
        lanes, element = _TYPE.findall(rest)[0]
        kind = (
            "special" if "sqrt" in name else {"i64": "wide"}.get(element, "integer" if element[0] == "i" else "float")
        )
        return kind, int(lanes or 1)
    return ("atomic" if "atomic" in name else "branch" if name.startswith("_Z") else "special"), 1
