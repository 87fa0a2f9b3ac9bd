"""`tools/record.py`: what a recording shows, and what runs under it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlx_qkvshare import __version__

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import record


def test_any_command_is_recorded_as_it_was_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    given: dict[str, str] = {}

    class Spy(record.Screen):
        def __init__(self, *command, env, **options):
            given.update(env)
            super().__init__(*command, env=env, **options)

    monkeypatch.chdir(tmp_path)  # and back, since it goes elsewhere
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "Screen", Spy)
    monkeypatch.setattr(record, "with_openblas", lambda: {"LD_NOTHING": "as told"})
    record.main(["version", "--", "--version"])
    assert (tmp_path / "version.txt").read_text() == f"$ qkvshare --version\nqkvshare {__version__}\n"
    assert given["LD_NOTHING"] == "as told" and given["HOME"] != str(Path.home())
    assert capsys.readouterr().out.endswith("version.txt\n")


@pytest.mark.parametrize(
    ("printed", "variables"),
    [("", {}), ("env LD_PRELOAD=it.so LD_LIBRARY_PATH='a b'", {"LD_PRELOAD": "it.so", "LD_LIBRARY_PATH": "a b"})],
)
def test_what_runs_gets_the_variables_that_openblas_prints(monkeypatch, tmp_path, printed, variables):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "openblas.py").write_text(f"print({printed!r})")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.with_openblas() == variables


def test_a_command_is_shown_so_that_it_can_be_pasted():
    assert record.typed(["bench", "all", "--out", "~/bench"]) == "qkvshare bench all --out ~/bench"
    assert record.typed(["run", "Is it?", "--save", "~/a b"]) == "qkvshare run 'Is it?' --save ~/'a b'"


def test_only_of_long_lines_the_end_is_left_out():
    assert record.shortened("a" * record.LONGEST) == "a" * record.LONGEST
    assert record.shortened("a" * 12345) == "a" * record.LONGEST + "... (12,345 characters)"
