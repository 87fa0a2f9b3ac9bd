"""`qkvshare run`: a team works on one task, without anybody typing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import CardStore, QKVShareError, SharedKVCacheManager
from ..errors import BudgetExceededError, ContextLimitError, InvalidValueError
from ..folders import default_store_dir
from . import options
from .commands import save, show_status
from .conversation import ChatSettings, Conversation, Reading
from .document import Document, read_document, read_pipe, typed_path
from .interrupts import Terminated, ends_by_signal
from .lines import clean, plain_name
from .team import AgentSpec, Team
from .terminal import Terminal, format_seconds
from .turn import Turn

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
ALONE = Team((AgentSpec("assistant"),))


def requests(team: Team, task: str, rounds: int) -> Iterator[tuple[str, str]]:
    """Agents in the order of their turns, and what each is asked."""
    first = team.agents[0]
    yield first.name, "\n\n".join(filter(None, [task, first.request]))
    for agent in [*team.agents[1:], *team.agents * (rounds - 1)]:
        yield agent.name, agent.request or f"Go on as {agent.name}."


@dataclasses.dataclass
class Run:
    """The work on one task: what was read, its turns so far, and how it ended."""

    conversation: Conversation
    team: Team
    readings: list[Reading] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    error: str | None = None

    def read(self, documents: list[Document]) -> int:
        """Put the documents in front of the task."""
        terminal = self.conversation.terminal
        for document in documents:
            _note_replaced(document, terminal)
            try:
                read = self.conversation.add(document)
            except KeyboardInterrupt:
                terminal.note("(stopped)")
                self.error = "interrupted"
                return INTERRUPTED
            except QKVShareError as error:
                is_input = isinstance(error, ContextLimitError | BudgetExceededError)
                return self._fail(error, WRONG_INPUT if is_input else FAILED)
            self.readings.append(read)
            terminal.note(f"({read.name}: {read.computed_tokens} tokens read in {format_seconds(read.seconds)})")
        return DONE

    def work(self, task: str, rounds: int) -> int:
        """Let everybody take their turns; the exit code."""
        conversation, has_many = self.conversation, len(self.team.agents) > 1
        for name, request in requests(self.team, task, rounds):
            conversation.switch(name, keeps_branch=False)
            if has_many and self.turns:
                conversation.terminal.line()
            turns = conversation.answer(request, is_labelled=has_many)
            (turn,) = turns
            self.turns.append(turn)
            show_status(conversation, turns)
            if turn.finish_reason == "interrupted":
                self.error = "interrupted"
                return INTERRUPTED
            if turn.error is not None:
                self.error = str(turn.error)
                is_input = isinstance(turn.error, ContextLimitError | BudgetExceededError) and len(self.turns) == 1
                return WRONG_INPUT if is_input else FAILED
        return DONE

    def save(self, name: str) -> int:
        """Keep the conversation."""
        try:
            save(self.conversation, name)
        except QKVShareError as error:
            return self._fail(error, FAILED)
        return DONE

    def _fail(self, error: QKVShareError, code: int) -> int:
        self.conversation.terminal.error(error, self.conversation.advice(error))
        self.error = str(error)
        return code

    def report(self, model: str, task: str, code: int | None) -> dict[str, Any]:
        """What `--json` prints."""
        records = self.conversation.coordinator.records
        return {
            "model": model,
            "task": task,
            "team": self.team.names,
            "documents": [reading._asdict() for reading in self.readings],
            "turns": [_plain_turn(turn) for turn in self.turns],
            "handoffs": [dataclasses.asdict(record) for record in records],
            "memory": dataclasses.asdict(self.conversation.usage())
            | {"bytes_copied": sum(record.bytes_copied for record in records)},
            "error": self.error,
            "exit_code": code,
        }


def _plain_turn(turn: Turn) -> dict[str, Any]:
    plain = dataclasses.asdict(dataclasses.replace(turn, error=None)) | {"error": turn.error and str(turn.error)}
    return {"tokens" if key == "num_tokens" else key: value for key, value in plain.items()}


def _note_replaced(document: Document, terminal: Terminal) -> None:
    if document.num_replaced:
        terminal.note(f"({document.num_replaced} unreadable bytes {document.whence} became U+FFFD)")


def _inputs(task: str | None, files: list[Path], terminal: Terminal) -> tuple[str, list[Document]]:
    """The task and the documents. What comes through a pipe is a document, or the task where there is none."""
    documents = [read_document(typed_path(str(path))) for path in files]
    piped = read_pipe()
    if piped is not None and task is not None:
        documents.append(piped)
    elif piped is not None:
        task = piped.text
        _note_replaced(piped, terminal)
    task = clean(task or "")[0].strip()
    if not task:
        raise InvalidValueError('expected a task, as in: qkvshare run "Sum it up" --file notes.txt')
    return task, documents


def run(
    task: Annotated[str | None, typer.Argument(help="What to do.", show_default="what stdin says")] = None,
    team: options.TeamOption = None,
    agent: options.Agents = None,
    file: Annotated[list[Path] | None, typer.Option(help="A text file to read first; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often the work goes through the team.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    save_as: Annotated[
        str | None, typer.Option("--save", metavar="NAME", help="Keep the conversation, for `chat --resume NAME`.")
    ] = None,
    store: options.Store = None,
    model: options.Model = None,
    cache_dir: options.CacheDir = None,
    budget: options.Budget = "4G",
    max_context: options.MaxContext = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.TeamTemperature = None,
    seed: options.Seed = None,
    bits: options.Bits = None,
    preset: options.Preset = None,
    unsafe: options.Unsafe = False,
    k_bits: options.KBits = None,
    v_bits: options.VBits = None,
    group_size: options.GroupSize = 64,
) -> None:
    """Let a team, or one agent, work on a task: each in turn, on one context that is handed on by reference.

    Replies go to stdout, all else to stderr. What comes through a pipe is a document: cat notes.txt | qkvshare run
    "Sum it up". Where stdin stays open and silent, say < /dev/null.

    Exit codes: 0 done, 1 an agent failed, 2 wrong options or input (a text that is too long, say), 130 stopped by
    Ctrl-C, 143 by SIGTERM.
    """
    terminal = Terminal()
    members = options.find_team(agent, team, ALONE)
    settings = ChatSettings(
        sampling=options.sampling_asked_for(temperature, seed),
        max_context=max_context,
        max_tokens=max_tokens,
        store=store or default_store_dir(),
        start_over="a shorter text or fewer --max-tokens may fit",
    )
    quant, budget_bytes = options.quant_spec(bits, k_bits, v_bits, group_size, preset), options.parse_bytes(budget)
    what, documents = _inputs(task, file or [], terminal)
    if as_json:
        terminal.silence()
    if save_as is not None:  # what cannot be used is told before any work
        CardStore(settings.store)
        plain_name(save_as)
    loaded = options.load_model(model, cache_dir, terminal)
    manager = SharedKVCacheManager(loaded.spec, quant, budget_bytes=budget_bytes, allow_unsafe=unsafe)
    conversation = Conversation(members, loaded, manager, settings, terminal)
    with contextlib.closing(conversation), ends_by_signal():
        work, code = Run(conversation, members), None
        try:
            code = work.read(documents) or work.work(what, rounds)
        except Terminated as ended:
            work.error, code = "terminated", ended.number
            raise
        finally:
            if save_as is not None:
                code = work.save(save_as) or code
            if as_json:
                print(json.dumps(work.report(options.model_name(model), what, code)), file=sys.stdout)
    raise typer.Exit(code)
