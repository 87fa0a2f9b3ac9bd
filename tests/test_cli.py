"""The commands as a whole: options, errors, robust input and output, the demo."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from cli_run import COMMAND, Result, force_replies, run, save_tiny
from test_windows import SLIDING

from mlx_qkvshare.cli import app, demo
from mlx_qkvshare.cli.lines import clean
from mlx_qkvshare.cli.options import parse_bytes, quant_spec
from mlx_qkvshare.cli.terminal import harmless

MARKUP = "[/INST] [bold]b[/bold] [red]x[/red] a[0] [/] :smile:"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def test_help_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run(monkeypatch, "--help")
    assert shown.code == 0 and {"demo", "chat", "bench"} <= set(shown.out.split())
    assert "NAME[:ROLE]" in run(monkeypatch, "chat", "--help").out
    assert re.fullmatch(r"qkvshare \d+\.\d+\.\d+\n", run(monkeypatch, "--version").out)
    assert run(monkeypatch, "no-such-command").code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chat", "--model", "/no/such/[bold]model"], "/no/such/[bold]model"),
        (["chat", "--budget", "lots"], "lots"),
        (["chat", "--budget", "0"], "--budget"),
        (["chat", "--bits", "7"], "k_bits"),
        (["chat", "--temperature", "-1"], "temperature"),
        (["chat", "--agent", " :role"], "NAME"),
        (["chat", "--agent", "[/INST]", "--agent", "[/INST]:twice", "--model", "TINY"], "'[/INST]' twice"),
        (["chat", "--max-context", "513", "--model", "TINY"], "513"),
        (["demo", "--group-size", "7"], "group_size"),
        (["demo", "--model", "TINY"], "available 512"),  # the document is longer than the tiny model's context
    ],
)
def test_an_error_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, arguments: list[str], words: str
) -> None:
    result = run(monkeypatch, *(str(tiny) if a == "TINY" else a for a in arguments))
    last = result.err.splitlines()[-1]
    assert result.code == 2 and last.startswith("error: ") and words in last
    assert result.err.count("error: ") == 1


@pytest.mark.parametrize("arguments", [("--debug", "chat", "--bits", "7"), ("chat", "--bits", "7", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: tuple
) -> None:
    monkeypatch.setattr("sys.argv", ["qkvshare", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback (most recent call last)" in said
    assert said.splitlines()[-1].startswith("error: ")
    assert run(monkeypatch, "chat", "--bits", "7", "--", "--debug").code == 2


def test_what_nobody_foresaw_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("oh")

    monkeypatch.setattr("mlx_qkvshare.cli.options.quant_spec", broken)
    result = run(monkeypatch, "chat")
    assert (result.code, result.out, result.err) == (1, "", "error: KeyError: 'oh' (--debug shows where)\n")


def test_sizes_and_bits() -> None:
    assert [parse_bytes(text) for text in ("512M", "1.5 KiB", "7", "2gb")] == [512 * 2**20, 1536, 7, 2 * 2**30]
    assert quant_spec(None, None, None, 64) is None and quant_spec(None, None, None, 64, "tight") == "tight"
    assert str(quant_spec(None, None, None, 32)) == "K8V8 g32"
    assert str(quant_spec(4, 8, None, 32)) == "K8V4 g32"


# --- B67: whatever bytes come in, whatever encoding goes out ----------------------------------------------


@pytest.mark.parametrize(
    ("data", "heard", "num_replaced"),
    [
        (b"a\xff\xfeb\n", "a\ufffd\ufffdb", 2),
        (b"a\xed\xa0\x80b\n", "a\ufffd\ufffd\ufffdb", 3),  # a lone surrogate, as broken programs write it
        (b"a\0b\n", "a\ufffdb", 1),
        (b"hello\r\n", "hello", 0),
        (b"\xef\xbb\xbfhello\n", "hello", 0),
        ("日本 é 👩‍👩‍👧".encode(), "日本 é 👩‍👩‍👧", 0),
    ],
)
def test_b67_undecodable_input_is_replaced_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, data: bytes, heard: str, num_replaced: int
) -> None:
    heards: list[str] = []
    sessions = force_replies(monkeypatch, "ok", on_token=lambda count: heards.append(sessions[0].messages[-1].content))
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "solo", stdin=data)
    assert result.code == 0 and result.out == "solo: ok\n"
    assert heards[0] == heard
    assert ("U+FFFD" in result.err) == (num_replaced > 0)
    if num_replaced:
        assert f"({num_replaced} unreadable" in result.err


def test_b67_surrogates_by_argument(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, "ok")
    result = run(
        monkeypatch, "chat", "--model", tiny, "--agent", "b\udcffb:role \udcff", "--system", "\udcfe", stdin="hi"
    )
    assert (result.code, result.out) == (0, "b\ufffdb: ok\n")
    assert clean("a\udc80\0") == ("a\ufffd\ufffd", 2)


def test_b67_ascii_output_is_escaped(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, "caf\u00e9 \u2019 \U0001f600")
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "zo\u00eb", stdin="hi\n/stats\n", encoding="ascii")
    assert result.code == 0
    assert result.out.splitlines()[0] == r"zo\xeb: caf\xe9 \u2019 \U0001f600"


# --- B68: foreign text is shown, not obeyed ---------------------------------------------------------------


def test_b68_markup_is_printed_literally(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    force_replies(monkeypatch, MARKUP, MARKUP)
    name = "[/INST] [bold]x"
    lines = [MARKUP, f"/agent {MARKUP}", f"/{MARKUP}", "/stats", "/agent w", MARKUP]
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", name, "--agent", "w", stdin="\n".join(lines))
    assert result.code == 0
    assert f"{name}: {MARKUP}\n" in result.out and f"w: {MARKUP}\n" in result.out
    assert f"speaking                        {name}\n" in result.out
    assert f"agents       {name}, w (speaking: {name})" in result.err
    assert f"error: no agent {MARKUP!r}; there are: {name}, w\n" in result.err
    assert "error: no command /[/INST]; /help lists them\n" in result.err


@pytest.mark.parametrize("force", [False, True])
def test_b68_escape_codes_never_reach_the_terminal(monkeypatch: pytest.MonkeyPatch, tiny: Path, force: bool) -> None:
    if force:  # rich colours its own labels then; the agent's codes stay pictures
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
    evil = "a\x1b[31mred\x1b]0;title\x07\r\x08\x9b1mb\tc"
    force_replies(monkeypatch, evil)
    result = run(monkeypatch, "chat", "--model", tiny, "--agent", "n", stdin=f"hi\n/agent {evil}\n/{evil}\n")
    assert result.code == 0
    assert "a␛[31mred␛]0;title␇␍␈\ufffd1mb\tc\n" in result.out
    refused = run(monkeypatch, "chat", "--model", tiny, "--agent", f"n{evil}")
    assert refused.code == 2 and "\\x1b[31mred" in refused.err and "\x1b[31mred" not in refused.err
    codes = set(re.findall(r"\x1b.{6}", result.out + result.err))
    assert (len(codes) > 0) == force and not any("[31m" in code or "]0" in code for code in codes)
    assert not set("\x07\x08\x9b") & set(result.out + result.err) and "\r" not in result.out  # progress uses \r


@pytest.mark.parametrize("variable", ["NO_COLOR", None])
def test_plain_text_without_a_terminal_or_with_no_color(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, variable: str | None
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if variable:
        monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich can tell
        monkeypatch.setenv(variable, "1")
    force_replies(monkeypatch, "ok")
    result = run(monkeypatch, "chat", "--model", tiny, stdin="hi\n/agent writer\n/stats\n/nothing\n")
    assert result.code == 0 and "\x1b" not in result.out + result.err


def test_harmless_keeps_what_people_write() -> None:
    text = "tab\tnew\nline 日本 é 👩‍👩‍👧 ‮rtl"
    assert harmless(text) == text
    assert harmless("\x00\x1b\x7f\x85\udc80") == "␀␛␡\ufffd\ufffd"


# --- the demo ---------------------------------------------------------------------------------------------


def test_b67_the_demo_on_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    roomy = save_tiny(tmp_path, max_position=8192)
    result = run(monkeypatch, "demo", "--model", roomy, "--max-tokens", 8, encoding="ascii")
    assert result.code == 0, result.err
    check_demo(result)


def test_a_model_without_a_chat_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo takes plain words and says so; a chat says what to do."""
    base = save_tiny(tmp_path, max_position=4096, **SLIDING)  # a window cannot be cut in front of a reply
    (base / "chat_template.jinja").unlink()
    monkeypatch.setattr(demo, "read_document", lambda: "Compost needs air.")
    result = run(monkeypatch, "demo", "--model", base, "--max-tokens", 4)
    assert result.code == 0, result.err
    assert "no chat template" in result.err and "User:" in result.err
    assert len(re.findall(r"^(?:planner|researcher|writer): ", result.out, re.MULTILINE)) == 3
    shared = [int(n) for n in re.findall(r"^ *(?:researcher|writer) +(\d+) ", result.out, re.MULTILINE)]
    assert 0 < shared[0] < shared[1]
    result = run(monkeypatch, "chat", "--model", base, stdin="hi\n")
    assert "take an instruction-tuned model" in result.err and result.err.count("error: ") == 1


@pytest.mark.slow
def test_the_demo_shares_and_copies_nothing() -> None:
    done = subprocess.run([*COMMAND, "demo", "--max-tokens", "24"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    check_demo(Result(done.returncode, done.stdout, done.stderr))
    assert len(re.findall(r"^(?:planner|researcher|writer): \w", done.stdout, re.MULTILINE)) == 3, done.stdout


def check_demo(result: Result) -> None:
    for name in ("planner", "researcher", "writer"):
        assert re.search(rf"^{name}: ", result.out, re.MULTILINE), result.out
    rows = dict(re.findall(r"^ *(\S.*?)  +(\S.*?) *$", result.out[result.out.index("in all") :], re.MULTILINE))
    assert rows["bytes copied per handoff"] == "0"
    assert int(rows["tokens shared at the last handoff"].replace(",", "")) > 900
    assert float(rows["re-prefill / handoff"].removesuffix("x")) > 1
    held, quantized, full = (
        int(next(value for name, value in rows.items() if words in name).split()[0].replace(",", ""))
        for words in ("held once", "separate quantized", "separate full-precision")
    )
    assert held < quantized / 2.5 and quantized < full / 2
    for name in ("researcher", "writer"):  # … handoff time, KV bytes copied, change of the memory in use
        assert re.search(rf"^ *{name} .* ms +0 +0 *$", result.out, re.MULTILINE), result.out
