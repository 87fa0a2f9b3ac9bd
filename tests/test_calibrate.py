"""Factors for the channels of keys: measured on the model, kept for it, and never a matter of correctness."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import loaded, logits_behind, make_spec, store
from reference import T, some_ids

from mlx_qkvshare import AgentSession, QuantizedAttention, QuantSpec, Route, SharedKVCacheManager
from mlx_qkvshare.calibrate import calibrate
from mlx_qkvshare.errors import InvalidValueError

TIGHT = QuantSpec.preset("tight")


def test_factors_have_the_shape_of_the_keys_and_follow_the_queries():
    quiet = loaded(wrap=lambda model: None)
    for layer in quiet.model.model.layers:  # the first channels of every query are 50 times louder
        weight = layer.self_attn.q_proj.weight
        loud = mx.where(mx.arange(weight.shape[0]) % 64 < 8, 50.0, 1.0)[:, None]
        layer.self_attn.q_proj.weight = weight * loud
    plain, found = (calibrate(lm, some_ids(100)) for lm in (T, quiet))
    for before, after in zip(plain, found, strict=True):
        assert before.shape == after.shape == (1, 2, 1, 64)
        ratio = np.array(after / before)[0, :, 0]
        assert ratio[:, :8].mean() > 2 * ratio[:, 40:].mean(), "RoPE pairs channel i with i + 32"


@pytest.mark.parametrize("family", [{"model_type": "gemma2", "query_pre_attn_scalar": 64.0}, {}])
def test_layers_that_attention_does_not_reach_have_none(family):
    assert [f is None for f in calibrate(loaded(**family), some_ids(80))] == [bool(family)] * 2


def test_too_few_tokens_are_refused():
    with pytest.raises(InvalidValueError, match="64 or more, got 10"):
        calibrate(T, some_ids(10))


def test_a_context_with_factors_is_read_alike_on_every_route():
    manager = SharedKVCacheManager(T.spec, TIGHT, key_factors=calibrate(T, some_ids(100)))
    with AgentSession("one", T, manager) as session:
        for seed in (0, 1):
            session.prefill(some_ids(80, seed=seed))
            session.seal()
        assert len(session.prefix.views) == 1, "neighbours with the same factors become one"
        routes = (Route.PACKED, Route.DEQUANTIZE)
        found = [logits_behind(T.model, session.caches, [5, 6], QuantizedAttention(route)) for route in routes]
    np.testing.assert_allclose(*found, atol=1e-3)
    manager.check_integrity(checksums=True)


@pytest.mark.parametrize(
    ("factors", "named"),
    [
        ([None], "expected 2 layers, got 1"),
        ([mx.ones((1, 1, 1, 32)), None], r"layer 0: expected shape \(1, 2, 1, 32\)"),
        ([None, mx.zeros((1, 2, 1, 32))], "layer 1: expected finite numbers above 0"),
    ],
)
def test_factors_that_do_not_fit_are_refused_before_anything_is_stored(factors, named):
    with pytest.raises(InvalidValueError, match=named):
        SharedKVCacheManager(make_spec(layers=2, heads=2), TIGHT, key_factors=factors)
    assert store(SharedKVCacheManager(make_spec(layers=2, heads=2), TIGHT), range(9)).num_tokens == 9
