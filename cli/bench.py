"""`qkvshare bench`: mlx-lm as it ships beside ours, a table for people and one JSON line for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer

from .. import QuantSpec
from ..bench import HandoffRow, MemoryRow, bench_handoff, bench_memory
from ..bench_attention import AttentionRow, AttentionShape, bench_attention, read_bandwidth, table_of
from ..bench_decode import DecodeRow, bench_decode
from ..bench_latency import LatencyRow, bench_latency
from ..bench_restore import RestoreRow, bench_restore
from ..calibrate import calibrate
from ..errors import InvalidValueError
from ..fidelity import FidelityRow, standard_candidates
from ..fidelity import fidelity as run_fidelity
from ..measure import machine, report, versions
from ..model import DEFAULT_MODEL
from ..passages import TEXTS, copy_passage, passage, text_of
from ..routes import device_name, of_device
from ..spec import ITEM_BYTES
from .options import CacheDir, GroupSize, Model, load_model, parse_counts
from .terminal import Terminal, format_bytes, format_seconds, make_table

app = typer.Typer(help="Measure on this machine, mlx-lm beside ours.", no_args_is_help=True, rich_markup_mode=None)

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
        _print_memory(terminal, rows, quant)
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
        _print_handoff(terminal, rows, quant)
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
        _print_decode(terminal, rows, quant)
    _finish(terminal, "decode", model, rows)


@app.command()
def latency(
    model: Model = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt that is prefilled meanwhile.", min=64)] = 4000,
    shared: Annotated[int, typer.Option(help="Tokens behind the agent that decodes.", min=64)] = 512,
    step_tokens: Annotated[str, typer.Option(help="Tokens of one step, comma separated.")] = "64,256",
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
        lm, prompt_tokens=tokens, shared_tokens=shared, step_tokens=sizes, quant=quant, note=terminal.note
    )
    if not json_only:
        _print_latency(terminal, rows)
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
        _print_restore(terminal, rows, quant)
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
        terminal.note("no Metal device: the kernel is left out")
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
    if not json_only:
        _print_attention(terminal, rows, read_bandwidth())
    if save:
        terminal.note(f"kept for {device_name()}: {table_of(rows).save()}")
    _finish(terminal, "attention", f"one layer of {heads} heads, {kv_heads} KV heads, head dim {head_dim}", rows)


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
        _print_fidelity(terminal, rows, list(texts), dtype)
    _finish(terminal, "fidelity", model, rows)


def _finish(terminal: Terminal, name: str, model: str | None, rows: Sequence[Any]) -> None:
    found = report(name, model or DEFAULT_MODEL, [dataclasses.asdict(row) for row in rows])
    print(json.dumps(found), file=terminal.out.file)


Line = tuple[str, Callable[[Any], str]]


def _print_rows(terminal: Terminal, title: str, head: Line, rows: Sequence[Any], lines: list[Line]) -> None:
    """A column for each row of results, which keeps within 80 characters."""
    _print_place(terminal, title)
    name, show = head
    table = make_table(terminal, name, *map(show, rows))
    for name, show in lines:
        table.add_row(name, *map(show, rows))
    terminal.out.print(table)


def _or_refused(value: Any, show: Callable[[Any], str]) -> str:
    """mlx-lm refuses to quantize the caches of some models: those with sliding windows."""
    return "refused" if value is None else show(value)


def _print_place(terminal: Terminal, title: str) -> None:
    place = ", ".join(f"{key} {value}" for key, value in (machine() | versions()).items())
    terminal.line(f"{title}\n{place}")


def _print_memory(terminal: Terminal, rows: list[MemoryRow], quant: QuantSpec) -> None:
    lines: list[Line] = [
        ("shared tokens", lambda row: str(row.shared_tokens)),
        ("private tokens of each", lambda row: str(row.private_tokens)),
        ("ours", lambda row: format_bytes(row.ours_bytes)),
        ("ours / floor", lambda row: f"{row.ours_bytes / row.floor_bytes:.3f}"),
        ("ours, for each agent more", lambda row: format_bytes(row.ours_extra_per_agent_bytes)),
        ("mlx-lm, full precision", lambda row: format_bytes(row.stock_bytes)),
        (f"mlx-lm, {quant.k_bits} bit", lambda row: _or_refused(row.stock_quantized_bytes, format_bytes)),
        ("mlx-lm / ours", lambda row: f"{row.stock_bytes / row.ours_bytes:.1f}"),
        (
            f"mlx-lm {quant.k_bits} bit / ours",
            lambda row: _or_refused(row.stock_quantized_bytes, lambda count: f"{count / row.ours_bytes:.1f}"),
        ),
    ]
    title = f"Live KV bytes, {quant}; floor: the packed prefix and the private tokens at their exact length"
    _print_rows(terminal, title, ("agents", lambda row: str(row.agents)), rows, lines)


def _print_handoff(terminal: Terminal, rows: list[HandoffRow], quant: QuantSpec) -> None:
    lines: list[Line] = [
        ("handoff", lambda row: format_seconds(row.handoff_seconds)),
        ("bytes copied", lambda row: str(row.bytes_copied)),
        ("bytes referenced", lambda row: format_bytes(row.bytes_referenced)),
        ("first token: after the handoff", lambda row: format_seconds(row.ttft_handoff_seconds)),
        ("- own hot cache (mlx-lm)", lambda row: format_seconds(row.ttft_hot_seconds)),
        ("- deep-copied cache (mlx-lm)", lambda row: format_seconds(row.ttft_deepcopy_seconds)),
        ("- re-prefill (mlx-lm)", lambda row: format_seconds(row.ttft_reprefill_seconds)),
        ("handoff / hot", lambda row: f"{row.hot_ratio:.2f}"),
        ("re-prefill / handoff", lambda row: f"{row.reprefill_ratio:.1f}"),
        ("decode, a token: ours", lambda row: format_seconds(row.decode_seconds_per_token)),
        (
            f"- mlx-lm, {quant.k_bits} bit",
            lambda row: _or_refused(row.decode_stock_quantized_seconds_per_token, format_seconds),
        ),
        ("- mlx-lm, full precision", lambda row: format_seconds(row.decode_stock_seconds_per_token)),
    ]
    title = f"Handoff by reference, {quant}, then a turn of {rows[0].turn_tokens} tokens"
    _print_rows(terminal, title, ("tokens", lambda row: str(row.tokens)), rows, lines)


def _print_decode(terminal: Terminal, rows: list[DecodeRow], quant: QuantSpec) -> None:
    lines: list[Line] = [
        ("shared tokens", lambda row: str(row.shared_tokens)),
        ("tokens/s: ours", lambda row: f"{row.ours_tokens_per_second:.1f}"),
        ("- mlx-lm, batch", lambda row: f"{row.stock_batch_tokens_per_second:.1f}"),
        ("- mlx-lm, in turn", lambda row: f"{row.stock_sequential_tokens_per_second:.1f}"),
        (
            f"- mlx-lm, in turn, {quant.k_bits} bit",
            lambda row: _or_refused(row.stock_quantized_tokens_per_second, lambda rate: f"{rate:.1f}"),
        ),
        ("ours / mlx-lm batch", lambda row: f"{row.speedup_vs_stock_batch:.2f}"),
        ("live bytes: ours", lambda row: format_bytes(row.ours_live_bytes)),
        ("- floor", lambda row: format_bytes(row.floor_bytes)),
        ("- mlx-lm, batch", lambda row: format_bytes(row.stock_batch_live_bytes)),
        ("KV read a step: ours", lambda row: format_bytes(row.kv_bytes_read_per_step)),
        ("- mlx-lm, batch", lambda row: format_bytes(row.kv_bytes_read_per_step_stock)),
    ]
    title = f"Agents that decode together, {quant}; mlx-lm's BatchGenerator in full precision"
    for start in range(0, len(rows), 4):  # four columns keep within 80 characters
        part = rows[start : start + 4]
        _print_rows(terminal, title, ("agents", lambda row: str(row.agents)), part, lines)


def _print_restore(terminal: Terminal, rows: list[RestoreRow], quant: QuantSpec) -> None:
    def quantized(name: str, show: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda row: _or_refused(getattr(row, name), show)

    packed = f"- mlx-lm, {quant.k_bits} bit"
    lines: list[Line] = [
        ("card, on disk", lambda row: format_bytes(row.card_bytes)),
        ("- of packed bytes", lambda row: f"{row.card_ratio:.4f}"),
        ("- mlx-lm, full precision", lambda row: format_bytes(row.stock_file_bytes)),
        (packed, quantized("stock_quantized_file_bytes", format_bytes)),
        ("save, to the disk", lambda row: format_seconds(row.save_seconds)),
        ("- mlx-lm, full precision", lambda row: format_seconds(row.stock_save_seconds)),
        ("- the same, to the disk", lambda row: format_seconds(row.stock_synced_save_seconds)),
        (packed, quantized("stock_quantized_save_seconds", format_seconds)),
        ("- the same, to the disk", quantized("stock_quantized_synced_save_seconds", format_seconds)),
        ("load, every byte verified", lambda row: format_seconds(row.load_seconds)),
        ("- mlx-lm, full precision", lambda row: format_seconds(row.stock_load_seconds)),
        (packed, quantized("stock_quantized_load_seconds", format_seconds)),
        ("verify alone", lambda row: format_seconds(row.verify_seconds)),
        ("save + load / mlx-lm, full", lambda row: f"{row.ratio:.2f}"),
        ("- its save to the disk", lambda row: f"{row.synced_ratio:.2f}"),
        ("- a byte", lambda row: f"{row.per_byte_ratio:.2f}"),
        ("- a byte, to the disk", lambda row: f"{row.synced_per_byte_ratio:.2f}"),
        (f"- a byte / {quant.k_bits} bit", quantized("quantized_per_byte_ratio", "{:.2f}".format)),
        (
            f"- a byte / {quant.k_bits} bit, to the disk",
            quantized("quantized_synced_per_byte_ratio", "{:.2f}".format),
        ),
        ("first token: restored", lambda row: format_seconds(row.ttft_restore_seconds)),
        ("- re-prefill (mlx-lm)", lambda row: format_seconds(row.ttft_reprefill_seconds)),
        ("re-prefill / restored", lambda row: f"{row.reprefill_ratio:.1f}"),
    ]
    title = f"Cards, {quant}, then a turn of {rows[0].turn_tokens} tokens; logits are bit-equal"
    _print_rows(terminal, title, ("tokens", lambda row: str(row.tokens)), rows, lines)


def _print_latency(terminal: Terminal, rows: list[LatencyRow]) -> None:
    _print_place(terminal, f"Time between an agent's tokens while {rows[0].prompt_tokens} tokens are prefilled")
    table = make_table(terminal, "prefill", "a step", "tokens", "median", "p95", "longest", "in all")
    for row in rows:
        size = "-" if row.step_tokens is None else str(row.step_tokens)
        times = (row.median_seconds, row.p95_seconds, row.longest_seconds, row.prefill_seconds)
        table.add_row(row.way, size, str(row.num_gaps), *map(format_seconds, times))
    terminal.out.print(table)


def _print_fidelity(terminal: Terminal, rows: list[FidelityRow], texts: list[str], dtype: str) -> None:
    _print_place(terminal, f"Full precision against packed prefixes, {dtype} caches; mean KL of {', '.join(texts)}")
    table = make_table(terminal, "setting", "bits", "mean KL", "p99", "top-1", "perplexity, %", "recall")
    for row in rows:
        bits = f"{row.bits_per_value:.2f}"
        if row.kl_mean is None:
            table.add_row(row.config, bits, "refused", "", "", "", "")
            continue
        means = "\n".join(f"{value:.1e}" for value in row.kl_by_passage.values())
        growth = f"{row.ppl_delta_percent:+.2f}"
        if row.ppl_delta_interval is not None:
            growth += f" ±{(row.ppl_delta_interval[1] - row.ppl_delta_interval[0]) / 2:.2f}"
        recall = "-" if row.recall is None else f"{row.recall:.1%}"
        table.add_row(row.config, bits, means, f"{row.kl_p99:.1e}", f"{row.top1_agreement:.3f}", growth, recall)
    terminal.out.print(table)
    terminal.line(
        "bits: of a value, all in, of a 16-bit model. perplexity: how much it grew, with its 95 % interval.\n"
        "recall: of the tokens of a copy in random order."
    )


def _print_attention(terminal: Terminal, rows: list[AttentionRow], ceiling: float) -> None:
    _print_place(terminal, "Milliseconds of one layer's attention, and the route to take")
    table = make_table(terminal, "L x N", "bits", "tokens", "packed", "unpack", "kernel", "full", "GB/s", "route")
    for row in rows:
        times = ["-" if value is None else f"{value:.3g}" for value in row.cold_milliseconds.values()]
        speed = row.cold_gigabytes_per_second[row.route] or 0.0
        shape = (f"{row.queries} x {row.sessions}", str(row.bits), str(row.tokens))
        table.add_row(*shape, *times, f"{speed:.2f}", row.route)
    terminal.out.print(table)
    terminal.line(
        "L new tokens of each of N agents. unpack: dequantized for this call. full: never packed,\n"
        "a copy for each agent. Memory is cold, as in a model; the JSON line has warm times, too.\n"
        f"GB/s: what the route must read in that time; a plain copy moves {ceiling / 1e9:.1f} GB/s here."
    )
