"""Write the Metal text of every kernel variant that the tests use.

`PYTHONPATH=tests python tests/metal/dump_sources.py FOLDER`

For a compiler that needs no GPU: `xcrun metal -c` over the files, with MLX's include folder (printed last) on its path.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import metalsim
import mlx.core as mx
import test_parity
from test_attend_part import CASES, CHECKED, problem
from test_quantize_pack import BITS, DIMS, GROUPS, STAGED, plan

from mlx_qkvshare.cascade_kernel import attend_with_kernel
from mlx_qkvshare.kernels import build_kernel, merge_state
from mlx_qkvshare.pack_kernel import quantize_pack
from mlx_qkvshare.part_kernel import attend_part

SOURCES: dict[str, metalsim.KernelSource] = {}


class Recorder(metalsim.MetalKernel):
    """Keeps the source that MLX generates for a call, and computes nothing."""

    def __call__(self, *, inputs: Any, output_shapes: Any, output_dtypes: Any, **call: Any) -> list[mx.array]:
        source = self.source(inputs=inputs, output_shapes=output_shapes, output_dtypes=output_dtypes, **call)
        SOURCES[source.function] = source
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mx.fast.metal_kernel, mx.metal.is_available = Recorder, lambda: True
    for case in (*CASES, *CHECKED):
        attend_part(*problem(case))
    for head_dim, group in zip(DIMS, GROUPS * 2, strict=True):
        for bits in BITS:
            for dtype in (mx.float32, mx.float16, mx.bfloat16):
                quantize_pack(mx.zeros((1, 1, 2, head_dim), dtype), plan(head_dim, bits, group))
    for head_dim, group, bits, dtype in STAGED:
        x = mx.zeros((1, 1, 2, head_dim), dtype)
        quantize_pack(x, plan(head_dim, bits, group), centre=mx.zeros((1, head_dim)), is_rotated=True)
    for case in (*test_parity.CASES, *test_parity.CHECKED):
        given = test_parity.problem(case)
        attend_with_kernel(given.queries, given.cache, **case.options)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        merge_state(mx.zeros((2, 16)), mx.ones((2, 16)), mx.zeros((2, 16, 64)), dtype)
    build_kernel.cache_clear()
    for function, source in SOURCES.items():
        preamble = '#include "mlx/backend/metal/kernels/utils.h"\n'
        (folder / f"{function}.metal").write_text(preamble + source.text)
    print(len(SOURCES), "kernels; headers:", Path(mx.__file__).parent / "include")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
