"""`qkvshare chat`: the conversation, its limits, and how it ends."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from cli_run import force_replies, run, save_tiny
from tiny import tiny_tokenizer

from mlx_qkvshare import CardStore, Message
from mlx_qkvshare.chat import ChatFormat
from mlx_qkvshare.cli import conversation
from mlx_qkvshare.cli.commands import completions
from mlx_qkvshare.context import Prefilling


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def test_agents_take_turns_on_the_same_segments(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    sessions = force_replies(monkeypatch, "a plan", "a text", "a better plan")
    lines = [
        "what first?",
        "/agent writer",
        "write it",
        "/agent",
        "/agent planner",
        "/agent planner",
        "again",
        "/stats",
    ]
    result = run(monkeypatch, "chat", "--model", tiny, "--system", "Be brief.", stdin="\n".join(lines))
    assert result.code == 0
    assert [line for line in result.out.splitlines() if ": a " in line] == [
        "planner: a plan",
        "writer: a text",
        "planner: a better plan",
    ]
    assert "* writer" in result.out and "speaking: writer" in result.out
    assert len(re.findall(r"goes on: \d+ tokens by reference, 0 bytes copied", result.err)) == 2
    assert "(planner is speaking)" in result.err
    assert re.search(r"^handoffs +2$", result.out, re.MULTILINE)
    assert re.search(r"^bytes copied by handoffs +0$", result.out, re.MULTILINE)
    assert all(session.manager.stats().num_holders == 0 for session in sessions)  # the end gave all back


def test_the_conversation_goes_along(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    seen: list[list[tuple[str, str | None, str]]] = []

    def look(count: int) -> None:
        if count == 0:
            held = next(s for s in sessions if s.messages)
            seen.append([(m.role, m.author, m.content) for m in held.messages])

    sessions = force_replies(monkeypatch, "one", "two", "three", on_token=look)
    arguments = ["--agent", "p", "--agent", "w:You write.", "--system", "S"]
    result = run(monkeypatch, "chat", "--model", tiny, *arguments, stdin="first\n/agent w\n//second\n/new\nthird\n")
    assert result.code == 0
    assert seen[1] == [
        ("system", None, "S"),
        ("user", None, "first"),
        ("assistant", "p", "one"),
        ("user", None, "You write.\n\n/second"),
    ]
    assert seen[2] == [("system", None, "S"), ("system", "w", "You write."), ("user", None, "third")]


def test_commands_and_the_end_of_the_input(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch)
    result = run(monkeypatch, "chat", "--model", tiny, stdin="\n  \n/help\n/agent writer\n/agent nobody\n/quit\nlate\n")
    assert result.code == 0 and "/stats" in result.out and "late" not in result.out
    assert "error: no agent 'nobody'; there are: planner, writer" in result.err
    assert run(monkeypatch, "chat", "--model", tiny).code == 0


# --- B58: every limit bites, and is what the banner says --------------------------------------------------


def test_b58_cli_limits_context(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, "never", "ok")
    arguments = ["--max-context", 60, "--max-tokens", 10, "--agent", "solo"]
    result = run(monkeypatch, "chat", "--model", tiny, *arguments, stdin=f"{'word ' * 200}\nhi\n")
    assert "context      60 tokens" in result.err and "reply        up to 10 tokens" in result.err
    (error,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert re.search(r"needed \d+ positions, available 60 \(10 of them for the reply\); /new starts over", error)
    assert (result.code, result.out) == (0, "solo: ok\n")


def test_b58_cli_limits_budget(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, "never", "ok")
    arguments = ["--budget", "128K", "--max-tokens", 10, "--agent", "solo"]
    result = run(monkeypatch, "chat", "--model", tiny, *arguments, stdin=f"{'word ' * 60}\nhi\n/stats\n")
    assert "budget       131072 bytes (128.0 KiB)" in result.err
    (error,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "131072 bytes" in error and "needs" in error
    assert result.code == 0 and result.out.startswith("solo: ok\n")
    assert re.search(r"of 128\.0 KiB", result.out)


def test_b58_cli_limits_reply(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, tiny_tokenizer().encode("a", add_special_tokens=False) * 50)
    result = run(monkeypatch, "chat", "--model", tiny, "--max-tokens", 5, "--agent", "solo", stdin="hi\n")
    assert result.out == "solo: aaaaa\n"
    assert "(cut after 5 tokens; --max-tokens allows more)" in result.err


def test_a_preset_says_all_of_it_and_goes_with_no_bits(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, "fine")
    shown = run(monkeypatch, "chat", "--model", tiny, "--preset", "tight", stdin="hello\n")
    assert shown.code == 0 and "K4 V4, groups of 64 (preset tight)" in shown.err and "fine" in shown.out
    for options, named in (("--bits", "8"), "no --bits"), (("--preset", "best"), "balanced"):
        refused = run(monkeypatch, "chat", "--model", tiny, "--preset", "safe", *options, stdin="")
        assert refused.code == 2 and named in refused.err


def test_b58_the_banner_tells_what_holds(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    odd = save_tiny(tmp_path / "odd", head_dim=80)
    banner = run(monkeypatch, "chat", "--model", odd, "--k-bits", 8, "--v-bits", 4, "--seed", 3).err
    assert "K8 V4, groups of 32" in banner  # 64 does not divide 80
    assert "context      512 tokens" in banner and "4294967296 bytes (4.00 GiB)" in banner
    assert "up to 256 tokens, temperature 0, seed 3" in banner
    assert "K16 V16\n" in run(monkeypatch, "chat", "--model", tiny, "--bits", 16).err


def test_a_card_of_other_bits_is_computed_again_and_told(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    options = ("--model", tiny, "--agent", "solo", "--store", tmp_path)
    force_replies(monkeypatch, "a text", "more")
    assert "(saved 'kept': " in run(monkeypatch, "chat", *options, "--save", "kept", stdin="write\n").err
    result = run(monkeypatch, "chat", *options, "--resume", "kept", "--bits", 4, stdin="/context\nmore\n")
    assert re.search(r"\(\d+ tokens were computed again: .*quant", result.err), result.err
    assert "solo        a text" in result.out and "solo: more" in result.out
    lost = run(monkeypatch, "chat", *options, "--resume", "nothing", stdin="")
    assert lost.code == 2 and "expected a card named 'nothing'" in lost.err


def test_what_breaks_in_a_turn_is_told_and_the_chat_goes_on(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    seen: list[int] = []

    def fail(count: int) -> None:
        seen.append(count)
        if seen == [0, 1, 2]:
            raise RuntimeError("out of [red]ink")

    force_replies(monkeypatch, "a text", "ok", on_token=fail)
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "solo", stdin="hi\nagain\n")
    assert result.code == 0 and "error: [solo]: RuntimeError: out of [red]ink" in result.err
    assert result.out.endswith("solo: ok\n")


# --- B65: Ctrl-C, Ctrl-D, SIGTERM -------------------------------------------------------------------------


def test_b65_ctrl_c_stops_the_turn_and_keeps_what_was_shown(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    kept: list[str] = []

    def interrupt(count: int) -> None:
        assistant = [m.content for m in sessions[0].messages if m.role == "assistant"]
        if assistant:
            kept.append(assistant[0])
        elif count == 4:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    sessions = force_replies(monkeypatch, "one two three four five six", "fine", on_token=interrupt)
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "solo", stdin="hi\ngo on\n")
    shown, second = result.out.splitlines()
    assert result.code == 0 and second == "solo: fine"
    assert 0 < len(shown) < len("solo: one two three four five six")
    assert shown == f"solo: {kept[0]}"
    assert "(stopped; what was shown is kept)" in result.err
    assert signal.getsignal(signal.SIGINT) is before


def test_b65_ctrl_c_during_prefill_takes_the_message_back(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, "never", "ok")
    calls: list[int] = []

    class Interrupted(conversation.AgentSession):
        def _computing(self, *args: object) -> Prefilling:
            if not calls:
                calls.append(1)
                os.kill(os.getpid(), signal.SIGINT)
            return super()._computing(*args)

    monkeypatch.setattr(conversation, "AgentSession", Interrupted)
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "solo", stdin="lost\nhi\n")
    assert (result.code, result.out) == (0, "solo: ok\n")
    assert "(stopped; the message was taken back)" in result.err


class InterruptedHalfWay(conversation.AgentSession):
    """Ctrl-C comes behind the first chunk of whatever is longer than a hundred tokens."""

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options, prefill_step_tokens=32)

    def _computing(self, token_ids: list[int], progress=None) -> Prefilling:
        def interrupting(done: int, total: int) -> None:
            if 0 < done < total and total > 100:
                os.kill(os.getpid(), signal.SIGINT)
            if progress:
                progress(done, total)

        return super()._computing(token_ids, interrupting)


@pytest.mark.parametrize("everybody", [(), ("--parallel",)], ids=["one", "all"])
def test_b65_what_was_taken_back_is_not_saved_nor_counted(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path, everybody: tuple
) -> None:
    (tmp_path / "long.txt").write_text("word " * 80)
    monkeypatch.setattr(conversation, "AgentSession", InterruptedHalfWay)
    lines = ["hi", "/stats", f"/file {tmp_path}/long.txt", "long " * 80, "/stats", "/save kept"]
    options = ("--model", tiny, "--agent", "solo", "--max-tokens", 4, "--store", tmp_path / "cards", *everybody)
    result = run(monkeypatch, "chat", *options, stdin="\n".join(lines))
    assert result.code == 0 and result.err.count("(stopped; ") == 2, result.err
    (before, after) = re.findall(r"^context +(\d+) of .*?^bytes in use +(\S+ \S+)", result.out, re.M | re.S)
    assert int(after[0]) <= int(before[0]) and after[1] <= before[1]
    card = CardStore(tmp_path / "cards").inspect("kept")
    assert card.num_tokens <= int(before[0]) and len(card.messages) == 2


def test_a_block_or_several_lines_are_text_whatever_they_begin_with(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    sessions = force_replies(monkeypatch, "x", "x", "x", "x")
    lines = '"""// a comment\nint x;"""\n"""/help"""\n/usr/bin/x\\\nsecond\n//one\n'
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "solo", stdin=lines)
    assert result.code == 0 and "error" not in result.err
    said = [message.content for message in sessions[0].messages if message.role == "user"]
    assert said == ["// a comment\nint x;", "/help", "/usr/bin/x\nsecond", "/one"]
    assert result.out == "solo: x\n" * 4


def test_whatever_a_command_meets_the_chat_goes_on(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    force_replies(monkeypatch, "ok")

    def broken(*_: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr(conversation.Conversation, "stats", broken)
    (tmp_path / "empty.txt").write_text(" \n")
    lines = ["/file ~no_such_user/x", f"/file {tmp_path}/empty.txt", f"/file {'x' * 400}", "/stats", "/rewind",
             "/handoff solo solo", "/fork all", "/fork a\tb", "hi", "/save a\tb"]  # fmt: skip
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "solo", stdin="\n".join(lines))
    errors = [line.removeprefix("error: ") for line in result.err.splitlines() if line.startswith("error: ")]
    expected = [
        "[file ~no_such_user/x] expected a file to read: No such file or directory",
        "[file empty.txt] expected some text, got none",
        "expected a file to read: File name too long",
        "[/stats]: RuntimeError: oh",
        "there is nothing to take back: nothing was said yet",
        "expected two agents, got solo twice",
        "name: expected another than 'all', which is all agents at once",
        "name: expected 1 to 128 printable characters, got 'a\\tb'",
        "name: expected 1 to 128 printable characters, got 'a\\tb'",
    ]
    assert len(errors) == len(expected) and all(map(str.__contains__, errors, expected)), errors
    assert (result.code, result.out) == (0, "solo: ok\n")


def test_tab_offers_commands_agents_paths_and_cards(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    offered: dict[str, list[str]] = {}
    lines = ["/he", "/ag", "/to w", "/handoff planner ", "/file ", "/load k", "//x", "hi"]

    def note(talked: conversation.Conversation, _: object) -> None:
        offered.update((line, completions(talked, line, line.rpartition(" ")[2])) for line in lines)

    (tmp_path / "doc.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    force_replies(monkeypatch, "ok")
    options = ("--model", tiny, "--store", tmp_path / ".cards")
    assert run(monkeypatch, "chat", *options, "--save", "kept", stdin="hi\n").code == 0
    monkeypatch.setattr("mlx_qkvshare.cli.chat.talk", note)
    assert run(monkeypatch, "chat", *options).code == 0
    assert list(offered.values()) == [
        ["/help"], ["/agent", "/agents"], ["writer"], ["planner", "writer"], ["doc.txt"], ["kept"], [], []
    ]  # fmt: skip


def test_next_goes_through_the_team(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "team.toml").write_text(
        '[[agent]]\nname = "a"\nhands_to = "c"\n[[agent]]\nname = "b"\nhands_to = "a"\n'
        '[[agent]]\nname = "c"\nhands_to = "b"\nrequest = "Go."\n'
    )
    heard: list[str] = []
    sessions = force_replies(monkeypatch, *"1234", on_token=lambda n: n or heard.append(_last_asked(sessions)))
    lines = ["hi", "/next", "/next", "ho", "/next say it", "/fork d", "/next", "/agents"]
    result = run(monkeypatch, "chat", "--model", tiny, "--team", tmp_path / "team.toml", stdin="\n".join(lines))
    assert result.code == 0 and heard == ["hi", "Go.", "ho", "say it"]
    assert result.out.startswith("a: 1\nc: 2\nb: 3\na: 4\n") and result.out.endswith("speaking: a\n")
    assert result.err.count("goes on: ") == 4 and "error" not in result.err


def _last_asked(sessions: list) -> str:
    return max((s for s in sessions), key=lambda s: len(s.messages)).messages[-1].content


def test_what_a_cache_of_ones_own_would_hold_follows_files_and_rewinds(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("word " * 60)
    force_replies(monkeypatch, "ok")
    lines = ["hi", "/stats", f"/file {tmp_path}/a.txt", "/stats", "/rewind", "/stats"]
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "solo", stdin="\n".join(lines))
    tokens = [int(found) for found in re.findall(r"^context +(\d+) of", result.out, re.M)]
    apart = [float(found) for found in re.findall(r"^apart, full precision +([\d.]+) KiB", result.out, re.M)]
    assert tokens[1] > tokens[0] + 60 and tokens[2] <= tokens[0] + 1
    assert [round(kib / count, 2) for kib, count in zip(apart, tokens, strict=True)] == [2.0] * 3


def test_a_kept_conversation_says_who_is_missing_and_which_branches_were_left(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    store = ("--store", tmp_path)
    force_replies(monkeypatch, "one", "two")
    made = run(monkeypatch, "chat", "--model", tiny, "--agent", "judge", *store, stdin="hi\n/fork b\nho\n/save x\n")
    assert "; only this branch, not that of judge)" in made.err
    found = run(monkeypatch, "chat", "--model", tiny, *store, "--resume", "x")
    assert found.code == 0 and "(kept by b, who is not here; --team or --agent brings the agents back)" in found.err
    for name in ("--resume", "--save"):
        wrong = run(monkeypatch, "chat", "--model", tmp_path / "no model", *store, name, "a\nb")
        assert wrong.code == 2 and "name: expected 1 to 128 printable" in wrong.err, "before a model is looked for"


def test_a_name_in_another_form_of_unicode_is_the_same_name(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    force_replies(monkeypatch, "one")
    composed, apart = "caf\u00e9", "cafe\u0301"
    options = ("chat", "--model", tiny, "--agent", "solo", "--store", tmp_path)
    assert run(monkeypatch, *options, stdin=f"hi\n/save {apart}\n").code == 0
    assert CardStore(tmp_path).names() == [composed]
    found = run(monkeypatch, *options, "--resume", apart, stdin=f"/load {apart}\n")
    assert found.code == 0 and "error" not in found.err and found.err.count("speaking: solo)") == 3


def test_a_reply_that_does_not_fit_is_told_by_its_own_limit(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "team.toml").write_text('[[agent]]\nname = "a"\nmax_tokens = 99\n')
    (tmp_path / "long.txt").write_text("word " * 90)
    force_replies(monkeypatch, "never")
    options = ("--model", tiny, "--team", tmp_path / "team.toml", "--max-context", 128)
    result = run(monkeypatch, "chat", *options, stdin=f"/file {tmp_path}/long.txt\n{'word ' * 90}\n")
    assert result.err.count("(64 of them for the reply)") == 2, "half of the context, as without a team"


# --- what others' chats stumbled over ---------------------------------------------------------------------

EMOJI = "ok \U0001f469\u200d\U0001f469\u200d\U0001f467 日本語 é \U0001f3f3\ufe0f\u200d\U0001f308"


def test_b63_characters_of_many_tokens_are_shown_whole(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, EMOJI, EMOJI)
    result = run(monkeypatch, "chat", "--model", tiny, stdin="hi\n/to writer\nagain\n")
    assert result.out == f"planner: {EMOJI}\nwriter: {EMOJI}\n"


@pytest.mark.parametrize("cut", [4, 6, 9])
def test_b63_a_character_that_is_cut_is_kept_whole(monkeypatch: pytest.MonkeyPatch, tiny: Path, cut: int) -> None:
    ids = tiny_tokenizer().encode(EMOJI, add_special_tokens=False)
    kept: list[tuple[int, ...] | None] = []
    sessions = force_replies(monkeypatch, EMOJI, "x", on_token=lambda count: kept.append(_said(sessions)))
    shown = run(monkeypatch, "chat", "--model", tiny, "--max-tokens", cut, stdin="hi\n/to writer\nyes\n").out
    text = shown.splitlines()[0].removeprefix("planner: ")
    assert EMOJI.startswith(text.removesuffix("\ufffd")) and text.count("\ufffd") <= 1
    assert kept[-1] == tuple(ids[:cut]), "what was handed on is whole"


def _said(sessions: list) -> tuple[int, ...] | None:
    holder = next(session for session in sessions if session.messages)
    return next((m.token_ids for m in holder.messages if m.role == "assistant"), None)


@pytest.mark.parametrize("over", [0, 1, 200])
def test_b72_a_first_message_as_long_as_the_context(monkeypatch: pytest.MonkeyPatch, tiny: Path, over: int) -> None:
    force_replies(monkeypatch, "ok", "ok")
    frame = len(ChatFormat(tiny_tokenizer()).render([Message("user", "")]))
    message = "Z" * (512 - 8 - frame + over)  # a token each
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "solo", "--max-tokens", 8, stdin=f"{message}\nhi\n")
    if not over:
        assert result.out.startswith("solo: ok\n")
        return
    assert f"needed {512 + over} positions, available 512 (8 of them for the reply)" in result.err
    assert result.err.index("needed") < result.err.index("prefill"), "refused before anything was computed"
    assert (result.code, result.out) == (0, "solo: ok\n")


STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_b73_a_template_that_wants_roles_to_alternate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    strict = save_tiny(tmp_path / "strict", max_position=4096)
    (strict / "chat_template.jinja").write_text(STRICT)
    (tmp_path / "doc.txt").write_text("Compost needs air.")
    force_replies(monkeypatch, "a plan", "a text", "fine", "more")
    agents = ("--agent", "planner:You plan.", "--agent", "writer:You write.", "--agent", "critic:You judge.")
    lines = [f"/file {tmp_path}/doc.txt", "plan", "/to writer", "write", "/to critic", "judge", "/all and you?"]
    lines += ["/to writer", "/rewind 2", "again"]
    result = run(monkeypatch, "chat", "--model", strict, "--system", "S", *agents, stdin="\n".join(lines))
    assert result.code == 0 and "error" not in result.err, result.err
    assert result.out.splitlines()[:3] == ["planner: a plan", "writer: a text", "critic: fine"]
    assert result.out.splitlines()[-1] == "writer: more"


def test_one_seed_and_draws_of_everybodys_own(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    seeds = []
    for _ in range(2):
        sessions = force_replies(monkeypatch)
        run(monkeypatch, "chat", "--model", tiny, "--seed", 5, "--temperature", 1, stdin="")
        seeds.append([session.sampling.seed for session in sessions if session.name != "all"])
    assert seeds[0] == seeds[1] and seeds[0][0] == 5 and len(set(seeds[0])) == 2


# --- domains ----------------------------------------------------------------------------------------------

GUARDED = """
system = "S"
[[agent]]
name = "nurse"
[[agent]]
name = "doctor"
writes = "private:doctor"
reads = ["team"]
"""


def test_what_an_agent_may_not_read_is_left_out(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    heard: list[list[str]] = []

    def listen(count: int) -> None:
        if count == 0:
            speaking = next(s for s in sessions if s.messages and s.messages[-1].role == "user")
            heard.append([m.content for m in speaking.messages])

    (tmp_path / "team.toml").write_text(GUARDED)
    sessions = force_replies(monkeypatch, "fine", "secret", "well", "more secrets", on_token=listen)
    lines = ["hi", "/to doctor", "tell me", "/to nurse", "and you?", "/to doctor", "go on"]
    result = run(monkeypatch, "chat", "--model", tiny, "--team", tmp_path / "team.toml", stdin="\n".join(lines))
    assert result.code == 0 and "error" not in result.err, result.err
    assert heard == [
        ["S", "hi"],
        ["S", "hi", "fine", "tell me"],
        ["S", "hi", "fine", "and you?"],
        ["S", "hi", "fine", "tell me", "secret", "go on"],  # the doctor's own branch
    ]
    assert re.search(r"\(\d+ tokens that nurse may not read were left out\)", result.err)


def test_what_is_said_to_nobody_joins_no_round(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "team.toml").write_text(GUARDED)
    options = ("--model", tiny, "--team", tmp_path / "team.toml", "--max-tokens", 8)
    result = run(monkeypatch, "chat", *options, stdin="/all hi\n/context\n")
    assert result.code == 0 and re.search(r"^doctor \| ", result.out, re.MULTILINE), result.out
    (said,) = [line for line in result.out.splitlines() if line.startswith("  assistant")]
    assert "nurse: " in said and "doctor: " not in said


def test_debug_shows_the_traceback_of_a_turn(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    def fail(count: int) -> None:
        raise ValueError("out of ink")

    force_replies(monkeypatch, "never", on_token=fail)
    quiet = run(monkeypatch, "chat", "--model", tiny, stdin="hi\n")
    assert "error: [planner]: ValueError: out of ink" in quiet.err
    force_replies(monkeypatch, "never", on_token=fail)
    with pytest.raises(AssertionError, match=r"Traceback(?s:.*)in fail"):  # `run` lets none pass
        run(monkeypatch, "--debug", "chat", "--model", tiny, stdin="hi\n")
