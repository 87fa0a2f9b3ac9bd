"""`qkvshare`: the commands, and how errors end them."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from .. import QKVShareError, __version__
from . import cards
from .terminal import Terminal


@dataclass
class _Settings:
    debug: bool = False


_settings = _Settings()
# Plain help and plain tracebacks: typer's rich modes would read brackets in foreign text as markup.
app = typer.Typer(
    name="qkvshare",
    help="Several LLM agents share one quantized KV cache: computed once, held once, handed over by reference.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(cards.app, name="cards")


@functools.cache
def _add_commands_with_models() -> None:
    """They import mlx-lm and its tokenizers, which takes seconds."""
    from . import bench
    from .chat import chat
    from .demo import demo
    from .doctor import doctor
    from .plan import plan
    from .serve import serve

    app.command()(demo)
    app.command()(chat)
    app.command()(doctor)
    app.command()(plan)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
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
    _settings.debug = debug


def main() -> None:
    """The `qkvshare` script. An error that the library or the system reports is one line and exit code 2."""
    terminal = Terminal()
    if next((it for it in sys.argv[1:] if not it.startswith("-")), None) != "cards":
        _add_commands_with_models()
    try:
        app(prog_name="qkvshare")
    except (QKVShareError, OSError) as error:
        if _settings.debug:
            raise
        terminal.error(error)
        raise SystemExit(2) from None
