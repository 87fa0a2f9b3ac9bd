"""Instructions for each key or value element of the shared part, as count mode counts them; and how it does."""

from __future__ import annotations

from collections import Counter

import metalsim
import mlx.core as mx
import numpy as np
from mlx_kernels import Output, Shape, launch, sdpa_vector_2pass_1

from mlx_qkvshare.kernels import build_kernel
from mlx_qkvshare.part_kernel import attend_part
from mlx_qkvshare.quantize import quantize
from mlx_qkvshare.spec import TensorPlan

GROUP, TOKENS, KV_HEADS, GQA = 64, 512, 2, 4
QUANTIZED = tuple(
    f"mlx/backend/metal/kernels/{name}" for name in ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
)
UNPACKING = ("masked", "unpack4")  # the functions of metal/attend_part.metal that turn words into numbers

# Of all lanes, of all classes, float16, head dim 128, K and V alike. A test counts some of them again.
ATTEND = {(8, 1): 11.29, (8, 8): 53.57, (4, 1): 11.05, (4, 8): 53.58}  # by bits and sessions of 4 query heads
ATTEND_IN_FULL = 30.41  # MLX's pass 1 over float16, a session of 4 query heads
MATMULS = {8: 8.82, 4: 9.72}  # MLX's vector kernels by bits, for each row of queries


def shape(head_dim: int) -> Shape:
    return Shape(KV_HEADS, GQA, TOKENS, head_dim)


def num_values(head_dim: int) -> int:
    return 2 * KV_HEADS * TOKENS * head_dim


def attend(head_dim: int, bits: int, sessions: int, mode: metalsim.Mode) -> tuple[metalsim.Report, int]:
    """The report of pass 1, and the bytes of the packed keys and values."""
    mx.random.seed(0)
    plan, num_rows = TensorPlan(head_dim, bits, GROUP, head_dim), sessions * GQA
    packed = [quantize(x, plan) for x in shape(head_dim).inputs(mx.float16)[1:]]
    rows = mx.random.normal((1, KV_HEADS, num_rows, head_dim)).astype(mx.float16)
    spans = mx.array([[[0, TOKENS]] * num_rows], mx.int32)
    build_kernel.cache_clear()
    with metalsim.install(mode, available=True) as session:
        attend_part(rows, *packed, spans, TOKENS)
    build_kernel.cache_clear()
    return session.reports[-1], sum(tensor.nbytes for tensor in packed)


def attend_in_full(head_dim: int, mode: metalsim.Mode) -> tuple[metalsim.Report, int]:
    """MLX's own pass 1 over float16, one session: the report, and the bytes of keys and values."""
    mx.random.seed(0)
    arrays = shape(head_dim).inputs(mx.float16)
    _, report = sdpa_vector_2pass_1(shape(head_dim), arrays, metalsim.Settings(mode))
    return report, arrays[1].nbytes + arrays[2].nbytes


def matmuls(bits: int) -> float:
    """MLX's vector kernels, one row: the mean of `affine_qmv_fast` over rows of 512 and of `affine_qvm` over 128."""
    mx.random.seed(0)
    counts = []
    for function, template, rows, width, outer, grid in (
        ("affine_qmv_fast", "false", 64, 512, 64, (32, 2 * 64 // 8, 1)),
        ("affine_qvm", "false", 512, 128, 128, (32, 2 * 128 // 64, 1)),
    ):
        packed = mx.quantize(mx.random.normal((rows, width)).astype(mx.float16), group_size=GROUP, bits=bits)
        x = mx.random.normal((1, 512)).astype(mx.float16)
        arguments = [*packed, x, Output((1, outer), mx.float16), np.int32(512), np.int32(outer), *[None] * 8]
        settings, template = metalsim.Settings("count"), f"half, {GROUP}, {bits}, {template}"
        _, report = launch(function, template, QUANTIZED, arguments, grid, (32, 2, 1), settings)
        counts.append(sum(report.instructions().values()) / (rows * width))
    return sum(counts) / 2


def per_value(report: metalsim.Report, head_dim: int) -> dict[str, float]:
    """By class, most frequent first."""
    return {kind: count / num_values(head_dim) for kind, count in report.instructions().most_common()}


def unpacking(report: metalsim.Report, head_dim: int) -> float:
    """Of `attend_part`, for each value: the instructions between a word and four numbers, and its loads."""
    total: Counter[str] = Counter()
    for function in UNPACKING:
        total += report.instructions(function)
    return sum(total.values()) / num_values(head_dim)
