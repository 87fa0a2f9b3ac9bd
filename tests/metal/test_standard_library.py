"""The standard library's functions against numpy, on every engine."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from engines import Engine

pytestmark = pytest.mark.metal

rng = np.random.default_rng(0)
X = rng.normal(size=64).astype(np.float32)
N = rng.integers(-1000, 1000, size=64).astype(np.int32)
LANE = np.arange(64) % 32


def grouped(values: np.ndarray) -> np.ndarray:
    """One row per simdgroup."""
    return values.reshape(2, 32)


def spread(per_simdgroup: np.ndarray) -> np.ndarray:
    return np.repeat(per_simdgroup, 32)


def from_lane(source: np.ndarray) -> np.ndarray:
    """Value of another lane of the same simdgroup."""
    return X[np.arange(64) // 32 * 32 + source]


# expression of x (float), n (int), i (thread), or their arrays xs and ns; what numpy says
CASES: dict[str, tuple[str, np.ndarray]] = {
    "simd_sum": ("simd_sum(x)", spread(grouped(X).sum(1))),
    "simd_sum of int": ("simd_sum(n)", spread(grouped(N).sum(1))),
    "simd_product": ("simd_product(1.0f + x / 64)", spread(np.prod(1 + grouped(X) / 64, axis=1))),
    "simd_max": ("simd_max(x)", spread(grouped(X).max(1))),
    "simd_min": ("simd_min(n)", spread(grouped(N).min(1))),
    "simd_xor": ("simd_xor(n)", spread(np.bitwise_xor.reduce(grouped(N), axis=1))),
    "simd_shuffle": ("simd_shuffle(x, ushort(31 - i % 32))", from_lane(31 - LANE)),
    "simd_shuffle_xor": ("simd_shuffle_xor(x, 5)", from_lane(LANE ^ 5)),
    "simd_shuffle_down": ("simd_shuffle_down(x, 3)", from_lane(np.where(LANE + 3 < 32, LANE + 3, LANE))),
    "simd_shuffle_up": ("simd_shuffle_up(x, 3)", from_lane(np.where(LANE >= 3, LANE - 3, LANE))),
    "simd_shuffle_rotate_up": ("simd_shuffle_rotate_up(x, 3)", from_lane((LANE - 3) % 32)),
    "simd_broadcast_first": ("simd_broadcast_first(x)", from_lane(LANE * 0)),
    "simd_prefix_inclusive_sum": ("simd_prefix_inclusive_sum(n)", grouped(N).cumsum(1).ravel()),
    "simd_prefix_exclusive_sum": ("simd_prefix_exclusive_sum(n)", grouped(N).cumsum(1).ravel() - N),
    "quad_sum": ("quad_sum(x)", np.repeat(X.reshape(-1, 4).sum(1), 4)),
    "simd_any": ("simd_any(x > 2.0f)", spread((grouped(X) > 2).any(1))),
    "simd_all": ("simd_all(x > -2.0f)", spread((grouped(X) > -2).all(1))),
    "simd_ballot": ("popcount(uint(ulong(simd_ballot(x > 0))))", spread((grouped(X) > 0).sum(1))),
    "rint": ("rint(2.5f) + rint(x * 4)", 2 + np.rint(X * 4)),
    "round": ("round(2.5f) + round(-2.5f) + round(x)", np.where(X < 0, -1, 1) * np.floor(np.abs(X) + 0.5)),
    "clamp and mix": ("mix(clamp(x, -1.0f, 1.0f), 2.0f, 0.25f)", np.clip(X, -1, 1) * 0.75 + 0.5),
    "exp2, log2, rsqrt": ("exp2(x) + log2(abs(x)) + rsqrt(x * x)", 2**X + np.log2(np.abs(X)) + 1 / np.abs(X)),
    "fast::exp": ("fast::exp(x)", np.exp(X)),
    "precise::tanh": ("precise::tanh(x)", np.tanh(X)),
    "half": ("float(half(x) * half(2))", X.astype(np.float16).astype(np.float32) * 2),
    "bfloat": ("float(bfloat(3.140625f)) + float(bfloat(1.00390625f))", np.full(64, 3.140625 + 1.0)),
    "as_type": ("as_type<float>(as_type<uint>(x) ^ 0x80000000u)", -X),
    "vectors": ("dot(float4(x, float2(2, 3), 4), float4(1, 1, 2, 3))", X + 20),
    "select": ("select(x, -x, x < 0)", np.abs(X)),
    "extract_bits": ("extract_bits(uint(n + 1000), 3, 4)", (N + 1000) >> 3 & 15),
    "clz": ("clz(uint(i + 1))", 31 - np.floor(np.log2(np.arange(1, 65)))),
    "clz of ushort": ("clz(ushort(i + 1))", 15 - np.floor(np.log2(np.arange(1, 65)))),
    "ctz": ("ctz(int(i << 3) | 64)", [min(6, 3 + (i & -i).bit_length() - 1) if i else 6 for i in range(64)]),
    "popcount": ("popcount(char(n >> 4))", [int(n >> 4 & 255).bit_count() for n in N]),
    "reverse_bits": ("reverse_bits(uint(i)) >> 26", [int(f"{i:06b}"[::-1], 2) for i in range(64)]),
}


@pytest.mark.parametrize("engine", ["sim-fast"], indirect=True)
def test_functions_equal_numpy(engine: Engine) -> None:
    lines = [f"out[{row} * 64 + i] = float({expression});" for row, (expression, _) in enumerate(CASES.values())]
    kernel = mx.fast.metal_kernel(
        "functions",
        ["xs", "ns"],
        ["out"],
        "const uint i = thread_position_in_grid.x; const float x = xs[i]; const int n = ns[i];\n" + "\n".join(lines),
        header="using namespace metal;\n",
    )
    (out,) = kernel(
        inputs=[mx.array(X), mx.array(N)],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(len(CASES), 64)],
        output_dtypes=[mx.float32],
    )
    for row, (name, (_, expected)) in zip(np.array(out), CASES.items(), strict=True):
        np.testing.assert_allclose(row, np.asarray(expected, np.float64), rtol=1e-5, atol=2e-6, err_msg=name)


MATRICES = """
  simdgroup_matrix<float, 8, 8> left, right, result = simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_load(left, a, 16, ulong2(8, 0));
  simdgroup_load(right, b, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(result, left, right, result);
  simdgroup_store(result, out, 8);
"""


def test_matrices_equal_numpy(engine: Engine) -> None:
    a, b = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=(8, 8)).astype(np.float32)
    kernel = mx.fast.metal_kernel("matrices", ["a", "b"], ["out"], MATRICES, header="using namespace metal;\n")
    (out,) = kernel(
        inputs=[mx.array(a), mx.array(b)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(8, 8)],
        output_dtypes=[mx.float32],
    )
    np.testing.assert_allclose(np.array(out), a[:, 8:] @ b.T + np.eye(8), rtol=1e-5, atol=1e-5)


POSITIONS = """
  const uint3 at = thread_position_in_grid, all = threads_per_grid;
  const size_t index = ((at.z * all.y + at.y) * all.x + at.x) * 6;
  out[index] = threadgroup_position_in_grid.x;
  out[index + 1] = thread_position_in_threadgroup.x;
  out[index + 2] = threads_per_threadgroup.x;
  out[index + 3] = threadgroups_per_grid.x;
  out[index + 4] = thread_index_in_threadgroup;
  out[index + 5] = thread_index_in_simdgroup + 100 * simdgroup_index_in_threadgroup;
"""


def test_positions_in_a_grid_that_threadgroups_do_not_divide(engine: Engine) -> None:
    width, height, depth, columns, rows = 10, 9, 2, 4, 9
    kernel = mx.fast.metal_kernel("positions", ["x"], ["out"], POSITIONS)
    (out,) = kernel(
        inputs=[mx.zeros(1)],
        grid=(width, height, depth),
        threadgroup=(columns, rows, 1),
        output_shapes=[(depth, height, width, 6)],
        output_dtypes=[mx.int32],
    )
    _, y, x = np.meshgrid(range(depth), range(height), range(width), indexing="ij")
    own_columns = np.minimum(columns, width - x // columns * columns)
    index = y * own_columns + x % columns
    expected = [x // columns, x % columns, own_columns, np.full_like(x, 3), index, index % 32 + 100 * (index // 32)]
    np.testing.assert_array_equal(np.array(out), np.stack(expected, -1))
