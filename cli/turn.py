"""One agent's turn, shown as it comes, and what there is to say about it after."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import AgentSession, SharedKVCacheManager
from ..errors import BudgetExceededError, ContextLimitError, QKVShareError, typed_error
from .interrupts import Interrupts
from .terminal import ProgressLine, Terminal, format_bytes, format_seconds

if TYPE_CHECKING:
    from ..model import LoadedModel


@dataclass(frozen=True)
class Turn:
    """What an agent said. `finish_reason`: "stop", "length", "interrupted", or "error" with the `error`.

    `seconds` run from the question to the last token, `first_token_seconds` to the first one; None if there was none.
    """

    agent: str
    text: str
    num_tokens: int
    seconds: float
    first_token_seconds: float | None
    finish_reason: str
    reused_tokens: int = 0
    computed_tokens: int = 0
    error: QKVShareError | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of the context; bytes held, and what caches of their own would hold for the agents who spoke, at the
    lengths that they spoke at."""

    num_agents: int
    context_tokens: int
    max_context: int
    held_bytes: int
    separate_bytes: int
    separate_quantized_bytes: int

    @classmethod
    def of(cls, manager: SharedKVCacheManager, context_tokens: int, max_context: int, lengths: Sequence[int]) -> Usage:
        return cls(
            num_agents=len(lengths),
            context_tokens=context_tokens,
            max_context=max_context,
            held_bytes=manager.stats().protected_bytes,
            separate_bytes=sum(map(manager.spec.context_bytes, lengths)),
            separate_quantized_bytes=sum(manager.quant.packed_bytes(manager.spec, count) for count in lengths),
        )


def take_turn(
    session: AgentSession,
    text: str,
    max_tokens: int,
    terminal: Terminal,
    interrupts: Interrupts,
    colour: str | None = "cyan",
) -> Turn:
    """Stream the reply of `session`, behind its name unless `colour` is None. What goes wrong is in the turn, and shown
    by the caller."""
    progress, pieces, count, reason = ProgressLine(terminal), [], 0, None
    error: QKVShareError | None = None
    started, first = time.perf_counter(), None

    def prefilled(done: int, total: int) -> None:
        progress(f"{session.name}: prefill", done, total)
        interrupts.check()

    stream = session.stream(text, max_tokens=max_tokens, progress=prefilled)
    try:
        with contextlib.closing(stream):
            for chunk in stream:
                if first is None:
                    first = time.perf_counter() - started
                    progress.close()
                    if colour is not None:
                        terminal.label(session.name, colour)
                terminal.stream(chunk.text)
                pieces.append(chunk.text)
                count, reason = count + 1, chunk.finish_reason
                if interrupts.is_set:
                    break
    except KeyboardInterrupt:  # during prefill, or Ctrl-C twice
        pass
    except OSError:  # nobody reads any more
        raise
    except Exception as broken:  # whatever a model or its tokenizer raises ends this turn, and not the conversation
        error = typed_error(broken, f"[{session.name}]")
    finally:
        progress.close()
        if first is not None:
            terminal.line()
    report = session.last_prefill
    return Turn(
        agent=session.name,
        text="".join(pieces),
        num_tokens=count,
        seconds=time.perf_counter() - started,
        first_token_seconds=first,
        finish_reason="error" if error else reason or "interrupted",
        reused_tokens=report.reused_tokens if first is not None else 0,
        computed_tokens=report.computed_tokens if first is not None else 0,
        error=error,
    )


def ending(turns: Sequence[Turn], max_tokens: int) -> str:
    """What there is to say about how the turns ended: nothing if they ended by themselves."""
    if any(turn.finish_reason == "interrupted" for turn in turns):
        is_shown = any(turn.num_tokens for turn in turns)
        return f"(stopped; {'what was shown is kept' if is_shown else 'the message was taken back'})"
    cut = [turn.agent for turn in turns if turn.finish_reason == "length"]
    who = f": {', '.join(cut)}" if len(turns) > 1 else ""
    return f"(cut after {max_tokens} tokens{who}; --max-tokens allows more)" if cut else ""


def status(turns: Sequence[Turn], usage: Usage) -> str:
    """The line below a reply."""
    other = "apart" if usage.num_agents > 1 else "in full precision"
    parts = [
        f"{usage.context_tokens}/{usage.max_context} tokens",
        f"{format_bytes(usage.held_bytes)} held once, {format_bytes(usage.separate_bytes)} {other}",
    ]
    firsts = [turn.first_token_seconds for turn in turns if turn.first_token_seconds is not None]
    decoding = max((turn.seconds - (turn.first_token_seconds or 0) for turn in turns), default=0)
    count = sum(max(0, turn.num_tokens - 1) for turn in turns)
    if count and decoding > 0:
        parts.append(f"{count / decoding:.1f} tok/s")
    if firsts:
        parts.append(f"TTFT {format_seconds(min(firsts))}")
    return f"[{'; '.join(parts)}]"


def advice(error: BaseException, max_tokens: int, start_over: str = "/new starts over") -> str:
    """The error, and what helps."""
    if isinstance(error, ContextLimitError):
        return f"{error} ({max_tokens} of them for the reply); {start_over}"
    if isinstance(error, BudgetExceededError):
        return f"{error}; --budget allows more"
    return str(error)


def describe_limits(model: LoadedModel, max_context: int | None, max_tokens: int | None) -> tuple[int, int]:
    """Tokens of the conversation and of one reply: what was asked for, else the model's, and 256 or half of it."""
    context = model.spec.max_context_tokens if max_context is None else max_context
    return context, min(256, max(1, context // 2)) if max_tokens is None else max_tokens
