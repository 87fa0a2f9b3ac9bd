"""What fidelity measures: right on what can be computed by hand, nothing lost in full precision or on the way."""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest
from cli_run import run, save_tiny
from core_helpers import FULL, K8V8, loaded
from tiny import RECURRENT, SLIDING, tiny_tokenizer

from mlx_qkvshare import QuantSpec
from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.fidelity import Candidate, Reference, Scores, fidelity, make_row, standard_candidates, summary
from mlx_qkvshare.passages import CALIBRATION_TEXT, TEXTS, Passage, copy_passage, passage, text_of, tokens_of

KINDS = {"full": {}, "sliding": SLIDING, "recurrent": RECURRENT}
ONE_TEXT = {"prefix_tokens": 48, "scored_tokens": 40}
SAFE = QuantSpec.preset("safe")


def of_text(lm) -> Passage:
    return passage(lm.tokenizer, "moby-dick", text_of("moby-dick"), **ONE_TEXT)


@pytest.fixture(params=KINDS)
def lm(request):
    return loaded(**KINDS[request.param])


def numpy_scores(exact: np.ndarray, ours: np.ndarray, ids) -> dict[str, np.ndarray]:
    """The same in numpy and float64."""

    def log_probs(logits):
        logits = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    p, q, nxt = log_probs(exact), log_probs(ours), np.array(ids[1:])
    rows = np.arange(len(nxt))
    return {
        "kl": (np.exp(p) * (p - q)).sum(axis=-1),
        "agrees": p.argmax(axis=-1) == q.argmax(axis=-1),
        "growth": p[rows, nxt] - q[rows, nxt],
        "hits": q[:-1].argmax(axis=-1) == nxt,
    }


def test_full_precision_loses_nothing_for_any_kind_of_layer(lm):
    reference = Reference(lm, of_text(lm))
    for handoffs in (1, 3):
        found = reference.scores(Candidate("full", FULL, num_handoffs=handoffs))
        assert np.abs(found.kl).max() < 1e-5 and found.agrees.all()
    assert reference.scores(Candidate("K8", K8V8)).kl.mean() < 1e-4


def test_scores_are_those_of_numpy(monkeypatch):
    lm = loaded()
    reference = Reference(lm, dataclasses.replace(of_text(lm), recalled=tuple(range(39))))
    seen = []
    compare = reference._compare
    monkeypatch.setattr(reference, "_compare", lambda logits: seen.append(np.array(logits)) or compare(logits))
    found = reference.scores(Candidate("two bits", QuantSpec(2, 2)))
    expected = numpy_scores(np.array(reference._log_probs), seen[0], reference.passage.scored)
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(found, name), values, atol=2e-5, err_msg=name)
    assert found.kl.mean() > 1e-3, "there is something to see"


def test_the_eighth_handoff_equals_the_first_bit_for_bit(lm):
    reference = Reference(lm, of_text(lm))
    for quant in (QuantSpec(4, 4), QuantSpec.preset("tight")):
        once, often = (reference.scores(Candidate("", quant, num_handoffs=count)) for count in (1, 8))
        for name in ("kl", "agrees", "growth", "hits"):
            assert np.array_equal(getattr(once, name), getattr(often, name)), name


def test_mlx_lm_stands_beside_where_it_does_not_refuse(lm):
    found = Reference(lm, of_text(lm)).scores(Candidate("stock", K8V8, is_stock=True))
    if lm.spec.windows:
        assert found is None
    else:
        assert 0 < found.kl.mean() < 1e-2
        odd = Candidate("stock", QuantSpec(8, 8, 128), is_stock=True)  # no head dim here is a multiple of 128
        assert Reference(lm, of_text(lm)).scores(odd) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cache_of_half_precision_is_measured_on_a_model_that_computes_in_full(dtype):
    lm = loaded()
    exact, half = (Reference(lm, of_text(lm), dtype=it).scores(Candidate("", SAFE)).kl.mean() for it in (None, dtype))
    assert exact < half < 1e-2
    assert {x.dtype for x in Reference(lm, of_text(lm), dtype=dtype).rows[0]} == {getattr(mx, dtype)}


def scores(kl=(), growth=(), hits=(), agrees=None) -> Scores:
    agrees = np.ones(len(kl), bool) if agrees is None else np.array(agrees)
    return Scores(np.array(kl, np.float32), agrees, np.array(growth, np.float32), np.array(hits, bool))


def test_a_summary_is_over_all_tokens_of_all_texts_and_recall_over_copies():
    found = summary(
        {
            "a": scores([1.0, 2.0, 3.0], [0.0, 0.0], agrees=[True, True, False]),
            "b": scores([4.0], [0.0, 0.2], agrees=[True]),
            "copy": scores([9.0], [9.0], hits=[True, True, False, True]),
        }
    )
    assert found["kl_mean"] == 2.5 and found["kl_max"] == 4.0 and found["kl_by_passage"] == {"a": 2.0, "b": 4.0}
    assert found["top1_agreement"] == 0.75 and found["recall"] == 0.75
    assert found["kl_p99"] == pytest.approx(np.quantile([1, 2, 3, 4], 0.99))
    assert found["ppl_delta_percent"] == pytest.approx(100 * np.expm1(0.05))
    low, high = found["ppl_delta_interval"]
    assert low < found["ppl_delta_percent"] < high
    assert summary({"a": scores([1.0], [0.0]), "b": None}) == {}, "refused"
    one = summary({"a": scores([1.0], [0.1])})
    assert one["ppl_delta_percent"] == pytest.approx(100 * np.expm1(0.1)) and one["ppl_delta_interval"] is None


def test_the_interval_has_the_truth_19_times_of_20():
    generator, num_inside = np.random.default_rng(0), 0
    for _ in range(200):
        growth = generator.normal(0.01, 0.5, 1024)
        low, high = summary({"a": scores([0.0], growth)})["ppl_delta_interval"]
        num_inside += low <= 100 * np.expm1(0.01) <= high
    assert 178 <= num_inside <= 199, num_inside


def test_a_row_has_the_bytes_of_the_model_and_the_bits_of_a_16_bit_one():
    spec = loaded().spec  # 2 layers of 2 heads, 64 wide, in float32
    row = make_row(Candidate("x", QuantSpec(8, 8)), spec, 100, {})
    assert row.bytes_per_token == QuantSpec(8, 8).packed_bytes(spec, 100) / 100
    assert row.bits_per_value == 8.5 and row.ratio_vs_fp16 == pytest.approx(16 / 8.5)
    assert row.kl_mean is None and row.recall is None


def test_the_candidates_have_all_that_is_compared():
    names = [it.name for it in standard_candidates([None, None], handoffs=8)]
    assert len(set(names)) == len(names)
    assert {"mlx-lm 4 bit", "K4V4 g64", "safe", "safe, factors", "safe, factors, 8 hops"} <= set(names)
    assert all("factors" not in it.name for it in standard_candidates(None))


def test_rows_come_in_the_order_of_the_candidates(lm):
    texts = [of_text(lm), copy_passage(lm.tokenizer, text_of("moby-dick"), prefix_tokens=64, scored_tokens=40)]
    full, two = fidelity(lm, [Candidate("full", FULL), Candidate("two bits", QuantSpec(2, 2))], texts)
    assert (full.config, two.config) == ("full", "two bits")
    assert abs(full.kl_mean) < 1e-6 < 1e-3 < two.kl_mean and 0 <= full.recall <= 1


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TEXTS, CALIBRATION_TEXT])
def test_the_texts_are_long_enough_and_small_enough(name):
    assert 30_000 < len(text_of(name)) < 10**6


def test_a_passage_is_cut_without_a_gap_and_begins_as_the_model_wants():
    tokenizer, text = tiny_tokenizer(), text_of("union-1962")
    found = passage(tokenizer, "x", text, prefix_tokens=30, scored_tokens=20)
    assert [*found.prefix, *found.scored] == tokens_of(tokenizer, text, 50) and not found.recalled
    begin = tokenizer.encode("")
    assert list(found.prefix[: len(begin)]) == begin


def test_a_copy_repeats_tokens_in_an_order_that_no_text_has():
    tokenizer, text = tiny_tokenizer(), text_of("moby-dick")
    found = copy_passage(tokenizer, text, prefix_tokens=60, scored_tokens=40)
    begin = len(tokenizer.encode(""))
    assert found.scored == found.prefix[begin : begin + 40]
    assert sorted(found.prefix) == sorted(tokens_of(tokenizer, text, 60)) != list(found.prefix)
    assert found.recalled == tuple(range(16, 39))


def test_too_short_a_text_is_refused():
    with pytest.raises(InvalidValueError, match="expected 50 tokens or more, got"):
        passage(tiny_tokenizer(), "x", "too short", prefix_tokens=30, scored_tokens=20)


# --- the command ----------------------------------------------------------------------------------


def test_bench_fidelity_prints_a_table_and_ends_in_json(monkeypatch, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text(text_of("union-1962")[:4000])
    model = save_tiny(tmp_path / "model")
    shown = run(
        monkeypatch, "bench", "fidelity", "--model", model, "--prefix", 40, "--scored", 32, "--copy", 64, "--text", own
    )
    assert shown.code == 0, shown.err
    assert "own" in shown.out and "tight, factors, 8 hops" in shown.out
    found = json.loads(shown.out.splitlines()[-1])
    rows = {row["config"]: row for row in found["results"]}
    wanted = "config k_bits v_bits group_size bytes_per_token ratio_vs_fp16 kl_mean kl_p99 top1_agreement"
    assert set(f"{wanted} ppl_delta_percent recall handoffs".split()) <= set(rows["safe"])
    assert rows["safe, factors"]["kl_mean"] == rows["safe, factors, 8 hops"]["kl_mean"]
    assert rows["safe, factors, 8 hops"]["handoffs"] == 8 and list(rows["safe"]["kl_by_passage"]) == ["own"]


@pytest.mark.parametrize(("option", "value"), [("--dtype", "int8"), ("--text", "missing.txt"), ("--copy", "20")])
def test_bench_fidelity_refuses_odd_input_in_one_line(monkeypatch, tmp_path, option, value):
    shown = run(monkeypatch, "bench", "fidelity", "--model", tmp_path, option, value)
    assert shown.code == 2 and len(shown.err.strip().splitlines()) == 1 and value in shown.err
