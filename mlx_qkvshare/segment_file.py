"""One sealed segment as one safetensors file, byte for byte as it is in memory, and back.

The file begins with its header, which has digests of all that follows, and is named by a digest of that header: the
name stands for every byte, and equal segments are one file. Arrays come in the order of `SharedSegment.checksum`, the
residual planes behind all others, so that its two digests are those of two halves of the file.

Letters: Hk KV heads, T tokens, D head dim, P padded dim, G group size.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx

from .digest import at_once, digest_buffer, digest_bytes, digest_region, joined
from .errors import CardCorruptError, CardFormatError, IntegrityError
from .quantize import QuantizedTensor, buffer_of, checksum
from .segment import LayerState, SharedSegment
from .spec import QuantSpec

FORMAT = 2
_MAX_HEADER_BYTES = 100_000_000  # as safetensors itself has it
_DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorEntry(NamedTuple):
    """One array of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].size


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
    """All of it is on the disk at the end. Raises `OSError`, and `IntegrityError` where the arrays are not what was
    sealed."""
    buffers = [buffer_of(array) for array in arrays]

    def write() -> bytes:
        file.writelines((header.encoded, *buffers))
        file.flush()
        os.fsync(file.fileno())  # the disk works while the rest is hashed
        return b""

    tasks: list[Callable[[], bytes]] = [write, *(partial(digest_buffer, buffer) for buffer in buffers)]
    _, *digests = at_once(tasks, header.nbytes)
    for expected, found in _checksums(header, digests):
        if found != expected:
            raise IntegrityError(f"[save_card] checksum: expected {expected} as sealed, got {found}")


def _checksums(header: SegmentHeader, digests: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    """What each half of the file should have, and what it has by the digests of its arrays."""
    yield header.checksum, joined(digests[: header.num_base])
    if header.residual_checksum is not None:
        yield header.residual_checksum, joined(digests[header.num_base :])


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


@functools.lru_cache(maxsize=256)
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
    """Every array by its name, evaluated. Each is hashed as it is read. Raises `CardCorruptError` and `OSError`."""
    arrays = {entry.name: mx.zeros(entry.shape, _DTYPES[entry.dtype]) for entry in header.entries}
    mx.eval(arrays)
    _read(file, header, [buffer_of(array) for array in arrays.values()])  # into their own memory: nothing is copied
    return arrays


def verify_arrays(file: BinaryIO, header: SegmentHeader) -> None:
    """Hash every byte and keep none. Raises as `read_arrays`."""
    _read(file, header, [None] * len(header.entries))


def _read(file: BinaryIO, header: SegmentHeader, targets: Sequence[memoryview | None]) -> None:
    tasks, start = [], len(header.encoded)
    for entry, target in zip(header.entries, targets, strict=True):
        tasks.append(partial(digest_region, file.fileno(), start, entry.nbytes, target))
        start += entry.nbytes
    for expected, found in _checksums(header, at_once(tasks, header.nbytes)):
        if found != expected:
            raise CardCorruptError(f"[segment {header.digest}] checksum: expected {expected}, got {found}")
