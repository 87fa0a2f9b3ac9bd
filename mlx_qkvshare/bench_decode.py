"""`qkvshare bench decode`: N agents on one context decode together, mlx-lm's `BatchGenerator` beside ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .batch import AgentBatch
from .bench_stock import StockCache
from .manager import SharedKVCacheManager
from .measure import AS_ASKED, interleaved_medians, live_bytes, sample_tokens, seconds
from .session import AgentSession
from .spec import QuantSpec

if TYPE_CHECKING:
    from .model import LoadedModel


@dataclass(frozen=True)
class DecodeRow:
    """Tokens per second of `agents` agents together, each with `private_tokens` of its own behind the shared ones.

    stock_batch: mlx-lm's `BatchGenerator` on merged full-precision caches. stock_sequential and
    stock_quantized: one agent after another on caches of their own, in full precision and in our bits
    (None where mlx-lm refuses to quantize them).
    Live bytes are those of the caches after the first round, whose tokens are among the private ones, and bytes read
    the KV bytes of its last step: neither depends on how many rounds are timed.
    """

    agents: int
    shared_tokens: int
    private_tokens: int
    ours_tokens_per_second: float
    stock_batch_tokens_per_second: float
    stock_sequential_tokens_per_second: float
    stock_quantized_tokens_per_second: float | None
    speedup_vs_stock_batch: float
    ours_live_bytes: int
    stock_batch_live_bytes: int
    floor_bytes: int
    kv_bytes_read_per_step: int
    kv_bytes_read_per_step_stock: int


def bench_decode(
    lm: LoadedModel,
    *,
    agents: Sequence[int] = (1, 2, 4, 8),
    tokens: Sequence[int] = (512, 2048),
    private_tokens: int = 8,
    steps: int = 8,
    repeats: int = 3,
    quant: QuantSpec | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[DecodeRow]:
    """Rows for every count of `agents` and every length of `tokens`; each side decodes `steps` tokens a round."""
    quant, rows = quant or QuantSpec(), []
    for shared_tokens in tokens:
        note(f"{shared_tokens} shared tokens: prefill")
        shared = sample_tokens(lm.tokenizer, shared_tokens)
        manager = SharedKVCacheManager(lm.spec, quant, **AS_ASKED)
        with AgentSession("prefill", lm, manager) as first:
            first.prefill(shared)
            first.seal()
        full = StockCache(lm, shared)
        for count in agents:
            note(f"{shared_tokens} shared tokens, {count} agents: decode")
            turns = [sample_tokens(lm.tokenizer, private_tokens, skip=shared_tokens + 50 * i + 1) for i in range(count)]
            rows.append(_decode_row(lm, manager, shared, full, turns, steps, repeats))
    return rows


def _decode_row(
    lm: LoadedModel,
    manager: SharedKVCacheManager,
    shared: list[int],
    full: StockCache,
    turns: list[list[int]],
    steps: int,
    repeats: int,
) -> DecodeRow:
    sides: dict[str, Any] = {
        "ours": _Ours(lm, manager, shared, turns, steps * (repeats + 1) + 2),
        "stock_batch": _StockBatch(lm, full, turns, steps * (repeats + 1) + 2),
        "stock_sequential": _StockSequential(lm, full, turns),
    }
    if (quantized := full.quantized(manager.quant)) is not None:
        sides["stock_quantized"] = _StockSequential(lm, quantized, turns)
    took = interleaved_medians({name: lambda side=side: side.run(steps) for name, side in sides.items()}, repeats)  # type: ignore[misc]
    rate = {name: len(turns) * steps / value for name, value in took.items()}
    ours, stock = sides["ours"], sides["stock_batch"]
    private = len(turns[0]) + steps + 1
    packed = manager.quant.packed_bytes(lm.spec, len(shared))
    row = DecodeRow(
        agents=len(turns),
        shared_tokens=len(shared),
        private_tokens=private,
        ours_tokens_per_second=rate["ours"],
        stock_batch_tokens_per_second=rate["stock_batch"],
        stock_sequential_tokens_per_second=rate["stock_sequential"],
        stock_quantized_tokens_per_second=rate.get("stock_quantized"),
        speedup_vs_stock_batch=rate["ours"] / rate["stock_batch"],
        ours_live_bytes=packed + ours.live_bytes,
        stock_batch_live_bytes=stock.live_bytes,
        floor_bytes=packed + len(turns) * lm.spec.context_bytes(private),
        kv_bytes_read_per_step=ours.kv_bytes_read,
        kv_bytes_read_per_step_stock=len(turns) * lm.spec.context_bytes(len(shared) + private),
    )
    for side in sides.values():
        side.close()
    return row


class _Ours:
    """N sessions in a batch; `live_bytes` is what they added to the packed prefix, after the first round."""

    def __init__(
        self, lm: LoadedModel, manager: SharedKVCacheManager, shared: list[int], turns: list[list[int]], limit: int
    ):
        self.live_bytes = self.kv_bytes_read = 0
        self._batch = AgentBatch(manager)
        self._sessions = [AgentSession(f"agent {i}", lm, manager) for i in range(len(turns))]
        for session, turn in zip(self._sessions, turns, strict=True):
            self._batch.join(session, [*shared, *turn], max_tokens=limit, ignore_eos=True)
        self._batch.step()  # shows that attention is routed; the next ones go together

    def run(self, steps: int) -> float:
        took = seconds(lambda: [self._batch.step() for _ in range(steps)])
        if not self.live_bytes:
            self.live_bytes = sum(session.private_bytes for session in self._sessions)
            self.kv_bytes_read = self._batch.kv_bytes_read
        return took

    def close(self) -> None:
        self._batch.close()
        for session in self._sessions:
            session.close()


class _StockBatch:
    """mlx-lm's `BatchGenerator` over copies of one full-precision cache, which it merges into one batch cache."""

    def __init__(self, lm: LoadedModel, full: StockCache, turns: list[list[int]], limit: int):
        from mlx_lm.generate import BatchGenerator

        before, self._count = live_bytes(), len(turns)
        self._generator = BatchGenerator(
            lm.model,
            max_tokens=limit,
            completion_batch_size=self._count,
            prefill_batch_size=self._count,
            prefill_step_size=512,
        )
        self._generator.insert(turns, caches=[copy.deepcopy(full.layers) for _ in turns])
        self._step()  # prefills the turns
        self.live_bytes = live_bytes() - before

    def _step(self) -> int:
        """One token for every agent; the first call takes some rounds of prefill before it."""
        for _ in range(64):
            found = self._generator.next()[1]
            if len(found) == self._count:
                return len(found)
        raise RuntimeError(f"[bench_decode] expected {self._count} tokens a step of BatchGenerator, got {len(found)}")

    def run(self, steps: int) -> float:
        return seconds(lambda: [self._step() for _ in range(steps)])

    def close(self) -> None:
        self._generator.close()


class _StockSequential:
    """mlx-lm's `generate_step` on a cache of each agent's own, one agent after another."""

    def __init__(self, lm: LoadedModel, shared: StockCache, turns: list[list[int]]):
        from mlx_lm.generate import generate_step

        self._steps = []
        for turn in turns:
            steps = generate_step(mx.array(turn), lm.model, prompt_cache=copy.deepcopy(shared.layers), max_tokens=-1)
            next(steps)
            self._steps.append(steps)

    def run(self, steps: int) -> float:
        return seconds(lambda: [[next(agent) for _ in range(steps)] for agent in self._steps])

    def close(self) -> None:
        for steps in self._steps:
            steps.close()
