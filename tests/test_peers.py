"""Our caches on other people's scales: mlx-quant-fidelity's KL, and TurboQuant's 4 bits beside ours (extra: peers)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mlx_qkvshare import LoadedModel, QuantSpec, load
from mlx_qkvshare.fidelity import Candidate, Reference
from mlx_qkvshare.passages import passage, text_of

pytestmark = pytest.mark.slow
pytest.importorskip("mlx_quant_fidelity")

PREFIX, SCORED = 256, 64


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return load(dtype="float32")


@pytest.fixture(scope="module")
def peers():
    path = Path(__file__).parent.parent / "benchmarks" / "peers.py"
    spec = importlib.util.spec_from_file_location("peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(lm):
    return passage(lm.tokenizer, "moby-dick", text_of("moby-dick"), prefix_tokens=PREFIX, scored_tokens=SCORED)


@pytest.mark.parametrize("quant", [QuantSpec(), QuantSpec.preset("tight")], ids=str)
def test_mlx_quant_fidelity_finds_our_kl(peers, lm, text, quant):
    ours = Reference(lm, text).scores(Candidate("", quant)).kl.mean()
    theirs = peers.by_fidelity(lm, text.prefix, text.scored, quant)
    assert theirs["fidelity_kl"] == pytest.approx(ours, rel=0.05)


def test_turboquant_packs_four_bits_beside_ours(peers, lm, text):
    pytest.importorskip("turboquant_mlx.layers.polar_kv_cache")
    sealed, live = (peers.by_fidelity(lm, text.prefix, text.scored, way) for way in ("sealed", "live"))
    tight = peers.by_fidelity(lm, text.prefix, text.scored, QuantSpec.preset("tight"))
    values = lm.spec.private_token_bytes / lm.spec.item_bytes
    assert sealed["bytes_per_token"] == live["bytes_per_token"] == values * 4.25 / 8, "16 bits of scale for 64 values"
    assert 0 < sealed["fidelity_kl"] < live["fidelity_kl"]
    assert tight["fidelity_kl"] < live["fidelity_kl"], "its normal use"
