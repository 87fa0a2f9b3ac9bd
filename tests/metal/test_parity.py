"""The kernel path from end to end, real caches in and attention out, against float64 over a product of settings.

`test_attend_part.py` tests one part at a time; here chains of segments are joined with private tails, for one session
and for several, seen through windows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import metalsim
import mlx.core as mx
import numpy as np
import oracle
import pytest
from core_helpers import make_manager, normal, store
from pairwise import pairwise
from test_attend_part import strided

from mlx_qkvshare import QuantSpec
from mlx_qkvshare.batch_cache import BatchLayerCache
from mlx_qkvshare.cascade_kernel import attend_with_kernel, attend_with_kernel_ops
from mlx_qkvshare.kernels import build_kernel
from mlx_qkvshare.layer_cache import LayerCache

HEADS = 2  # of keys and values
UNIT = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # what rounding the output changes at most
TOLERANCE = 2e-6  # of the largest output: all is summed in float32

FACTORS: dict[str, list[Any]] = {
    "dims": [(64, 64), (80, 96), (192, 128), (256, 256)],
    "bits": [(8, 3), (6, 2), (5, 5), (4, 8), (3, 6), (2, 4)],  # tails are the parts that are not packed
    "group": [32, 64, 128],
    "gqa": [1, 3, 8],
    "sessions": [1, 2, 8],
    "chain": [(1, 1000), (31, 257, 255), (33, 256, 32)],  # tokens that are read of each segment
    "more": [0, 5],  # tokens of the last segment behind its view
    "tail": [0, 1, 7, 300],  # private tokens before the new one
    "window": [None, 5, 290],
    "extras": ["", "sinks", "soft cap"],
    "dtype": ["float32", "float16", "bfloat16"],
    "layout": ["plain", "strided"],  # of the queries
}


class Case(NamedTuple):
    dims: tuple[int, int]
    bits: tuple[int, int]
    group: int
    gqa: int
    sessions: int
    chain: tuple[int, ...]
    more: int
    tail: int
    window: int | None
    extras: str
    dtype: str
    layout: str
    new: int = 1  # tokens whose queries attend; several are for one session only

    def __str__(self) -> str:
        return "-".join(str(value).replace(" ", "") for value in self)

    @property
    def options(self) -> dict[str, Any]:
        sinks = normal(HEADS * self.gqa, seed=6) if self.extras == "sinks" else None
        soft_cap = 0.8 if self.extras == "soft cap" else 0.0
        return {"scale": self.dims[0] ** -0.5, "sinks": sinks, "window": self.window, "soft_cap": soft_cap}


CASES = [Case(**case) for case in pairwise(FACTORS, tries=200)]
QUICK = CASES[:2]


class Problem(NamedTuple):
    queries: mx.array
    cache: LayerCache | BatchLayerCache
    caches: list[LayerCache]


def problem(case: Case) -> Problem:
    """Sessions over one chain; every other one reads its last segment only in part, and the tails differ in length."""
    spec = {"heads": HEADS, "k_dim": case.dims[0], "v_dim": case.dims[1], "dtype": case.dtype}
    manager = make_manager(QuantSpec(*case.bits, case.group), layers=1, **spec)
    prefix, start = None, 0
    for i, length in enumerate(case.chain):
        is_last = i == len(case.chain) - 1
        prefix = store(manager, range(start, start + length + case.more * is_last), prefix, seed=10 * i)
        start += length
    assert prefix is not None
    dtype, caches = getattr(mx, case.dtype), []
    for row in range(case.sessions):
        own = prefix.fork()
        if row % 2 == 0:
            own.truncate(start)
        (cache,) = manager.make_caches(own)
        count = case.tail + row % 3 + case.new
        keys, values = (
            normal(1, HEADS, count, dim, seed=50 + 2 * row + i, dtype=dtype) for i, dim in enumerate(case.dims)
        )
        cache.append(keys, values)
        mx.eval(cache.state)
        caches.append(cache)
    queries = normal(case.sessions, HEADS * case.gqa, case.new, case.dims[0], seed=5, dtype=dtype)
    if case.layout == "strided":
        queries = strided(queries)
    batch = BatchLayerCache(caches, {}, mx.array([cache.offset for cache in caches]))
    return Problem(queries, caches[0] if case.sessions == 1 else batch, caches)


def truth(
    queries: mx.array, cache: LayerCache, *, scale: float, sinks: Any, window: int | None, soft_cap: float
) -> Any:
    """[1, H, L, Dv] in float64 of one session, from packed words and raw rows."""
    parts = [(oracle.rows(kv.keys, n), oracle.rows(kv.values, n)) for kv, n in cache.parts()]
    if cache.tail_tokens:
        parts.append(tuple(map(oracle.to_numpy, cache.tail())))
    keys, values = (np.concatenate(column, axis=2) for column in zip(*parts, strict=True))
    # Queries are scaled in their own dtype, by MLX.
    rows = oracle.to_numpy(queries * scale)
    num_heads, num_queries = rows.shape[1:3]
    repeats = num_heads // keys.shape[1]
    scores = rows @ np.repeat(keys, repeats, axis=1).swapaxes(-1, -2)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    position, token = np.arange(cache.offset - num_queries, cache.offset)[:, None], np.arange(cache.offset)
    is_seen = (token <= position) & (token > position - (window or cache.offset))
    scores = np.where(is_seen, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(oracle.to_numpy(sinks)[None, :, None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, column], axis=-1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights[..., : cache.offset] @ np.repeat(values, repeats, axis=1)


def assert_right(case: Case, attend: Any = attend_with_kernel, *, given: Problem | None = None) -> None:
    given = given or problem(case)
    found = attend(given.queries, given.cache, **case.options)
    assert found.dtype == given.queries.dtype
    wanted = np.concatenate(
        [truth(given.queries[i : i + 1], cache, **case.options) for i, cache in enumerate(given.caches)]
    )
    allowed = TOLERANCE * np.abs(wanted).max() + UNIT[case.dtype] * np.abs(wanted)
    assert (np.abs(oracle.to_numpy(found) - wanted) <= allowed).all()


@pytest.mark.parametrize("case", QUICK, ids=str)
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_quick(engine, case: Case) -> None:
    assert_right(case)


@pytest.mark.metal
@pytest.mark.parametrize("case", CASES[len(QUICK) :], ids=str)
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_all_pairs_of_settings(engine, case: Case) -> None:
    assert_right(case)


# A few that take every way through: stacked tails and single ones, several queries, parts that only some see.
CHECKED = [
    Case((64, 64), (8, 4), 32, 3, 2, (33, 40), 5, 7, None, "sinks", "float32", "strided"),
    Case((64, 64), (4, 8), 32, 1, 3, (1, 40), 2, 0, 40, "soft cap", "bfloat16", "plain"),
    Case((80, 96), (3, 16), 32, 2, 1, (31, 12), 0, 4, 20, "", "float16", "plain", new=3),
    Case((64, 64), (16, 2), 64, 1, 2, (20,), 0, 260, None, "", "float32", "plain"),
]


@pytest.mark.parametrize("case", [*CASES, *CHECKED], ids=str)
def test_the_ops_twin(case: Case) -> None:
    assert_right(case._replace(dtype="float32"), attend_with_kernel_ops)


@pytest.mark.metal
@pytest.mark.parametrize("case", CHECKED, ids=str)
@pytest.mark.parametrize("engine", ["sim-race"], indirect=True)
def test_no_race(engine, case: Case) -> None:
    assert_right(case)
    assert all(report.faults == () for report in engine.session.reports)


@pytest.mark.metal
@pytest.mark.parametrize("case", CHECKED[2:3], ids=str)
@pytest.mark.parametrize("engine", ["sim-asan"], indirect=True)
def test_no_overrun(engine, case: Case) -> None:
    assert_right(case)


@pytest.mark.metal
@pytest.mark.parametrize("case", CHECKED[:1], ids=str)
def test_any_schedule(simulator: None, case: Case) -> None:
    """Even seeds mix lanes, odd ones whole simdgroups."""
    given = problem(case)
    for seed in range(10):
        build_kernel.cache_clear()
        with metalsim.install("random", available=True, seed=seed):
            assert_right(case, given=given)
    build_kernel.cache_clear()


@pytest.mark.parametrize("attend", [attend_with_kernel, attend_with_kernel_ops])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_a_session_without_a_tail(engine, attend: Any) -> None:
    """Its last tokens are those of the shared context, one of them at the end of the segment before."""
    case = Case((64, 64), (8, 8), 32, 2, 1, (20, 40), 0, 5, None, "sinks", "float32", "plain", new=3)
    given = problem(case)
    (cache,) = given.caches
    cache.trim(cache.tail_tokens + 38)
    assert cache.tail_tokens == 0 and cache.offset == 22
    assert_right(case, attend, given=given)
    assert_right(case._replace(window=2), attend, given=given)
