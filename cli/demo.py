"""`qkvshare demo`: a planner, a researcher and a writer work on one document whose KV cache exists once."""

from __future__ import annotations

from importlib import resources
from typing import Annotated

import mlx.core as mx
import typer
from rich.table import Table

from .. import Sampling, SharedKVCacheManager
from . import options
from .relay import Leg, Relay, RelayResult, Turn
from .terminal import Terminal, format_bytes, make_table

DOCUMENT = "garden_handbook.txt"
TASK = "a leaflet for new members of a community garden"
SYSTEM = (
    "You are three agents, a planner, a researcher and a writer, who prepare a leaflet for new gardeners. "
    "Use this handbook."
)
# For base models: what many of them have seen as a conversation. A reply brings the space behind "Assistant:" itself.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}:{{ '' if m['role'] == 'assistant' else ' ' }}"
    "{{ m['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Short, concrete requests: the default model has 135M parameters.
PLANNER = "You are the planner. List three topics for the leaflet."
RESEARCHER = Leg("researcher", "You are the researcher.", "How do I make good compost?")
WRITER = Leg("writer", "You are the writer.", "Write a short leaflet for new gardeners.")


def read_document() -> str:
    return resources.files(__package__).joinpath("data", DOCUMENT).read_text(encoding="utf-8")


def legs() -> list[Leg]:
    """The planner opens with the system prompt, the document and the task; the others add a role turn each."""
    return [Leg("planner", f"{SYSTEM}\n\n{read_document()}", PLANNER), RESEARCHER, WRITER]


def turns_table(terminal: Terminal, turns: list[Turn]) -> Table:
    """A row for each agent."""
    table = make_table(
        terminal,
        "agent",
        "shared\ntokens",
        "computed\ntokens",
        "first\ntoken",
        "handoff",
        "KV bytes\ncopied",
        "memory\ndelta",
    )
    for turn in turns:
        record = turn.handoff
        handed = (f"{1000 * record.handoff_seconds:.2f} ms", str(record.bytes_copied)) if record else ("-", "-")
        delta = str(turn.memory_delta_bytes) if record else "-"
        first = f"{turn.first_token_seconds:.2f} s"
        table.add_row(turn.name, str(turn.reused_tokens), str(turn.computed_tokens), first, *handed, delta)
    return table


def totals_table(terminal: Terminal, result: RelayResult, quant: str) -> Table:
    """The claims: held once, nothing copied, no re-prefill."""
    last, count = result.turns[-1], len(result.turns)
    ratio = result.reprefill_seconds / last.first_token_seconds
    table = make_table(terminal, "in all", "")
    rows = [
        ("tokens shared at the last handoff", f"{last.reused_tokens:,}"),
        (f"bytes held once for {count} agents ({quant})", _bytes(result.usage.held_bytes)),
        (f"{count} separate quantized caches would hold", _bytes(result.usage.separate_quantized_bytes)),
        (f"{count} separate full-precision caches would hold", _bytes(result.usage.separate_bytes)),
        ("bytes copied per handoff", str(max(turn.handoff.bytes_copied for turn in result.turns if turn.handoff))),
        (f"{last.name}: first token after the handoff", f"{last.first_token_seconds:.2f} s"),
        (f"the same {result.reprefill_tokens:,} tokens prefilled from nothing", f"{result.reprefill_seconds:.2f} s"),
        ("re-prefill / handoff", f"{ratio:.1f}x"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _bytes(count: int) -> str:
    return f"{count:,} ({format_bytes(count)})"


def demo(
    model: options.Model = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one agent's text.")] = 70,
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Researcher and writer work at the same time, both behind the planner.")
    ] = False,
    cache_dir: options.CacheDir = None,
    bits: options.Bits = None,
    preset: options.Preset = None,
    unsafe: options.Unsafe = False,
    k_bits: options.KBits = None,
    v_bits: options.VBits = None,
    group_size: options.GroupSize = 64,
    seed: Annotated[int, typer.Option(help="Makes sampling repeatable.")] = 0,
    temperature: options.Temperature = 0.0,
) -> None:
    """A planner, a researcher and a writer share one document's cache; then a table shows what it cost."""
    terminal = Terminal()
    sampling = Sampling(temperature=temperature, seed=seed)
    quant = options.quant_spec(bits, k_bits, v_bits, group_size, preset)
    loaded = options.load_model(model, cache_dir, terminal)
    if not loaded.tokenizer.chat_template:
        loaded.tokenizer.chat_template = PLAIN_TEMPLATE
        terminal.note("(this model has no chat template: its turns begin with System:, User: and Assistant:)")
    num_tokens = len(loaded.tokenizer.encode(read_document(), add_special_tokens=False))
    terminal.line(f"document: {DOCUMENT}, {num_tokens:,} tokens; task: {TASK}\n", style="bold")
    manager = SharedKVCacheManager(loaded.spec, quant, allow_unsafe=unsafe)
    result = Relay(loaded, manager, sampling, max_tokens, terminal).run(legs(), is_parallel=parallel)
    terminal.out.print(turns_table(terminal, result.turns))
    terminal.out.print(totals_table(terminal, result, str(manager.quant)))
    for line in notes(result):
        terminal.line(line)


def notes(result: RelayResult) -> list[str]:
    """What the figures are, and what they are not."""
    seals = " and ".join(f"{1000 * turn.seal_seconds:.0f} ms" for turn in result.turns if turn.handoff)
    held = " + ".join(f"{count:,}" for count in result.held_tokens)
    is_gpu = mx.default_device() == mx.Device(mx.gpu)
    return [
        f"Quantizing a sender's own turn, before its handoff, took {seals}.",
        f"The separate caches are counted at their exact lengths ({held} tokens); real ones round up.",
        "The table is about memory and time: a small model gets facts wrong, with a shared cache or with its own.",
        "Timings are of this machine's GPU."
        if is_gpu
        else "Timings are of this machine's CPU: only a Mac can show an Apple GPU's.",
    ]
