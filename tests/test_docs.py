"""The guide's examples give what they show; the pages name files that are there."""

import doctest
import re
from pathlib import Path

import pytest
from tiny import tiny_loaded

import mlx_qkvshare

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(ROOT.glob("docs/*.md"))


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
    """README's by `test_readme.py`, the guide's here; no other page may have one that nobody runs."""
    for page in PAGES:
        if page.name != "guide.md":
            assert "```python" not in page.read_text(encoding="utf-8"), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests/|benchmarks/|docs/)?[a-z_]+\.(?:py|md))`", text):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "mlx_qkvshare", ROOT / "tests")), name
    for target in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (page.parent / target).exists(), target
