"""What the doctor keeps of a model: read whole or not at all, followed by default, refusing only what it measured."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import pytest
from core_helpers import make_spec

from mlx_qkvshare import QuantSpec, SharedKVCacheManager, verdict
from mlx_qkvshare.errors import InvalidValueError, UnsafeQuantError
from mlx_qkvshare.verdict import Refusal, Verdict, choose, load_verdict, verdict_path

SPEC = make_spec(layers=2, heads=2)
FACTORS = (mx.ones((1, 2, 1, 32)) * 2, None)
FOUND = Verdict(
    preset="balanced",
    calibrated=("tight",),
    refusals=(Refusal(QuantSpec(4, 8), False, "mean KL 0.13"), Refusal(QuantSpec.preset("tight"), False, "recall 0.2")),
    rows=({"config": "safe", "kl_mean": 1e-5},),
    versions={"mlx": "0.32.4"},
    key_factors=FACTORS,
)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The user's folder, with a verdict on SPEC in it."""
    monkeypatch.setattr(verdict, "default_cache_dir", lambda: tmp_path)
    FOUND.save(SPEC)
    return tmp_path


def test_it_is_kept_for_one_model_and_comes_back_whole(tmp_path):
    path = FOUND.save(SPEC, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and SPEC.fingerprint.digest in path.name
    found = load_verdict(SPEC, tmp_path)
    assert found == FOUND
    assert mx.array_equal(found.key_factors[0], FACTORS[0]) and found.key_factors[1] is None
    other = dataclasses.replace(SPEC, fingerprint=dataclasses.replace(SPEC.fingerprint, weights="others"))
    assert load_verdict(other, tmp_path) is None


@pytest.mark.parametrize("damage", ["noise", "shape", "format", "preset", "calibrated", "bare", "changed"])
def test_a_file_that_does_not_fit_counts_as_none(tmp_path, damage, monkeypatch):
    wrong = {"shape": {"key_factors": (mx.ones((1, 3, 1, 32)), None)}, "preset": {"preset": "perfect"}}
    wrong |= {"calibrated": {"calibrated": ("loose",)}, "bare": {"key_factors": (None, None)}}
    if damage == "format":
        monkeypatch.setattr(verdict, "_FORMAT", 99)
    path = dataclasses.replace(FOUND, **wrong.get(damage, {})).save(SPEC, tmp_path)
    monkeypatch.undo()
    if damage == "changed":
        path.write_bytes(path.read_bytes().replace(b"mean KL 0.13", b"mean KL 0.11"))
    if damage == "noise":
        path.write_bytes(b"not a tensor")
    assert load_verdict(SPEC, tmp_path) is None


def test_without_a_verdict_a_manager_is_safe_and_refuses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(verdict, "default_cache_dir", lambda: tmp_path)
    assert SharedKVCacheManager(SPEC).quant == QuantSpec.preset("safe")
    assert SharedKVCacheManager(SPEC, QuantSpec(2, 2)).quant == QuantSpec(2, 2)
    assert SharedKVCacheManager(SPEC, "tight").quant == QuantSpec.preset("tight")


def test_a_manager_follows_the_verdict_of_its_model(kept):
    assert SharedKVCacheManager(SPEC).quant == QuantSpec.preset("balanced")
    quant, factors = choose(SPEC, "tight")
    assert quant == QuantSpec.preset("tight") and mx.array_equal(factors[0], FACTORS[0])
    assert choose(SPEC, "safe") == (QuantSpec.preset("safe"), None)
    own = [mx.ones((1, 2, 1, 32)), None]
    assert choose(SPEC, "tight", own)[1] is own, "those that are given win"


@pytest.mark.parametrize("quant", [QuantSpec(4, 8), QuantSpec(4, 4), QuantSpec(2, 6)])
def test_what_was_measured_unsafe_is_refused_by_name_and_so_is_what_is_coarser(kept, quant):
    with pytest.raises(UnsafeQuantError, match=r"refused for this model.*mean KL 0\.13.*'balanced'"):
        SharedKVCacheManager(SPEC, quant)
    assert SharedKVCacheManager(SPEC, quant, allow_unsafe=True).quant == quant


@pytest.mark.parametrize("quant", [QuantSpec(5, 4), QuantSpec(8, 4), QuantSpec(4, 4, 32), "tight", "safe"])
def test_what_was_not_measured_unsafe_is_taken(kept, quant):
    SharedKVCacheManager(SPEC, quant)


@pytest.mark.parametrize(
    "quant",
    [
        QuantSpec(is_nested=True),
        dataclasses.replace(QuantSpec.preset("balanced"), is_adaptive=True),
        QuantSpec(4, 4, layer_bits=((0, 8, 8),)),
    ],
)
def test_a_refusal_does_not_trip_over_settings_of_another_kind(kept, quant):
    SharedKVCacheManager(SPEC, quant)


@pytest.mark.parametrize("quant", [QuantSpec(4, 4, 128), QuantSpec(2, 2, layer_bits=((0, 4, 4),))])
def test_coarser_groups_and_layers_are_refused_as_well(kept, quant):
    for factors in (None, [None, None]):
        with pytest.raises(UnsafeQuantError):
            SharedKVCacheManager(SPEC, quant, key_factors=factors)


def test_a_preset_is_the_same_by_its_value_and_by_its_name(kept):
    refused = Refusal(QuantSpec.preset("tight"), False, "mean KL 0.2")
    dataclasses.replace(FOUND, refusals=(refused,)).save(SPEC)
    for way in ("tight", QuantSpec.preset("tight")):
        assert mx.array_equal(choose(SPEC, way)[1][0], FACTORS[0])
    assert choose(SPEC, QuantSpec.preset("tight"), allow_unsafe=True)[1] is None, "just as it stands"


def test_where_every_preset_harms_nothing_is_quantized(kept):
    dataclasses.replace(FOUND, preset="full", refusals=(Refusal(QuantSpec.preset("safe"), False, "x"),)).save(SPEC)
    assert SharedKVCacheManager(SPEC).quant == QuantSpec(16, 16)


def test_an_unknown_preset_is_refused_by_name():
    with pytest.raises(InvalidValueError, match=r"preset: expected one of \['balanced', 'safe', 'tight'\], got 'best'"):
        SharedKVCacheManager(SPEC, "best")


def test_the_path_is_named_by_the_fingerprint_alone(tmp_path):
    assert verdict_path(SPEC, tmp_path).parent == tmp_path
