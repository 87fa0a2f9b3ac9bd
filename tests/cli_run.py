"""Helpers of the CLI tests: `qkvshare` run in this process or another, and T saved as an mlx-lm directory."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import tiny_config, tiny_model, tiny_tokenizer

from mlx_qkvshare import AgentSession, StreamChunk
from mlx_qkvshare.cli import app, conversation

COMMAND = [sys.executable, "-P", "-c", "from mlx_qkvshare.cli.app import main; main()"]


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


def force_replies(
    monkeypatch: pytest.MonkeyPatch, *replies: str | Sequence[int], on_token: Callable[[int], None] = lambda count: None
) -> list[AgentSession]:
    """Let the chat's agents say `replies`, one a turn. Returns the sessions, as they are made.

    `on_token` is called at every sampling with how often the turn sampled before.
    """
    tokenizer, made = tiny_tokenizer(), []
    ids = [
        reply if not isinstance(reply, str) else tokenizer.encode(reply, add_special_tokens=False) for reply in replies
    ]
    left, turn = iter(ids), []

    def sampler(logits: mx.array) -> mx.array:
        count, reply = turn[0], turn[1]
        on_token(count)
        turn[0] += 1
        return mx.array(reply[count] if count < len(reply) else tokenizer.eos_token_id, dtype=mx.uint32)

    class Scripted(AgentSession):
        def __init__(self, *args: object, **options: object):
            super().__init__(*args, **{**options, "sampler": sampler})
            made.append(self)

        def stream(self, *args: object, **options: object) -> Iterator[StreamChunk]:
            turn[:] = [0, next(left)]
            return super().stream(*args, **options)

    monkeypatch.setattr(conversation, "AgentSession", Scripted)
    return made
