"""The benchmarks behind `qkvshare bench`: mlx-lm as it ships and ours, in one process, in turn."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .handoff import HandoffCoordinator
from .manager import SharedKVCacheManager
from .measure import buffer_address, interleaved_medians, live_bytes, peak_bytes, sample_tokens, seconds
from .session import AgentSession
from .spec import QuantSpec

if TYPE_CHECKING:
    from .model import LoadedModel

Note = Callable[[str], None]
_PREFILL_STEP = 512  # the same chunks for both sides


@dataclass(frozen=True)
class MemoryRow:
    """Live KV bytes after each of `agents` agents has written `private_tokens` of its own.

    `floor_bytes` is what cannot be avoided: the packed shared tokens once, and every private token in
    full precision at its exact length. `stock_bytes` and `stock_quantized_bytes` are mlx-lm's
    `LRUPromptCache` with full-precision and with quantized caches of the same prefix.
    """

    agents: int
    shared_tokens: int
    private_tokens: int
    ours_bytes: int
    floor_bytes: int
    stock_bytes: int
    stock_quantized_bytes: int
    ours_extra_per_agent_bytes: int


@dataclass(frozen=True)
class HandoffRow:
    """One handoff of `tokens` tokens, and the time to the first token of a role turn after it.

    hot: mlx-lm going on with its own full-precision cache. deepcopy: with a copy of it, as
    `LRUPromptCache` gives. reprefill: from nothing. `bytes_copied` is the growth of live memory through
    the handoff and the receiver's first token, less the receiver's own private tail.
    """

    tokens: int
    turn_tokens: int
    handoff_seconds: float
    bytes_copied: int
    bytes_referenced: int
    ttft_handoff_seconds: float
    ttft_hot_seconds: float
    ttft_deepcopy_seconds: float
    ttft_reprefill_seconds: float
    reprefill_ratio: float
    hot_ratio: float
    decode_seconds_per_token: float
    decode_stock_quantized_seconds_per_token: float
    decode_stock_seconds_per_token: float


# --- mlx-lm as it ships ---------------------------------------------------------------------------


def stock_steps(lm: LoadedModel, cache: list[Any], tokens: Sequence[int]) -> Iterator[int]:
    """Greedy tokens of mlx-lm's `generate_step` behind `cache` and `tokens`."""
    from mlx_lm.generate import generate_step

    prompt = mx.array(tokens)
    steps = generate_step(prompt, lm.model, prompt_cache=cache, max_tokens=-1, prefill_step_size=_PREFILL_STEP)
    return (int(token) for token, _ in steps)


def stock_cache(lm: LoadedModel, tokens: Sequence[int], quant: QuantSpec | None = None) -> list[Any]:
    """mlx-lm's cache of `tokens`, prefilled in full precision; quantized after that where `quant` is given."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(lm.model)
    prompt = mx.array(tokens)
    list(generate_step(prompt, lm.model, prompt_cache=cache, max_tokens=0, prefill_step_size=_PREFILL_STEP))
    if quant is not None:
        cache = [layer.to_quantized(group_size=quant.group_size, bits=quant.k_bits) for layer in cache]
    mx.eval([layer.state for layer in cache])
    return cache


# --- memory ---------------------------------------------------------------------------------------


def bench_memory(
    lm: LoadedModel,
    *,
    agents: Sequence[int] = (1, 2, 4, 8),
    tokens: Sequence[int] = (1024,),
    private_tokens: int = 16,
    quant: QuantSpec | None = None,
    note: Note = lambda text: None,
) -> list[MemoryRow]:
    """Rows for every count of `agents` and every length of `tokens`. Needs k_bits == v_bits for the stock side."""
    quant = quant or QuantSpec()
    rows = []
    for shared_tokens in tokens:
        shared = sample_tokens(lm.tokenizer, shared_tokens)
        note(f"{shared_tokens} shared tokens: ours")
        ours = _ours_live(lm, shared, max(agents), private_tokens, quant)
        note(f"{shared_tokens} shared tokens: mlx-lm LRUPromptCache, full precision")
        stock = _stock_live(lm, shared, max(agents), private_tokens, None)
        note(f"{shared_tokens} shared tokens: mlx-lm LRUPromptCache, {quant.k_bits} bits")
        stock_quantized = _stock_live(lm, shared, max(agents), private_tokens, quant)
        packed = shared_tokens * quant.packed_token_bytes(lm.spec)
        for count in agents:
            floor = packed + count * private_tokens * lm.spec.private_token_bytes
            extra = (ours[count] - ours[0]) // count
            rows.append(
                MemoryRow(
                    count, shared_tokens, private_tokens, ours[count], floor, stock[count],
                    stock_quantized[count], extra,
                )
            )  # fmt: skip
    return rows


def _private_ids(lm: LoadedModel, index: int, count: int) -> list[int]:
    return sample_tokens(lm.tokenizer, count, skip=4000 + 100 * index)


def _ours_live(lm: LoadedModel, shared: list[int], num_agents: int, private: int, quant: QuantSpec) -> list[int]:
    """Live bytes with 0, 1, … agents, the shared prefix included."""
    before = live_bytes()
    manager = SharedKVCacheManager(lm.spec, quant)
    with AgentSession("prefill", lm, manager, prefill_step_tokens=_PREFILL_STEP) as first:
        first.prefill(shared)
        first.seal()
    held, live = [], [live_bytes() - before]
    for index in range(num_agents):
        agent = AgentSession(f"agent {index}", lm, manager)
        report = agent.prefill(shared + _private_ids(lm, index, private - private // 2))
        assert report.reused_tokens == len(shared), report
        for _ in agent.stream(max_tokens=private // 2, ignore_eos=True):
            pass
        held.append(agent)
        live.append(live_bytes() - before)
    return live


def _stock_live(
    lm: LoadedModel, shared: list[int], num_agents: int, private: int, quant: QuantSpec | None
) -> list[int]:
    """The same with mlx-lm's own prompt cache."""
    from mlx_lm.models.cache import LRUPromptCache

    before = live_bytes()
    store = LRUPromptCache(max_size=num_agents + 1)
    store.insert_cache("model", shared, stock_cache(lm, shared, quant))
    held, live = [], [live_bytes() - before]
    for index in range(num_agents):
        ids = _private_ids(lm, index, private - private // 2)
        cache, rest = store.fetch_nearest_cache("model", shared + ids)
        steps = stock_steps(lm, cache, rest)
        for _ in range(private // 2):
            next(steps)
        steps.close()  # type: ignore[attr-defined]
        mx.eval([layer.state for layer in cache])
        held.append(cache)
        live.append(live_bytes() - before)
    return live


# --- handoff --------------------------------------------------------------------------------------


def bench_handoff(
    lm: LoadedModel,
    *,
    tokens: Sequence[int] = (512, 1024, 4096),
    turn_tokens: int = 32,
    decode_tokens: int = 16,
    repeats: int = 5,
    quant: QuantSpec | None = None,
    note: Note = lambda text: None,
) -> list[HandoffRow]:
    """Rows for every length of `tokens`: handoff, first token after it, and decode, each beside mlx-lm."""
    return [
        _handoff_row(lm, count, turn_tokens, decode_tokens, repeats, quant or QuantSpec(), note) for count in tokens
    ]


def _handoff_row(
    lm: LoadedModel, num_tokens: int, turn_tokens: int, decode_tokens: int, repeats: int, quant: QuantSpec, note: Note
) -> HandoffRow:
    shared = sample_tokens(lm.tokenizer, num_tokens)
    turn = sample_tokens(lm.tokenizer, turn_tokens, skip=num_tokens)
    note(f"{num_tokens} tokens: prefill")
    manager = SharedKVCacheManager(lm.spec, quant)
    coordinator = HandoffCoordinator(manager)
    sender, receiver = (AgentSession(name, lm, manager, prefill_step_tokens=_PREFILL_STEP) for name in ("a", "b"))
    sender.prefill(shared)
    sender.seal()
    note(f"{num_tokens} tokens: handoffs")
    copied = _bytes_copied(coordinator, sender, receiver, turn)
    holder, other = receiver, sender
    holder.rewind(holder.num_tokens - num_tokens)
    handoffs = []
    for _ in range(20):
        handoffs.append(coordinator.request_handoff(holder, other).handoff_seconds)
        holder, other = other, holder

    hot = stock_cache(lm, shared)
    quantized = stock_cache(lm, shared, quant)

    def after_handoff() -> float:
        nonlocal holder, other
        coordinator.request_handoff(holder, other)
        holder, other = other, holder
        took = seconds(lambda: next(holder.stream(turn)))
        holder.rewind(holder.num_tokens - num_tokens)
        return took

    note(f"{num_tokens} tokens: time to first token")
    ttft = interleaved_medians(
        {
            "handoff": after_handoff,
            "hot": lambda: _stock_ttft(lm, hot, turn, num_tokens),
            "deepcopy": lambda: _stock_ttft(lm, copy.deepcopy(hot), turn, num_tokens),
        },
        repeats,
    )
    note(f"{num_tokens} tokens: decode")
    decode = interleaved_medians(
        {
            "ours": lambda: _ours_decode(holder, num_tokens, decode_tokens),
            "quantized": lambda: _stock_decode(lm, quantized, shared[-1:], num_tokens, decode_tokens),
            "full": lambda: _stock_decode(lm, hot, shared[-1:], num_tokens, decode_tokens),
        },
        repeats,
    )
    note(f"{num_tokens} tokens: re-prefill")
    reprefill = seconds(lambda: next(stock_steps(lm, _fresh(lm), [*shared, *turn])))
    return HandoffRow(
        tokens=num_tokens,
        turn_tokens=turn_tokens,
        handoff_seconds=statistics.median(handoffs),
        bytes_copied=copied,
        bytes_referenced=coordinator.records[-1].bytes_referenced,
        ttft_handoff_seconds=ttft["handoff"],
        ttft_hot_seconds=ttft["hot"],
        ttft_deepcopy_seconds=ttft["deepcopy"],
        ttft_reprefill_seconds=reprefill,
        reprefill_ratio=reprefill / ttft["handoff"],
        hot_ratio=ttft["handoff"] / ttft["hot"],
        decode_seconds_per_token=decode["ours"],
        decode_stock_quantized_seconds_per_token=decode["quantized"],
        decode_stock_seconds_per_token=decode["full"],
    )


def _bytes_copied(
    coordinator: HandoffCoordinator, sender: AgentSession, receiver: AgentSession, turn: list[int]
) -> int:
    """Growth of live memory through a handoff and the receiver's first token, less its own tail.

    The segments' buffers must also stay where they were: a copy that replaced them would not grow memory.
    """
    receiver.prefill(turn)  # what the model itself allocates once must not count
    receiver.reset()
    arrays = [
        t.packed for segment in coordinator.manager.segments() for kv in segment.layers for t in (kv.keys, kv.values)
    ]
    addresses, before = [buffer_address(a) for a in arrays], live_bytes()
    coordinator.request_handoff(sender, receiver)
    for _ in receiver.stream(turn, max_tokens=1):
        pass
    assert [buffer_address(a) for a in arrays] == addresses
    return max(0, live_bytes() - before - receiver.private_bytes)


def _fresh(lm: LoadedModel) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(lm.model)


def _stock_trim(cache: list[Any], num_tokens: int) -> None:
    from mlx_lm.models.cache import trim_prompt_cache

    trim_prompt_cache(cache, cache[0].offset - num_tokens)


def _stock_ttft(lm: LoadedModel, cache: list[Any], turn: list[int], num_tokens: int) -> float:
    steps = stock_steps(lm, cache, turn)
    took = seconds(lambda: next(steps))
    steps.close()  # type: ignore[attr-defined]
    mx.eval([layer.state for layer in cache])
    _stock_trim(cache, num_tokens)
    return took


def _stock_decode(lm: LoadedModel, cache: list[Any], last: list[int], num_tokens: int, count: int) -> float:
    """Seconds per token, the first one aside."""
    steps = stock_steps(lm, cache, last)
    next(steps)
    took = seconds(lambda: [next(steps) for _ in range(count)])
    steps.close()  # type: ignore[attr-defined]
    mx.eval([layer.state for layer in cache])
    _stock_trim(cache, num_tokens)
    return took / count


def _ours_decode(agent: AgentSession, num_tokens: int, count: int) -> float:
    steps = agent.stream(max_tokens=count + 2, ignore_eos=True)
    next(steps)
    took = seconds(lambda: [next(steps) for _ in range(count)])
    steps.close()  # type: ignore[attr-defined]
    agent.rewind(agent.num_tokens - num_tokens)
    return took / count


# --- what a prefill peaks at, and what quantization costs -----------------------------------------


def prefill_peaks(lm: LoadedModel, num_tokens: int, quant: QuantSpec | None = None) -> dict[str, int]:
    """Peak bytes above the weights of prefill + seal, of mlx-lm's full-precision prefill, and one layer's K/V."""
    ids = sample_tokens(lm.tokenizer, num_tokens)

    def ours() -> None:
        agent = AgentSession("peak", lm, SharedKVCacheManager(lm.spec, quant), prefill_step_tokens=_PREFILL_STEP)
        agent.prefill(ids)
        agent.seal()

    ours_peak = peak_bytes(ours)
    stock_peak = peak_bytes(lambda: stock_cache(lm, ids))
    layer = num_tokens * lm.spec.private_token_bytes // len(lm.spec.layers)
    return {"tokens": num_tokens, "ours_peak_bytes": ours_peak, "stock_peak_bytes": stock_peak, "layer_bytes": layer}


def kl_divergence(
    lm: LoadedModel,
    *,
    prefix_tokens: int = 1024,
    scored_tokens: int = 512,
    skip: int = 0,
    quant: QuantSpec | None = None,
) -> dict[str, float]:
    """KL of next-token distributions, full precision || sealed prefix, over `scored_tokens` tokens of real text.

    The prefix is prefilled in full precision and sealed; the scored tokens are fed behind it in both.
    """
    ids = sample_tokens(lm.tokenizer, prefix_tokens + scored_tokens, skip=skip)
    prefix, scored = ids[:prefix_tokens], mx.array(ids[prefix_tokens:])[None]
    agent = AgentSession("kl", lm, SharedKVCacheManager(lm.spec, quant), prefill_step_tokens=_PREFILL_STEP)
    agent.prefill(prefix)
    agent.seal()
    ours = _log_probabilities(agent.score(scored[0].tolist()))
    exact = _log_probabilities(lm.model(scored, cache=stock_cache(lm, prefix))[0])
    kl = mx.sum(mx.exp(exact) * (exact - ours), axis=-1)
    agrees = mx.mean(mx.argmax(exact, axis=-1) == mx.argmax(ours, axis=-1))
    return {"mean_kl": mx.mean(kl).item(), "max_kl": mx.max(kl).item(), "top1_agreement": agrees.item()}


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
