"""`quantize_pack` gives the words of `mx.quantize` on a CPU, also where MLX's own Metal kernel does not."""

from __future__ import annotations

from typing import Any

import metalsim
import mlx.core as mx
import numpy as np
import pytest
from core_helpers import normal
from test_attend_part import strided

from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.kernels import build_kernel
from mlx_qkvshare.pack_kernel import quantize_pack, quantize_pack_ops
from mlx_qkvshare.quantize import QuantizedTensor, dequantize, quantize
from mlx_qkvshare.spec import TensorPlan

BITS, GROUPS, DIMS = (2, 3, 4, 5, 6, 8), (32, 64, 128), (64, 80, 96, 128, 192, 256)


def plan(head_dim: int, bits: int, group: int) -> TensorPlan:
    return TensorPlan(head_dim, bits, group, -(-head_dim // group) * group)


def on_cpu(x: mx.array, plan: TensorPlan, **stages: Any) -> QuantizedTensor:
    """The reference; on a Mac, too, where MLX's Metal kernel follows another rule for negative groups."""
    with mx.stream(mx.cpu):
        packed = quantize_pack_ops(x, plan, **stages) if stages else quantize(x, plan)
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


# ----------------------------------------------------------------------------------- centring and rotation


def centre_of(x: mx.array) -> mx.array:
    return mx.mean(x.astype(mx.float32), axis=(0, 2))


def far_off_zero(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Rows with a mean in every channel of every head, and one channel that outweighs all others."""
    x = normal(*shape, seed=1) + 3 * normal(1, shape[1], 1, shape[3], seed=2)
    return mx.where(mx.arange(shape[3]) == 5, 20 * x, x).astype(dtype)


def assert_rotated_same(engine: Any, found: QuantizedTensor, wanted: QuantizedTensor) -> None:
    """The kernel's butterflies add the same terms in the same order as MLX's on a CPU, so nothing differs there.

    A GPU need not round every last bit alike: a value on the border of two codes may fall to the other side, and only
    there (float32 sums are off by 1e-6 of the largest value, a code is 1/255 of it or more: 1 in 1,000 at most).
    """
    if engine.session is not None:
        return assert_same(found, wanted)
    gaps = np.abs(np.array(codes(found)) - np.array(codes(wanted)))
    assert gaps.max() <= 1 and (gaps > 0).mean() <= 1e-3
    for got, expected in zip(found.arrays[1:], wanted.arrays[1:], strict=True):
        assert mx.allclose(got.astype(mx.float32), expected.astype(mx.float32), rtol=1e-2, atol=1e-5).item()


def codes(tensor: QuantizedTensor) -> mx.array:
    one, none = mx.ones(tensor.scales.shape), mx.zeros(tensor.scales.shape)
    return dequantize(QuantizedTensor(tensor.plan, mx.float32, tensor.packed, one, none))


STAGED = [
    (64, 32, 8, mx.float32),
    (64, 128, 4, mx.float16),
    (128, 64, 3, mx.bfloat16),
    (128, 128, 6, mx.float16),
    (256, 64, 2, mx.float32),
    (256, 128, 5, mx.bfloat16),
    (32, 64, 8, mx.float32),
    (16, 32, 4, mx.float16),
]


@pytest.mark.parametrize("stages", ["centred", "rotated", "both"])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_quick_stages(engine, stages: str) -> None:
    x = far_off_zero(1, 2, 5, 64)
    chosen = {"centre": None if stages == "rotated" else centre_of(x), "is_rotated": stages != "centred"}
    found, wanted = quantize_pack(x, plan(64, 4, 32), **chosen), on_cpu(x, plan(64, 4, 32), **chosen)
    assert_rotated_same(engine, found, wanted)


@pytest.mark.metal
@pytest.mark.parametrize(("head_dim", "group", "bits", "dtype"), STAGED, ids=str)
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_centred_and_rotated_rows(engine, head_dim: int, group: int, bits: int, dtype: mx.Dtype) -> None:
    """Of strided views, in every dtype; 32 and 16 are padded to a group by the last channel of the rotated row."""
    x = strided(far_off_zero(1, 3, 9, head_dim, dtype=dtype))
    chosen = {"centre": centre_of(x), "is_rotated": True}
    packing = plan(head_dim, bits, group)
    assert_rotated_same(engine, quantize_pack(x, packing, **chosen), on_cpu(x, packing, **chosen))


@pytest.mark.metal
@pytest.mark.parametrize("head_dim", [80, 96])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_any_head_dim_is_centred(engine, head_dim: int) -> None:
    x = strided(far_off_zero(1, 2, 5, head_dim, dtype=mx.float16))
    packing = plan(head_dim, 4, 64)
    assert_same(quantize_pack(x, packing, centre=centre_of(x)), on_cpu(x, packing, centre=centre_of(x)))


@pytest.mark.metal
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_fewer_than_8_elements(engine, tokens: int) -> None:
    """MLX puts such inputs into another address space, each of the two for itself: the centre of 4, or both."""
    x = far_off_zero(1, 1, tokens, 4)
    for chosen in ({}, {"centre": centre_of(x), "is_rotated": True}):
        found, wanted = quantize_pack(x, plan(4, 8, 32), **chosen), on_cpu(x, plan(4, 8, 32), **chosen)
        assert_rotated_same(engine, found, wanted)


def test_the_stages_do_what_they_say() -> None:
    """Against float64: the centre comes off first, the rotation keeps lengths, and outliers are spread by it."""
    x = far_off_zero(1, 2, 64, 64)
    matrix = np.ones((1, 1))
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.sqrt(2)
    wanted = (np.array(x, np.float64) - np.array(centre_of(x), np.float64)[:, None]) @ matrix
    packed = on_cpu(x, plan(64, 8, 64), centre=centre_of(x), is_rotated=True)
    step = np.array(mx.max(mx.abs(packed.scales)))
    assert np.abs(np.array(dequantize(packed)) - wanted).max() <= step, "half of it, but for the last code of a group"

    def error(found: QuantizedTensor, back: np.ndarray) -> float:
        rows = np.array(dequantize(found), np.float64) @ back + np.array(centre_of(x), np.float64)[:, None]
        return float(np.abs(rows - np.array(x)).mean())

    plain = np.abs(np.array(dequantize(on_cpu(x, plan(64, 4, 64)))) - np.array(x)).mean()
    centred = error(on_cpu(x, plan(64, 4, 64), centre=centre_of(x)), np.eye(64))
    rotated = error(on_cpu(x, plan(64, 4, 64), centre=centre_of(x), is_rotated=True), matrix)
    assert rotated < centred < plain


def test_what_cannot_be_rotated_or_centred_is_refused() -> None:
    x = normal(1, 2, 3, 80)
    for pack in (quantize_pack, quantize_pack_ops):
        with pytest.raises(InvalidValueError, match="power of two for the Hadamard rotation, got 80"):
            pack(x, plan(80, 4, 32), is_rotated=True)
        with pytest.raises(InvalidValueError, match=r"centre: expected .* \(2, 80\), got \(80,\)"):
            pack(x, plan(80, 4, 32), centre=mx.zeros(80))


# ------------------------------------------------------------------------------------------------- safety


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
        assert engine.report.barriers == 0, "stages that are not asked for cost nothing"
    assert engine.report.faults == () and np.isfinite(np.array(x)).all()


@pytest.mark.metal
@pytest.mark.parametrize(("head_dim", "group"), [(16, 32), (128, 32), (64, 128)])
@pytest.mark.parametrize("engine", ["sim-race", "sim-asan"], indirect=True)
def test_no_race_no_overrun_in_the_stages(engine, head_dim: int, group: int) -> None:
    x = far_off_zero(1, 2, 3, head_dim)
    chosen = {"centre": centre_of(x), "is_rotated": True}
    found, wanted = quantize_pack(x, plan(head_dim, 4, group), **chosen), on_cpu(x, plan(head_dim, 4, group), **chosen)
    assert_same(found, wanted)
    assert engine.report.faults == ()


@pytest.mark.metal
def test_any_schedule(simulator: None) -> None:
    """Even seeds mix lanes, odd ones whole simdgroups."""
    x = far_off_zero(1, 2, 3, 128)
    chosen = {"centre": centre_of(x), "is_rotated": True}
    wanted = on_cpu(x, plan(128, 4, 32), **chosen)
    for seed in range(12):
        build_kernel.cache_clear()
        with metalsim.install("random", available=True, seed=seed):
            assert_same(quantize_pack(x, plan(128, 4, 32), **chosen), wanted)
    build_kernel.cache_clear()
