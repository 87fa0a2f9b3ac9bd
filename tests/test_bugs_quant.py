"""Public bug reports on KV quantization (bugs.md, section A): the right behaviour, by their numbers."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from reference import FULL, T, active_bytes, assert_warm_is_cold, cold, decode, mean_kl, pair, probe, some_ids, store
from tiny import tiny_loaded

from mlx_qkvshare import AgentSession, QuantizedAttention, QuantSpec, SharedKVCacheManager
from mlx_qkvshare.errors import ContextLimitError, InvalidValueError
from mlx_qkvshare.spec import SUPPORTED_BITS, LayerSpec


@pytest.mark.parametrize(
    ("head_dim", "group_size", "padded_dim"), [(96, 32, 96), (80, 32, 96), (72, 32, 96), (48, 64, 64)]
)
def test_b1_a_head_dim_that_the_group_does_not_divide_is_packed_anyway(head_dim, group_size, padded_dim):
    loaded = tiny_loaded(head_dim=head_dim)
    manager, owner = pair(quant=QuantSpec(), loaded=loaded, tokens=20)
    segment = owner.prefix.views[0].segment
    for tensor in (segment.layers[0].keys, segment.layers[0].values):
        plan = tensor.plan
        assert (plan.bits, plan.group_size, plan.padded_dim) == (8, group_size, padded_dim)
    assert segment.nbytes == manager.stats().used_bytes == 20 * manager.packed_token_bytes
    assert_warm_is_cold(owner, loaded)
    assert mean_kl(cold([*owner.token_ids, 7], loaded)[-1:], probe(owner, loaded, [7])) < 1e-3


def test_b1_keys_and_values_of_different_dims_are_resolved_each():
    spec = dataclasses.replace(T.spec, layers=(LayerSpec(n_kv_heads=2, k_head_dim=96, v_head_dim=64),))
    manager = SharedKVCacheManager(spec, QuantSpec())
    prefix = store(manager, some_ids(20))
    kv = prefix.views[0].segment.layers[0]
    assert (kv.keys.plan.group_size, kv.values.plan.group_size) == (32, 64)
    keys, values = manager.make_caches(prefix)[0].keys_and_values()
    assert (keys.shape, values.shape) == ((1, 2, 20, 96), (1, 2, 20, 64))
    queries = mx.random.normal((1, 4, 1, 96), key=mx.random.key(1))
    got = QuantizedAttention().attend(queries, manager.make_caches(prefix)[0], scale=0.1)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [bits for bits in SUPPORTED_BITS if bits < 16])
def test_b2_every_supported_width_packs_extends_and_generates(head_dim, bits):
    loaded = tiny_loaded(head_dim=head_dim)
    manager, owner = pair(quant=QuantSpec(k_bits=bits, v_bits=bits), loaded=loaded, tokens=20)
    owner.prefill(some_ids(300, seed=1))  # over the 256-row step in which caches grow
    assert_warm_is_cold(owner, loaded, atol=1e-3)
    owner.seal()
    assert_warm_is_cold(owner, loaded, atol=1e-3)
    assert np.isfinite(decode(owner, [7, 8, 9])).all()
    row_bytes = head_dim * bits // 8 + 2 * head_dim // 64 * 4
    shared_bytes = 320 * 2 * 2 * 2 * row_bytes  # tokens, layers, kv heads, K and V
    assert sum(segment.nbytes for segment in manager.segments()) == shared_bytes


def test_b2_other_widths_are_refused_when_configured():
    for bits in (0, 1, 7, 9, 32):
        with pytest.raises(InvalidValueError, match="bits"):
            QuantSpec(k_bits=bits)


@pytest.fixture(scope="module")
def gemma2():
    """Soft-capped: it does its own maths on keys and values, so it takes the exact fallback."""
    return tiny_loaded(model_type="gemma2", query_pre_attn_scalar=64.0)


@pytest.fixture(scope="module")
def gemma3():
    """Two of three layers slide, by 16 tokens."""
    return tiny_loaded(model_type="gemma3_text", sliding_window=16, sliding_window_pattern=3, layers=3)


@pytest.mark.parametrize("num_tokens", [10, 63, 64, 65, 200])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_b7_what_works_on_a_short_prompt_works_on_a_long_one(family, num_tokens, gemma2, gemma3):
    loaded = {"llama": T, "gemma2": gemma2, "gemma3": gemma3}[family]
    _, owner = pair(loaded=loaded, tokens=num_tokens)
    assert_warm_is_cold(owner, loaded)  # few rows
    owner.prefill(some_ids(30, seed=1))  # many rows
    assert_warm_is_cold(owner, loaded)
    assert np.isfinite(decode(owner, [7, 8])).all()


def peak_of(run):
    """Bytes that `run` needed at most and keeps, beyond what was there before; and what it returned."""
    before = active_bytes()
    mx.reset_peak_memory()
    kept = run()
    return mx.get_peak_memory() - before, active_bytes() - before, kept


# Wide activations as in T, and a cache that outweighs all else.
@pytest.mark.parametrize("sizes", [{"layers": 4}, {"layers": 8, "hidden": 64, "kv_heads": 4}], ids=["wide", "deep"])
def test_b11_prefill_and_seal_peak_no_higher_than_full_precision(sizes):
    loaded = tiny_loaded(max_position=2048, **sizes)
    ids, num_layers = some_ids(1600), len(loaded.spec.layers)

    def stock():
        cache = make_prompt_cache(loaded.model)
        next(generate_step(mx.array(ids), loaded.model, prompt_cache=cache, max_tokens=1, prefill_step_size=512))
        return cache

    session = AgentSession("a", loaded, SharedKVCacheManager(loaded.spec))
    stock_peak, _, _ = peak_of(stock)
    prefill_peak, private_bytes, _ = peak_of(lambda: session.prefill(ids))
    seal_peak, sealed_bytes, _ = peak_of(session.seal)

    one_layer, packed_bytes = private_bytes // num_layers, session.prefix.shared_bytes
    assert max(prefill_peak, private_bytes + seal_peak) <= stock_peak + one_layer
    assert packed_bytes <= private_bytes + sealed_bytes <= 1.1 * packed_bytes
    assert seal_peak <= one_layer + packed_bytes // num_layers  # never both forms of the whole cache


@pytest.mark.parametrize("quant", [FULL, QuantSpec()], ids=str)
@pytest.mark.parametrize("count", [3, 10, 12, 50])
def test_b13_rewind_cuts_tail_and_shared_part_alike(count, quant):
    manager, other = pair(quant=quant)
    session = AgentSession("a", T, manager)
    session.prefill(some_ids(40) + some_ids(10, seed=1))
    ids, before = session.token_ids, probe(other)
    session.rewind(count)
    assert session.token_ids == ids[: 50 - count]
    assert session.prefix.num_tokens == min(40, 50 - count)
    assert_warm_is_cold(session)
    session.prefill([7, 8, 9])  # and it goes on from there
    assert_warm_is_cold(session)
    assert np.array_equal(probe(other), before) and other.num_tokens == 40


@pytest.mark.parametrize("count", [51, -1])
def test_b13_rewind_refuses_what_is_not_there(count):
    manager, _ = pair()
    session = AgentSession("a", T, manager)
    session.prefill(some_ids(40) + some_ids(10, seed=1))
    before = probe(session)
    with pytest.raises(InvalidValueError, match="rewind"):
        session.rewind(count)
    assert session.num_tokens == 50 and np.array_equal(probe(session), before)
    assert_warm_is_cold(session)


def test_b15_a_full_context_is_an_error_and_moves_nothing():
    manager, other = pair()
    checksum, before = other.prefix.views[0].segment.compute_checksum(), probe(other)
    session = AgentSession("a", T, manager, max_context_tokens=64)
    session.prefill(some_ids(40))
    turn = some_ids(10, seed=1)
    while session.num_tokens + len(turn) <= 64:
        session.prefill(turn)
    held = session.token_ids
    for overflow in (lambda: session.prefill(turn), lambda: session.reply(max_tokens=64), lambda: session.say("more")):
        with pytest.raises(ContextLimitError, match="available 64"):
            overflow()
        assert session.token_ids == held
        assert_warm_is_cold(session)
    assert other.prefix.views[0].segment.compute_checksum() == checksum
    assert np.array_equal(probe(other), before)
