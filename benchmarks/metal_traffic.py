"""What the Metal kernels read and execute, count by count, on the simulator; and a prediction of their time from that.

`PYTHONPATH=tests:tests/metal python benchmarks/metal_traffic.py`; needs clang-19, which `make test-metal` installs.
Counts hold on any machine. The microseconds are predictions by a roofline (`tests/metal/roofline.py`), not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import metalsim
import mlx.core as mx
from counted import GROUP, KV_HEADS, TOKENS, attend, attend_in_full, num_values, per_value, unpacking
from roofline import CHIPS, predict

from mlx_qkvshare.kernels import build_kernel, merge_state
from mlx_qkvshare.measure import report
from mlx_qkvshare.pack_kernel import quantize_pack
from mlx_qkvshare.spec import TensorPlan

HEAD_DIM = 128
PARTS, ROWS = 8, 32  # of merge_state
PACKED = [*("keys", "key_scales", "key_biases"), *("values", "value_scales", "value_biases")]
FULL = ["argument 1", "argument 2"]  # keys and values of MLX's kernel


def attention_row(
    kernel: str,
    bits: int,
    sessions: int,
    arrays: list[str],
    run: Callable[[metalsim.Mode], tuple[metalsim.Report, int]],
) -> dict[str, Any]:
    """Bytes, barriers and instructions of a kernel that attends; `arrays` are the buffers with keys and values."""
    (found, ideal), (counted, _) = run("race"), run("count")
    shared, read = found.threadgroup_traffic, sum(found.traffic[name].read for name in arrays)
    instructions = per_value(counted, HEAD_DIM)
    return {
        "kernel": kernel,
        "bits": bits,
        "sessions": sessions,
        "kv_bytes_read": read,
        "kv_bytes_ideal": ideal,
        "read_over_ideal": read / ideal,
        "threadgroup_bytes": found.threadgroup_bytes,
        "threadgroup_bytes_per_value": (shared.read + shared.written) / num_values(HEAD_DIM),
        "barriers_per_token": found.barriers / TOKENS,
        "simd_operations_per_token": found.simd_operations / TOKENS,
        "instructions_per_value": sum(instructions.values()),
        "instructions_per_value_unpacking": unpacking(counted, HEAD_DIM),
        "instructions_per_value_by_class": {kind: round(count, 3) for kind, count in instructions.items()},
    }


def other_row(kernel: str, inputs: list[str], outputs: list[str], call: Callable[[], object]) -> dict[str, Any]:
    """Bytes of each buffer, read or written, against once; barriers and simdgroup operations of the whole launch."""
    build_kernel.cache_clear()
    with metalsim.install("race", available=True) as session:
        call()
    build_kernel.cache_clear()
    found = session.reports[-1]
    read = {name: {"bytes": found.traffic[name].read, "once": found.traffic[name].size} for name in inputs}
    written = {name: {"bytes": found.traffic[name].written, "once": found.traffic[name].size} for name in outputs}
    return {
        "kernel": kernel,
        "read": read,
        "written": written,
        "threadgroup_bytes": found.threadgroup_bytes,
        "barriers": found.barriers,
        "simd_operations": found.simd_operations,
    }


def main() -> None:
    rows = [
        attention_row("attend_part", bits, sessions, PACKED, partial(attend, HEAD_DIM, bits, sessions))
        for bits in (8, 4)
        for sessions in (1, 8)
    ]
    rows.append(
        attention_row("MLX sdpa_vector_2pass_1", 16, 1, FULL, partial(attend_in_full, HEAD_DIM)),
    )
    maxima, sums = mx.random.normal((PARTS, ROWS)), mx.ones((PARTS, ROWS))
    outputs = mx.random.normal((PARTS, ROWS, HEAD_DIM))
    names = ["maxima", "sums", "outputs"]
    rows.append(
        other_row("merge_state", names, ["merged"], partial(merge_state, maxima, sums, outputs, mx.float16)),
    )
    x = mx.random.normal((1, KV_HEADS, TOKENS, HEAD_DIM)).astype(mx.float16)
    for bits in (8, 4):
        plan = TensorPlan(HEAD_DIM, bits, GROUP, HEAD_DIM)
        packed = ["packed", "scales", "biases"]
        rows.append(other_row(f"quantize_pack, {bits} bits", ["rows"], packed, partial(quantize_pack, x, plan)))
    for each in rows:
        print(each)
    table = [predict(chip, tokens, sessions) for chip in CHIPS for tokens in (2048, 8192, 32768) for sessions in (1, 8)]
    print("predicted microseconds a layer (32 query heads, 8 KV heads, D 128); not measured:")
    for line in table:
        print(line)
    print(json.dumps(report("metal", "attend_part", rows) | {"predictions": table}))


if __name__ == "__main__":
    main()
