"""What a packed prefix costs in quality: KL, perplexity and recall against mlx-lm in full precision, on real text.

Letters: L scored tokens, V words of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .attention import QuantizedAttention
from .bench_stock import PREFILL_STEP, StockCache, stock_prefilled_quantized
from .handoff import HandoffCoordinator
from .manager import SharedKVCacheManager
from .measure import AS_ASKED
from .passages import Passage
from .segment import LayerKV
from .session import AgentSession
from .spec import FULL_PRECISION_BITS, PRESETS, CacheSpec, QuantSpec

if TYPE_CHECKING:
    from .model import LoadedModel

Note = Callable[[str], None]
_ROWS = 64  # of logits that are compared at a time: Gemma's have 262,144 columns
_BLOCK_TOKENS = 32  # errors of neighbouring tokens are not independent: the interval is over means of blocks
_Z95 = 1.96
_LOOKED_TOKENS = 64


@dataclass(frozen=True)
class Candidate:
    """A way to keep a prefix: how it is packed, and how often it is handed over before it is read.

    `is_stock` is mlx-lm's own quantized cache at `quant.k_bits`, quantizing while it prefills.
    """

    name: str
    quant: QuantSpec
    key_factors: Sequence[mx.array | None] | None = None
    num_handoffs: int = 1
    is_stock: bool = False
    attention: QuantizedAttention | None = None


@dataclass(frozen=True)
class Scores:
    """Over the scored tokens of one passage, in nats: `kl` [L] of full precision || candidate, `agrees` [L] of the
    likeliest words, `growth` [L - 1] of the next token's loss, and `hits`: is the likeliest word what is recalled?"""

    kl: np.ndarray
    agrees: np.ndarray
    growth: np.ndarray
    hits: np.ndarray


@dataclass(frozen=True)
class FidelityRow:
    """One candidate over all passages; None where mlx-lm refuses to quantize the model's cache.

    `bits_per_value` and `ratio_vs_fp16` have all in: scales, biases, centres and sinks of a 16-bit model's cache.
    `ppl_delta_percent` has its 95 % interval; `recall` is the share of a copy's tokens that come first.
    """

    config: str
    k_bits: int
    v_bits: int
    group_size: int
    bytes_per_token: int
    bits_per_value: float
    ratio_vs_fp16: float
    handoffs: int
    kl_mean: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    kl_by_passage: dict[str, float] = field(default_factory=dict)
    top1_agreement: float | None = None
    ppl_delta_percent: float | None = None
    ppl_delta_interval: tuple[float, float] | None = None
    recall: float | None = None


class Reference:
    """A passage in full precision: mlx-lm's own log-probabilities of it, its prefix's `rows` to pack, layer by layer as
    `quantize_and_store` takes them, and the queries of its last tokens (`looked`).

    `dtype` is that of keys, values and scales, by default the model's. A model that computes in float32 may keep a
    16-bit cache, whose scales are then rounded as in a 16-bit model.
    """

    def __init__(self, lm: LoadedModel, passage: Passage, *, dtype: str | None = None):
        self.passage, self._lm = passage, lm
        self._spec = lm.spec if dtype is None else dataclasses.replace(lm.spec, dtype=dtype)
        self._log_probs = _log_probabilities(self._stock_logits(StockCache(lm, passage.prefix).layers))
        manager = SharedKVCacheManager(lm.spec, QuantSpec(FULL_PRECISION_BITS, FULL_PRECISION_BITS))
        with AgentSession("reference", lm, manager, prefill_step_tokens=PREFILL_STEP) as agent:
            agent.prefill(passage.prefix)
            self.looked = agent.look(_LOOKED_TOKENS)
            agent.seal()
            (view,) = agent.prefix.views
            self.rows = [self._rows_of(layer) for layer in view.segment.layers]
        mx.eval(self.rows)

    def _rows_of(self, layer: Any) -> tuple[mx.array, ...]:
        if not isinstance(layer, LayerKV):
            return tuple(layer.arrays)
        dtype = getattr(mx, self._spec.dtype)
        return tuple(x.packed.astype(dtype) for x in (layer.keys, layer.values))

    def _stock_logits(self, layers: Any) -> mx.array:
        logits = self._lm.model(mx.array(self.passage.scored)[None], cache=layers)[0]
        mx.eval(logits)
        return logits

    def scores(self, candidate: Candidate) -> Scores | None:
        """Of the scored tokens behind the prefix as `candidate` keeps it; None where mlx-lm refuses."""
        logits = self._logits(candidate)
        return None if logits is None else self._compare(logits)

    def exact(self) -> Scores:
        """Full precision against itself."""
        return self._compare(self._log_probs)

    def _logits(self, candidate: Candidate) -> mx.array | None:
        if candidate.is_stock:
            layers = stock_prefilled_quantized(self._lm, self.passage.prefix, candidate.quant)
            return None if layers is None else self._stock_logits(layers)
        prefix = self.passage.prefix
        manager = SharedKVCacheManager(self._spec, candidate.quant, key_factors=candidate.key_factors, **AS_ASKED)
        slot = manager.allocate_shared_slot(len(prefix))
        manager.quantize_and_store(slot, prefix, list(self.rows), looked=self.looked).release()
        coordinator = HandoffCoordinator(manager)
        with self._agent("sender", manager, candidate) as holder, self._agent("receiver", manager, candidate) as other:
            report = holder.prefill(prefix)
            assert report.computed_tokens == 0, report
            for _ in range(candidate.num_handoffs):
                coordinator.request_handoff(holder, other)
                holder, other = other, holder
            return holder.score(self.passage.scored)

    def _agent(self, name: str, manager: SharedKVCacheManager, candidate: Candidate) -> AgentSession:
        return AgentSession(name, self._lm, manager, attention=candidate.attention)

    def _compare(self, logits: mx.array) -> Scores:
        parts = [
            _compared(
                self._log_probs[start : start + _ROWS], _log_probabilities(logits[start : start + _ROWS]), next_ids
            )
            for start, next_ids in self._targets()
        ]
        kl, agrees, growth, hits = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Scores(kl, agrees, growth[:-1], hits[list(self.passage.recalled)])

    def _targets(self) -> Iterator[tuple[int, mx.array]]:
        """The next token of every scored one, block by block; what follows the last is not known."""
        ids = [*self.passage.scored[1:], self.passage.scored[-1]]
        for start in range(0, len(ids), _ROWS):
            yield start, mx.array(ids[start : start + _ROWS])


def standard_candidates(factors: Sequence[mx.array | None] | None, *, handoffs: int = 8) -> list[Candidate]:
    """mlx-lm's quantized caches, plain bits, and the presets: without and with key factors, and after `handoffs`."""
    found = [Candidate(f"mlx-lm {bits} bit", QuantSpec(bits, bits), is_stock=True) for bits in (8, 6, 4)]
    found += [Candidate(str(quant), quant) for quant in (QuantSpec(bits, bits) for bits in (16, 8, 6, 4))]
    for name, quant in PRESETS.items():
        found.append(Candidate(name, quant))
        if factors is not None:
            found.append(Candidate(f"{name}, factors", quant, factors))
        found.append(dataclasses.replace(found[-1], name=f"{found[-1].name}, {handoffs} hops", num_handoffs=handoffs))
    return found


def _log_probabilities(logits: mx.array) -> mx.array:
    """Both sides are normalized the same way, so that what `logsumexp` rounds cancels."""
    logits = logits.astype(mx.float32)
    logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logits)
    return logits


def _compared(exact: mx.array, ours: mx.array, next_ids: mx.array) -> list[np.ndarray]:
    chosen, index = mx.argmax(ours, axis=-1), next_ids[:, None]
    found = [
        mx.sum(mx.exp(exact) * (exact - ours), axis=-1),
        mx.argmax(exact, axis=-1) == chosen,
        mx.take_along_axis(exact - ours, index, axis=-1)[:, 0],
        chosen == next_ids,
    ]
    mx.eval(found)
    return [np.array(array) for array in found]


def fidelity(
    lm: LoadedModel,
    candidates: Sequence[Candidate],
    passages: Sequence[Passage],
    *,
    dtype: str | None = None,
    note: Note = lambda text: None,
    watch: Callable[[Reference], None] = lambda reference: None,
) -> list[FidelityRow]:
    """A row for every candidate, over all `passages`; each is prefilled once in full precision, shown to `watch`, and
    packed anew for every candidate. `dtype` as in `Reference`.
    """
    found: list[dict[str, Scores | None]] = [{} for _ in candidates]
    for passage in passages:
        note(f"{passage.name}: full precision")
        watch(reference := Reference(lm, passage, dtype=dtype))
        for candidate, scores in zip(candidates, found, strict=True):
            note(f"{passage.name}: {candidate.name}")
            scores[passage.name] = reference.scores(candidate)
            mx.clear_cache()
    num_tokens = max(len(passage.prefix) for passage in passages)
    spec = lm.spec if dtype is None else dataclasses.replace(lm.spec, dtype=dtype)
    return [make_row(c, spec, num_tokens, scores) for c, scores in zip(candidates, found, strict=True)]


def make_row(candidate: Candidate, spec: CacheSpec, num_tokens: int, scores: dict[str, Scores | None]) -> FidelityRow:
    """The row of `candidate`, with the bytes of a prefix of `num_tokens` tokens and `scores` by passage."""
    quant, half = candidate.quant, dataclasses.replace(spec, dtype="float16")
    # Of what rows are kept: a sliding layer holds fewer of them than tokens. States are no rows.
    full = half.context_bytes(num_tokens) - half.state_bytes
    packed = quant.packed_bytes(half, num_tokens) - half.state_bytes
    per_token = (quant.packed_bytes(spec, num_tokens) - spec.state_bytes) / num_tokens
    return FidelityRow(
        config=candidate.name,
        k_bits=quant.k_bits,
        v_bits=quant.v_bits,
        group_size=quant.group_size,
        bytes_per_token=round(per_token),
        bits_per_value=FULL_PRECISION_BITS * packed / full,
        ratio_vs_fp16=full / packed,
        handoffs=0 if candidate.is_stock else candidate.num_handoffs,
        **summary(scores),
    )


def summary(scores: dict[str, Scores | None]) -> dict[str, Any]:
    """The measured fields of a `FidelityRow`; none where one of the passages was refused."""
    known = {name: score for name, score in scores.items() if score is not None}
    if len(known) < len(scores):
        return {}
    found: dict[str, Any] = {}
    recalled = [score.hits for score in known.values() if len(score.hits)]
    if recalled:
        found["recall"] = float(np.mean(np.concatenate(recalled)))
    texts = {name: score for name, score in known.items() if not len(score.hits)}
    if not texts:
        return found
    kl = np.concatenate([score.kl for score in texts.values()]).astype(np.float64)
    growth, interval = _perplexity([score.growth for score in texts.values()])
    return found | {
        "kl_mean": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "kl_by_passage": {name: float(score.kl.mean(dtype=np.float64)) for name, score in texts.items()},
        "top1_agreement": float(np.mean(np.concatenate([score.agrees for score in texts.values()]))),
        "ppl_delta_percent": growth,
        "ppl_delta_interval": interval,
    }


def _perplexity(growths: Sequence[np.ndarray]) -> tuple[float, tuple[float, float] | None]:
    """Percent that perplexity grew, and its 95 % interval; None where there is one block only."""
    blocks = [block for it in growths for block in np.array_split(it, max(1, len(it) // _BLOCK_TOKENS))]
    mean = float(np.concatenate(growths).mean(dtype=np.float64))
    interval = None
    if len(blocks) > 1:
        means = np.array([block.mean(dtype=np.float64) for block in blocks])
        spread = _Z95 * float(means.std(ddof=1)) / math.sqrt(len(means))
        interval = (100 * math.expm1(mean - spread), 100 * math.expm1(mean + spread))
    return 100 * math.expm1(mean), interval
