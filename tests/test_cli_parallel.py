"""`--parallel`: agents that answer at the same time, line by line, from one shared context."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import mlx.core as mx
import pytest
from cli_run import run, save_tiny
from tiny import tiny_tokenizer

from mlx_qkvshare import AgentSession
from mlx_qkvshare.cli import conversation, demo
from mlx_qkvshare.cli.streams import LabelledStreams
from mlx_qkvshare.cli.terminal import Terminal
from mlx_qkvshare.context import Prefilling

TWO = ("--parallel", "--agent", "planner:You plan.", "--agent", "writer:You write.")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), max_position=2048)


def script(monkeypatch: pytest.MonkeyPatch, replies: dict[str, list[str]], on_token=lambda name: None):
    """Let each agent say its replies, one a round; returns all sessions by name."""
    tokenizer, made = tiny_tokenizer(), {}

    class Scripted(AgentSession):
        def __init__(self, name: str, *args: object, **options: object):
            super().__init__(name, *args, **{**options, "sampler": self.sample})
            made[name] = self
            self.replies, self.ids = iter(replies.get(name, [])), []

        def _saying(self, *args: object, **options: object) -> Prefilling:
            self.ids = tokenizer.encode(next(self.replies, ""), add_special_tokens=False)
            return super()._saying(*args, **options)

        def sample(self, logits: mx.array) -> mx.array:
            on_token(self.name)
            return mx.array(self.ids.pop(0) if self.ids else tokenizer.eos_token_id, dtype=mx.uint32)

    for module in (conversation,):
        monkeypatch.setattr(module, "AgentSession", Scripted)
    return made


def test_all_agents_answer_each_message_and_hear_each_other(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    replies = {"planner": ["a plan", "better"], "writer": ["a text\nof two lines", "shorter"]}
    asked: list[str] = []
    made = script(monkeypatch, replies, lambda name: asked.append(made[name].messages[-1].content))
    result = run(monkeypatch, "chat", "--model", tiny, *TWO, "--system", "S", stdin="first\nsecond\n/stats\n")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert sorted(lines[:3]) == ["planner | a plan", "writer  | a text", "writer  | of two lines"]
    assert sorted(lines[3:5]) == ["planner | better", "writer  | shorter"]
    assert "agents       planner, writer (all at once)" in result.err
    assert re.search(r"^handoffs +4$", result.out, re.MULTILINE)
    assert re.search(r"^bytes copied by handoffs +0$", result.out, re.MULTILINE)
    assert [(m.role, m.content) for m in made["all"].messages] == [
        ("system", "S"),
        ("user", "first"),
        ("assistant", "planner: a plan\n\nwriter: a text\nof two lines"),
        ("user", "second"),
        ("assistant", "planner: better\n\nwriter: shorter"),
    ]
    assert set(asked) == {"You write.\n\nAnswer as writer.", "You plan.\n\nAnswer as planner."}
    assert all(made[name].num_tokens == 0 for name in replies), "the floor has it all"


def test_each_agent_adds_its_role_and_its_reply_only(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    reports: dict[str, tuple[int, int]] = {}

    def look(name: str) -> None:
        report = made[name].last_prefill
        reports[name] = (report.reused_tokens, report.computed_tokens)

    made = script(monkeypatch, {"planner": ["x"], "writer": ["y"]}, look)
    assert run(monkeypatch, "chat", "--model", tiny, *TWO, stdin=f"{'word ' * 200}\n").code == 0
    assert all(reused > 600 and computed < 80 for reused, computed in reports.values()), reports


def test_what_goes_wrong_is_told_for_the_agent_that_it_happened_to(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    def fail(name: str) -> None:
        if name == "writer":
            raise RuntimeError("out of ink")

    made = script(monkeypatch, {"planner": ["fine"], "writer": ["lost"]}, fail)
    result = run(monkeypatch, "chat", "--model", tiny, *TWO, stdin="hi\n")
    assert (result.code, result.out) == (0, "planner | fine\n")
    (error,) = [line for line in result.err.splitlines() if line.startswith("error")]
    assert error.startswith("error: writer: ") and "out of ink" in error
    assert made["all"].messages[-1].content == "planner: fine"


def test_limits_refuse_the_round_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    script(monkeypatch, {"planner": ["ok"], "writer": ["ok"]})
    arguments = ["--max-context", 150, "--max-tokens", 10]
    result = run(monkeypatch, "chat", "--model", tiny, *TWO, *arguments, stdin=f"{'word ' * 200}\n/new\nhi\n")
    assert "/new starts over" in result.err and sorted(result.out.split()) == [
        "ok",
        "ok",
        "planner",
        "writer",
        "|",
        "|",
    ]
    assert "twice" in run(monkeypatch, "chat", "--model", tiny, "--parallel", "--agent", "a", "--agent", "a").err


def test_ctrl_c_stops_everybody_and_keeps_what_was_shown(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    counts: dict[str, int] = {}

    def interrupt(name: str) -> None:
        counts[name] = counts.get(name, 0) + 1
        if counts[name] == 30 and name == "writer":
            os.kill(os.getpid(), signal.SIGINT)

    made = script(monkeypatch, {name: ["word " * 400] for name in ("planner", "writer")}, interrupt)
    before = signal.getsignal(signal.SIGINT)
    result = run(monkeypatch, "chat", "--model", tiny, *TWO, "--max-tokens", 900, stdin="hi\n")
    assert result.code == 0 and "(stopped; what was shown is kept)" in result.err
    assert signal.getsignal(signal.SIGINT) is before
    said = made["all"].messages[-1].content
    assert said.startswith("planner: word") and 10 < said.count("word") < 800


def test_lines_are_shown_when_they_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    streams = LabelledStreams(Terminal(), ["a", "longer"])
    for name, text in [("a", "one "), ("longer", "two\nth"), ("a", "more\n"), ("longer", "ree"), ("a", "\x1b[31m")]:
        streams.feed(name, text)
    streams.feed("a", "word " * 20)
    streams.end("a")
    streams.end("longer")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["longer | two", "a      | one more"]
    assert lines[2].startswith("a      | ␛[31mword word") and all(len(line) <= 80 for line in lines)
    assert lines[-1] == "longer | three"
    assert " ".join(line.split("| ")[1] for line in lines[2:-1]).split() == ["␛[31mword", *["word"] * 19]


def test_the_demo_in_parallel(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.setattr(demo, "read_document", lambda: "The garden has bees, compost and an orchard. " * 10)
    result = run(monkeypatch, "demo", "--model", tiny, "--parallel", "--max-tokens", 12)
    assert result.code == 0, result.err
    assert re.search(r"^researcher \| ", result.out, re.MULTILINE) and re.search(
        r"^writer +\| ", result.out, re.MULTILINE
    )
    rows = [line.split() for line in result.out.splitlines() if re.match(r"^ ?(planner|researcher|writer)  ", line)]
    shared = {row[0]: int(row[1]) for row in rows if len(row) > 6}
    assert shared["researcher"] == shared["writer"] > 100 and shared["planner"] == 0
    copied = {row[0]: row[-2:] for row in rows if len(row) > 6}
    assert copied["researcher"] == copied["writer"] == ["0", "0"]
