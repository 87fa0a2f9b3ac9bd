"""Nested precision: a base of 4 bits and a residual of 4, read together or the base alone, and dropped in need."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import mlx.core as mx
import numpy as np
import oracle
import pytest
from core_helpers import (
    FULL,
    flip_byte,
    loaded,
    logits_behind,
    make_manager,
    make_spec,
    no_collector,
    normal,
    store,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from reference import T, active_bytes, address, assert_consistent, cold, decode, pair, probe, some_ids
from tiny import RECURRENT, SLIDING

from mlx_qkvshare import (
    AgentBatch,
    AgentSession,
    HandoffCoordinator,
    QuantizedAttention,
    QuantSpec,
    Route,
    SharedKVCacheManager,
    attention,
    quantized_attention,
)
from mlx_qkvshare.batch_cache import BatchLayerCache, group_segments
from mlx_qkvshare.cascade_kernel import attend_with_kernel_ops
from mlx_qkvshare.errors import BudgetExceededError, IntegrityError, InvalidValueError
from mlx_qkvshare.part_kernel import attend_part
from mlx_qkvshare.parts import part_output, part_scores
from mlx_qkvshare.quantize import Basis, QuantizedTensor, dequantize, join, quantize, unpack
from mlx_qkvshare.spec import TensorPlan

NESTED = QuantSpec(8, 8, 32, is_nested=True)
SAFE = dataclasses.replace(QuantSpec.preset("safe"), group_size=32, is_nested=True)
SPECS = [NESTED, SAFE, QuantSpec(8, 16, 32, is_nested=True), dataclasses.replace(SAFE, is_fitted=True)]
SCOUT, JUDGE = QuantizedAttention(reads_base=True), QuantizedAttention()
EPSILON = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}  # half a unit in the last place


def full_rows(tensor: QuantizedTensor, length: int) -> np.ndarray:
    """What base and residual say together: [1, Hk, length, D] float64, without library code."""
    rows = oracle.rows(tensor, length)
    if tensor.residual is None:
        return rows
    scales = tensor.scales.astype(mx.float32)
    residual = oracle.unpack(tensor.residual, scales / 16, scales * (-7.5 / 16), 4)
    return rows + residual[:, :, :length, : tensor.plan.head_dim]


def behind_rows(session: AgentSession, token_ids: list[int], rows) -> np.ndarray:
    """Stock mlx-lm's logits for `token_ids` behind the session's shared prefix, as `rows(tensor, length)` reads it."""
    caches = [KVCache() for _ in T.spec.layers]
    for view in session.prefix.views:
        for cache, kv in zip(caches, view.segment.layers, strict=True):
            for block, count in kv.first(view.length):
                pair = (mx.array(rows(t, count).astype(np.float32)) for t in (block.keys, block.values))
                cache.update_and_fetch(*(x if t.basis is None else t.basis.leave(x)
                                         for x, t in zip(pair, (block.keys, block.values), strict=True)))  # fmt: skip
    return cold(token_ids, caches=caches)


def base_rows(tensor: QuantizedTensor, length: int) -> np.ndarray:
    return oracle.rows(tensor.base, length)


def nested(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32, **options) -> QuantizedTensor:
    plan = TensorPlan(shape[-1], 8, 32, -(-shape[-1] // 32) * 32)
    return quantize(normal(*shape, seed=seed, dtype=dtype), plan, is_nested=True, **options)


def agents(manager: SharedKVCacheManager, **options: QuantizedAttention) -> list[AgentSession]:
    """Sessions named and attending as `options` say."""
    return [AgentSession(name, T, manager, attention=each) for name, each in options.items()]


# --- the spec --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k_bits", "v_bits"), [(4, 4), (8, 4), (6, 8), (16, 4)])
def test_only_eight_bits_are_nested(k_bits, v_bits):
    with pytest.raises(InvalidValueError, match=rf"is_nested: expected 8 bits .* got K{k_bits}V{v_bits}"):
        QuantSpec(k_bits, v_bits, is_nested=True)


def test_the_name_says_nested():
    assert str(QuantSpec(is_nested=True)) == "K8V8 g64 nested"
    assert str(SAFE) == "K8V8 g32 rotated centred nested sinks4"
    assert QuantSpec(16, 16, is_nested=True).packed_bytes(T.spec, 9) == FULL.packed_bytes(T.spec, 9)


# --- one tensor ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    dim=st.sampled_from([32, 64, 72, 96]),
    dtype=st.sampled_from(list(EPSILON)),
    offset=st.sampled_from([0.0, -1.0, 5.0, 40.0]),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_every_code_is_the_nearest_of_what_is_stored(dim, dtype, offset, spread, seed):
    x = (normal(1, 2, 6, dim, seed=seed) * spread + offset).astype(dtype)
    plan = TensorPlan(dim, 8, 32, -(-dim // 32) * 32)
    tensor, plain = quantize(x, plan, is_nested=True), quantize(x, plan)

    def spread_out(array: mx.array) -> np.ndarray:
        return np.repeat(oracle.to_numpy(array), 32, axis=-1)[..., :dim]

    step, exact, largest = spread_out(tensor.scales) / 16, oracle.to_numpy(x), np.abs(oracle.to_numpy(x)).max()
    start = spread_out(tensor.biases) - 7.5 * step
    np.testing.assert_array_equal(step, spread_out(plain.scales))
    assert np.all(np.abs(start - spread_out(plain.biases)) <= 2 * EPSILON[dtype] * largest), "rounded once"
    nearest = start + step * np.clip(np.round((exact - start) / step), 0, 255)
    found = full_rows(tensor, 6)
    assert np.all(np.abs(found - exact) <= np.abs(nearest - exact) + 1e-6 * largest)
    assert np.all(np.abs(oracle.rows(tensor.base, 6) - found) <= 7.5001 * np.abs(step))
    np.testing.assert_allclose(oracle.to_numpy(unpack(tensor)), found, rtol=0, atol=4 * EPSILON[dtype] * largest)


@pytest.mark.parametrize("is_fitted", [False, True])
def test_both_planes_are_plain_eight_bits(is_fitted):
    x = normal(1, 2, 40, 64)
    plain = quantize(x, TensorPlan(64, 8, 32, 64), is_fitted=is_fitted)
    both = nested(1, 2, 40, 64, is_fitted=is_fitted)
    assert both.nbytes == plain.nbytes and both.bits == 8 and both.base.bits == 4
    np.testing.assert_allclose(np.array(unpack(both)), np.array(unpack(plain)), atol=1e-6)
    np.testing.assert_allclose(full_rows(both, 40), oracle.rows(plain, 40), atol=1e-6)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("value", [0.0, 3.0, -1e-4])
def test_a_constant_group_is_kept(value, dtype):
    x = mx.full((1, 1, 2, 32), value, dtype)
    tensor = quantize(x, TensorPlan(32, 8, 32, 32), is_nested=True)
    for found in (unpack(tensor), unpack(tensor.base)):
        np.testing.assert_allclose(oracle.to_numpy(found), oracle.to_numpy(x), rtol=2 * EPSILON[dtype], atol=2e-6)


def test_half_precision_is_read_no_worse_than_plain_eight_bits():
    # MLX rounds the products of plain ones in half precision, too.
    for dtype, share in ((mx.float16, 1.02), (mx.bfloat16, 0.8)):
        x, plan = normal(1, 2, 100, 64, dtype=dtype), TensorPlan(64, 8, 32, 64)
        errors = [
            np.abs(oracle.to_numpy(unpack(quantize(x, plan, is_nested=flag))) - oracle.to_numpy(x)).mean()
            for flag in (True, False)
        ]
        assert errors[0] < share * errors[1]


def test_the_base_is_an_ordinary_tensor_over_the_same_arrays():
    tensor = nested(1, 2, 9, 64)
    mx.eval(*tensor.arrays)
    base = tensor.base
    assert base.residual is None and base.plan.bits == 4 and base.base is base
    assert [address(a) for a in base.arrays] == [address(a) for a in tensor.arrays[:3]]
    expected = mx.dequantize(*base.arrays, group_size=32, bits=4)
    assert mx.array_equal(unpack(base), expected)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("basis", [None, Basis(is_rotated=True)])
def test_every_way_to_attend_reads_both_planes(dim, dtype, basis):
    keys, values = (nested(1, 2, 40, dim, seed=seed, dtype=dtype, basis=basis) for seed in (0, 1))
    rows, weights = normal(1, 2, 5, dim, seed=4), mx.softmax(normal(1, 2, 5, 40, seed=5), axis=-1)
    for tensors in ((keys, values), (keys.base, values.base)):
        full = [full_rows(t, 40) for t in tensors]
        full = [x if basis is None else np.array(basis.leave(mx.array(x.astype(np.float32)))) for x in full]
        for count, is_unpacked in itertools.product((40, 27, 7), (False, True)):
            found = part_scores(rows, tensors[0], count, is_unpacked=is_unpacked)
            expected = np.array(rows) @ full[0][:, :, :count].swapaxes(-1, -2)
            np.testing.assert_allclose(np.array(found), expected, atol=1e-4 if dtype == mx.float32 else 3e-2)
            found = part_output(weights[..., :count], tensors[1], count, is_unpacked=is_unpacked)
            expected = np.array(weights[..., :count]) @ full[1][:, :, :count]
            np.testing.assert_allclose(np.array(found), expected, atol=1e-5 if dtype == mx.float32 else 2e-3)


def test_joined_tensors_keep_both_planes():
    parts = [nested(1, 2, count, 64, seed=count) for count in (5, 8)]
    expected = mx.concatenate([dequantize(part) for part in parts], axis=2)
    assert mx.array_equal(dequantize(join(parts)), expected)
    assert join([part.base for part in parts]).residual is None


# --- segments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", SPECS, ids=str)
def test_bytes_are_exactly_those_of_plain_eight_bits(quant):
    spec = make_spec(layers=2, heads=2, k_dim=64, v_dim=80)
    manager = SharedKVCacheManager(spec, quant)
    prefix = store(manager, range(3))
    store(manager, range(10, 30), prefix)
    plain = dataclasses.replace(quant, is_nested=False)
    expected = plain.packed_bytes(spec, 3) + plain.packed_bytes(spec, 20, start=3)
    assert prefix.shared_bytes == manager.stats().used_bytes == expected
    assert manager.segments()[1].residual_bytes > 0
    manager.check_integrity(checksums=True)


def test_base_and_residual_have_a_checksum_each():
    for pick in (lambda t: t.packed, lambda t: t.residual):
        manager = make_manager(SAFE, k_dim=64)
        prefix = store(manager, range(20))
        (segment,) = manager.segments()
        flip_byte(pick(segment.layers[0].values))
        is_base = segment.compute_checksum() != segment.checksum
        assert is_base != (segment.compute_residual_checksum() != segment.residual_checksum)
        with pytest.raises(IntegrityError, match="checksum" if is_base else "checksum of residuals"):
            manager.check_integrity(checksums=True)
        assert prefix.num_tokens == 20


def test_a_handoff_verifies_the_residuals_too():
    manager, owner = pair(quant=NESTED)
    coordinator, package = HandoffCoordinator(manager), owner.package_state()
    coordinator.validate(package, verify=True)
    flip_byte(owner.prefix.views[0].segment.layers[0].keys.residual)
    with pytest.raises(IntegrityError, match="checksum"):
        coordinator.validate(package, verify=True)


# --- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", SPECS, ids=str)
def test_scout_and_judge_read_the_same_bytes_in_their_own_precision(quant):
    manager, owner = pair(quant=quant)
    scout, judge = agents(manager, scout=SCOUT, judge=JUDGE)
    before = active_bytes()
    for session in (scout, judge):
        session.receive_state(owner.package_state())
    ids = some_ids(5, seed=1)
    for session, rows in ((scout, base_rows), (judge, full_rows)):
        expected = behind_rows(session, ids, rows)
        for route in (None, Route.PACKED, Route.DEQUANTIZE):
            each = dataclasses.replace(session._attention, route=route)
            np.testing.assert_allclose(logits_behind(T.model, session.caches, ids, each), expected, atol=2e-4)
        # Without a block the cache says what its session reads, as in a batch.
        assert session.caches[0].reads_base is session._attention.reads_base
        decoded = decode(session, ids)
        np.testing.assert_allclose(decoded[1:], expected[:-1], atol=2e-4)
        session.rewind(len(ids))
        session.seal()
    assert active_bytes() - before < 4096, "no byte of a segment is copied for a reader"
    assert_consistent(scout)


def test_a_full_read_decodes_as_plain_eight_bits_do():
    ids, logits = some_ids(6, seed=1), []
    for quant in (NESTED, dataclasses.replace(NESTED, is_nested=False)):
        _, session = pair(quant=quant)
        logits.append(decode(session, ids))
    np.testing.assert_allclose(*logits, atol=1e-4)
    _, session = pair(quant=NESTED)
    (scout,) = agents(session.manager, scout=SCOUT)
    scout.receive_state(session.package_state())
    assert np.abs(decode(scout, ids) - logits[0]).max() > 1e-3, "the base is coarser"


@pytest.mark.parametrize("quant", SPECS, ids=str)
@pytest.mark.parametrize("family", [{}, SLIDING, RECURRENT], ids=["full", "window", "state"])
@pytest.mark.parametrize("each", [SCOUT, JUDGE], ids=["base", "full"])
def test_hop_n_is_hop_one(quant, family, each):
    model = loaded(**family)
    manager = SharedKVCacheManager(model.spec, quant)
    first, second = (AgentSession(name, model, manager, attention=each) for name in ("first", "second"))
    first.prefill(some_ids(40))
    first.seal()
    first.prefill(some_ids(30, seed=1))
    HandoffCoordinator(manager).request_handoff(first, second)
    one_hop = logits_behind(model.model, second.caches, [5, 6], each)
    for _ in range(3):
        HandoffCoordinator(manager).request_handoff(second, first)
        HandoffCoordinator(manager).request_handoff(first, second)
    np.testing.assert_array_equal(logits_behind(model.model, second.caches, [5, 6], each), one_hop)
    with second.fork("fork") as fork:
        np.testing.assert_array_equal(logits_behind(model.model, fork.caches, [5, 6], fork._attention), one_hop)
    routes = [dataclasses.replace(each, route=route) for route in (Route.PACKED, Route.DEQUANTIZE)]
    found = [logits_behind(model.model, second.caches, [5, 6], route) for route in routes]
    np.testing.assert_allclose(*found, atol=2e-4)
    manager.check_integrity(checksums=True)


@pytest.mark.parametrize("each", [SCOUT, JUDGE], ids=["base", "full"])
def test_a_model_that_reads_keys_itself_reads_what_its_agent_does(each):
    manager = make_manager(NESTED, k_dim=64)
    (cache,) = manager.make_caches(store(manager, range(20)))
    (view,) = cache.prefix.views
    row = normal(1, 1, 1, 64, seed=9)
    with quantized_attention(each):
        keys, _ = cache.update_and_fetch(row, row)
    tensor = view.segment.layers[0].keys
    expected = dequantize(tensor.base if each.reads_base else tensor)
    assert mx.array_equal(keys, mx.concatenate([expected, row], axis=2))
    assert copy.deepcopy(cache).reads_base is each.reads_base


@pytest.mark.parametrize("route", [Route.PACKED, Route.DEQUANTIZE])
@pytest.mark.parametrize("each", [SCOUT, JUDGE], ids=["base", "full"])
def test_an_attention_reads_as_it_says_whoever_made_the_caches(each, route):
    manager = make_manager(NESTED, k_dim=64)
    prefix, queries = store(manager, range(20)), normal(1, 2, 1, 64, seed=9)
    kv = prefix.views[0].segment.layers[0]
    keys, values = (base_rows(t, 20) if each.reads_base else full_rows(t, 20) for t in (kv.keys, kv.values))
    expected = oracle.attention(np.array(queries, np.float64), [keys], [values], scale=0.1)
    for made_for in (False, True):
        (cache,) = manager.make_caches(prefix, reads_base=made_for)
        found = dataclasses.replace(each, route=route).attend(queries, cache, scale=0.1)
        np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


@pytest.mark.parametrize("unpack", [Route.PACKED, Route.DEQUANTIZE])
@pytest.mark.parametrize("quant", [NESTED, SAFE], ids=str)
def test_scout_and_judge_take_their_steps_together(quant, unpack):
    manager, owner = pair(quant=quant)
    ids = {"scout": some_ids(4, seed=1), "judge": some_ids(6, seed=2), "other": some_ids(3, seed=3)}
    sessions = agents(manager, scout=SCOUT, judge=JUDGE, other=SCOUT)
    alone = {}
    for session in sessions:
        session.receive_state(owner.package_state())
        with session.fork("alone") as twin:
            alone[session.name] = [chunk.token for chunk in twin.stream(ids[session.name], max_tokens=5)]
    together: dict[str, list[int]] = {session.name: [] for session in sessions}
    is_together = False
    with AgentBatch(manager, attention=QuantizedAttention(unpack)) as batch:
        for session in sessions:
            batch.join(session, ids[session.name], max_tokens=5)
        for event in itertools.chain.from_iterable(iter(batch.step, [])):
            together[event.session.name].append(event.chunk.token)
            is_together |= batch.is_together
    assert together == alone and is_together
    groups = group_segments([session.caches[0] for session in sessions])
    assert [group.rows for group in groups] == [(0, 2), (1,)], "the base is read once for both scouts"


# --- the kernel ------------------------------------------------------------------------------------


def test_the_kernel_never_reads_a_base_for_the_whole():
    keys, values = nested(1, 2, 40, 64), nested(1, 2, 40, 64, seed=1)
    for pair_ in ((keys, values.base), (keys.base, values)):
        with pytest.raises(AssertionError, match="one plane"):
            attend_part(normal(1, 2, 3, 64), *pair_, mx.array([[[0, 40]] * 3], mx.int32), 40)


@pytest.mark.parametrize("each", [SCOUT, JUDGE], ids=["base", "full"])
def test_the_kernel_is_handed_the_base_and_nothing_nested(each, monkeypatch):
    called = []

    def kernel(*args, **options):
        called.append(args)
        return attend_with_kernel_ops(*args, **options)

    monkeypatch.setattr(attention, "attend_with_kernel", kernel)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    manager = make_manager(SAFE, k_dim=64)
    prefix = store(manager, range(40))
    caches = [manager.make_caches(holder, reads_base=each.reads_base)[0] for holder in (prefix, prefix.fork())]
    row, queries = normal(1, 1, 1, 64, seed=9), normal(2, 2, 1, 64, seed=10)
    for cache in caches:
        cache.append(row, row)
    batch = BatchLayerCache(caches, {}, mx.array([cache.offset for cache in caches]))
    asked = dataclasses.replace(each, route=Route.KERNEL)
    packed = dataclasses.replace(each, route=Route.PACKED)
    for rows, cache in ((queries[:1], caches[0]), (queries, batch)):
        found, expected = (it.attend(rows, cache, scale=0.1) for it in (asked, packed))
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)
    assert len(called) == (2 if each.reads_base else 0)


def test_a_window_of_nested_rows_keeps_both_planes():
    manager, _ = pair(quant=NESTED, loaded=(model := loaded(**SLIDING)), tokens=60)
    prefix = manager.match_prefix(some_ids(60))
    for cache, layer in zip(manager.make_caches(prefix), model.spec.layers, strict=True):
        heads, dim = layer.n_kv_heads, layer.k_head_dim
        row, queries = normal(1, heads, 1, dim, seed=9), normal(1, 2 * heads, 1, dim, seed=10)
        mask = cache.make_mask(1, return_array=True)
        cache.append(row, row)
        expected = QuantizedAttention(Route.PACKED).attend(queries, cache, scale=0.1, mask=mask)
        found = attend_with_kernel_ops(queries, cache, scale=0.1, sinks=None, window=layer.window or None)
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)


# --- dropping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", SPECS, ids=str)
def test_dropping_frees_the_residuals_and_moves_nothing_else(quant):
    with no_collector():
        manager, owner = pair(quant=quant, tokens=200)
        (segment,) = manager.segments()
        checksum, nbytes, residuals = segment.checksum, segment.nbytes, segment.residual_bytes
        addresses = [address(a) for a in segment.base.arrays()]
        package = owner.package_state()
        del segment
        before, used = active_bytes(), manager.stats().used_bytes
        assert manager.drop_residuals() == residuals > 0
        assert before - active_bytes() >= residuals
    (segment,) = manager.segments()
    assert [address(a) for a in segment.arrays()] == addresses
    assert segment.nbytes == nbytes - residuals and segment.residual_bytes == 0
    assert segment.checksum == segment.compute_checksum() == checksum
    stats = manager.stats()
    assert stats.used_bytes == used - residuals and stats.dropped_residual_bytes == residuals
    assert stats.protected_bytes == stats.used_bytes and owner.prefix.views[0].segment is segment
    assert_consistent(owner)
    assert manager.drop_residuals() == 0 and manager.stats() == stats
    HandoffCoordinator(manager).validate(package, verify=True)  # it was made before
    expected = behind_rows(owner, [5, 6], base_rows)
    np.testing.assert_allclose(logits_behind(T.model, owner.caches, [5, 6]), expected, atol=2e-4)


def test_a_plain_manager_has_nothing_to_drop():
    manager, owner = pair()
    (segment,) = manager.segments()
    assert manager.drop_residuals() == 0 and manager.segments() == (segment,) and segment.base is segment
    assert_consistent(owner)


def test_readers_in_the_middle_of_a_turn_go_on_with_the_base():
    manager, owner = pair(quant=SAFE)
    scout, judge, solo = agents(manager, scout=SCOUT, judge=JUDGE, solo=JUDGE)
    for session in (scout, judge, solo):
        session.receive_state(owner.package_state())
    steps = solo.stream(some_ids(3, seed=1), max_tokens=6, ignore_eos=True)
    tokens = [next(steps).token, next(steps).token]
    with AgentBatch(manager) as batch:
        for session in (scout, judge):
            batch.join(session, some_ids(3, seed=2), max_tokens=6, ignore_eos=True)
        for _ in range(2):
            batch.step()
        assert manager.drop_residuals() > 0
        manager.check_integrity(checksums=True)
        assert sum(len(batch.step()) for _ in range(4)) == 8
    tokens += [chunk.token for chunk in steps]
    assert len(tokens) == 6 and solo.num_tokens == 40 + 3 + 6
    for session in (scout, judge, solo):
        assert_consistent(session)
    np.testing.assert_array_equal(probe(judge, token_ids=[5]), logits_behind(T.model, judge.caches, [5], SCOUT))
    groups = group_segments([session.caches[0] for session in (scout, judge)])
    assert [group.rows for group in groups] == [(0, 1)], "one base is left for all"


def test_what_is_sealed_later_is_full_again():
    manager, owner = pair(quant=NESTED)
    manager.drop_residuals()
    owner.prefill(some_ids(300, seed=1))
    owner.seal()
    manager.compact(owner.prefix)
    first, second = manager.segments()
    assert first.residual_bytes == 0 < second.residual_bytes, "a base and a whole are not joined"
    assert second.nbytes == NESTED.packed_bytes(T.spec, 300, start=40)
    assert_consistent(owner)
    assert manager.drop_residuals() == second.residual_bytes
    assert manager.compact(owner.prefix) == 0 or len(manager.segments()) == 1
    assert_consistent(owner)


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("quant", [NESTED, dataclasses.replace(SAFE, sink_tokens=2)], ids=str)
def test_compaction_joins_what_is_alike(quant, is_dropped):
    manager = make_manager(quant, k_dim=64, heads=2)
    prefix = store(manager, range(80))
    store(manager, range(80, 130), prefix, seed=1)
    if is_dropped:
        manager.drop_residuals()
    before = [np.array(dequantize(view.segment.layers[0].keys)) for view in prefix.views]
    assert manager.compact(prefix) == 1
    (segment,) = manager.segments()
    np.testing.assert_array_equal(np.array(dequantize(segment.layers[0].keys)), np.concatenate(before, axis=2))
    assert (segment.residual_bytes == 0) is is_dropped
    manager.check_integrity(checksums=True)
    assert manager.drop_residuals() == (0 if is_dropped else segment.residual_bytes)
    manager.check_integrity(checksums=True)


def test_a_segment_that_was_dropped_to_its_base_is_freed_at_once():
    manager = make_manager(NESTED, k_dim=64)
    with no_collector():
        before = active_bytes()
        prefix = store(manager, range(500))
        (cache,) = manager.make_caches(prefix, reads_base=True)
        assert len(list(cache.parts())) == 1
        manager.drop_residuals()
        assert len(list(cache.parts())) == 1
        prefix.release()
        del prefix, cache
        assert manager.evict_unreferenced() == 1
        mx.clear_cache()
        assert mx.get_active_memory() <= before, "no cycle keeps it for the collector"


# --- pressure --------------------------------------------------------------------------------------


def budget_for(num_tokens: int) -> int:
    return NESTED.packed_bytes(make_spec(k_dim=64), num_tokens)


def test_residuals_go_before_a_request_is_refused():
    manager = make_manager(NESTED, k_dim=64, budget_bytes=budget_for(100), may_drop_residuals=True)
    prefix = store(manager, range(80))
    full = manager.stats()
    with pytest.raises(BudgetExceededError):
        manager.allocate_shared_slot(100)
    assert manager.stats() == full, "what would not fit even then costs nothing"
    other = store(manager, range(200, 240))
    stats = manager.stats()
    assert stats.dropped_residual_bytes == 80 * 2 * 64 // 2 and stats.num_evictions == 0
    assert stats.used_bytes == prefix.shared_bytes + other.shared_bytes
    assert other.views[0].segment.residual_bytes > 0 == prefix.views[0].segment.residual_bytes
    manager.check_integrity(checksums=True)


def test_residuals_stay_where_the_manager_may_not_drop_them():
    manager = make_manager(NESTED, k_dim=64, budget_bytes=budget_for(100))
    prefix = store(manager, range(80))
    with pytest.raises(BudgetExceededError):
        manager.allocate_shared_slot(40)
    assert prefix.views[0].segment.residual_bytes > 0 and manager.stats().dropped_residual_bytes == 0


def test_what_nobody_holds_is_evicted_before_residuals_are_dropped():
    manager = make_manager(NESTED, k_dim=64, budget_bytes=budget_for(100), may_drop_residuals=True)
    prefix = store(manager, range(50))
    store(manager, range(100, 150)).release()
    store(manager, range(200, 240))
    assert manager.stats().num_evictions == 1 and manager.stats().dropped_residual_bytes == 0
    assert prefix.views[0].segment.residual_bytes > 0


def test_a_private_tail_that_finds_no_room_costs_the_residuals():
    budget = T.spec.private_bytes(208)  # its prefill takes more than the segment that it becomes
    manager, owner = pair(quant=NESTED, tokens=200, budget_bytes=budget, may_drop_residuals=True)
    rows = manager.stats().free_bytes // T.spec.private_token_bytes + 8
    assert manager.stats().dropped_residual_bytes == 0
    owner.prefill(some_ids(rows, seed=1))
    assert manager.stats().dropped_residual_bytes > 0
    expected = behind_rows(owner, some_ids(rows, seed=1), base_rows)[-1]
    np.testing.assert_allclose(np.array(owner._logits), expected, atol=2e-4)
    assert_consistent(owner)


STEPS = ["store", "drop", "fork", "release", "compact", "evict"]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=14))
def test_the_accounting_holds_whatever_comes_between(steps):
    manager = make_manager(SAFE, k_dim=64, budget_bytes=budget_for(160), may_drop_residuals=True)
    held, ids = [], itertools.count(0, 1000)
    for step, number in steps:
        chosen = held[number % len(held)] if held else None
        if step == "store":
            start = next(ids)
            try:
                prefix = store(manager, range(start, start + 10 + 3 * number), None if number % 2 else chosen)
            except BudgetExceededError:
                continue
            held += [prefix] if prefix is not chosen else []
        elif step == "drop":
            manager.drop_residuals()
            assert all(segment.residual_bytes == 0 for segment in manager.segments())
        elif step == "evict":
            manager.evict_unreferenced()
        elif chosen is not None and step == "fork":
            held.append(chosen.fork())
        elif chosen is not None and step == "compact":
            manager.compact(chosen)
        elif chosen is not None:
            held.remove(chosen)
            chosen.release()
        manager.check_integrity(checksums=True)
        assert manager.stats().used_bytes == sum(segment.nbytes for segment in manager.segments())
