"""`qkvshare bench latency`: an agent's time between tokens while another's long prompt is prefilled."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .batch import AgentBatch, BatchEvent
from .bench_stock import StockCache
from .manager import SharedKVCacheManager
from .measure import AS_ASKED, sample_tokens
from .scheduler import AgentScheduler
from .session import AgentSession
from .spec import QuantSpec
from .task import Priority

if TYPE_CHECKING:
    from .model import LoadedModel

_SETTLED_TOKENS = 3  # of the interactive agent, before its time counts
_TURN_TOKENS = 16
_WARM_TOKENS = 64

Way = Callable[[list[int]], tuple[list[float], float]]
"""Prefills a prompt: seconds between the interactive agent's tokens meanwhile, and in all."""


@dataclass(frozen=True)
class LatencyRow:
    """Seconds between the tokens of an interactive agent, over the time in which a prompt is prefilled beside it.

    way: "alone" (no prompt), "interleaved" (`AgentScheduler` with `step_tokens`), "not interleaved" (the
    prompt is prefilled whole between two steps of an `AgentBatch`), or "mlx-lm" (`BatchGenerator`, with
    `step_tokens` as its `prefill_step_size`). `prefill_seconds` is the time to the prompt's first token. `p95_ratio` of
    an interleaved one is its p95 over mlx-lm's with as many tokens a step.
    """

    way: str
    step_tokens: int | None
    prompt_tokens: int
    num_gaps: int
    median_seconds: float
    p95_seconds: float
    longest_seconds: float
    prefill_seconds: float
    p95_ratio: float | None


def bench_latency(
    lm: LoadedModel,
    *,
    prompt_tokens: int = 4000,
    shared_tokens: int = 512,
    step_tokens: Sequence[int] = (64, 256),
    repeats: int = 1,
    quant: QuantSpec | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[LatencyRow]:
    """A row for each way: medians of `repeats` rounds of all in turn, behind a warm-up round with a short prompt. The
    interactive agent has `shared_tokens` tokens behind it."""
    shared = sample_tokens(lm.tokenizer, shared_tokens + _TURN_TOKENS)
    prompt = sample_tokens(lm.tokenizer, prompt_tokens, skip=shared_tokens + 1000)
    manager = SharedKVCacheManager(lm.spec, quant, **AS_ASKED)
    with AgentSession("shared", lm, manager) as first:
        first.prefill(shared[:shared_tokens])
        first.seal()
    stock = StockCache(lm, shared[:shared_tokens])
    ways: dict[tuple[str, int | None], Way] = {("alone", None): functools.partial(_alone, lm, manager, shared)}
    for size in step_tokens:
        ways["interleaved", size] = functools.partial(_interleaved, lm, manager, shared, size)
    ways["not interleaved", None] = functools.partial(_not_interleaved, lm, manager, shared)
    for size in (*step_tokens, 2048):  # the last is its default
        ways["mlx-lm", size] = functools.partial(_stock, lm, stock, shared, size)
    rounds: dict[tuple[str, int | None], list[tuple[float, ...]]] = {key: [] for key in ways}
    for index in range(repeats + 1):
        for (way, step), run in ways.items():
            what = way if step is None else f"{way}, {step} tokens a step"
            note(what if index else f"warm-up: {what}")
            gaps, took = run(prompt if index else prompt[:_WARM_TOKENS])
            if index:
                p50, p95, longest = (float(np.percentile(gaps, q)) for q in (50, 95, 100))
                rounds[way, step].append((len(gaps), p50, p95, longest, took))
    return _rows({key: np.median(found, axis=0).tolist() for key, found in rounds.items()}, len(prompt))


def _rows(medians: dict[tuple[str, int | None], list[float]], prompt_tokens: int) -> list[LatencyRow]:
    rows = []
    for (way, step), (num_gaps, p50, p95, longest, took) in medians.items():
        ratio = p95 / medians["mlx-lm", step][2] if way == "interleaved" else None
        rows.append(LatencyRow(way, step, prompt_tokens, round(num_gaps), p50, p95, longest, took, ratio))
    return rows


def _gaps(step: Callable[[], int], is_done: Callable[[], bool]) -> tuple[list[float], float]:
    """Seconds between the interactive agent's tokens until `is_done`, and in all; `step` tells how many it got."""
    start = last = time.perf_counter()
    gaps: list[float] = []
    while not gaps or not is_done():
        if step():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
    return gaps, time.perf_counter() - start


def _alone(
    lm: LoadedModel, manager: SharedKVCacheManager, shared: list[int], prompt: list[int]
) -> tuple[list[float], float]:
    """Without the prompt."""
    with AgentBatch(manager) as batch, AgentSession("talker", lm, manager) as talker:
        batch.join(talker, shared, max_tokens=_SETTLED_TOKENS + 20, ignore_eos=True)
        for _ in range(_SETTLED_TOKENS):
            batch.step()
        return _gaps(lambda: len(batch.step()), lambda: not len(batch))


def _interleaved(
    lm: LoadedModel, manager: SharedKVCacheManager, shared: list[int], size: int, prompt: list[int]
) -> tuple[list[float], float]:
    scheduler = AgentScheduler(manager, max_agents=8, step_tokens=size)
    with AgentSession("talker", lm, manager) as talker, AgentSession("reader", lm, manager) as reader:
        limit = 2 * len(prompt) // size + 50
        talk = scheduler.submit(talker, shared, max_tokens=limit, ignore_eos=True)
        while talk.num_tokens < _SETTLED_TOKENS:
            scheduler.step()
        read = scheduler.submit(reader, prompt, max_tokens=1, ignore_eos=True, priority=Priority.BACKGROUND)

        def step() -> int:
            before = talk.num_tokens
            scheduler.step()
            if talk.done():
                talk.result(0)  # raises what it failed with
                raise RuntimeError(f"[bench_latency] expected a talk of more than {limit} tokens")
            return talk.num_tokens - before

        found = _gaps(step, read.done)
        read.result(0)
        scheduler.close()
        return found


def _not_interleaved(
    lm: LoadedModel, manager: SharedKVCacheManager, shared: list[int], prompt: list[int]
) -> tuple[list[float], float]:
    with (
        AgentBatch(manager) as batch,
        AgentSession("talker", lm, manager) as talker,
        AgentSession("reader", lm, manager) as reader,
    ):
        batch.join(talker, shared, max_tokens=50, ignore_eos=True)
        for _ in range(_SETTLED_TOKENS):
            batch.step()
        shown: list[BatchEvent] = []

        def step() -> int:
            if not shown:
                batch.join(reader, prompt, max_tokens=1, ignore_eos=True)
            shown.extend(batch.step())
            return 1

        return _gaps(step, lambda: any(event.session is reader for event in shown))


def _stock(
    lm: LoadedModel, stock: StockCache, shared: list[int], size: int, prompt: list[int]
) -> tuple[list[float], float]:
    from mlx_lm.generate import BatchGenerator

    cache = copy.deepcopy(stock.layers)
    generator = BatchGenerator(lm.model, max_tokens=2 * len(prompt) // size + 50, prefill_step_size=size)
    (talker,) = generator.insert([shared[-_TURN_TOKENS:]], caches=[cache])
    seen: list[int] = []

    def step() -> int:
        found = [response.uid for response in generator.next()[1]]
        seen.extend(found)
        return found.count(talker)

    while len(seen) < _SETTLED_TOKENS:
        step()
    (reader,) = generator.insert([prompt], max_tokens=[1])
    found = _gaps(step, lambda: reader in seen)
    generator.close()
    return found
