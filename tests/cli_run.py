"""Helpers of the CLI tests: `qkvshare` run in this process or another, and T saved as an mlx-lm directory."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import tiny_config, tiny_model, tiny_tokenizer

from mlx_qkvshare.cli import app, conversation

COMMAND = [sys.executable, "-c", "from mlx_qkvshare.cli.app import main; main()"]


class Result(NamedTuple):
    code: int
    out: str
    err: str


def save_tiny(folder: Path, **overrides: object) -> Path:
    """T as mlx-lm stores a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(**overrides)))
    weights = dict(tree_flatten(tiny_model(**overrides).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tiny_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object, stdin: str | bytes = b"", encoding="utf-8") -> Result:
    """`qkvshare ARGUMENTS` in this process, with the standard streams of a pipe."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = io.BytesIO(), io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["qkvshare", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding, errors="strict"))
        patch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding=encoding, errors="strict"))
        with pytest.raises(SystemExit) as exit_:
            app.main()
        sys.stdout.flush()
        sys.stderr.flush()
        shown, noted = (stream.getvalue().decode(encoding) for stream in (out, err))
    assert "Traceback" not in noted, noted
    return Result(exit_.value.code or 0, shown, noted)


def start(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
    """`qkvshare ARGUMENTS` in a process of its own, where Ctrl-C is not ignored."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)


def force_replies(
    monkeypatch: pytest.MonkeyPatch, *replies: str | Sequence[int], on_token: Callable[[int], None] = lambda count: None
) -> list[conversation.AgentSession]:
    """Let the chat's agents say `replies`, one after another, and end. Returns the sessions, as they are made.

    `on_token` is called with the number of tokens sampled so far.
    """
    tokenizer, made = tiny_tokenizer(), []
    ids = [r if not isinstance(r, str) else tokenizer.encode(r, add_special_tokens=False) for r in replies]
    script = _script([list(reply) for reply in ids], tokenizer.eos_token_id, on_token)

    class Scripted(conversation.AgentSession):
        def __init__(self, *args: object, **options: object):
            super().__init__(*args, **options)
            made.append(self)

        def _pick(self, logits: mx.array, ahead: int) -> mx.array:
            if ahead == 0:  # the turn begins: what was sampled ahead for the turn before is void
                script.send(None) if not made[0].__dict__.setdefault("_begun", []) else script.send("turn")
                made[0].__dict__["_begun"].append(1)
            return mx.array(next(script), dtype=mx.uint32)

    monkeypatch.setattr(conversation, "AgentSession", Scripted)
    return made


def _script(replies: list[list[int]], eos: int, on_token: Callable[[int], None]) -> Iterator[int]:
    raise NotImplementedError
