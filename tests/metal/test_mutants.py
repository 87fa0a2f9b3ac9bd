"""Faults planted in one kernel, each caught by the mode that is there for it: the tests of the checkers."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import gqa_decode
import metalsim
import mlx.core as mx
import numpy as np
import pytest
from engines import ENGINES, Engine
from metalsim import CompileError, FaultKind, KernelFault

pytestmark = pytest.mark.metal

PUBLISH_STATES = "threadgroup_barrier(mem_flags::mem_threadgroup);  // publish the states"
PUBLISH_OUTPUTS = "threadgroup_barrier(mem_flags::mem_threadgroup);  // publish the partial outputs"
BEFORE_REUSE = "threadgroup_barrier(mem_flags::mem_threadgroup);  // before the next head reuses them"
FIRST_STATEMENT = "const uint lane = thread_index_in_simdgroup;"
COMBINE = "for (int d = thread_index_in_threadgroup; d < D; d += S * 32) {"
OUTPUT = "out[(head * G + g) * D + d]"


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` in the kernel's text becomes `new`, and `mode` finds `kind` on `variable`."""

    name: str
    mode: metalsim.Mode
    kind: FaultKind
    variable: str
    old: str
    new: str

    @property
    def source(self) -> str:
        return planted(self.old, self.new)


def planted(old: str, new: str) -> str:
    assert gqa_decode.SOURCE.count(old) >= 1, old
    return gqa_decode.SOURCE.replace(old, new)


def added(statement: str) -> tuple[str, str]:
    return FIRST_STATEMENT, f"{FIRST_STATEMENT}\n{statement}"


RACE, BOUNDS, DIVERGENCE = FaultKind.DATA_RACE, FaultKind.OUT_OF_BOUNDS, FaultKind.DIVERGENCE
MUTANTS = [
    # Ordering: only race mode sees all of these.
    Mutant("states not published", "race", RACE, "shared_max", PUBLISH_STATES, ""),
    Mutant("outputs not published", "race", RACE, "shared_out", PUBLISH_OUTPUTS, ""),
    Mutant("reuse without a barrier", "race", RACE, "shared_out", BEFORE_REUSE, ""),
    Mutant(
        "barrier that orders no memory",
        "race",
        RACE,
        "shared_out",
        PUBLISH_OUTPUTS,
        "threadgroup_barrier(mem_flags::mem_none);",
    ),
    Mutant(
        "barrier of the wrong memory",
        "race",
        RACE,
        "shared_out",
        PUBLISH_OUTPUTS,
        "threadgroup_barrier(mem_flags::mem_device);",
    ),
    Mutant(
        "simdgroup barrier for a threadgroup barrier",
        "race",
        RACE,
        "shared_out",
        PUBLISH_OUTPUTS,
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
    ),
    Mutant("every simdgroup writes the output", "race", RACE, "out", COMBINE, "for (int d = lane; d < D; d += 32) {"),
    Mutant("every threadgroup writes head 0", "race", RACE, "out", OUTPUT, "out[g * D + d]"),
    # Addresses.
    Mutant("one token too many", "race", BOUNDS, "keys", "token < num_tokens", "token <= num_tokens"),
    Mutant("one head too many, read", "fast", BOUNDS, "keys", "size_t(head) * num", "size_t(head + 64) * num"),
    Mutant("one head too many, written", "fast", BOUNDS, "out", OUTPUT, "out[((head + 64) * G + g) * D + d]"),
    Mutant("one element too many, written", "asan", BOUNDS, "out", OUTPUT, "out[(head * G + g) * D + d + 1]"),
    Mutant("one element before the output", "race", BOUNDS, "out", OUTPUT, "out[int((head * G + g) * D + d) - 1]"),
    Mutant("one state too many", "race", BOUNDS, "shared_sum", "lane < S ? shared_sum", "lane <= S ? shared_sum"),
    Mutant("threadgroup array overrun", "race", BOUNDS, "shared_out", "PER_LANE + i] =", "PER_LANE + i + 1] ="),
    Mutant("threadgroup array overrun, ASan", "asan", BOUNDS, "", "PER_LANE + i] =", "PER_LANE + i + 1] ="),
    Mutant("private array overrun", "asan", BOUNDS, "", "total[g] = 0.0f;", "total[g + 1] = 0.0f;"),
    Mutant(
        "misaligned vector load",
        "race",
        FaultKind.MISALIGNED,
        "queries",
        "query[g][i] = scale * float(row[i]);",
        "query[g][i] = (*(const device float4*)(queries + 1))[i];",
    ),
    Mutant(
        "misaligned vector load, UBSan",
        "asan",
        FaultKind.MISALIGNED,
        "",
        "query[g][i] = scale * float(row[i]);",
        "query[g][i] = (*(const device float4*)(queries + 1))[i];",
    ),
    # Control flow: every mode sees these.
    Mutant(
        "barrier in a divergent branch", "fast", DIVERGENCE, "", PUBLISH_OUTPUTS, "if (lane < 16) " + PUBLISH_OUTPUTS
    ),
    Mutant("early return", "fast", DIVERGENCE, "", PUBLISH_STATES, "if (simdgroup == 3) return; " + PUBLISH_STATES),
    Mutant(
        "simd_sum in a divergent branch",
        "fast",
        DIVERGENCE,
        "",
        "score = simd_sum(score);",
        "if (lane < 30) score = simd_sum(score);",
    ),
    Mutant("uneven loop", "random", DIVERGENCE, "", "token < num_tokens", "token < num_tokens - int(lane == 5)"),
    Mutant("shuffle from lane 32", "fast", FaultKind.INACTIVE_LANE, "", "ushort(simdgroup)", "ushort(simdgroup + 29)"),
    Mutant("endless loop", "fast", FaultKind.TIMEOUT, "", "token += S", "token += 0"),
    # Contents.
    Mutant(
        "a state is not published",
        "race",
        FaultKind.UNINITIALISED_READ,
        "shared_max",
        "if (lane == 0) {",
        "if (lane == 0 && simdgroup != 2) {",
    ),
    Mutant(
        "an output element is not written",
        "race",
        FaultKind.UNWRITTEN_OUTPUT,
        "out",
        "d = thread_index",
        "d = 1 + thread_index",
    ),
    *(
        Mutant(f"an input is written, {mode}", mode, FaultKind.WRITE_TO_INPUT, "queries", *added(statement))
        for mode in metalsim.MODES
        for statement in ("((device T*)queries)[lane] = T(0);",)
    ),
    Mutant(
        "too much threadgroup memory",
        "fast",
        FaultKind.OVER_LIMIT,
        "more",
        *added("threadgroup float more[8192]; more[lane] = 0.0f;"),
    ),
]
INVALID = [
    ("double", *added("double wide = 1.0;"), "double"),
    ("C library call", "fast::exp(score - new_maximum)", "expm1(score - new_maximum)", "expm1"),
    ("unknown attribute", "thread_index_in_simdgroup", "lane_index_in_simdgroup", "lane_index_in_simdgroup"),
    ("write to constant memory", *added("((const constant int*)keys_shape)[0] = 3;"), "read-only|const"),
    ("device pointer as threadgroup pointer", *added("threadgroup T* wrong = out;"), "threadgroup float"),
    ("initialised threadgroup variable", *added("threadgroup float wrong[2] = {0, 0};"), "wrong"),
    ("ambiguous call", "max(maximum[g], score)", "max(maximum[g], 1)", "ambiguous"),
    ("vector of the wrong length", *added("float4 wrong = float4(1.0f, 2.0f, 3.0f);"), "wrong number of elements"),
]
UNSOUND = [
    ("pointer without address space", mx.float32, *added("T* wrong = out; wrong[0] = T(1);"), "thread float"),
    (
        "implicit conversion to bfloat",
        mx.bfloat16,
        "total[g] = 0.0f;",
        "T wrong = query[0][0]; total[g] = wrong;",
        "bfloat",
    ),
    ("uninitialised variable", mx.float32, "float score = 0.0f;", "float score;", "uninitialized"),
    ("index past the end", mx.float32, "total[g] = 0.0f;", "total[G] = 0.0f;", "past the end"),
]
WRONG_VALUES = [
    ("sum not rescaled", "partial[g][i] * rescale +", "partial[g][i] +"),
    ("order of codes", "(value_codes >> (4 * i))", "(value_codes >> (4 * (i ^ 1)))"),
    ("private variable not initialised", "float score = 0.0f;", "float score;"),
]


@functools.cache
def inputs_and_reference(dtype: mx.Dtype = mx.float32) -> tuple[list[mx.array], np.ndarray]:
    inputs = gqa_decode.example(heads=2, groups=3, tokens=67, head_dim=128, dtype=dtype)
    return inputs, np.array(gqa_decode.reference(inputs))


def error(source: str) -> float:
    """Largest difference from the reference; infinite where the output is not a number."""
    inputs, reference = inputs_and_reference()
    difference = np.abs(np.array(gqa_decode.decode(inputs, source)) - reference)
    return float(np.nan_to_num(difference, nan=np.inf).max())


def test_kernel_without_a_fault_is_clean(engine: Engine) -> None:
    assert error(gqa_decode.SOURCE) < 1e-6


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_kernel_without_a_fault_passes_the_static_pass(simulator: None, dtype: mx.Dtype) -> None:
    assert static_complaints(gqa_decode.SOURCE, dtype) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_is_found(simulator: None, mutant: Mutant) -> None:
    with metalsim.install(mutant.mode, seconds=2), pytest.raises(KernelFault) as caught:
        error(mutant.source)
    found = [fault for fault in caught.value.report.faults if fault.kind is mutant.kind]
    assert found, caught.value
    assert not mutant.variable or mutant.variable in {fault.variable for fault in found}, caught.value
    assert "[gqa_decode]" in str(caught.value)
    has_no_line = mutant.kind is FaultKind.UNWRITTEN_OUTPUT or mutant.name == "an input is written, asan"
    assert has_no_line or any(fault.line and fault.code for fault in found), caught.value
    if mutant.mode == "asan" and not has_no_line:
        assert any(fault.code not in gqa_decode.SOURCE for fault in found), caught.value  # the changed line itself


@pytest.mark.parametrize(("name", "old", "new", "message"), INVALID, ids=[case[0] for case in INVALID])
def test_invalid_metal_is_refused(simulator: None, name: str, old: str, new: str, message: str) -> None:
    with metalsim.install("fast"), pytest.raises(CompileError, match=rf"\[gqa_decode\].*(?:{message})"):
        error(planted(old, new))


def static_complaints(source: str, dtype: mx.Dtype) -> list[str]:
    queries, *rest = inputs_and_reference(dtype)[0]
    kernel = metalsim.MetalKernel("gqa_decode", gqa_decode.INPUTS, ["out"], source)
    call: dict[str, Any] = {"grid": (128, 2, 1), "threadgroup": (128, 1, 1)}
    call |= {"output_shapes": [queries.shape], "output_dtypes": [dtype]}
    call["template"] = [("T", dtype), ("D", 128), ("G", 3), ("S", gqa_decode.SIMDGROUPS)]
    return metalsim.complaints(kernel.source(inputs=[queries, *rest], **call))


@pytest.mark.parametrize(("name", "dtype", "old", "new", "message"), UNSOUND, ids=[case[0] for case in UNSOUND])
def test_static_pass_complains(simulator: None, name: str, dtype: mx.Dtype, old: str, new: str, message: str) -> None:
    found = static_complaints(planted(old, new), dtype)
    assert any(re.search(message, line) for line in found), found


@pytest.mark.parametrize(("name", "old", "new"), WRONG_VALUES, ids=[case[0] for case in WRONG_VALUES])
def test_values_are_wrong(simulator: None, name: str, old: str, new: str) -> None:
    with metalsim.install("fast"):
        assert error(planted(old, new)) > 1e-3


def test_random_schedules_find_what_one_schedule_does_not(simulator: None) -> None:
    source = planted(BEFORE_REUSE, "")
    with metalsim.install("fast"):
        assert error(source) < 1e-6
    errors = []
    for seed in range(8):
        with metalsim.install("random", seed=seed):
            errors.append(error(source))
    assert max(errors) > 1e-3


# ------------------------------------------------------------- small kernels, right and then broken by one word

THROUGH_DEVICE_MEMORY = """
  const uint i = thread_position_in_threadgroup.x;
  out[i] = x[i];
  threadgroup_barrier(mem_flags::mem_device);
  copy[i] = out[63 - i];
"""
WITHIN_A_SIMDGROUP = """
  threadgroup float shared[64];
  const uint i = thread_position_in_threadgroup.x;
  shared[i] = x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[i ^ 31];
  copy[i] = out[i];
"""
HELPER = "template <typename T> T first(const device T* values) { return values[0]; }"


def copied(source: str, size: int = 64, header: str = "", threads: int = 64) -> list[mx.array]:
    kernel = mx.fast.metal_kernel("copied", ["x"], ["out", "copy"], source, header)
    call: dict[str, Any] = {"grid": (threads, 1, 1), "threadgroup": (threads, 1, 1)}
    return kernel(
        inputs=[mx.arange(size).astype(mx.float32)],
        output_shapes=[(64,), (64,)],
        output_dtypes=[mx.float32] * 2,
        **call,
    )


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        (THROUGH_DEVICE_MEMORY, "mem_device", "mem_threadgroup"),
        (WITHIN_A_SIMDGROUP, "simdgroup_barrier(mem_flags::mem_threadgroup)", "simdgroup_barrier(mem_flags::mem_none)"),
        (WITHIN_A_SIMDGROUP, "i ^ 31", "i & 31"),
    ],
    ids=["device memory", "simdgroup barrier", "across simdgroups"],
)
def test_barriers_order_what_they_name_and_no_more(simulator: None, source: str, right: str, wrong: str) -> None:
    with metalsim.install("race"):
        copied(source)
        with pytest.raises(KernelFault) as caught:
            copied(source.replace(right, wrong))
    assert FaultKind.DATA_RACE in caught.value.kinds


HISTOGRAM = """
  const uint i = thread_position_in_grid.x;
  atomic_fetch_add_explicit(&out[uint(x[i]) % 4], 1.0f, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_device);
  if (i < 4) atomic_fetch_add_explicit(&out[4], 1.0f, memory_order_relaxed);
"""


def histogram(source: str, init_value: float | None = 0.0) -> list[float]:
    kernel = mx.fast.metal_kernel("histogram", ["x"], ["out"], source, atomic_outputs=True)
    (out,) = kernel(
        inputs=[mx.arange(64).astype(mx.float32)],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(5,)],
        output_dtypes=[mx.float32],
        init_value=init_value,
    )
    return out.tolist()


def test_atomics_race_with_plain_accesses_only(simulator: None) -> None:
    plain = HISTOGRAM.replace("threadgroup_barrier(mem_flags::mem_device)", "((device float*)out)[2] += 1.0f")
    with metalsim.install("race"):
        assert histogram(HISTOGRAM) == [16.0, 16.0, 16.0, 16.0, 4.0]
        with pytest.raises(KernelFault) as uninitialised:
            histogram(HISTOGRAM, init_value=None)
        with pytest.raises(KernelFault) as race:
            histogram(plain)
    assert uninitialised.value.kinds == {FaultKind.UNINITIALISED_READ}
    assert race.value.kinds == {FaultKind.DATA_RACE}
    atomic = "atomic_fetch_add_explicit(&out[uint(x[i]) % 4], 1.0f, memory_order_relaxed);"
    assert atomic in {code for fault in race.value.report.faults for code in (fault.code, fault.other_code)}


@pytest.mark.parametrize("space", ["thread", "threadgroup"])
def test_memory_is_nan_until_it_is_written(simulator: None, space: str) -> None:
    # No element of x is negative, so nothing is written.
    body = f"const uint i = thread_position_in_grid.x; {space} float sums[64]; if (x[i] < 0.0f) sums[i] = 0.0f;"
    with metalsim.install("fast"):
        out, copy = copied(body + " out[i] = sums[i];")
    assert mx.isnan(out).all() and mx.isnan(copy).all()


def test_simdgroup_operations_of_two_lines_do_not_meet(simulator: None) -> None:
    together = "const uint i = thread_position_in_grid.x; out[i] = simd_sum(x[i]); copy[i] = 0;"
    apart = together.replace("simd_sum(x[i])", "i % 2 ? simd_sum(x[i])\n : simd_sum(x[i])")
    with metalsim.install("fast"):
        assert copied(together)[0].tolist() == [496.0] * 32 + [1520.0] * 32
        with pytest.raises(KernelFault) as caught:
            copied(apart)
    assert caught.value.kind is FaultKind.DIVERGENCE


def test_a_race_names_both_lines_and_a_thread(simulator: None) -> None:
    with metalsim.install("race"), pytest.raises(KernelFault) as caught:
        copied(THROUGH_DEVICE_MEMORY.replace("mem_device", "mem_none"))
    (fault,) = caught.value.report.faults
    assert (fault.variable, fault.code, fault.other_code) == ("out", "copy[i] = out[63 - i];", "out[i] = x[i];")
    assert fault.line.startswith("copied.metal:") and fault.thread is not None


def test_a_small_input_is_in_constant_memory(simulator: None) -> None:
    body = "out[thread_position_in_grid.x] = first(x); copy[thread_position_in_grid.x] = 0;"
    with metalsim.install("fast"):
        assert copied(body, size=8, header=HELPER)[0].tolist() == [0.0] * 64
        with pytest.raises(CompileError, match="no matching function"):
            copied(body, size=7, header=HELPER)


def test_a_threadgroup_beyond_the_limit_is_refused(simulator: None) -> None:
    with metalsim.install("fast"), pytest.raises(KernelFault, match="1025 threads") as caught:
        copied(THROUGH_DEVICE_MEMORY, threads=1025)
    assert caught.value.kind is FaultKind.OVER_LIMIT


STRIDED = """
  const uint row = thread_position_in_grid.y, column = thread_position_in_grid.x;
  const size_t at = row * threads_per_grid.x + column;
  out[at] = INDEXED;
  if (at < 2) strides[at] = x_strides[at];
"""


@pytest.mark.parametrize("engine", [e for e in ENGINES if e in ("sim-fast", "sim-race", "gpu")], indirect=True)
@pytest.mark.parametrize("contiguous", [False, True], ids=["strided", "contiguous"])
def test_strides_arrive_as_mlx_passes_them(engine: Engine, contiguous: bool) -> None:
    rows = mx.arange(60).reshape(6, 10)
    cases = [(rows.T, (1, 10)), (rows[::-2, 1::3], (-20, 3)), (mx.broadcast_to(mx.arange(9), (4, 9)), (0, 1))]
    indexed = "x[at]" if contiguous else "x[long(row) * x_strides[0] + long(column) * x_strides[1]]"
    source = STRIDED.replace("INDEXED", indexed)
    kernel = mx.fast.metal_kernel("strided", ["x"], ["out", "strides"], source, ensure_row_contiguous=contiguous)
    for x, expected in cases:
        out, strides = kernel(
            inputs=[x],
            grid=(x.shape[1], x.shape[0], 1),
            threadgroup=(4, 2, 1),
            output_shapes=[x.shape, (2,)],
            output_dtypes=[x.dtype, mx.int64],
        )
        assert mx.array_equal(out, x)
        assert strides.tolist() == ([x.shape[1], 1] if contiguous else list(expected))


def test_install_restores_what_it_replaced() -> None:
    before = mx.fast.metal_kernel, mx.metal.is_available
    with pytest.raises(ZeroDivisionError), metalsim.install("fast", available=True):
        assert mx.fast.metal_kernel is metalsim.MetalKernel and mx.metal.is_available()
        raise ZeroDivisionError
    assert (mx.fast.metal_kernel, mx.metal.is_available) == before
    with pytest.raises(ValueError, match="expected a mode"), metalsim.install("slow"):  # type: ignore[arg-type]
        pass


def test_bytes_are_counted(simulator: None) -> None:
    inputs, _ = inputs_and_reference()
    with metalsim.install("race") as session:
        gqa_decode.decode(inputs)
    report = session.reports[-1]
    codes, out = report.traffic["keys"], report.traffic["out"]
    assert (codes.size, codes.read, codes.written) == (inputs[1].nbytes, 2 * inputs[1].nbytes, 0)  # 2 lanes a word
    assert (out.read, out.written) == (0, inputs[0].nbytes)
    tokens, heads, groups = 67, 2, 3
    assert report.barriers == heads * (1 + 2 * groups)
    assert report.simd_operations == heads * groups * (tokens + 3 * gqa_decode.SIMDGROUPS)
    assert report.threadgroup_bytes == 4 * gqa_decode.SIMDGROUPS * (2 * groups + 128)
