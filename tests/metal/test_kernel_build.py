"""Kernels are built when they are first launched, each variant once, and one that does not build is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import metalsim
import mlx.core as mx
import pytest

from mlx_qkvshare import kernels
from mlx_qkvshare.errors import KernelBuildError, QKVShareError
from mlx_qkvshare.kernels import Kernel, merge_state_ops

INPUTS, OUTPUTS = ("maxima", "sums", "outputs", "num_parts"), ("merged",)
METAL_SAYS = """[metal::Device] Unable to build metal library from source
program_source:7:14: warning: unused variable 'a'
program_source:12:3: error: use of undeclared identifier 'totl'
  totl += weight;
  ^
program_source:14:9: error: use of undeclared identifier 'totl'
"""
TOO_MUCH_MEMORY = """[metal::Device] Unable to load kernel custom_kernel_merge_state_half
Threadgroup memory size (40960) exceeds the maximum threadgroup memory allowed (32768)
"""
TOO_MANY_THREADS = "Thread group size (512) is greater than the maximum allowed threads per threadgroup (384)."


def call(kernel: Kernel, num_rows: int = 8, dtype: mx.Dtype = mx.float16) -> mx.array:
    maxima, sums, outputs = mx.zeros((2, num_rows)), mx.ones((2, num_rows)), mx.ones((2, num_rows, 32))
    (merged,) = kernel(
        inputs=[maxima, sums, outputs, mx.array(2)],
        template=[("T", dtype)],
        grid=(32, num_rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(num_rows, 32)],
        output_dtypes=[dtype],
    )
    return merged


class Evaluations:
    """Stands in for MLX's kernel objects and counts what is made and evaluated.

    `fail` is raised by evaluating the kernel's outputs, `fail_before` by evaluating its inputs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.evaluated = 0
        self.fail: Exception | None = None
        self.fail_before: Exception | None = None
        monkeypatch.setattr(mx.fast, "metal_kernel", self._make)
        monkeypatch.setattr(mx, "async_eval", self._evaluate)

    def _make(self, *, name: str, **_: Any) -> Callable[..., list[mx.array]]:
        self.made.append(name)

        def launch(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    def _evaluate(self, *arrays: mx.array) -> None:
        are_inputs = len(arrays) == len(INPUTS)
        self.evaluated += not are_inputs
        error = self.fail_before if are_inputs else self.fail
        if error is not None:
            raise error


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Evaluations:
    return Evaluations(monkeypatch)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(METAL_SAYS), "program_source:12:3: error: use of undeclared identifier 'totl'"),
        (RuntimeError(TOO_MUCH_MEMORY), " ".join(TOO_MUCH_MEMORY.split())),
        (ValueError(TOO_MANY_THREADS), TOO_MANY_THREADS),
    ],
)
def test_a_variant_that_metal_refuses_is_named(evaluations: Evaluations, error: Exception, reason: str) -> None:
    """Metal says so at evaluation only, so the first call is evaluated."""
    kernel = Kernel("merge_state", INPUTS, OUTPUTS)
    evaluations.fail = error
    for _ in range(2):  # it is not taken for built afterwards
        with pytest.raises(KernelBuildError) as caught:
            call(kernel)
        assert str(caught.value) == f"[kernel merge_state] T=float16: {reason}"
        assert caught.value.__cause__ is error and isinstance(caught.value, QKVShareError)


def test_other_failures_stay_what_they_are(evaluations: Evaluations) -> None:
    evaluations.fail = RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")
    with pytest.raises(RuntimeError, match="Insufficient Memory") as caught:
        call(Kernel("merge_state", INPUTS, OUTPUTS))
    assert caught.value is evaluations.fail


def test_every_variant_is_evaluated_once(evaluations: Evaluations) -> None:
    kernel = Kernel("merge_state", INPUTS, OUTPUTS)
    for dtype, count in ((mx.float16, 1), (mx.float16, 1), (mx.float32, 2), (mx.float16, 2), (mx.float32, 2)):
        call(kernel, dtype=dtype)
        assert evaluations.evaluated == count
    assert evaluations.made == ["merge_state"]


def test_inputs_of_few_elements_are_a_variant(evaluations: Evaluations) -> None:
    """MLX declares them otherwise, so Metal gets another text."""
    kernel = Kernel("merge_state", INPUTS, OUTPUTS)
    for num_rows, count in ((8, 1), (3, 2), (8, 2), (3, 2)):
        call(kernel, num_rows)
        assert evaluations.evaluated == count


def test_a_compiler_error_is_named(simulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    header, body = kernels.kernel_source("merge_state")
    monkeypatch.setattr(kernels, "kernel_source", lambda name: (header, body.replace("total +=", "totl +=")))
    with (
        metalsim.install("fast", available=True),
        pytest.raises(
            KernelBuildError, match=r"^\[kernel merge_state\] T=bfloat16: merge_state\.metal:\d+:\d+: error: .*'totl'"
        ),
    ):
        call(Kernel("merge_state", INPUTS, OUTPUTS), dtype=mx.bfloat16)


def test_what_fails_before_the_kernel_is_not_its_fault(evaluations: Evaluations) -> None:
    evaluations.fail_before = ValueError(TOO_MANY_THREADS)
    with pytest.raises(ValueError) as caught:
        call(Kernel("merge_state", INPUTS, OUTPUTS))
    assert caught.value is evaluations.fail_before


def test_traced_functions_take_the_kernel_without_evaluating_it(tmp_path: Path) -> None:
    """Exports and `mx.compile` work on graphs of placeholders."""
    kernel = Kernel("merge_state", INPUTS, OUTPUTS)

    def merged(maxima: mx.array, sums: mx.array, outputs: mx.array) -> mx.array:
        return kernel(
            inputs=[maxima, sums, outputs, mx.array(2)],
            template=[("T", mx.float32)],
            grid=(32, 8, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(8, 32)],
            output_dtypes=[mx.float32],
        )[0]

    arrays = (mx.zeros((2, 8)), mx.ones((2, 8)), mx.ones((2, 8, 32)))
    mx.export_function(str(tmp_path / "kernel.mlxfn"), merged, *arrays)
    assert kernel._built == set(), "the first call that can be evaluated still is"
    if mx.metal.is_available():
        assert mx.allclose(mx.compile(merged)(*arrays), merge_state_ops(*arrays, mx.float32)).item()


IMPORT_ALL = """
import importlib, pathlib, pkgutil
import mlx.core as mx
import mlx_lm, transformers  # theirs is not ours

def refuse(*_, **__):
    raise AssertionError("at import")

read = pathlib.Path.read_text
pathlib.Path.read_text = lambda path, *rest, **more: refuse() if path.suffix == ".metal" else read(path, *rest, **more)
mx.fast.metal_kernel = mx.metal.is_available = mx.async_eval = refuse
import mlx_qkvshare
for module in pkgutil.iter_modules(mlx_qkvshare.__path__):
    if module.name not in ("__main__", "cli"):
        importlib.import_module(f"mlx_qkvshare.{module.name}")
from mlx_qkvshare.kernels import build_kernel
assert build_kernel.cache_info().currsize == 0
"""


def test_kernels_cost_nothing_at_import() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
