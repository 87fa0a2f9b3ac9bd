"""Sealed spans of context (`SharedSegment`) and how much of one a holder reads (`SegmentView`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from .quantize import QuantizedTensor, checksum
from .spec import CacheSpec, QuantSpec


@dataclass(frozen=True, eq=False)
class KVBlock:
    """Keys and values of neighbouring tokens, packed alike."""

    keys: QuantizedTensor
    values: QuantizedTensor

    @property
    def num_rows(self) -> int:
        return self.keys.num_tokens

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self.keys.arrays, *self.values.arrays)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def is_like(self, other: KVBlock) -> bool:
        """May the rows of both become one block?"""
        pairs = ((self.keys, other.keys), (self.values, other.values))
        return all(
            a.plan == b.plan and (a.basis is b.basis or (a.basis is not None and a.basis.is_like(b.basis)))
            for a, b in pairs
        )


@dataclass(frozen=True, eq=False)
class LayerKV:
    """One layer's packed keys and values of a segment: of all its tokens, or of the last ones where a window slides.

    The blocks follow one another; the first tokens of a context may be one of their own, in full precision.
    """

    blocks: tuple[KVBlock, ...]

    @property
    def num_rows(self) -> int:
        return sum(block.num_rows for block in self.blocks)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Each once: blocks of one segment share their centre."""
        return tuple({id(array): array for block in self.blocks for array in block.arrays}.values())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def first(self, num_rows: int) -> Iterator[tuple[KVBlock, int]]:
        """The blocks of the first `num_rows` rows, and how many of each are among them."""
        for block in self.blocks:
            if num_rows <= 0:
                return
            yield block, min(num_rows, block.num_rows)
            num_rows -= block.num_rows

    @property
    def keys(self) -> QuantizedTensor:
        """Those of the last block, the packed ones."""
        return self.blocks[-1].keys

    @property
    def values(self) -> QuantizedTensor:
        return self.blocks[-1].values


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer's state behind the last token of a segment."""

    arrays: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, eq=False)
class SharedSegment:
    """An immutable quantized span of the context, tokens `start` to `stop`, all layers.

    Keys are stored after RoPE, so a segment is valid at its absolute position only and only behind
    the very tokens that it was computed behind.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    layers: tuple[LayerKV | LayerState, ...]
    quant: QuantSpec
    fingerprint: str
    checksum: str

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def arrays(self) -> Iterator[mx.array]:
        """Every packed array, scale and bias of it."""
        for layer in self.layers:
            yield from layer.arrays

    def compute_checksum(self) -> str:
        """The digest of the bytes as they are now; equal to `checksum` as long as nothing wrote to them."""
        return layers_checksum(self.layers)


def layers_checksum(layers: tuple[LayerKV | LayerState, ...]) -> str:
    return checksum(array for layer in layers for array in layer.arrays)


@dataclass(frozen=True)
class SegmentView:
    """The first `length` tokens of a segment: a number, never a slice, so that no byte is copied."""

    segment: SharedSegment
    length: int

    def __post_init__(self) -> None:
        assert 0 < self.length <= self.segment.num_tokens, (self.length, self.segment.num_tokens)

    @property
    def start(self) -> int:
        return self.segment.start

    @property
    def stop(self) -> int:
        return self.segment.start + self.length

    @property
    def token_ids(self) -> tuple[int, ...]:
        ids = self.segment.token_ids
        return ids if self.length == len(ids) else ids[: self.length]


def truncate_views(views: tuple[SegmentView, ...], num_tokens: int) -> tuple[SegmentView, ...]:
    """The views of the first `num_tokens` tokens of the chain."""
    kept = tuple(view for view in views if view.start < num_tokens)
    if kept and kept[-1].stop > num_tokens:
        kept = (*kept[:-1], SegmentView(kept[-1].segment, num_tokens - kept[-1].start))
    return kept


def readable(views: tuple[SegmentView, ...], spec: CacheSpec) -> tuple[SegmentView, ...]:
    """The longest beginning of the chain that a model can go on from.

    Behind a full segment it always can. Within one, a state is not kept, and a window's rows only where the segment is
    no longer than the window, or at its last token but one.
    """
    while views:
        last = views[-1]
        count = last.segment.num_tokens
        if last.length == count:
            break
        is_kept = all(count <= window or last.length >= count - 1 for window in spec.windows)
        if is_kept and not spec.has_state:
            break
        views = views[:-1]
    return views
