"""`qkvshare bench all`: every bench in one go, a failure that loses nothing, comparison with what was before, plots."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_run import Result, run, save_tiny
from tiny import SLIDING, tiny_tokenizer
from zoo_configs import build

from mlx_qkvshare import LoadedModel, plots
from mlx_qkvshare import bench_all as bench_all_module
from mlx_qkvshare import versions as versions_module
from mlx_qkvshare.bench_all import SUITE, headlines, layer_shape, suite
from mlx_qkvshare.bench_attention import AttentionShape
from mlx_qkvshare.bench_compare import (
    BYTES_LIMIT,
    KL_LIMIT,
    PEAK_LIMIT,
    SHARE_LIMIT,
    check_comparable,
    compare,
    figures,
    read_results,
)
from mlx_qkvshare.cli import bench_all as command
from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.model import describe

SMALL = ["--agents", "1,2", "--tokens", "64,128", "--shared", 64, "--repeats", 1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position=1024)


@pytest.fixture(scope="module")
def ran(tiny, tmp_path_factory) -> tuple[Result, Path]:
    """The whole suite on T, once."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        return run(patch, "bench", "all", "--model", tiny, "--out", out / "new", *SMALL), out / "new"


@pytest.fixture
def results(ran) -> dict[str, Any]:
    return read_results(ran[1] / command.RESULTS)


@pytest.fixture
def stubs(monkeypatch, results) -> None:
    """No bench measures anything: each gives what the real one found; and nothing is drawn."""
    monkeypatch.setattr(command, "can_draw", lambda: False)
    for name in SUITE:
        monkeypatch.setitem(bench_all_module.SUITE, name, lambda lm, sizes, note, name=name: results["results"][name])


def test_all_of_it_runs_is_summed_up_and_kept(ran, results):
    shown, out = ran
    assert shown.code == 0, shown.err
    assert list(results["results"]) == list(SUITE) and results["failed"] == {}
    for name, result in results["results"].items():
        assert result["rows"] and result["seconds"] > 0 and f"] {name}: " in shown.err, name
    assert results["results"]["attention"]["crossovers"] and results["settings"]["tokens"] == [64, 128]
    for name in ("2 agents on 64 tokens", "bytes copied by it", "peak, 128 tokens", "mean KL, tight"):
        assert name in shown.out
    *lines, last = shown.out.splitlines()
    assert max(map(len, lines[3:])) <= 80
    assert json.loads(last) == results, "it ends in one JSON line"
    assert results["machine"]["cpu"] and results["fingerprint"] and results["dtype"] == "float32"
    assert f"wrote {out / command.RESULTS}" in shown.err


def test_headlines_are_the_figures_of_the_rows(results):
    found = {(it.bench, it.what): it for it in headlines(results["results"])}
    row = results["results"]["memory"]["rows"][-1]
    it = found["memory", "2 agents on 64 tokens"]
    assert (it.ours, it.stock, it.unit) == (row["ours_bytes"], row["stock_bytes"], "bytes")
    assert {bench for bench, _ in found} == set(SUITE)
    assert headlines({}) == []


def test_headlines_are_of_the_most_agents_and_of_one_number_of_bits(results):
    found = copy.deepcopy(results["results"])
    for result in found.values():
        result["rows"].reverse()
    named = {(it.bench, it.what) for it in headlines(found)}
    assert {("memory", "2 agents on 64 tokens"), ("decode", "2 agents / a batch")} <= named
    assert {("handoff", "handoff of 128 tokens"), ("restore", "card / file, 128 tokens")} <= named
    attention = [it.what for it in headlines(results["results"]) if it.bench == "attention"]
    assert attention == ["layer, 1 new token, 8 bits", "layer, 2 agents, 8 bits"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama4", (4, 2, 32)),  # its config is nested
        ("afm7", (4, 2, 32)),  # its config has other names
        ("openelm", (4, 2, 32)),  # or a number for each layer
        ("plamo2", (4, 2, 32)),  # its attention is its own, which cannot be seen
        ("kimi_k25", (4, 1, 64)),  # latent and nested
    ],
)
def test_the_layer_that_is_measured_has_the_models_query_heads(name, shape):
    model, config = build(name)
    lm = LoadedModel(model, tiny_tokenizer(), describe(model, config, tiny_tokenizer()))
    assert layer_shape(lm) == AttentionShape(*shape)


def test_a_model_of_states_alone_has_no_layer_to_measure():
    model, config = build("mamba2")
    with pytest.raises(InvalidValueError, match="states alone"):
        layer_shape(LoadedModel(model, tiny_tokenizer(), describe(model, config, tiny_tokenizer())))


def test_where_mlx_lm_refuses_the_rest_is_shown(monkeypatch, tmp_path):
    folder = save_tiny(tmp_path / "model", max_position=1024, **SLIDING)
    shown = run(monkeypatch, "bench", "all", "--model", folder, "--out", tmp_path, "--only", "memory, fidelity", *SMALL)
    assert shown.code == 0, shown.err
    found = read_results(tmp_path / command.RESULTS)
    assert list(found["results"]) == ["memory", "fidelity"]
    assert found["results"]["memory"]["rows"][0]["stock_quantized_bytes"] is None
    assert all(len(series.points) > 0 for plot in plots.plots(found) for series in plot.series)


def test_one_that_fails_loses_no_other_and_is_named(monkeypatch, tmp_path, tiny, stubs):
    def fail(lm, sizes, note):
        raise ZeroDivisionError("[/red] nothing there")

    monkeypatch.setitem(bench_all_module.SUITE, "prefill", fail)
    only = ["--only", "prefill,memory,attention"]
    shown = run(monkeypatch, "bench", "all", "--model", tiny, "--out", tmp_path, *only, *SMALL)
    assert shown.code == 1 and "error: prefill failed: ZeroDivisionError: [/red] nothing there" in shown.err
    found = read_results(tmp_path / command.RESULTS)
    assert list(found["results"]) == ["memory", "attention"] and list(found["failed"]) == ["prefill"]
    assert "2 agents on 64 tokens" in shown.out


def test_an_interrupt_leaves_what_was_measured(monkeypatch, tmp_path, tiny, stubs):
    def interrupt(lm, sizes, note):
        raise KeyboardInterrupt

    monkeypatch.setitem(bench_all_module.SUITE, "prefill", interrupt)
    shown = run(monkeypatch, "bench", "all", "--model", tiny, "--out", tmp_path, "--only", "memory,prefill", *SMALL)
    assert shown.code != 0
    assert list(read_results(tmp_path / command.RESULTS)["results"]) == ["memory"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "memory,nothing"], "nothing"),
        (["--tokens", "none"], "--tokens"),
        (["--compare", "/no/such/file"], "/no/such/file"),
        (["--compare", __file__], "test_bench_all.py: expected results of `bench all`"),
        (["--compare", "/tmp"], "error: [compare] /tmp: expected results of `bench all`, got Is a directory"),
    ],
)
def test_what_is_asked_wrongly_is_told_before_anything_is_measured(monkeypatch, tmp_path, options, words):
    shown = run(monkeypatch, "bench", "all", "--model", "/no/such/model", "--out", tmp_path / "out", *options)
    assert shown.code == 2 and words in shown.err and not (tmp_path / "out").exists()


def test_the_suite_by_names():
    assert list(suite([])) == list(SUITE) and list(suite(["decode", "memory"])) == ["memory", "decode"]
    with pytest.raises(InvalidValueError, match="decoding"):
        suite(["decoding"])


# --- comparison -----------------------------------------------------------------------------------


def changed(results: dict[str, Any], bench: str, name: str, factor: float, row: int = -1) -> dict[str, Any]:
    """A copy in which one figure is `factor` times what it was."""
    twin = copy.deepcopy(results)
    target, key = twin["results"][bench]["rows"][row], name
    if "." in name:
        outer, key = name.split(".")
        target = target[outer]
    target[key] = target[key] * factor
    return twin


def verdicts(old: dict[str, Any], new: dict[str, Any], **options: float) -> dict[str, str]:
    return {it.name: it.verdict for it in compare(old, new, **options).changes if it.verdict}


def test_results_against_themselves_are_as_before(results):
    found = compare(results, copy.deepcopy(results))
    assert set(found.drift.values()) == {1.0} and found.missing == ()
    assert {(it.ratio, it.verdict) for it in found.changes} == {(1.0, "")}
    names = {it.name for it in found.changes}
    assert {"ours_bytes", "bytes_copied", "ours_peak_bytes", "card_bytes", "kl_mean", "recall"} <= names
    assert {"handoff_seconds", "ours_tokens_per_second", "cold_milliseconds.packed"} <= names
    assert not any("stock" in name or "full_precision" in name or "hot" in name for name in names)


@pytest.mark.parametrize(
    ("bench", "name", "limit"),
    [
        ("memory", "ours_bytes", BYTES_LIMIT),
        ("restore", "card_bytes", BYTES_LIMIT),
        ("decode", "kv_bytes_read_per_step", BYTES_LIMIT),
        ("prefill", "ours_peak_bytes", PEAK_LIMIT),
    ],
)
def test_bytes_may_not_grow(results, bench, name, limit):
    assert verdicts(results, changed(results, bench, name, limit)) == {}
    assert verdicts(results, changed(results, bench, name, limit + 0.001)) == {name: "regression"}
    assert verdicts(results, changed(results, bench, name, 0.9)) == {name: "better"}


def test_a_first_copied_byte_is_a_regression(results):
    new = copy.deepcopy(results)
    new["results"]["handoff"]["rows"][0]["bytes_copied"] = 1
    (change,) = compare(results, new).regressions
    assert change.ratio == float("inf") and (change.bench, change.row, change.name) == (
        "handoff",
        "64 tokens",
        "bytes_copied",
    )


def test_quality_may_not_fall(results):
    old = changed(results, "fidelity", "kl_mean", 1)
    old["results"]["fidelity"]["rows"][-1].update(kl_mean=1e-3, top1_agreement=0.95, recall=0.5)
    for name, within, beyond in (
        ("kl_mean", KL_LIMIT, KL_LIMIT + 0.01),
        ("recall", 0.99, 0.97),
        ("top1_agreement", 1, 0.98),
    ):
        assert verdicts(old, changed(old, "fidelity", name, within)) == {}
        assert verdicts(old, changed(old, "fidelity", name, beyond)) == {name: "regression"}
    assert SHARE_LIMIT == 0.01
    old["results"]["fidelity"]["rows"][-1]["kl_mean"] = 1e-8  # next to nothing, and ten times that is so, too
    assert verdicts(old, changed(old, "fidelity", "kl_mean", 10)) == {}


def test_times_are_slower_only_beyond_noise_and_are_no_regression(results):
    for name, factor in (("ttft_handoff_seconds", 1.6), ("decode_seconds_per_token", 1.6)):
        assert verdicts(results, changed(results, "handoff", name, factor)) == {name: "slower"}
        assert verdicts(results, changed(results, "handoff", name, factor), noise=2) == {}
    slower = changed(results, "decode", "ours_tokens_per_second", 1 / 1.6)
    assert (
        verdicts(results, slower) == {"ours_tokens_per_second": "slower"} and compare(results, slower).regressions == ()
    )
    assert verdicts(results, changed(results, "attention", "cold_milliseconds.packed", 0.5)) == {
        "cold_milliseconds.packed": "better"
    }


def slowed(results: dict[str, Any], factor: float) -> dict[str, Any]:
    """As on a machine that has something else to do."""
    twin = copy.deepcopy(results)
    for bench, result in twin["results"].items():
        for row in result["rows"]:
            for it in list(figures({"results": {bench: {"rows": [row]}}})):
                outer, _, inner = it.name.partition(".")
                target, key = (row[outer], inner) if inner else (row, outer)
                if it.kind in ("time", "rate"):
                    target[key] *= factor if it.kind == "time" else 1 / factor
    return twin


def test_one_bench_in_a_slow_moment_is_told_by_mlx_lms_times_in_it(results):
    new = slowed(results, 3)
    new["results"] = results["results"] | {"decode": new["results"]["decode"]}
    found = compare(results, new)
    assert not any(it.verdict for it in found.changes)
    assert found.drift["decode"] == pytest.approx(3) and found.drift["handoff"] == found.drift[""] == 1


def test_what_did_not_gain_from_a_faster_machine_is_shown_but_not_called_slower(results):
    new = slowed(results, 1 / 3)
    new["results"]["handoff"]["rows"][0]["handoff_seconds"] *= 3
    (change,) = [it for it in compare(results, new).changes if it.name == "handoff_seconds" and it.row == "64 tokens"]
    assert change.ratio == pytest.approx(1) and change.slowdown == pytest.approx(3) and change.verdict == ""


def test_a_slow_machine_is_told_by_mlx_lms_own_times(results):
    found = compare(results, slowed(results, 3))
    assert list(found.drift.values()) == pytest.approx([3] * len(found.drift)) and not any(
        it.verdict for it in found.changes
    )


def test_another_machines_times_are_not_judged_but_its_bytes_are(results):
    other = slowed(changed(results, "memory", "ours_bytes", 1.5), 9)
    other["machine"] = other["machine"] | {"cpu": "another"}
    found = compare(results, other)
    assert found.notes == ("The times before are another machine's: none is called slower.",)
    assert found.drift == {} and [(it.name, it.verdict) for it in found.changes if it.verdict] == [
        ("ours_bytes", "regression")
    ]


def test_figures_that_are_gone_are_named(results):
    new = copy.deepcopy(results)
    del new["results"]["decode"]
    found = compare(results, new)
    assert found.missing and all(name.startswith("decode, ") for name in found.missing)


def test_without_times_of_mlx_lm_the_machine_is_not_called_another(results):
    few = results | {"results": {"fidelity": results["results"]["fidelity"]}}
    assert compare(results, few).notes == ("No time of mlx-lm's is in both: none is called slower.",)


def test_a_processor_is_known_by_its_name_and_numbers(monkeypatch, tmp_path):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(versions_module, "_CPUINFO", path)
    monkeypatch.setattr(versions_module.sys, "platform", "linux")
    fields = "processor\t: 0\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel\t\t: 9\n"
    for text, name in ((fields.format(1), "AMD EPYC 1"), (fields.format(17), "AMD EPYC 17"), ("", "")):
        path.write_text(text)
        assert versions_module.cpu_model.__wrapped__() == name
    path.unlink()
    assert versions_module.cpu_model.__wrapped__() == ""


def test_another_version_is_told_and_compared(results):
    old = results | {"versions": results["versions"] | {"mlx": "0.1"}}
    found = compare(old, results)
    assert found.notes == (f"another version: mlx 0.1 -> {results['versions']['mlx']}",) and found.changes


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("dtype", {"dtype": "float16"}),
        ("quant", {"settings": {"quant": "K4V4 g64", "shared_tokens": 64}}),
        ("fingerprint", {"fingerprint": "another"}),  # at the same path
    ],
)
def test_what_is_packed_otherwise_or_of_another_model_is_refused(results, name, before):
    with pytest.raises(InvalidValueError, match=rf"\[compare\] {name}: expected results of "):
        check_comparable(results | before, results)


def test_a_model_is_known_by_its_fingerprint_or_else_by_its_name(results):
    assert compare(results | {"model": f"{results['model']}/"}, results).changes, "the same path, spelled otherwise"
    old = {name: value for name, value in results.items() if name not in ("fingerprint", "dtype")}
    assert compare(old, results).changes
    with pytest.raises(InvalidValueError, match="another"):
        compare(old | {"model": "another"}, results)


def test_quality_behind_another_prefix_is_not_compared(results):
    old = copy.deepcopy(results)
    old["settings"]["shared_tokens"] = 32
    assert "fidelity" not in {it.bench for it in compare(old, results).changes}


def test_figures_that_become_nan_are_regressions(results):
    new = copy.deepcopy(results)
    new["results"]["fidelity"]["rows"][-1]["kl_mean"] = float("nan")
    assert [it.name for it in compare(results, new).regressions] == ["kl_mean"]


def damaged(results: dict[str, Any], bench: str, **values: object) -> dict[str, Any]:
    twin = copy.deepcopy(results)
    twin["results"][bench]["rows"][0].update(values)
    return twin


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda it: {k: v for k, v in it.items() if k != "model"}, "got model: None"),
        (lambda it: {k: v for k, v in it.items() if k != "machine"}, "got machine: None"),
        (lambda it: it | {"machine": None}, "got machine: None"),
        (lambda it: it | {"settings": []}, r"got settings: \[\]"),
        (lambda it: it | {"results": {"memory": {}}}, "got memory: rows None"),
        (lambda it: it | {"results": {"memory": {"rows": [None]}}}, r"got memory: rows \[None\]"),
        (lambda it: damaged(it, "memory", agents=[1]), "got memory: agents, shared_tokens, private_tokens "),
        (lambda it: damaged(it, "decode", stock_batch_tokens_per_second=0), "stock_batch_tokens_per_second 0$"),
        (lambda it: damaged(it, "handoff", ttft_hot_seconds=-1.0), "ttft_hot_seconds -1.0$"),
        (lambda it: damaged(it, "fidelity", kl_mean=float("nan")), "fidelity: kl_mean nan$"),
        (lambda it: damaged(it, "memory", ours_bytes="12"), "memory: ours_bytes '12'$"),
        (lambda it: damaged(it, "memory", ours_bytes=10**400), "memory: ours_bytes 1000"),
        (lambda it: damaged(it, "attention", cold_milliseconds={"packed": "1"}), "cold_milliseconds.packed '1'$"),
    ],
)
def test_damaged_results_are_refused_in_one_line(results, tmp_path, damage, words):
    path = tmp_path / "it.json"
    path.write_text(json.dumps(damage(results)))
    with pytest.raises(InvalidValueError, match=words) as raised:
        read_results(path)
    assert str(raised.value).startswith(f"[compare] {path}: expected results of `bench all`, got ")


def test_a_bench_that_is_not_known_is_left_out_and_told(results, tmp_path):
    path = tmp_path / "it.json"
    path.write_text(json.dumps(results | {"results": results["results"] | {"newbench": ["anything"]}}))
    found = compare(read_results(path), results)
    assert found.notes == ("newbench: not known here, and left out",) and not found.regressions


def test_results_of_another_format_are_refused(results, tmp_path):
    with pytest.raises(InvalidValueError, match="noise"):
        compare(results, results, noise=0.5)
    path = tmp_path / "it.json"
    for text in (
        "",
        "[]",
        "[" * 100_000,
        "{}",
        json.dumps(results | {"format": 0}),
        json.dumps(results | {"results": {"memory": {"rows": [{}]}}}),
    ):
        path.write_text(text)
        with pytest.raises(InvalidValueError, match=r"it\.json"):
            read_results(path)


def test_the_command_compares_and_says_so_by_its_exit_code(monkeypatch, tmp_path, tiny, results, stubs):
    old = tmp_path / "old.json"
    options = ["bench", "all", "--model", tiny, "--out", tmp_path, "--only", "memory", *SMALL, "--compare", old]
    old.write_text(json.dumps(results))
    shown = run(monkeypatch, *options)
    assert shown.code == 0 and "regressions: 0" in shown.out and "no longer there: decode" in shown.out
    old.write_text(json.dumps(changed(results, "memory", "ours_bytes", 0.9)))
    shown = run(monkeypatch, *options, "--json")
    assert shown.code == 1 and json.loads(shown.out)["bench"] == "all"
    assert "regression: memory, 2 agents: bytes" in shown.err and "regressions: 1" in shown.err
    shown = run(monkeypatch, *options)
    assert shown.code == 1 and "regressions: 1" in shown.out
    assert "regression: memory, 2 agents: bytes" in shown.out
    assert json.loads(shown.out.splitlines()[-1])["bench"] == "all"
    old.write_text(json.dumps(results | {"fingerprint": "another"}))
    shown = run(monkeypatch, *options, "--out", tmp_path / "never")
    assert shown.code == 2 and "fingerprint" in shown.err
    assert not (tmp_path / "never").exists(), "before anything is measured"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_nothing_that_compares_is_an_error(monkeypatch, tmp_path, tiny, results, stubs, form):
    old = tmp_path / "old.json"
    others = copy.deepcopy(results["results"]["memory"])
    for row in others["rows"]:
        row["shared_tokens"] = 1024
    old.write_text(json.dumps(results | {"results": {"memory": others}}))
    options = ["--model", tiny, "--out", tmp_path, "--only", "memory", *SMALL, "--compare", old]
    shown = run(monkeypatch, "bench", "all", *options, *form)
    assert shown.code == 2 and "error: [compare] nothing could be compared" in shown.err
    assert "regressions" not in shown.out + shown.err


def test_results_that_are_compared_with_are_kept(monkeypatch, tmp_path, tiny, results, stubs):
    old = tmp_path / command.RESULTS
    text = json.dumps(changed(results, "memory", "ours_bytes", 0.9))
    old.write_text(text)
    options = ["--model", tiny, "--out", tmp_path, "--only", "memory", *SMALL, "--compare", old]
    shown = run(monkeypatch, "bench", "all", *options)
    assert shown.code == 1 and "regressions: 1" in shown.out
    assert (tmp_path / command.BEFORE).read_text() == text and command.BEFORE in shown.err
    assert read_results(old)["results"]["memory"]["rows"] == results["results"]["memory"]["rows"]


# --- plots ----------------------------------------------------------------------------------------


def test_what_the_plots_show_are_the_rows(results):
    memory, first, decode, quality = plots.plots(results)
    assert [it.name for it in (memory, first, decode, quality)] == ["memory", "first-token", "decode", "quality"]
    rows = results["results"]["memory"]["rows"]
    assert memory.series[0].points == tuple((row["agents"], row["ours_bytes"] / 2**20) for row in rows)
    assert {it.label for it in first.series} >= {"ours, after a handoff", "ours, from a card on disk"}
    labels = ["live KV memory (MiB)", "time to first token (s)"]
    labels += ["tokens per second, all agents", "mean KL divergence (nats)"]
    assert [it.y_label for it in (memory, first, decode, quality)] == labels
    for plot in (memory, first, decode, quality):
        assert plot.x_label and plot.y_label and len(plot.series) >= 3
    names = {row["config"] for row in results["results"]["fidelity"]["rows"]}
    assert any("hops" in name for name in names)
    assert sum(len(it.points) for it in quality.series) == len(
        [it for it in names if "hops" not in it and "16" not in it]
    )
    assert [text for *_, text in quality.marks] == ["8 bits", "6 bits", "4 bits"]
    assert plots.plots({"results": {}}) == []


def test_plots_are_drawn_for_light_and_dark_pages(results, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    files = plots.draw(results, tmp_path)
    names = {
        f"{plot.name}-{theme}.{kind}"
        for plot in plots.plots(results)
        for theme in plots.THEMES
        for kind in plots.FORMATS
    }
    assert {path.name for path in files} == names and len(names) == 16
    for path in files:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in data
        if path.suffix == ".svg":
            theme = plots.THEMES[path.stem.rpartition("-")[2]]
            assert theme.page in data.decode() and theme.ours in data.decode()
    before = {path: path.read_bytes() for path in files if path.name.startswith("memory")}
    only = {"results": {"memory": results["results"]["memory"]}}
    assert sorted(plots.draw(only, tmp_path)) == sorted(before)
    assert all(path.read_bytes() == data for path, data in before.items()), "the same figures make the same files"


def test_every_point_is_on_the_page(results):
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for plot in plots.plots(results):
        figure = plots.make_figure(plot, plots.THEMES["dark"])
        (axes,) = figure.axes
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        points = [point for series in plot.series for point in series.points]
        assert all(left < x < right and bottom <= y < top for x, y in points), plot.name
        assert top < 5 * max(y for _, y in points), "and fills it"
        FigureCanvasAgg(figure).draw()
        for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
            box = label.get_window_extent()
            assert figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1), (plot.name, label.get_text())
            assert figure.bbox.containsy(box.y0) and figure.bbox.containsy(box.y1), (plot.name, label.get_text())
        assert axes.get_xlabel() == plot.x_label and axes.get_ylabel() == plot.y_label
        assert [text.get_text() for text in figure.legends[0].get_texts()] == [it.label for it in plot.series]


def test_without_matplotlib_it_says_how_to_get_plots(monkeypatch, tmp_path, tiny, stubs):
    shown = run(monkeypatch, "bench", "all", "--model", tiny, "--out", tmp_path, "--only", "memory", *SMALL)
    assert shown.code == 0 and re.search(r"^no plots: .*mlx-qkvshare\[plots\]", shown.err, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == [command.RESULTS]


def test_can_draw_looks_for_matplotlib(monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert not plots.can_draw()
