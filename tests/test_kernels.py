"""The Metal files: complete, found, and right: on a Metal device, or as C++ where there is none."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.kernels import kernel_source, merge_state, merge_state_kernel, merge_state_ops

# Enough of Metal for kernels without simd or threadgroup operations.
SHIM = """
#include <cmath>
#include <cstddef>
using uint = unsigned int;
struct uint3 { uint x, y, z; };
using std::exp;
inline float max(float a, float b) { return a > b ? a : b; }
#define device
#define constant
"""


def parts(
    num_parts: int, num_rows: int, head_dim: int, *, empty: bool
) -> tuple[mx.array, mx.array, mx.array, np.ndarray]:
    """Partial states of random attention, and the softmax over all of it at once in float64."""
    rng = np.random.default_rng(num_parts * 1000 + num_rows + head_dim)
    scores = rng.normal(0, 30, (num_parts, num_rows, 7))
    values = rng.normal(size=(num_parts, 7, head_dim))
    maxima, weights = scores.max(-1), np.exp(scores - scores.max(-1, keepdims=True))
    sums, outputs = weights.sum(-1), np.einsum("pnt,ptd->pnd", weights, values)
    if empty:
        sums[0], outputs[0], maxima[0], scores[0] = 0, 0, 1e30, -np.inf
    everything = np.exp(scores - scores.max((0, 2), keepdims=True))
    truth = np.einsum("pnt,ptd->nd", everything, values) / everything.sum((0, 2))[:, None]
    return *(mx.array(a.astype(np.float32)) for a in (maxima, sums, outputs)), truth


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("num_parts", "num_rows", "head_dim"), [(2, 1, 64), (3, 9, 80), (17, 12, 128)])
def test_merge_state_equals_one_softmax(num_parts: int, num_rows: int, head_dim: int, empty: bool) -> None:
    maxima, sums, outputs, truth = parts(num_parts, num_rows, head_dim, empty=empty)
    for merge in (merge_state, merge_state_ops):  # the first is the kernel where there is a Metal device
        merged = np.array(merge(maxima, sums, outputs, mx.float32))
        np.testing.assert_allclose(merged, truth, rtol=2e-5, atol=2e-5)


def generated_source(example: tuple[mx.array, mx.array, mx.array]) -> str:
    """The very text that MLX would hand to Metal: tracing prints it without a device."""
    maxima, sums, outputs = example
    num_parts, num_rows, head_dim = outputs.shape

    def call(*arrays: mx.array) -> list[mx.array]:
        return merge_state_kernel()(
            inputs=[*arrays, mx.array(num_parts)],
            template=[("T", mx.float32)],
            grid=(head_dim, num_rows, 1),
            threadgroup=(head_dim, 1, 1),
            output_shapes=[(num_rows, head_dim)],
            output_dtypes=[mx.float32],
            verbose=True,
        )

    # MLX prints from C++, so the file descriptor is what has to be caught.
    saved = os.dup(1)
    with tempfile.TemporaryFile("w+") as caught, tempfile.TemporaryDirectory() as folder:
        os.dup2(caught.fileno(), 1)
        try:
            mx.export_function(f"{folder}/kernel.mlxfn", call, maxima, sums, outputs)
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        caught.seek(0)
        return caught.read()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++; a Mac runs the kernel itself")
def test_generated_metal_text_runs_as_cpp(tmp_path: Path) -> None:
    maxima, sums, outputs, truth = parts(5, 6, 64, empty=True)
    text = generated_source((maxima, sums, outputs))
    body = kernel_source("merge_state")[1]
    assert body in text, "MLX's text holds the file's body"
    function = text[text.index("template <typename T>") : text.index(body) + len(body)] + "\n}\n"
    function = re.sub(r"\[\[.*?\]\]", "", function)
    loop = """
extern "C" void run(const float* m, const float* s, const float* o, int parts, uint rows, uint dim, float* out) {
  for (uint y = 0; y < rows; y++) for (uint x = 0; x < dim; x++) CALL(m, s, o, parts, out, {x, y, 0}, {dim, rows, 1});
}"""
    name = re.search(r"void (\w+)\(", function)[1]
    source, library = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    source.write_text(SHIM + function + loop.replace("CALL", f"{name}<float>"))
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    arrays = [np.ascontiguousarray(np.array(a)) for a in (maxima, sums, outputs)]
    out = np.full(truth.shape, np.nan, np.float32)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in arrays]
    ctypes.CDLL(str(library)).run(*pointers, 5, 6, 64, out.ctypes.data_as(ctypes.c_void_p))
    np.testing.assert_allclose(out, truth, rtol=2e-5, atol=2e-5)


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="nonesuch"):
        kernel_source("nonesuch")
