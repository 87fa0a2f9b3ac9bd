"""`qkvshare cards`: what a store of contexts holds, without a model."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..archive import export_card, import_card
from ..card import Card
from ..errors import CardError, CardNotFoundError, RevokedError
from ..folders import default_store_dir
from ..store import CardStore
from .lines import plain_name
from .terminal import Terminal, format_bytes, make_table, one_line

app = typer.Typer(
    help="Contexts that are kept on disk: look at them, check them, carry them elsewhere. No model is loaded.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Store = Annotated[
    Path | None,
    typer.Option("--store", metavar="FOLDER", help="Where the cards are.", show_default="the user's cache, `cards`"),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A card's name.")]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print one JSON line alone.")]


@app.command("list")
def list_cards(store: Store = None, json_only: JsonOnly = False) -> None:
    """Every card, with its size. Those that cannot be read are told on stderr."""
    terminal, kept = Terminal(), _store(store)
    cards, errors = kept.look()
    rows = []
    for card in cards:
        with contextlib.suppress(CardNotFoundError):  # somebody has removed it
            rows.append(_row(kept, card))
    if json_only:
        print(json.dumps(rows), file=terminal.out.file)
    elif not rows:
        terminal.line(f"no cards in {kept.folder}")
    else:
        table = make_table(terminal, "card", "agent", "tokens", "hops", "model", "quant", "on disk", "age")
        for row in rows:
            texts = (
                row["name"],
                row["agent"],
                row["tokens"],
                row["hops"],
                row["architecture"].split()[0],
                row["quant"],
            )
            size = "damaged" if row["stored_bytes"] is None else format_bytes(row["stored_bytes"])
            table.add_row(*(one_line(str(text)) for text in texts), size, _age(row["age_seconds"]))
        terminal.out.print(table)
    for error in errors:
        terminal.error(error)


@app.command()
def inspect(name: Name, store: Store = None, json_only: JsonOnly = False) -> None:
    """All that one card says of itself. Its segments are not read: see `verify`."""
    terminal, kept = Terminal(), _store(store)
    card = kept.inspect(name)
    row = _row(kept, card) | {
        "fingerprint": vars(card.spec.fingerprint),
        "layers": len(card.spec.layers),
        "dtype": card.spec.dtype,
        "keeps_tokens": card.token_ids is not None,
        "messages": len(card.messages),
        "domains": sorted(card.domains),
        "written_by": card.versions,
        "segments": [
            {"digest": it.digest, "start": it.start, "tokens": it.length, "packed_bytes": it.nbytes}
            for it in card.segments
        ],
    }
    if json_only:
        print(json.dumps(row), file=terminal.out.file)
        return
    width = max(map(len, row))
    for key, value in row.items():
        terminal.line(f"{key.replace('_', ' '):{width}} {one_line(_shown(key, value))}")


@app.command()
def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which ones; default all.")] = None,
    store: Store = None,
) -> None:
    """Read every byte of cards and their segments. Exit code 1 if anything is damaged."""
    terminal, kept = Terminal(), _store(store)
    cards, unreadable = kept.look()
    damaged = [] if names else [("a card", error) for error in unreadable]
    for name in names or [card.name for card in cards]:
        try:
            card = kept.verify(name)
            terminal.line(f"{one_line(name)}: whole, {card.num_tokens} tokens, {format_bytes(card.packed_bytes)}")
        except (CardError, RevokedError) as error:
            damaged.append((name, error))
    for name, problem in damaged:
        terminal.line(f"{one_line(name)}: {type(problem).__name__}: {one_line(str(problem))}", style="bold red")
    if damaged:
        raise typer.Exit(1)


@app.command("export")
def export_one(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to write; it is replaced if it is there.")],
    store: Store = None,
) -> None:
    """Write a card and its segments to one file, once all of it is verified."""
    terminal, kept = Terminal(), _store(store)
    card = export_card(kept, name, file)
    terminal.line(f"{one_line(card.name)}: {card.num_tokens} tokens, {format_bytes(file.stat().st_size)}")


@app.command("import")
def import_one(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.")],
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="Keep it under this name.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a card of this name.")] = False,
    store: Store = None,
) -> None:
    """Take a card from a file, once all of it is verified."""
    terminal = Terminal()
    wanted = None if name is None else plain_name(name)
    card = import_card(CardStore(store or default_store_dir()), file, wanted, replace=force)
    terminal.line(f"{one_line(card.name)}: {card.num_tokens} tokens, by {one_line(card.agent)}")


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Cards' names.")], store: Store = None
) -> None:
    """Forget cards. What they hold stays on disk until `gc`."""
    kept = _store(store)
    for name in names:
        kept.rm(name)


@app.command()
def gc(store: Store = None) -> None:
    """Remove what no card names, and what crashes left."""
    Terminal().line(f"{format_bytes(_store(store).gc())} freed")


def _store(folder: Path | None) -> CardStore:
    """One that is there: a mistyped folder is told, not made."""
    found = folder or default_store_dir()
    if folder is not None and not (found / "segments").is_dir():
        raise CardError(f"--store: expected a folder of cards, got {str(folder)!r}")
    return CardStore(found)


def _row(store: CardStore, card: Card) -> dict[str, Any]:
    try:
        stored = store.stored_bytes(card.name)
    except (CardError, RevokedError):
        stored = None
    return {
        "name": card.name,
        "agent": card.agent,
        "tokens": card.num_tokens,
        "hops": card.hops,
        "architecture": card.spec.fingerprint.architecture,
        "quant": str(card.quant),
        "packed_bytes": card.packed_bytes,
        "stored_bytes": stored,
        "age_seconds": max(0.0, time.time() - store.saved_at(card.name)),
    }


def _shown(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return "damaged" if value is None else format_bytes(value)
    if key == "age_seconds":
        return _age(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {it}" for name, it in value.items())
    if key == "domains":
        return ", ".join(value)
    if key == "segments":
        return "; ".join(f"{it['digest']} from {it['start']}, {it['tokens']} tokens" for it in value) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _age(seconds: float) -> str:
    """259200 -> "3d"."""
    size, unit = next((it for it in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= it[0]), (1, "s"))
    return f"{int(seconds // size)}{unit}"
