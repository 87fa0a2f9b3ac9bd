"""One sealed segment as one safetensors file, byte for byte as it is in memory, and back.

The file begins with its header, which has digests of all that follows, and is named by a digest of that header: the
name stands for every byte, and equal segments are one file. Arrays come in the order of `SharedSegment.checksum`, the
residual planes behind all others, so that its two digests are those of two halves of the file.

Letters: Hk KV heads, T tokens, D head dim, P padded dim, G group size.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

from .errors import CardCorruptError, CardFormatError, IntegrityError
from .fingerprint import digest_bytes
from .quantize import DIGEST_BYTES, QuantizedTensor, buffer_of, checksum
from .segment import LayerState, SharedSegment
from .spec import QuantSpec

FORMAT = 1
_MAX_HEADER_BYTES = 100_000_000  # as safetensors itself has it
_CHUNK_BYTES = 1 << 22
_DTYPES: dict[str, tuple[mx.Dtype, Any]] = {
    "BOOL": (mx.bool_, np.bool_),
    "U8": (mx.uint8, np.uint8),
    "I8": (mx.int8, np.int8),
    "U16": (mx.uint16, np.uint16),
    "I16": (mx.int16, np.int16),
    "U32": (mx.uint32, np.uint32),
    "I32": (mx.int32, np.int32),
    "U64": (mx.uint64, np.uint64),
    "I64": (mx.int64, np.int64),
    "F16": (mx.float16, np.float16),
    "BF16": (mx.bfloat16, np.uint16),
    "F32": (mx.float32, np.float32),
}
DTYPE_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}


class TensorEntry(NamedTuple):
    """One array of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype][0].size


@dataclass(frozen=True)
class SegmentHeader:
    """What a segment file says of itself.

    `layers` has for every layer the number of its state's arrays, or its blocks [[keys, values], …]. Keys and values
    are [D, bits, G, P, basis, has a residual], a basis null or [is rotated, rows sampled, number of the centre, digest
    of the factors].
    """

    fingerprint: str
    quant: QuantSpec
    start: int
    num_tokens: int
    tokens_digest: str
    checksum: str
    residual_checksum: str | None
    own_domains: tuple[str, ...]
    domains: tuple[str, ...]
    layers: tuple[Any, ...]
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Those of the arrays."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def num_base(self) -> int:
        """So many arrays come first that are no residual planes."""
        return sum(not entry.name.endswith(".residual") for entry in self.entries)

    @functools.cached_property
    def encoded(self) -> bytes:
        """The beginning of the file, in the one form that there is of it."""
        about = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[:-1]}
        about["quant"] = dataclasses.asdict(self.quant)
        header: dict[str, Any] = {"__metadata__": {"format": str(FORMAT), "segment": _dump(about)}}
        stop = 0
        for entry in self.entries:
            start, stop = stop, stop + entry.nbytes
            header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, stop]}
        text = _dump(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def digest(self) -> str:
        return digest_bytes(self.encoded)

    @property
    def file_bytes(self) -> int:
        return len(self.encoded) + self.nbytes


def _dump(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"))


# --- out ---------------------------------------------------------------------------------------------


def describe(segment: SharedSegment, tokens_digest: str) -> tuple[SegmentHeader, list[mx.array]]:
    """The header of its file, and the arrays in their order there."""
    base: dict[str, mx.array] = {}
    residuals: dict[str, mx.array] = {}
    layers: list[Any] = []
    for index, layer in enumerate(segment.layers):
        if isinstance(layer, LayerState):
            base |= {f"{index}.{number}": array for number, array in enumerate(layer.arrays)}
            layers.append(len(layer.arrays))
            continue
        centres: dict[int, int] = {}
        blocks = []
        for number, block in enumerate(layer.blocks):
            tensors = []
            for role, tensor in (("k", block.keys), ("v", block.values)):
                where = f"{index}.{number}.{role}"
                plain = {"packed": tensor.packed, "scales": tensor.scales, "biases": tensor.biases}
                base |= {f"{where}.{name}": array for name, array in plain.items() if array is not None}
                if tensor.basis is not None and tensor.basis.centre is not None:
                    centre = tensor.basis.centre
                    base[f"{index}.centre{centres.setdefault(id(centre), len(centres))}"] = centre
                if tensor.residual is not None:
                    residuals[f"{where}.residual"] = tensor.residual
                tensors.append(_plain_tensor(tensor, centres))
            blocks.append(tensors)
        layers.append(blocks)
    arrays = base | residuals
    header = SegmentHeader(
        segment.fingerprint, segment.quant, segment.start, segment.num_tokens, tokens_digest,
        segment.checksum, segment.residual_checksum,
        tuple(sorted(segment.own_domains)), tuple(sorted(segment.domains)), tuple(layers),
        tuple(TensorEntry(name, DTYPE_NAMES[array.dtype], tuple(array.shape)) for name, array in arrays.items()),
    )  # fmt: skip
    return header, list(arrays.values())


def _plain_tensor(tensor: QuantizedTensor, centres: dict[int, int]) -> list[Any]:
    plan, basis = tensor.plan, tensor.basis
    plain = None
    if basis is not None:
        centre = None if basis.centre is None else centres[id(basis.centre)]
        scale = None if basis.scale is None else checksum([basis.scale])
        plain = [int(basis.is_rotated), basis.num_sampled, centre, scale]
    return [plan.head_dim, plan.bits, plan.group_size, plan.padded_dim, plain, int(tensor.residual is not None)]


def write_segment(file: BinaryIO, header: SegmentHeader, arrays: Sequence[mx.array]) -> None:
    """Raises `OSError`, and `IntegrityError` where the arrays are not what was sealed."""
    file.write(header.encoded)
    for group, expected in _halves(arrays, header):
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for array in group:
            if array.size:
                data = buffer_of(array).cast("B")
                digest.update(data)
                file.write(data)
        if expected is not None and digest.hexdigest() != expected:
            raise IntegrityError(f"[save_card] checksum: expected {expected} as sealed, got {digest.hexdigest()}")


def _halves(items: Sequence[Any], header: SegmentHeader) -> Iterator[tuple[Sequence[Any], str | None]]:
    """What each of the two digests is of, and that digest."""
    yield items[: header.num_base], header.checksum
    yield items[header.num_base :], header.residual_checksum


# --- in ----------------------------------------------------------------------------------------------


def read_header(file: BinaryIO, digest: str, num_bytes: int) -> SegmentHeader:
    """The header of a file of `num_bytes` that is named `digest`.

    Raises:
        CardCorruptError: the file is no longer what its name says.
        CardFormatError: it is, and of a format that is not ours.
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise CardCorruptError(f"[segment {digest}] header: expected its length and {length} bytes, got {num_bytes}")
    raw = prefix + file.read(length)
    if (found := digest_bytes(raw)) != digest:
        raise CardCorruptError(f"[segment {digest}] header: expected the digest that names the file, got {found}")
    header = _parse(raw, digest)
    if header.file_bytes != num_bytes:
        raise CardCorruptError(f"[segment {digest}] size: expected {header.file_bytes} bytes, got {num_bytes}")
    return header


def _parse(raw: bytes, digest: str) -> SegmentHeader:
    try:
        plain = json.loads(raw[8:])
        metadata = plain.pop("__metadata__", {})
        if metadata.get("format") != str(FORMAT):
            raise CardFormatError(
                f"[segment {digest}] format: found {metadata.get('format')!r}, readable are [{FORMAT}]"
            )
        about = json.loads(metadata["segment"])
        about |= {name: tuple(about[name]) for name in ("own_domains", "domains", "layers")}
        about |= {"quant": QuantSpec.from_plain(about["quant"])}
        entries = tuple(TensorEntry(name, it["dtype"], tuple(it["shape"])) for name, it in plain.items())
        header = SegmentHeader(**about, entries=entries)
        is_sized = all(type(size) is int and size >= 0 for entry in entries for size in entry.shape)
        if is_sized and header.encoded == raw:
            return header
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CardFormatError(f"[segment {digest}] header: expected one of ours, got {raw[8:80]!r}") from error
    raise CardFormatError(f"[segment {digest}] header: expected the form that we write, got another")


def read_arrays(file: BinaryIO, header: SegmentHeader) -> dict[str, mx.array]:
    """Every array by its name, evaluated. Each is hashed as it is read. Raises `CardCorruptError`."""
    found: dict[str, mx.array] = {}
    for entries, expected in _halves(header.entries, header):
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for entry in entries:
            dtype, stored = _DTYPES[entry.dtype]
            rows = np.empty(entry.shape, stored)
            if rows.size:
                data = rows.data.cast("B")
                _fill(file, data, header)
                digest.update(data)
            array = mx.array(rows)
            found[entry.name] = array.view(dtype) if array.dtype != dtype else array
            mx.eval(found[entry.name])
        _require_digest(header, digest.hexdigest(), expected)
    return found


def verify_arrays(file: BinaryIO, header: SegmentHeader) -> None:
    """Hash every byte and keep none. Raises `CardCorruptError`."""
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    for entries, expected in _halves(header.entries, header):
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        left = sum(entry.nbytes for entry in entries)
        while left:
            data = chunk[: min(left, _CHUNK_BYTES)]
            _fill(file, data, header)
            digest.update(data)
            left -= len(data)
        _require_digest(header, digest.hexdigest(), expected)


def _fill(file: BinaryIO, data: memoryview, header: SegmentHeader) -> None:
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])  # type: ignore[attr-defined]
        if not count:
            raise CardCorruptError(f"[segment {header.digest}] size: expected {header.file_bytes} bytes, got fewer")
        done += count


def _require_digest(header: SegmentHeader, found: str, expected: str | None) -> None:
    if expected is not None and found != expected:
        raise CardCorruptError(f"[segment {header.digest}] checksum: expected {expected}, got {found}")
