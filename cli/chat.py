"""`qkvshare chat`: several agents, one conversation, one cache."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from .. import LoadedModel, QKVShareError, Sampling, SharedKVCacheManager
from ..model import DEFAULT_MODEL
from ..spec import PRESETS
from . import options
from .conversation import AgentSpec, ChatSettings, Conversation
from .lines import LineReader, clean
from .panel import Panel
from .terminal import Terminal, format_bytes

DEFAULT_AGENTS = [
    AgentSpec("planner", "You are the planner."),
    AgentSpec("writer", "You are the writer."),
]
HELP = """/agent NAME  hand the conversation to another agent, by reference
/stats       memory, segments, handoffs
/new         forget the conversation
/help        this text
/quit        end (so does Ctrl-D; Ctrl-C stops a reply)
//text       say a line that begins with a slash"""


def banner(conversation: Conversation | Panel, model: LoadedModel, source: str | None) -> str:
    """The configuration that holds, read off the objects that apply it."""
    manager, sampling = conversation.manager, conversation.settings.sampling
    plan = next(plan for plan in manager.plans if plan is not None)
    keys, values = plan.keys, plan.values
    groups = sorted({plan.group_size for plan in (keys, values) if plan.is_quantized})
    bits = f"K{keys.bits} V{values.bits}" + (f", groups of {' and '.join(map(str, groups))}" if groups else "")
    if manager.quant in PRESETS.values():
        bits = f"{bits} (preset {str(manager.quant).partition(' ')[0]})"
    seed = "a fresh one" if sampling.seed is None else str(sampling.seed)
    return "\n".join(
        [
            f"model        {source or DEFAULT_MODEL} ({model.spec.dtype})",
            f"cache bits   {bits}",
            f"budget       {manager.budget_bytes} bytes ({format_bytes(manager.budget_bytes)})",
            f"context      {conversation.max_context} tokens",
            f"reply        up to {conversation.max_tokens} tokens, temperature {sampling.temperature:g}, seed {seed}",
            f"agents       {', '.join(conversation.sessions)} ({conversation.who})",
            "/help lists the commands",
        ]
    )


def obey(conversation: Conversation | Panel, line: str, terminal: Terminal) -> bool:
    """Do what the command `line` says; False ends the chat."""
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    if command == "/quit":
        return False
    if command == "/help":
        terminal.line(HELP if isinstance(conversation, Conversation) else HELP.partition("\n")[2])
    elif command == "/stats":
        pairs = conversation.stats()
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            terminal.line(f"{name:{width}}  {value}")
    elif command == "/new":
        conversation.restart()
        terminal.note("(a new conversation)")
    elif command == "/agent" and argument:
        record = conversation.switch(argument)
        if record is None:
            terminal.note(f"({argument} is speaking already)")
        else:
            terminal.note(
                f"({record.receiver} goes on: {record.reused_tokens} tokens by reference, "
                f"{record.bytes_copied} bytes copied, {1000 * record.handoff_seconds:.2f} ms)"
            )
    elif command == "/agent":
        terminal.line(f"agents: {', '.join(conversation.sessions)}; {conversation.who}")
    else:
        terminal.error(f"no command {command}; /help lists them")
    return True


def talk(conversation: Conversation | Panel, terminal: Terminal) -> None:
    """Read and answer until /quit, the end of the input, or Ctrl-C at the prompt."""
    reader = LineReader(terminal)
    while True:
        try:
            line = reader.read(conversation.prompt)
        except KeyboardInterrupt:
            line = None
        if line is None:
            if reader.is_interactive:
                terminal.err.print()  # the shell's prompt starts on a line of its own
            return
        if not line.strip():
            continue
        if not line.startswith("/"):
            conversation.answer(line)
        elif line.startswith("//"):
            conversation.answer(line[1:])
        elif not _try_to_obey(conversation, line.strip(), terminal):
            return


def _try_to_obey(conversation: Conversation | Panel, line: str, terminal: Terminal) -> bool:
    try:
        return obey(conversation, line, terminal)
    except QKVShareError as error:
        terminal.error(error)
        return True


def chat(
    agent: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:ROLE]",
            help="An agent and what it is told about its role. Repeat for more.",
            show_default="planner and writer",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt for the whole conversation.")] = None,
    parallel: Annotated[bool, typer.Option("--parallel", help="Every agent answers, all at the same time.")] = False,
    model: options.Model = None,
    cache_dir: options.CacheDir = None,
    budget: options.Budget = "4G",
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of the conversation.", show_default="the model's")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one reply.", show_default="256, at most half the context")
    ] = None,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default="fresh")] = None,
    bits: options.Bits = None,
    preset: options.Preset = None,
    unsafe: options.Unsafe = False,
    k_bits: options.KBits = None,
    v_bits: options.VBits = None,
    group_size: options.GroupSize = 64,
) -> None:
    """Talk with several agents that share one conversation and one cache."""
    terminal = Terminal()
    agents = [AgentSpec.parse(text) for text in agent] if agent else DEFAULT_AGENTS
    settings = ChatSettings(
        sampling=Sampling(temperature=temperature, seed=seed),
        system=clean(system)[0] if system else None,
        max_context=max_context,
        max_tokens=max_tokens,
    )
    quant, budget_bytes = options.quant_spec(bits, k_bits, v_bits, group_size, preset), options.parse_bytes(budget)
    loaded = options.load_model(model, cache_dir, terminal)
    manager = SharedKVCacheManager(loaded.spec, quant, budget_bytes=budget_bytes, allow_unsafe=unsafe)
    make = Panel if parallel else Conversation
    with contextlib.closing(make(agents, loaded, manager, settings, terminal)) as conversation:
        terminal.note(banner(conversation, loaded, model))
        talk(conversation, terminal)
