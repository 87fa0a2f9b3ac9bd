"""The tables of `qkvshare bench`, which keep within 80 characters or so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import QuantSpec
from ..bench import HandoffRow, MemoryRow
from ..bench_attention import COLD_BYTES, AttentionRow, crossovers
from ..bench_decode import DecodeRow
from ..bench_latency import LatencyRow
from ..bench_prefill import PrefillRow
from ..bench_restore import RestoreRow
from ..fidelity import FidelityRow
from ..measure import machine, versions
from .terminal import Terminal, format_bytes, format_seconds, make_table

Line = tuple[str, Callable[[Any], str]]


def _print_rows(terminal: Terminal, title: str, head: Line, rows: Sequence[Any], lines: list[Line]) -> None:
    """A column for each row of results, which keeps within 80 characters."""
    print_place(terminal, title)
    name, show = head
    table = make_table(terminal, name, *map(show, rows))
    for name, show in lines:
        table.add_row(name, *map(show, rows))
    terminal.out.print(table)


def _or_refused(value: Any, show: Callable[[Any], str]) -> str:
    """mlx-lm refuses to quantize the caches of some models: those with sliding windows."""
    return "refused" if value is None else show(value)


def print_place(terminal: Terminal, title: str) -> None:
    place = ", ".join(f"{key} {value}" for key, value in (machine() | versions()).items())
    terminal.line(f"{title}\n{place}")


def print_memory(terminal: Terminal, rows: list[MemoryRow], quant: QuantSpec) -> None:
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


def print_handoff(terminal: Terminal, rows: list[HandoffRow], quant: QuantSpec) -> None:
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


def print_decode(terminal: Terminal, rows: list[DecodeRow], quant: QuantSpec) -> None:
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


def print_restore(terminal: Terminal, rows: list[RestoreRow], quant: QuantSpec) -> None:
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


def print_prefill(terminal: Terminal, rows: list[PrefillRow], quant: QuantSpec) -> None:
    lines: list[Line] = [
        ("peak: ours, sealed at the end", lambda row: format_bytes(row.ours_peak_bytes)),
        ("- mlx-lm, full precision", lambda row: format_bytes(row.stock_peak_bytes)),
        (f"- mlx-lm, {quant.k_bits} bit", lambda row: _or_refused(row.stock_quantized_peak_bytes, format_bytes)),
        ("ours / mlx-lm, full", lambda row: f"{row.ratio:.3f}"),
        ("time: ours, sealed at the end", lambda row: format_seconds(row.ours_seconds)),
        ("- mlx-lm, full precision", lambda row: format_seconds(row.stock_seconds)),
        (f"- mlx-lm, {quant.k_bits} bit", lambda row: _or_refused(row.stock_quantized_seconds, format_seconds)),
        ("ours / mlx-lm, full", lambda row: f"{row.time_ratio:.2f}"),
    ]
    title = f"Prefill in steps of 512 tokens, {quant}; peak bytes above the weights"
    _print_rows(terminal, title, ("tokens", lambda row: str(row.tokens)), rows, lines)


def print_latency(terminal: Terminal, rows: list[LatencyRow]) -> None:
    print_place(terminal, f"Time between an agent's tokens while {rows[0].prompt_tokens} tokens are prefilled")
    table = make_table(terminal, "prefill", "a step", "tokens", "median", "p95", "longest", "in all")
    for row in rows:
        size = "-" if row.step_tokens is None else str(row.step_tokens)
        times = (row.median_seconds, row.p95_seconds, row.longest_seconds, row.prefill_seconds)
        table.add_row(row.way, size, str(row.num_gaps), *map(format_seconds, times))
    terminal.out.print(table)
    for row in rows:
        if row.p95_ratio is not None:
            terminal.line(f"p95, interleaved / mlx-lm, {row.step_tokens} tokens a step: {row.p95_ratio:.2f}")


def print_fidelity(terminal: Terminal, rows: list[FidelityRow], texts: list[str], dtype: str) -> None:
    print_place(terminal, f"Full precision against packed prefixes, {dtype} caches; mean KL of {', '.join(texts)}")
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


_SHOWN = {"packed": "packed", "dequantize": "unpack", "kernel": "kernel", "full_precision": "full"}


def print_attention(terminal: Terminal, rows: list[AttentionRow], bandwidth: float) -> None:
    print_place(terminal, "One layer's attention by every route, and the route to take")
    for bits, tokens in dict.fromkeys((row.bits, row.tokens) for row in rows):
        part = [row for row in rows if (row.bits, row.tokens) == (bits, tokens)]
        for what, field in (("ms", "milliseconds"), ("GB/s", "gigabytes_per_second")):
            terminal.line(f"{bits} bits, {tokens} tokens: {what}, cold / warm", style="bold")
            _print_routes(terminal, part, field)
    terminal.line(
        "new tokens: of one agent, or of a batch of agents with one each. packed: decomposed, on the packed\n"
        "bytes. unpack: dequantized for this call, then MLX's fused attention. full: never packed, a copy for\n"
        f"each agent. cold: after {format_bytes(COLD_BYTES)} of other memory were read, as what lies between two\n"
        "uses of a layer in a model: by that goes the route to take. GB/s: what the route must read, in that\n"
        f"time; adding arrays of that size moves {bandwidth:.1f} GB/s here, which what is warm, or only reads, may\n"
        "exceed.\n"
    )
    terminal.line("Crossovers that the router should use (rows: new tokens or sessions x query heads of a KV head)")
    for crossover in crossovers(rows):
        terminal.line(f"- {crossover}")


def _print_routes(terminal: Terminal, rows: Sequence[AttentionRow], field: str) -> None:
    table = make_table(terminal, "new tokens", *_SHOWN.values(), "to take")
    for row in rows:
        cold, warm = (getattr(row, f"{memory}_{field}") for memory in ("cold", "warm"))
        cells = ["-" if cold[key] is None else f"{cold[key]:.2g} / {warm[key]:.2g}" for key in _SHOWN]
        asked = str(row.queries) if row.kind == "one" else f"batch of {row.sessions}"
        table.add_row(asked, *cells, _SHOWN[row.route])
    terminal.out.print(table)
