"""Models without their weights: folders whose safetensors files are headers with a hole behind them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .gguf_convert import named_shapes
from .gguf_file import read_gguf
from .spec import ITEM_BYTES

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Header(NamedTuple):
    """One tensor as a safetensors file announces it: the format's name of its dtype, its shape, its bytes."""

    dtype: str
    shape: Sequence[int]
    nbytes: int


def write_headers(path: Path, tensors: Mapping[str, Header], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file of `tensors` without their data: a hole, which takes no room on disk, as long as they are.

    Arrays that are lazily loaded from it have names, shapes and dtypes; whoever evaluates them gets zeros.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata or {"format": "mlx"})}
    stop = 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [stop, stop + tensor.nbytes],
        }
        stop += tensor.nbytes
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + stop)


def gguf_headers(source: Path, target: Path, dtype: str) -> None:
    """`target`, the mlx-lm directory that `gguf_convert.convert` would write in `dtype`, less weights and tokenizer.

    Reads the header of `source` only. Raises as `convert`.
    """
    config, shapes = named_shapes(read_gguf(source))
    sizes = {name: math.prod(shape) * ITEM_BYTES[dtype] for name, shape in shapes.items()}
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    headers = {name: Header(_TYPES[dtype], shape, sizes[name]) for name, shape in shapes.items()}
    write_headers(target / "model.safetensors", headers)
