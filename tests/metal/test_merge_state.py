"""`merge_state` and its ops twin against one softmax over everything, in float64."""

from __future__ import annotations

from typing import Any

import metalsim
import mlx.core as mx
import numpy as np
import pytest

from mlx_qkvshare.kernels import build_kernel, merge_state, merge_state_ops

SHAPES = [(2, 1, 64), (3, 9, 80), (17, 12, 128), (1, 1, 7)]


def parts(
    num_parts: int, num_rows: int, head_dim: int, *, empty: bool
) -> tuple[mx.array, mx.array, mx.array, np.ndarray]:
    """Partial states of random attention, and the softmax over all of it at once in float64."""
    rng = np.random.default_rng(num_parts * 1000 + num_rows + head_dim)
    scores = rng.normal(0, 30, (num_parts, num_rows, 7))
    values = rng.normal(size=(num_parts, 7, head_dim))
    maxima, weights = scores.max(-1), np.exp(scores - scores.max(-1, keepdims=True))
    sums, outputs = weights.sum(-1), np.einsum("pnt,ptd->pnd", weights, values)
    if empty:
        sums[0], outputs[0], maxima[0], scores[0] = 0, 0, 1e30, -np.inf
    return join(scores, maxima, sums, outputs, values)


def join(scores: Any, maxima: Any, sums: Any, outputs: Any, values: Any) -> tuple[mx.array, mx.array, mx.array, Any]:
    largest = scores.max((0, 2), keepdims=True)
    everything = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    truth = np.einsum("pnt,ptd->nd", everything, values) / np.maximum(everything.sum((0, 2)), 1e-300)[:, None]
    return *(mx.array(a.astype(np.float32)) for a in (maxima, sums, outputs)), truth


def patchy(num_parts: int, num_rows: int = 12, head_dim: int = 32) -> tuple[mx.array, mx.array, mx.array, Any]:
    """Each row lacks some of the parts, the first row all of them; what empty parts hold otherwise is rubbish."""
    rng = np.random.default_rng(num_parts)
    scores = rng.normal(0, 30, (num_parts, num_rows, 7))
    values = rng.normal(size=(num_parts, 7, head_dim))
    is_empty = rng.random((num_parts, num_rows)) < 0.4
    is_empty[:, 0] = True
    is_empty[rng.integers(num_parts), 1:] = False
    maxima, weights = scores.max(-1), np.exp(scores - scores.max(-1, keepdims=True))
    sums, outputs = weights.sum(-1), np.einsum("pnt,ptd->pnd", weights, values)
    maxima[is_empty], sums[is_empty], outputs[is_empty], scores[is_empty] = 1e30, 0, 77, -np.inf
    return join(scores, maxima, sums, outputs, values)


def assert_right(merged: mx.array, truth: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(merged), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("num_parts", "num_rows", "head_dim"), SHAPES[:3])
def test_the_ops_twin(num_parts: int, num_rows: int, head_dim: int, empty: bool) -> None:
    *partial, truth = parts(num_parts, num_rows, head_dim, empty=empty)
    assert_right(merge_state_ops(*partial, mx.float32), truth)


def run(engine, num_parts: int, num_rows: int, head_dim: int, *, empty: bool) -> None:
    *partial, truth = parts(num_parts, num_rows, head_dim, empty=empty)
    assert_right(merge_state(*partial, mx.float32), truth)


@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_quick(engine) -> None:
    run(engine, 3, 9, 80, empty=True)


@pytest.mark.metal
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("num_parts", "num_rows", "head_dim"), SHAPES)
def test_every_engine(engine, num_parts: int, num_rows: int, head_dim: int, empty: bool) -> None:
    """The last shape has inputs of fewer than 8 elements, which MLX puts into another address space."""
    run(engine, num_parts, num_rows, head_dim, empty=empty and num_parts > 1)


PARTS = [1, 2, 3, 7, 64, 300]


@pytest.mark.parametrize("num_parts", PARTS)
def test_the_ops_twin_over_parts_that_rows_lack(num_parts: int) -> None:
    *partial, truth = patchy(num_parts)
    merged = merge_state_ops(*partial, mx.float32)
    assert_right(merged, truth)
    assert not np.array(merged[0]).any(), "a row without any token"


@pytest.mark.metal
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("num_parts", PARTS)
@pytest.mark.parametrize("engine", ["sim-fast", "sim-race", "gpu"], indirect=True)
def test_parts_that_rows_lack(engine, num_parts: int, dtype: mx.Dtype) -> None:
    *partial, truth = patchy(num_parts)
    merged = merge_state(*partial, dtype)
    assert merged.dtype == dtype
    unit = {mx.float32: 0, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
    merged = np.array(merged.astype(mx.float32), np.float64)
    assert (np.abs(merged - truth) <= 2e-6 * np.abs(truth).max() + unit * np.abs(truth)).all()


@pytest.mark.metal
def test_any_schedule(simulator: None) -> None:
    *partial, truth = patchy(3)
    for seed in range(6):
        build_kernel.cache_clear()
        with metalsim.install("random", available=True, seed=seed):
            assert_right(merge_state(*partial, mx.float32), truth)
    build_kernel.cache_clear()
