"""`qkvshare bench all`: every bench in one go, a failure that loses nothing, comparison with what was before, plots."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_run import Result, run, save_tiny
from tiny import SLIDING

from mlx_qkvshare import bench_all as bench_all_module
from mlx_qkvshare import plots
from mlx_qkvshare.bench_all import SUITE, headlines, suite
from mlx_qkvshare.bench_compare import BYTES_LIMIT, KL_LIMIT, PEAK_LIMIT, SHARE_LIMIT, compare, figures, read_results
from mlx_qkvshare.cli import bench_all as command
from mlx_qkvshare.errors import InvalidValueError

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
    assert max(map(len, shown.out.split("\n\n")[0].splitlines()[3:])) <= 80
    assert f"wrote {out / command.RESULTS}" in shown.err


def test_headlines_are_the_figures_of_the_rows(results):
    found = {(it.bench, it.what): it for it in headlines(results["results"])}
    row = results["results"]["memory"]["rows"][-1]
    it = found["memory", "2 agents on 64 tokens"]
    assert (it.ours, it.stock, it.unit) == (row["ours_bytes"], row["stock_bytes"], "bytes")
    assert {bench for bench, _ in found} == set(SUITE)
    assert headlines({}) == []


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
    other["machine"] = other["machine"] | {"device": "Device(gpu, 0)"}
    found = compare(results, other)
    assert found.drift == {} and [(it.name, it.verdict) for it in found.changes if it.verdict] == [
        ("ours_bytes", "regression")
    ]


def test_figures_that_are_gone_are_named(results):
    new = copy.deepcopy(results)
    del new["results"]["decode"]
    found = compare(results, new)
    assert found.missing and all(name.startswith("decode, ") for name in found.missing)


def test_results_of_another_model_or_format_are_refused(results, tmp_path):
    with pytest.raises(InvalidValueError, match="another"):
        compare(results | {"model": "another"}, results)
    with pytest.raises(InvalidValueError, match="noise"):
        compare(results, results, noise=0.5)
    path = tmp_path / "it.json"
    for text in (
        "",
        "[]",
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
    shown = run(monkeypatch, *options)
    assert shown.code == 1 and "regressions: 1" in shown.out
    assert "regression: memory, 2 agents: bytes" in shown.out
    old.write_text(json.dumps(results | {"model": "another"}))
    assert run(monkeypatch, *options).code == 2


# --- plots ----------------------------------------------------------------------------------------


def test_what_the_plots_show_are_the_rows(results):
    memory, first, decode, quality = plots.plots(results)
    assert [it.name for it in (memory, first, decode, quality)] == ["memory", "first-token", "decode", "quality"]
    rows = results["results"]["memory"]["rows"]
    assert memory.series[0].points == tuple((row["agents"], row["ours_bytes"] / 2**20) for row in rows)
    assert {it.label for it in first.series} >= {"ours, after a handoff", "ours, from a card on disk"}
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
    for plot in plots.plots(results):
        figure = plots.make_figure(plot, plots.THEMES["dark"])
        (axes,) = figure.axes
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        points = [point for series in plot.series for point in series.points]
        assert all(left < x < right and bottom <= y < top for x, y in points), plot.name
        assert top < 5 * max(y for _, y in points), "and fills it"
        assert axes.get_xlabel() == plot.x_label and axes.get_ylabel() == plot.y_label
        assert [text.get_text() for text in figure.legends[0].get_texts()] == [it.label for it in plot.series]


def test_without_matplotlib_it_says_how_to_get_plots(monkeypatch, tmp_path, tiny, stubs):
    shown = run(monkeypatch, "bench", "all", "--model", tiny, "--out", tmp_path, "--only", "memory", *SMALL)
    assert shown.code == 0 and re.search(r"^no plots: .*mlx-qkvshare\[plots\]", shown.err, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == [command.RESULTS]


def test_can_draw_looks_for_matplotlib(monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert not plots.can_draw()
