"""Sliding windows and recurrent states: the same answers as mlx-lm, shared by reference, cut only where they can be."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import FINGERPRINT, FULL, K8V8, loaded, logits_behind, normal, stock_logits
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache
from reference import assert_warm_is_cold, some_ids
from tiny import RECURRENT, SLIDING, tiny_tokenizer
from zoo_configs import build

from mlx_qkvshare import (
    AgentBatch,
    AgentSession,
    CacheSpec,
    HandoffCoordinator,
    QuantizedAttention,
    Route,
    SharedKVCacheManager,
    context,
    spec,
)
from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.model import LoadedModel, describe
from mlx_qkvshare.spec import LayerSpec, StateSpec

WINDOW = SLIDING["sliding_window"]
PACKED, DEQUANTIZE = QuantizedAttention(Route.PACKED), QuantizedAttention(Route.DEQUANTIZE)


@pytest.fixture(scope="module")
def sliding():
    """Two of three layers slide."""
    return loaded(**SLIDING | {"sliding_window_pattern": 3}, layers=3)


@pytest.fixture(scope="module")
def recurrent():
    return loaded(**RECURRENT, layers=3)


@pytest.fixture
def short_slack(monkeypatch):
    """Tails whose windows move after a few tokens."""
    for module in (spec, context):
        monkeypatch.setattr(module, "WINDOW_SLACK_TOKENS", 10)


def manager_of(window: int, quant=FULL) -> SharedKVCacheManager:
    layer = LayerSpec(2, 32, 32, "window", window)
    return SharedKVCacheManager(CacheSpec((layer,), "float32", 10_000, FINGERPRINT), quant)


# --- one layer, step by step, against mlx-lm's own cache -------------------------------------------


@pytest.mark.parametrize("attention", [PACKED, DEQUANTIZE], ids=["packed", "dequantize"])
@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("steps", [[1] * 40, [7, 1, 1, 9, 30, 1, 1, 1, 2, 5], [50, 1, 1], [16, 1, 15, 1], [3, 10, 4]])
@pytest.mark.parametrize("seal_after", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_every_step_attends_as_with_mlx_lms_rotating_cache(short_slack, window, steps, seal_after, attention):
    manager, stock = manager_of(window), RotatingKVCache(max_size=window)
    prefix = manager.get_shared_kv_cache(())
    (cache,) = manager.make_caches(prefix)
    position = 0
    for number, step in enumerate(steps):
        keys, values, queries = (normal(1, h, step, 32, seed=3 * number + i) for i, h in enumerate((2, 2, 4)))
        found_mask, mask = (c.make_mask(step, window_size=window) for c in (cache, stock))
        full_keys, full_values = stock.update_and_fetch(keys, values)
        expected = mx.fast.scaled_dot_product_attention(queries, full_keys, full_values, scale=0.2, mask=mask)
        cache.update_and_fetch(keys, values)
        found = attention.attend(queries, cache, scale=0.2, mask=found_mask)
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-6)
        own = cache.keys_and_values()[0]
        assert own.shape[2] == cache.num_keys and cache.offset == position + step
        if found_mask is not None and not isinstance(found_mask, str):
            assert found_mask.shape == (step, cache.num_keys)
        position += step
        if number in seal_after:
            count = cache.tail_tokens
            slot = manager.allocate_shared_slot(count, replacing=prefix)
            manager.quantize_and_store(slot, range(position - count, position), [cache.take_tail()], prefix=prefix)
            cache.reset_tail()
            segment = prefix.views[-1].segment
            assert segment.layers[0].num_rows == min(count, window)
            assert manager.stats().used_bytes == sum(view.segment.nbytes for view in prefix.views)
        manager.check_integrity(checksums=True)
        if step <= 10:
            assert cache.tail_rows <= window + 10, "the tail is bounded by the window and its slack"


def test_a_tail_is_taken_back_as_far_as_its_rows_reach(short_slack):
    manager = manager_of(8)
    (cache,) = manager.make_caches(manager.get_shared_kv_cache(()))
    for number in range(30):
        cache.append(*(normal(1, 2, 1, 32, seed=number + i) for i in (0, 100)))
    reach = [n for n in range(31) if cache.can_stand_at(n)]
    assert reach[0] == 0 and reach[1] > 1 and reach[1:] == list(range(reach[1], 31))
    before = np.array(cache.tail()[0])
    assert cache.trim(30 - reach[1] + 1) == 0 and np.array_equal(np.array(cache.tail()[0]), before), "all or nothing"
    assert cache.trim(1) == 1 and cache.offset == 29
    assert cache.trim(29) == 29 and cache.offset == 0 and cache.tail_rows == 0


def test_a_longer_step_than_the_slack_is_right(short_slack):
    manager, stock = manager_of(8), RotatingKVCache(max_size=8)
    (cache,) = manager.make_caches(manager.get_shared_kv_cache(()))
    for number, step in enumerate([5, 60, 1, 1]):
        keys, values, queries = (normal(1, h, step, 32, seed=3 * number + i) for i, h in enumerate((2, 2, 4)))
        masks = [c.make_mask(step, window_size=8) for c in (cache, stock)]
        cache.append(keys, values)
        found = DEQUANTIZE.attend(queries, cache, scale=0.2, mask=masks[0])
        expected = mx.fast.scaled_dot_product_attention(
            queries, *stock.update_and_fetch(keys, values), scale=0.2, mask=masks[1]
        )
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-6)


# --- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, WINDOW + 1, 50])
@pytest.mark.parametrize("quant", [FULL, K8V8], ids=str)
def test_sealed_forked_and_handed_over_contexts_answer_as_cold_ones(sliding, count, quant):
    manager = SharedKVCacheManager(sliding.spec, quant)
    first, second = (AgentSession(name, sliding, manager) for name in ("first", "second"))
    first.prefill(some_ids(count))
    assert_warm_is_cold(first, sliding)
    fork = first.fork("fork")
    assert_warm_is_cold(fork, sliding)
    fork.prefill(some_ids(WINDOW + 4, seed=2))
    assert_warm_is_cold(fork, sliding)
    record = HandoffCoordinator(manager).request_handoff(first, second)
    assert record.bytes_copied == 0 and second.private_bytes == 0
    for _ in second.stream(max_tokens=WINDOW + 3, ignore_eos=True):
        pass
    assert_warm_is_cold(second, sliding)
    assert_warm_is_cold(fork, sliding)


@pytest.mark.parametrize("model", ["sliding", "recurrent"])
def test_what_is_reused_is_what_can_be_gone_on_from(request, model):
    model = request.getfixturevalue(model)
    manager = SharedKVCacheManager(model.spec, FULL)
    ids = some_ids(80)
    with AgentSession("owner", model, manager) as owner:
        for stop in (30, 60):
            owner.prefill(ids[owner.num_tokens : stop])
            owner.seal()
        for wanted, reused in [(ids[:70], 60), (ids[:60], 60), ([*ids[:45], 9, 9], 30), ([*ids[:29], 9, 9], None)]:
            with AgentSession("other", model, manager) as other:
                report = other.prefill(wanted)
                if reused is not None:
                    assert (report.reused_tokens, report.computed_tokens) == (reused, len(wanted) - reused)
                else:  # a window keeps the last token but one of a segment, too; a state does not
                    assert report.reused_tokens == (29 if model.spec.windows else 0)
                assert_warm_is_cold(other, model)
                assert other.generate_token() == stock_logits(model.model, wanted)[-1].argmax()


@pytest.mark.parametrize("model", ["sliding", "recurrent"])
@pytest.mark.parametrize("count", [1, 5, 19, 20, 35, 60])
def test_a_rewind_reaches_its_token_by_computing_what_cannot_be_cut(request, model, count):
    model = request.getfixturevalue(model)
    manager = SharedKVCacheManager(model.spec, FULL)
    session = AgentSession("one", model, manager)
    session.prefill(some_ids(40))
    session.seal()
    session.prefill(some_ids(20, seed=1))
    session.rewind(count)
    assert session.token_ids == [*some_ids(40), *some_ids(20, seed=1)][: 60 - count]
    assert_warm_is_cold(session, model)


@pytest.mark.parametrize("model", ["sliding", "recurrent"])
def test_a_rewind_that_finds_no_room_forgets_nothing(request, model):
    model = request.getfixturevalue(model)
    manager = SharedKVCacheManager(model.spec, FULL, budget_bytes=model.spec.private_bytes(48) + 1)
    session = AgentSession("one", model, manager)
    session.prefill(some_ids(40))
    session.seal()
    before = session.token_ids
    with pytest.raises(Exception, match="budget"):
        session.rewind(3)
    assert session.token_ids == before and session.private_bytes == 0
    manager.check_integrity(checksums=True)


@pytest.mark.parametrize("quant", [FULL, K8V8], ids=str)
@pytest.mark.parametrize("attention", [PACKED, DEQUANTIZE], ids=["packed", "dequantize"])
def test_sessions_on_windows_decode_together(short_slack, sliding, quant, attention):
    manager = SharedKVCacheManager(sliding.spec, quant)
    base = AgentSession("base", sliding, manager)
    base.prefill(some_ids(40))
    base.seal()
    sessions, alone = [], []
    for number, length in enumerate((1, 7, 30)):  # within the window, across its end, beyond it
        for kept in (sessions, alone):
            session = base.fork(f"{number}")
            session.prefill(some_ids(length, seed=number + 1))
            kept.append(session)
    expected = [[c.token for c in s.stream(max_tokens=25, ignore_eos=True)] for s in alone]
    found: dict[str, list[int]] = {}
    with AgentBatch(manager, attention=attention) as batch:
        for session in sessions:
            batch.join(session, max_tokens=25, ignore_eos=True)
        for event in itertools.chain.from_iterable(iter(batch.step, [])):
            assert event.error is None
            found.setdefault(event.session.name, []).append(event.chunk.token)
        assert batch.is_together
    assert list(found.values()) == expected
    for session, other in zip(sessions, alone, strict=True):
        assert_warm_is_cold(session, sliding)
        probes = [logits_behind(sliding.model, s.caches, [5]) for s in (session, other)]
        np.testing.assert_allclose(*probes, atol=1e-4)
    manager.check_integrity(checksums=True)


@pytest.mark.parametrize("count", [10, 35])  # shorter and longer than the window
def test_b4_a_quantized_context_of_a_model_that_slides_is_shared(sliding, count):
    manager = SharedKVCacheManager(sliding.spec, K8V8)
    first, second = (AgentSession(name, sliding, manager) for name in ("first", "second"))
    with pytest.raises(NotImplementedError):  # of mlx-lm, at the first prompt
        list(generate_step(mx.array(some_ids(count)), sliding.model, max_tokens=1, kv_bits=8, quantized_kv_start=0))
    first.prefill(some_ids(count))
    assert HandoffCoordinator(manager).request_handoff(first, second).reused_tokens == count
    assert_warm_is_cold(second, sliding)


def test_b19_a_state_of_any_number_of_arrays_is_kept_where_a_segment_ends():
    model, config = build("kimi_linear")
    lm = LoadedModel(model, tiny_tokenizer(), describe(model, config, tiny_tokenizer()))
    assert {layer.num_arrays for layer in lm.spec.layers if isinstance(layer, StateSpec)} == {4}
    manager = SharedKVCacheManager(lm.spec, FULL)
    first, second = (AgentSession(name, lm, manager) for name in ("first", "second"))
    first.prefill(some_ids(30))
    HandoffCoordinator(manager).request_handoff(first, second)
    assert second.prefill([7, 8]).reused_tokens == 30
    assert_warm_is_cold(second, lm)


def test_recurrent_sessions_decode_one_by_one_and_say_so(recurrent):
    manager = SharedKVCacheManager(recurrent.spec, FULL)
    sessions = [AgentSession(str(i), recurrent, manager) for i in range(2)]
    with AgentBatch(manager) as batch:
        for i, session in enumerate(sessions):
            batch.join(session, some_ids(20, seed=i), max_tokens=4, ignore_eos=True)
        list(batch.stream())
        assert not batch.is_together
    for i, session in enumerate(sessions):
        assert session.token_ids[:20] == some_ids(20, seed=i) and session.num_tokens == 24
        assert_warm_is_cold(session, recurrent)


# --- bytes -----------------------------------------------------------------------------------------


def test_bytes_by_kind_of_layer(sliding, recurrent):
    """A window's rows and a state are bounded, and nothing is copied for a fork."""
    for model in (sliding, recurrent):
        manager = SharedKVCacheManager(model.spec, K8V8)
        with AgentSession("one", model, manager) as session:
            session.prefill(some_ids(100))
            session.seal()
            (view,) = session.prefix.views
            for layer, kv in zip(model.spec.layers, view.segment.layers, strict=True):
                if isinstance(layer, StateSpec):
                    assert kv.nbytes == layer.nbytes
                else:
                    assert kv.num_rows == (WINDOW if layer.window else 100)
            assert view.segment.nbytes == manager.quant.packed_bytes(model.spec, 100) == manager.stats().used_bytes
            before = mx.get_active_memory()
            forks = [session.fork(str(i)) for i in range(3)]
            assert sum(fork.private_bytes for fork in forks) == 0 and mx.get_active_memory() <= before
            for fork in forks:
                fork.close()


def test_neighbours_that_end_in_a_window_are_not_joined(sliding):
    manager = SharedKVCacheManager(sliding.spec, FULL)
    session = AgentSession("one", sliding, manager)
    for number in range(4):
        session.prefill(some_ids(10, seed=number))
        session.seal()
    assert manager.stats().num_segments == 4 and manager.stats().num_compactions == 0
    assert_warm_is_cold(session, sliding)


@pytest.mark.parametrize(
    "make", [lambda: LayerSpec(1, 8, 8, "window"), lambda: LayerSpec(1, 8, 8, "other"), lambda: StateSpec(0, 4)]
)
def test_specs_without_what_their_kind_needs_are_refused(make):
    with pytest.raises(ValueError, match="expected"):
        make()


@pytest.mark.parametrize("family", [SLIDING, RECURRENT], ids=["sliding", "recurrent"])
@pytest.mark.parametrize("failing", ["kind", "packing"])
def test_a_seal_that_fails_before_the_first_layer_is_packed_loses_nothing(family, failing, monkeypatch):
    lm = loaded(**family)
    manager = SharedKVCacheManager(lm.spec, K8V8)
    with AgentSession("one", lm, manager) as session, AgentSession("other", lm, manager) as other:
        for it in (session, other):
            it.prefill(some_ids(60))  # the window of 16 has moved
        before = manager.stats()
        if failing == "packing":
            monkeypatch.setattr("mlx_qkvshare.manager.Packer.pack", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(InvalidValueError if failing == "kind" else MemoryError):
            session.seal(kind="gossip" if failing == "kind" else "context")
        monkeypatch.undo()
        assert session.num_tokens == 60 and manager.stats() == before
        assert mx.array_equal(*(it.score([5, 6, 7]) for it in (session, other)))
        assert session.seal() == 63
        manager.check_integrity(checksums=True)
