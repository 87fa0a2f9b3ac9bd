"""Count mode: the instructions of small kernels are those that a reader counts."""

from __future__ import annotations

from collections import Counter

import counted
import metalsim
import mlx.core as mx
import pytest

THREADS = 64
# `out[i] = x[i]`: the index widened to 64 bits, and two addresses.
COPY = Counter({"load device": 1, "store device": 1, "address": 3})
# An expression of x, words and i, and what each thread executes more than a copy.
EXPRESSIONS: dict[str, tuple[str, dict[str, int]]] = {
    "copy": ("x[i]", {}),
    "multiply-add": ("x[i] * 3.0f + 1.0f", {"float": 1}),
    "unpack": ("float((words[i] >> 3) & 7u)", {"integer": 2, "convert": 1}),
    "half": ("float(half(x[i]))", {"convert": 2}),
    "four for a vector": ("dot(float4(x[i]) + 1.0f, float4(2, 3, 4, 5))", {"float": 8}),
    "special": ("exp(x[i]) / 3.0f", {"special": 2}),
    "simd": ("simd_max(x[i])", {"simd": 1}),
    "simdgroup shuffle": ("simd_shuffle_xor(x[i], 1)", {"simd": 1}),
    "choice": ("x[i] > 1.0f ? 2.0f : x[i]", {"compare": 2}),
    "maximum": ("max(x[i], 0.5f)", {"float": 1}),
    "64 bits": ("float(long(i) * long(words[i]))", {"wide": 1, "convert": 1, "address": 1}),
    "vector load": ("((const device float4*)x)[i / 4].y", {"integer": 1, "address": 1}),
}


def run(source: str) -> metalsim.Report:
    with metalsim.install("count") as session:
        kernel = mx.fast.metal_kernel(
            name="counted",
            input_names=["x", "words"],
            output_names=["out"],
            header="inline float twice(float v) {\n  return v + v;\n}",
            source=f"const uint i = thread_position_in_grid.x;\n{source}",
        )
        kernel(
            inputs=[mx.arange(THREADS, dtype=mx.float32), mx.arange(THREADS, dtype=mx.uint32)],
            output_shapes=[(THREADS,)],
            output_dtypes=[mx.float32],
            grid=(THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
        )
    return session.reports[-1]


@pytest.mark.metal
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_each_class(simulator: None, name: str) -> None:
    expression, more = EXPRESSIONS[name]
    expected = {kind: count * THREADS for kind, count in (COPY + Counter(more)).items()}
    assert run(f"out[i] = {expression};").instructions() == expected


def test_threadgroup_memory_and_barriers(simulator: None) -> None:
    report = run("threadgroup float t[64]; t[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); "
                 "out[i] = t[63 - i];")  # fmt: skip
    more = Counter({"store threadgroup": 1, "load threadgroup": 1, "barrier": 1, "integer": 1, "address": 3})
    assert report.instructions() == {kind: count * THREADS for kind, count in (COPY + more).items()}


def test_loops_count_as_often_as_they_run_and_functions_are_told_apart(simulator: None) -> None:
    """Thread i turns i times: 2,016 turns of all 64, of one addition, one step, one comparison and one branch each."""
    report = run("float v = x[i]; for (uint k = 0; k < i; k++) v = twice(v); out[i] = v;")
    turns = THREADS * (THREADS - 1) // 2
    entered = {"compare": THREADS, "branch": THREADS}  # does it turn at all
    expected = Counter({kind: count * THREADS for kind, count in COPY.items()}) + Counter(entered)
    expected += Counter({"float": turns, "integer": turns, "compare": turns, "branch": turns})
    assert report.instructions() == expected
    assert report.instructions("twice") == {"float": turns}


@pytest.mark.metal
@pytest.mark.parametrize(("bits", "sessions"), [(8, 1), (4, 8)])
def test_the_committed_counts_of_attend_part_are_those_of_today(simulator: None, bits: int, sessions: int) -> None:
    report, _ = counted.attend(128, bits, sessions, "count")
    each = sum(counted.per_value(report, 128).values())
    assert each == pytest.approx(counted.ATTEND[bits, sessions], abs=0.006), "write the new figure into counted.py"
    assert 2 <= counted.unpacking(report, 128) < 5, "an and, a conversion, and what shifts and loads there are"


@pytest.mark.metal
def test_the_committed_counts_of_mlx_are_those_of_this_mlx(simulator: None) -> None:
    report, _ = counted.attend_in_full(128, "count")
    assert sum(counted.per_value(report, 128).values()) == pytest.approx(counted.ATTEND_IN_FULL, abs=0.006)
    assert counted.matmuls(4) == pytest.approx(counted.MATMULS[4], abs=0.006)
