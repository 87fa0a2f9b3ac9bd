"""`qkvshare team`: the teams that ship, and a file to make one's own of."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InvalidValueError
from .team import READY_TEAMS, Team, find_team, ready_text
from .terminal import Terminal

app = typer.Typer(help="Teams of agents for `chat` and `run`.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("team.toml"),
    source: Annotated[str, typer.Option("--from", help=f"One of {', '.join(READY_TEAMS)}.")] = READY_TEAMS[0],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a team file to edit; without --from it is the one that explains every key."""
    if source not in READY_TEAMS:
        raise InvalidValueError(f"--from: expected one of {', '.join(READY_TEAMS)}, got {source!r}")
    if file.is_dir():
        raise InvalidValueError(f"[team init] {file}: expected the name of a file, got a folder")
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as out:
            out.write(ready_text(source))
    except FileExistsError:
        raise InvalidValueError(f"[team init] {file}: expected no file, got one; --force overwrites it") from None
    Terminal().note(f"wrote {file}; qkvshare chat --team {shlex.quote(str(file))}")


@app.command(name="list")
def list_teams(
    files: Annotated[list[str] | None, typer.Argument(help="Team files to show, too.", show_default=False)] = None,
) -> None:
    """The teams that ship, by the names that --team takes, and those of FILES if their agents hold together."""
    terminal = Terminal()
    for name in [*READY_TEAMS, *(files or [])]:
        _show(terminal, name, find_team(name))


def _show(terminal: Terminal, name: str, team: Team) -> None:
    terminal.line(name, style="bold")
    terminal.line(f"  {' -> '.join(team.names)}")
    if team.about:
        terminal.line(f"  {team.about}")
