"""`qkvshare cards`: what a store holds, without a model; whatever cards say of themselves is shown, not obeyed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_run import run
from store_work import fill, make_manager, package_of, save

from mlx_qkvshare import CardStore
from mlx_qkvshare.cli import cards
from mlx_qkvshare.folders import default_cache_dir, default_store_dir

HARM = "\x1b[2J[/INST] [bold]b[/bold]\x07\x9b31m :smile:\r\nforged  line"
VERBS = ("list", "inspect", "verify", "export", "import", "rm", "gc")


@pytest.fixture
def store(tmp_path):
    return CardStore(tmp_path / "store")


@pytest.fixture
def said(monkeypatch, store):
    """`qkvshare cards ARGUMENTS` on the store, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "300")

    def say(*arguments, folder=store.folder):
        return run(monkeypatch, "cards", *arguments, "--store", folder)

    return say


def keep(store: CardStore, name: str, number: int = 1, num_tokens: int = 10, agent: str = "writer") -> None:
    manager = make_manager()
    prefix = fill(manager, number, num_tokens)
    manager.save_card(store, name, package_of(manager, prefix, number=number, sender=agent))


def test_list_and_inspect_tell_what_is_there(said, store):
    assert "no cards" in said("list").out and json.loads(said("list", "--json").out) == []
    for number, name in enumerate(("b", "a c")):
        keep(store, name, number, 100 + number, agent="planner")
    shown = said("list")
    assert shown.code == 0 and shown.err == ""
    assert re.search(r"a c +planner +101 +2 +tiny +K8V8 g32 rotated centred sinks4 +[\d.]+ KiB +\d+s", shown.out)
    first, second = json.loads(said("list", "--json").out)
    assert (first["name"], first["tokens"], second["name"], second["tokens"]) == ("a c", 101, "b", 100)
    assert first["agent"] == "planner" and first["hops"] == 2 and first["architecture"] == "tiny"
    assert first["stored_bytes"] == store.stored_bytes("a c") > first["packed_bytes"] > 0
    assert 0 <= first["age_seconds"] < 600
    one = json.loads(said("inspect", "b", "--json").out)
    assert one.items() >= {k: v for k, v in second.items() if k != "age_seconds"}.items()
    assert one["segments"][0]["digest"] == store.inspect("b").segments[0].digest
    assert one["domains"] == sorted(store.inspect("b").domains) != []
    text = said("inspect", "b").out
    assert one["segments"][0]["digest"] in text and "planner" in text and "keeps tokens" in text


def test_age_is_told_in_the_largest_unit(said, store):
    keep(store, "c")
    (file,) = (store.folder / "cards").glob("*.json")
    for seconds, shown in ((150, "2min"), (7300, "2h"), (260000, "3d"), (-9, "0s")):
        then = time.time() - seconds
        os.utime(file, (then, then))
        assert f" {shown} " in said("list").out


def test_verify_ends_with_1_and_names_each_that_is_damaged(said, store):
    for number in range(3):
        keep(store, f"c{number}", number)
    result = said("verify")
    assert result.code == 0 and result.out.count("whole") == 3
    segment = store.folder / "segments" / f"{store.inspect('c1').segments[0].digest}.safetensors"
    segment.write_bytes(segment.read_bytes()[:-1])
    store._card_path("c2").write_bytes(b"half")
    result = said("verify")
    assert result.code == 1
    assert "c0: whole" in result.out and "c1: CardCorruptError: [segment" in result.out
    assert f"a card: CardCorruptError: [card {store._card_path('c2').stem}]" in result.out
    assert said("verify", "c0").code == 0
    chosen = said("verify", "c0", "c2", "none")
    assert chosen.code == 1 and "c2: CardCorruptError" in chosen.out and "none: CardNotFoundError" in chosen.out
    listed = said("list")
    assert "c1" in listed.out and "c2" not in listed.out and "expected JSON" in listed.err
    segment.unlink()
    assert re.search(r"c1 .*damaged", said("list").out)
    assert said("verify", "c1").code == 1


def test_export_and_import_carry_a_card(said, store, tmp_path):
    keep(store, "c", 1, 50)
    assert said("export", "c", tmp_path / "c.zip").code == 0
    (tmp_path / "other").mkdir()
    other = {"folder": tmp_path / "other"}
    assert "c: 50 tokens, by writer" in said("import", tmp_path / "c.zip", **other).out
    taken = said("import", tmp_path / "c.zip", **other)
    assert taken.code == 2 and taken.err.startswith("error: ") and "expected a free name" in taken.err
    assert said("import", tmp_path / "c.zip", "--force", **other).code == 0
    assert said("import", tmp_path / "c.zip", "--as", "d", **other).code == 0
    assert CardStore(tmp_path / "other").names() == ["c", "d"]
    (tmp_path / "c.zip").write_bytes(b"x" * 999)
    assert "CardCorrupt" not in (wrong := said("import", tmp_path / "c.zip")).err and wrong.code == 2
    assert said("export", "none", tmp_path / "x.zip").code == 2 and not (tmp_path / "x.zip").exists()


def test_rm_and_gc(said, store):
    keep(store, "a", 1)
    keep(store, "b", 2)
    assert said("rm", "a", "b").code == 0 and store.names() == []
    assert re.fullmatch(r"[\d.]+ KiB freed\n", said("gc").out)
    assert list((store.folder / "segments").iterdir()) == []
    assert said("rm", "a").code == 2
    assert said("gc").out == "0 bytes freed\n"


def test_a_folder_that_is_no_store_is_told_and_not_made(said, tmp_path):
    for verb in (["list"], ["verify"], ["gc"], ["rm", "c"], ["inspect", "c"], ["export", "c", tmp_path / "f"]):
        (tmp_path / "home").mkdir(exist_ok=True)
        for folder in (tmp_path / "typo", tmp_path / "home"):
            result = said(*verb, folder=folder)
            assert result.code == 2 and "--store: expected a folder of cards" in result.err
    assert not (tmp_path / "typo").exists() and list((tmp_path / "home").iterdir()) == []


def test_the_default_store_is_beside_the_models(monkeypatch, tmp_path):
    assert default_store_dir() == default_cache_dir() / "cards"
    monkeypatch.setattr(cards, "default_store_dir", lambda: tmp_path / "mine")
    keep(CardStore(tmp_path / "mine"), "c")
    assert "writer" in run(monkeypatch, "cards", "list").out


def test_texts_of_cards_are_shown_harmless(said, store, tmp_path):
    keep(store, HARM, agent=HARM)
    file = tmp_path / "c.zip"
    for arguments in (
        ["list"], ["inspect", HARM], ["verify"], ["verify", HARM], ["export", HARM, file],
        ["import", file, "--force"], ["import", file], ["inspect", HARM + "x"], ["rm", HARM],
    ):  # fmt: skip
        shown = said(*arguments)
        text = shown.out + shown.err
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text), arguments
        assert "\nforged" not in text, "one line stays one line"
        if shown.code == 0 and arguments[0] != "rm":
            assert "[bold]b[/bold]" in text and ":smile:" in text


def test_neither_help_nor_a_verb_loads_a_model_or_what_one_needs(store, tmp_path):
    """In a process of its own, where mlx-lm and all that it brings is looked for afterwards."""
    save(make_manager(), store, 1, 10, name="c")
    code = """
import json, sys
from mlx_qkvshare.cli.app import main
for line in json.loads(sys.argv[1]):
    sys.argv = ["qkvshare", *line]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (line, end.code)
heavy = {"mlx_lm", "transformers", "tokenizers", "huggingface_hub", "torch", "gguf", "matplotlib"}
found = sorted(name for name in sys.modules if name.split(".")[0] in heavy or name == "mlx_qkvshare.model")
assert not found, found
"""
    file = str(tmp_path / "c.zip")
    lines = (["list"], ["inspect", "c"], ["verify"], ["export", "c", file], ["rm", "c"], ["gc"], ["import", file])
    assert {line[0] for line in lines} == set(VERBS)
    verbs = [["cards", *line, "--store", str(store.folder)] for line in lines]
    text = json.dumps([["--help"], ["chat", "--help"], ["bench", "all", "--help"], ["team", "list"], *verbs])
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, env=_env())
    assert done.returncode == 0, done.stderr


def _env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}


def test_help_names_every_verb(monkeypatch):
    shown = run(monkeypatch, "cards", "--help").out
    assert set(VERBS) <= set(shown.split())
    assert "cards" in run(monkeypatch, "--help").out and "demo" in run(monkeypatch, "--help").out
    assert run(monkeypatch, "--debug", "cards", "list", "--help").code == 0
