"""One conversation among several agents: whoever speaks next takes the context over by reference."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import (
    AgentSession,
    Card,
    CardStore,
    HandoffCoordinator,
    HandoffRecord,
    Message,
    QKVShareError,
    Restored,
    SharedKVCacheManager,
    restore,
)
from ..errors import AccessError, ContextLimitError, InvalidValueError
from ..policy import PUBLIC
from .document import Document
from .interrupts import Interrupts, shown_prefill
from .lines import plain_name
from .round import Voice, take_round
from .team import EVERYBODY, AgentSpec, Team, agent_name
from .terminal import Terminal, format_bytes
from .turn import Turn, Usage, advice, describe_limits, take_turn

if TYPE_CHECKING:
    from ..model import LoadedModel

_MOST_CHARACTERS_PER_TOKEN = 64  # of any text worth reading


@dataclass(frozen=True)
class ChatSettings:
    """What the command was asked for, which wins over what a team says: `sampling` by the names of `Sampling`.

    `max_context` and `max_tokens`: None for what team and model allow. `store` is the folder for `/save` and `/load`;
    `start_over` says what to do when the context is full.
    """

    sampling: Mapping[str, Any]
    store: Path
    system: str | None = None
    max_context: int | None = None
    max_tokens: int | None = None
    start_over: str = "/new starts over"


class Reading(NamedTuple):
    """What it took to read a document into the context, which then held so many tokens."""

    name: str
    computed_tokens: int
    context_tokens: int
    seconds: float


class Conversation:
    """A session for every agent, of which one, `current`, holds the conversation and speaks. A fork is an agent more,
    with a branch of its own. When all agents are to answer the `floor`, a session without a role, holds it instead."""

    def __init__(
        self,
        team: Team,
        model: LoadedModel,
        manager: SharedKVCacheManager,
        settings: ChatSettings,
        terminal: Terminal,
        *,
        is_parallel: bool = False,
    ):
        self.max_context, self.max_tokens = describe_limits(model, settings.max_context, settings.max_tokens)
        self.settings, self.manager, self.terminal = settings, manager, terminal
        self.coordinator = HandoffCoordinator(manager)
        self.agents, self._order = {agent.name: agent for agent in team.agents}, team.names
        self._model, self._system = model, settings.system or team.system
        self.sessions = {name: self._session(agent) for name, agent in self.agents.items()}
        self._floor = AgentSession(EVERYBODY, model, manager, max_context_tokens=self.max_context)
        self._voices: dict[str, AgentSession] = {}
        self._lengths: dict[str, int] = {}  # tokens that a cache of its own would hold, for every agent that spoke
        self.current = self._floor if is_parallel else next(iter(self.sessions.values()))
        self._open()

    def _session(self, agent: AgentSpec, *, is_voice: bool = False) -> AgentSession:
        asked = dict(self.settings.sampling)
        if "seed" in asked and (is_voice or agent.name != next(iter(self.agents))):  # draws of everybody's own
            asked["seed"] = random.Random(f"{asked['seed']}/{agent.name}/{is_voice}").getrandbits(32)
        return AgentSession(
            agent.name, self._model, self.manager, role_prompt=agent.role,
            sampling=agent.sampling_with(asked), max_context_tokens=self.max_context, access=agent.access,
        )  # fmt: skip

    def _open(self) -> None:
        if self._system:
            self.current.messages.append(Message("system", self._system, domain=PUBLIC))

    def close(self) -> None:
        for session in (self._floor, *self.sessions.values(), *self._voices.values()):
            session.close()

    # --- who speaks --------------------------------------------------------------------------------

    @property
    def is_for_all(self) -> bool:
        return self.current is self._floor

    @property
    def prompt(self) -> str:
        return self.current.name

    @property
    def who(self) -> str:
        return "all at once" if self.is_for_all else f"speaking: {self.current.name}"

    def limit(self, name: str) -> int:
        """Tokens of agent `name`'s longest reply."""
        own = self.agents[name].max_tokens if name in self.agents else None
        if own is None or self.settings.max_tokens is not None:
            return self.max_tokens
        return min(own, max(1, self.max_context // 2))  # as the limit that holds where nobody says one

    def find(self, name: str) -> AgentSession:
        session = self.sessions.get(name)
        if session is None:
            raise InvalidValueError(f"no agent {name!r}; there are: {', '.join(self.sessions)}")
        return session

    def switch(self, name: str, *, keeps_branch: bool = True) -> HandoffRecord | None:
        """Let agent `name` speak: on its own branch if it has one, else it takes over what was said, by reference."""
        return self._pass_to(self.find(name), keeps_branch=keeps_branch)

    def next_name(self) -> str:
        """Who comes next in the team's order; the first one after everybody, and after a fork."""
        at = self._order.index(self.current.name) + 1 if self.current.name in self._order else 0
        return self._order[at % len(self._order)]

    def switch_to_all(self) -> HandoffRecord | None:
        """Let every agent answer from here on."""
        return self._pass_to(self._floor, keeps_branch=False)

    def _pass_to(self, receiver: AgentSession, *, keeps_branch: bool) -> HandoffRecord | None:
        if receiver is self.current:
            return None
        has_branch = keeps_branch and bool(receiver.messages or receiver.num_tokens)
        record = None if has_branch else self._hand_over(self.current, receiver)
        self.current = receiver
        return record

    def _hand_over(self, sender: AgentSession, receiver: AgentSession) -> HandoffRecord:
        """All of it; or what the receiver may read, and then the sender keeps its branch, which has the rest."""
        try:
            return self.coordinator.request_handoff(sender, receiver)
        except AccessError:
            return self.coordinator.request_handoff(sender, receiver, keep_sender=True, redact=True)

    def hand_over(self, sender: str, receiver: str) -> HandoffRecord:
        """Give what `sender` holds to `receiver`, in place of its own; if `sender` was speaking, it is silent now."""
        giving, taking = self.find(sender), self.find(receiver)
        if giving is taking:
            raise InvalidValueError(f"expected two agents, got {sender} twice")
        if not giving.messages and not giving.num_tokens:
            raise InvalidValueError(f"{sender} holds no conversation; /agents shows who does")
        record = self._hand_over(giving, taking)
        if self.current is giving:
            self.current = taking
        return record

    def fork(self, name: str) -> None:
        """Go on as a new agent `name`, a twin of the one who speaks, which keeps its own branch."""
        name = agent_name(name)
        if name in self.sessions:
            raise InvalidValueError(f"expected a new name, got {name!r}; there are: {', '.join(self.sessions)}")
        source = self.agents.get(self.current.name)
        self.sessions[name] = self.current.fork(name)
        access = self.sessions[name].access
        self.agents[name] = dataclasses.replace(source or AgentSpec(name), name=name, access=access)
        self.current = self.sessions[name]

    # --- what is said ------------------------------------------------------------------------------

    def answer(self, text: str, *, is_labelled: bool = True) -> list[Turn]:
        """Stream what the current agent, or everybody, answers. Ctrl-C stops it; what was shown stays in the history.

        Whatever fails is shown, and in the turns; there are none if it failed before anybody's turn.
        """
        with Interrupts() as interrupts:
            try:
                turns = (
                    self._everybody(text, interrupts) if self.is_for_all else [self._one(text, interrupts, is_labelled)]
                )
            except QKVShareError as error:
                self.terminal.error(error, self.advice(error))
                return []
            except KeyboardInterrupt:
                return [Turn("all", "", 0, 0.0, None, "interrupted")]
        for turn in turns:
            if turn.error is not None:
                who = f"{turn.agent}: " if self.is_for_all else ""
                self.terminal.error(turn.error, f"{who}{self.advice(turn.error, turn.agent)}")
        return turns

    def advice(self, error: BaseException, name: str | None = None) -> str:
        """What to show of an error of agent `name`'s, or of the one who speaks."""
        return advice(error, self.limit(name or self.current.name), self.settings.start_over)

    def _one(self, text: str, interrupts: Interrupts, is_labelled: bool) -> Turn:
        agent = self.agents[self.current.name]
        colour = agent.colour if is_labelled else None
        turn = take_turn(self.current, text, self.limit(agent.name), self.terminal, interrupts, colour)
        if turn.num_tokens:
            self._note_length()
        return turn

    def _note_length(self) -> None:
        """A cache of the current agent's own would now hold this."""
        if not self.is_for_all:
            self._lengths[self.current.name] = self.current.num_tokens

    def _everybody(self, text: str, interrupts: Interrupts) -> list[Turn]:
        # Sessions of their own, so that branches stay as they are.
        for name, agent in self.agents.items():
            if name not in self._voices:
                self._voices[name] = self._session(agent, is_voice=True)
        voices = [Voice(self._voices[name], self.limit(name), it.colour) for name, it in self.agents.items()]
        turns, records = take_round(self._floor, voices, text, self.terminal, interrupts)
        self.coordinator.records.extend(records)
        self._lengths |= {
            turn.agent: turn.reused_tokens + turn.computed_tokens + turn.num_tokens for turn in turns if turn.num_tokens
        }
        return turns

    def add(self, document: Document) -> Reading:
        """Let the current agent read `document` into the context, which all share.

        Raises `ContextLimitError` before anything is computed if no reply would fit behind it, and
        `KeyboardInterrupt` at Ctrl-C; the context is then as it was.
        """
        session = self.current
        self._require_room(document)
        started = time.perf_counter()
        with (
            Interrupts() as interrupts,
            shown_prefill(self.terminal, interrupts, f"{document.name}: prefill") as prefilled,
        ):
            report = session.say(document.message, progress=prefilled)
            try:
                session.seal()
            except BaseException:  # Ctrl-C twice, or no room for it
                session.take_back()
                raise
        self._note_length()
        return Reading(document.name, report.computed_tokens, session.num_tokens, time.perf_counter() - started)

    def _require_room(self, document: Document) -> None:
        needed, unit = len(document.text), "characters"
        if needed <= _MOST_CHARACTERS_PER_TOKEN * self.max_context:  # beyond it tokens need not be counted
            needed, unit = len(self.current.wanted_tokens(document.message)), "positions"
            needed += self.limit(self.current.name)
            if needed <= self.max_context:
                return
        raise ContextLimitError(
            f"[file {document.name}] needed {needed} {unit}, available {self.max_context} positions"
        )

    def take_back(self, num_turns: int) -> int:
        """Forget the last questions, documents included, and their answers; the number of tokens forgotten."""
        if not any(message.role == "user" for message in self.current.messages):
            raise InvalidValueError("there is nothing to take back: nothing was said yet")
        forgotten = self.current.take_back(num_turns)
        if self.current.name in self._lengths:
            self._note_length()
        return forgotten

    def restart(self) -> None:
        """Forget all that was said."""
        for session in (self._floor, *self.sessions.values()):
            session.reset()
        self._lengths.clear()
        self._open()

    # --- cards -------------------------------------------------------------------------------------

    def save(self, name: str) -> Card:
        """Keep the conversation under `name`. The first Ctrl-C waits until the card is whole."""
        with Interrupts():
            return self.manager.save_card(CardStore(self.settings.store), plain_name(name), self.current)

    def other_branches(self) -> list[str]:
        """Agents that hold something else than the one who speaks."""
        return [name for name, it in self.sessions.items() if it is not self.current and (it.messages or it.num_tokens)]

    def load(self, name: str) -> tuple[Restored, str | None]:
        """Go on with a kept conversation, in place of the present one; as the agent who spoke, if it is in the team.

        Its name comes along if it is not.
        """
        store, name = CardStore(self.settings.store), plain_name(name)
        author = store.inspect(name).agent
        receiver = self.current if self.is_for_all else self.sessions.get(author, self.current)
        with Interrupts() as interrupts:
            with shown_prefill(self.terminal, interrupts, f"{name}: prefill") as prefilled:
                restored = restore(receiver, store, name, rebuild=True, progress=prefilled)
            if receiver is not self.current:
                self.current.reset()
                self.current = receiver
        self._lengths = {}
        self._note_length()
        return restored, None if author in (*self.sessions, EVERYBODY) else author

    # --- figures -----------------------------------------------------------------------------------

    def usage(self) -> Usage:
        return Usage.of(self.manager, self.current.num_tokens, self.max_context, list(self._lengths.values()))

    def stats(self) -> list[tuple[str, str]]:
        """What `/stats` shows, as pairs."""
        stats, records, usage = self.manager.stats(), self.coordinator.records, self.usage()
        used = f"{format_bytes(stats.used_bytes)} of {format_bytes(stats.budget_bytes)}"
        return [
            ("speaking", self.prompt),
            ("agents", ", ".join(self.sessions)),
            (
                "context",
                f"{usage.context_tokens} of {self.max_context} tokens, {self.current.prefix.num_tokens} sealed",
            ),
            ("bytes in use", f"{used} ({format_bytes(stats.private_bytes)} private, not sealed yet)"),
            ("bytes held once", format_bytes(usage.held_bytes)),
            ("apart, full precision", format_bytes(usage.separate_bytes)),
            ("apart, quantized", format_bytes(usage.separate_quantized_bytes)),
            ("segments", str(stats.num_segments)),
            ("handoffs", str(len(records))),
            ("bytes copied by handoffs", str(sum(record.bytes_copied for record in records))),
            ("bytes handed over by reference", format_bytes(sum(record.bytes_referenced for record in records))),
        ]
