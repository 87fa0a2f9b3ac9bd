"""What can be typed behind a slash in a chat: a table of small functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .. import CardStore, HandoffRecord, Message
from ..errors import InvalidValueError
from .conversation import Conversation
from .document import paths_from, read_document, typed_path
from .terminal import Terminal, cut_to, format_seconds, padded
from .turn import Turn, ending, status


class EndOfChat(Exception):
    """The user is done."""


@dataclass(frozen=True)
class Command:
    """`usage` is how it is typed, `about` what it does."""

    usage: str
    about: str
    run: Callable[[Conversation, str], None]

    @property
    def name(self) -> str:
        return self.usage.split(" ")[0]

    @property
    def needs_argument(self) -> bool:
        return len(self.usage.split(" ")) > 1 and "[" not in self.usage


COMMANDS: dict[str, Command] = {}


def command(usage: str, about: str, *aliases: str) -> Callable[[Callable[[Conversation, str], None]], Command]:
    """Enter a function (conversation, what follows the command's name) into the table."""

    def enter(run: Callable[[Conversation, str], None]) -> Command:
        made = Command(usage, about, run)
        COMMANDS.update(dict.fromkeys([made.name, *aliases], made))
        return made

    return enter


def obey(conversation: Conversation, line: str) -> None:
    """Do what the command `line` says. Raises `EndOfChat`, or what the command fails with."""
    name, _, argument = line.partition(" ")
    if name not in COMMANDS:
        raise InvalidValueError(f"no command {name}; /help lists them")
    found, argument = COMMANDS[name], argument.strip()
    if found.needs_argument and not argument:
        raise InvalidValueError(f"expected {found.usage}, got {name} alone")
    found.run(conversation, argument)


def completions(conversation: Conversation, line: str, word: str) -> list[str]:
    """What `word`, the last one of the `line` so far, may become: a command, an agent, a path, a kept conversation."""
    name, _, argument = line.partition(" ")
    if not line.startswith("/") or line.startswith("//"):
        return []
    if not argument and not line.endswith(" "):
        return [it for it in sorted(COMMANDS) if it.startswith(word)]
    if name == _file.name:
        return paths_from(word)
    names = CardStore(conversation.settings.store).names() if name in (_load.name, _save.name) else conversation.agents
    return [it for it in names if it.startswith(word)]


def ask(conversation: Conversation, text: str) -> None:
    """Let the current agent, or everybody, answer `text`, and say what it took."""
    turns = conversation.answer(text)
    show_status(conversation, turns)


def show_status(conversation: Conversation, turns: list[Turn]) -> None:
    limit = conversation.limit(turns[0].agent) if turns else 0
    if note := ending(turns, limit):
        conversation.terminal.note(note)
    if any(turn.num_tokens and turn.error is None for turn in turns):
        conversation.terminal.note(status(turns, conversation.usage()))


@command("/agents", "who is there, and who speaks")
def _agents(conversation: Conversation, _: str) -> None:
    names = conversation.sessions
    width = max(len(padded(name, 0)) for name in names)
    for name, session in names.items():
        mark = "*" if session is conversation.current or conversation.is_for_all else " "
        held = f"{session.num_tokens} tokens" if session.num_tokens else "-"
        about = f"{mark} {padded(name, width)}  {padded(held, 12)}  {conversation.agents[name].role or ''}"
        conversation.terminal.line(cut_to(about, conversation.terminal.out.width))
    conversation.terminal.line(conversation.who)


@command("/to [NAME]", "NAME goes on: with its own branch, or it takes over by reference", "/agent")
def _to(conversation: Conversation, name: str) -> None:
    if not name:
        return _agents.run(conversation, "")
    record = conversation.switch(name)
    if record is not None:
        _show_handoff(conversation.terminal, record)
    else:
        conversation.terminal.note(f"({name} is speaking)")
    return None


@command("/next [TEXT]", "the next of the team takes over by reference, and answers TEXT or its own request")
def _next(conversation: Conversation, text: str) -> None:
    name = conversation.next_name()
    record = conversation.switch(name, keeps_branch=False)
    if record is not None:
        _show_handoff(conversation.terminal, record)
    if request := text or conversation.agents[name].request:
        ask(conversation, request)


@command("/all [TEXT]", "every agent answers: TEXT, or all that you say until /to NAME")
def _all(conversation: Conversation, text: str) -> None:
    before = conversation.current
    if (record := conversation.switch_to_all()) is None and not text:
        conversation.terminal.note("(everybody answers)")
    if text:
        try:
            ask(conversation, text)
        finally:
            if before is not conversation.current:
                conversation.switch(before.name)
    elif record is not None:
        conversation.terminal.note(f"(everybody answers, from {record.reused_tokens} tokens by reference)")


@command("/handoff A B", "A gives what it holds to B, by reference")
def _handoff(conversation: Conversation, names: str) -> None:
    words = names.split(" ")
    splits = ((" ".join(words[:i]), " ".join(words[i:]).strip()) for i in range(1, len(words)))
    pairs = [pair for pair in splits if all(name in conversation.sessions for name in pair)]
    if not pairs:
        there = ", ".join(conversation.sessions)
        raise InvalidValueError(f"/handoff: expected two agents of {there}; got {names!r}")
    _show_handoff(conversation.terminal, conversation.hand_over(*pairs[0]))


def _show_handoff(terminal: Terminal, record: HandoffRecord) -> None:
    terminal.note(
        f"({record.receiver} goes on: {record.reused_tokens} tokens by reference, "
        f"{record.bytes_copied} bytes copied, {1000 * record.handoff_seconds:.2f} ms)"
    )
    if record.redacted_tokens:
        terminal.note(f"({record.redacted_tokens} tokens that {record.receiver} may not read were left out)")


@command("/fork NAME", "go on as a new agent on a branch of its own; /to goes back and forth")
def _fork(conversation: Conversation, name: str) -> None:
    before = conversation.prompt
    conversation.fork(name)
    count = conversation.current.num_tokens
    conversation.terminal.note(f"({name} goes on from {count} tokens that it shares with {before})")


@command("/rewind [N]", "take back the last N questions or files, and the answers")
def _rewind(conversation: Conversation, text: str) -> None:
    if not (text or "1").isdecimal() or not int(text or "1"):
        raise InvalidValueError(f"/rewind: expected a whole number above 0, got {text!r}")
    forgotten = conversation.take_back(int(text or "1"))
    conversation.terminal.note(f"({forgotten} tokens taken back, {conversation.current.num_tokens} are left)")


@command("/file PATH", "let all read a text file")
def _file(conversation: Conversation, text: str) -> None:
    document = read_document(typed_path(text))
    if document.num_replaced:
        conversation.terminal.note(f"({document.num_replaced} unreadable bytes in the file became U+FFFD)")
    try:
        read = conversation.add(document)
    except KeyboardInterrupt:
        conversation.terminal.note("(stopped; the file was taken back)")
        return
    conversation.terminal.note(
        f"({read.name}: {read.computed_tokens} tokens computed in {format_seconds(read.seconds)}; "
        f"the context has {read.context_tokens})"
    )


@command("/context", "what was said so far, in short")
def _context(conversation: Conversation, _: str) -> None:
    current, terminal = conversation.current, conversation.terminal
    segments = len(current.prefix.views)
    terminal.line(
        f"{current.num_tokens} of {conversation.max_context} tokens, {current.prefix.num_tokens} sealed in "
        f"{segments} segment{'' if segments == 1 else 's'}; {len(current.messages)} messages"
    )
    for message in current.messages:
        terminal.line(cut_to(f"  {padded(_author(message), 10)}  {message.content}", terminal.out.width))


def _author(message: Message) -> str:
    if message.role == "user":
        return "you"
    return message.author or message.role if message.role == "assistant" else "system"


@command("/stats", "memory, segments, handoffs")
def _stats(conversation: Conversation, _: str) -> None:
    conversation.terminal.pairs(conversation.stats())


@command("/save NAME", "keep the conversation, also for after a restart")
def _save(conversation: Conversation, name: str) -> None:
    save(conversation, name)


def save(conversation: Conversation, name: str) -> None:
    """Keep the conversation under `name` and say so."""
    if all(message.role == "system" for message in conversation.current.messages):
        conversation.terminal.note("(nothing was said: nothing is saved)")
        return
    try:
        card = conversation.save(name)
    except KeyboardInterrupt:
        conversation.terminal.note("(stopped; what was kept before is whole)")
        return
    left = conversation.other_branches()
    what = f"; only this branch, not that of {', '.join(left)}" if left else ""
    conversation.terminal.note(f"(saved {name!r}: {card.num_tokens} tokens{what})")


@command("/load NAME", "go on with what was kept")
def _load(conversation: Conversation, name: str) -> None:
    try:
        load(conversation, name)
    except KeyboardInterrupt:
        conversation.terminal.note("(stopped; the conversation is as it was)")


def load(conversation: Conversation, name: str) -> None:
    """Go on with the conversation kept under `name`, and say where it came from."""
    restored, author = conversation.load(name)
    if restored.rebuilt_because is not None and restored.computed_tokens:
        conversation.terminal.note(
            f"({restored.computed_tokens} tokens were computed again: what was kept does not fit here: "
            f"{restored.rebuilt_because})"
        )
    if author is not None:
        conversation.terminal.note(f"(kept by {author}, who is not here; --team or --agent brings the agents back)")
    conversation.terminal.note(f"({name!r}: {conversation.current.num_tokens} tokens; {conversation.who})")


@command("/new", "forget the conversation")
def _new(conversation: Conversation, _: str) -> None:
    conversation.restart()
    conversation.terminal.note("(a new conversation)")


@command("/help", "this text")
def _help(conversation: Conversation, _: str) -> None:
    width = max(len(it.usage) for it in COMMANDS.values())
    for it in dict.fromkeys(COMMANDS.values()):
        conversation.terminal.line(f"{it.usage:{width}}  {it.about}")
    conversation.terminal.line(f"{'//text':{width}}  say a line that begins with a slash")
    conversation.terminal.line('A line that ends in \\ goes on in the next; """ begins and ends a block of lines.')
    conversation.terminal.line(
        "Below a reply: bytes held once, and what a full-precision cache for each agent would hold."
    )
    conversation.terminal.line("Ctrl-C stops a reply, Ctrl-D ends the chat; Tab completes commands, agents and paths.")


@command("/quit", "end the chat", "/exit", "/bye")
def _quit(conversation: Conversation, _: str) -> None:
    raise EndOfChat
