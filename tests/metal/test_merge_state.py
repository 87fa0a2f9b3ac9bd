"""`merge_state` and its ops twin against one softmax over everything, in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_qkvshare.kernels import merge_state, merge_state_ops

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
    everything = np.exp(scores - scores.max((0, 2), keepdims=True))
    truth = np.einsum("pnt,ptd->nd", everything, values) / everything.sum((0, 2))[:, None]
    return *(mx.array(a.astype(np.float32)) for a in (maxima, sums, outputs)), truth


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
