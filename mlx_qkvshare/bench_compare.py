"""Two sets of results of `qkvshare bench all`, figure by figure: what grew, what slowed down, what got worse."""

from __future__ import annotations

import json
import math
import reprlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import InvalidValueError

FORMAT = 1
BYTES_LIMIT = 1.01
"""Bytes are counted, not timed: any growth beyond this is a regression."""
PEAK_LIMIT = 1.05
"""Of peaks, which depend on how far MLX runs ahead of what it has computed: the same run gave 3 % more and less."""
NOISE = 1.5
"""A time that grew by more than this, by itself and beside mlx-lm's own in the same bench, is called slower."""
KL_LIMIT, KL_LEAST = 1.1, 1e-6
"""Mean KL may grow by this factor, or by so many nats."""
SHARE_LIMIT = 0.01
"""How much of its share top-1 agreement or recall may lose."""

Kind = Literal["bytes", "time", "rate", "kl", "share"]

# What results say of themselves, beside "bench" and "format".
_PARTS = {"model": str, "machine": dict, "versions": dict, "settings": dict, "results": dict}
# What tells the rows of a bench apart, and how one is called.
_ROWS = {
    "memory": (("agents", "shared_tokens", "private_tokens"), "{agents} agents"),
    "handoff": (("tokens", "turn_tokens"), "{tokens} tokens"),
    "decode": (("agents", "shared_tokens", "private_tokens"), "{agents} agents"),
    "prefill": (("tokens",), "{tokens} tokens"),
    "attention": (("kind", "bits", "sessions", "queries", "tokens"), "{bits} bits, {kind}, {queries} x {sessions}"),
    "restore": (("tokens", "turn_tokens"), "{tokens} tokens"),
    "fidelity": (("config",), "{config}"),
}
# The settings that do so, too, where the rows leave them out.
_SETTINGS = {"fidelity": ("shared_tokens",)}
_MACHINE = ("system", "processor", "cpu", "cores", "device", "chip")
_STOCK_WORDS = ("stock", "hot", "deepcopy", "reprefill", "full_precision", "floor")


@dataclass(frozen=True)
class Figure:
    """One number of one row of a bench: `key` tells the row from others, `is_ours` the number from mlx-lm's."""

    bench: str
    key: tuple[Any, ...]
    row: str
    name: str
    kind: Kind
    is_ours: bool
    value: float


@dataclass(frozen=True)
class Change:
    """A figure of ours in two sets of results. `ratio` is new / old. `slowdown`: of a time or rate, how much slower it
    is, by how much mlx-lm became slower in the same bench; None where that is not known. `verdict`: "" for as before,
    "regression" of bytes or quality, "slower", or "better"."""

    bench: str
    row: str
    name: str
    kind: Kind
    old: float
    new: float
    ratio: float
    slowdown: float | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """`drift` by bench is the median ratio of mlx-lm's times, by which ours are judged; nothing where the machines
    differ or no such time is in both: then no time is called slower, as `notes` say. `missing` are figures that are no
    longer there."""

    changes: tuple[Change, ...]
    drift: Mapping[str, float]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict == "regression")


def read_results(path: Path) -> dict[str, Any]:
    """What `qkvshare bench all` wrote. Raises `InvalidValueError` that names the file if it is something else, or has
    figures that cannot be compared."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _check(found)
    except (OSError, ValueError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise InvalidValueError(f"[compare] {path}: expected results of `bench all`, got {what}") from error
    return dict(found)


def _check(found: Any) -> None:
    """Raise `ValueError` that says what came, unless it is what `bench all` writes. A bench that is not known here may
    hold anything."""
    if not isinstance(found, dict) or (found.get("bench"), found.get("format")) != ("all", FORMAT):
        raise ValueError(reprlib.repr(found))
    for name, kind in _PARTS.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(f"{name}: {reprlib.repr(found.get(name))}")
    for bench, result in found["results"].items():
        if bench not in _ROWS:
            continue
        rows = result.get("rows") if isinstance(result, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{bench}: rows {reprlib.repr(rows)}")
        for row in rows:
            _check_row(bench, row, found["settings"])


def _check_row(bench: str, row: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    if not all(isinstance(part, str | int) for part in _key(bench, row, settings)):
        names = (*_ROWS[bench][0], *_SETTINGS.get(bench, ()))
        raise ValueError(f"{bench}: {', '.join(names)} {reprlib.repr(_key(bench, row, settings))}")
    for name, value in _flat(row):
        kind = _kind(name)
        if kind is not None and value is not None and not _is_figure(kind, value):
            raise ValueError(f"{bench}: {name} {reprlib.repr(value)}")


def _is_figure(kind: Kind, value: Any) -> bool:
    """Nothing is done in no time; rounding may leave a mean KL below 0."""
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return False
    return value > 0 if kind in ("time", "rate") else value >= 0 or kind == "kl"


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, noise: float = NOISE) -> Comparison:
    """Every figure of ours that both have.

    Raises:
        InvalidValueError: `check_comparable` does, or `noise` is below 1.
    """
    if noise < 1:
        raise InvalidValueError(f"[compare] noise: expected a factor of 1 or more, got {noise}")
    check_comparable(old, new)
    before, after = ({(it.bench, it.key, it.name): it for it in figures(side)} for side in (old, new))
    pairs = [(before[key], it) for key, it in after.items() if key in before]
    is_same = all(old["machine"].get(name) == new["machine"].get(name) for name in _MACHINE)
    drift = _drift(pairs) if is_same else {}
    changes = tuple(_change(*pair, drift, noise) for pair in pairs if pair[0].is_ours)
    missing = (it for key, it in before.items() if it.is_ours and key not in after)
    notes = _notes(old, new)
    if not drift:
        why = "No time of mlx-lm's is in both" if is_same else "The times before are another machine's"
        notes.append(f"{why}: none is called slower.")
    return Comparison(changes, drift, tuple(f"{it.bench}, {it.row}: {it.name}" for it in missing), tuple(notes))


def check_comparable(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise `InvalidValueError` unless both are of one model, dtype and way to pack; `new` may have no rows yet.

    A model is known by its fingerprint, since a path has many spellings, or by its name where one side has none.
    """
    model = "fingerprint" if "fingerprint" in old and "fingerprint" in new else "model"
    for name, before, now in (
        ("dtype", old.get("dtype"), new.get("dtype")),
        ("quant", old["settings"].get("quant"), new["settings"].get("quant")),
        (model, old[model], new[model]),
    ):
        if None not in (before, now) and before != now:
            raise InvalidValueError(f"[compare] {name}: expected results of {now}, got those of {before}")


def _notes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = [f"{bench}: not known here, and left out" for bench in old["results"] if bench not in _ROWS]
    for name, version in new["versions"].items():
        if (before := old["versions"].get(name)) != version:
            found.append(f"another version: {name} {before} -> {version}")
    return found


def _drift(pairs: Sequence[tuple[Figure, Figure]]) -> dict[str, float]:
    """How much slower mlx-lm became in each bench, and over all (""), which stands in for a bench without it."""
    found: dict[str, list[float]] = {}
    for old, new in pairs:
        if not old.is_ours and old.kind in ("time", "rate"):
            for name in (old.bench, ""):
                found.setdefault(name, []).append(_slowdown(old, new))
    return {name: statistics.median(times) for name, times in found.items()}


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Every number that can get better or worse, of the benches that are known here."""
    for bench, result in results["results"].items():
        for row in result["rows"] if bench in _ROWS else ():
            key, title = _key(bench, row, results.get("settings", {})), _ROWS[bench][1].format(**row)
            for name, value in _flat(row):
                kind = _kind(name)
                if kind is not None and value is not None:
                    is_ours = not any(word in name for word in _STOCK_WORDS) and "mlx-lm" not in title
                    yield Figure(bench, key, title, name, kind, is_ours, float(value))


def _key(bench: str, row: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[Any, ...]:
    own = (row.get(name) for name in _ROWS[bench][0])
    return (*own, *(settings.get(name) for name in _SETTINGS.get(bench, ())))


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", it) for inner, it in value.items())
        else:
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


def _change(old: Figure, new: Figure, drift: Mapping[str, float], noise: float) -> Change:
    slowdown, verdict = None, ""
    beside = drift.get(old.bench, drift.get(""))
    if old.kind not in ("time", "rate"):
        verdict = "regression" if _loss(old, new) > 0 else "better" if _loss(new, old) > 0 else ""
    elif beside is not None:
        alone = _slowdown(old, new)
        slowdown = alone / beside
        verdict = "slower" if min(alone, slowdown) > noise else "better" if max(alone, slowdown) < 1 / noise else ""
    ratio = _ratio(old.value, new.value)
    return Change(new.bench, new.row, new.name, new.kind, old.value, new.value, ratio, slowdown, verdict)


def _loss(old: Figure, new: Figure) -> float:
    """Above 0 if `new` is beyond what is allowed, and for NaN."""
    if math.isnan(new.value):
        return math.inf
    if old.kind == "bytes":
        return new.value - old.value * (PEAK_LIMIT if "peak" in old.name else BYTES_LIMIT)
    if old.kind == "kl":
        return new.value - max(old.value * KL_LIMIT, old.value + KL_LEAST)
    return old.value - new.value - SHARE_LIMIT
