"""The strict pass over our kernels: stricter than what runs them, as Metal itself is."""

from __future__ import annotations

import metalsim
import mlx.core as mx
import pytest
from dump_sources import SOURCES, Recorder
from test_attend_part import CHECKED, problem
from test_quantize_pack import plan

from mlx_qkvshare.kernels import build_kernel, merge_state
from mlx_qkvshare.pack_kernel import quantize_pack
from mlx_qkvshare.part_kernel import attend_part

pytestmark = pytest.mark.metal


def test_no_complaint_about_any_kernel(simulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "metal_kernel", Recorder)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    SOURCES.clear()
    build_kernel.cache_clear()
    for case in CHECKED:
        attend_part(*problem(case))
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        quantize_pack(mx.zeros((1, 1, 2, 80), dtype), plan(80, 3, 32))
        quantize_pack(mx.zeros((1, 1, 2, 64), dtype), plan(64, 3, 32), centre=mx.zeros((1, 64)), is_rotated=True)
        merge_state(mx.zeros((2, 16)), mx.ones((2, 16)), mx.zeros((2, 16, 64)), dtype)
    build_kernel.cache_clear()
    assert len(SOURCES) == len(CHECKED) + 9
    for source in SOURCES.values():
        assert metalsim.complaints(source) == []
