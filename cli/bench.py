"""`qkvshare bench`: mlx-lm as it ships beside ours, a table for people and one JSON line for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer

from .. import QuantSpec
from ..bench import bench_handoff, bench_memory
from ..bench_attention import AttentionShape, bench_attention, crossovers, stream_bandwidth, table_of
from ..bench_decode import bench_decode
from ..bench_latency import bench_latency
from ..bench_prefill import bench_prefill
from ..bench_restore import bench_restore
from ..calibrate import calibrate
from ..errors import InvalidValueError
from ..fidelity import fidelity as run_fidelity
from ..fidelity import standard_candidates
from ..measure import report
from ..passages import TEXTS, copy_passage, passage, text_of
from ..routes import device_name, of_device
from ..spec import ITEM_BYTES
from .bench_all import run_all
from .bench_tables import (
    print_attention,
    print_decode,
    print_fidelity,
    print_handoff,
    print_latency,
    print_memory,
    print_prefill,
    print_restore,
)
from .options import CacheDir, GroupSize, Model, load_model, model_name, parse_counts
from .terminal import Terminal

app = typer.Typer(help="Measure on this machine, mlx-lm beside ours.", no_args_is_help=True, rich_markup_mode=None)

app.command("all")(run_all)

# One number, unlike the demo's: mlx-lm's quantized cache has no separate bits for K and V.
Bits = Annotated[int, typer.Option(help="Bits of keys and values, both sides.")]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print the JSON line alone.")]


@app.command()
def memory(
    model: Model = None,
    agents: Annotated[str, typer.Option(help="Agents, comma separated.")] = "1,2,4,8",
    tokens: Annotated[str, typer.Option(help="Shared tokens, comma separated.")] = "1024",
    private: Annotated[int, typer.Option(help="Private tokens of each agent.", min=2)] = 16,
    bits: Bits = 8,
    group_size: GroupSize = 64,
    cache_dir: CacheDir = None,
    json_only: JsonOnly = False,
) -> None:
    """Live KV bytes of N agents on one shared context, after each has written tokens of its own."""
    terminal, counts, lengths = Terminal(), parse_counts(agents, "agents"), parse_counts(tokens, "tokens")
    quant = QuantSpec(bits, bits, group_size)
    lm = load_model(model, cache_dir, terminal)
    rows = bench_memory(lm, agents=counts, tokens=lengths, private_tokens=private, quant=quant, note=terminal.note)
    if not json_only:
        print_memory(terminal, rows, quant)
    _finish(terminal, "memory", model, rows)


@app.command()
def handoff(
    model: Model = None,
    agents: Annotated[int, typer.Option(help="Agents that the context goes around.", min=2)] = 2,
    tokens: Annotated[str, typer.Option(help="Tokens handed over, comma separated.")] = "512,1024,4096",
    turn: Annotated[int, typer.Option(help="Tokens of the receiver's role turn.", min=1)] = 32,
    repeats: Annotated[int, typer.Option(help="Timed rounds behind each median.", min=1)] = 5,
    bits: Bits = 8,
    group_size: GroupSize = 64,
    cache_dir: CacheDir = None,
    json_only: JsonOnly = False,
) -> None:
    """What a handoff costs, and the time to the receiver's first token against three other ways."""
    terminal, lengths = Terminal(), parse_counts(tokens, "tokens")
    quant = QuantSpec(bits, bits, group_size)
    lm = load_model(model, cache_dir, terminal)
    rows = bench_handoff(
        lm, tokens=lengths, agents=agents, turn_tokens=turn, repeats=repeats, quant=quant, note=terminal.note
    )
    if not json_only:
        print_handoff(terminal, rows, quant)
    _finish(terminal, "handoff", model, rows)


@app.command()
def decode(
    model: Model = None,
    agents: Annotated[str, typer.Option(help="Agents, comma separated.")] = "1,2,4,8",
    tokens: Annotated[str, typer.Option(help="Shared tokens, comma separated.")] = "512,2048",
    private: Annotated[int, typer.Option(help="Prompt tokens of each agent's own.", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="Tokens that each agent decodes in a round.", min=1)] = 8,
    repeats: Annotated[int, typer.Option(help="Timed rounds behind each median.", min=1)] = 3,
    bits: Bits = 8,
    group_size: GroupSize = 64,
    cache_dir: CacheDir = None,
    json_only: JsonOnly = False,
) -> None:
    """Tokens per second of N agents that decode together on one shared context."""
    terminal, counts, lengths = Terminal(), parse_counts(agents, "agents"), parse_counts(tokens, "tokens")
    quant = QuantSpec(bits, bits, group_size)
    lm = load_model(model, cache_dir, terminal)
    rows = bench_decode(
        lm,
        agents=counts,
        tokens=lengths,
        private_tokens=private,
        steps=steps,
        repeats=repeats,
        quant=quant,
        note=terminal.note,
    )
    if not json_only:
        print_decode(terminal, rows, quant)
    _finish(terminal, "decode", model, rows)


@app.command()
def prefill(
    model: Model = None,
    tokens: Annotated[str, typer.Option(help="Tokens, comma separated.")] = "512,1024,2048",
    repeats: Annotated[int, typer.Option(help="Rounds: the highest peak, the median time.", min=1)] = 3,
    bits: Bits = 8,
    group_size: GroupSize = 64,
    cache_dir: CacheDir = None,
    json_only: JsonOnly = False,
) -> None:
    """The most memory that a prefill needs at once, sealed at the end, and its time."""
    terminal, lengths = Terminal(), parse_counts(tokens, "tokens")
    quant = QuantSpec(bits, bits, group_size)
    lm = load_model(model, cache_dir, terminal)
    rows = bench_prefill(lm, tokens=lengths, repeats=repeats, quant=quant, note=terminal.note)
    if not json_only:
        print_prefill(terminal, rows, quant)
    _finish(terminal, "prefill", model, rows)


@app.command()
def latency(
    model: Model = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt that is prefilled meanwhile.", min=64)] = 4000,
    shared: Annotated[int, typer.Option(help="Tokens behind the agent that decodes.", min=64)] = 512,
    step_tokens: Annotated[str, typer.Option(help="Tokens of one step, comma separated.")] = "64,256",
    repeats: Annotated[int, typer.Option(help="Timed rounds behind each median, of minutes each.", min=1)] = 1,
    bits: Bits = 8,
    group_size: GroupSize = 64,
    cache_dir: CacheDir = None,
    json_only: JsonOnly = False,
) -> None:
    """An agent's time between tokens while a long prompt is prefilled beside it."""
    terminal, sizes = Terminal(), parse_counts(step_tokens, "step-tokens")
    quant = QuantSpec(bits, bits, group_size)
    lm = load_model(model, cache_dir, terminal)
    rows = bench_latency(
        lm,
        prompt_tokens=tokens,
        shared_tokens=shared,
        step_tokens=sizes,
        repeats=repeats,
        quant=quant,
        note=terminal.note,
    )
    if not json_only:
        print_latency(terminal, rows)
    _finish(terminal, "latency", model, rows)


@app.command()
def restore(
    model: Model = None,
    tokens: Annotated[str, typer.Option(help="Tokens of the context, comma separated.")] = "512,2048",
    turn: Annotated[int, typer.Option(help="Tokens of the turn behind it.", min=1)] = 32,
    repeats: Annotated[int, typer.Option(help="Timed rounds behind each median.", min=1)] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where files go, whose disk is measured.", show_default="the system's for temporary files"),
    ] = None,
    bits: Bits = 8,
    group_size: GroupSize = 64,
    cache_dir: CacheDir = None,
    json_only: JsonOnly = False,
) -> None:
    """What a card costs to keep and to come back to, beside mlx-lm's prompt cache files and a re-prefill."""
    terminal, lengths = Terminal(), parse_counts(tokens, "tokens")
    quant = QuantSpec(bits, bits, group_size)
    lm = load_model(model, cache_dir, terminal)
    rows = bench_restore(
        lm, tokens=lengths, turn_tokens=turn, repeats=repeats, quant=quant, folder=folder, note=terminal.note
    )
    if not json_only:
        print_restore(terminal, rows, quant)
    _finish(terminal, "restore", model, rows)


@app.command()
def attention(
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.", min=1)] = 8,
    head_dim: Annotated[int, typer.Option(help="Head dim.", min=1)] = 128,
    tokens: Annotated[str, typer.Option(help="Shared tokens, comma separated.")] = "512,2048",
    queries: Annotated[str, typer.Option(help="New tokens of one session, comma separated.")] = "1,2,4,16,64",
    agents: Annotated[str, typer.Option(help="Sessions that decode together, comma separated.")] = "1,2,4,8",
    bits: Annotated[str, typer.Option(help="Bits of keys and values, comma separated.")] = "8,4",
    group_size: GroupSize = 64,
    repeats: Annotated[int, typer.Option(help="Timed rounds behind each median.", min=1)] = 3,
    save: Annotated[bool, typer.Option("--save", help="Keep the table: the router uses it from now on.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Print the table in use, and measure nothing.")] = False,
    json_only: JsonOnly = False,
) -> None:
    """Every way to attend to packed bytes, timed on one layer; says which the router should take where."""
    terminal = Terminal()
    if table:
        terminal.line(str(of_device(device_name())))
        return
    if not mx.metal.is_available():
        terminal.note("no Metal device: the fused kernel is left out")
    rows = bench_attention(
        AttentionShape(heads, kv_heads, head_dim),
        bits=parse_counts(bits, "bits"),
        tokens=parse_counts(tokens, "tokens"),
        queries=parse_counts(queries, "queries"),
        sessions=parse_counts(agents, "agents"),
        group_size=group_size,
        repeats=repeats,
        note=terminal.note,
    )
    bandwidth = stream_bandwidth() / 1e9
    if not json_only:
        print_attention(terminal, rows, bandwidth)
    if save:
        terminal.note(f"kept for {device_name()}: {table_of(rows).save()}")
    found = [dataclasses.asdict(crossover) for crossover in crossovers(rows)]
    extra = {"ceiling_gigabytes_per_second": bandwidth, "crossovers": found}
    _finish(terminal, "attention", f"one layer of {heads} heads, {kv_heads} KV heads, head dim {head_dim}", rows, extra)


@app.command()
def fidelity(
    model: Model = None,
    prefix: Annotated[int, typer.Option(help="Tokens that are sealed.", min=32)] = 1536,
    scored: Annotated[int, typer.Option(help="Tokens that are scored behind them.", min=32)] = 512,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A text file of your own; may be repeated.", show_default="the texts that come along"),
    ] = None,
    copied: Annotated[int, typer.Option("--copy", help="Tokens of the recall test; 0 = none.", min=0)] = 512,
    handoffs: Annotated[int, typer.Option(help="Hops of the rows that were handed on.", min=2)] = 8,
    dtype: Annotated[
        str, typer.Option(help="Of rows kept in full and of scales: float16, bfloat16, float32.")
    ] = "float16",
    stock: Annotated[bool, typer.Option("--stock/--no-stock", help="mlx-lm's quantized caches beside.")] = True,
    factors: Annotated[bool, typer.Option("--factors/--no-factors", help="The presets with key factors, too.")] = True,
    cache_dir: CacheDir = None,
    json_only: JsonOnly = False,
) -> None:
    """What packed prefixes cost in quality: KL, perplexity and recall against full precision, on real text."""
    terminal = Terminal()
    if dtype not in ITEM_BYTES:
        raise InvalidValueError(f"--dtype: expected one of {sorted(ITEM_BYTES)}, got {dtype!r}")
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in text or ()}
    if len(texts) < len(text or ()):
        raise InvalidValueError("--text: expected files of different names")
    if 0 < copied < 64:
        raise InvalidValueError(f"--copy: expected 0, or 64 tokens or more, got {copied}")
    texts = texts or {name: text_of(name) for name in TEXTS}
    lm = load_model(model, cache_dir, terminal)
    sizes = {"prefix_tokens": prefix, "scored_tokens": scored}
    passages = [passage(lm.tokenizer, name, content, **sizes) for name, content in texts.items()]
    if copied:
        content = next(iter(texts.values()))
        passages.append(copy_passage(lm.tokenizer, content, prefix_tokens=copied, scored_tokens=copied // 2))
    found = calibrate(lm) if factors else None
    candidates = [it for it in standard_candidates(found, handoffs=handoffs) if stock or not it.is_stock]
    rows = run_fidelity(lm, candidates, passages, dtype=dtype, note=terminal.note)
    if not json_only:
        print_fidelity(terminal, rows, list(texts), dtype)
    _finish(terminal, "fidelity", model, rows)


def _finish(
    terminal: Terminal, name: str, model: str | None, rows: Sequence[Any], extra: Mapping[str, Any] | None = None
) -> None:
    found = report(name, model_name(model), [dataclasses.asdict(row) for row in rows])
    print(json.dumps(found | dict(extra or {})), file=terminal.out.file)
