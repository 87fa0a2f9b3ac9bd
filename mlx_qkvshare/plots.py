"""Plots of what `qkvshare bench all` found, for light and for dark pages. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folders import written_whole

FORMATS = ("png", "svg")
_SIZE, _DPI = (7.2, 4.4), 160  # inches
_MIB = 2**20


@dataclass(frozen=True)
class Theme:
    """Colours of a page and of the series on it."""

    page: str
    text: str
    faint: str
    ours: str
    full: str
    packed: str
    other: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d1d9e0", "#0969da", "#bc4c00", "#8250df", "#1a7f37"),
    "dark": Theme("#0d1117", "#e6edf3", "#30363d", "#58a6ff", "#f0883e", "#bc8cff", "#3fb950"),
}


@dataclass(frozen=True)
class Series:
    """A line: its label, the name of its colour in a `Theme`, and its points."""

    label: str
    colour: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Plot:
    """Lines over one pair of axes. `y_ticks`: where in each power of ten, written as `y_format`. `marks` are labels of
    points: (x, y, text)."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_log: bool = True
    y_log: bool = False
    y_ticks: tuple[float, ...] = (1.0,)
    y_format: str = "g"
    marks: tuple[tuple[float, float, str], ...] = ()


def can_draw() -> bool:
    """Is matplotlib installed?"""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every plot that `results` has figures for, in every theme and format; returns the files.

    Raises `ImportError` without matplotlib, `OSError` where a file cannot be written.
    """
    paths = []
    for plot in plots(results):
        for theme in THEMES:
            paths += _draw(plot, theme, folder)
    return paths


# --- what is shown --------------------------------------------------------------------------------


def plots(results: Mapping[str, Any]) -> list[Plot]:
    """Those that there are figures for."""
    rows = {name: result["rows"] for name, result in results["results"].items()}
    found = []
    for needed, make in (
        (("memory",), _memory),
        (("handoff",), _first_token),
        (("decode",), _decode),
        (("fidelity",), _quality),
    ):
        if all(rows.get(name) for name in needed):
            found.append(make(rows))
    return found


def _line(label: str, colour: str, rows: Iterable[Mapping[str, Any]], x: str, y: str, unit: float = 1) -> Series:
    """Points of the rows that have both; none where mlx-lm refused."""
    points = [(row[x], row[y] / unit) for row in rows if row[y] is not None]
    return Series(label, colour, tuple(sorted(points)))


def _lines(*series: Series) -> tuple[Series, ...]:
    """Those that have points."""
    return tuple(it for it in series if it.points)


def _memory(rows: Mapping[str, Any]) -> Plot:
    found = rows["memory"]
    tokens, private = found[0]["shared_tokens"], found[0]["private_tokens"]
    return Plot(
        "memory",
        f"Live KV bytes: {tokens:,} shared tokens, {private} of each agent's own",
        "agents",
        "live KV memory (MiB)",
        series=_lines(
            _line("ours", "ours", found, "agents", "ours_bytes", _MIB),
            _line("mlx-lm", "full", found, "agents", "stock_bytes", _MIB),
            _line("mlx-lm, quantized", "packed", found, "agents", "stock_quantized_bytes", _MIB),
        ),
    )


def _first_token(rows: Mapping[str, Any]) -> Plot:
    found = rows["handoff"]
    return Plot(
        "first-token",
        f"Time to the first token of a turn of {found[0]['turn_tokens']} tokens",
        "tokens of context",
        "time to first token (s)",
        y_log=True,
        y_ticks=(1.0, 2.0, 5.0),
        series=_lines(
            _line("ours, after a handoff", "ours", found, "tokens", "ttft_handoff_seconds"),
            _line("ours, from a card on disk", "other", rows.get("restore", ()), "tokens", "ttft_restore_seconds"),
            _line("mlx-lm, a copied cache", "packed", found, "tokens", "ttft_deepcopy_seconds"),
            _line("mlx-lm, prefilled again", "full", found, "tokens", "ttft_reprefill_seconds"),
        ),
    )


def _decode(rows: Mapping[str, Any]) -> Plot:
    found = rows["decode"]
    return Plot(
        "decode",
        f"Agents that decode together on {found[0]['shared_tokens']:,} shared tokens",
        "agents",
        "tokens per second, all agents",
        series=_lines(
            _line("ours", "ours", found, "agents", "ours_tokens_per_second"),
            _line("mlx-lm, batch", "full", found, "agents", "stock_batch_tokens_per_second"),
            _line("mlx-lm, in turn", "other", found, "agents", "stock_sequential_tokens_per_second"),
            _line("mlx-lm, in turn, quantized", "packed", found, "agents", "stock_quantized_tokens_per_second"),
        ),
    )


def _quality(rows: Mapping[str, Any]) -> Plot:
    """Only what is packed and was handed over once at most: more hops change nothing."""
    found = [row for row in rows["fidelity"] if row["k_bits"] == row["v_bits"] < 16 and row["handoffs"] <= 1]
    groups: dict[str, list[Mapping[str, Any]]] = {"presets": [], "key factors": [], "plain": [], "mlx-lm": []}
    for row in found:
        name = row["config"]
        kind = "mlx-lm" if name.startswith("mlx-lm") else "plain" if name.startswith("K") else "presets"
        groups["key factors" if name.endswith(", factors") else kind].append(row)
    labels = {
        "presets": ("ours, presets", "ours"),
        "key factors": ("ours, presets with key factors", "other"),
        "plain": ("ours, plain bits", "packed"),
        "mlx-lm": ("mlx-lm, quantized", "full"),
    }
    series = [_line(*labels[kind], group, "bytes_per_token", "kl_mean") for kind, group in groups.items()]
    # Bits are named once, over the highest point of each.
    top: dict[int, tuple[float, float]] = {}
    for row in found:
        if row["kl_mean"] is not None and row["kl_mean"] > top.get(row["k_bits"], (0.0, 0.0))[1]:
            top[row["k_bits"]] = (row["bytes_per_token"], row["kl_mean"])
    return Plot(
        "quality",
        "What packing costs: full precision against packed prefixes",
        "KV memory (bytes a token)",
        "mean KL divergence (nats)",
        series=_lines(*series),
        x_log=False,
        y_log=True,
        y_format=".0e",
        marks=tuple((x, y, f"{bits} bits") for bits, (x, y) in top.items()),
    )


# --- how it is drawn ------------------------------------------------------------------------------


def _draw(plot: Plot, theme_name: str, folder: Path) -> list[Path]:
    import matplotlib

    theme, paths = THEMES[theme_name], []
    with matplotlib.rc_context({"svg.hashsalt": plot.name, "font.size": 10}):
        figure = make_figure(plot, theme)
        for kind in FORMATS:
            path = folder / f"{plot.name}-{theme_name}.{kind}"
            metadata = {"Date": None} if kind == "svg" else None  # the same figures make the same file
            with written_whole(path) as partial:
                figure.savefig(partial, format=kind, dpi=_DPI, facecolor=theme.page, metadata=metadata)
            paths.append(path)
    return paths


def make_figure(plot: Plot, theme: Theme) -> Any:
    """matplotlib's figure of `plot`."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=_SIZE, facecolor=theme.page, layout="constrained")
    axes = figure.subplots()
    for index, series in enumerate(plot.series):
        _draw_series(axes, series, theme, index)
    for x, y, text in plot.marks:  # to the upper right, where no line of a falling curve is
        place = {"xytext": (7, 5), "textcoords": "offset points", "fontsize": 9, "zorder": 6}
        box = {"facecolor": theme.page, "edgecolor": "none", "pad": 1, "alpha": 0.8}
        axes.annotate(text, (x, y), color=theme.text, bbox=box, **place)
    _draw_axes(axes, plot, theme)
    # Below the axes, where it covers no line.
    figure.legend(frameon=False, labelcolor=theme.text, loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _draw_axes(axes: Any, plot: Plot, theme: Theme) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_facecolor(theme.page)
    axes.set_title(plot.title, color=theme.text, loc="left", fontsize=11, pad=12)
    axes.set_xlabel(plot.x_label, color=theme.text)
    axes.set_ylabel(plot.y_label, color=theme.text)
    axes.grid(color=theme.faint, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.faint)
    axes.tick_params(which="both", colors=theme.text, length=0)
    axes.margins(x=0.08, y=0.12)
    if plot.x_log:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for series in plot.series for x, _ in series.points})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    if plot.y_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=plot.y_ticks))
        axes.yaxis.set_major_formatter(lambda value, position: format(value, plot.y_format))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)  # behind the lines: the top is then theirs


_MARKERS = "osD^"


def _draw_series(axes: Any, series: Series, theme: Theme, index: int) -> None:
    """The first lies on top; shapes tell the series apart as well as colours."""
    xs, ys = zip(*series.points, strict=True)
    style = {"color": getattr(theme, series.colour), "marker": _MARKERS[index], "zorder": 5 - index / 10}
    axes.plot(xs, ys, label=series.label, markersize=5 + index, linewidth=1.8, **style)
