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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

from .errors import CardCorruptError, CardFormatError, FingerprintMismatchError, IntegrityError
from .quantize import DIGEST_BYTES, Basis, QuantizedTensor, buffer_of, checksum
from .segment import KVBlock, LayerKV, LayerState, SharedSegment
from .spec import SUPPORTED_BITS, SUPPORTED_GROUP_SIZES, CacheSpec, LayerSpec, QuantSpec, StateSpec, TensorPlan

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
_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}

Layers = tuple[LayerKV | LayerState, ...]
Factors = Sequence[mx.array | None]


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
        return _digest(self.encoded)

    @property
    def file_bytes(self) -> int:
        return len(self.encoded) + self.nbytes


def _dump(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


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
        segment.checksum, segment.residual_checksum, tuple(layers),
        tuple(TensorEntry(name, _NAMES[array.dtype], tuple(array.shape)) for name, array in arrays.items()),
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
    if (found := _digest(raw)) != digest:
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
        about |= {"quant": QuantSpec.from_plain(about["quant"]), "layers": tuple(about["layers"])}
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


def check_layout(header: SegmentHeader, spec: CacheSpec) -> None:
    """Raise `CardCorruptError` unless all arrays are those of a segment of such layers: names, shapes and dtypes."""
    try:
        expected = list(_expected(header, spec))
    except (ValueError, TypeError, LookupError) as error:
        raise CardCorruptError(f"[segment {header.digest}] layers: expected {len(spec.layers)} of ours") from error
    order = [entry for entry in expected if not entry.name.endswith(".residual")]
    order += [entry for entry in expected if entry.name.endswith(".residual")]
    if (header.residual_checksum is None) != (len(order) == header.num_base):
        raise CardCorruptError(f"[segment {header.digest}] residual_checksum: expected one for the residual planes")
    if tuple(order) != header.entries:
        differing = [pair for pair in zip(order, header.entries, strict=False) if pair[0] != pair[1]]
        wrong, found = differing[0] if differing else (f"{len(order)} arrays", f"{len(header.entries)}")
        raise CardCorruptError(f"[segment {header.digest}] layers: expected {wrong}, got {found}")


def _expected(header: SegmentHeader, spec: CacheSpec) -> Iterator[TensorEntry]:
    """The arrays that `header.layers` speaks of, a residual plane beside its base. Sizes in `spec` are the measure."""
    shapes = {entry.name: entry.shape for entry in header.entries}
    dtypes = {entry.name: entry.dtype for entry in header.entries}
    for index, (layer, blocks) in enumerate(zip(spec.layers, header.layers, strict=True)):
        if isinstance(layer, StateSpec):
            states = [
                TensorEntry(f"{index}.{n}", dtypes[f"{index}.{n}"], shapes[f"{index}.{n}"]) for n in range(blocks)
            ]
            _require(blocks == layer.num_arrays, "state")
            _require(sum(entry.nbytes for entry in states) == layer.nbytes, "state")
            yield from states
            continue
        centres: set[int] = set()
        for number, pair in enumerate(blocks):
            for role, tensor, dim in zip("kv", pair, (layer.k_head_dim, layer.v_head_dim), strict=True):
                where = f"{index}.{number}.{role}"
                rows = shapes[f"{index}.{number}.k.packed"][2]
                yield from _expected_tensor(where, tensor, layer, dim, rows, spec, centres)
        rows = sum(shapes[f"{index}.{number}.k.packed"][2] for number in range(len(blocks)))
        _require(rows == layer.sealed_rows(header.num_tokens), "rows")


def _expected_tensor(
    where: str, tensor: list[Any], layer: LayerSpec, dim: int, rows: int, spec: CacheSpec, centres: set[int]
) -> Iterator[TensorEntry]:
    head_dim, bits, group, padded, basis, has_residual = tensor
    _require(head_dim == dim and rows > 0 and bits in SUPPORTED_BITS, "plan")
    dtype, shape = _NAMES[getattr(mx, spec.dtype)], (1, layer.n_kv_heads, rows)
    if TensorPlan(head_dim, bits, group, padded).is_quantized:
        _require(group in SUPPORTED_GROUP_SIZES and padded == -(-dim // group) * group, "plan")
        yield TensorEntry(f"{where}.packed", "U32", (*shape, padded * bits // 32))
        for name in ("scales", "biases"):
            yield TensorEntry(f"{where}.{name}", dtype, (*shape, padded // group))
    else:
        _require(padded == dim and not has_residual, "plan")
        yield TensorEntry(f"{where}.packed", dtype, (*shape, dim))
    if basis is not None and (number := basis[2]) is not None and number not in centres:
        _require(number == len(centres), "centre")
        centres.add(number)
        yield TensorEntry(f"{where.split('.')[0]}.centre{number}", dtype, (1, layer.n_kv_heads, 1, dim))
    if has_residual:
        _require(bits == 4, "residual")
        yield TensorEntry(f"{where}.residual", "U32", (*shape, padded // 8))


def _require(is_met: bool, what: str) -> None:
    if not is_met:
        raise ValueError(what)


def check_factors_of(header: SegmentHeader, factors: Factors) -> None:
    """Raise `FingerprintMismatchError` unless keys were packed with these factors, of which a file has digests only."""
    for index, (blocks, factor) in enumerate(zip(header.layers, factors, strict=True)):
        if isinstance(blocks, int):
            continue
        known = None if factor is None else checksum([factor])
        for basis in (tensor[4] for pair in blocks for tensor in pair[:1] if tensor[4] is not None):
            if basis[3] != known:
                raise FingerprintMismatchError(
                    f"[load_card] key_factors of layer {index}: expected {known}, the card has {basis[3]}"
                )


def build_layers(header: SegmentHeader, arrays: Mapping[str, mx.array], spec: CacheSpec, factors: Factors) -> Layers:
    """The layers as they were sealed, over `arrays`. Keys have no origin yet: see `settled`."""
    return tuple(_build_layer(index, it, arrays, spec, factors[index]) for index, it in enumerate(header.layers))


def _build_layer(
    index: int, blocks: Any, arrays: Mapping[str, mx.array], spec: CacheSpec, factor: mx.array | None
) -> LayerKV | LayerState:
    if isinstance(blocks, int):
        return LayerState(tuple(arrays[f"{index}.{number}"] for number in range(blocks)))
    dtype = getattr(mx, spec.dtype)

    def tensor(where: str, plain: list[Any]) -> QuantizedTensor:
        basis = None
        if plain[4] is not None:
            is_rotated, num_sampled, number, scale = plain[4]
            centre = None if number is None else arrays[f"{index}.centre{number}"]
            basis = Basis(bool(is_rotated), centre, None if scale is None else factor, num_sampled=num_sampled)
        parts = [arrays.get(f"{where}.{name}") for name in ("packed", "scales", "biases", "residual")]
        assert parts[0] is not None, where
        return QuantizedTensor(TensorPlan(*plain[:4]), dtype, parts[0], parts[1], parts[2], basis, parts[3])

    return LayerKV(
        tuple(
            KVBlock(tensor(f"{index}.{number}.k", keys), tensor(f"{index}.{number}.v", values))
            for number, (keys, values) in enumerate(blocks)
        )
    )


def settled(layers: Iterable[LayerKV | LayerState], slot: int, behind: Sequence[LayerKV | LayerState] | None) -> Layers:
    """The layers of a segment in `slot`: keys that are packed around the centre of the segment that they stand behind
    have that one's origin, so that the two can be joined, others this slot."""
    return tuple(
        _settled(layer, slot, None if behind is None else behind[index]) if isinstance(layer, LayerKV) else layer
        for index, layer in enumerate(layers)
    )


def _settled(layer: LayerKV, slot: int, behind: LayerKV | LayerState | None) -> LayerKV:
    before = behind.keys.basis if isinstance(behind, LayerKV) else None
    blocks = []
    for block in layer.blocks:
        basis = block.keys.basis
        if basis is not None and basis.centre is not None:
            is_taken_over = before is not None and before.centre is not None and _is_same(before.centre, basis.centre)
            basis = dataclasses.replace(basis, origin=before.origin if before and is_taken_over else slot)
            block = KVBlock(dataclasses.replace(block.keys, basis=basis), block.values)
        blocks.append(block)
    return LayerKV(tuple(blocks))


def _is_same(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())
