"""`qkvshare bench all`: every benchmark at small sizes, as one set of results, and its headline figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .attention import WatchedAttention
from .bench import bench_handoff, bench_memory
from .bench_attention import AttentionShape, bench_attention, crossovers, stream_bandwidth
from .bench_decode import bench_decode
from .bench_prefill import bench_prefill
from .bench_restore import bench_restore
from .calibrate import calibrate
from .errors import InvalidValueError
from .fidelity import fidelity, standard_candidates
from .manager import SharedKVCacheManager
from .measure import AS_ASKED
from .passages import TEXTS, copy_passage, passage, text_of
from .session import AgentSession
from .spec import CacheSpec, LayerSpec, QuantSpec

if TYPE_CHECKING:
    from .model import LoadedModel

Note = Callable[[str], None]
Bench = Callable[["LoadedModel", "Sizes", Note], dict[str, Any]]
"""Gives "rows", each a plain dict, and what else was found."""


@dataclass(frozen=True)
class Sizes:
    """How much of it: minutes on a laptop by default.

    tokens: lengths of a context that is prefilled, handed over and restored. shared_tokens: of the one that `agents`
    decode on together and whose quality is measured.
    """

    agents: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (128, 256, 512)
    shared_tokens: int = 512
    repeats: int = 2
    quant: QuantSpec = dataclasses.field(default_factory=QuantSpec)


def _memory(lm: LoadedModel, sizes: Sizes, note: Note) -> dict[str, Any]:
    rows = bench_memory(lm, agents=sizes.agents, tokens=(sizes.shared_tokens,), quant=sizes.quant, note=note)
    return _result(rows)


def _handoff(lm: LoadedModel, sizes: Sizes, note: Note) -> dict[str, Any]:
    options: dict[str, Any] = {"decode_tokens": 4, "repeats": sizes.repeats, "quant": sizes.quant, "note": note}
    return _result(bench_handoff(lm, tokens=sizes.tokens, **options))


def _decode(lm: LoadedModel, sizes: Sizes, note: Note) -> dict[str, Any]:
    options: dict[str, Any] = {"steps": 3, "repeats": sizes.repeats, "quant": sizes.quant, "note": note}
    return _result(bench_decode(lm, agents=sizes.agents, tokens=(sizes.shared_tokens,), **options))


def _prefill(lm: LoadedModel, sizes: Sizes, note: Note) -> dict[str, Any]:
    rows = bench_prefill(lm, tokens=sizes.tokens, repeats=sizes.repeats, quant=sizes.quant, note=note)
    return _result(rows)


def _attention(lm: LoadedModel, sizes: Sizes, note: Note) -> dict[str, Any]:
    """One layer of this model."""
    shape = layer_shape(lm)
    sides: dict[str, Any] = {"queries": (1, 16, 64), "sessions": (1, max(sizes.agents)), "repeats": sizes.repeats}
    rows = bench_attention(shape, tokens=(sizes.shared_tokens,), group_size=sizes.quant.group_size, note=note, **sides)
    found = [dataclasses.asdict(crossover) for crossover in crossovers(rows)]
    return _result(rows) | {"ceiling_gigabytes_per_second": stream_bandwidth() / 1e9, "crossovers": found}


def layer_shape(lm: LoadedModel) -> AttentionShape:
    """Of the layer with the widest keys: its query heads as one token asks it, by the config where none is seen to.
    Raises `InvalidValueError` for a model that does not attend."""
    if not lm.spec.attention:
        raise InvalidValueError("[bench all] attention: expected a layer that keeps rows, got states alone")
    seen: dict[int, int] = {}
    watched = WatchedAttention(watch=lambda layer, queries, scale: seen.update({layer: queries.shape[1]}))
    manager = SharedKVCacheManager(lm.spec, QuantSpec(), **AS_ASKED)
    with AgentSession("shape", lm, manager, attention=watched) as session:
        session.prefill([0])
    layers = {index: it for index, it in enumerate(lm.spec.layers) if isinstance(it, LayerSpec)}
    widest = max(layers, key=lambda index: (layers[index].k_head_dim, index in seen))
    args: Any = getattr(lm.model, "args", getattr(lm.model, "config", None))
    is_known = dataclasses.is_dataclass(args)
    config = dataclasses.asdict(args) if is_known else {}  # nested ones become dicts
    heads = seen[widest] if widest in seen else _query_heads(lm.spec, config)
    return AttentionShape(heads, layers[widest].n_kv_heads, layers[widest].k_head_dim)


def _query_heads(spec: CacheSpec, config: Mapping[str, Any]) -> int:
    """Those of a layer, by the config; where it is silent as many as KV heads."""
    nested = [config.get(key) for key in ("text_config", "llm_config", "language_config")]
    parts = [*(it for it in nested if isinstance(it, Mapping)), config]
    names = ("num_attention_heads", "n_heads", "n_head")
    found = (part.get(name) for part in parts for name in names)
    heads = next((it for it in found if isinstance(it, int) and it > 0), 0)
    return max([heads, *(it.n_kv_heads for it in spec.attention)])


def _restore(lm: LoadedModel, sizes: Sizes, note: Note) -> dict[str, Any]:
    return _result(bench_restore(lm, tokens=sizes.tokens, repeats=sizes.repeats, quant=sizes.quant, note=note))


def _fidelity(lm: LoadedModel, sizes: Sizes, note: Note) -> dict[str, Any]:
    """Of a 16-bit cache, by one text and a copy."""
    text, prefix = text_of(TEXTS[0]), sizes.shared_tokens
    passages = [
        passage(lm.tokenizer, TEXTS[0], text, prefix_tokens=prefix, scored_tokens=prefix // 4),
        copy_passage(lm.tokenizer, text, prefix_tokens=max(64, prefix // 2), scored_tokens=max(32, prefix // 4)),
    ]
    note("key factors")
    candidates = standard_candidates(calibrate(lm))
    return _result(fidelity(lm, candidates, passages, dtype="float16", note=note))


SUITE: dict[str, Bench] = {
    "memory": _memory,
    "handoff": _handoff,
    "decode": _decode,
    "prefill": _prefill,
    "attention": _attention,
    "restore": _restore,
    "fidelity": _fidelity,
}
"""By the name of the command that has more of it."""


def suite(names: Sequence[str]) -> dict[str, Bench]:
    """Those of `SUITE` that are named, all for none. Raises `InvalidValueError` for a name that it has not."""
    if unknown := [name for name in names if name not in SUITE]:
        raise InvalidValueError(f"[bench all] benches: expected some of {list(SUITE)}, got {unknown}")
    return {name: bench for name, bench in SUITE.items() if not names or name in names}


def _result(rows: Sequence[Any]) -> dict[str, Any]:
    return {"rows": [dataclasses.asdict(row) for row in rows]}


# --- headline figures -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Headline:
    """One figure of ours and of mlx-lm (None where it has none); `unit` is bytes, seconds, tokens/s or nats."""

    bench: str
    what: str
    ours: float
    stock: float | None
    unit: str


def headlines(benches: Mapping[str, Mapping[str, Any]]) -> list[Headline]:
    """The figures of `benches` (results by name; any may be missing) that say the most."""
    found: list[Headline] = []
    for name, figures in _HEADLINES.items():
        if name in benches and (rows := benches[name]["rows"]):
            row = max(rows, key=lambda row: row["agents" if "agents" in row else "tokens"])
            for what, ours, stock, unit in figures:
                found.append(Headline(name, what.format(**row), row[ours], row[stock] if stock else None, unit))
    found += _attended(benches.get("attention", {}).get("rows", ()))
    return found + _quality(benches.get("fidelity", {}).get("rows", ()))


def _attended(rows: Sequence[Mapping[str, Any]]) -> list[Headline]:
    """One layer by the route to take, beside full precision, for one new token and for the most sessions, at the bits
    that were measured first."""
    found = []
    first = [row for row in rows if row["bits"] == rows[0]["bits"]]
    for row in (*first[:1], *sorted(first, key=lambda row: row["sessions"])[-1:]):
        took, who = (
            row["cold_milliseconds"],
            f"{row['queries']} new token" if row["kind"] == "one" else f"{row['sessions']} agents",
        )
        what = f"layer, {who}, {row['bits']} bits"
        found.append(Headline("attention", what, took[row["route"]] / 1e3, took["full_precision"] / 1e3, "seconds"))
    return found


def _quality(rows: Sequence[Mapping[str, Any]]) -> list[Headline]:
    """The presets, beside mlx-lm at as many bits."""
    by_name = {row["config"]: row for row in rows}
    found = []
    for name, bits in (("safe", 8), ("balanced", 6), ("tight", 4)):
        ours, stock = by_name.get(name), by_name.get(f"mlx-lm {bits} bit", {})
        if ours is not None and ours["kl_mean"] is not None:
            what = f"mean KL, {name} / {bits} bits"
            found.append(Headline("fidelity", what, ours["kl_mean"], stock.get("kl_mean"), "nats"))
    return found


Figures = tuple[tuple[str, str, str | None, str], ...]
_HEADLINES: dict[str, Figures] = {
    "memory": (
        ("{agents} agents on {shared_tokens} tokens", "ours_bytes", "stock_bytes", "bytes"),
        ("one agent more", "ours_extra_per_agent_bytes", None, "bytes"),
    ),
    "handoff": (
        ("handoff of {tokens} tokens", "handoff_seconds", None, "seconds"),
        ("bytes copied by it", "bytes_copied", None, "bytes"),
        ("first token / prefill again", "ttft_handoff_seconds", "ttft_reprefill_seconds", "seconds"),
        (
            "one agent's next token",
            "decode_seconds_per_token",
            "decode_stock_seconds_per_token",
            "seconds",
        ),
    ),
    "decode": (
        (
            "{agents} agents / a batch",
            "ours_tokens_per_second",
            "stock_batch_tokens_per_second",
            "tokens/s",
        ),
        ("KV read a step", "kv_bytes_read_per_step", "kv_bytes_read_per_step_stock", "bytes"),
    ),
    "prefill": (
        ("peak, {tokens} tokens", "ours_peak_bytes", "stock_peak_bytes", "bytes"),
        ("time", "ours_seconds", "stock_seconds", "seconds"),
    ),
    "restore": (
        ("card / file, {tokens} tokens", "card_bytes", "stock_file_bytes", "bytes"),
        (
            "first token / prefill again",
            "ttft_restore_seconds",
            "ttft_reprefill_seconds",
            "seconds",
        ),
    ),
}
