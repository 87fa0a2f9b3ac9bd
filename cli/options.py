"""Options that several commands share, and what is made of them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import mlx.core as mx
import typer

from .. import QuantSpec, Sampling
from ..errors import InvalidValueError
from . import team as teams
from .team import READY_TEAMS, Team
from .terminal import ProgressLine, Terminal

if TYPE_CHECKING:
    from ..model import LoadedModel

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="SOURCE",
        help="A Hub id, an mlx-lm directory or a .gguf file.",
        show_default="SmolLM2-135M-Instruct",
    ),
]
CacheDir = Annotated[
    Path | None, typer.Option("--cache-dir", help="Where converted models are kept.", show_default="the user's cache")
]
Bits = Annotated[int | None, typer.Option("--bits", help="Bits of keys and values: 2, 3, 4, 5, 6, 8; 16 = off.")]
KBits = Annotated[
    int | None, typer.Option("--k-bits", help="Bits of the keys.", show_default="--bits, or 8, or see --preset")
]
VBits = Annotated[
    int | None, typer.Option("--v-bits", help="Bits of the values.", show_default="--bits, or 8, or see --preset")
]
Budget = Annotated[str, typer.Option("--budget", help="Bytes for all keys and values, such as 512M.")]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="safe, balanced or tight: 8, 6 or 4 bits packed with care.",
        show_default="what `qkvshare doctor` found best, else safe",
    ),
]
Unsafe = Annotated[bool, typer.Option("--unsafe", help="Take bits that the doctor refused for this model.")]
DEFAULT_GROUP_SIZE = 64
GroupSize = Annotated[int, typer.Option("--group-size", help="Values per scale: 32, 64 or 128.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the most likely token.")]

Seed = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.", show_default="fresh")]
MaxContext = Annotated[
    int | None, typer.Option("--max-context", help="Tokens of the conversation.", show_default="the model's")
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Tokens of one reply.", show_default="256, at most half the context"),
]
Store = Annotated[
    Path | None, typer.Option("--store", help="The folder of kept conversations.", show_default="in the user's cache")
]
Agents = Annotated[
    list[str] | None,
    typer.Option(
        "--agent",
        metavar="NAME[:ROLE]",
        help="An agent and what it is told about its role. Repeat for more.",
        show_default=False,
    ),
]
TeamOption = Annotated[
    str | None,
    typer.Option(
        "--team",
        metavar="TEAM",
        help=f"A team instead: {', '.join(READY_TEAMS)}, or a file as `qkvshare team init` writes it.",
    ),
]
TeamTemperature = Annotated[
    float | None,
    typer.Option("--temperature", help="0 takes the most likely token.", show_default="what the team says, else 0"),
]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def quant_spec(
    bits: int | None, k_bits: int | None, v_bits: int | None, group_size: int, preset: str | None = None
) -> QuantSpec | str | None:
    """--k-bits and --v-bits win over --bits, which is 8. A preset says it all, and goes with none of them. Without any
    of them None: what the doctor found best for the model, else `safe`."""
    is_plain = (bits, k_bits, v_bits, group_size) != (None, None, None, DEFAULT_GROUP_SIZE)
    if preset is not None:
        if is_plain:
            raise InvalidValueError("--preset: expected no --bits, --k-bits, --v-bits or --group-size beside it")
        QuantSpec.preset(preset)  # an unknown name is told before the model is loaded
    if not is_plain:
        return preset
    both = 8 if bits is None else bits
    return QuantSpec(both if k_bits is None else k_bits, both if v_bits is None else v_bits, group_size)


def sampling_asked_for(temperature: float | None, seed: int | None) -> dict[str, Any]:
    """What was given of it, by the names of `Sampling`; checked before a model is loaded."""
    given: dict[str, Any] = {"temperature": temperature, "seed": seed}
    given = {name: value for name, value in given.items() if value is not None}
    Sampling(**given)
    return given


def find_team(agents: list[str] | None, name: str | None, default: Team) -> Team:
    """What --team names, or what --agent describes."""
    if name is not None:
        if agents:
            raise InvalidValueError("--team: expected no --agent beside it")
        return teams.find_team(name)
    return Team.of(agents) if agents else default


def parse_bytes(text: str, name: str = "budget") -> int:
    """ "512M" -> 536870912; K, M, G and T count in 1024s."""
    match = _SIZE.fullmatch(text.strip())
    count = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if count <= 0:
        raise InvalidValueError(f"--{name}: expected a size such as 512M or 2G, got {text!r}")
    return count


def parse_counts(text: str, name: str) -> list[int]:
    """ "1,2,4" -> [1, 2, 4], the value of option `name`."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) <= 0:
        raise InvalidValueError(f"--{name}: expected whole numbers above 0, as in 1,2,4; got {text!r}")
    return counts


def model_name(source: str | None) -> str:
    from ..model import DEFAULT_MODEL

    return source or DEFAULT_MODEL


def load_model(source: str | None, cache_dir: Path | None, terminal: Terminal) -> LoadedModel:
    """`load` with its progress on stderr."""
    from ..model import load  # mlx-lm and its tokenizers take seconds to import, which `--help` should not

    with contextlib.closing(ProgressLine(terminal)) as progress:
        model = load(source, cache_dir=cache_dir, progress=progress)
    if mx.metal.is_available():  # keep large weights resident, as mlx-lm's own commands do
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    return model
