"""The benchmarks behind `qkvshare bench`: mlx-lm as it ships and ours, in one process, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .bench_stock import PREFILL_STEP, StockCache, stock_quantized
from .errors import IntegrityError
from .handoff import HandoffCoordinator, HandoffRecord
from .manager import SharedKVCacheManager
from .measure import AS_ASKED, buffer_address, interleaved_medians, live_bytes, sample_tokens, seconds
from .session import AgentSession
from .spec import QuantSpec

if TYPE_CHECKING:
    from .model import LoadedModel

Note = Callable[[str], None]


@dataclass(frozen=True)
class MemoryRow:
    """Live KV bytes after each of `agents` agents has written `private_tokens` of its own.

    `floor_bytes` is what cannot be avoided: the packed shared tokens once, and every private token in
    full precision at its exact length. `stock_bytes` and `stock_quantized_bytes` are mlx-lm's
    `LRUPromptCache` with full-precision and with quantized caches of the same prefix. The latter, as everywhere
    here, is None where mlx-lm refuses to quantize a cache of the model, such as that of a sliding layer.
    """

    agents: int
    shared_tokens: int
    private_tokens: int
    ours_bytes: int
    floor_bytes: int
    stock_bytes: int
    stock_quantized_bytes: int | None
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
    decode_stock_quantized_seconds_per_token: float | None
    decode_stock_seconds_per_token: float


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
        ours = ours_live(lm, shared, max(agents), private_tokens, quant)
        note(f"{shared_tokens} shared tokens: mlx-lm LRUPromptCache, full precision")
        stock = _stock_live(lm, shared, max(agents), private_tokens)
        note(f"{shared_tokens} shared tokens: mlx-lm LRUPromptCache, {quant.k_bits} bits")
        quantized = _stock_live(lm, shared, max(agents), private_tokens, quant)
        packed, private = quant.packed_bytes(lm.spec, shared_tokens), lm.spec.context_bytes(private_tokens)
        for count in agents:
            floor = packed + count * private
            extra = (ours[count] - ours[0]) // count
            rows.append(
                MemoryRow(
                    count, shared_tokens, private_tokens, ours[count], floor, stock[count],
                    quantized[count] if quantized else None, extra,
                )
            )  # fmt: skip
    return rows


def _private_ids(lm: LoadedModel, index: int, count: int) -> list[int]:
    return sample_tokens(lm.tokenizer, count, skip=4000 + 100 * index)


def ours_live(lm: LoadedModel, shared: list[int], num_agents: int, private: int, quant: QuantSpec) -> list[int]:
    """Live bytes with 0, 1, … agents of `private` tokens of their own each, the `shared` prefix included."""
    before = live_bytes()
    manager = SharedKVCacheManager(lm.spec, quant, **AS_ASKED)
    with AgentSession("prefill", lm, manager, prefill_step_tokens=PREFILL_STEP) as first:
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
    lm: LoadedModel, shared: list[int], num_agents: int, private: int, quant: QuantSpec | None = None
) -> list[int]:
    """The same with mlx-lm's own prompt cache; nothing where it cannot be quantized."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import LRUPromptCache

    before = live_bytes()
    layers: list[Any] | None = StockCache(lm, shared).layers
    if quant is not None and layers is not None:
        layers = stock_quantized(layers, quant)
    if layers is None:
        return []
    mx.eval([layer.state for layer in layers])
    store = LRUPromptCache(max_size=num_agents + 1)
    store.insert_cache("model", shared, layers)
    held, live = [], [live_bytes() - before]
    for index in range(num_agents):
        ids = _private_ids(lm, index, private - private // 2)
        cache, rest = store.fetch_nearest_cache("model", shared + ids)
        for _ in generate_step(mx.array(rest), lm.model, prompt_cache=cache, max_tokens=private // 2):
            pass
        mx.eval([layer.state for layer in cache])
        held.append(cache)
        live.append(live_bytes() - before)
    return live


# --- handoff --------------------------------------------------------------------------------------


def bench_handoff(
    lm: LoadedModel,
    *,
    tokens: Sequence[int] = (512, 1024, 4096),
    agents: int = 2,
    turn_tokens: int = 32,
    decode_tokens: int = 16,
    repeats: int = 5,
    quant: QuantSpec | None = None,
    note: Note = lambda text: None,
) -> list[HandoffRow]:
    """Rows for every length of `tokens`: handoff, first token after it, and decode, each beside mlx-lm."""
    return [
        _handoff_row(lm, _Ring(lm, count, agents, turn_tokens, quant or QuantSpec()), decode_tokens, repeats, note)
        for count in tokens
    ]


class _Ring:
    """`num_agents` sessions that pass one sealed context of `num_tokens` tokens around."""

    def __init__(self, lm: LoadedModel, num_tokens: int, num_agents: int, turn_tokens: int, quant: QuantSpec):
        self.shared = sample_tokens(lm.tokenizer, num_tokens)
        self.turn = sample_tokens(lm.tokenizer, turn_tokens, skip=num_tokens)
        self.quant, self.manager = quant, SharedKVCacheManager(lm.spec, quant, **AS_ASKED)
        self.coordinator = HandoffCoordinator(self.manager)
        self._agents = [
            AgentSession(f"agent {i}", lm, self.manager, prefill_step_tokens=PREFILL_STEP) for i in range(num_agents)
        ]
        self.holder.prefill(self.shared)
        self.holder.seal()

    @property
    def holder(self) -> AgentSession:
        return self._agents[0]

    def hand_on(self) -> HandoffRecord:
        record = self.coordinator.request_handoff(self._agents[0], self._agents[1])
        self._agents.append(self._agents.pop(0))
        return record

    def rewind(self) -> None:
        """Back to the shared context."""
        self.holder.rewind(self.holder.num_tokens - len(self.shared))

    def bytes_copied(self) -> int:
        """Growth of live memory through a handoff and the receiver's first token, above that of the same
        turn without a handoff.

        The segments' buffers must also stay where they were: a copy that replaced them would not grow memory.
        """
        self._turn_growth()  # what the model itself allocates once must not count
        # The least of three: MLX hands out cached buffers that may be a little too large; a copy is there every time.
        plain = min(self._turn_growth() for _ in range(3))
        arrays = [array for segment in self.manager.segments() for array in segment.arrays()]
        addresses = [buffer_address(array) for array in arrays]
        grown = min(self._turn_growth(self.hand_on) for _ in range(3))
        if [buffer_address(array) for array in arrays] != addresses:
            raise IntegrityError("[bench_handoff] expected the packed bytes to stay in place, got other addresses")
        return max(0, grown - plain)

    def _turn_growth(self, before_turn: Callable[[], Any] = lambda: None) -> int:
        before = live_bytes()
        before_turn()
        for _ in self.holder.stream(self.turn, max_tokens=1):
            pass
        grown = live_bytes() - before
        self.rewind()
        self.holder.seal()  # nothing to seal, but the tail's buffers go
        return grown

    def first_token(self) -> float:
        """Seconds to the first token of the role turn, on the agent that holds the context."""
        steps = self.holder.stream(self.turn)
        took = seconds(lambda: next(steps))
        steps.close()
        self.rewind()
        return took

    def decode(self, count: int) -> float:
        """Seconds per token, the first one aside."""
        steps = self.holder.stream(max_tokens=count + 2, ignore_eos=True)
        next(steps)
        took = seconds(lambda: [next(steps) for _ in range(count)])
        steps.close()
        self.rewind()
        return took / count


def _handoff_row(lm: LoadedModel, ring: _Ring, decode_tokens: int, repeats: int, note: Note) -> HandoffRow:
    num_tokens = len(ring.shared)
    note(f"{num_tokens} tokens: handoffs")
    copied = ring.bytes_copied()
    handoffs = [ring.hand_on().handoff_seconds for _ in range(20)]
    hot = StockCache(lm, ring.shared)
    quantized = hot.quantized(ring.quant)
    note(f"{num_tokens} tokens: time to first token")
    ring.hand_on()
    ttft = interleaved_medians(
        {
            "handoff": ring.first_token,
            "hot": lambda: hot.first_token(ring.turn),
            "deepcopy": lambda: hot.copied().first_token(ring.turn),
        },
        repeats,
    )
    note(f"{num_tokens} tokens: decode")
    sides = {"ours": lambda: ring.decode(decode_tokens), "full": lambda: hot.decode(decode_tokens)}
    if quantized is not None:
        sides["quantized"] = lambda: quantized.decode(decode_tokens)
    decode = interleaved_medians(sides, repeats)
    note(f"{num_tokens} tokens: re-prefill")
    reprefill = StockCache(lm, ()).first_token([*ring.shared, *ring.turn])
    return HandoffRow(
        tokens=num_tokens,
        turn_tokens=len(ring.turn),
        handoff_seconds=statistics.median(handoffs),
        bytes_copied=copied,
        bytes_referenced=ring.coordinator.records[-1].bytes_referenced,
        ttft_handoff_seconds=ttft["handoff"],
        ttft_hot_seconds=ttft["hot"],
        ttft_deepcopy_seconds=ttft["deepcopy"],
        ttft_reprefill_seconds=reprefill,
        reprefill_ratio=reprefill / ttft["handoff"],
        hot_ratio=ttft["handoff"] / ttft["hot"],
        decode_seconds_per_token=decode["ours"],
        decode_stock_quantized_seconds_per_token=decode.get("quantized"),
        decode_stock_seconds_per_token=decode["full"],
    )
