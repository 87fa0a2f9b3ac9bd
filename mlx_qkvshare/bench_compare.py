"""Two sets of results of `qkvshare bench all`, figure by figure: what grew, what slowed down, what got worse."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import InvalidValueError

FORMAT = 1
BYTES_LIMIT = 1.01
"""Bytes are counted, not timed: any growth beyond this is a regression."""
NOISE = 1.5
"""A time that grew by more than this, beside mlx-lm's own in the same run, is called slower."""
KL_LIMIT, KL_LEAST = 1.1, 1e-6
"""Mean KL may grow by this factor, or by so many nats."""
SHARE_LIMIT = 0.01
"""How much of its share top-1 agreement or recall may lose."""

Kind = Literal["bytes", "time", "rate", "kl", "share"]

_KEYS = {
    "memory": ("agents", "shared_tokens", "private_tokens"),
    "handoff": ("tokens", "turn_tokens"),
    "decode": ("agents", "shared_tokens", "private_tokens"),
    "prefill": ("tokens",),
    "attention": ("kind", "bits", "sessions", "queries", "tokens"),
    "restore": ("tokens", "turn_tokens"),
    "fidelity": ("config",),
}
_MACHINE = ("system", "processor", "cores", "device", "chip")
_STOCK_WORDS = ("stock", "hot", "deepcopy", "reprefill", "full_precision", "floor")


@dataclass(frozen=True)
class Figure:
    """One number of one row: `place` names bench and row, `is_ours` tells it from mlx-lm's."""

    place: str
    name: str
    kind: Kind
    is_ours: bool
    value: float


@dataclass(frozen=True)
class Change:
    """A figure of ours in two sets of results. `ratio` is new / old. `verdict`: "" for as before, "regression" of bytes
    or quality, "slower", or "better"."""

    place: str
    name: str
    kind: Kind
    old: float
    new: float
    ratio: float
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """`drift` is the median ratio of mlx-lm's times, by which ours are judged; None where the machines differ or none
    can be compared: then no time is called slower. `missing` are figures that are no longer there."""

    changes: tuple[Change, ...]
    drift: float | None
    missing: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict == "regression")


def read_results(path: Path) -> dict[str, Any]:
    """What `qkvshare bench all` wrote. Raises `InvalidValueError` that names the file if it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["bench"] != "all" or found["format"] != FORMAT:
            raise ValueError(f"bench {found['bench']!r}, format {found['format']!r}")
        for name, result in found["results"].items():
            for row in result["rows"]:
                _place(name, row)
        return dict(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidValueError(f"[compare] {path}: expected results of `bench all`, got {error!r}") from error


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, noise: float = NOISE) -> Comparison:
    """Every figure of ours that both have.

    Raises:
        InvalidValueError: they are of different models, or `noise` is below 1.
    """
    if noise < 1:
        raise InvalidValueError(f"[compare] noise: expected a factor of 1 or more, got {noise}")
    if old["model"] != new["model"]:
        raise InvalidValueError(f"[compare] model: expected results of {new['model']}, got those of {old['model']}")
    before, after = ({(it.place, it.name): it for it in figures(side)} for side in (old, new))
    pairs = [(before[key], it) for key, it in after.items() if key in before]
    is_same = all(old["machine"].get(name) == new["machine"].get(name) for name in _MACHINE)
    times = [_slowdown(*pair) for pair in pairs if is_same and not pair[0].is_ours and pair[0].kind in ("time", "rate")]
    drift = statistics.median(times) if times else None
    changes = tuple(_change(*pair, drift, noise) for pair in pairs if pair[0].is_ours)
    missing = tuple(
        f"{place}: {name}" for (place, name), it in before.items() if it.is_ours and (place, name) not in after
    )
    return Comparison(changes, drift, missing)


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Every number that can get better or worse."""
    for bench, result in results["results"].items():
        for row in result["rows"]:
            place = _place(bench, row)
            for name, value in _flat(row):
                kind = _kind(name)
                if kind is not None and value is not None:
                    is_ours = not any(word in name for word in _STOCK_WORDS) and "mlx-lm" not in place
                    yield Figure(place, name, kind, is_ours, float(value))


def _place(bench: str, row: Mapping[str, Any]) -> str:
    return " ".join([bench, *(f"{name} {row[name]}" for name in _KEYS.get(bench, ()))])


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", it) for inner, it in value.items())
        elif value is None or isinstance(value, int | float):
            yield name, value


def _kind(name: str) -> Kind | None:
    if "gigabytes" in name:  # another word for a time
        return None
    if "tokens_per_second" in name:
        return "rate"
    if "bytes" in name:
        return "bytes"
    if "seconds" in name:
        return "time"
    return "kl" if name == "kl_mean" else "share" if name in ("top1_agreement", "recall") else None


def _ratio(old: float, new: float) -> float:
    if old == new:
        return 1.0
    return new / old if old else math.inf


def _slowdown(old: Figure, new: Figure) -> float:
    return _ratio(old.value, new.value) if old.kind == "time" else _ratio(new.value, old.value)


def _change(old: Figure, new: Figure, drift: float | None, noise: float) -> Change:
    ratio = _ratio(old.value, new.value)
    if old.kind in ("time", "rate"):
        slowdown = None if drift is None else _slowdown(old, new) / drift
        verdict = "" if slowdown is None else "slower" if slowdown > noise else "better" if slowdown < 1 / noise else ""
    else:
        loss = _loss(old, new)
        verdict = "regression" if loss > 0 else "better" if _loss(new, old) > 0 else ""
    return Change(new.place, new.name, new.kind, old.value, new.value, ratio, verdict)


def _loss(old: Figure, new: Figure) -> float:
    """Above 0 if `new` is beyond what is allowed."""
    if old.kind == "bytes":
        return new.value - old.value * BYTES_LIMIT
    if old.kind == "kl":
        return new.value - max(old.value * KL_LIMIT, old.value + KL_LEAST)
    return old.value - new.value - SHARE_LIMIT


def worst_first(changes: Sequence[Change]) -> list[Change]:
    """Regressions, then what is slower, then all else; each in the order of the results."""
    order = {"regression": 0, "slower": 1}
    return sorted(changes, key=lambda it: order.get(it.verdict, 2))
