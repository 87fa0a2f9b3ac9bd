"""What the Metal kernels read, count by count, on the simulator; and a prediction of their time from that.

`PYTHONPATH=tests:tests/metal python benchmarks/metal_traffic.py`; needs clang-19, which `make test-metal` installs.
Counts hold on any machine. The microseconds are predictions by a roofline (`tests/metal/roofline.py`), not measured.
"""

from __future__ import annotations

import json

import metalsim
import mlx.core as mx
from mlx_kernels import Shape, sdpa_vector_2pass_1
from roofline import CHIPS, predict

from mlx_qkvshare.kernels import build_kernel
from mlx_qkvshare.measure import report
from mlx_qkvshare.part_kernel import attend_part
from mlx_qkvshare.quantize import quantize
from mlx_qkvshare.spec import TensorPlan

SHAPE = Shape(heads=2, groups=4, tokens=512, head_dim=128)
VALUES = 2 * SHAPE.heads * SHAPE.tokens * SHAPE.head_dim


def ours(bits: int, sessions: int) -> tuple[metalsim.Report, int]:
    """The report of pass 1 on the race engine, and the bytes of the packed keys and values."""
    plan, num_rows = TensorPlan(SHAPE.head_dim, bits, 64, SHAPE.head_dim), sessions * SHAPE.groups
    _, keys, values = SHAPE.inputs(mx.float16)
    packed = [quantize(x, plan) for x in (keys, values)]
    rows = mx.random.normal((1, SHAPE.heads, num_rows, SHAPE.head_dim)).astype(mx.float16)
    build_kernel.cache_clear()
    with metalsim.install("race", available=True) as session:
        attend_part(rows, *packed, mx.array([[[0, SHAPE.tokens]] * num_rows], mx.int32), SHAPE.tokens)
    build_kernel.cache_clear()
    return session.reports[-1], sum(tensor.nbytes for tensor in packed)


def row(kernel: str, bits: int, sessions: int, found: metalsim.Report, arrays: list[str], ideal: int) -> dict:
    shared = found.threadgroup_traffic
    return {
        "kernel": kernel,
        "bits": bits,
        "sessions": sessions,
        "kv_bytes_read": sum(found.traffic[name].read for name in arrays),
        "kv_bytes_ideal": ideal,
        "read_over_ideal": sum(found.traffic[name].read for name in arrays) / ideal,
        "threadgroup_bytes": found.threadgroup_bytes,
        "threadgroup_bytes_per_value": (shared.read + shared.written) / VALUES,
        "barriers_per_token": found.barriers / SHAPE.tokens,
        "simd_operations_per_token": found.simd_operations / SHAPE.tokens,
    }


def main() -> None:
    names = [*("keys", "key_scales", "key_biases"), *("values", "value_scales", "value_biases")]
    cases = [(bits, sessions) for bits in (8, 4) for sessions in (1, 8)]
    rows = []
    for bits, sessions in cases:
        found, ideal = ours(bits, sessions)
        rows.append(row("attend_part", bits, sessions, found, names, ideal))
    arrays = SHAPE.inputs(mx.float16)
    _, found = sdpa_vector_2pass_1(SHAPE, arrays, metalsim.Settings("race"))
    full = [f"argument {index}" for index in (1, 2)]
    rows.append(row("MLX sdpa_vector_2pass_1", 16, 1, found, full, arrays[1].nbytes + arrays[2].nbytes))
    for each in rows:
        print(each)
    table = [predict(chip, tokens, sessions) for chip in CHIPS for tokens in (2048, 8192, 32768) for sessions in (1, 8)]
    print("predicted microseconds a layer (32 query heads, 8 KV heads, D 128); not measured:")
    for each in table:
        print(each)
    print(json.dumps(report("metal", "attend_part", rows) | {"predictions": table}))


if __name__ == "__main__":
    main()
