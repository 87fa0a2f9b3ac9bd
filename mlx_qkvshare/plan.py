"""`qkvshare plan`: how much memory N agents on one context will need, before anything is loaded.

Letters: N agents, T shared tokens, P private tokens of each, L tokens of a prefill step, H query heads, Hk KV heads,
D head dim, V words of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .context import chunk_size
from .errors import InvalidValueError
from .fingerprint import parameters
from .layer_cache import tail_capacity
from .spec import PRESETS, CacheSpec, LayerPlan, LayerSpec, QuantSpec

if TYPE_CHECKING:
    from .model import Outline

STEP_TOKENS = 512
"""Tokens of a prefill step, a session's default."""
_FUSED_HEAD_DIMS = (64, 80, 128)  # those whose scores MLX's attention on Metal never holds in memory

# Rows of the model's widths that are alive at once in a step: one layer's, and what MLX has queued of the next. Fitted
# to measured peaks (tests/test_plan.py holds them against others).
_HIDDEN_ROWS, _QUERY_ROWS, _KV_ROWS, _INNER_ROWS = 6, 6, 4, 4
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
    state twice). live_bytes: weights, shared and all private. prefill_tail_bytes and prefill_step_bytes: the terms of a
    bound of what prefilling and sealing the shared tokens needs at once beside the weights, see `prefill_step`.
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
    separate_bytes: int
    available_bytes: int
    needed_bytes: int
    fits: bool
    separate_fits: bool
    preset: str | None
    layers: tuple[LayerBytes, ...]

    @property
    def prefill_peak_bytes(self) -> int:
        """At most so many while the shared tokens are prefilled and sealed."""
        return self.weights_bytes + self.prefill_tail_bytes + self.prefill_step_bytes


def plan(
    model: Outline, *, agents: int, shared_tokens: int, private_tokens: int, quant: QuantSpec, available_bytes: int
) -> Plan:
    """What is needed, from shapes alone; nothing is allocated.

    Raises:
        InvalidValueError: a count is not above 0, or an agent's tokens are more than the model's context.
    """
    spec = model.spec
    for name, value in (("agents", agents), ("shared", shared_tokens), ("private", private_tokens)):
        if value <= 0:
            raise InvalidValueError(f"[plan] {name}: expected a number above 0, got {value}")
    if (total := shared_tokens + private_tokens) > spec.max_context_tokens:
        raise InvalidValueError(f"[plan] tokens: expected at most {spec.max_context_tokens} of an agent, got {total}")

    weights, private = model.weights_bytes, spec.private_bytes(tail_capacity(private_tokens))
    tail, separate = spec.private_bytes(tail_capacity(shared_tokens)), agents * spec.context_bytes(total)

    def needs(quant: QuantSpec) -> tuple[int, int]:
        """Bytes of all that stays, and of the peak."""
        live = weights + quant.packed_bytes(spec, shared_tokens) + agents * private
        return live, weights + tail + prefill_step(model, shared_tokens, quant)

    live, peak = needs(quant)
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
        prefill_step_bytes=peak - weights - tail,
        separate_bytes=separate,
        available_bytes=available_bytes,
        needed_bytes=max(live, peak),
        fits=max(live, peak) <= available_bytes,
        separate_fits=weights + separate <= available_bytes,
        preset=next((name for name, it in PRESETS.items() if max(needs(it)) <= available_bytes), None),
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


# --- the peak of a prefill ------------------------------------------------------------------------


@dataclass(frozen=True)
class Widths:
    """Values of one token in a layer: of its residual stream, all query heads, keys and values, and of the widest
    matrix product other than logits; and the vocabulary."""

    hidden: int
    num_heads: int
    queries: int
    keys_and_values: int
    inner: int
    vocabulary: int


def widths(model: Outline) -> Widths:
    """From the config, and where it is silent from the shapes of the parameters."""
    config = _flat(model.config)
    layers = model.spec.attention
    shapes = [array.shape for _, array in parameters(model.model) if array.ndim > 1]
    vocabulary = int(config.get("vocab_size", 0)) or max(shape[-2] for shape in shapes)
    # Of experts, [.., experts, out, in], a token meets a few.
    experts = int(config.get("num_experts_per_tok") or config.get("moe_topk") or config.get("top_k_experts") or 1)
    inner = [shape[-2] * (experts if len(shape) > 2 else 1) for shape in shapes if shape[-2] != vocabulary]
    hidden = next((int(config[name]) for name in ("hidden_size", "d_model", "n_embd", "dim") if name in config), 0)
    heads, head_dim = query_heads(model.spec, config), max((it.k_head_dim for it in layers), default=0)
    return Widths(
        hidden=hidden or max(inner),
        num_heads=heads,
        queries=heads * head_dim,
        keys_and_values=max((it.n_kv_heads * (it.k_head_dim + it.v_head_dim) for it in layers), default=0),
        inner=max(inner),
        vocabulary=vocabulary,
    )


def query_heads(spec: CacheSpec, config: Mapping[str, Any]) -> int:
    """Those of a layer, by the config; where it is silent as many as KV heads."""
    known, names = _flat(config), ("num_attention_heads", "n_heads", "n_head")
    heads = next((int(known[name]) for name in names if known.get(name)), 0)
    return max([heads, *(it.n_kv_heads for it in spec.attention)])


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = [config.get(key) for key in ("text_config", "llm_config", "language_config")]
    found: dict[str, Any] = {}
    for part in (config, *(it for it in nested if isinstance(it, Mapping))):
        found |= part
    return found


def prefill_step(model: Outline, num_tokens: int, quant: QuantSpec) -> int:
    """A bound of the bytes that prefilling `num_tokens` tokens and sealing them needs at once beside the weights and
    the private tail of all of them in full precision.

    It is the most of: a step of `STEP_TOKENS` tokens through one layer, its scores included where attention is not
    fused; the last step with its logits, twice; the float32 copies of one layer in which it is packed. Measured peaks,
    the tail included, are between two thirds of the sum and all of it; less where only the last layer sees all tokens.
    """
    spec, size = model.spec, widths(model)
    row = _HIDDEN_ROWS * size.hidden + _QUERY_ROWS * size.queries + _KV_ROWS * size.keys_and_values
    row += _INNER_ROWS * size.inner + _score_row(spec, size, num_tokens)
    *steps, last = _steps(num_tokens)  # the last one makes logits, too
    values = max([*(step * row for step in steps), last * (row + 2 * size.vocabulary)])
    return max(values * spec.item_bytes, _packing(spec, num_tokens, quant))


def _steps(num_tokens: int) -> list[int]:
    """Tokens of each step of a prefill."""
    steps: list[int] = []
    while left := num_tokens - sum(steps):
        steps.append(chunk_size(left, STEP_TOKENS))
    return steps


def _score_row(spec: CacheSpec, size: Widths, num_tokens: int) -> int:
    """Scores of one token in the layer that sees the most, where they are held."""
    is_fused = mx.default_device().type == mx.gpu and all(it.k_head_dim in _FUSED_HEAD_DIMS for it in spec.attention)
    seen = (min(num_tokens, it.window + STEP_TOKENS) if it.window else num_tokens for it in spec.attention)
    return 0 if is_fused else size.num_heads * max(seen, default=0)


def _packing(spec: CacheSpec, num_tokens: int, quant: QuantSpec) -> int:
    copies = _FITTING_COPIES if quant.is_fitted else _PACKING_COPIES
    rows = (it.sealed_rows(num_tokens) * it.n_kv_heads * max(it.k_head_dim, it.v_head_dim) for it in spec.attention)
    return copies * 4 * max(rows, default=0) if quant.is_packed else 0
