"""`qkvshare chat --parallel`: all agents answer every message at the same time, from one shared context."""

from __future__ import annotations

from .. import AgentScheduler, AgentSession, HandoffRecord, LoadedModel, Message, QKVShareError, SharedKVCacheManager
from ..errors import InvalidValueError, TaskCancelledError
from .conversation import AgentSpec, ChatSettings, advice, make_sessions, shared_stats
from .streams import show_together
from .terminal import Interrupts, ProgressLine, Terminal


class Panel:
    """A session, the floor, holds all that was said by everybody; for each message the agents take it by reference.

    What an agent adds is its role and its reply. The replies of a round join the floor before the next message.
    """

    prompt, who = "all", "all at once"

    def __init__(
        self,
        agents: list[AgentSpec],
        model: LoadedModel,
        manager: SharedKVCacheManager,
        settings: ChatSettings,
        terminal: Terminal,
    ):
        self.settings, self.max_context, self.max_tokens = settings.resolve(model)
        self.manager, self._terminal = manager, terminal
        self.sessions = make_sessions(agents, model, manager, self.settings)
        self._floor = AgentSession("floor", model, manager, max_context_tokens=self.max_context)
        self._scheduler = AgentScheduler(manager).start()
        self._open()

    def _open(self) -> None:
        if self.settings.system:
            self._floor.messages.append(Message("system", self.settings.system))

    def restart(self) -> None:
        """Forget all that was said."""
        self._reset(self._floor, *self.sessions.values())
        self._open()

    def _reset(self, *sessions: AgentSession) -> None:
        """Behind all that the scheduler does on them."""
        for done in [self._scheduler.call(session.reset, sessions=[session]) for session in sessions]:
            done.result()

    def close(self) -> None:
        self._scheduler.close()
        for session in (self._floor, *self.sessions.values()):
            session.close()

    def switch(self, name: str) -> HandoffRecord | None:
        raise InvalidValueError("with --parallel every agent answers every message; /agent NAME needs a chat without")

    def answer(self, text: str) -> None:
        """Stream all replies. Ctrl-C stops them; what was shown stays in the history."""
        before = len(self._floor.messages)
        with Interrupts() as interrupts:
            try:
                note = self._round(text, before, interrupts)
            except (QKVShareError, KeyboardInterrupt) as error:
                del self._floor.messages[before:]
                if isinstance(error, QKVShareError) and not interrupts.is_set:
                    self._terminal.error(advice(error, self.max_tokens))
                    return
                note = "(stopped; the message was taken back)"
        if note:
            self._terminal.note(note)

    def _round(self, text: str, before: int, interrupts: Interrupts) -> str:
        """Hear the message, let everybody answer it; what there is to say about how that ended."""
        progress = ProgressLine(self._terminal)

        def prefilled(done: int, total: int) -> None:
            progress("prefill", done, total)
            if interrupts.is_set:
                raise TaskCancelledError("stopped")

        def hear() -> None:
            self._floor.say(text, progress=prefilled)
            self._floor.seal()

        try:
            self._scheduler.call(hear, sessions=[self._floor]).result()
        finally:
            progress.close()
        tasks = []
        for session in self.sessions.values():
            handed = self._scheduler.handoff(self._floor, session, keep_sender=True)
            ask = f"Answer as {session.name}."
            tasks.append(self._scheduler.submit(session, ask, max_tokens=self.max_tokens, after=[handed]))
        show_together(tasks, self._terminal, interrupts)
        for task in tasks:
            error = task.error()
            if error is not None and not isinstance(error, TaskCancelledError):
                self._terminal.error(f"{task.name}: {advice(error.__cause__ or error, self.max_tokens)}")
        self._reset(*self.sessions.values())  # the floor has it all; their own tails would only take room
        replies = [f"{task.name}: {task.text.strip()}" for task in tasks if task.text.strip()]
        if replies:
            self._floor.messages.append(Message("assistant", "\n\n".join(replies)))
        else:
            del self._floor.messages[before:]
        if interrupts.is_set:
            return f"(stopped; {'what was shown is kept' if replies else 'the message was taken back'})"
        cut = ", ".join(task.name for task in tasks if task.finish_reason == "length")
        return f"(cut after {self.max_tokens} tokens: {cut}; --max-tokens allows more)" if cut else ""

    def stats(self) -> list[tuple[str, str]]:
        """What `/stats` shows, as pairs."""
        floor = self._floor
        return [
            ("agents", ", ".join(self.sessions)),
            ("context", f"{floor.num_tokens} of {self.max_context} tokens, {floor.prefix.num_tokens} sealed"),
            *shared_stats(self.manager, self._scheduler.coordinator.records),
        ]
