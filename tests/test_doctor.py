"""The doctor: it refuses what breaks a model, takes what does not, and what it says is followed."""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import pytest
from cli_run import run, save_tiny
from core_helpers import loaded
from recall import BREAKING_BIAS, calibration_ids, load_recall_model, records
from tiny import RECURRENT, SLIDING

from mlx_qkvshare import QuantSpec, SharedKVCacheManager, verdict
from mlx_qkvshare.calibrate import calibrate
from mlx_qkvshare.cli.doctor import _conclusions as conclusions
from mlx_qkvshare.doctor import PLAIN, Examination, examine, judge, kernel_difference
from mlx_qkvshare.errors import InvalidValueError, UnsafeQuantError
from mlx_qkvshare.fidelity import Candidate, FidelityRow
from mlx_qkvshare.model import load
from mlx_qkvshare.passages import Passage
from mlx_qkvshare.spec import PRESETS

K4V4, TIGHT = QuantSpec(4, 4), QuantSpec.preset("tight")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder for verdicts."""
    monkeypatch.setattr(verdict, "default_cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def recall_passages(num_contexts: int = 4) -> list[Passage]:
    """Contexts of records, asked for the first value of a key, one passage each: all that the model was trained on."""
    found = []
    for seed in range(num_contexts):
        asked = records(16, seed=seed)
        for key, (first, second) in list(zip(asked.questions, asked.answers, strict=True))[:8]:
            found.append(Passage(f"{seed}/{key}", tuple(asked.prompt), (key, first, second), recalled=(0,)))
    return found


@pytest.fixture(scope="module", params=[0.0, BREAKING_BIAS], ids=["sound", "biased"])
def examined(request):
    lm = load_recall_model(request.param)
    return request.param, lm, examine(lm, passages=recall_passages(), calibration=calibration_ids())


def test_b9_it_refuses_plain_four_bit_keys_where_they_break_the_model_and_there_alone(examined):
    bias, _, found = examined
    refused = {(it.quant.k_bits, it.quant.v_bits) for it in found.verdict.refusals if it.quant in PLAIN}
    assert refused == ({(4, 4), (4, 8)} if bias else set())
    rows = {row.config: row for row in found.rows}
    assert found.recall > 0.75
    assert (rows[str(K4V4)].recall < 0.3) == bool(bias)


def test_b9_the_mended_presets_pass_on_either(examined):
    bias, _, found = examined
    rows = {row.config: row for row in found.rows}
    for name in PRESETS:
        assert rows[name].recall > found.recall - 0.05
    assert not any(it.quant in PRESETS.values() for it in found.verdict.refusals)
    worst = max(layer.key_error for layer in found.layers)
    assert (worst > 0.5) == bool(bias)
    assert (max(layer.channel_outlier for layer in found.layers) > 30) == bool(bias)


def test_b9_what_it_says_is_followed(examined, folder):
    bias, lm, found = examined
    found.verdict.save(lm.spec)
    assert SharedKVCacheManager(lm.spec).quant == QuantSpec.preset(found.verdict.preset)
    if not bias:
        SharedKVCacheManager(lm.spec, K4V4)
        return
    for quant in (K4V4, QuantSpec(3, 8)):
        with pytest.raises(UnsafeQuantError, match=r"refused for this model.*recall"):
            SharedKVCacheManager(lm.spec, quant)
    SharedKVCacheManager(lm.spec, K4V4, allow_unsafe=True)
    SharedKVCacheManager(lm.spec, "tight")


@pytest.mark.parametrize("family", [{}, SLIDING, RECURRENT], ids=["full", "sliding", "recurrent"])
def test_every_kind_of_model_is_examined_on_the_texts_that_come_along(family):
    lm = loaded(**family)
    found = examine(lm)
    with_factors = any(factor is not None for factor in calibrate(lm))
    assert len(found.rows) == len(PLAIN) + len(PRESETS) * (2 if with_factors else 1) == len(found.settings)
    assert [layer.layer for layer in found.layers] == [
        i for i, it in enumerate(lm.spec.layers) if it in lm.spec.attention
    ]
    assert found.verdict.preset in PRESETS and 0 <= found.recall <= 1


def test_a_model_without_a_tokenizer_needs_tokens():
    with pytest.raises(InvalidValueError, match="passages, calibration"):
        examine(load_recall_model())


# --- the judgement --------------------------------------------------------------------------------


def row(name: str, kl: float, recall: float = 0.9) -> FidelityRow:
    return FidelityRow(name, 8, 8, 64, 1, 8.5, 1.9, 1, kl_mean=kl, recall=recall)


def judged(**kl: float | tuple[float, float]):
    """The verdict where presets, without and with factors, have these KLs (and recalls)."""
    factors, candidates, rows = [mx.ones((1, 1, 1, 32))], [], []
    for name, values in kl.items():
        preset, _, calibrated = name.partition("_")
        quant = PRESETS.get(preset, K4V4)
        candidates.append(Candidate(name, quant, factors if calibrated else None))
        rows.append(row(name, *(values if isinstance(values, tuple) else (values,))))
    return judge(candidates, rows, 0.9, factors)


def test_the_smallest_preset_that_nobody_notices_is_taken():
    assert judged(safe=1e-5, balanced=2e-4, tight=9e-4).preset == "tight"
    assert judged(safe=1e-5, balanced=2e-4, tight=2e-3).preset == "balanced"
    assert judged(safe=1e-5, balanced=2e-3, tight=2e-3).preset == "safe"
    assert judged(safe=2e-2, balanced=1e-2, tight=2e-2).preset == "balanced", "the least harmful"
    assert judged(safe=1e-1, balanced=2e-1, tight=2e-1).preset == "full", "all are refused"
    assert judged(safe=1e-5, balanced=(2e-4, 0.8), tight=2e-3).preset == "safe", "recall counts as well"


def test_factors_are_taken_where_they_help():
    found = judged(safe=1e-5, safe_f=2e-5, balanced=2e-4, balanced_f=2e-4, tight=2e-3, tight_f=8e-4)
    assert found.calibrated == ("tight",) and found.preset == "tight" and len(found.key_factors) == 1
    assert judged(safe=1e-5, safe_f=2e-5, balanced=2e-4, tight=2e-3).key_factors == ()
    assert judged(safe=1e-5, balanced=2e-4, tight=float("nan"), tight_f=1e-4).calibrated == ("tight",)


@pytest.mark.parametrize(("values", "reason"), [((0.05, 0.9), "mean KL 0.05"), ((1e-3, 0.6), "recall 60% of 90%")])
def test_a_refusal_says_why(values, reason):
    found = judged(safe=1e-5, balanced=2e-4, tight=2e-3, plain=values)
    assert [(it.quant, it.reason) for it in found.refusals] == [(K4V4, reason)]
    assert judged(safe=1e-5, balanced=2e-4, tight=2e-3, plain=float("nan")).refusals, "not a number is no pass"


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        ((1e-5, 2e-4, 2e-3), "verdict: balanced, the smallest preset that nobody will notice"),
        ((2e-2, 1e-2, 2e-2), "verdict: balanced, the least harmful preset"),
        ((1e-1, 2e-1, 2e-1), "verdict: full, since every preset damages this model"),
    ],
)
def test_the_words_are_those_of_the_verdict(kl, words):
    settings = [*PLAIN, *PRESETS.values()]
    names = [*map(str, PLAIN), *PRESETS]
    candidates = [Candidate(name, quant) for name, quant in zip(names, settings, strict=True)]
    rows = tuple(row(name, value) for name, value in zip(names, [1e-3] * len(PLAIN) + list(kl), strict=True))
    found = judge(candidates, rows, 0.9, [None])
    lines = conclusions(Examination(tuple((quant, False) for quant in settings), rows, (), 0.9, found))
    assert any(line.startswith(words) for line in lines), lines


# --- the command ----------------------------------------------------------------------------------


def test_doctor_prints_keeps_and_is_followed(monkeypatch, tmp_path, folder):
    model = save_tiny(tmp_path / "model")
    shown = run(monkeypatch, "doctor", model)
    assert shown.code == 0, shown.err
    assert "no Metal device" in shown.out or "ok, within" in shown.out
    assert "verdict: " in shown.out and "take this" in shown.out and "worst layers" in shown.out
    spec = load(model).spec
    kept = verdict.load_verdict(spec)
    assert kept is not None and f"verdict: {kept.preset}" in shown.out and str(folder) in shown.err
    assert SharedKVCacheManager(spec).quant == QuantSpec.preset(kept.preset)

    refusal = verdict.Refusal(K4V4, False, "mean KL 0.2")
    dataclasses.replace(kept, refusals=(refusal,)).save(spec)
    for command in ("demo", "chat"):
        shown = run(monkeypatch, command, "--model", model, "--bits", 4, "--max-tokens", 2)
        assert shown.code == 2 and "refused for this model" in shown.err and "mean KL 0.2" in shown.err
    shown = run(monkeypatch, "chat", "--model", model, "--bits", 4, "--max-tokens", 2, "--unsafe")
    assert shown.code == 0, shown.err


def test_doctor_json_is_one_line_with_all_of_it_and_may_keep_nothing(monkeypatch, tmp_path, folder):
    model = save_tiny(tmp_path / "model")
    shown = run(monkeypatch, "doctor", model, "--json", "--no-save")
    (line,) = shown.out.splitlines()
    found = json.loads(line)
    assert {"kernel", "preset", "calibrated", "refused", "layers", "results", "machine", "versions"} <= set(found)
    assert len(found["layers"]) == 2 and not folder.exists()


@pytest.mark.skipif(mx.metal.is_available(), reason="for machines without a GPU")
def test_without_metal_no_kernel_is_checked():
    assert kernel_difference(loaded().spec) is None
