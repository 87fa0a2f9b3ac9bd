"""Rows of a layer into packed blocks: in which basis, with how many bits, and what the guard makes of it.

Letters: Hk KV heads, T tokens, D head dim.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .allocate import BLOCK_TOKENS, DEFAULT_KIND, KINDS, allocate, block_importance
from .guard import Guard, Looked, Raised, attention_error, channel_outlier, raised_bits
from .quantize import Basis, Factors, quantize
from .segment import KVBlock, LayerKV, LayerState, SegmentView
from .spec import CacheSpec, LayerPlan, QuantSpec, StateSpec, full_precision
from .state_cache import snapshot

Rows = tuple[mx.array, mx.array]
"""Keys and values [1, Hk, T, D] in full precision."""
NOTHING: Mapping[int, Looked] = {}
_MIN_SAMPLED = 64  # rows whose mean is good enough for what follows
_GUARDED_QUERIES = 8
_ADAPTED_QUERIES = 64


@dataclass
class GuardReport:
    """What the guard saw of one segment: in how many layers, the worst error that it let pass, and what it raised."""

    num_guarded: int = 0
    worst_error: float = 0.0
    raised: list[Raised] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """What is to become a segment: its slot, its first token, its kind (`allocate.KINDS`), the chain that it stands
    behind, and the queries of its last tokens by layer."""

    slot: int
    start: int
    num_tokens: int
    views: tuple[SegmentView, ...] = ()
    looked: Mapping[int, Looked] = field(default_factory=dict)
    kind: str = DEFAULT_KIND


class Packer:
    """Packs segments of one model by one `QuantSpec`, with key factors (all None for none) and a guard or None."""

    def __init__(self, spec: CacheSpec, quant: QuantSpec, factors: Factors, guard: Guard | None):
        self.spec, self.quant, self.factors = spec, quant, factors
        self.guard = guard if guard is not None and guard.is_due(quant) else None
        self.plans = quant.resolve(spec)
        self._value_basis = Basis(is_rotated=True) if quant.is_rotated else None

    @property
    def num_looked(self) -> int:
        """Of how many last tokens it wants to know the queries."""
        return _ADAPTED_QUERIES if self.quant.is_adaptive else _GUARDED_QUERIES if self.guard else 0

    def pack(
        self, source: Source, layers: list[Any], report: GuardReport, *, consume: bool
    ) -> Iterator[LayerKV | LayerState]:
        """Layer by layer, evaluated; `consume` empties `layers` on the way, so that the peak stays one layer above the
        cache. `report` is filled."""
        for index, (spec, plan) in enumerate(zip(self.spec.layers, self.plans, strict=True)):
            packed: LayerKV | LayerState
            if plan is None or isinstance(spec, StateSpec):
                packed = snapshot(layers[index])
                mx.eval(*packed.arrays)
            else:
                sinks = self.quant.sinks_of(spec, source.start, source.num_tokens)
                packed = LayerKV(tuple(self._blocks(source, index, plan, layers[index], sinks, report)))
            if consume:
                layers[index] = None
                mx.clear_cache()  # hand the freed rows back at once
            yield packed

    def _blocks(
        self, source: Source, index: int, plan: LayerPlan, rows: Rows, sinks: int, report: GuardReport
    ) -> list[KVBlock]:
        keys, values = rows
        kept = [_keep(keys[:, :, :sinks], values[:, :, :sinks])] if sinks else []
        if sinks == keys.shape[2]:
            return kept
        left = (keys[:, :, sinks:], values[:, :, sinks:]) if sinks else rows
        basis = self._basis(source, index, left[0])
        blocks = [*kept, *self._packed(source, index, plan, left, basis)]
        if self.guard is None or not plan.is_packed:
            return blocks
        looked = source.looked.get(index)
        looked = None if looked is None else looked.last(_GUARDED_QUERIES)
        first = is_bad, error, _ = self._judge(plan, looked, rows, blocks)
        while is_bad:
            raised = self.quant.raised(raised_bits(plan)).resolve_layer(self.spec, index)
            assert raised is not None
            plan = raised
            if not plan.is_packed:
                blocks, error = [*kept, _keep(*left)], 0.0
                break
            blocks = [*kept, self._quantize(plan, left, basis)]
            is_bad, error, _ = self._judge(plan, looked, rows, blocks)
        report.num_guarded += 1
        report.worst_error = max(report.worst_error, error or 0.0)
        if plan != self.plans[index]:
            report.raised.append(Raised(source.slot, index, plan.keys.bits, plan.values.bits, *first[1:]))
        return blocks

    def _judge(
        self, plan: LayerPlan, looked: Looked | None, rows: Rows, blocks: list[KVBlock]
    ) -> tuple[bool, float | None, float | None]:
        """Is it bad? By the error of attention, or where no query was seen by how far the loudest channel stands out:
        at fewer than 8 bits, unless a basis of their own has mended it."""
        assert self.guard is not None
        if looked is not None:
            error = attention_error(looked, *rows, blocks)
            return not error <= self.guard.max_error, error, None  # NaN is bad, too
        if plan.keys.bits >= 8 or (self.quant.is_centred and self.quant.is_rotated):
            return False, None, None
        outlier = channel_outlier(rows[0])
        return not outlier <= self.guard.max_outlier, None, outlier

    def _packed(
        self, source: Source, index: int, plan: LayerPlan, rows: Rows, basis: Basis | None
    ) -> Iterator[KVBlock]:
        """One block, or as many as differ in their bits."""
        looked = source.looked.get(index)
        if not self.quant.is_adaptive or looked is None:
            yield self._quantize(plan, rows, basis)
            return
        importance, total, start = block_importance(looked, rows[0]), rows[0].shape[2], 0
        sizes = [min(BLOCK_TOKENS, total - first) for first in range(0, total, BLOCK_TOKENS)]
        bits = allocate(importance, sizes, self.quant.k_bits + KINDS[source.kind])
        for count, group in itertools.groupby(zip(bits, sizes, strict=True), key=lambda it: it[0]):
            stop = start + sum(size for _, size in group)
            its_quant = dataclasses.replace(self.quant, k_bits=count, v_bits=count, is_adaptive=False)
            its_plan = its_quant.resolve_layer(self.spec, index)
            assert its_plan is not None
            keys, values = (x[:, :, start:stop] for x in rows)
            yield self._quantize(its_plan, (keys, values), basis)
            start = stop

    def _quantize(self, plan: LayerPlan, rows: Rows, basis: Basis | None) -> KVBlock:
        tensors, quant = [], self.quant
        # In turn, which halves the temporaries.
        for x, its_plan, its_basis in zip(rows, (plan.keys, plan.values), (basis, self._value_basis), strict=True):
            tensors.append(quantize(x, its_plan, its_basis, is_fitted=quant.is_fitted, is_nested=quant.is_nested))
            mx.eval(*tensors[-1].arrays)
        return KVBlock(*tensors)

    def _basis(self, source: Source, index: int, keys: mx.array) -> Basis | None:
        """The basis of a layer's packed keys. It takes over the centre of the segment that it stands behind, so that
        the two can become one, unless that is a mean of too few."""
        factors, behind = self.factors[index], source.views[-1].segment.layers[index] if source.views else None
        if not self.quant.is_centred:
            return self._value_basis if factors is None else Basis(self.quant.is_rotated, scale=factors)
        before = behind.keys.basis if isinstance(behind, LayerKV) else None
        is_enough = before is not None and before.num_sampled >= min(_MIN_SAMPLED, keys.shape[2])
        if before is not None and before.centre is not None and is_enough:
            return dataclasses.replace(before, centre=before.centre + 0)  # an array of its own, as budgeted
        centre = mx.mean(keys.astype(mx.float32), axis=2, keepdims=True).astype(keys.dtype)
        return Basis(self.quant.is_rotated, centre, factors, origin=source.slot, num_sampled=keys.shape[2])


def _keep(keys: mx.array, values: mx.array) -> KVBlock:
    """A block in full precision, of arrays of its own: views would hold the whole tail."""
    block = KVBlock(*(quantize(rows + 0, full_precision(rows.shape[-1])) for rows in (keys, values)))
    mx.eval(*block.arrays)
    return block
