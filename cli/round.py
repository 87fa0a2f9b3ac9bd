"""All agents answer one message at the same time, each from the same context by reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from .. import AgentScheduler, AgentSession, AgentTask, HandoffRecord, Message, QKVShareError
from ..errors import TaskCancelledError
from .interrupts import Interrupts, shown_prefill
from .streams import show_together
from .terminal import Terminal
from .turn import Turn


class Voice(NamedTuple):
    """An agent that answers: an empty session, the longest reply, its colour."""

    session: AgentSession
    max_tokens: int
    colour: str


def take_round(
    floor: AgentSession, voices: Sequence[Voice], text: str, terminal: Terminal, interrupts: Interrupts
) -> tuple[list[Turn], list[HandoffRecord]]:
    """Let `floor`, which has all that was said, hear `text` and then what the `voices` answer; they end up empty.

    What an agent adds is its role and its reply, which joins the floor before the next message. What fails while the
    floor hears is raised, and all is as it was; what fails later is in the turns.
    """
    before, started = len(floor.messages), time.perf_counter()
    replies: list[str] = []
    try:
        _hear(floor, text, terminal, interrupts)
        heard = time.perf_counter() - started
        with AgentScheduler(floor.manager) as scheduler:
            tasks = []
            for session, max_tokens, _ in voices:
                handed = scheduler.handoff(floor, session, keep_sender=True)
                ask = f"Answer as {session.name}."
                tasks.append(scheduler.submit(session, ask, max_tokens=max_tokens, after=[handed]))
            show_together(tasks, terminal, interrupts, {voice.session.name: voice.colour for voice in voices})
        seconds = time.perf_counter() - started
        turns = [_turn(task, heard, seconds) for task in tasks]
        # What is said into a domain that the floor may not read was shown to the user, and stays there.
        heard_all = {voice.session.name: floor.access.may_read({voice.session.access.writes}) for voice in voices}
        said = [turn for turn in turns if turn.text.strip() and heard_all[turn.agent]]
        replies = [f"{turn.agent}: {turn.text.strip()}" for turn in said]
        return turns, list(scheduler.coordinator.records)
    finally:
        if replies:
            floor.messages.append(Message("assistant", "\n\n".join(replies), domain=floor.access.writes))
        elif len(floor.messages) > before:
            floor.take_back()
        for session, _, _ in voices:
            session.reset()  # the floor has it all; their own tails would only take room


def _hear(floor: AgentSession, text: str, terminal: Terminal, interrupts: Interrupts) -> None:
    with shown_prefill(terminal, interrupts, "prefill") as prefilled:
        floor.say(text, progress=prefilled)
        floor.seal()


def _turn(task: AgentTask, heard_seconds: float, seconds: float) -> Turn:
    error, report, has_begun = task.error(), task.session.last_prefill, task.num_tokens > 0
    is_stopped = isinstance(error, TaskCancelledError)
    if error is not None and isinstance(error.__cause__, QKVShareError):
        error = error.__cause__  # what the work failed with that this one waited for
    return Turn(
        agent=task.name,
        text=task.text,
        num_tokens=task.num_tokens,
        seconds=seconds,
        first_token_seconds=None if task.ttft_seconds is None else heard_seconds + task.ttft_seconds,
        finish_reason="interrupted" if is_stopped else "error" if error else task.finish_reason or "stop",
        reused_tokens=report.reused_tokens if has_begun else 0,
        computed_tokens=report.computed_tokens if has_begun else 0,
        error=None if is_stopped else error,
    )
