"""Team files: what they say, what is refused and how it is told, and `qkvshare team`."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import run

from mlx_qkvshare import Access, Sampling
from mlx_qkvshare.cli.team import COLOURS, READY_TEAMS, AgentSpec, Team, find_team, parse_team, ready_text
from mlx_qkvshare.errors import InvalidValueError

ROOT = Path(__file__).resolve().parent.parent

FULL = """
about = "two"
system = "S"
[[agent]]
name = "a"
role = " R "
request = "do it"
hands_to = "b"
colour = "red"
max_tokens = 5
temperature = 1
top_p = 0.5
top_k = 3
min_p = 0.1
seed = 7
writes = "team"
reads = ["team", "public"]
[[agent]]
name = "b"
"""


def agents(*lines: str) -> str:
    return "\n".join(f"[[agent]]\n{line}" for line in lines)


def test_every_key_is_read() -> None:
    team = parse_team(FULL, "f.toml")
    first, second = team.agents
    assert (team.about, team.system, team.names) == ("two", "S", ["a", "b"])
    assert (first.role, first.request, first.hands_to, first.colour, first.max_tokens) == ("R", "do it", "b", "red", 5)
    assert first.access == Access("team", frozenset({"team", "public"})) and second.access == Access()
    assert first.sampling_with({}) == Sampling(1, 0.5, 3, 0.1, 7)
    assert first.sampling_with({"temperature": 0, "seed": 1}) == Sampling(0, 0.5, 3, 0.1, 1), "options win"
    assert second == AgentSpec("b", colour=COLOURS[1]) and second.sampling_with({}) == Sampling()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (agents("name = 'a'", "name = 'b'", "name = 'c'"), "abc"),
        (agents("name = 'a'\nhands_to = 'c'", "name = 'b'", "name = 'c'\nhands_to = 'b'"), "acb"),
        (agents("name = 'a'\nhands_to = 'b'", "name = 'b'\nhands_to = 'a'"), "ab"),
        ("\ufeff" + agents("name = 'a'"), "a"),
    ],
)
def test_a_round_goes_along_who_hands_to_whom(text: str, names: str) -> None:
    assert parse_team(text, "f.toml").names == list(names)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x =", "expected TOML: Invalid value (at "),
        ("", "agent: expected one [[agent]] or more, got []"),
        ("agent = 3", "agent: expected [[agent]] tables, got 3"),
        ("agent = [3]", "agent 1: expected a table, got 3"),
        ("about = 3\n" + agents("name = 'a'"), "about: expected a text, got 3"),
        ("titel = 'x'\n" + agents("name = 'a'"), "titel: expected one of about, system, agent; got an unknown key"),
        (agents("role = 'x'"), "agent 1, name: expected 1 to 128 printable characters, got ''"),
        (
            agents("name = 'a\\nb'".replace("'", '"')),
            "agent 1, name: expected 1 to 128 printable characters, got 'a\\nb'",
        ),
        (agents("name = 'a'", "name = 'a'"), "name: expected agents of different names, got 'a' twice"),
        (agents("name = 'a'\ncolor = 'red'"), "agent 'a', color: expected one of name, colour"),
        (agents("name = 'a'\ncolour = 'pink'"), "agent 'a', colour: expected one of cyan"),
        (agents("name = 'a'\ntemperature = 'hot'"), "agent 'a', temperature: expected a number, got 'hot'"),
        (agents("name = 'a'\ntemperature = true"), "agent 'a', temperature: expected a number, got True"),
        (agents("name = 'a'\ntemperature = -1"), "agent 'a', temperature: expected >= 0 and finite, got -1"),
        (agents("name = 'a'\ntop_p = 2"), "agent 'a', top_p: expected in (0, 1], got 2"),
        (agents("name = 'a'\nseed = 1.5"), "agent 'a', seed: expected a whole number, got 1.5"),
        (agents("name = 'a'\nmax_tokens = 0"), "agent 'a', max_tokens: expected 1 or more, got 0"),
        (agents("name = 'a'\nreads = 'team'"), "agent 'a', reads: expected a list of texts, got 'team'"),
        (agents("name = 'a'\nreads = [1]"), "agent 'a', reads: expected a list of texts, got [1]"),
        (agents("name = 'a'\nwrites = ''"), "agent 'a', domain: expected 1 to 128 printable characters, got ''"),
        (agents("name = 'a'\nreads = ['private:b']"), "agent 'a', access: expected no agent's own but a's"),
        (agents("name = 'a'\nhands_to = 'b'"), "agent 'a', hands_to: expected another agent (there is none), got 'b'"),
        (agents("name = 'a'\nhands_to = 'a'", "name = 'b'"), "hands_to: expected another agent ('b'), got 'a'"),
        (agents("name = 'a'", "name = 'b'\nhands_to = 'a'"), "hands_to: expected an agent that hands to 'b', got none"),
        (
            agents("name = 'a'\nhands_to = 'b'", "name = 'b'\nhands_to = 'c'", "name = 'c'\nhands_to = 'b'"),
            "agent 'c', hands_to: expected an agent that is not in the round yet, or the first; got 'b'",
        ),
    ],
)
def test_a_wrong_file_is_told_by_file_key_and_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(InvalidValueError) as error:
        parse_team(text, "f.toml")
    assert str(error.value).startswith("[team f.toml] ") and words in str(error.value)


def test_the_ready_teams_are_whole() -> None:
    for name in READY_TEAMS:
        team = find_team(name)
        assert len(team.agents) >= 2 and team.about and team.system
        assert all(it.role and it.request for it in team.agents)
    explained = ready_text(READY_TEAMS[0])
    for key in ("about", "system", "temperature", "writes", "reads", *AgentSpec.__dataclass_fields__):
        if key not in ("sampling", "access"):
            assert f"\n{key} = " in explained, f"the file that explains every key lacks {key}"


def test_teams_of_the_command_line() -> None:
    assert Team.of(["a: one", "b"]).agents == (AgentSpec("a", "one"), AgentSpec("b", colour=COLOURS[1]))
    with pytest.raises(InvalidValueError, match=r"--agent: .*'a' twice"):
        Team.of(["a", "a:x"])


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "no.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidValueError, match="expected a TOML file or one of plan-write-review, debate"):
        find_team(str(path))


def test_init_writes_a_team_and_overwrites_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "team", "init").code == 0
    assert find_team("team.toml") == find_team("plan-write-review")
    (tmp_path / "team.toml").write_text("mine")
    refused = run(monkeypatch, "team", "init")
    assert refused.code == 2 and "error: [team init] team.toml: expected no file, got one; --force" in refused.err
    assert (tmp_path / "team.toml").read_text() == "mine"
    assert run(monkeypatch, "team", "init", "team.toml", "--force", "--from", "debate").code == 0
    assert find_team("team.toml") == find_team("debate")
    assert "one of plan-write-review" in run(monkeypatch, "team", "init", "x.toml", "--from", "nobody").err
    assert not (tmp_path / "x.toml").exists()


def test_list_shows_the_ready_teams_and_checks_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(agents("name = '[red]a'", "name = 'b'"))
    shown = run(monkeypatch, "team", "list", path)
    assert shown.code == 0 and {*READY_TEAMS, str(path)} <= set(shown.out.splitlines())
    assert "  planner -> writer -> reviewer\n" in shown.out and "  [red]a -> b\n" in shown.out
    path.write_text("x")
    assert run(monkeypatch, "team", "list", path).code == 2
