"""`qkvshare`: the commands, and how errors end them."""

from __future__ import annotations

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


def main() -> None:
    """The `qkvshare` script. An error that the library or the system reports is one line and exit code 2."""
    terminal = Terminal()
    try:
        app(prog_name="qkvshare")
    except (QKVShareError, OSError) as error:
        if Terminal.shows_tracebacks:
            raise
        terminal.error(error)
        raise SystemExit(2) from None
