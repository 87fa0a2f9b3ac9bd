"""`attend_part` against float64, on every engine: what it computes, what it reads, and that nothing races."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import oracle
import pytest
from core_helpers import normal
from pairwise import pairwise

from mlx_qkvshare import QuantizedAttention, Route
from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.kernels import build_kernel
from mlx_qkvshare.part_kernel import THREADGROUP_BYTES, TilePlan, attend_part, attend_part_ops
from mlx_qkvshare.quantize import QuantizedTensor, quantize
from mlx_qkvshare.spec import FULL_PRECISION_BITS, TensorPlan

TOLERANCE = 2e-6  # of the largest output; everything is summed in float32, whatever the dtype of the inputs

FACTORS: dict[str, list[Any]] = {
    "dims": [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128)],
    "k_bits": [8, 6, 4, 3, 2, 16],
    "v_bits": [8, 6, 4, 3, 2, 16],
    "group": [32, 64, 128],
    "gqa": [1, 2, 3, 8],
    "sessions": [1, 2, 8],
    "length": [1, 31, 32, 33, 255, 256, 257, 1000],
    "more": [0, 5],  # tokens of the segment behind the view
    "dtype": [mx.float32, mx.float16, mx.bfloat16],
    "layout": ["plain", "strided"],
}


class Case(NamedTuple):
    dims: tuple[int, int]
    k_bits: int
    v_bits: int
    group: int
    gqa: int
    sessions: int
    length: int
    more: int
    dtype: mx.Dtype
    layout: str

    def __str__(self) -> str:
        k, v = self.dims
        return (
            f"D{k}.{v}-K{self.k_bits}V{self.v_bits}g{self.group}-gqa{self.gqa}-n{self.sessions}-T{self.length}+{self.more}"
            f"-{str(self.dtype).split('.')[-1]}-{self.layout}"
        )


CASES = [Case(**values) for values in pairwise(FACTORS)]  # the whole product would be 500,000
QUICK = CASES[:6]


class Problem(NamedTuple):
    rows: mx.array
    keys: QuantizedTensor
    values: QuantizedTensor
    spans: mx.array
    num_tokens: int


def strided(array: mx.array) -> mx.array:
    """The same values [1, Hk, T, W] as a view into a larger array that has the tokens before the heads."""
    wide = mx.pad(array.swapaxes(1, 2), [(0, 0), (2, 1), (0, 1), (0, 3)])
    mx.eval(wide)
    view = wide[:, 2:-1, :-1, :-3].swapaxes(1, 2)
    mx.eval(view)
    return view


def tensor(head_dim: int, bits: int, case: Case, seed: int) -> QuantizedTensor:
    padded = head_dim if bits == FULL_PRECISION_BITS else -(-head_dim // case.group) * case.group
    plan = TensorPlan(head_dim, bits, case.group, padded)
    x = normal(1, 2, case.length + case.more, head_dim, seed=seed).astype(case.dtype)
    packed = quantize(x, plan)
    if case.layout == "strided":
        packed = QuantizedTensor(plan, packed.dtype, *map(strided, packed.arrays))
    mx.eval(*packed.arrays)
    return packed


def problem(case: Case) -> Problem:
    """Rows that see spans of their own: most all of the view, some less, one nothing."""
    count = case.gqa * case.sessions
    rows = (normal(1, 2, count, case.dims[0], seed=3) * case.dims[0] ** -0.5).astype(case.dtype)
    spans = [[0, case.length] for _ in range(count)]
    if count > 2:
        spans[1] = [case.length // 3, case.length]
        spans[2] = [0, max(1, case.length // 2)]
    if count > 8:
        spans[8] = [0, 0]
    keys, values = tensor(case.dims[0], case.k_bits, case, 1), tensor(case.dims[1], case.v_bits, case, 2)
    return Problem(rows, keys, values, mx.array([spans], mx.int32), case.length)


def expected(given: Problem, soft_cap: float = 0.0) -> np.ndarray:
    """[B, Hk, M, Dv] in float64, from the packed words; rows that see nothing are 0."""
    keys, values = (oracle.rows(t, given.num_tokens) for t in (given.keys, given.values))
    scores = oracle.to_numpy(given.rows) @ keys.swapaxes(-1, -2)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    spans, token = np.array(given.spans)[:, None], np.arange(given.num_tokens)
    is_seen = (token >= spans[..., :1]) & (token < spans[..., 1:])
    weights = np.where(is_seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return weights @ values / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def joined(partial: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The splits of a partial, merged in float64 and normalized; rows without a token are 0."""
    maxima, sums, outputs = (np.array(a, dtype=np.float64) for a in partial)
    weights = np.where(sums > 0, np.exp(np.where(sums > 0, maxima, -np.inf) - maxima.max(0)), 0)
    total = (weights * sums).sum(0)[:, None]
    return ((weights[..., None] * outputs).sum(0) / np.maximum(total, 1e-300)).reshape(shape)


def assert_right(partial: Any, truth: np.ndarray) -> None:
    assert np.abs(joined(partial, truth.shape) - truth).max() <= TOLERANCE * np.abs(truth).max()


def run(given: Problem, **options: Any) -> Any:
    partial = attend_part(*given, **options)
    mx.eval(*partial)
    return partial


@pytest.mark.parametrize("case", QUICK, ids=str)
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_quick(engine, case: Case) -> None:
    given = problem(case)
    assert_right(run(given), expected(given))


@pytest.mark.metal
@pytest.mark.parametrize("case", CASES[len(QUICK) :], ids=str)
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_all_pairs_of_settings(engine, case: Case) -> None:
    given = problem(case)
    assert_right(run(given), expected(given))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ops_twin(case: Case) -> None:
    given = problem(case._replace(dtype=mx.float32))
    assert_right(attend_part_ops(*given), expected(given))


# A few that have everything: two groups of rows, words that codes cross, plain and strided, one token.
CHECKED = [
    Case((64, 64), 8, 8, 64, 3, 8, 70, 5, mx.float32, "plain"),
    Case((96, 64), 3, 6, 32, 2, 2, 33, 0, mx.float16, "strided"),
    Case((128, 128), 4, 2, 64, 8, 8, 40, 1, mx.bfloat16, "plain"),
    Case((80, 128), 16, 4, 32, 1, 1, 1, 0, mx.float32, "plain"),
    Case((256, 256), 6, 8, 128, 3, 8, 31, 0, mx.float32, "strided"),
]


@pytest.mark.metal
@pytest.mark.parametrize("case", CHECKED, ids=str)
@pytest.mark.parametrize("engine", ["sim-random", "sim-race", "sim-asan"], indirect=True)
def test_no_race_no_overrun_nothing_unwritten(engine, case: Case) -> None:
    given = problem(case)
    assert_right(run(given), expected(given))
    assert engine.report.faults == ()


@pytest.mark.metal
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_a_soft_cap(engine, soft_cap: float) -> None:
    given = problem(CHECKED[0])
    assert_right(run(given, soft_cap=soft_cap), expected(given, soft_cap))
    assert_right(attend_part_ops(*given, soft_cap=soft_cap), expected(given, soft_cap))


@pytest.mark.metal
@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("engine", ["sim-race"], indirect=True)
def test_packed_bytes_are_read_once_for_all_rows(engine, sessions: int) -> None:
    case = Case((64, 64), 8, 8, 64, 3, sessions, 300, 0, mx.float32, "plain")
    given = problem(case)
    run(given)
    for name in ("keys", "values"):
        assert engine.report.traffic[name].read == engine.report.traffic[name].size
        for part in ("scales", "biases"):
            traffic = engine.report.traffic[f"{name[:-1]}_{part}"]
            assert traffic.read == traffic.size


@pytest.mark.parametrize("k_bits", [2, 3, 4, 5, 6, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_a_threadgroup_fits_for_any_number_of_rows(head_dim: int, k_bits: int) -> None:
    plan = TensorPlan(head_dim, k_bits, 32, -(-head_dim // 32) * 32)
    for num_rows in (1, 3, 8, 24, 64, 200):
        tile = TilePlan.choose(plan, plan, num_rows)
        assert tile.threadgroup_bytes <= THREADGROUP_BYTES and tile.rows % tile.blocks == 0
        assert tile.rows >= min(num_rows, 16), "a GQA group of 16 is never split"
        assert 32 * tile.simdgroups >= -(-head_dim // 4) * tile.blocks, "every column of every block has its thread"


@pytest.mark.parametrize("engine", ["sim-fast"], indirect=True)
def test_the_plan_counts_the_threadgroup_memory_that_the_kernel_takes(engine) -> None:
    given = problem(CHECKED[0])
    run(given)
    tile = TilePlan.choose(given.keys.plan, given.values.plan, given.rows.shape[2])
    assert engine.report.threadgroup_bytes == tile.threadgroup_bytes


def test_without_a_metal_device_the_router_says_so_and_goes_on() -> None:
    if mx.metal.is_available():
        pytest.skip("there is a Metal device")
    attention = QuantizedAttention(route=Route.KERNEL)
    for decision in (
        attention.decide(1, 3, num_tokens=512),
        attention.decide(100, 3, num_tokens=512),
        attention.decide_batch(8, 3, num_tokens=512),
    ):
        assert decision.route is not Route.KERNEL and "no Metal device" in str(decision)


def test_a_kernel_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidValueError, match="nowhere"):
        build_kernel("nowhere", ("x",), ("y",))
