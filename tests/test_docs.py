"""The guide's examples give what they show; the pages name files that are there."""

import doctest
import fnmatch
import re
from pathlib import Path

import pytest
import typer
from tiny import tiny_loaded

import mlx_qkvshare
from mlx_qkvshare.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(ROOT.glob("docs/*.md"))
ALL_PAGES = [ROOT / "README.md", *PAGES, *sorted(ROOT.glob("[bm]*/*.md"))]


def run_guide():
    result = doctest.testfile(str(ROOT / "docs" / "guide.md"), module_relative=False)
    assert result.attempted > 50 and result.failed == 0


def test_the_guides_examples_run_on_a_tiny_model(monkeypatch):
    monkeypatch.setattr(mlx_qkvshare, "load", tiny_loaded, raising=False)
    run_guide()


@pytest.mark.slow
def test_the_guides_examples_run_as_they_stand():
    run_guide()


def test_every_snippet_of_python_is_run_by_a_test():
    """README's two by `test_readme.py`, the guide's here; no other page may have one that nobody runs."""
    counts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8").count("```py") for page in ALL_PAGES}
    assert {page: count for page, count in counts.items() if count and page != "docs/guide.md"} == {"README.md": 2}


def test_the_line_of_python_in_how_it_works_runs(capsys):
    line = re.search(r"`(print\(.*?\))` shows", (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8"))[1]
    exec(line, vars(mlx_qkvshare).copy())
    assert "packed: 3 rows per KV head, 2048 shared tokens" in capsys.readouterr().out


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_that_a_page_names_is_there_with_its_options(page):
    text = page.read_text(encoding="utf-8")
    for typed in re.findall(r"(?:`|\$ |^|/bin/|\| )qkvshare ([^`\n;|)#]*)", text, re.MULTILINE):
        found, words = typer.main.get_command(app), typed.replace('"', " ").split()
        while words and hasattr(found, "commands") and not words[0].startswith("-"):
            assert words[0] in found.commands, typed
            found = found.commands[words.pop(0)]
        known = {option for parameter in found.params for option in parameter.opts} | {"--help"}
        for word in words:
            option = word.partition("=")[0].strip("[].,:'\"")
            assert not option.startswith("--") or option in known, f"{typed}: {option}"


def test_every_module_has_its_place_in_how_it_works():
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    names = re.findall(r"`([a-z_*]+\.py)`", page.partition("## Where what is")[2])
    for path in (ROOT / "mlx_qkvshare").glob("[a-z]*.py"):
        assert any(fnmatch.fnmatch(path.name, name) for name in names), path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests/|benchmarks/|docs/)?[a-z_]+\.(?:py|md))`", text):
        assert any(
            (folder / name).exists() for folder in (ROOT, ROOT / "mlx_qkvshare", ROOT / "cli", ROOT / "tests")
        ), name
    for target in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (page.parent / target).exists(), target
