"""Record the commands as plain text, as a person at a terminal saw them: `python tools/record.py [NAME...]`.

It runs the real commands on a pseudo-terminal, types what is scripted here, and writes prompts, input and output to
docs/sessions/NAME.txt: escape codes are left out, and of a line that was rewritten its last state is kept. Without
names all of them are recorded. `python tools/record.py NAME -- ARGUMENTS` records any other command. OpenBLAS is
put under MLX where `tools/openblas.py` finds one; of a very long line, such as a benchmark's JSON, its start is kept.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from screen import Screen, as_seen

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "sessions"
COLUMNS = 100
SECONDS = 900
LONGEST = 500  # characters of a line
PROMPT = r"(?:^|\n)[\w ]+> $"
MAIN = [sys.executable, "-P", "-c", "from mlx_qkvshare.cli.app import main; main()"]
# A model of 135M parameters soon repeats itself at the temperatures that larger ones like.
SAMPLED = ("--max-tokens", "60", "--temperature", "0.9", "--seed", "1")


@dataclass(frozen=True)
class Recording:
    """`arguments` of `qkvshare`, and the lines to type at its prompts."""

    arguments: Sequence[str]
    lines: Sequence[str] = ()


RECORDINGS = {
    "demo": [Recording(["demo"])],
    "chat": [
        Recording(
            ["chat", "--team", "plan-write-review", *SAMPLED],
            [
                "/file cli/data/garden_handbook.txt",
                "What should a leaflet for new gardeners say about compost?",
                "/to writer",
                "Write two sentences for the leaflet.",
                "/fork bold",
                "Now write them as one slogan.",
                "/to writer",
                "/agents",
                "/all What is missing?",
                "/rewind",
                "/stats",
                "/save leaflet",
                "/context",
                "/quit",
            ],
        )
    ],
    "run": [Recording([*("run", "Is a school garden worth the work?", "--team", "debate"), *SAMPLED])],
    "plan": [Recording(["plan", "--agents", "8", "--shared", "4096", "--private", "256"])],
    "doctor": [Recording(["doctor"])],
    "cards": [
        Recording(["run", "Name two plants for a shady corner.", *SAMPLED, "--save", "shade"]),
        Recording(["cards", "list"]),
        Recording(["cards", "inspect", "shade"]),
        Recording(["cards", "export", "shade", "~/shade.zip"]),
        Recording(["cards", "rm", "shade"]),
        Recording(["cards", "gc"]),
        Recording(["cards", "import", "~/shade.zip", "--as", "plants"]),
        Recording(["cards", "verify"]),
        Recording(["chat", *SAMPLED, "--resume", "plants"], ["Which of them needs less water?", "/quit"]),
    ],
    "bench-all": [Recording(["bench", "all", "--out", "~/bench"])],
}


@contextlib.contextmanager
def a_home_of_its_own():
    """Variables for a home folder that has the user's models, and not the user's history, cards and verdicts."""
    from mlx_qkvshare.folders import default_cache_dir

    cache = default_cache_dir()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / cache.relative_to(Path.home())
        here.mkdir(parents=True)
        for path in cache.iterdir() if cache.is_dir() else ():
            if (path / "config.json").exists():
                (here / path.name).symlink_to(path)
        hub = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
        yield {"HOME": folder, "HF_HOME": hub}


def with_openblas() -> dict[str, str]:
    """The variables that `tools/openblas.py` prints behind `env`; none on macOS."""
    script = [sys.executable, str(ROOT / "tools" / "openblas.py")]
    found = shlex.split(subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return dict(it.split("=", 1) for it in found[1:])


def typed(arguments: Sequence[str]) -> str:
    """The command as a person types it: in quotes, ~ would be a folder of that name."""
    shown = [f"~/{shlex.quote(it[2:])}" if it.startswith("~/") else shlex.quote(it) for it in arguments]
    return " ".join(["qkvshare", *shown])


def shortened(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}... ({len(line):,} characters)"


def record(recording: Recording, env: dict[str, str]) -> str:
    """Everything that was to be seen, the command included. Raises `SystemExit` if it did not end with 0."""
    os.chdir(ROOT)
    arguments = [it.replace("~", env["HOME"]) for it in recording.arguments]
    with contextlib.closing(Screen([*MAIN, *arguments], columns=COLUMNS, env=env)) as screen:
        for line in recording.lines:
            screen.wait_for(PROMPT, SECONDS)
            screen.type(line + "\n")
        if (code := screen.end(SECONDS)) != 0:
            raise SystemExit(f"{typed(recording.arguments)} ended with {code}:\n{as_seen(screen.raw)}")
        seen = "\n".join(map(shortened, as_seen(screen.raw).rstrip().split("\n")))
        text = f"$ {typed(recording.arguments)}\n{seen}\n"
    for place, name in ((env["HOME"], "~"), (str(ROOT), "."), (str(Path.home()), "~")):
        text = text.replace(place, name)
    return text


def main(arguments: list[str]) -> None:
    if "--" in arguments:
        name, _, *command = arguments
        chosen = {name: [Recording(command)]}
    elif unknown := set(arguments) - set(RECORDINGS):
        raise SystemExit(f"expected names of {', '.join(RECORDINGS)}; got {', '.join(sorted(unknown))}")
    else:
        chosen = {name: RECORDINGS[name] for name in arguments or RECORDINGS}
    FOLDER.mkdir(parents=True, exist_ok=True)
    with a_home_of_its_own() as home:
        env = home | with_openblas()
        for name, recordings in chosen.items():
            path = FOLDER / f"{name}.txt"
            path.write_text("".join(record(it, env) for it in recordings), encoding="utf-8")
            print(os.path.relpath(path))


if __name__ == "__main__":
    main(sys.argv[1:])
