"""From preprocessed Metal to "C++ for OpenCL": parameters of kernels, rewrites, the entry point."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .tokens import Tokens

_VECTOR = re.compile(r"(?:bool|char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat)[234]\Z")
_FUNCTION_CONSTANT = re.compile(r"\[ \[ function_constant \( (\d+) \) \] \]\Z")
_TYPE_WORDS = {"const", "volatile", "unsigned", "signed", "struct", "typename"}
_ENTRY = """
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#line 1 "<entry>"
typedef decltype({kernel}) __msl_kernel_type;
extern "C" __attribute__((no_sanitize("thread")))
void msl_entry(const __private ulong* arguments, const __private __msl_context* context) {{
  [[clang::noinline]] {kernel}({arguments});
}}
"""


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter; `buffer` is its index, or None for a built-in value named by `attribute`."""

    name: str
    attribute: str
    buffer: int | None
    is_const: bool


# ------------------------------------------------------------------------------------------ parameters


def kernel_parameters(text: str, kernel: str) -> list[Parameter] | None:
    """Parameters of the kernel function `kernel` in preprocessed `text`; None if there is no such kernel."""
    tokens = Tokens(text)
    for i in tokens.find(kernel):
        opening = i + 1
        if tokens[i - 1] != "void" or tokens[opening] != "(" or not _is_kernel(tokens, i - 1):
            continue
        closing = tokens.closing(opening)
        if tokens[closing + 1] in ("{", "["):
            return _parse_parameters(tokens, opening + 1, closing)
    return None


def _is_kernel(tokens: Tokens, void: int) -> bool:
    """Whether `[[kernel]]` or `kernel` is among the attributes in front of the return type."""
    i = void - 1
    while tokens[i] == "]" or tokens[i] == "kernel":
        if tokens[i] == "kernel":
            return True
        while tokens[i] != "[" or tokens[i - 1] == "[":
            i -= 1
            if tokens[i] == "kernel":
                return True
        i -= 1
    return False


def _parse_parameters(tokens: Tokens, begin: int, end: int) -> list[Parameter]:
    parameters: list[Parameter] = []
    for first, last in _split_at_commas(tokens, begin, end):
        words = tokens.words[first:last]
        attribute_at = next((k for k in range(len(words) - 1) if words[k] == words[k + 1] == "["), len(words))
        attribute = " ".join(words[attribute_at + 2 : -2])
        name = words[attribute_at - 1]
        index = re.match(r"buffer \( (\d+)", attribute)
        # Metal numbers buffers without an attribute in their order.
        without = sum(p.buffer is not None for p in parameters)
        buffer = int(index[1]) if index else without if not attribute else None
        parameters.append(Parameter(name, attribute.split(" ,")[0], buffer, "const" in words or "constant" in words))
    return parameters


def _split_at_commas(tokens: Tokens, begin: int, end: int) -> list[tuple[int, int]]:
    pieces, depth, first = [], 0, begin
    for k in range(begin, end):
        word = tokens[k]
        depth += (word in ("(", "[", "{", "<")) - (word in (")", "]", "}", ">"))
        if word == "," and depth == 0:
            pieces.append((first, k))
            first = k + 1
    return [*pieces, (first, end)] if first < end else pieces


def entry_point(kernel: str, parameters: list[Parameter]) -> str:
    """Text of `msl_entry`, which calls `kernel` (with its template arguments) with buffers and built-in values."""
    arguments = []
    for i, parameter in enumerate(parameters):
        kind = f"metal::__parameter<{i}, __msl_kernel_type>::type"
        if parameter.buffer is not None:
            arguments.append(f"metal::__bound_buffer<{kind}>::get(arguments[{parameter.buffer}])")
        else:
            arguments.append(f"metal::__built_in<{kind}>(context->{parameter.attribute})")
    return _ENTRY.format(kernel=kernel, arguments=",\n    ".join(arguments))


# -------------------------------------------------------------------------------------------- rewrites


def rewrite(text: str, constants: dict[int, bool | int], part: int = 0) -> str:
    """What C++ for OpenCL does not read is replaced; `part` keeps the names made for two texts apart.

    Raises:
        ValueError: a construct that the front end does not know, such as an initialised threadgroup variable.
    """
    tokens = Tokens(text)
    _drop_attributes(tokens, constants)
    tokens.compact()
    _drop_instantiations(tokens)
    _place_threadgroup_variables(tokens, part)
    _drop_thread_on_constructors(tokens)
    _name_vector_constructors(tokens)
    return str(tokens)


def _drop_attributes(tokens: Tokens, constants: dict[int, bool | int]) -> None:
    """`[[...]]` goes; a function constant becomes an initialised constant. So does the word `kernel`."""
    for i in tokens.find("[", "kernel"):
        if tokens[i] == "kernel":
            tokens.replace(i, i + 1)
            continue
        if tokens[i + 1] != "[":
            continue
        end = tokens.closing(i) + 1
        constant = _FUNCTION_CONSTANT.match(tokens.text(i, end))
        value = ""
        if constant and tokens[end] == ";":
            value = "= " + str(constants.get(int(constant[1]), 0)).lower()
        tokens.replace(i, end, value)


def _drop_instantiations(tokens: Tokens) -> None:
    """Explicit instantiations of kernels: the entry point instantiates the one that is run."""
    for i in tokens.find("template"):
        if tokens[i + 1] == "decltype":
            end = next(k for k in range(i, len(tokens)) if tokens[k] == ";")
            tokens.replace(i, end + 1)
    tokens.compact()


def _place_threadgroup_variables(tokens: Tokens, part: int) -> None:
    """`threadgroup T a[N];` becomes a reference to memory that the engine hands out; pointers are left alone."""
    count = 0
    for i in tokens.find("__local"):
        if tokens[i - 1] not in ("{", "}", ")", ";", "const", ""):  # "": a declaration replaced before
            continue
        name_at = _end_of_type(tokens, i + 1)
        if name_at is None:
            continue
        kind = tokens.text(i + 1, name_at)
        text, k = "", name_at
        while True:
            name, dimensions_at = tokens[k], k + 1
            k = dimensions_at
            while tokens[k] == "[":
                k = tokens.closing(k) + 1
            alias = f"__threadgroup_{part}_{count}"
            text += (
                f"typedef {kind} {alias}{tokens.text(dimensions_at, k)}; "
                f"__local {alias}& {name} = *(__local {alias}*)__msl_threadgroup_variable("
                f'{part * 10000 + count}, sizeof({alias}), alignof({alias}), "{name}", __builtin_LINE()); '
            )
            count += 1
            if tokens[k] != ",":
                break
            k += 1
        if tokens[k] != ";":
            raise ValueError(f"threadgroup variable {name!r}: Metal allows no initialiser")
        tokens.replace(i, k + 1, text)
    tokens.compact()


def _end_of_type(tokens: Tokens, i: int) -> int | None:
    """Index of the name declared with the type that begins at `i`; None if it is not a plain variable."""
    has_type = False
    while True:
        word = tokens[i]
        if word in _TYPE_WORDS:
            has_type = has_type or word in ("unsigned", "signed")
        elif word == "::":
            has_type = False
        elif tokens.is_name(i) and not has_type:
            has_type = True
            if tokens[i + 1] == "<":
                end = tokens.closing_angle(i + 1)
                if end is None:
                    return None
                i = end
        else:
            return i if tokens.is_name(i) else None
        i += 1


def _drop_thread_on_constructors(tokens: Tokens) -> None:
    """`thread` after the parameters of a constructor or operator goes.

    Temporaries have no address space in C++ for OpenCL, so a function of the private one would not match them.
    """
    classes = {tokens[i + 1] for i in tokens.find("struct", "class")}
    for i in tokens.find("__private"):
        closing = i - 2 if tokens[i - 1] in ("const", "noexcept") else i - 1
        if tokens[closing] != ")" or tokens[i + 1] not in ("{", ":", ";", "noexcept", "->", "const", "="):
            continue
        name_at = tokens.opening(closing) - 1
        before = tokens.words[max(0, name_at - 9) : name_at + 1]
        start = max((k + 1 for k, word in enumerate(before) if word in (";", "{", "}")), default=0)
        if tokens[name_at] in classes or "operator" in before[start:]:
            tokens.replace(i, i + 1)
    tokens.compact()


def _name_vector_constructors(tokens: Tokens) -> None:
    """`float4(...)` and `vec<T, N>(...)` become calls of `metal::__make`."""
    for i in range(len(tokens)):
        word = tokens[i]
        if word == "vec" and tokens[i + 1] == "<":
            end = tokens.closing_angle(i + 1)
        elif _VECTOR.match(word):
            end = i
        else:
            continue
        is_type = tokens[i - 1] in ("typedef", "using", "operator", ".", "->")
        if end is None or is_type or tokens[end + 1] != "(" or tokens[end + 2] in ("*", "&"):
            continue
        begin = i - 2 if tokens[i - 1] == "::" and tokens[i - 2] == "metal" else i
        if tokens[begin - 1] == "operator":
            continue
        tokens.words[begin] = "metal::__make<" + tokens[begin]
        tokens.words[end] += " >"
