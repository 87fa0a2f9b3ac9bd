"""Sealed spans of context (`SharedSegment`) and how much of one a holder reads (`SegmentView`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import mlx.core as mx

from .digest import digest_text
from .policy import TEAM
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

    @property
    def residuals(self) -> tuple[mx.array, ...]:
        return tuple(tensor.residual for tensor in (self.keys, self.values) if tensor.residual is not None)

    @property
    def base(self) -> KVBlock:
        return KVBlock(self.keys.base, self.values.base) if self.residuals else self

    def is_like(self, other: KVBlock) -> bool:
        """May the rows of both become one block?"""
        pairs = ((self.keys, other.keys), (self.values, other.values))
        return all(
            (a.plan, a.bits) == (b.plan, b.bits)
            and (a.basis is b.basis or (a.basis is not None and a.basis.is_like(b.basis)))
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

    @property
    def residuals(self) -> tuple[mx.array, ...]:
        return tuple(array for block in self.blocks for array in block.residuals)

    @property
    def base(self) -> LayerKV:
        return LayerKV(tuple(block.base for block in self.blocks))

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
    residuals: ClassVar[tuple[mx.array, ...]] = ()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def base(self) -> LayerState:
        return self


@dataclass(frozen=True, eq=False)
class SharedSegment:
    """An immutable quantized span of the context, tokens `start` to `stop`, all layers.

    Keys are stored after RoPE, so a segment is valid at its absolute position only and only behind
    the very tokens that it was computed behind.

    `checksum` is that of all but the residual planes of nested precision, which have one of their own: without them the
    segment is still what it was sealed as. Of one that was joined from others `origins` are theirs.

    `own_domains` are those that its tokens were written into, more than one only where earlier ones had to be computed
    again; `domains` are these and those of all that it was computed behind.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    layers: tuple[LayerKV | LayerState, ...]
    quant: QuantSpec
    fingerprint: str
    checksum: str
    residual_checksum: str | None = None
    own_domains: frozenset[str] = frozenset({TEAM})
    domains: frozenset[str] = frozenset({TEAM})
    origins: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seals(self) -> tuple[str, ...]:
        """All the checksums that its words were sealed under."""
        return (self.checksum, *self.origins)

    @property
    def keys(self) -> set[str]:
        """See `seal_keys`."""
        return seal_keys(self.seals, self.own_domains, self.domains)

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

    @property
    def residual_bytes(self) -> int:
        """Bytes of its residual planes; 0 if it has none, or none any more."""
        return sum(array.nbytes for layer in self.layers for array in layer.residuals)

    @property
    def base(self) -> SharedSegment:
        """The segment without its residual planes, over the same arrays; itself if it has none."""
        return self if self.residual_checksum is None else self._base

    @functools.cached_property  # one object, so that all that read it are one group; never itself, which were a cycle
    def _base(self) -> SharedSegment:
        layers = tuple(layer.base for layer in self.layers)
        return dataclasses.replace(self, layers=layers, residual_checksum=None)

    def compute_checksum(self) -> str:
        """The digest of the bytes as they are now; equal to `checksum` as long as nothing wrote to them."""
        return layers_checksum(self.layers)

    def compute_residual_checksum(self) -> str | None:
        """The same of the residual planes and `residual_checksum`; None if there are none."""
        return residuals_checksum(self.layers)


def seal_keys(seals: Iterable[str], own_domains: Iterable[str], domains: Iterable[str]) -> set[str]:
    """By which what was revoked is known again, under whatever slot or name it comes: the seals, each with the domains
    that it was sealed for."""
    labels = f"{sorted(own_domains)}{sorted(domains)}"
    return {digest_text(f"{seal}{labels}") for seal in seals}


def layers_checksum(layers: tuple[LayerKV | LayerState, ...]) -> str:
    """Of all but the residual planes."""
    return checksum(array for layer in layers for array in layer.base.arrays)


def residuals_checksum(layers: tuple[LayerKV | LayerState, ...]) -> str | None:
    residuals = [array for layer in layers for array in layer.residuals]
    return checksum(residuals) if residuals else None


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


class Sized(Protocol):
    @property
    def num_tokens(self) -> int: ...


class Viewed(Protocol):
    """What is read of a segment: a `SegmentView`, or one of a segment on disk."""

    @property
    def segment(self) -> Sized: ...
    @property
    def length(self) -> int: ...


View = TypeVar("View", bound=Viewed)


def readable(views: tuple[View, ...], spec: CacheSpec) -> tuple[View, ...]:
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
