"""`qkvshare plan`: will N agents on one context fit this machine? From the model's config alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Annotated

import typer

from ..measure import available_memory, report
from ..plan import LayerBytes, Plan
from ..plan import plan as make_plan
from ..spec import PRESETS, QuantSpec
from .options import (
    DEFAULT_GROUP_SIZE,
    Bits,
    CacheDir,
    GroupSize,
    KBits,
    Model,
    VBits,
    model_name,
    parse_bytes,
    quant_spec,
)
from .terminal import ProgressLine, Terminal, format_bytes, make_table

_MOST_AGENTS, _MOST_TOKENS = 10_000_000, 1_000_000_000


def plan(
    model: Model = None,
    agents: Annotated[int, typer.Option(help="Agents on the shared context.", min=1, max=_MOST_AGENTS)] = 8,
    shared: Annotated[int, typer.Option(help="Shared tokens.", min=1, max=_MOST_TOKENS)] = 1024,
    private: Annotated[int, typer.Option(help="Tokens of each agent's own.", min=1, max=_MOST_TOKENS)] = 256,
    bits: Bits = None,
    k_bits: KBits = None,
    v_bits: VBits = None,
    group_size: GroupSize = DEFAULT_GROUP_SIZE,
    preset: Annotated[
        str | None, typer.Option("--preset", help="safe, balanced or tight: 8, 6 or 4 bits.", show_default="safe")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, float16 or bfloat16.", show_default="as it is loaded on this machine"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Bytes to fit into, such as 16G.", show_default="what this machine has"),
    ] = None,
    cache_dir: CacheDir = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print one JSON line alone.")] = False,
) -> None:
    """Predict the memory of N agents on one context; no weight is loaded or downloaded."""
    from ..model import outline  # imports mlx-lm

    terminal = Terminal()
    asked = quant_spec(bits, k_bits, v_bits, group_size, preset)
    quant = asked if isinstance(asked, QuantSpec) else QuantSpec.preset(asked or "safe")
    available, what = available_memory() if memory is None else (parse_bytes(memory, "memory"), "--memory")
    with contextlib.closing(ProgressLine(terminal)) as progress:
        found = outline(model, cache_dir=cache_dir, dtype=dtype, progress=progress)
    result = make_plan(
        found, agents=agents, shared_tokens=shared, private_tokens=private, quant=quant, available_bytes=available
    )
    if json_only:
        peaks = {"prefill_peak_bytes": result.prefill_peak_bytes, "turn_peak_bytes": result.turn_peak_bytes}
        row = dataclasses.asdict(result) | peaks
        print(json.dumps(report("plan", model_name(model), [row])), file=terminal.out.file)
    else:
        _print(terminal, result, model_name(model), what, is_assumed=asked is None)


def _print(terminal: Terminal, it: Plan, model: str, what: str, *, is_assumed: bool) -> None:
    terminal.line(f"{model} in {it.dtype}, {it.quant}")
    if is_assumed:  # its verdict is filed under a digest of the weights
        terminal.line("(assumed: what `qkvshare doctor` found best is known once weights are read)")
    shared, private = _count(it.shared_tokens, "shared token"), _count(it.private_tokens, "private one")
    terminal.line(f"{_count(it.agents, 'agent')} on {shared}, {private} each")
    table, sure = make_table(terminal, "", "bytes", ""), "at most" if it.is_bound else "about"
    for name, count, how in (
        ("weights", it.weights_bytes, ""),
        ("shared, packed and held once", it.shared_bytes, f"{it.shared_bytes / it.shared_tokens:,.0f} a token"),
        ("private, full precision", it.agents * it.private_bytes, f"{it.agents:,} x {format_bytes(it.private_bytes)}"),
        ("all of it", it.live_bytes, ""),
        ("peak: shared tokens prefilled", it.prefill_peak_bytes, f"{sure}, weights included"),
        ("peak: last agent prefilled", it.turn_peak_bytes, f"{sure}, with all of it"),
    ):  # fmt: skip
        table.add_row(name, format_bytes(count), how)
    terminal.out.print(table)
    for line in _formula(it):
        terminal.line(line)
    terminal.line()
    room = f"{format_bytes(it.available_bytes)} ({what})"
    needed = f"{format_bytes(it.needed_bytes)} needed of {room}"
    terminal.line(f"it fits: {needed}" if it.fits else f"it does not fit: {needed}")
    if not it.fits:
        terminal.line(_advice(it))
    fit = "would fit, too" if it.separate_fits else "would not fit"
    separate = format_bytes(it.weights_bytes + it.separate_bytes)
    terminal.line(f"with separate full-precision caches it {fit}: {separate} in all")


def _advice(it: Plan) -> str:
    if it.preset is None:
        return f"nor would any preset ({', '.join(PRESETS)}): fewer agents, fewer tokens, or a smaller model"
    return f"--preset {it.preset} would fit"


def _formula(it: Plan) -> list[str]:
    """The sums with their numbers."""
    sign, agents = "<=" if it.is_bound else "~ ", f"{it.agents:,}"
    return [
        f"all     =  weights + shared + {agents} x private",
        f"        =  {it.weights_bytes:,} + {it.shared_bytes:,} + {agents} x {it.private_bytes:,} = {it.live_bytes:,}",
        "shared  =  " + "\n        +  ".join(map(_term, it.layers)),
        f"prefill {sign} weights + shared tokens in full precision + a step of them",
        f"        =  {it.weights_bytes:,} + {it.prefill_tail_bytes:,} + {it.prefill_step_bytes:,}"
        f" = {it.prefill_peak_bytes:,}",
        f"last    {sign} all + a step, logits = {it.live_bytes:,} + {it.turn_step_bytes:,} = {it.turn_peak_bytes:,}",
    ]


def _term(layer: LayerBytes) -> str:
    rows = f"{layer.rows:,} rows x {_count(layer.num_heads, 'head')} x {layer.row_bytes}" if layer.rows else ""
    other = f"{layer.other_bytes:,}" if layer.other_bytes else ""
    kind = "" if layer.name == "full" else f" ({layer.name})"
    return f"{_count(layer.count, 'layer')}{kind} x ({' + '.join(filter(None, (rows, other)))})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
