"""`qkvshare plan`: will N agents on one context fit this machine? From the model's config alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Annotated

import typer

from ..measure import available_memory, report
from ..plan import STEP_TOKENS, LayerBytes, Plan
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


def plan(
    model: Model = None,
    agents: Annotated[int, typer.Option(help="Agents on the shared context.", min=1)] = 8,
    shared: Annotated[int, typer.Option(help="Shared tokens.", min=1)] = 1024,
    private: Annotated[int, typer.Option(help="Tokens of each agent's own.", min=1)] = 256,
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
        row = dataclasses.asdict(result) | {"prefill_peak_bytes": result.prefill_peak_bytes}
        print(json.dumps(report("plan", model_name(model), [row])), file=terminal.out.file)
    else:
        _print(terminal, result, model_name(model), what)


def _print(terminal: Terminal, it: Plan, model: str, what: str) -> None:
    terminal.line(f"{model} in {it.dtype}, {it.quant}: {it.agents} agents on {it.shared_tokens:,} shared tokens")
    table = make_table(terminal, "", "bytes", "")
    separate, tokens = format_bytes(it.separate_bytes), f"{it.shared_tokens + it.private_tokens:,} tokens"
    for name, count, how in (
        ("weights", it.weights_bytes, ""),
        ("shared, packed and held once", it.shared_bytes, f"{it.shared_bytes / it.shared_tokens:,.0f} a token"),
        ("private, full precision", it.agents * it.private_bytes, f"{it.agents} x {format_bytes(it.private_bytes)}"),
        ("all of it", it.live_bytes, ""),
        ("peak while it is prefilled", it.prefill_peak_bytes, "at most, weights included"),
        ("all, with separate caches", it.weights_bytes + it.separate_bytes, f"full precision, {it.agents} x {tokens}"),
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
    terminal.line(f"with separate full-precision caches it {fit}: {separate} beside the weights")


def _advice(it: Plan) -> str:
    if it.preset is None:
        return f"nor would any preset ({', '.join(PRESETS)}): fewer agents, fewer tokens, or a smaller model"
    return f"--preset {it.preset} would fit"


def _formula(it: Plan) -> list[str]:
    """The sums with their numbers."""
    live = f"{it.weights_bytes:,} + {it.shared_bytes:,} + {it.agents} x {it.private_bytes:,} = {it.live_bytes:,}"
    return [
        f"all = weights + shared + agents x private = {live} bytes",
        f"shared = {' + '.join(map(_term, it.layers))} = {it.shared_bytes:,} bytes",
        f"peak <= weights + the shared tokens in full precision + one layer's rows of a step of {STEP_TOKENS} tokens",
        f"      = {it.weights_bytes:,} + {it.prefill_tail_bytes:,} + {it.prefill_step_bytes:,} bytes",
    ]


def _term(layer: LayerBytes) -> str:
    rows = f"{layer.rows:,} rows x {layer.num_heads} heads x {layer.row_bytes}" if layer.rows else ""
    other = f"{layer.other_bytes:,}" if layer.other_bytes else ""
    kind = "layers" if layer.name == "full" else f"layers ({layer.name})"
    return f"{layer.count} {kind} x ({' + '.join(filter(None, (rows, other)))})"
