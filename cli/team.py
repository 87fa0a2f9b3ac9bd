"""A team: who its agents are, how they sample, and who hands to whom. Read from TOML; no model is needed."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from .. import Access, Sampling
from ..errors import InvalidValueError
from ..policy import TEAM, TEAM_ACCESS
from .lines import clean, plain_name

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white")
READY_TEAMS = ("plan-write-review", "debate", "code-review")
EVERYBODY = "all"  # what the chat calls all agents at once
_SAMPLING = tuple(field.name for field in dataclasses.fields(Sampling))


def agent_name(text: str) -> str:
    """`text` as an agent's name, in one form. Raises `InvalidValueError`."""
    name = plain_name(text)
    if name == EVERYBODY:
        raise InvalidValueError(f"name: expected another than {EVERYBODY!r}, which is all agents at once")
    return name


@dataclass(frozen=True)
class AgentSpec:
    """One agent. `sampling` holds what it sets of its own, by the names of `Sampling`.

    `request` is what it is asked when its turn comes in `qkvshare run`, or at /next in a chat.
    """

    name: str
    role: str | None = None
    request: str | None = None
    colour: str = COLOURS[0]
    hands_to: str | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    access: Access = TEAM_ACCESS

    @classmethod
    def parse(cls, text: str, colour: str = COLOURS[0]) -> AgentSpec:
        """From `--agent NAME[:ROLE]`."""
        name, _, role = (part.strip() for part in clean(text)[0].partition(":"))
        if not name:
            raise InvalidValueError(f"--agent: expected NAME or NAME:ROLE, got {text!r}")
        try:
            return cls(agent_name(name), role or None, colour=colour)
        except InvalidValueError as error:
            raise InvalidValueError(f"--agent: {error}") from None

    def sampling_with(self, asked: Mapping[str, Any]) -> Sampling:
        """What the command was `asked` for wins over the agent's own."""
        return Sampling(**{**self.sampling, **asked})


@dataclass(frozen=True)
class Team:
    """Agents in the order in which one round of work goes through them. `system` opens every conversation."""

    agents: tuple[AgentSpec, ...]
    about: str = ""
    system: str | None = None

    def __post_init__(self) -> None:
        names = self.names
        if double := next((name for name in names if names.count(name) > 1), None):
            raise InvalidValueError(f"expected agents of different names, got {double!r} twice")

    @property
    def names(self) -> list[str]:
        return [agent.name for agent in self.agents]

    @classmethod
    def of(cls, agents: Collection[str]) -> Team:
        """From `--agent` options."""
        parsed = tuple(AgentSpec.parse(text, colour_at(i)) for i, text in enumerate(agents))
        try:
            return cls(parsed)
        except InvalidValueError as error:
            raise InvalidValueError(f"--agent: {error}") from None


def colour_at(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def ready_text(name: str) -> str:
    """The TOML of a team that ships."""
    return resources.files(f"{__package__}.data").joinpath(f"{name}.toml").read_text("utf-8")


def find_team(name: str) -> Team:
    """A ready team by its name, or the team in a file. Raises `InvalidValueError`."""
    if name in READY_TEAMS:
        return parse_team(ready_text(name), name)
    try:
        text = Path(os.path.expanduser(name)).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        ready = ", ".join(READY_TEAMS)
        raise InvalidValueError(f"[team {name}] expected a TOML file or one of {ready}: {_reason(error)}") from None
    return parse_team(text, name)


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"not UTF-8 ({error})"


def parse_team(text: str, where: str) -> Team:
    """The team that `text` describes. Raises `InvalidValueError` naming the file, the key and what was expected."""
    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidValueError(f"[team {where}] expected TOML: {error}") from None
    top = _Keys(table, where, "")
    about, system, rows = top.text("about"), top.text("system"), top.tables("agent")
    top.refuse_others()
    agents = [_parse_agent(row, where, index) for index, row in enumerate(rows)]
    try:
        team = Team(tuple(agents), about or "", system)
    except InvalidValueError as error:
        raise InvalidValueError(f"[team {where}] name: {error}") from None
    return dataclasses.replace(team, agents=_in_order(team, where))


def _parse_agent(table: Any, where: str, index: int) -> AgentSpec:
    keys = _Keys(table, where, f"agent {index + 1}, ")
    try:
        name = agent_name(keys.text("name") or "")
    except InvalidValueError as error:
        raise InvalidValueError(f"[team {where}] {keys.place}{error}") from None
    keys.place = f"agent {name!r}, "
    numbers = {"seed": keys.whole, "top_k": keys.whole}
    sampling: dict[str, Any] = {key: numbers.get(key, keys.number)(key) for key in _SAMPLING if key in table}
    colour = keys.text("colour") or colour_at(index)
    if colour not in COLOURS:
        raise keys.error("colour", f"one of {', '.join(COLOURS)}", colour)
    if (max_tokens := keys.whole("max_tokens")) is not None and max_tokens < 1:
        raise keys.error("max_tokens", "1 or more", max_tokens)
    found = AgentSpec(
        name=name, role=keys.text("role"), request=keys.text("request"), colour=colour,
        hands_to=keys.text("hands_to"), max_tokens=max_tokens, sampling=sampling,
    )  # fmt: skip
    writes, reads = keys.text("writes"), keys.texts("reads")
    keys.refuse_others()
    try:
        Sampling(**sampling)
        access = Access(TEAM if writes is None else writes, frozenset({TEAM}) if reads is None else reads)
        access.check_name(name)
    except InvalidValueError as error:
        raise InvalidValueError(f"[team {where}] agent {name!r}, {str(error).partition('] ')[2]}") from None
    return dataclasses.replace(found, access=access)


def _in_order(team: Team, where: str) -> tuple[AgentSpec, ...]:
    """From the first agent on along `hands_to`; the order of the file where nobody says."""
    if all(agent.hands_to is None for agent in team.agents):
        return team.agents
    by_name = {agent.name: agent for agent in team.agents}
    order, agent = [team.agents[0]], team.agents[0]
    while agent.hands_to is not None:
        place = f"[team {where}] agent {agent.name!r}, hands_to: expected"
        if agent.hands_to not in by_name or agent.hands_to == agent.name:
            others = ", ".join(repr(name) for name in by_name if name != agent.name) or "there is none"
            raise InvalidValueError(f"{place} another agent ({others}), got {agent.hands_to!r}")
        agent = by_name[agent.hands_to]
        if agent is order[0]:
            break
        if agent in order:
            raise InvalidValueError(f"{place} an agent that is not in the round yet, or the first; got {agent.name!r}")
        order.append(agent)
    if left := next((agent.name for agent in team.agents if agent not in order), None):
        raise InvalidValueError(f"[team {where}] hands_to: expected an agent that hands to {left!r}, got none")
    return tuple(order)


class _Keys:
    """The keys of one table, each read once and by its type; what nobody read is refused at the end."""

    def __init__(self, table: Any, where: str, place: str):
        self._table, self._where, self.place = table, where, place
        self._known: list[str] = []
        if not isinstance(table, dict):
            raise self.error("", "a table", table)

    def error(self, key: str, expected: str, got: Any) -> InvalidValueError:
        place = f"{self.place}{key}".rstrip(", ")
        return InvalidValueError(f"[team {self._where}] {place}: expected {expected}, got {got!r}")

    def _get(self, key: str, kinds: type | tuple[type, ...], expected: str) -> Any:
        self._known.append(key)
        value = self._table.get(key)
        # A TOML boolean is an int to Python.
        if value is None or (isinstance(value, kinds) and not isinstance(value, bool)):
            return value
        raise self.error(key, expected, value)

    def text(self, key: str) -> str | None:
        value = self._get(key, str, "a text")
        return None if value is None else value.strip()

    def whole(self, key: str) -> int | None:
        return self._get(key, int, "a whole number")

    def number(self, key: str) -> float | None:
        return self._get(key, (int, float), "a number")

    def texts(self, key: str) -> frozenset[str] | None:
        value = self._get(key, list, "a list of texts")
        if value is None:
            return None
        if not all(isinstance(text, str) and text for text in value):
            raise self.error(key, "a list of texts", value)
        return frozenset(value)

    def tables(self, key: str) -> list[Any]:
        value = self._get(key, list, f"[[{key}]] tables")
        if not value:
            raise self.error(key, f"one [[{key}]] or more", value or [])
        return value

    def refuse_others(self) -> None:
        known = [*self._known, *(key for key in _SAMPLING if "name" in self._known and key not in self._known)]
        for key in self._table:
            if key not in known:
                raise InvalidValueError(
                    f"[team {self._where}] {self.place}{key}: expected one of {', '.join(known)}; got an unknown key"
                )
