"""`qkvshare plan`: how much memory N agents on one context will need, before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from .errors import InvalidValueError
from .layer_cache import tail_capacity
from .peak import logits_bytes, step_bytes
from .spec import PRESETS, CacheSpec, LayerPlan, LayerSpec, QuantSpec

if TYPE_CHECKING:
    from .model import Outline

# Float32 copies of one layer's keys that packing needs beside them.
_PACKING_COPIES, _FITTING_COPIES = 3, 12


@dataclass(frozen=True)
class LayerBytes:
    """Layers that are packed alike, `count` of them: each has `rows` packed rows of `num_heads` heads, of `row_bytes`
    each, and `other_bytes` in full precision (first tokens, means of keys, states)."""

    count: int
    name: str
    rows: int
    num_heads: int
    row_bytes: int
    other_bytes: int

    @property
    def nbytes(self) -> int:
        return self.count * (self.rows * self.num_heads * self.row_bytes + self.other_bytes)


@dataclass(frozen=True)
class Plan:
    """Bytes of `agents` agents with `private_tokens` tokens each behind `shared_tokens` shared ones.

    shared_bytes: the packed prefix, held once. private_bytes: one agent's tail, in full precision, as it is budgeted (a
    state twice). live_bytes: weights, shared and all private. prefill_tail_bytes and prefill_step_bytes: what
    prefilling and sealing the shared tokens needs at once beside the weights. turn_step_bytes: what the last agent's
    prefill of its private tokens needs beside all that lives: a step, and a row of logits that each of the others may
    hold until it decodes. `is_bound`: no more than that; else about so much.
    separate_bytes: what a full-precision cache for each agent holds, at its exact length and without weights.
    preset: the first one that fits, in the order of their bytes, or None.
    """

    dtype: str
    quant: str
    agents: int
    shared_tokens: int
    private_tokens: int
    weights_bytes: int
    shared_bytes: int
    private_bytes: int
    live_bytes: int
    prefill_tail_bytes: int
    prefill_step_bytes: int
    turn_step_bytes: int
    is_bound: bool
    separate_bytes: int
    available_bytes: int
    needed_bytes: int
    fits: bool
    separate_fits: bool
    preset: str | None
    layers: tuple[LayerBytes, ...]

    @property
    def prefill_peak_bytes(self) -> int:
        """While the shared tokens are prefilled and sealed."""
        return self.weights_bytes + self.prefill_tail_bytes + self.prefill_step_bytes

    @property
    def turn_peak_bytes(self) -> int:
        """While the last agent prefills its private tokens and all others are there."""
        return self.live_bytes + self.turn_step_bytes


def plan(
    model: Outline, *, agents: int, shared_tokens: int, private_tokens: int, quant: QuantSpec, available_bytes: int
) -> Plan:
    """What is needed, from shapes alone; nothing is allocated.

    Raises:
        InvalidValueError: a count is not above 0, or an agent's tokens are more than the model's context.
        UnsupportedModelError: the model computes on values, not on shapes alone (dbrx).
    """
    spec = model.spec
    for name, value in (("agents", agents), ("shared", shared_tokens), ("private", private_tokens)):
        if value <= 0:
            raise InvalidValueError(f"[plan] {name}: expected a number above 0, got {value}")
    if (total := shared_tokens + private_tokens) > spec.max_context_tokens:
        raise InvalidValueError(f"[plan] tokens: expected at most {spec.max_context_tokens} of an agent, got {total}")

    weights, private = model.weights_bytes, spec.private_bytes(tail_capacity(private_tokens))
    tail, separate = spec.private_bytes(tail_capacity(shared_tokens)), agents * spec.context_bytes(total)

    prefilled, logits = step_bytes(model, quant, 0, shared_tokens), (agents - 1) * logits_bytes(model)

    @functools.cache
    def needs(quant: QuantSpec) -> tuple[int, int, int]:
        """Bytes of all that stays, and of the steps of both prefills."""
        live = weights + quant.packed_bytes(spec, shared_tokens) + agents * private
        prefill = max(prefilled, _packing(spec, shared_tokens, quant))
        return live, prefill, logits + step_bytes(model, quant, shared_tokens, private_tokens)

    def needed(quant: QuantSpec) -> int:
        live, prefill, turn = needs(quant)
        return max(weights + tail + prefill, live + turn)

    live, prefill, turn = needs(quant)
    return Plan(
        dtype=spec.dtype,
        quant=str(quant),
        agents=agents,
        shared_tokens=shared_tokens,
        private_tokens=private_tokens,
        weights_bytes=weights,
        shared_bytes=quant.packed_bytes(spec, shared_tokens),
        private_bytes=private,
        live_bytes=live,
        prefill_tail_bytes=tail,
        prefill_step_bytes=prefill,
        turn_step_bytes=turn,
        # Held against peaks on a CPU; a state may be a view that holds a whole step's buffer.
        is_bound=mx.default_device().type == mx.cpu and not spec.has_state,
        separate_bytes=separate,
        available_bytes=available_bytes,
        needed_bytes=needed(quant),
        fits=needed(quant) <= available_bytes,
        separate_fits=weights + separate <= available_bytes,
        preset=next((name for name, it in PRESETS.items() if needed(it) <= available_bytes), None),
        layers=tuple(layer_bytes(spec, quant, shared_tokens)),
    )


def layer_bytes(spec: CacheSpec, quant: QuantSpec, num_tokens: int) -> list[LayerBytes]:
    """The terms of `quant.packed_bytes(spec, num_tokens)`, equal layers together."""
    found: dict[LayerBytes, int] = {}
    for layer, plan in zip(spec.layers, quant.resolve(spec), strict=True):
        if not isinstance(layer, LayerSpec) or plan is None:
            term = LayerBytes(0, "state", 0, 0, 0, layer.nbytes if not isinstance(layer, LayerSpec) else 0)
        else:
            term = _rows_of(spec, quant, layer, plan, num_tokens)
        found[term] = found.get(term, 0) + 1
    return [dataclasses.replace(term, count=count) for term, count in found.items()]


def _rows_of(spec: CacheSpec, quant: QuantSpec, layer: LayerSpec, plan: LayerPlan, num_tokens: int) -> LayerBytes:
    sinks = quant.sinks_of(layer, 0, num_tokens)
    rows, item = layer.sealed_rows(num_tokens) - sinks, spec.item_bytes
    has_centre = quant.is_centred and plan.keys.is_quantized and rows
    centre = layer.n_kv_heads * layer.k_head_dim * item if has_centre else 0
    name = layer.kind if layer.kind == "full" else f"{layer.kind} of {layer.window}"
    row = plan.keys.row_bytes(item) + plan.values.row_bytes(item)
    return LayerBytes(0, name, rows, layer.n_kv_heads, row, sinks * layer.row_bytes(item) + centre)


def _packing(spec: CacheSpec, num_tokens: int, quant: QuantSpec) -> int:
    copies = _FITTING_COPIES if quant.is_fitted else _PACKING_COPIES
    rows = (it.sealed_rows(num_tokens) * it.n_kv_heads * max(it.k_head_dim, it.v_head_dim) for it in spec.attention)
    return copies * 4 * max(rows, default=0) if quant.is_packed else 0
