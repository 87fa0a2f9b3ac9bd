"""The router's table: which way of attention was the fastest where it was measured, and on which device.

Letters: Hk KV heads, R query heads of one KV head, L new tokens.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from .errors import InvalidValueError
from .folders import default_cache_dir, written_whole

Kind = Literal["one", "batch"]
"""One session with L new tokens, or several that decode one token each."""


class Route(enum.Enum):
    """How one attention call reads the packed prefix."""

    PACKED = "packed"
    """Scores and outputs part by part, by `quantized_matmul` on the packed bytes (a CPU converts whole bytes first)."""
    DEQUANTIZE = "dequantize"
    """This layer's parts are unpacked and joined, transiently, for `mx.fast.scaled_dot_product_attention`."""
    KERNEL = "kernel"
    """One Metal kernel for each part, which reads every packed byte once for all rows, and one that merges them."""


@dataclass(frozen=True)
class Decision:
    """The router's choice for one call, and why. `print` it."""

    route: Route
    reason: str

    def __str__(self) -> str:
        return f"{self.route.value}: {self.reason}"


@dataclass(frozen=True)
class RoutePoint:
    """What was the fastest at one point: `rows` query rows for each KV head (R * L, or R * sessions), `tokens` shared
    tokens, `bits` of keys or values, the larger. `milliseconds` for a layer, by name of the route."""

    kind: Kind
    bits: int
    rows: int
    tokens: int
    route: Route
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ("one", "batch") or min(self.bits, self.rows, self.tokens) <= 0:
            raise InvalidValueError(f"[RoutePoint] expected kind one or batch and counts above 0, got {self}")

    def distance(self, bits: int, rows: int, tokens: int) -> tuple[float, float]:
        """How far away, as ratios: bits first, since they change the work for each value."""
        there = math.log2(max(rows, 1) / self.rows), math.log2(max(tokens, 1) / self.tokens)
        return abs(math.log2(bits / self.bits)), abs(there[0]) + abs(there[1])


@dataclass(frozen=True, eq=False)
class RouteTable:
    """Points for `device`, and where they are from. `qkvshare bench attention --save` measures and keeps one, `print`
    shows it."""

    device: str
    points: tuple[RoutePoint, ...]
    source: str = "measured here"

    def __post_init__(self) -> None:
        if missing := {"one", "batch"} - {point.kind for point in self.points}:
            raise InvalidValueError(f"[RouteTable] expected points of both kinds, got none of {sorted(missing)}")

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def decide(self, kind: Kind, *, bits: int, rows: int, tokens: int) -> Decision:
        """The route of the nearest point. Decisions are remembered: tables are few and live as long as the process."""
        near = min((p for p in self.points if p.kind == kind), key=lambda p: p.distance(bits, rows, tokens))
        asked = f"{rows} rows per KV head, {tokens} shared tokens, {bits} bits"
        place = f"{near.rows} rows, {near.tokens} tokens, {near.bits} bits"
        return Decision(near.route, f"{asked}; nearest point ({self.device}, {self.source}): {place}")

    def __str__(self) -> str:
        head = f"{self.device}, {self.source}"
        lines = [f"{'kind':<6}{'bits':>5}{'rows':>6}{'tokens':>8}  route"]
        for point in self.points:
            times = ", ".join(f"{name} {value:.3g}" for name, value in point.milliseconds.items())
            line = f"{point.kind:<6}{point.bits:>5}{point.rows:>6}{point.tokens:>8}  {point.route.value}"
            lines.append(f"{line:<40}{f' (ms: {times})' if times else ''}".rstrip())
        return "\n".join([head, *lines])

    def save(self, path: Path | None = None) -> Path:
        """Write it to `path`, by default where `of_device` looks; returns the path. Raises `OSError`."""
        path = path or _stored_at(self.device)
        points = [{**vars(point), "route": point.route.value} for point in self.points]
        text = json.dumps({"format": 1, "device": self.device, "points": points}, indent=1)
        with written_whole(path) as partial:
            partial.write_text(text, encoding="utf-8")
        of_device.cache_clear()
        return path

    @staticmethod
    def load(path: Path) -> RouteTable:
        """Raises `InvalidValueError` that names the file if it holds no table, `OSError` if it cannot be read."""
        text = path.read_text(encoding="utf-8")
        try:
            found: dict[str, Any] = json.loads(text)
            points = [RoutePoint(**{**point, "route": Route(point["route"])}) for point in found["points"]]
            return RouteTable(found["device"], tuple(points))
        except (ValueError, KeyError, TypeError, InvalidValueError) as error:
            raise InvalidValueError(
                f"[RouteTable] {path}: expected a table of `bench attention --save`, got {error!r}"
            ) from error


def device_name() -> str:
    """What a table belongs to: the GPU's name, or the kind of CPU that MLX computes on."""
    return _name_of(mx.default_device().type == mx.gpu)


@functools.cache
def _name_of(is_gpu: bool) -> str:
    return str(mx.device_info()["device_name"]) if is_gpu else f"CPU {platform.machine()}"


def _stored_at(device: str) -> Path:
    slug = "".join(c if c.isalnum() else "-" for c in device.lower())
    return default_cache_dir() / f"routes-{slug}.json"


@functools.cache
def of_device(device: str) -> RouteTable:
    """The table that was saved for `device` on this machine, else the one that comes with the package.

    A file that cannot be read counts as none: a turn must not fail for the sake of its speed.
    """
    try:
        stored = RouteTable.load(_stored_at(device))
    except (OSError, InvalidValueError):
        return shipped(device)
    return stored if stored.device == device else shipped(device)


def shipped(device: str) -> RouteTable:
    """What is taken where nothing was measured: few rows read packed bytes, many pay for one unpacking (mlx-lm #1510,
    unsloth-zoo #1151), and no kernel of ours is taken before its device has shown that it wins."""
    if device == "CPU x86_64":
        # The crossovers of `bench attention --heads 9 --kv-heads 3 --head-dim 64`; whole bytes are converted on both
        # ways of a batch, which there makes no difference.
        ends: dict[tuple[Kind, int], tuple[int, int]] = {
            ("one", 8): (48, 192), ("one", 4): (6, 16), ("batch", 8): (48, 192), ("batch", 4): (6, 12),
        }  # fmt: skip
        source = "measured on another one"
    else:
        ends = {("one", 8): (8, 18), ("batch", 8): (8, 18)}
        source = "assumed, not measured"
    points = []
    for (kind, bits), (few, many) in ends.items():
        points.append(RoutePoint(kind, bits, few, 2048, Route.PACKED))
        points.append(RoutePoint(kind, bits, many, 2048, Route.DEQUANTIZE))
    return RouteTable(device, tuple(points), source)
