"""What is in a segment file as layers: checked against a model's, built, and settled behind the segment before.

Letters: Hk KV heads, T tokens, D head dim, P padded dim, G group size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from .errors import CardCorruptError, FingerprintMismatchError
from .quantize import Basis, Factors, QuantizedTensor, checksum
from .segment import KVBlock, LayerKV, LayerState
from .segment_file import DTYPE_NAMES, SegmentHeader, TensorEntry
from .spec import SUPPORTED_BITS, SUPPORTED_GROUP_SIZES, CacheSpec, LayerSpec, StateSpec, TensorPlan

Layers = tuple[LayerKV | LayerState, ...]


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
    dtype, shape = DTYPE_NAMES[getattr(mx, spec.dtype)], (1, layer.n_kv_heads, rows)
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
