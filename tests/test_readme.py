"""The README's snippets run as they stand, and its commands exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(index: int, num_lines: int) -> str:
    """What the README's `index`-th snippet prints; it has at most `num_lines` lines."""
    snippet = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[index]
    assert len(snippet.strip().splitlines()) <= num_lines
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(snippet, "README.md", "exec"), {})
    return shown.getvalue().strip()


@pytest.mark.slow
def test_the_first_snippet_runs_and_copies_nothing():
    plan, record, text = run(0, 9).partition("HandoffRecord")
    assert plan.strip() and text.strip() and "bytes_copied=0" in f"{record}{text}"


@pytest.mark.slow
def test_the_second_snippet_runs_agents_side_by_side():
    greeting, research, leaflet = (text.strip() for text in run(1, 17).split("\n ", 2))
    assert greeting and "!" not in greeting and research and leaflet


def test_every_file_and_make_target_that_it_names_exists():
    for path in re.findall(r"\b(?:tests|benchmarks|tools)/[\w./]+\.(?:py|md)", README):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)$", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
