"""`quantize_pack` gives the words of `mx.quantize` on a CPU, also where MLX's own Metal kernel does not."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import normal
from test_attend_part import strided

from mlx_qkvshare.pack_kernel import quantize_pack
from mlx_qkvshare.quantize import QuantizedTensor, quantize
from mlx_qkvshare.spec import TensorPlan

BITS, GROUPS, DIMS = (2, 3, 4, 5, 6, 8), (32, 64, 128), (64, 80, 96, 128, 192, 256)


def plan(head_dim: int, bits: int, group: int) -> TensorPlan:
    return TensorPlan(head_dim, bits, group, -(-head_dim // group) * group)


def on_cpu(x: mx.array, plan: TensorPlan) -> QuantizedTensor:
    """The reference; on a Mac, too, where MLX's Metal kernel follows another rule for negative groups."""
    with mx.stream(mx.cpu):
        packed = quantize(x, plan)
        mx.eval(*packed.arrays)
    return packed


def assert_same(found: QuantizedTensor, wanted: QuantizedTensor) -> None:
    for got, expected in zip(found.arrays, wanted.arrays, strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert mx.array_equal(got, expected).item()


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_quick(engine, bits: int) -> None:
    x = normal(1, 2, 5, 80)
    assert_same(quantize_pack(x, plan(80, bits, 32)), on_cpu(x, plan(80, bits, 32)))


@pytest.mark.metal
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("head_dim", "group"), [*zip(DIMS, GROUPS * 2, strict=True)], ids=str)
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_the_words_of_mx_quantize(engine, head_dim: int, bits: int, group: int) -> None:
    x = strided(normal(1, 2, 9, head_dim, seed=bits))
    assert_same(quantize_pack(x, plan(head_dim, bits, group)), on_cpu(x, plan(head_dim, bits, group)))


@pytest.mark.metal
@pytest.mark.parametrize("kind", ["negative", "positive", "constant", "zero", "tiny", "outlier"])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_groups_of_every_kind(engine, kind: str) -> None:
    x = normal(1, 2, 7, 64)
    x = {
        "negative": -mx.abs(x) - 0.5,
        "positive": mx.abs(x) + 0.5,
        "constant": mx.full(x.shape, -1.75),
        "zero": mx.zeros_like(x),
        "tiny": x * 1e-9,
        "outlier": mx.where(mx.arange(64) == 13, x * 1000, x),
    }[kind]
    mx.eval(x)
    for bits in (4, 8):
        assert_same(quantize_pack(x, plan(64, bits, 32)), on_cpu(x, plan(64, bits, 32)))


@pytest.mark.metal
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_half_precision_is_computed_in_float32(engine, dtype: mx.Dtype) -> None:
    """MLX's CPU rounds on the way in half precision; here the codes are those of the same values in float32."""
    x = normal(1, 2, 9, 128).astype(dtype)
    found, wanted = quantize_pack(x, plan(128, 4, 64)), on_cpu(x.astype(mx.float32), plan(128, 4, 64))
    assert mx.array_equal(found.packed, wanted.packed).item()
    for got, expected in zip(found.arrays[1:], wanted.arrays[1:], strict=True):
        assert mx.array_equal(got, expected.astype(dtype)).item()


@pytest.mark.metal
@pytest.mark.parametrize("bits", [3, 4, 6])
@pytest.mark.parametrize("engine", ["sim-random", "sim-race", "sim-asan"], indirect=True)
def test_no_race_no_overrun_nothing_unwritten(engine, bits: int) -> None:
    x = normal(1, 2, 3, 80)
    assert_same(quantize_pack(x, plan(80, bits, 64)), on_cpu(x, plan(80, bits, 64)))
    if engine.mode == "race":
        assert engine.report.traffic["rows"].read == x.nbytes + 2 * 3 * 48 * 4, (
            "each value once; the edge 48 times more"
        )
    assert engine.report.faults == () and np.isfinite(np.array(x)).all()
