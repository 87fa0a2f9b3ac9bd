"""Bits by block: never above the budget, as good as trying all ways, and packed so that every reader is right."""

from __future__ import annotations

import dataclasses
import itertools

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import logits_behind
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import T, all_unpacked, some_ids

from mlx_qkvshare import AgentSession, HandoffCoordinator, QuantizedAttention, QuantSpec, Route, SharedKVCacheManager
from mlx_qkvshare.allocate import BITS, BLOCK_TOKENS, KINDS, allocate, block_importance
from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.guard import Looked

ADAPTIVE = dataclasses.replace(QuantSpec.preset("tight"), is_adaptive=True)


def error(importance, bits):
    return sum(weight * 4.0**-count for weight, count in zip(importance, bits, strict=True))


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=5),
    st.floats(2.0, 8.0),
)
@example(importance=[0.5, 0.125, 1e-06], bits=5.0)  # a step of 2 bits does not fit, though it would be the best
@settings(max_examples=60, deadline=None)
def test_equal_blocks_are_given_the_best_bits_but_for_one_step(importance, bits):
    sizes = [128] * len(importance)
    found = allocate(importance, sizes, bits)
    assert sum(found) <= bits * len(found) + 1e-9
    ways = [way for way in itertools.product(BITS, repeat=len(found)) if sum(way) <= bits * len(way) + 1e-9]
    best = min(error(importance, way) for way in ways)
    # Up to the first step that did not fit nothing is better; that was less than the widest step, 2 bits, from the end.
    stop = max(bits * len(found) - 2, BITS[0] * len(found))
    least = min(error(importance, way) for way in ways if sum(way) <= stop)
    assert best <= error(importance, found) <= least + 1e-12


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 128)), min_size=1, max_size=30), st.floats(2.0, 8.0))
@settings(max_examples=100, deadline=None)
def test_the_budget_is_kept_and_what_matters_more_has_no_fewer_bits(blocks, bits):
    importance, sizes = zip(*blocks, strict=True)
    found = allocate(importance, sizes, bits)
    assert sum(b * n for b, n in zip(found, sizes, strict=True)) <= bits * sum(sizes) + 1e-6
    assert set(found) <= set(BITS)
    for (one, its_bits, size), (other, others_bits, others_size) in itertools.permutations(
        zip(importance, found, sizes, strict=True), 2
    ):
        if size == others_size and one > other and min(one, other) > 0:
            assert its_bits >= others_bits


def test_the_same_everywhere_is_uniform():
    assert allocate([0.3] * 8, [128] * 8, 4) == [4] * 8


def test_importance_is_where_the_queries_look():
    keys = mx.zeros((1, 2, 3 * BLOCK_TOKENS + 10, 64))
    keys[:, :, BLOCK_TOKENS + 5] = 3.0  # one token of the second block
    found = block_importance(Looked(mx.ones((1, 4, 8, 64)), 0.125), keys)
    assert len(found) == 4 and found.index(max(found)) == 1
    assert found[1] > 2 * found[0] == pytest.approx(2 * found[2], rel=1e-3)


@pytest.fixture
def sealed(monkeypatch):
    """A session whose 500 tokens stand in blocks of different bits, and the rows that they were packed from."""
    # T's weights are random: it looks everywhere alike.
    monkeypatch.setattr("mlx_qkvshare.packing.block_importance", lambda looked, keys: [1.0, 0.001, 0.05, 1.0])
    manager = SharedKVCacheManager(T.spec, ADAPTIVE, guard=None)
    session = AgentSession("one", T, manager)
    session.prefill(some_ids(500))
    exact = [layer.keys_and_values() for layer in session.caches]
    session.seal()
    return manager, session, exact


def test_blocks_are_packed_by_what_was_seen_within_the_bytes_of_uniform_bits(sealed):
    manager, session, exact = sealed
    uniform = dataclasses.replace(ADAPTIVE, is_adaptive=False)
    assert session.prefix.shared_bytes <= uniform.packed_bytes(T.spec, 500) == ADAPTIVE.packed_bytes(T.spec, 500)
    assert manager.stats().used_bytes == session.prefix.shared_bytes
    manager.check_integrity(checksums=True)
    (view,) = session.prefix.views
    kinds = [[block.keys.plan.bits for block in layer.blocks] for layer in view.segment.layers]
    assert all(row[0] == 16 for row in kinds), "the sinks"
    assert any(len(set(row[1:])) > 1 for row in kinds), "and not all the same behind them"
    for layer, (keys, values) in zip(view.segment.layers, exact, strict=True):
        for role, rows in (("keys", keys), ("values", values)):
            found = all_unpacked(layer, role, 500)
            assert mx.linalg.norm((found - rows).flatten()) < 0.25 * mx.linalg.norm(rows.flatten())


def test_every_route_reads_them_alike_also_behind_a_handoff(sealed):
    manager, session, _ = sealed
    routes = (Route.PACKED, Route.DEQUANTIZE)
    found = [logits_behind(T.model, session.caches, [5, 6], QuantizedAttention(route)) for route in routes]
    np.testing.assert_allclose(*found, atol=1e-3)
    other = AgentSession("other", T, manager)
    HandoffCoordinator(manager).request_handoff(session, other, verify=True)
    again = logits_behind(T.model, other.caches, [5, 6], QuantizedAttention(Route.PACKED))
    assert mx.array_equal(found[0], again)


def test_what_later_agents_will_read_gets_more_bits():
    sizes = {}
    for kind in KINDS:
        manager = SharedKVCacheManager(T.spec, ADAPTIVE, guard=None)
        with AgentSession("one", T, manager) as session:
            session.prefill(some_ids(300))
            session.seal(kind=kind)
            sizes[kind] = session.prefix.shared_bytes
            manager.check_integrity()
    assert sizes["system"] > sizes["task"] > sizes["context"] == sizes["tool"] > sizes["chatter"]


def test_an_unknown_kind_is_refused_and_nothing_is_lost():
    manager = SharedKVCacheManager(T.spec, ADAPTIVE)
    with AgentSession("one", T, manager) as session:
        session.prefill(some_ids(40))
        before = manager.stats()
        with pytest.raises(InvalidValueError, match=r"kind: expected one of .*, got 'gossip'"):
            session.seal(kind="gossip")
        assert manager.stats() == before and session.seal() == 40


@pytest.mark.parametrize("wrong", [{"k_bits": 8}, {"k_bits": 16, "v_bits": 16}, {"layer_bits": ((0, 8, 8),)}])
def test_adaptive_bits_are_one_average(wrong):
    with pytest.raises(InvalidValueError, match="is_adaptive: expected k_bits == v_bits below 8"):
        dataclasses.replace(ADAPTIVE, **wrong)
