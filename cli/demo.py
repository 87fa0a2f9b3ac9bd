"""`qkvshare demo`: a planner, a researcher and a writer work on one document whose KV cache exists once."""

from __future__ import annotations

from importlib import resources
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from .. import Sampling, SharedKVCacheManager
from . import options
from .relay import Leg, Relay, RelayResult, Turn
from .terminal import Terminal, format_bytes

DOCUMENT = "tide_mill.txt"
SYSTEM = "You are a helpful assistant. Read the paper and answer the question briefly, with facts from the paper."
TASK = "a short newspaper article about the plan for the tide mill"
# Short, concrete requests: the default model has 135M parameters.
PLANNER = "Which questions will readers have about the mill museum? Write three different questions."
RESEARCHER = Leg("researcher", "You are the researcher.", "How does the tide mill work?")
WRITER = Leg(
    "writer",
    "You are the writer.",
    "Write the first paragraph of the newspaper article: what does the town of Orle want to do with its old mill?",
)


def read_document() -> str:
    return resources.files(__package__).joinpath("data", DOCUMENT).read_text(encoding="utf-8")


def legs() -> list[Leg]:
    """The planner opens with the system prompt, the document and the task; the others add a role turn each."""
    opening = f"{read_document()}\nThe task is {TASK}. You are the planner. {PLANNER}"
    return [Leg("planner", SYSTEM, opening), RESEARCHER, WRITER]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table


def turns_table(turns: list[Turn]) -> Table:
    """A row for each agent."""
    table = _table("agent", "shared\ntokens", "computed\ntokens", "first\ntoken", "handoff", "KV bytes\ncopied", "memory\ndelta")
    for turn in turns:
        record = turn.handoff
        handed = (f"{1000 * record.handoff_seconds:.2f} ms", str(record.bytes_copied)) if record else ("-", "-")
        delta = str(turn.memory_delta_bytes) if record else "-"
        first = f"{turn.first_token_seconds:.2f} s"
        table.add_row(turn.name, str(turn.reused_tokens), str(turn.computed_tokens), first, *handed, delta)
    return table


def totals_table(result: RelayResult, quant: str) -> Table:
    """The claims: held once, nothing copied, no re-prefill."""
    last, count = result.turns[-1], len(result.turns)
    ratio = result.reprefill_seconds / last.first_token_seconds
    table = _table("in all", "")
    rows = [
        ("tokens shared at the last handoff", f"{last.reused_tokens:,}"),
        (f"bytes held once for {count} agents ({quant})", _bytes(result.held_bytes)),
        (f"{count} separate quantized caches would hold", _bytes(result.separate_quantized_bytes)),
        (f"{count} separate full-precision caches would hold", _bytes(result.separate_bytes)),
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
    cache_dir: options.CacheDir = None,
    bits: options.Bits = None,
    k_bits: options.KBits = None,
    v_bits: options.VBits = None,
    group_size: options.GroupSize = 64,
    seed: Annotated[int, typer.Option(help="Makes sampling repeatable.")] = 0,
    temperature: options.Temperature = 0.0,
) -> None:
    """A planner, a researcher and a writer share one document's cache; then a table shows what it cost."""
    terminal = Terminal()
    sampling = Sampling(temperature=temperature, seed=seed)
    quant = options.quant_spec(bits, k_bits, v_bits, group_size)
    loaded = options.load_model(model, cache_dir, terminal)
    num_tokens = len(loaded.tokenizer.encode(read_document(), add_special_tokens=False))
    terminal.line(f"document: {DOCUMENT}, {num_tokens:,} tokens; task: {TASK}\n", style="bold")
    manager = SharedKVCacheManager(loaded.spec, quant)
    result = Relay(loaded, manager, sampling, max_tokens, terminal).run(legs())
    terminal.out.print(turns_table(result.turns))
    terminal.out.print(totals_table(result, str(manager.quant)))
    for line in notes(result):
        terminal.line(line)


def notes(result: RelayResult) -> list[str]:
    """What the figures are, and what they are not."""
    seals = ", ".join(f"{1000 * turn.seal_seconds:.0f} ms" for turn in result.turns if turn.handoff)
    return [
        f"Before each handoff the sender's own turn was quantized once ({seals}). Separate caches are counted at",
        f"their exact lengths ({', '.join(map(str, result.held_tokens))} tokens); real ones round up.",
        machine_note(),
    ]


def machine_note() -> str:
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.gpu):
        return "Timings are of this machine's GPU."
    return "Timings are of this machine's CPU: only a Mac can show the Metal kernels and their speed."
