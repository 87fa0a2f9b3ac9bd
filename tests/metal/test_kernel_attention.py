"""The kernel path of attention, and sessions and batches on it, against float64 and against MLX's own operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import oracle
import pytest
from core_helpers import make_manager, normal, store
from reference import T

from mlx_qkvshare import (
    AgentBatch,
    AgentSession,
    HandoffCoordinator,
    QuantizedAttention,
    QuantSpec,
    Route,
    SharedKVCacheManager,
)
from mlx_qkvshare.batch_cache import BatchLayerCache
from mlx_qkvshare.cascade_kernel import attend_with_kernel, attend_with_kernel_ops
from mlx_qkvshare.layer_cache import LayerCache

KERNEL, OPS = QuantizedAttention(route=Route.KERNEL), QuantizedAttention(route=Route.DEQUANTIZE)


def grown(prefix: Any, manager: Any, tail: int, seed: int) -> LayerCache:
    (cache,) = manager.make_caches(prefix)
    if tail:
        cache.append(normal(1, 2, tail, 32, seed=seed), normal(1, 2, tail, 32, seed=seed + 1))
    mx.eval(cache.state)
    return cache


def truth(queries: np.ndarray, cache: LayerCache, sinks: Any, window: int | None = None) -> np.ndarray:
    position, token = np.arange(cache.offset - queries.shape[2], cache.offset)[:, None], np.arange(cache.offset)
    keys, values = [], []
    for kv, length in cache.parts():
        keys.append(oracle.rows(kv.keys, length))
        values.append(oracle.rows(kv.values, length))
    tail_keys, tail_values = cache.tail()
    return oracle.attention(
        queries,
        [*keys, oracle.to_numpy(tail_keys)],
        [*values, oracle.to_numpy(tail_values)],
        scale=0.2,
        mask=(token <= position) & (token > position - (window or cache.offset)),
        sinks=None if sinks is None else oracle.to_numpy(sinks),
    )


def assert_close(found: mx.array, expected: np.ndarray) -> None:
    assert np.abs(np.array(found, dtype=np.float64) - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.metal
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("tail", "num_queries"), [(1, 1), (7, 3), (300, 1)])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_one_session_over_segments_and_its_tail(engine, tail: int, num_queries: int, has_sinks: bool) -> None:
    manager = make_manager(QuantSpec(8, 4, 32), layers=1, heads=2)
    prefix = store(manager, range(40, 75), store(manager, range(40), seed=1), seed=9)
    prefix.truncate(70)  # a view that is shorter than its segment
    cache = grown(prefix, manager, tail, 20)
    queries, sinks = normal(1, 6, num_queries, 32, seed=5), normal(6, seed=6) if has_sinks else None
    found = attend_with_kernel(queries, cache, scale=0.2, sinks=sinks)
    assert_close(found, truth(np.array(queries), cache, sinks))


@pytest.mark.metal
@pytest.mark.parametrize("tails", [(1, 7, 16), (1, 300, 20)])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_sessions_of_a_batch_over_a_tree_of_segments(engine, tails: tuple[int, ...]) -> None:
    manager = make_manager(QuantSpec(4, 8, 32), layers=1, heads=2)
    root = store(manager, range(40), seed=1)
    branch, short = root.fork(), root.fork()
    branch = store(manager, range(100, 133), branch, seed=2)
    short.truncate(33)
    caches = [
        grown(p, manager, tail, 30 + i) for i, (p, tail) in enumerate(zip((root, branch, short), tails, strict=True))
    ]
    batch = BatchLayerCache(caches, {}, mx.array([c.offset for c in caches]))
    queries, sinks = normal(3, 4, 1, 32, seed=5), normal(4, seed=6)
    found = attend_with_kernel(queries, batch, scale=0.2, sinks=sinks)
    for row, cache in enumerate(caches):
        assert_close(found[row : row + 1], truth(np.array(queries[row : row + 1]), cache, sinks))


WINDOWS = {  # over segments of 40 and 35 tokens and a tail of 7: the launches that are needed
    1: 1,
    5: 1,
    7: 1,  # the whole tail
    8: 2,  # and one token before it
    20: 2,
    42: 2,  # the whole second segment
    43: 3,
    1000: 3,
}


@pytest.mark.parametrize("attend", [attend_with_kernel, attend_with_kernel_ops])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_a_window_reads_only_the_parts_that_it_touches(engine, attend: Any) -> None:
    manager = make_manager(QuantSpec(8, 4, 32), layers=1, heads=2)
    cache = grown(store(manager, range(40, 75), store(manager, range(40), seed=1), seed=9), manager, 7, 20)
    queries, sinks = normal(1, 6, 1, 32, seed=5), normal(6, seed=6)
    for window, launches in WINDOWS.items():
        if engine.session is not None:
            engine.session.reports.clear()
        found = attend(queries, cache, scale=0.2, sinks=sinks, window=window)
        assert_close(found, truth(np.array(queries), cache, sinks, window))
        if engine.session is not None and attend is attend_with_kernel:
            assert [report.kernel for report in engine.session.reports].count("attend_part") == launches, window


@pytest.mark.metal
@pytest.mark.parametrize("window", [4, 7, 9, 30, 44])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_a_window_over_several_queries(engine, window: int) -> None:
    """Each of the tail's last 3 tokens sees from another one on: in the tail, at its border, in a segment."""
    manager = make_manager(QuantSpec(8, 4, 32), layers=1, heads=2)
    cache = grown(store(manager, range(40, 75), store(manager, range(40), seed=1), seed=9), manager, 7, 20)
    queries = normal(1, 6, 3, 32, seed=5)
    found = attend_with_kernel(queries, cache, scale=0.2, sinks=None, window=window)
    assert_close(found, truth(np.array(queries), cache, None, window))


@pytest.mark.metal
@pytest.mark.parametrize("window", [3, 16, 45, 60])
@pytest.mark.parametrize("tails", [(1, 7, 16), (1, 300, 20)])
@pytest.mark.parametrize("engine", ["sim-fast", "gpu"], indirect=True)
def test_a_window_over_a_batch(engine, tails: tuple[int, ...], window: int) -> None:
    """Sessions at different lengths: what some of them no longer see others still do."""
    manager = make_manager(QuantSpec(4, 8, 32), layers=1, heads=2)
    root = store(manager, range(40), seed=1)
    branch = store(manager, range(100, 133), root.fork(), seed=2)
    caches = [
        grown(p, manager, tail, 30 + i)
        for i, (p, tail) in enumerate(zip((root, branch, root.fork()), tails, strict=True))
    ]
    batch = BatchLayerCache(caches, {}, mx.array([c.offset for c in caches]))
    queries, sinks = normal(3, 4, 1, 32, seed=5), normal(4, seed=6)
    found = attend_with_kernel(queries, batch, scale=0.2, sinks=sinks, window=window)
    for row, cache in enumerate(caches):
        assert_close(found[row : row + 1], truth(np.array(queries[row : row + 1]), cache, sinks, window))


@pytest.mark.metal
@pytest.mark.parametrize("engine", ["sim-race"], indirect=True)
def test_nothing_before_the_window_is_read(engine) -> None:
    manager = make_manager(QuantSpec(8, 4, 32), layers=1, heads=2)
    cache = grown(store(manager, range(40, 75), store(manager, range(40), seed=1), seed=9), manager, 7, 20)
    attend_with_kernel(normal(1, 6, 1, 32, seed=5), cache, scale=0.2, sinks=None, window=20)
    segment, tail, _ = engine.session.reports
    tokens = 20 - 7
    assert segment.traffic["keys"].read == tokens * 2 * 32, "a byte for every channel of both heads"
    assert segment.traffic["values"].read == tokens * 2 * 32 // 2
    assert tail.traffic["keys"].read == 7 * 2 * 32 * 4


PLAIN = QuantSpec(8, 4, 32)
IN_A_BASIS = QuantSpec(8, 4, 32, sink_tokens=4, is_rotated=True, is_centred=True)


def story(attention: QuantizedAttention, quant: QuantSpec = PLAIN) -> tuple[list[np.ndarray], dict[str, list[int]]]:
    """Prefill, seal, fork, handoff and decoding, alone and together: logits, and the tokens of every agent."""
    manager = SharedKVCacheManager(T.spec, quant)
    first, second = (AgentSession(name, T, manager, attention=attention) for name in ("first", "second"))
    logits, tokens = [], {}
    first.prefill([0, *range(60, 100)])
    first.seal()
    logits.append(np.array(first.score([31, 99, 250])))
    fork = first.fork("fork")
    logits.append(np.array(fork.score([7])))
    HandoffCoordinator(manager).request_handoff(first, second)
    logits.append(np.array(second.score([12, 13, 14, 15])))
    tokens["alone"] = [chunk.token for chunk in second.stream(max_tokens=3, ignore_eos=True)]
    with AgentBatch(manager, attention=attention) as batch:
        for session in (fork, second):
            batch.join(session, max_tokens=3, ignore_eos=True)
        for event in batch.stream():
            tokens.setdefault(event.session.name, []).append(event.chunk.token)
    manager.check_integrity(checksums=True)
    return logits, tokens


@pytest.mark.metal
@pytest.mark.parametrize("quant", [PLAIN, IN_A_BASIS], ids=str)
@pytest.mark.parametrize("engine", ["sim-fast", "sim-race", "gpu"], indirect=True)
def test_a_tiny_model_runs_through_the_kernels(engine, quant: QuantSpec) -> None:
    logits, tokens = story(KERNEL, quant)
    expected, expected_tokens = story(OPS, quant)
    for found, wanted in zip(logits, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert tokens == expected_tokens
    if engine.session is not None:
        assert {report.kernel for report in engine.session.reports} == {"attend_part", "merge_state"}


def test_without_a_metal_device_sessions_go_on_by_other_routes() -> None:
    """The router's words for it are tested beside `attend_part`."""
    if mx.metal.is_available():
        pytest.skip("there is a Metal device")
    logits, tokens = story(KERNEL)
    expected, expected_tokens = story(QuantizedAttention())
    assert all(np.array_equal(found, wanted) for found, wanted in zip(logits, expected, strict=True))
    assert tokens == expected_tokens
