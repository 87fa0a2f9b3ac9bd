"""`qkvshare chat`: several agents, one conversation, one cache."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Annotated

import typer

from .. import CardStore, SharedKVCacheManager
from ..errors import typed_error
from ..folders import default_cache_dir, default_store_dir
from ..spec import PRESETS
from . import options
from .commands import EndOfChat, ask, completions, load, obey, save
from .conversation import ChatSettings, Conversation
from .interrupts import ends_by_signal
from .lines import LineReader, Typed, clean, plain_name
from .team import Team
from .terminal import Terminal, format_bytes

if TYPE_CHECKING:
    from ..model import LoadedModel

DEFAULT_AGENTS = ["planner:You are the planner.", "writer:You are the writer."]


def banner(conversation: Conversation, model: LoadedModel, source: str | None) -> str:
    """The configuration that holds, read off the objects that apply it."""
    manager, asked = conversation.manager, conversation.settings.sampling
    plan = next(plan for plan in manager.plans if plan is not None)
    keys, values = plan.keys, plan.values
    groups = sorted({plan.group_size for plan in (keys, values) if plan.is_quantized})
    bits = f"K{keys.bits} V{values.bits}" + (f", groups of {' and '.join(map(str, groups))}" if groups else "")
    if manager.quant in PRESETS.values():
        bits = f"{bits} (preset {str(manager.quant).partition(' ')[0]})"
    sampled = f"temperature {asked.get('temperature', 0):g}, seed {asked.get('seed', 'a fresh one')}"
    if any(agent.sampling.keys() - asked.keys() for agent in conversation.agents.values()):
        sampled += "; agents have their own"
    return "\n".join(
        [
            f"model        {options.model_name(source)} ({model.spec.dtype})",
            f"cache bits   {bits}",
            f"budget       {manager.budget_bytes} bytes ({format_bytes(manager.budget_bytes)})",
            f"context      {conversation.max_context} tokens",
            f"reply        up to {conversation.max_tokens} tokens, {sampled}",
            f"agents       {', '.join(conversation.sessions)} ({conversation.who})",
            "/help lists the commands",
        ]
    )


def talk(conversation: Conversation, reader: LineReader) -> None:
    """Read and answer until /quit, the end of the input, or Ctrl-C twice at the prompt."""
    terminal, is_leaving = conversation.terminal, False
    while True:
        try:
            typed = reader.read(conversation.prompt)
            is_leaving = False
        except KeyboardInterrupt:
            if not reader.is_interactive:
                raise
            terminal.err.print()
            if is_leaving:
                return
            terminal.note("(Ctrl-D or Ctrl-C again ends the chat)")
            is_leaving = True
            continue
        if typed is None:
            if reader.is_interactive:
                terminal.err.print()  # the shell's prompt starts on a line of its own
            return
        if typed.text.strip():
            try:
                _do(conversation, typed)
            except EndOfChat:
                return
            except KeyboardInterrupt:  # Ctrl-C twice, at work that ends all or nothing
                terminal.note("(stopped)")
            except BrokenPipeError:  # nobody reads any more
                raise
            except Exception as error:  # whatever it is, it ends what was asked for, and not the conversation
                found = error if isinstance(error, OSError) else typed_error(error, f"[{typed.text.split()[0]}]")
                terminal.error(error, conversation.advice(found))


def _do(conversation: Conversation, typed: Typed) -> None:
    """A command is one line that begins with one slash."""
    text = typed.text
    if not typed.is_line or not text.startswith("/"):
        ask(conversation, text)
    elif text.startswith("//"):
        ask(conversation, text[1:])
    else:
        obey(conversation, text.strip())


def chat(
    agent: options.Agents = None,
    team: options.TeamOption = None,
    system: Annotated[str | None, typer.Option(help="A system prompt for the whole conversation.")] = None,
    parallel: Annotated[bool, typer.Option("--parallel", help="Every agent answers, all at the same time.")] = False,
    save_as: Annotated[
        str | None, typer.Option("--save", metavar="NAME", help="Keep the conversation under NAME at the end.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="NAME", help="Go on with a conversation that was kept.")
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
    """Talk with several agents that share one conversation and one cache.

    Exit codes: 0 when you end it, 2 for wrong options or a model that does not load, 143 after SIGTERM (with --save the
    conversation is kept first).
    """
    terminal = Terminal()
    members = options.find_team(agent, team, Team.of(DEFAULT_AGENTS))
    settings = ChatSettings(
        sampling=options.sampling_asked_for(temperature, seed),
        system=clean(system)[0] if system else None,
        max_context=max_context,
        max_tokens=max_tokens,
        store=store or default_store_dir(),
    )
    quant, budget_bytes = options.quant_spec(bits, k_bits, v_bits, group_size, preset), options.parse_bytes(budget)
    if save_as is not None or resume is not None:  # what cannot be used is told before anything is said
        kept = CardStore(settings.store)
        if save_as is not None:
            plain_name(save_as)
        if resume is not None:
            kept.inspect(plain_name(resume))
    loaded = options.load_model(model, cache_dir, terminal)
    manager = SharedKVCacheManager(loaded.spec, quant, budget_bytes=budget_bytes, allow_unsafe=unsafe)
    conversation = Conversation(members, loaded, manager, settings, terminal, is_parallel=parallel)
    with contextlib.closing(conversation), ends_by_signal():
        if resume is not None:
            load(conversation, resume)
        terminal.note(banner(conversation, loaded, model))
        complete = functools.partial(completions, conversation)
        with contextlib.closing(LineReader(terminal, default_cache_dir() / "history", complete)) as reader:
            try:
                talk(conversation, reader)
            finally:
                if save_as is not None:
                    save(conversation, save_as)
