"""`qkvshare doctor`: a minute on a model's own keys and values, and what follows for how to pack them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from .attention import QuantizedAttention
from .calibrate import calibrate
from .errors import InvalidValueError
from .fidelity import Candidate, FidelityRow, Reference, fidelity
from .guard import attention_error, channel_outlier
from .layer_cache import LayerCache
from .manager import SharedKVCacheManager
from .measure import versions
from .passages import TEXTS, Passage, copy_passage, passage, text_of
from .quantize import Factors, quantize
from .routes import Route
from .segment import KVBlock
from .spec import PRESETS, CacheSpec, LayerSpec, QuantSpec
from .verdict import FULL_PRECISION, Refusal, Verdict

if TYPE_CHECKING:
    from .model import LoadedModel

Note = Callable[[str], None]

PLAIN = tuple(QuantSpec(k_bits, v_bits) for k_bits, v_bits in ((8, 8), (8, 4), (4, 8), (4, 4)))
"""What is tried beside the presets: with them, keys are told from values."""

UNSAFE_KL, UNSAFE_RECALL_LOSS = 0.03, 0.05
"""A setting is refused above this mean KL in nats, or if this share of what full precision recalls is lost."""
GOOD_KL, GOOD_RECALL_LOSS = 1e-3, 0.02
"""The preset to take is the smallest that stays below these."""


@dataclass(frozen=True)
class LayerReport:
    """How a layer's keys look: the loudest channel in medians of all channels, and the relative error of the last
    tokens' attention outputs with K and V at 4 bits each (None where the model's attention cannot be seen)."""

    layer: int
    channel_outlier: float
    key_error: float | None
    value_error: float | None


@dataclass(frozen=True)
class Examination:
    """What was measured, and the verdict on it: `settings` (and whether with key factors) and their `rows`, the layers,
    and the `recall` of full precision, None without a recall test."""

    settings: tuple[tuple[QuantSpec, bool], ...]
    rows: tuple[FidelityRow, ...]
    layers: tuple[LayerReport, ...]
    recall: float | None
    verdict: Verdict


def examine(
    lm: LoadedModel,
    *,
    passages: Sequence[Passage] | None = None,
    calibration: Sequence[int] | None = None,
    note: Note = lambda text: None,
) -> Examination:
    """Try every preset, without and with key factors, and plain bits, on `passages`; by default on a passage of a text
    that ships with the package and on a copy (`copy_passage`).

    Args:
        calibration: token ids to learn key factors from, see `calibrate`.

    Raises:
        InvalidValueError: a model without a tokenizer needs `passages` and `calibration`.
    """
    if not lm.tokenizer and (passages is None or calibration is None):
        raise InvalidValueError("[doctor] passages, calibration: expected both for a model without a tokenizer")
    note("key factors")
    factors = calibrate(lm, calibration)
    candidates = _candidates(factors)
    hits: list[bool] = []
    layers: list[LayerReport] = []

    def watch(reference: Reference) -> None:
        hits.extend(reference.exact().hits.tolist())
        layers[:] = layers or _layer_reports(lm.spec, reference)

    rows = fidelity(lm, candidates, _passages(lm) if passages is None else passages, note=note, watch=watch)
    recall = statistics.fmean(hits) if hits else None
    settings = tuple((c.quant, c.key_factors is not None) for c in candidates)
    return Examination(settings, tuple(rows), tuple(layers), recall, judge(candidates, rows, recall, factors))


def _passages(lm: LoadedModel) -> list[Passage]:
    text, limit = text_of(TEXTS[0]), lm.spec.max_context_tokens
    scored = min(192, limit // 4)
    return [
        passage(lm.tokenizer, TEXTS[0], text, prefix_tokens=min(512, limit - scored), scored_tokens=scored),
        copy_passage(lm.tokenizer, text, prefix_tokens=min(320, limit // 2), scored_tokens=min(144, limit // 4)),
    ]


def _candidates(factors: Factors) -> list[Candidate]:
    found = [Candidate(str(quant), quant) for quant in PLAIN]
    for name, quant in PRESETS.items():
        found.append(Candidate(name, quant))
        if any(factor is not None for factor in factors):
            found.append(Candidate(f"{name}, factors", quant, factors))
    return found


def judge(
    candidates: Sequence[Candidate], rows: Sequence[FidelityRow], recall: float | None, factors: Factors
) -> Verdict:
    """The smallest preset that does no harm that anybody could notice, each with or without `factors`, whichever lost
    less, and the settings to refuse."""
    tried = list(zip(candidates, rows, strict=True))
    refusals = [
        Refusal(candidate.quant, candidate.key_factors is not None, reason)
        for candidate, row in tried
        if (reason := harm(row, recall, UNSAFE_KL, UNSAFE_RECALL_LOSS))
    ]
    best: dict[str, tuple[Candidate, FidelityRow]] = {}
    for name, quant in PRESETS.items():
        best[name] = min((it for it in tried if it[0].quant == quant), key=lambda it: _loss(it[1]))
    good = [name for name in PRESETS if not harm(best[name][1], recall, GOOD_KL, GOOD_RECALL_LOSS)]
    calibrated = tuple(name for name in PRESETS if best[name][0].key_factors is not None)
    return Verdict(
        preset=_pick(best, good, recall),  # presets stand in the order of their bytes
        calibrated=calibrated,
        refusals=tuple(refusals),
        rows=tuple(dataclasses.asdict(row) for row in rows),
        versions=versions(),
        key_factors=tuple(factors) if calibrated else (),
    )


def harm(row: FidelityRow, recall: float | None, kl_limit: float, recall_limit: float) -> str:
    """What of it is beyond the limits, or nothing."""
    found = []
    if row.kl_mean is not None and not row.kl_mean <= kl_limit:
        found.append(f"mean KL {row.kl_mean:.2g}")
    if row.recall is not None and recall is not None and not row.recall >= recall * (1 - recall_limit):
        found.append(f"recall {row.recall:.0%} of {recall:.0%}")
    return ", ".join(found)


def _pick(best: dict[str, tuple[Candidate, FidelityRow]], good: list[str], recall: float | None) -> str:
    """The smallest of the `good` ones, else the least harmful that is not refused, else none."""
    if good:
        return good[-1]
    harmless = [name for name in best if not harm(best[name][1], recall, UNSAFE_KL, UNSAFE_RECALL_LOSS)]
    return min(harmless, key=lambda name: _loss(best[name][1]), default=FULL_PRECISION)


def _loss(row: FidelityRow) -> tuple[float, float]:
    kl = -1.0 if row.kl_mean is None else row.kl_mean
    return (math.inf if math.isnan(kl) else kl, -(row.recall or 0.0))


# --- layer by layer -------------------------------------------------------------------------------


def _layer_reports(spec: CacheSpec, reference: Reference) -> list[LayerReport]:
    found = []
    for index, layer in enumerate(spec.layers):
        if not isinstance(layer, LayerSpec):
            continue
        keys, values = reference.rows[index]
        looked, errors = reference.looked.get(index), []
        for quant in (QuantSpec(4, 16), QuantSpec(16, 4)):
            block = _packed(spec, index, quant, keys, values)
            errors.append(attention_error(looked, keys, values, [block]) if looked else None)
        found.append(LayerReport(index, channel_outlier(keys), *errors))
    return found


def _packed(spec: CacheSpec, index: int, quant: QuantSpec, keys: mx.array, values: mx.array) -> KVBlock:
    plan = quant.resolve_layer(spec, index)
    assert plan is not None
    return KVBlock(quantize(keys, plan.keys), quantize(values, plan.values))


# --- the kernels ----------------------------------------------------------------------------------


def kernel_difference(spec: CacheSpec, gqa_factor: int = 4) -> float | None:
    """The largest difference between the Metal kernel and plain MLX operations on random keys and values of this
    model's widest layer; None without a Metal device. Raises `KernelBuildError`."""
    if not mx.metal.is_available() or not spec.attention:
        return None
    layer = max(spec.attention, key=lambda it: it.k_head_dim)
    one = dataclasses.replace(spec, layers=(dataclasses.replace(layer, kind="full", window=0),), grouping=())
    manager = SharedKVCacheManager(one, QuantSpec(), allow_unsafe=True)
    dtype, tokens = getattr(mx, spec.dtype), 200
    rows = [
        mx.random.normal((1, layer.n_kv_heads, tokens, d)).astype(dtype) for d in (layer.k_head_dim, layer.v_head_dim)
    ]
    slot = manager.allocate_shared_slot(tokens)
    prefix = manager.quantize_and_store(slot, range(tokens), [tuple(rows)])
    (cache,) = manager.make_caches(prefix)
    assert isinstance(cache, LayerCache)
    cache.update_and_fetch(*(x[:, :, :1] for x in rows))
    queries = mx.random.normal((1, layer.n_kv_heads * gqa_factor, 1, layer.k_head_dim)).astype(dtype)
    found = [
        QuantizedAttention(route).attend(queries, cache, scale=layer.k_head_dim**-0.5)
        for route in (Route.KERNEL, Route.PACKED)
    ]
    difference = mx.max(mx.abs(found[0].astype(mx.float32) - found[1].astype(mx.float32))).item()
    prefix.release()
    return float(difference)  # type: ignore[arg-type]
