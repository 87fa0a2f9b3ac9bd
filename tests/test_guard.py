"""The guard at seal: it sees what packing does to attention, gives bits where they are missing, and leaves no trace."""

from __future__ import annotations

import dataclasses
import math

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import loaded, logits_behind, make_spec, random_layers
from recall import BREAKING_BIAS, load_recall_model, recall, records
from reference import T, some_ids
from tiny import RECURRENT, SLIDING

from mlx_qkvshare import AgentSession, QuantSpec, SharedKVCacheManager, quantized_attention
from mlx_qkvshare.attention import WatchedAttention
from mlx_qkvshare.errors import BudgetExceededError, SessionClosedError
from mlx_qkvshare.guard import Guard, Looked, attention_error
from mlx_qkvshare.quantize import quantize
from mlx_qkvshare.segment import KVBlock

K4V4 = QuantSpec(4, 4)


def test_b9_a_seal_that_would_break_the_model_is_given_more_bits():
    lm = load_recall_model(BREAKING_BIAS)
    manager = SharedKVCacheManager(lm.spec, K4V4)
    assert recall(lm, manager, num_contexts=8) > recall(lm, QuantSpec(16, 16), num_contexts=8) - 0.1
    stats = manager.stats()
    assert stats.num_raised_layers == stats.num_guarded_layers == 16, "8 contexts, 2 layers"
    raised = stats.raised[-1]
    assert (raised.layer, raised.k_bits, raised.v_bits) == (1, 8, 8) and raised.error > 0.5
    assert stats.worst_attention_error < 0.5, "of what it let pass"
    manager.check_integrity(checksums=True)


def test_what_does_no_harm_is_let_pass_and_reported():
    lm = load_recall_model()
    for quant in (K4V4, QuantSpec(), QuantSpec.preset("tight"), QuantSpec.preset("safe")):
        manager = SharedKVCacheManager(lm.spec, quant)
        with AgentSession("one", lm, manager) as session:
            session.prefill(records(16).prompt)
            session.seal()
            stats = manager.stats()
            is_due = quant != QuantSpec.preset("safe")  # which was never seen to lose anything
            assert stats.num_guarded_layers == (2 if is_due else 0) and stats.num_raised_layers == 0
            assert stats.raised == () and (0 < stats.worst_attention_error < 0.3) == is_due
            assert stats.used_bytes == quant.packed_bytes(lm.spec, session.num_tokens)


def test_where_eight_bits_do_not_do_the_layer_stays_in_full_precision():
    manager = SharedKVCacheManager(T.spec, K4V4, guard=Guard(max_error=1e-6))
    with AgentSession("one", T, manager) as session:
        session.prefill(some_ids(40))
        session.seal()
        assert [raised[2:4] for raised in manager.stats().raised] == [(16, 16)] * 2
        assert session.prefix.shared_bytes == T.spec.context_bytes(40)
        manager.check_integrity(checksums=True)
        exact = T.model(mx.array([[*some_ids(40), 7]]))[0, -1:]
        with quantized_attention():
            np.testing.assert_allclose(logits_behind(T.model, session.caches, [7]), exact, atol=1e-4)


def test_raised_bits_fit_into_the_budget_of_the_tail():
    tail = T.spec.private_bytes(48)  # 40 tokens, in steps of 16
    manager = SharedKVCacheManager(T.spec, K4V4, guard=Guard(max_error=1e-6), budget_bytes=tail)
    with AgentSession("one", T, manager) as session:
        session.prefill(some_ids(40))
        session.seal()
        assert manager.stats().used_bytes == T.spec.context_bytes(40) <= tail
        manager.check_integrity()


def test_none_guards_nothing():
    manager = SharedKVCacheManager(T.spec, QuantSpec(2, 2), guard=None)
    with AgentSession("one", T, manager) as session:
        session.prefill(some_ids(40))
        session.seal()
    stats = manager.stats()
    assert (stats.num_guarded_layers, stats.num_raised_layers) == (0, 0)


@pytest.mark.parametrize("family", [{}, SLIDING, RECURRENT], ids=["full", "sliding", "recurrent"])
@pytest.mark.parametrize("count", [1, 5, 60, 150])
def test_looking_leaves_no_trace(family, count):
    lm = loaded(**family)
    manager = SharedKVCacheManager(lm.spec, QuantSpec(16, 16))
    with AgentSession("one", lm, manager) as session, AgentSession("other", lm, manager) as other:
        for it in (session, other):
            it.prefill(some_ids(count))
        before = manager.stats()
        looked = session.look(8)
        rows = [layer for layer in lm.spec.layers if hasattr(layer, "n_kv_heads")]
        assert len(looked) == len(rows)
        assert all(it.queries.shape[2] in (1, min(8, count)) for it in looked.values())
        assert manager.stats() == before
        found = [it.score([5, 6, 7]) for it in (session, other)]
        assert mx.array_equal(*found), "the next step is that of a session that was not looked at"


def test_what_is_looked_at_are_the_queries_of_the_prefill():
    seen = {}
    attention = WatchedAttention(watch=lambda layer, queries, scale: seen.update({layer: queries}))
    with AgentSession("one", T, SharedKVCacheManager(T.spec), attention=attention) as session:
        session.prefill(some_ids(30))
        last = dict(seen)
        for layer, looked in session.look(8).items():
            np.testing.assert_allclose(looked.queries, last[layer][:, :, -8:], atol=1e-4)


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 1)])
def test_the_error_is_that_of_the_outputs(heads):
    mx.random.seed(3)
    keys, values = (mx.random.normal((1, heads[1], 70, 64)) for _ in range(2))
    queries = mx.random.normal((1, heads[0], 8, 64))
    plan = QuantSpec(3, 3).resolve_tensor(64, 3, 4)
    block = KVBlock(quantize(keys, plan), quantize(values, plan))
    rows = [mx.dequantize(t.packed, t.scales, t.biases, group_size=64, bits=3) for t in (block.keys, block.values)]
    exact, packed = (
        mx.fast.scaled_dot_product_attention(queries, *it, scale=0.125, mask="causal") for it in ((keys, values), rows)
    )
    expected = (mx.linalg.norm((exact - packed).flatten()) / mx.linalg.norm(exact.flatten())).item()
    assert attention_error(Looked(queries, 0.125), keys, values, [block]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("quant", "bits"), [(K4V4, 8), (QuantSpec(4, 8), 8), (QuantSpec(8, 4), None), (QuantSpec.preset("tight"), None)]
)
def test_where_no_query_is_seen_a_loud_channel_of_plain_keys_decides(quant, bits):
    """As in `serve`, and where attention is not routed: rows are stored as they come."""
    for loudness in (1.0, 100.0):
        spec = make_spec(layers=1, heads=2, k_dim=64)
        ((keys, values),) = random_layers(spec, 50)
        keys = mx.where(mx.arange(64) == 7, keys * loudness, keys)
        manager = SharedKVCacheManager(spec, quant)
        slot = manager.allocate_shared_slot(50)
        prefix = manager.quantize_and_store(slot, range(50), [(keys, values)])
        raised = manager.stats().raised
        if bits is None or loudness == 1:
            assert raised == ()
        else:
            (it,) = raised
            assert it.k_bits == bits and it.error is None and it.outlier > 30
            assert prefix.views[0].segment.layers[0].keys.plan.bits == bits
        manager.check_integrity(checksums=True)


def test_an_error_that_is_not_a_number_is_no_small_one(monkeypatch):
    monkeypatch.setattr("mlx_qkvshare.packing.attention_error", lambda *_: math.nan)
    manager = SharedKVCacheManager(T.spec, K4V4)
    with AgentSession("one", T, manager) as session:
        session.prefill(some_ids(40))
        session.seal()
    assert [raised.k_bits for raised in manager.stats().raised] == [16, 16]


def test_adaptive_blocks_are_raised_to_one_and_a_store_that_fails_is_not_counted():
    adaptive = dataclasses.replace(QuantSpec.preset("tight"), is_adaptive=True)
    manager = SharedKVCacheManager(T.spec, adaptive, guard=Guard(max_error=1e-6))
    with AgentSession("one", T, manager) as session:
        session.prefill(some_ids(300))
        session.seal()
        assert session.num_tokens == 300 and manager.stats().num_raised_layers == 2
        manager.check_integrity(checksums=True)
    small = SharedKVCacheManager(T.spec, K4V4, guard=Guard(max_error=1e-6), budget_bytes=20_000)
    looked = {index: Looked(mx.ones((1, 4, 8, 64)), 0.125) for index in range(2)}
    slot = small.allocate_shared_slot(40)
    with pytest.raises(BudgetExceededError):
        small.quantize_and_store(slot, range(40), random_layers(T.spec, 40), looked=looked)
    stats = small.stats()
    assert (stats.num_raised_layers, stats.raised, stats.used_bytes) == (0, (), 0)


def test_looking_is_one_call_at_a_time_like_any_other():
    session = AgentSession("one", T, SharedKVCacheManager(T.spec))
    assert session.look(8) == {}, "nothing to look at"
    session.prefill(some_ids(20))
    session.seal()
    assert session.look(8) == {}
    session.close()
    with pytest.raises(SessionClosedError):
        session.look(8)
