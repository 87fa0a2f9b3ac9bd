"""Read GGUF files: the header in plain Python, simple tensor types through `mx.load`, K-quants through `gguf`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from .errors import ModelLoadError, UnsupportedModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

SIMPLE_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
"""Type id -> (name, values per block, bytes per block) of what `mx.load` reads without loss."""

_GROUP_SIZE = 32


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: name, shape (rows first, unlike in the file), GGUF type id, offset in bytes after the header."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GGUFFile:
    """A file's metadata (plain Python values) and its tensors, by name; no tensor data is held."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`; without a default it must be there (`KeyError`)."""
        name = f"{self.architecture}.{key}"
        return self.metadata[name] if default is None else self.metadata.get(name, default)

    def require(self, condition: bool, expected: str) -> None:
        """Raise `UnsupportedModelError`, which names the file, the architecture and what was `expected`."""
        if not condition:
            raise UnsupportedModelError(f"[gguf] {self.path.name}: {self.architecture}: expected {expected}")

    @property
    def needs_gguf_package(self) -> bool:
        return any(tensor.type_id not in SIMPLE_TYPES for tensor in self.tensors.values())

    def arrays(self) -> Iterator[tuple[str, mx.array]]:
        """(name, dequantized float32 array), one tensor at a time.

        Raises:
            ModelLoadError: a tensor type needs the `gguf` package and it is missing, or data cannot be read.
        """
        return self._arrays_from_package() if self.needs_gguf_package else self._arrays_from_mlx()

    def _arrays_from_mlx(self) -> Iterator[tuple[str, mx.array]]:
        try:
            stored = mx.load(str(self.path), format="gguf")
        except (RuntimeError, ValueError) as error:
            raise ModelLoadError(f"[gguf] {self.path}: {error}") from error
        assert isinstance(stored, dict)
        for name in self.tensors:
            array, base = stored.pop(name), name.removesuffix(".weight")
            scales = stored.pop(f"{base}.scales", None)
            if scales is None:
                yield name, array.astype(mx.float32)
                continue
            biases, num_columns = stored.pop(f"{base}.biases"), scales.shape[-1] * _GROUP_SIZE
            bits = array.shape[-1] * 32 // num_columns
            # float32 scales: then scale * code + bias is what llama.cpp computes, with no float16 rounding.
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            yield name, mx.dequantize(array, scales, biases, group_size=_GROUP_SIZE, bits=bits)

    def _arrays_from_package(self) -> Iterator[tuple[str, mx.array]]:
        try:
            from gguf import GGUFReader, dequantize
        except ImportError as error:
            types = sorted({t.type_id for t in self.tensors.values() if t.type_id not in SIMPLE_TYPES})
            raise ModelLoadError(
                f"[gguf] {self.path.name}: expected tensors of types {[n for n, *_ in SIMPLE_TYPES.values()]}, "
                f"got GGUF type ids {types} (K-quants or others); these need the gguf package: "
                "pip install 'mlx_qkvshare[gguf]'"
            ) from error
        try:
            for tensor in GGUFReader(self.path).tensors:
                values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
                yield tensor.name, mx.array(values)
        except (ValueError, NotImplementedError, KeyError, IndexError) as error:
            raise ModelLoadError(f"[gguf] {self.path}: {error}") from error


class _Reader:
    """Little-endian values from an open file; a short read is an error, never a silent zero."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self.file = file
        self.num_bytes = num_bytes

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.num_bytes else b""
        if len(data) != count:
            raise ValueError(f"expected {count} bytes at {self.file.tell()}, got {len(data)}: truncated")
        return data

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        return self.take(self.unpack("Q")[0]).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.unpack("I")[0], self.unpack("Q")[0]
            if item_kind in _SCALARS:
                return list(self.unpack(_SCALARS[item_kind], count))
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"expected a known value type, got {kind}")
        return self.unpack(_SCALARS[kind])[0]

    def tensor(self) -> TensorInfo:
        name = self.string()
        shape = tuple(reversed(self.unpack("Q", self.unpack("I")[0])))
        return TensorInfo(name, shape, self.unpack("I")[0], self.unpack("Q")[0])


def read_gguf(path: Path) -> GGUFFile:
    """The header of a GGUF file (versions 2 and 3).

    Raises:
        ModelLoadError: no such file, not GGUF, or truncated. A truncated file must not reach `mx.load`, which
            maps it into memory: reading past its end kills the process.
    """
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            reader = _Reader(file, num_bytes)
            if reader.take(4) != b"GGUF":
                raise ValueError("expected a GGUF file, got other bytes at its start")
            version, num_tensors, num_values = reader.unpack("I") + reader.unpack("Q", 2)
            if version not in (2, 3):
                raise ValueError(f"expected GGUF version 2 or 3, got {version}")
            metadata = {}
            for _ in range(num_values):
                key = reader.string()
                metadata[key] = reader.value(reader.unpack("I")[0])
            tensors = {tensor.name: tensor for tensor in (reader.tensor() for _ in range(num_tensors))}
            alignment = metadata.get("general.alignment", 32)
            data_start = -(-file.tell() // alignment) * alignment
    except (OSError, ValueError, struct.error) as error:
        raise ModelLoadError(f"[gguf] {path}: {error}") from error
    for tensor in tensors.values():
        _, block_values, block_bytes = SIMPLE_TYPES.get(tensor.type_id, ("", 1, 0))
        stop = data_start + tensor.offset + math.prod(tensor.shape) // block_values * block_bytes
        if stop > num_bytes:
            raise ModelLoadError(
                f"[gguf] {path}: {tensor.name} ends at byte {stop} of {num_bytes}: the file is truncated"
            )
    return GGUFFile(path, metadata, tensors)
