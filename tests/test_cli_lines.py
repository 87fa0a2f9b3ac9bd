"""What is read and what is shown: messages of several lines, documents, widths, progress."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from cli_run import run
from rich.console import Console

from mlx_qkvshare.cli.document import paths_from, typed_path
from mlx_qkvshare.cli.lines import LineReader
from mlx_qkvshare.cli.terminal import ProgressLine, Terminal, cut_to, padded


@pytest.mark.parametrize(
    ("typed", "heard"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one \\\ntwo \\\nthree\nfour", ["one \ntwo \nthree", "four"]),
        ("one \\", ["one "]),
        ('"""one\n\n  two\n"""\nthree', ["one\n\n  two", "three"]),
        ('"""one"""\n"""two', ["one", "two"]),
        ('""" \none"""', [" \none"]),
        ('say """x"""\n', ['say """x"""']),
        ("one\\\r\ntwo\r\n", ["one\ntwo"]),
    ],
)
def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch, typed: str, heard: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    reader = LineReader(Terminal())
    assert [message.text for message in iter(lambda: reader.read("x"), None)] == heard


def test_a_path_as_it_is_typed_or_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my notes.txt").write_text("x")
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in (
        "~/my notes.txt",
        f"{tmp_path}/my notes.txt",
        f"{tmp_path}/my\\ notes.txt",
        f"'{tmp_path}/my notes.txt'",
    ):
        assert typed_path(text) == tmp_path / "my notes.txt"
    assert typed_path("it's not there") == Path("it's not there")


def test_paths_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("notes.txt", "north/deep.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths_from("no") == ["north/", "notes.txt"] == paths_from("")
    assert paths_from("~/not") == ["~/notes.txt"] and paths_from("north/") == ["north/deep.txt"]
    assert paths_from(f"{tmp_path}/nor") == [f"{tmp_path}/north/"] and paths_from(".h") == [".hidden"]
    assert paths_from("nowhere/x") == [] and "usr/" in [path.removeprefix("/") for path in paths_from("/u")]


def test_widths_count_cells() -> None:
    assert padded("作家", 6) == "作家  " and padded("ab", 1) == "ab"
    assert cut_to("日本語です", 10) == "日本語です" and cut_to("日本語ですよ", 10) == "日本語..."
    assert cut_to("one\ntwo", 80) == "one two"


@pytest.mark.parametrize(("width", "shown"), [(60, "作家 [#######.......................] 25%"), (20, "作家 25%")])
def test_progress_is_a_bar_where_there_is_room(width: int, shown: str) -> None:
    terminal = Terminal()
    terminal.err = Console(file=io.StringIO(), force_terminal=True, width=width, color_system="standard")
    progress = ProgressLine(terminal)
    progress("作家", 1, 4)
    assert terminal.err.file.getvalue() == f"\r{shown}"
    progress.close()
    assert terminal.err.file.getvalue().split("\r")[2].isspace()


def test_without_a_terminal_a_long_step_is_heard_of_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, terminal = [0.0], Terminal()
    monkeypatch.setattr("mlx_qkvshare.cli.terminal.time.monotonic", lambda: now[0])
    terminal.err = Console(file=io.StringIO())
    progress = ProgressLine(terminal)
    for second, done in enumerate(range(0, 110, 4)):
        now[0] = float(second)
        progress("prefill", done, 104)
    progress("sealing", 0, 0)
    progress.close()
    assert terminal.err.file.getvalue() == "prefill...\nprefill 42%\nprefill 84%\nsealing...\n"


def test_the_shells_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"--install-completion", "--show-completion"} <= set(run(monkeypatch, "--help").out.split())
    monkeypatch.setenv("_QKVSHARE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "qkvshare te")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run(monkeypatch).out.split() == ["team"]
