"""Kernels that nobody wrote for the simulator, unmodified: MLX's and mlx-lm's agree with MLX on the CPU.

Fast mode runs all of them; race mode and AddressSanitizer, which take longer to build, a selection.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import metalsim
import mlx.core as mx
import mlx_kernels
import numpy as np
import pytest
from metalsim import Settings

pytestmark = pytest.mark.metal

# Largest relative error: of float32 arithmetic in another order, else of one rounding of the output.
TOLERANCES = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
FLOATS = [mx.float32, mx.float16, mx.bfloat16]


def assert_close(out: mx.array, expected: mx.array, tolerance: float) -> None:
    expected = expected.astype(mx.float32)
    scale = float(mx.abs(expected).max())
    np.testing.assert_allclose(
        np.array(out.astype(mx.float32)), np.array(expected), rtol=tolerance, atol=tolerance * scale
    )


@pytest.fixture(autouse=True)
def seeded(simulator: None) -> None:
    mx.random.seed(1)


# ------------------------------------------------------------------------------------------- MLX's own kernels

DTYPED: dict[str, Callable[[mx.Dtype, Settings], Any]] = {
    "sdpa_vector": mlx_kernels.sdpa_vector,
    "sdpa_vector_2pass": mlx_kernels.sdpa_vector_2pass,
    "affine_qmv 4": lambda dtype, settings: mlx_kernels.affine_qmv(dtype, 4, settings),
    "affine_qmv 3": lambda dtype, settings: mlx_kernels.affine_qmv(dtype, 3, settings),
    "affine_qmm 4": lambda dtype, settings: mlx_kernels.affine_qmm(dtype, 4, settings),
    "affine_dequantize 4": lambda dtype, settings: mlx_kernels.affine_dequantize(dtype, 4, settings),
    "softmax": mlx_kernels.softmax,
}
IN_RACE_MODE = ["sdpa_vector", "sdpa_vector_2pass", "affine_qmv 4", "affine_qmm 4", "softmax"]
IN_ASAN_MODE = ["sdpa_vector_2pass", "softmax"]
CASES = [(name, dtype, "fast") for name in DTYPED for dtype in FLOATS]
CASES += [(name, mx.float32, "race") for name in IN_RACE_MODE]
CASES += [(name, mx.float16, "asan") for name in IN_ASAN_MODE]


@pytest.mark.parametrize(("name", "dtype", "mode"), CASES, ids=lambda value: str(value).removeprefix("mlx.core."))
def test_kernel_of_mlx(name: str, dtype: mx.Dtype, mode: metalsim.Mode) -> None:
    out, expected = DTYPED[name](dtype, Settings(mode))
    assert_close(out, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", ["fast", "race"])
def test_quantization_is_the_same_to_the_bit(mode: metalsim.Mode, bits: int) -> None:
    for out, expected in mlx_kernels.affine_quantize(mx.float32, bits, Settings(mode)):
        assert mx.array_equal(out, expected)


# ------------------------------------------------------------------------------------------ kernels of mlx-lm


@contextlib.contextmanager
def fresh(module: str) -> Iterator[ModuleType]:
    """A second copy of a module, whose kernels were made, and run, where `mx.fast.metal_kernel` stands now."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.loader is not None, module
    name = f"{module}_on_metalsim"
    spec = importlib.util.spec_from_file_location(name, spec.origin)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    try:
        spec.loader.exec_module(copy)
        yield copy
    finally:
        del sys.modules[name]


Result = tuple[list[mx.array], list[mx.array]]


def gated_delta(kernel: str, *, vector_gate: bool = False, mask: bool = False) -> Callable[[], Result]:
    def case() -> Result:
        batch, tokens, key_heads, value_heads, key_dim, value_dim = 1, 5, 2, 4, 128, 64
        queries, keys = (mx.random.normal((batch, tokens, key_heads, key_dim)) * 0.1 for _ in range(2))
        values = mx.random.normal((batch, tokens, value_heads, value_dim))
        beta = mx.sigmoid(mx.random.normal((batch, tokens, value_heads)))
        gate_shape = (batch, tokens, value_heads, key_dim) if vector_gate else (batch, tokens, value_heads)
        gate = mx.sigmoid(mx.random.normal(gate_shape))
        state = mx.random.normal((batch, value_heads, value_dim, key_dim))
        kept = mx.array([[True, True, False, True, True]]) if mask else None
        arguments = (queries, keys, values, gate, beta, state, kept)
        with fresh("mlx_lm.models.gated_delta") as module:
            out, expected = getattr(module, kernel)(*arguments), module.gated_delta_ops(*arguments)
        if kept is None:
            return list(out), list(expected)
        # Outputs of masked tokens are padding, which the two define differently.
        return [out[0] * kept[..., None, None], out[1]], [expected[0] * kept[..., None, None], expected[1]]

    return case


def ssm() -> Result:
    batch, heads, head_dim, groups, state_dim = 2, 4, 16, 2, 64
    x = mx.random.normal((batch, 1, heads, head_dim))
    a_log, d, bias = (mx.random.normal((heads,)) for _ in range(3))
    b, c = (mx.random.normal((batch, 1, groups, state_dim)) for _ in range(2))
    dt = mx.random.normal((batch, 1, heads))
    state = mx.random.normal((batch, heads, head_dim, state_dim))
    limits = (0.0, 100.0)
    with fresh("mlx_lm.models.ssm") as module:
        out = module.ssm_update_kernel(x, a_log, b, c, d, dt, bias, state, limits)
        step = module.compute_dt(dt, bias, limits)[:, 0]
    b, c = (mx.repeat(array[:, 0], heads // groups, 1) for array in (b, c))
    decay = mx.exp(-mx.exp(a_log) * step)[..., None, None]
    new_state = decay * state + (x[:, 0] * step[..., None])[..., None] * b[:, :, None]
    y = (new_state * c[:, :, None]).sum(-1) + x[:, 0] * d[:, None]
    return list(out), [y[:, None], new_state]


def rwkv7() -> Result:
    batch, tokens, heads, dim = 1, 4, 2, 64
    r, k, v, a, b = (mx.random.normal((batch, tokens, heads, dim)) * 0.3 for _ in range(5))
    w = mx.sigmoid(mx.random.normal((batch, tokens, heads, dim)))
    state = mx.random.normal((batch, heads, dim, dim))
    rows = []
    with fresh("mlx_lm.models.rwkv7") as module:
        out = module.wkv7_kernel(r, w, k, v, a, b, state)
        for t in range(tokens):
            y, state = module._wkv7_step_ops(*(array[:, t] for array in (r, w, k, v, a, b)), state)
            rows.append(y[..., 0])
    return list(out), [mx.stack(rows, 1), state]


def bitlinear() -> Result:
    x = mx.random.normal((3, 128))
    digits = mx.random.randint(0, 3, (4, 16, 128))  # -1, 0 and 1, plus one
    packed = sum(digits[i].astype(mx.uint8) << (2 * i) for i in range(4))
    with fresh("mlx_lm.models.bitlinear_layers") as module:
        layer = module.BitLinear(128, 64, bias=False)
        layer.weight = packed
        out = layer.execute_matmul_kernel(x, packed)
    return [out], [x @ (digits.reshape(64, 128).astype(mx.float32) - 1).T]


def qk_norm_rope() -> Result:
    query_heads, key_heads, dim, tokens = 4, 2, 64, 5
    x = mx.random.normal((1, tokens, 2 * (query_heads + key_heads) * dim))
    with fresh("mlx_lm.kernels.qk_norm_rope") as module:
        options = {"eps": 1e-5, "query_scale": 0.5, "rope_base": 10000.0, "offset": 7}
        out = module.qk_norm_rope(x, n_heads=query_heads, n_kv_heads=key_heads, head_dim=dim, **options)

    def expected(begin: int, heads: int) -> mx.array:
        rows = x[..., begin * dim : (begin + heads) * dim].reshape(1, tokens, heads, dim)
        rows = mx.fast.rms_norm(rows, None, 1e-5).transpose(0, 2, 1, 3)
        return mx.fast.rope(rows, dim, traditional=True, base=10000.0, scale=1.0, offset=7).transpose(0, 2, 1, 3)

    return list(out), [0.5 * expected(0, query_heads), expected(query_heads, key_heads)]


def rms_norm_sigmoid_gate() -> Result:
    heads, tokens, dim = 4, 3, 64
    x, gate = mx.random.normal((1, heads, tokens, dim)), mx.random.normal((1, tokens, heads * dim))
    with fresh("mlx_lm.kernels.rms_norm_sigmoid_gate") as module:
        out = module.rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    normed = mx.fast.rms_norm(x.transpose(0, 2, 1, 3), None, 1e-5).reshape(1, tokens, heads * dim)
    return [out], [(normed * mx.sigmoid(gate)).reshape(out.shape)]


MLX_LM: dict[str, Callable[[], Result]] = {
    "gated_delta": gated_delta("gated_delta_kernel"),
    "gated_delta unpacked": gated_delta("gated_delta_kernel_unpacked"),
    "gated_delta xtree": gated_delta("gated_delta_kernel_xtree"),
    "gated_delta vector gate": gated_delta("gated_delta_kernel", vector_gate=True),
    "gated_delta mask": gated_delta("gated_delta_kernel", mask=True),
    "ssm": ssm,
    "rwkv7": rwkv7,
    "bitlinear": bitlinear,
    "qk_norm_rope": qk_norm_rope,
    "rms_norm_sigmoid_gate": rms_norm_sigmoid_gate,
}
MLX_LM_CASES = [(name, "fast") for name in MLX_LM]
MLX_LM_CASES += [(name, "race") for name in ("gated_delta", "ssm", "rms_norm_sigmoid_gate")]
MLX_LM_CASES += [(name, "asan") for name in ("gated_delta", "bitlinear")]


@pytest.mark.parametrize(("name", "mode"), MLX_LM_CASES)
def test_kernel_of_mlx_lm(name: str, mode: metalsim.Mode) -> None:
    with metalsim.install(mode, available=True) as session:
        outputs, expected = MLX_LM[name]()
    assert session.reports, "no kernel ran"
    for out, right in zip(outputs, expected, strict=True):
        assert_close(out, right, 1e-5)


def test_race_mode_reports_the_one_race_of_mlx_lm() -> None:
    """For a masked token all lanes of a simdgroup store the same zero."""
    with metalsim.install("race", available=True), pytest.raises(metalsim.KernelFault) as caught:
        MLX_LM["gated_delta mask"]()
    assert caught.value.kinds == {metalsim.FaultKind.DATA_RACE}
    assert {fault.variable for fault in caught.value.report.faults} == {"y"}
