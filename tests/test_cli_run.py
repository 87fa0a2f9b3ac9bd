"""`qkvshare run`: turns along the team, documents and pipes, exit codes, one JSON object."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from cli_run import COMMAND, force_replies, run, save_tiny

from mlx_qkvshare import AgentSession
from mlx_qkvshare.cli.run import requests
from mlx_qkvshare.cli.team import parse_team

TEAM = """
system = "S"
[[agent]]
name = "planner"
role = "You plan."
request = "Plan it."
[[agent]]
name = "writer"
role = "You write."
request = "Write it."
max_tokens = 9
[[agent]]
name = "critic"
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def team(tmp_path: Path) -> Path:
    path = tmp_path / "team.toml"
    path.write_text(TEAM)
    return path


def test_who_is_asked_what() -> None:
    team = parse_team(TEAM, "t")
    once = [("planner", "T\n\nPlan it."), ("writer", "Write it."), ("critic", "Go on as critic.")]
    assert list(requests(team, "T", 1)) == once
    assert list(requests(team, "T", 2)) == [*once, ("planner", "Plan it."), *once[1:]]


def test_a_team_works_along_its_order(monkeypatch: pytest.MonkeyPatch, tiny: Path, team: Path) -> None:
    heard: list[list[str]] = []

    def listen(count: int) -> None:
        if count == 0:
            held = next(s for s in sessions if s.messages)
            heard.append([m.content for m in held.messages])

    sessions = force_replies(monkeypatch, "a plan", "a text", "fine", on_token=listen)
    result = run(monkeypatch, "run", "a leaflet", "--team", team, "--model", tiny)
    assert (result.code, result.out) == (0, "planner: a plan\n\nwriter: a text\n\ncritic: fine\n")
    assert heard[-1] == [
        *("S", "You plan.", "a leaflet\n\nPlan it.", "a plan", "You write.\n\nWrite it.", "a text", "Go on as critic.")
    ]
    assert result.err.count("held once") == 3 and "error" not in result.err
    assert (result.err.count(" in full precision;"), result.err.count(" apart;")) == (1, 2)


def test_one_agent_answers_without_a_name(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, "short")
    result = run(monkeypatch, "run", "sum it up", "--model", tiny)
    assert (result.code, result.out) == (0, "short\n")


def test_documents_come_first_from_files_and_pipes(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_bytes(b"\xef\xbb\xbfone\r\ntwo \xff and some more words")
    heard: list[str] = []
    sessions = force_replies(monkeypatch, "x", on_token=lambda _: heard.extend(m.content for m in sessions[0].messages))
    result = run(monkeypatch, "run", "sum up", "--file", notes, "--model", tiny, stdin="piped\n")
    assert result.code == 0, result.err
    documents = ["Document notes.txt:\n\none\ntwo \ufffd and some more words", "Document from stdin:\n\npiped\n"]
    assert heard[:3] == [*documents, "sum up"]
    assert "(1 unreadable bytes in notes.txt became U+FFFD)" in result.err
    assert re.search(r"\(notes\.txt: \d+ tokens read in [\d.]+ m?s\)", result.err)


def test_a_pipe_alone_is_the_task(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    heard: list[str] = []
    sessions = force_replies(monkeypatch, "x", on_token=lambda _: heard.extend(m.content for m in sessions[0].messages))
    assert run(monkeypatch, "run", "--model", tiny, stdin="do it\n").code == 0
    assert heard[0] == "do it"


def test_json_holds_every_turn_and_the_memory(monkeypatch: pytest.MonkeyPatch, tiny: Path, team: Path) -> None:
    force_replies(monkeypatch, "a plan", "one two three four five six", "caf\u00e9 \U0001f600")
    result = run(monkeypatch, "run", "t", "--team", team, "--model", tiny, "--json", encoding="ascii")
    found = json.loads(result.out)
    assert (result.code, found["exit_code"], found["error"], found["task"]) == (0, 0, None, "t")
    assert found["team"] == [turn["agent"] for turn in found["turns"]] == ["planner", "writer", "critic"]
    assert [turn["finish_reason"] for turn in found["turns"]] == ["stop", "length", "stop"]
    assert found["turns"][2]["text"] == "caf\u00e9 \U0001f600"
    for turn in found["turns"]:
        assert turn["tokens"] > 0 and 0 < turn["first_token_seconds"] <= turn["seconds"] and turn["error"] is None
    assert found["turns"][1]["tokens"] == 9 and found["turns"][1]["reused_tokens"] > 40
    assert found["documents"] == []
    memory = found["memory"]
    assert memory["bytes_copied"] == 0 and memory["held_bytes"] < memory["separate_quantized_bytes"] * 2
    assert memory["separate_quantized_bytes"] < memory["separate_bytes"]
    assert [(it["sender"], it["receiver"]) for it in found["handoffs"]] == [("planner", "writer"), ("writer", "critic")]


def test_max_tokens_wins_over_the_team(monkeypatch: pytest.MonkeyPatch, tiny: Path, team: Path) -> None:
    force_replies(monkeypatch, "a plan", "one two three four five six", "fine")
    found = run(monkeypatch, "run", "t", "--team", team, "--model", tiny, "--json", "--max-tokens", 12)
    assert json.loads(found.out)["turns"][1]["tokens"] == 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected a task"),
        (["t", "--file", "no.txt"], "[file no.txt] expected a file to read: No such file"),
        (["t", "--file", "."], "[file .] expected a text file, got a folder"),
        (["t", "--file", "binary"], "[file binary] expected text, got bytes of another kind"),
        (["t", "--file", "latin"], "[file latin] expected UTF-8 text, got 4 bytes that are none"),
        (["t", "--file", "long.txt"], "positions, available 512 positions (256 of them for the reply); a shorter"),
        (["t", "--file", "huge.txt"], "needed 40000 characters, available 512 positions"),
        (["word " * 600], "positions, available 512 (256 of them for the reply); a shorter text"),
        (["t", "--team", "nobody"], "[team nobody] expected a TOML file or one of"),
        (["t", "--team", "debate", "--agent", "a"], "--team: expected no --agent"),
        (["t", "--budget", "8K"], "--budget allows more"),
        (["t", "--temperature", "-1"], "temperature"),
        (["t", "--save", "x", "--store", "latin"], "[CardStore] latin: expected a folder"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"ab\0c")
    (tmp_path / "latin").write_bytes(b"\xe4\xf6\xfc\xdf")
    (tmp_path / "long.txt").write_text("word " * 600)
    (tmp_path / "huge.txt").write_text("word " * 8000)
    force_replies(monkeypatch, "ok")
    result = run(monkeypatch, "run", *arguments, "--model", tiny)
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert result.code == 2 and len(errors) == 1 and words in errors[0], result.err


def test_an_agent_that_fails_ends_the_run_with_1(monkeypatch: pytest.MonkeyPatch, tiny: Path, team: Path) -> None:
    calls: list[int] = []

    def fail(count: int) -> None:
        calls.append(count)
        if calls.count(0) == 2 and count == 2:
            raise RuntimeError("out of ink")

    force_replies(monkeypatch, "a plan", "a long text", "never", on_token=fail)
    result = run(monkeypatch, "run", "t", "--team", team, "--model", tiny, "--json")
    found = json.loads(result.out)
    assert (result.code, found["exit_code"]) == (1, 1) and "out of ink" in found["error"]
    assert [turn["finish_reason"] for turn in found["turns"]] == ["stop", "error"]
    assert found["turns"][1]["text"] and "out of ink" in result.err.splitlines()[-1]


def test_ctrl_c_ends_the_run_with_130(monkeypatch: pytest.MonkeyPatch, tiny: Path, team: Path) -> None:
    force_replies(monkeypatch, "one two three four", on_token=lambda n: n == 4 and os.kill(os.getpid(), signal.SIGINT))
    result = run(monkeypatch, "run", "t", "--team", team, "--model", tiny, "--json")
    found = json.loads(result.out)
    assert (result.code, found["exit_code"], found["error"]) == (130, 130, "interrupted")
    (turn,) = found["turns"]
    assert turn["finish_reason"] == "interrupted" and 0 < len(turn["text"]) < len("one two three four")


@pytest.mark.parametrize(
    ("number", "code", "words"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_while_documents_are_read_is_reported(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path, number: int, code: int, words: str
) -> None:
    (tmp_path / "notes.txt").write_text("some words")
    before = AgentSession._computing

    def computing(self: AgentSession, *args: object) -> object:
        os.kill(os.getpid(), number)
        return before(self, *args)

    monkeypatch.setattr(AgentSession, "_computing", computing)
    result = run(monkeypatch, "run", "sum up", "--file", tmp_path / "notes.txt", "--model", tiny, "--json")
    found = json.loads(result.out)
    assert (result.code, found["exit_code"], found["error"], found["documents"]) == (code, code, words, [])


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("notes")
    (tmp_path / "t.toml").write_text('[[agent]]\nname = "a"\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    force_replies(monkeypatch, "ok")
    result = run(monkeypatch, "run", "go", "--file=~/n.txt", "--team=~/t.toml", "--model", tiny)
    assert (result.code, result.out) == (0, "ok\n"), result.err


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_what_the_shell_closed_is_no_trouble(tiny: Path, tmp_path: Path, closed: str) -> None:
    command = shlex.join([*COMMAND, "run", "go", "--model", str(tiny), "--max-tokens", "2"])
    env = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(f"{command} {closed}", shell=True, env=env, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_what_a_run_saved_a_chat_goes_on_with(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    options = ("--model", tiny, "--store", tmp_path / "cards", "--agent", "solo")
    force_replies(monkeypatch, "a text")
    saved = run(monkeypatch, "run", "write", *options, "--save", "kept")
    assert saved.code == 0 and "(saved 'kept': " in saved.err
    force_replies(monkeypatch, "more")
    result = run(monkeypatch, "chat", *options, "--resume", "kept", stdin="/context\ngo on\n")
    assert result.code == 0 and "a text" in result.out and "solo: more" in result.out
    assert "computed again" not in result.err
