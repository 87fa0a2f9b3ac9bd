"""Two front ends, one engine: MLX's kernels as Apple's compiler left them agree to the bit with the simulated text.

The macOS wheel of MLX carries the kernels compiled, as AIR (see metalsim/air.py). Each test runs one of mlx_kernels.py
twice on the same inputs, from the text in MLX's headers as the simulator reads it and from Apple's AIR, and compares
the bytes of every output, and the number of barriers and of simdgroup operations, of every launch.

Optional, as it downloads 45 MB into the simulator's cache folder: runs only where this file is named,

    pytest -m "slow and metal" tests/metal/test_air.py

and is skipped, whatever METALSIM_REQUIRED says, without the wheel or LLVM's tools.

Equal bits prove the reading of the text: types, conversions, rounding, fused operations, control flow, addresses. They
prove nothing about what both sides take from here: `exp` is the C library's, the order of sums in `simd_sum` and in
matrix products is the engine's, `fmuladd` on half and bfloat is not fused, and threadgroup memory is not checked.

Not run: rms_norm, layer_norm and rope, whose text is not in the headers of the Linux wheel; steel attention, whose text
the simulator reads only with an addition; `affine_dequantize` of 3, 5 and 6 bits, which mlx_kernels.py does not launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import metalsim
import mlx.core as mx
import mlx_kernels
import numpy as np
import pytest
from metalsim import Buffer, KernelSource, Library, Settings, air

pytestmark = [pytest.mark.slow, pytest.mark.metal]

QUANTIZED: dict[str, Callable[[mx.Dtype, int, Settings], Any]] = {
    "affine_qmv": mlx_kernels.affine_qmv,
    "affine_qmm": mlx_kernels.affine_qmm,
    "affine_quantize": mlx_kernels.affine_quantize,
    "affine_dequantize": mlx_kernels.affine_dequantize,
}
PLAIN: dict[str, Callable[[mx.Dtype, Settings], Any]] = {
    "sdpa_vector": mlx_kernels.sdpa_vector,
    "sdpa_vector_2pass": mlx_kernels.sdpa_vector_2pass,
    "softmax": mlx_kernels.softmax,
}
FLOATS = [mx.float32, mx.float16, mx.bfloat16]
CASES = [(name, dtype, None) for name in PLAIN for dtype in FLOATS]
CASES += [(name, dtype, 4) for name in QUANTIZED for dtype in FLOATS]
CASES += [(name, mx.float16, bits) for name in ("affine_qmv", "affine_quantize") for bits in (2, 3, 5, 6, 8)]

Build = Callable[[KernelSource, metalsim.Mode, Any], Library]


@dataclasses.dataclass(frozen=True)
class Launched:
    """A launch, by kernel: bytes of each output before and after, and what the engine counted."""

    kernel: str
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    counts: tuple[int, int]

    def differing(self, other: Launched) -> int:
        """Bytes of outputs that are not the same."""
        pairs = zip(self.after, other.after, strict=True)
        return sum(int((np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)).sum()) for a, b in pairs)


@pytest.fixture(scope="module", autouse=True)
def apple(request: pytest.FixtureRequest) -> None:
    if not any("test_air" in argument for argument in request.config.args):
        pytest.skip("optional: runs where tests/metal/test_air.py is named")
    try:
        air.require_disassembler()
        air.wheel()
    except (metalsim.ToolchainMissing, air.WheelMissing) as reason:
        pytest.skip(f"optional: {reason}")


def name_in_metallib(source: KernelSource) -> str:
    """The name under which MLX instantiates a kernel with these template arguments."""
    kind, *rest = source.template_arguments.strip("<>").split(", ")
    if source.function == "softmax_single_row":
        return "block_softmax_" + {"float": "float32", "half": "precise_float16"}.get(kind, "precise_bfloat16")
    kind = {"half": "float16_t"}.get(kind, kind)
    if source.function.startswith("sdpa"):
        return "_".join([source.function, kind, *rest])
    suffix = {"affine_qmv_fast": "_batch_0_pr_0_hgs_0_r_4", "affine_qmm_t": "_alN_true_batch_0"}
    return f"{source.function}_{kind}_gs_{rest[0]}_b_{rest[1]}" + suffix.get(source.function, "")


def from_air(source: KernelSource, mode: metalsim.Mode, cache: Any) -> Library:
    return air.build(source, name_in_metallib(source), cache)


def launched(
    name: str, dtype: mx.Dtype, bits: int | None, build: Build, change: Callable[[bytes], bytes] = bytes
) -> list[Launched]:
    """The launches of a case with libraries of `build`; `change` is made to the first buffer of each."""
    launches, launch = [], metalsim.launch

    def recording(library: Library, buffers: Sequence[Buffer], *more: Any) -> Any:
        changed = [dataclasses.replace(buffers[0], data=change(buffers[0].data)), *buffers[1:]]
        contents, report = launch(library, changed, *more)
        before = tuple(buffer.data for buffer in buffers if buffer.writable)
        counts = report.barriers, report.simd_operations
        launches.append(Launched(library.source.name, before, tuple(contents.values()), counts))
        return contents, report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metalsim, "build", build)
        patch.setattr(metalsim, "launch", recording)
        mx.random.seed(1)
        if bits is None:
            PLAIN[name](dtype, Settings())
        else:
            QUANTIZED[name](dtype, bits, Settings())
    return launches


@pytest.mark.parametrize(("name", "dtype", "bits"), CASES, ids=lambda value: str(value).removeprefix("mlx.core."))
def test_apples_compiler_agrees_to_the_bit(name: str, dtype: mx.Dtype, bits: int | None) -> None:
    simulated, compiled = (launched(name, dtype, bits, build) for build in (metalsim.build, from_air))
    for ours, apples in zip(simulated, compiled, strict=True):
        assert all(after != before for after, before in zip(apples.after, apples.before, strict=True)), ours.kernel
        assert ours.differing(apples) == 0, ours.kernel
        assert ours.counts == apples.counts, ours.kernel


ONE_OF_EACH = [("softmax", None), ("sdpa_vector", None), ("affine_qmv", 4), ("affine_quantize", 4)]


@pytest.mark.parametrize(("name", "bits"), ONE_OF_EACH)
def test_a_changed_bit_of_the_input_is_seen(name: str, bits: int | None) -> None:
    def flip(data: bytes) -> bytes:
        return bytes([data[0], data[1], data[2] ^ 0x40, *data[3:]])

    ours = launched(name, mx.float32, bits, metalsim.build)
    apples = launched(name, mx.float32, bits, from_air, flip)
    assert [a.differing(b) > 0 for a, b in zip(ours, apples, strict=True)] == [True]


def test_a_changed_instruction_of_apples_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    disassembled = air.disassembled
    monkeypatch.setattr(air, "disassembled", lambda *which: disassembled(*which).replace("= fsub", "= fadd", 1))
    (ours,) = launched("softmax", mx.float32, None, metalsim.build)
    (apples,) = launched("softmax", mx.float32, None, from_air)
    assert ours.differing(apples) > 0


def test_what_is_not_known_is_refused_by_name() -> None:
    source = KernelSource("rms", "rms")
    with pytest.raises(metalsim.CompileError, match=r"rsqrt\.f32"):
        air.build(source, "rmsfloat32")
    with pytest.raises(metalsim.CompileError, match="no such function"):
        air.build(source, "rms_of_nothing")
    attention = KernelSource("sdpa_vector", "sdpa_vector", constants=((20, False),))
    with pytest.raises(metalsim.CompileError, match=r"function constant 2\d has no value"):
        air.build(attention, "sdpa_vector_float_128_128")
