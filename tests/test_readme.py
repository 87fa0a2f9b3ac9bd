"""The README's snippet runs as it stands, and its commands exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_snippet_runs_and_copies_nothing():
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippet.strip().splitlines()) <= 9
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(snippet, "README.md", "exec"), {})
    plan, record, text = shown.getvalue().strip().partition("HandoffRecord")
    assert plan.strip() and text.strip() and "bytes_copied=0" in f"{record}{text}"


def test_every_file_and_make_target_that_it_names_exists():
    for path in re.findall(r"\b(?:tests|benchmarks|tools)/[\w./]+\.(?:py|md)", README):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)$", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
