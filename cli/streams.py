"""Several agents that answer at the same time, shown line by line, each line with its agent's name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text

from .. import AgentTask, QKVShareError
from .interrupts import Interrupts
from .terminal import Terminal, harmless, one_line, padded


class LabelledStreams:
    """Holds every agent's text back until a line of it is whole, or fills the terminal's width."""

    def __init__(self, terminal: Terminal, names: Sequence[str], colours: Mapping[str, str] | None = None):
        self._terminal, self._colours = terminal, colours or {}
        self._pad = max(cell_len(one_line(name)) for name in names)
        self._begun = dict.fromkeys(names, "")

    def feed(self, name: str, text: str) -> None:
        *lines, self._begun[name] = (self._begun[name] + harmless(text)).split("\n")
        for line in lines:
            self._show(name, self._fold(line))
        *whole, self._begun[name] = self._fold(self._begun[name])
        self._show(name, whole)

    def end(self, name: str) -> None:
        rest, self._begun[name] = self._begun[name], ""
        if rest.strip():
            self._show(name, [rest])

    def _fold(self, line: str) -> list[str]:
        """`line` in pieces that fit beside the name; a space at the very end stays, as more may follow it."""
        width = max(20, self._terminal.out.width - self._pad - 3)
        pieces = [piece.plain for piece in Text(line).wrap(self._terminal.out, width)] or [""]
        ends_in = line[len(line.rstrip(" ")) :]
        return [*(piece.rstrip() for piece in pieces[:-1]), pieces[-1].rstrip() + ends_in]

    def _show(self, name: str, lines: list[str]) -> None:
        for line in lines:
            label = Text(f"{padded(name, self._pad)} | ", style=f"bold {self._colours.get(name, 'cyan')}")
            self._terminal.out.print(label.append(line, style="not bold default"), soft_wrap=True)


def show_together(
    tasks: Sequence[AgentTask],
    terminal: Terminal,
    interrupts: Interrupts,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Show the streams until all of them have ended; what a task failed with is in its `error()`.

    Ctrl-C cancels all of them.
    """
    streams = LabelledStreams(terminal, [task.name for task in tasks], colours)

    async def follow(task: AgentTask) -> None:
        with contextlib.suppress(QKVShareError):
            async for chunk in task:
                streams.feed(task.name, chunk.text)
        streams.end(task.name)

    async def cancel_when_interrupted() -> None:
        while not interrupts.is_set:
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()

    async def show() -> None:
        watch = asyncio.create_task(cancel_when_interrupted())
        await asyncio.gather(*map(follow, tasks))
        watch.cancel()

    try:
        asyncio.run(show())
    finally:
        for task in tasks:
            task.cancel()
