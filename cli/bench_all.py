"""`qkvshare bench all`: all of it in one go, a summary, files to keep, and what changed since."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from .. import QuantSpec
from ..bench_all import Bench, Headline, Sizes, headlines, suite
from ..bench_compare import (
    BYTES_LIMIT,
    FORMAT,
    NOISE,
    PEAK_LIMIT,
    Change,
    Comparison,
    check_comparable,
    compare,
    read_results,
)
from ..errors import QKVShareError
from ..folders import written_whole
from ..measure import report
from ..plots import can_draw, draw
from .bench_tables import print_place
from .options import CacheDir, GroupSize, Model, load_model, model_name, parse_counts
from .terminal import Terminal, format_bytes, format_seconds, harmless, make_table, one_line

if TYPE_CHECKING:
    from ..model import LoadedModel

RESULTS = "results.json"
BEFORE = "results.old.json"


def run_all(
    model: Model = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json and plots.")] = Path("qkvshare-bench"),
    old: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            help="Results of before: print ratios; exit 1 if bytes or quality got worse, 2 if nothing compares.",
        ),
    ] = None,
    noise: Annotated[float, typer.Option(help="A time that grew by more is called slower.", min=1.0)] = NOISE,
    only: Annotated[str, typer.Option(help="Some of them, comma separated.", show_default="all")] = "",
    agents: Annotated[str, typer.Option(help="Agents, comma separated.")] = "1,2,4,8",
    tokens: Annotated[
        str, typer.Option(help="Tokens prefilled, handed over, restored, comma separated.")
    ] = "128,256,512",
    shared: Annotated[int, typer.Option(help="Tokens that agents decode on, and of the quality test.", min=64)] = 512,
    repeats: Annotated[int, typer.Option(help="Timed rounds behind each median.", min=1)] = 2,
    bits: Annotated[int, typer.Option(help="Bits of keys and values, both sides.")] = 8,
    group_size: GroupSize = 64,
    cache_dir: CacheDir = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print the JSON line alone.")] = False,
) -> None:
    """Memory, handoff, decode, prefill, attention, restore and fidelity in some minutes; with plots of them."""
    terminal = Terminal()
    sizes = Sizes(
        agents=tuple(parse_counts(agents, "agents")),
        tokens=tuple(parse_counts(tokens, "tokens")),
        shared_tokens=shared,
        repeats=repeats,
        quant=QuantSpec(bits, bits, group_size),
    )
    benches = suite([name.strip() for name in only.split(",") if name.strip()])
    before = None if old is None else read_results(old)
    lm = load_model(model, cache_dir, terminal)
    results = _empty(lm, model_name(model), sizes)
    if old is not None and before is not None:
        check_comparable(before, results)  # before minutes are spent
        _keep(terminal, old, out)
    _measure(terminal, lm, benches, sizes, results, out / RESULTS)
    found = None if before is None else compare(before, results, noise=noise)
    if not json_only:
        _print_headlines(terminal, headlines(results["results"]))
        if found is not None and found.changes:
            _print_comparison(terminal, found, noise)
    for line in () if found is None else _said(found):
        (terminal.note if json_only else terminal.line)(line)
    _draw(terminal, results, out)
    print(json.dumps(results), file=terminal.out.file)
    _exit(terminal, results["failed"], found)


def _empty(lm: LoadedModel, model: str, sizes: Sizes) -> dict[str, Any]:
    """Results of nothing yet, with all that tells whether others compare with them."""
    found = report("all", model, []) | {"format": FORMAT, "fingerprint": lm.spec.fingerprint.digest}
    return found | {"dtype": lm.spec.dtype, "settings": _settings(sizes), "results": {}, "failed": {}}


def _keep(terminal: Terminal, old: Path, out: Path) -> None:
    """The results of before are not lost where the new ones take their place."""
    if (out / RESULTS).exists() and old.samefile(out / RESULTS):
        with written_whole(out / BEFORE) as partial:
            shutil.copyfile(old, partial)
        terminal.note(harmless(f"the results of before are kept as {out / BEFORE}"))


def _measure(
    terminal: Terminal,
    lm: LoadedModel,
    benches: Mapping[str, Bench],
    sizes: Sizes,
    results: dict[str, Any],
    path: Path,
) -> None:
    """Adds to `results` all that did not fail, written anew to `path` after each: Ctrl-C loses the one that runs."""
    with _progress(terminal, len(benches)) as (begin, note):
        for name, bench in benches.items():
            begin(name)
            start = time.perf_counter()
            try:
                found = bench(lm, sizes, note)
            except Exception as error:  # whatever it is, the others' figures are not lost for it
                kind = "" if isinstance(error, QKVShareError) else f"{type(error).__name__}: "
                results["failed"][name] = f"{kind}{error}"
            else:
                results["results"][name] = found | {"seconds": time.perf_counter() - start}
            with written_whole(path) as partial:
                partial.write_text(json.dumps(results, indent=1), encoding="utf-8")


def _exit(terminal: Terminal, failed: Mapping[str, str], found: Comparison | None) -> None:
    """What went wrong, and by which exit code it is told."""
    for name, reason in failed.items():
        terminal.error(f"{name} failed: {reason}")
    if found is not None and not found.changes:
        terminal.error("[compare] nothing could be compared: no row of before is of the same sizes as one of now")
        raise typer.Exit(2)
    if failed or (found is not None and found.regressions):
        raise typer.Exit(1)


def _settings(sizes: Sizes) -> dict[str, Any]:
    return dataclasses.asdict(sizes) | {"quant": str(sizes.quant)}


@contextlib.contextmanager
def _progress(terminal: Terminal, count: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """A bar on a terminal, else a line for each step: begin a bench by its name, and note what it does."""
    begun: list[str] = []
    if not terminal.err.is_terminal or terminal.err.color_system is None:
        yield begun.append, lambda text: terminal.note(f"[{len(begun)}/{count}] {begun[-1]}: {text}")
        return
    columns = (BarColumn(20), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    # Drawn when something begins, not by a thread of its own, which would be measured, too.
    with Progress(*columns, console=terminal.err, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=count)

        def begin(name: str) -> None:
            bar.update(task, completed=len(begun), description=name, refresh=True)
            begun.append(name)

        yield begin, lambda text: bar.update(task, description=one_line(f"{begun[-1]}: {text}"), refresh=True)


# --- what is shown --------------------------------------------------------------------------------

_UNITS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "tokens/s": lambda rate: f"{rate:.1f} tok/s",
    "nats": lambda kl: f"{kl:.1e}",
}


def _print_headlines(terminal: Terminal, found: list[Headline]) -> None:
    print_place(terminal, "Ours beside mlx-lm, in one process")
    table = make_table(terminal, "ours / mlx-lm", "ours", "mlx-lm", "ours is")
    last = ""
    for it in found:
        if it.bench != last:
            table.add_row(it.bench, "", "", "")
            last = it.bench
        show = _UNITS[it.unit]
        stock = "-" if it.stock is None else show(it.stock)
        table.add_row(f"  {it.what}", show(it.ours), stock, _advantage(it))
    terminal.out.print(table)


def _advantage(it: Headline) -> str:
    """In words, so that nobody has to know which way a ratio goes."""
    if it.stock is None or not it.ours or not it.stock:
        return ""
    ratio = it.ours / it.stock if it.unit == "tokens/s" else it.stock / it.ours
    better, worse = {"bytes": ("smaller", "larger"), "nats": ("closer", "further off")}.get(
        it.unit, ("faster", "slower")
    )
    if 1 / 1.05 < ratio < 1.05:
        return "the same"
    return f"{ratio:.3g} x {better}" if ratio > 1 else f"{1 / ratio:.3g} x {worse}"


def _print_comparison(terminal: Terminal, found: Comparison, noise: float) -> None:
    table = make_table(terminal, "ours, against before", "old", "new", "ratio", "beside\nmlx-lm", "")
    last = ""
    for it in found.changes:
        if it.bench != last:
            table.add_row(it.bench, "", "", "", "", "")
            last = it.bench
        beside = "" if it.slowdown is None else f"{it.slowdown:.2f}"
        table.add_row(f"  {it.row}: {_short(it.name)}", *_values(it), f"{it.ratio:.3f}", beside, it.verdict)
    terminal.out.print(table)
    terminal.line(
        "beside mlx-lm: how much slower a time became, by mlx-lm's own in the same bench.\n"
        f"slower: a time that grew by x {noise:g}, by itself and beside mlx-lm.\n"
        f"regression: bytes x {BYTES_LIMIT:g} (a peak x {PEAK_LIMIT:g}), or worse mean KL, top-1 or recall."
    )


def _said(found: Comparison) -> Iterator[str]:
    """What follows from a comparison, line by line."""
    yield from found.notes
    for name in found.missing:
        yield f"no longer there: {name}"
    for verdict in ("slower", "regression"):
        for it in (it for it in found.changes if it.verdict == verdict):
            old, new = _values(it)
            yield f"{verdict}: {it.bench}, {it.row}: {_short(it.name)} {old} -> {new}, x {it.ratio:.3f}"
    if found.changes:
        yield f"regressions: {len(found.regressions)}"


def _short(name: str) -> str:
    """A field's name without what its unit says."""
    for word in ("ours_", "_bytes", "_milliseconds", "_seconds", "bytes_"):
        name = name.replace(word, "")
    return name.replace("_", " ").replace(".", " ")


def _values(it: Change) -> tuple[str, str]:
    unit: dict[str, Callable[[float], str]] = {
        "bytes": format_bytes,
        "time": format_seconds,
        "rate": _UNITS["tokens/s"],
        "kl": _UNITS["nats"],
        "share": lambda share: f"{share:.3f}",
    }
    scale = 1e-3 if "milliseconds" in it.name else 1
    return unit[it.kind](it.old * scale), unit[it.kind](it.new * scale)


def _draw(terminal: Terminal, results: Mapping[str, Any], out: Path) -> None:
    files = [out / RESULTS]
    if can_draw():
        files += draw(results, out)
    else:
        terminal.note("no plots: they need matplotlib, pip install 'mlx-qkvshare[plots]'")
    terminal.note(harmless(f"wrote {files[0]}" + (f" and {len(files) - 1} plots beside it" if files[1:] else "")))
