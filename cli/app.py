"""`qkvshare`: the commands, and how errors end them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .. import QKVShareError, __version__
from . import bench, cards, teams
from .chat import chat
from .demo import demo
from .doctor import doctor
from .plan import plan
from .run import run
from .serve import serve
from .terminal import Terminal

# Plain help and plain tracebacks: typer's rich modes would read brackets in foreign text as markup.
app = typer.Typer(
    name="qkvshare",
    help="Several LLM agents share one quantized KV cache: computed once, held once, handed over by reference.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(chat)
app.command()(run)
app.command()(doctor)
app.command()(plan)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.add_typer(teams.app, name="team")
app.add_typer(cards.app, name="cards")
app.add_typer(bench.app, name="bench")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"qkvshare {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    Terminal.shows_tracebacks = debug


def _open_what_is_closed() -> None:
    """What the shell closed (`<&-`) must not become the number of a file that is opened later."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            found = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, os.fdopen(found, "w" if number else "r", encoding="utf-8", closefd=False))


def _debug_first(arguments: list[str]) -> list[str]:
    """`--debug` may be typed anywhere in front of a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    others = [it for it in arguments[:end] if it != "--debug"]
    return ["--debug"] * (len(others) < end) + others + arguments[end:]


def main() -> None:
    """The `qkvshare` script. An error is one line; exit code 2 if the library or the system reports it, else 1."""
    _open_what_is_closed()
    terminal = Terminal()
    try:
        app(_debug_first(sys.argv[1:]), prog_name="qkvshare")
    except Exception as error:
        is_told = isinstance(error, QKVShareError | OSError)
        terminal.error(error, None if is_told else f"{type(error).__name__}: {error} (--debug shows where)")
        raise SystemExit(2 if is_told else 1) from None
