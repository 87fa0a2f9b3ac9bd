"""The product's claims on a real model. Slow: they run the default model, SmolLM2-135M-Instruct."""

from __future__ import annotations

import mlx.core as mx
import pytest
from reference import Forced

from mlx_qkvshare import (
    AgentBatch,
    AgentSession,
    HandoffCoordinator,
    LoadedModel,
    QuantSpec,
    SharedKVCacheManager,
    load,
)
from mlx_qkvshare.bench import bench_handoff, bench_memory
from mlx_qkvshare.bench_prefill import bench_prefill
from mlx_qkvshare.bench_stock import StockCache
from mlx_qkvshare.fidelity import Candidate, Reference
from mlx_qkvshare.measure import buffer_address, live_bytes, sample_tokens
from mlx_qkvshare.passages import passage, text_of
from mlx_qkvshare.spec import PRESETS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return load(dtype="float32")  # on a GPU, too: half precision differs from itself by more than is allowed here


def stock_logits(lm: LoadedModel, held: list[int], scored: list[int]) -> mx.array:
    return lm.model(mx.array(scored)[None], cache=StockCache(lm, held).layers)[0]


def largest_difference(a: mx.array, b: mx.array) -> float:
    return mx.max(mx.abs(a - b)).item()


def test_memory_of_eight_agents_is_at_the_floor(lm: LoadedModel) -> None:
    one, eight = bench_memory(lm, agents=(1, 8), tokens=(1024,), private_tokens=16)
    assert eight.ours_bytes / eight.floor_bytes <= 1.10
    full_copy = 1024 * lm.spec.private_token_bytes
    assert eight.stock_bytes - one.stock_bytes >= 7 * full_copy, "mlx-lm grows by a full copy for every agent"
    assert eight.stock_quantized_bytes > 5 * eight.ours_bytes


def test_fork_and_handoff_add_no_bytes_before_and_after_the_first_token(lm: LoadedModel) -> None:
    manager = SharedKVCacheManager(lm.spec)
    coordinator, ids = HandoffCoordinator(manager), sample_tokens(lm.tokenizer, 400)
    first, second = AgentSession("first", lm, manager), AgentSession("second", lm, manager)
    first.prefill(ids)
    first.seal()
    (segment,) = manager.segments()
    packed = [tensor.packed for kv in segment.layers for tensor in (kv.keys, kv.values)]
    addresses, before = [buffer_address(array) for array in packed], live_bytes()

    fork = first.fork("fork")
    coordinator.request_handoff(first, second)
    assert live_bytes() == before
    for agent in (fork, second):
        for _ in agent.stream(max_tokens=1, ignore_eos=True):
            pass
    # Each agent's tail holds the one token that it generated.
    assert live_bytes() - before == fork.private_bytes + second.private_bytes
    assert fork.private_bytes == 16 * lm.spec.private_token_bytes
    for agent in (fork, second):
        seen = [view.segment.layers[0].keys.packed for view in agent.prefix.views]
        assert [buffer_address(array) for array in seen] == addresses[:1]
    assert [buffer_address(array) for array in packed] == addresses


def test_a_handoff_copies_nothing_at_any_length(lm: LoadedModel) -> None:
    rows = bench_handoff(lm, tokens=(512, 1024), repeats=1)
    for row in rows:
        assert row.bytes_copied == 0
        assert row.bytes_referenced == row.tokens * QuantSpec().packed_token_bytes(lm.spec)


def test_sixteen_bits_equal_mlx_lm(lm: LoadedModel) -> None:
    ids = sample_tokens(lm.tokenizer, 700)
    held, scored, more = ids[:600], ids[600:650], ids[650:]
    manager = SharedKVCacheManager(lm.spec, QuantSpec(16, 16))
    first, second = AgentSession("first", lm, manager), AgentSession("second", lm, manager)
    first.prefill(held)
    first.seal()
    expected = stock_logits(lm, held, scored)
    fork = first.fork("fork")
    assert largest_difference(fork.score(scored), expected) <= 1e-4, "prefill behind a fork"
    fork.rewind(20)
    fork.rewind(60)  # into the shared part
    assert (
        largest_difference(fork.score(held[-30:] + scored), stock_logits(lm, held[:-30], held[-30:] + scored)) <= 1e-4
    )
    HandoffCoordinator(manager).request_handoff(first, second)
    assert largest_difference(second.score(scored), expected) <= 1e-4, "after a handoff"
    cache = StockCache(lm, held + scored).layers
    for token in more[:8]:  # decode, one by one; then through the stream, on the tokens that it chose
        ours, stock = second.score([token])[0], lm.model(mx.array([[token]]), cache=cache)[0, 0]
        assert largest_difference(ours, stock) <= 1e-4
    first = second.generate_token()
    assert first == mx.argmax(stock).item()
    stock = lm.model(mx.array([[first]]), cache=cache)[0, 0]
    assert second.generate_token() == mx.argmax(stock).item()


def test_presets_stay_within_a_stated_kl(lm: LoadedModel) -> None:
    text = passage(lm.tokenizer, "reference", text_of("reference"), prefix_tokens=1024, scored_tokens=512)
    reference = Reference(lm, text)
    settings = {"plain": QuantSpec(), "K4V4": QuantSpec(4, 4)} | PRESETS
    kl = {name: reference.scores(Candidate(name, quant)).kl.mean() for name, quant in settings.items()}
    assert kl["plain"] <= 1e-4 and kl["safe"] <= 2e-5 and kl["balanced"] <= 5e-4, kl
    assert kl["K4V4"] > 10 * kl["plain"], "the measure can tell"
    assert kl["tight"] < kl["K4V4"] / 2, kl


@pytest.mark.parametrize("num_tokens", [512, 1024, 2048])
def test_prefill_and_seal_peak_no_higher_than_full_precision(lm: LoadedModel, num_tokens: int) -> None:
    (row,) = bench_prefill(lm, tokens=(num_tokens,))
    one_layer = num_tokens * lm.spec.attention[0].row_bytes(lm.spec.item_bytes)
    assert row.ours_peak_bytes <= row.stock_peak_bytes + one_layer, row


def test_the_twentieth_hop_equals_the_first_bit_for_bit(lm: LoadedModel) -> None:
    manager = SharedKVCacheManager(lm.spec)
    coordinator = HandoffCoordinator(manager)
    agents = [AgentSession(name, lm, manager) for name in ("planner", "researcher", "writer")]
    ids = sample_tokens(lm.tokenizer, 300)
    agents[0].prefill(ids[:260])
    agents[0].seal()
    checksums = [segment.compute_checksum() for segment in manager.segments()]
    logits = []
    for hop in range(20):
        sender, receiver = agents[hop % 3], agents[(hop + 1) % 3]
        coordinator.request_handoff(sender, receiver, verify=True)
        logits.append(receiver.score(ids[260:]))
        receiver.rewind(40)
    assert all(mx.array_equal(found, logits[0]).item() for found in logits)
    assert [segment.compute_checksum() for segment in manager.segments()] == checksums


def test_eight_sessions_together_give_the_logits_of_each_alone_over_64_steps(lm: LoadedModel) -> None:
    shared, text = sample_tokens(lm.tokenizer, 256), sample_tokens(lm.tokenizer, 2000, skip=4000)
    tails = [text[100 * i : 100 * i + length] for i, length in enumerate((7, 1, 90, 30, 13, 2, 55, 21))]
    forced = [text[900 + 64 * i : 964 + 64 * i] for i in range(8)]

    def team() -> list[AgentSession]:
        manager = SharedKVCacheManager(lm.spec)
        with AgentSession("first", lm, manager) as first:
            first.prefill(shared)
            first.seal()
        sessions = [AgentSession(f"agent {i}", lm, manager, sampler=Forced(ids)) for i, ids in enumerate(forced)]
        for session, tail in zip(sessions, tails, strict=True):
            session.prefill([*shared, *tail])
        return sessions

    sessions = team()
    with AgentBatch(sessions[0].manager) as batch:
        for session in sessions[:6]:
            batch.join(session, max_tokens=64, ignore_eos=True)
        for step in range(64):
            if step == 10:
                batch.leave(sessions[2])  # the longest row first
            if step == 16:
                for session in sessions[6:]:
                    batch.join(session, max_tokens=48, ignore_eos=True)
            if step == 40:
                batch.leave(sessions[0])
            batch.step()
            assert batch.is_together or step == 0
        assert len(batch) == 0
    for session, solo in zip(sessions, team(), strict=True):
        count = session.num_tokens - solo.num_tokens
        assert count in (64, 48, 40, 10)
        for _ in solo.stream(max_tokens=count, ignore_eos=True):
            pass
        found, expected = (mx.stack(s._sampler.logits[:count]) for s in (session, solo))  # type: ignore[union-attr]
        assert largest_difference(found, expected) <= 1e-4, session.name
