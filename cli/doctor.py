"""`qkvshare doctor`: is this machine ready, and how few bits does this model bear?"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Annotated

import mlx.core as mx
import typer

from ..doctor import (
    GOOD_KL,
    GOOD_RECALL_LOSS,
    UNSAFE_KL,
    UNSAFE_RECALL_LOSS,
    Examination,
    LayerReport,
    examine,
    harm,
    kernel_difference,
)
from ..errors import KernelBuildError
from ..fidelity import FidelityRow
from ..measure import machine, report, versions
from ..spec import PRESETS, CacheSpec, QuantSpec
from .options import CacheDir, load_model, model_name
from .terminal import ProgressLine, Terminal, make_table

_SHOWN_LAYERS = 6
_KERNEL_LIMIT = 0.02


def doctor(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As --model of the other commands.")] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the verdict: other commands follow it.")] = True,
    all_layers: Annotated[bool, typer.Option("--layers", help="Show every layer.")] = False,
    cache_dir: CacheDir = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print one JSON line alone.")] = False,
) -> None:
    """Check this machine, try every preset on the model's own keys and values, and say which to take."""
    terminal = Terminal()
    loaded = load_model(model, cache_dir, terminal)
    kernel = _kernel_check(loaded.spec)
    with contextlib.closing(ProgressLine(terminal)) as progress:
        found = examine(loaded, note=lambda what: progress(what, 0, 0))
    if json_only:
        rows = [dataclasses.asdict(row) for row in found.rows]
        extra = {
            "kernel": kernel,
            "preset": found.verdict.preset,
            "calibrated": found.verdict.calibrated,
            "refused": [[str(it.quant), it.has_factors, it.reason] for it in found.verdict.refusals],
            "recall_full_precision": found.recall,
            "layers": [dataclasses.asdict(layer) for layer in found.layers],
        }
        print(json.dumps(report("doctor", model_name(model), rows) | extra), file=terminal.out.file)
    else:
        _print(terminal, found, kernel, all_layers)
    if save:
        terminal.note(f"kept for chat, demo, serve and the library: {found.verdict.save(loaded.spec)}")


def _print(terminal: Terminal, found: Examination, kernel: str, all_layers: bool) -> None:
    terminal.line(", ".join(f"{key} {value}" for key, value in (machine() | versions()).items()))
    terminal.line(f"kernels: {kernel}\n")
    _print_rows(terminal, found)
    _print_layers(terminal, found.layers, all_layers)
    for line in _conclusions(found):
        terminal.line(line)


def _kernel_check(spec: CacheSpec) -> str:
    try:
        difference = kernel_difference(spec)
    except KernelBuildError as error:
        return f"FAILED: {error}"
    if difference is None:
        return f"not checked, since there is no Metal device; MLX computes on {mx.default_device()}"
    return f"{'ok' if difference <= _KERNEL_LIMIT else 'FAILED'}, within {difference:.2g} of plain MLX operations"


def _print_rows(terminal: Terminal, found: Examination) -> None:
    table = make_table(terminal, "setting", "bits a\nvalue", "mean KL", "p99 KL", "top-1", "ppl, %", "recall", "")
    refused = [(it.quant, it.has_factors) for it in found.verdict.refusals]
    for row, (quant, has_factors) in zip(found.rows, found.settings, strict=True):
        verdict = "refused" if (quant, has_factors) in refused else _mark(found, quant, has_factors)
        table.add_row(row.config, f"{row.bits_per_value:.2f}", *_measured(row), verdict)
    terminal.out.print(table)


def _mark(found: Examination, quant: QuantSpec, has_factors: bool) -> str:
    name = found.verdict.preset
    is_it = name in PRESETS and quant == PRESETS[name] and has_factors == (name in found.verdict.calibrated)
    return "take this" if is_it else ""


def _measured(row: FidelityRow) -> list[str]:
    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    growth = "-" if row.ppl_delta_percent is None else f"{row.ppl_delta_percent:+.2f}"
    recall = show(row.recall, ".1%")
    return [show(row.kl_mean, ".1e"), show(row.kl_p99, ".1e"), show(row.top1_agreement, ".3f"), growth, recall]


def _print_layers(terminal: Terminal, layers: tuple[LayerReport, ...], all_layers: bool) -> None:
    shown = (
        layers if all_layers else sorted(layers, key=lambda it: -(it.key_error or it.channel_outlier))[:_SHOWN_LAYERS]
    )
    title = "layer" if all_layers else "worst layers"
    table = make_table(terminal, title, "loudest\nchannel", "error, keys\nat 4 bits", "error, values\nat 4 bits")
    for layer in shown:
        errors = ["-" if e is None else f"{e:.3f}" for e in (layer.key_error, layer.value_error)]
        table.add_row(str(layer.layer), f"{layer.channel_outlier:.1f} x", *errors)
    terminal.out.print(table)


def _conclusions(found: Examination) -> list[str]:
    rows, verdict = {row.config: row for row in found.rows}, found.verdict
    keys, values = rows[str(QuantSpec(4, 8))], rows[str(QuantSpec(8, 4))]
    lines = []
    if keys.kl_mean and values.kl_mean:
        ratio = keys.kl_mean / values.kl_mean
        lines.append(f"4-bit keys cost {ratio:.1f} times the KL of 4-bit values, packed plainly.")
    if found.recall is not None:
        lines.append(f"In full precision it recalls {found.recall:.1%} of the copied tokens.")
    name = verdict.preset
    pairs = zip(found.rows, found.settings, strict=True)
    best = next((row for row, setting in pairs if _mark(found, *setting)), None)
    if best is None:
        lines.append("verdict: full, since every preset damages this model: nothing is quantized")
    elif harm(best, found.recall, GOOD_KL, GOOD_RECALL_LOSS):
        lines.append(f"verdict: {name}, the least harmful preset; none stays below a mean KL of {GOOD_KL:g}")
    else:
        lines.append(f"verdict: {name}, the smallest preset that nobody will notice (mean KL below {GOOD_KL:g})")
    if verdict.calibrated:
        lines.append(f"with key factors, which lower the KL: {', '.join(verdict.calibrated)}")
    for it in verdict.refusals:
        name = f"{it.quant}{', factors' if it.has_factors else ''}"
        lines.append(f"refused: {name}, and anything coarser of its kind: {it.reason}")
    if not verdict.refusals:
        lines.append(
            f"refused: nothing (mean KL above {UNSAFE_KL:g}, or {UNSAFE_RECALL_LOSS:.0%} of what is recalled lost)"
        )
    else:
        lines.append("--unsafe (allow_unsafe in the library) takes what is refused.")
    return lines
