"""One conversation among several agents: whoever speaks next takes the context over by reference."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace

from .. import (
    AgentSession,
    HandoffCoordinator,
    HandoffRecord,
    LoadedModel,
    Message,
    QKVShareError,
    Sampling,
    SharedKVCacheManager,
)
from ..errors import ContextLimitError, InvalidValueError
from .lines import clean
from .terminal import Interrupts, ProgressLine, Terminal, format_bytes


@dataclass(frozen=True)
class AgentSpec:
    """An agent's name and its role prompt, as `--agent NAME[:ROLE]` gives them."""

    name: str
    role: str | None = None

    @classmethod
    def parse(cls, text: str) -> AgentSpec:
        name, _, role = (part.strip() for part in clean(text)[0].partition(":"))
        if not name:
            raise InvalidValueError(f"--agent: expected NAME or NAME:ROLE, got {text!r}")
        return cls(name, role or None)


@dataclass(frozen=True)
class ChatSettings:
    """What the chat runs with. `max_context` and `max_tokens` are filled in by `resolve`: no None is left."""

    sampling: Sampling
    system: str | None = None
    max_context: int | None = None
    max_tokens: int | None = None

    def resolve(self, model: LoadedModel) -> tuple[ChatSettings, int, int]:
        """The settings with the limits that hold, and these two limits."""
        context = model.spec.max_context_tokens if self.max_context is None else self.max_context
        reply = min(256, max(1, context // 2)) if self.max_tokens is None else self.max_tokens
        return replace(self, max_context=context, max_tokens=reply), context, reply


def make_sessions(
    agents: list[AgentSpec], model: LoadedModel, manager: SharedKVCacheManager, settings: ChatSettings
) -> dict[str, AgentSession]:
    """A session for every agent, by name. Raises `InvalidValueError` if two have one name."""
    names = [agent.name for agent in agents]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise InvalidValueError(f"--agent: expected different names, got {double!r} twice")
    return {
        agent.name: AgentSession(
            agent.name, model, manager, role_prompt=agent.role, sampling=settings.sampling,
            max_context_tokens=settings.max_context,
        )
        for agent in agents
    }  # fmt: skip


def advice(error: BaseException, max_tokens: int) -> str:
    if isinstance(error, ContextLimitError):
        return f"{error} ({max_tokens} of them for the reply); /new starts over"
    return str(error)


def shared_stats(manager: SharedKVCacheManager, records: Collection[HandoffRecord]) -> list[tuple[str, str]]:
    """The part of `/stats` that is about memory and handoffs."""
    stats = manager.stats()
    used = f"{format_bytes(stats.used_bytes)} of {format_bytes(stats.budget_bytes)}"
    return [
        ("bytes in use", f"{used} ({format_bytes(stats.private_bytes)} private, not sealed yet)"),
        ("segments", str(stats.num_segments)),
        ("handoffs", str(len(records))),
        ("bytes copied by handoffs", str(sum(record.bytes_copied for record in records))),
        ("bytes handed over by reference", format_bytes(sum(record.bytes_referenced for record in records))),
    ]


class Conversation:
    """A session per agent, of which one, `current`, holds the conversation."""

    def __init__(
        self,
        agents: list[AgentSpec],
        model: LoadedModel,
        manager: SharedKVCacheManager,
        settings: ChatSettings,
        terminal: Terminal,
    ):
        self.settings, self.max_context, self.max_tokens = settings.resolve(model)
        self.manager, self.coordinator, self._terminal = manager, HandoffCoordinator(manager), terminal
        self.sessions = make_sessions(agents, model, manager, self.settings)
        self.current = next(iter(self.sessions.values()))
        self._open()

    def _open(self) -> None:
        if self.settings.system:
            self.current.messages.append(Message("system", self.settings.system))

    @property
    def prompt(self) -> str:
        return self.current.name

    @property
    def who(self) -> str:
        return f"speaking: {self.current.name}"

    def restart(self) -> None:
        """Forget all that was said."""
        for session in self.sessions.values():
            session.reset()
        self._open()

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()

    def switch(self, name: str) -> HandoffRecord | None:
        """Hand the conversation to agent `name`; None if it has it already."""
        receiver = self.sessions.get(name)
        if receiver is None:
            raise InvalidValueError(f"no agent {name!r}; there are: {', '.join(self.sessions)}")
        if receiver is self.current:
            return None
        record = self.coordinator.request_handoff(self.current, receiver)
        self.current = receiver
        return record

    def answer(self, text: str) -> None:
        """Stream the current agent's reply. Ctrl-C stops it; what was shown stays in the history."""
        with Interrupts() as interrupts:
            try:
                note = self._reply(text, interrupts)
            except QKVShareError as error:
                self._terminal.error(advice(error, self.max_tokens))
                return
        if note:
            self._terminal.note(note)

    def _reply(self, text: str, interrupts: Interrupts) -> str:
        """Show the reply; what there is to say about how it ended."""
        terminal, progress, is_started, reason = self._terminal, ProgressLine(self._terminal), False, None

        def prefilled(done: int, total: int) -> None:
            progress("prefill", done, total)
            interrupts.check()

        stream = self.current.stream(text, max_tokens=self.max_tokens, progress=prefilled)
        try:
            with contextlib.closing(stream):
                for chunk in stream:
                    if not is_started:
                        progress.close()
                        terminal.label(self.current.name)
                        is_started = True
                    terminal.stream(chunk.text)
                    reason = chunk.finish_reason
                    if interrupts.is_set:
                        break
        except KeyboardInterrupt:  # during prefill, or Ctrl-C twice
            pass
        finally:
            progress.close()
            if is_started:
                terminal.line()
        if reason is None:
            return f"(stopped; {'what was shown is kept' if is_started else 'the message was taken back'})"
        return f"(cut after {self.max_tokens} tokens; --max-tokens allows more)" if reason == "length" else ""

    def stats(self) -> list[tuple[str, str]]:
        """What `/stats` shows, as pairs."""
        current = self.current
        return [
            ("speaking", current.name),
            ("agents", ", ".join(self.sessions)),
            ("context", f"{current.num_tokens} of {self.max_context} tokens, {current.prefix.num_tokens} sealed"),
            *shared_stats(self.manager, self.coordinator.records),
        ]
