"""What makes low bits safe: bases that are exactly undone, sinks in full precision, fitted ranges; and their bytes."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import FULL, loaded, logits_behind, make_spec, normal, stock_logits, store
from reference import T, assert_consistent, cold, probe, some_ids
from tiny import SLIDING

from mlx_qkvshare import (
    AgentBatch,
    AgentSession,
    HandoffCoordinator,
    QuantizedAttention,
    QuantSpec,
    Route,
    SharedKVCacheManager,
)
from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.parts import part_output, part_scores
from mlx_qkvshare.quantize import Basis, dequantize, pack_codes, quantize, quantize_fitted, rotate
from mlx_qkvshare.spec import PRESETS, SUPPORTED_BITS, TensorPlan

ROUTES = {route: QuantizedAttention(route) for route in (Route.PACKED, Route.DEQUANTIZE)}
SMALL = [
    QuantSpec(8, 8, 32, sink_tokens=4, is_rotated=True, is_centred=True),
    QuantSpec(4, 8, 32, is_centred=True),
    QuantSpec(8, 4, 32, is_rotated=True, is_fitted=True),
    QuantSpec(16, 4, 32, sink_tokens=2, is_rotated=True, is_centred=True),
]


def outlying(*shape: int, seed: int = 0) -> mx.array:
    """Rows with a few loud channels and a large mean, as keys have them."""
    loud = mx.exp(2 * normal(1, shape[1], 1, shape[3], seed=seed + 100))
    return normal(*shape, seed=seed) * loud + 4 * normal(1, shape[1], 1, shape[3], seed=seed + 200)


def full_basis(heads: int, dim: int, keys: mx.array) -> Basis:
    scale = mx.exp(0.5 * normal(1, heads, 1, dim, seed=7))
    return Basis(is_rotated=True, centre=mx.mean(keys, axis=2, keepdims=True), scale=scale)


# --- one tensor ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [32, 64, 72, 80, 96, 128, 192, 256])
def test_a_rotation_is_its_own_inverse_and_keeps_products(dim):
    x, y = normal(3, 5, dim), normal(3, 5, dim, seed=1)
    np.testing.assert_allclose(np.array(rotate(rotate(x))), np.array(x), atol=1e-5)
    np.testing.assert_allclose(np.array((rotate(x) * rotate(y)).sum(-1)), np.array((x * y).sum(-1)), atol=2e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_packed_as_mlx_packs_them(bits):
    x = normal(2, 3, 128)
    packed, scales, biases = mx.quantize(x, group_size=32, bits=bits)
    values = mx.dequantize(packed, scales, biases, group_size=32, bits=bits)
    spread = [mx.repeat(a, 32, axis=-1) for a in (scales, biases)]
    codes = mx.round((values - spread[1]) / spread[0])
    assert mx.array_equal(pack_codes(codes, bits), packed)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_a_fitted_range_has_less_error_and_is_read_by_mlx(bits, dtype):
    x = normal(1, 2, 50, 64).astype(dtype)
    errors = []
    for make in (quantize_fitted, lambda x, group, bits: mx.quantize(x, group_size=group, bits=bits)):
        found = mx.dequantize(*make(x, 32, bits), group_size=32, bits=bits)
        errors.append(mx.mean(mx.square(found.astype(mx.float32) - x.astype(mx.float32))).item())
    assert errors[0] < 0.9 * errors[1]
    constant = mx.full((1, 64), 3.0, dtype)
    found = mx.dequantize(*quantize_fitted(constant, 32, bits), group_size=32, bits=bits)
    np.testing.assert_allclose(np.array(found), 3.0, rtol=1e-3)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("dim", [64, 80])
def test_attending_in_the_basis_is_attending_to_what_it_stands_for(bits, dim):
    keys, values = outlying(1, 2, 40, dim), normal(1, 2, 40, dim, seed=3)
    rows, weights = normal(1, 2, 5, dim, seed=4), mx.softmax(normal(1, 2, 5, 40, seed=5), axis=-1)
    plan = QuantSpec(bits, bits, 32).resolve_tensor(dim, bits, 4)
    packed = quantize(keys, plan, full_basis(2, dim, keys)), quantize(values, plan, Basis(is_rotated=True))
    scores, outputs = rows @ dequantize(packed[0]).swapaxes(-1, -2), weights @ dequantize(packed[1])
    for is_unpacked in (False, True):
        found = part_scores(rows, packed[0], 40, is_unpacked=is_unpacked)
        np.testing.assert_allclose(np.array(found), np.array(scores), atol=2e-3 * np.abs(np.array(scores)).max() / 10)
        found = part_output(weights, packed[1], 40, is_unpacked=is_unpacked)
        np.testing.assert_allclose(np.array(found), np.array(outputs), atol=1e-5)
    np.testing.assert_allclose(np.array(part_scores(rows, packed[0], 7)), np.array(scores[..., :7]), atol=1e-2)


def test_a_rotation_helps_loud_channels_and_a_centre_shifted_ones():
    plan, rows = TensorPlan(64, 4, 64, 64), normal(1, 2, 9, 64, seed=4)
    loud = normal(1, 2, 200, 64) * mx.where(mx.arange(64) == 3, 40, 1)
    shifted = normal(1, 2, 200, 64) + 5 * normal(1, 2, 1, 64, seed=6)

    def error(keys: mx.array, basis: Basis | None) -> float:
        expected = rows @ keys.swapaxes(-1, -2)
        return mx.mean(mx.abs(part_scores(rows, quantize(keys, plan, basis), 200) - expected)).item()

    assert error(loud, Basis(is_rotated=True)) < 0.7 * error(loud, None)
    assert error(shifted, Basis(centre=mx.mean(shifted, axis=2, keepdims=True))) < 0.4 * error(shifted, None)


# --- segments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", [*SMALL, *PRESETS.values()], ids=str)
def test_bytes_are_exactly_those_of_the_formula(quant):
    spec = make_spec(layers=2, heads=2, k_dim=64)
    manager = SharedKVCacheManager(spec, quant)
    prefix = store(manager, range(3))
    store(manager, range(10, 30), prefix)
    assert prefix.shared_bytes == manager.stats().used_bytes
    assert prefix.shared_bytes == quant.packed_bytes(spec, 3) + quant.packed_bytes(spec, 20, start=3)
    manager.check_integrity(checksums=True)
    segment = prefix.views[-1].segment
    assert segment.layers[0].num_rows == 20
    assert [b.num_rows for b in segment.layers[0].blocks] == ([1, 19] if quant.sink_tokens == 4 else [20])


def test_the_checksum_sees_the_centre():
    manager = SharedKVCacheManager(make_spec(), SMALL[1])
    segment = store(manager, range(20)).views[0].segment
    centre = segment.layers[0].keys.basis.centre
    assert any(array is centre for array in segment.arrays())


def test_a_segment_takes_over_the_centre_before_it_and_then_they_are_joined():
    manager = SharedKVCacheManager(make_spec(heads=2), QuantSpec(8, 8, 32, sink_tokens=4, is_centred=True))
    prefix = store(manager, range(80))
    for start in (80, 130):
        store(manager, range(start, start + 50), prefix, seed=start)
    before = [np.array(dequantize(v.segment.layers[0].keys)) for v in prefix.views]
    assert len({view.segment.layers[0].keys.basis.origin for view in prefix.views}) == 1
    used = manager.stats().used_bytes
    assert manager.compact(prefix) == 2 and len(prefix.views) == 1
    (segment,) = (view.segment for view in prefix.views)
    assert [block.num_rows for block in segment.layers[0].blocks] == [4, 176]
    joined = np.concatenate(before, axis=2)
    np.testing.assert_array_equal(np.array(dequantize(segment.layers[0].keys)), joined)
    assert manager.stats().used_bytes == used - 2 * (2 * 32 * 4), "two centres less"
    manager.check_integrity(checksums=True)


def test_a_centre_of_few_rows_is_not_taken_over():
    manager = SharedKVCacheManager(make_spec(), QuantSpec(8, 8, 32, is_centred=True))
    prefix = store(manager, range(5))
    store(manager, range(10, 100), prefix)
    store(manager, range(200, 230), prefix)
    origins = [view.segment.layers[0].keys.basis.origin for view in prefix.views]
    assert origins[0] != origins[1] == origins[2]
    assert (manager.compact(prefix) == 0 and len(prefix.views) == 3) or origins[1] == origins[2]


# --- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", SMALL, ids=str)
@pytest.mark.parametrize("family", [{}, SLIDING], ids=["full", "window"])
def test_every_way_to_read_a_context_gives_the_same_logits(quant, family):
    model = loaded(**family)
    manager = SharedKVCacheManager(model.spec, quant)
    first, second = (AgentSession(name, model, manager) for name in ("first", "second"))
    first.prefill(some_ids(40))
    first.seal()
    first.prefill(some_ids(30, seed=1))
    HandoffCoordinator(manager).request_handoff(first, second)
    one_hop = np.array(probe(second, model))
    for _ in range(4):
        HandoffCoordinator(manager).request_handoff(second, first)
        HandoffCoordinator(manager).request_handoff(first, second)
    np.testing.assert_array_equal(probe(second, model), one_hop)
    found = [logits_behind(model.model, second.caches, [5, 6], route) for route in ROUTES.values()]
    np.testing.assert_allclose(*found, atol=2e-4)
    assert_consistent(second)
    # The exact fallback, and a batch, stand on the same bytes.
    forks = [second.fork(str(i)) for i in range(3)]
    for number, fork in enumerate(forks):
        fork.prefill(some_ids(3 + number, seed=number))
    alone = [logits_behind(model.model, fork.caches, [7])[-1] for fork in forks]
    tokens: dict[str, int] = {}
    with AgentBatch(manager) as batch:
        for fork in forks:
            batch.join(fork, [7], max_tokens=2, ignore_eos=True)
        for event in itertools.chain.from_iterable(iter(batch.step, [])):
            tokens.setdefault(event.session.name, event.chunk.token)
    assert [tokens[str(i)] for i in range(3)] == [int(logits.argmax()) for logits in alone]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_lose_nothing_against_plain_bits_where_nothing_stands_out(name):
    preset = QuantSpec.preset(name)
    plain = QuantSpec(preset.k_bits, preset.v_bits, preset.group_size)
    errors = []
    for quant in (preset, plain):
        with AgentSession("one", T, SharedKVCacheManager(T.spec, quant)) as session:
            session.prefill(some_ids(300))
            session.seal()
            expected = cold([*session.token_ids, *some_ids(8, seed=3)])[-8:]
            errors.append(np.abs(probe(session, T, some_ids(8, seed=3)) - expected).mean())
    # Random weights have no loud channels: a preset must not lose there.
    assert errors[0] < 1.3 * errors[1]


def test_an_unknown_preset_and_odd_sinks_are_refused():
    with pytest.raises(InvalidValueError, match=r"balanced.*safe.*tight.*'best'"):
        QuantSpec.preset("best")
    with pytest.raises(InvalidValueError, match="sink_tokens"):
        QuantSpec(sink_tokens=-1)
    assert str(QuantSpec.preset("tight")) == "tight (K4V4 g64)"
    assert str(QuantSpec(4, 4, is_rotated=True, sink_tokens=2)) == "K4V4 g64 rotated sinks2"
    assert set(SUPPORTED_BITS) >= {spec.k_bits for spec in PRESETS.values()}


def test_full_precision_takes_no_basis_and_no_sinks():
    quant = QuantSpec(16, 16, sink_tokens=4, is_rotated=True, is_centred=True)
    with AgentSession("one", T, SharedKVCacheManager(T.spec, quant)) as session:
        session.prefill(some_ids(30))
        session.seal()
        (view,) = session.prefix.views
        assert len(view.segment.layers[0].blocks) == 1 and view.segment.layers[0].keys.basis is None
        assert view.segment.nbytes == FULL.packed_bytes(T.spec, 30)
        found = logits_behind(T.model, session.caches, [5])
    np.testing.assert_allclose(found, stock_logits(T.model, [*some_ids(30), 5])[-1:], atol=1e-4)
