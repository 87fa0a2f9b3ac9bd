"""What `qkvshare doctor` found out about a model, kept on disk: which preset to take, and which bits are unsafe."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from .digest import digest_text
from .errors import InvalidValueError, UnsafeQuantError
from .folders import default_cache_dir, written_whole
from .quantize import Factors
from .spec import FULL_PRECISION_BITS, PRESETS, CacheSpec, LayerSpec, QuantSpec

DEFAULT_PRESET = "safe"
FULL_PRECISION = "full"
"""The name in a verdict for "no preset is good enough"."""
_FORMAT = 1
_TECHNIQUE = ("sink_tokens", "is_rotated", "is_centred", "is_fitted")


@dataclass(frozen=True)
class Refusal:
    """A setting that damages the model; so does one of the same technique with no more bits on
    either side, in any layer, and groups no smaller."""

    quant: QuantSpec
    has_factors: bool
    reason: str

    def covers(self, quant: QuantSpec, has_factors: bool) -> bool:
        is_alike = all(getattr(quant, name) == getattr(self.quant, name) for name in _TECHNIQUE)
        k_bits, v_bits = quant.most_bits
        is_coarser = k_bits <= self.quant.k_bits and v_bits <= self.quant.v_bits
        return is_alike and is_coarser and has_factors == self.has_factors and quant.group_size >= self.quant.group_size


@dataclass(frozen=True)
class Verdict:
    """`preset` is what to take where nothing is asked for, `full` for full precision; `calibrated` are the presets
    that are better with `key_factors`; `rows` are the measurements, as `FidelityRow` names their fields."""

    preset: str
    calibrated: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    key_factors: tuple[mx.array | None, ...] = field(default=(), repr=False, compare=False)

    def refusal(self, quant: QuantSpec, *, has_factors: bool) -> Refusal | None:
        return next((it for it in self.refusals if it.covers(quant, has_factors)), None)

    def save(self, spec: CacheSpec, folder: Path | None = None) -> Path:
        """Keep it for this model, named by its fingerprint. Raises `OSError`."""
        path, plain = verdict_path(spec, folder), dataclasses.asdict(dataclasses.replace(self, key_factors=()))
        arrays = {str(i): f for i, f in enumerate(self.key_factors) if f is not None}
        text = json.dumps(plain | {"format": _FORMAT})
        with written_whole(path) as partial:
            mx.save_safetensors(str(partial), arrays, metadata={"verdict": text, "digest": digest_text(text)})
        return path


def verdict_path(spec: CacheSpec, folder: Path | None = None) -> Path:
    return (folder or default_cache_dir()) / f"verdict-{spec.fingerprint.digest}.safetensors"


def load_verdict(spec: CacheSpec, folder: Path | None = None) -> Verdict | None:
    """What was kept for this model, or None; a file that does not fit counts as none."""
    path = verdict_path(spec, folder)
    if not path.is_file():
        return None
    try:
        found: Any = mx.load(str(path), return_metadata=True)
        arrays, metadata = found
        plain = json.loads(metadata["verdict"])
        if plain.pop("format") != _FORMAT or digest_text(metadata["verdict"]) != metadata["digest"]:
            return None
        factors = tuple(arrays.get(str(index)) for index in range(len(spec.layers)))
        mx.eval([f for f in factors if f is not None])
        check_factors(factors, spec)
        refusals = tuple(Refusal(QuantSpec.from_plain(it.pop("quant")), **it) for it in plain.pop("refusals"))
        texts = {name: tuple(plain.pop(name)) for name in ("calibrated", "rows")}
        for name in {plain["preset"], *texts["calibrated"]} - {FULL_PRECISION}:
            QuantSpec.preset(name)
        if texts["calibrated"] and not any(f is not None for f in factors):
            return None
        return Verdict(**(plain | texts | {"refusals": refusals, "key_factors": factors}))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None


def choose(
    spec: CacheSpec, quant: QuantSpec | str | None, factors: Factors | None = None, *, allow_unsafe: bool = False
) -> tuple[QuantSpec, Factors | None]:
    """The setting for `quant`, a preset or its name, `full`, or None for what the doctor found best (`safe` if it was
    never asked), and the key factors that go with it.

    Raises:
        UnsafeQuantError: the doctor refused this setting for this model, and `allow_unsafe` was not given.
    """
    found = load_verdict(spec)
    if quant is None:
        quant = found.preset if found else DEFAULT_PRESET
    if quant == FULL_PRECISION:
        return QuantSpec(FULL_PRECISION_BITS, FULL_PRECISION_BITS), None
    if isinstance(quant, QuantSpec):
        # A preset is the same by its value, unless it is to be taken just as it stands.
        name = None if allow_unsafe else next((name for name, it in PRESETS.items() if it == quant), None)
    else:
        name, quant = quant, QuantSpec.preset(quant)
    if factors is None and found is not None and name in found.calibrated:
        factors = found.key_factors
    has_factors = factors is not None and any(factor is not None for factor in factors)
    refusal = found.refusal(quant, has_factors=has_factors) if found and not allow_unsafe else None
    if found is not None and refusal is not None:
        raise UnsafeQuantError(
            f"[SharedKVCacheManager] {quant}: refused for this model, since the doctor measured {refusal.quant}: "
            f"{refusal.reason}; take the preset {found.preset!r}, or say allow_unsafe"
        )
    return quant, factors


def check_factors(factors: Factors, spec: CacheSpec) -> None:
    """Raise `InvalidValueError` unless `factors` are positive numbers for the keys of such layers."""
    if len(factors) != len(spec.layers):
        raise InvalidValueError(f"[key_factors] expected {len(spec.layers)} layers, got {len(factors)}")
    for index, (factor, layer) in enumerate(zip(factors, spec.layers, strict=True)):
        if factor is None:
            continue
        expected = (1, layer.n_kv_heads, 1, layer.k_head_dim) if isinstance(layer, LayerSpec) else None
        if factor.shape != expected:
            raise InvalidValueError(f"[key_factors] layer {index}: expected shape {expected}, got {factor.shape}")
        if not mx.all(mx.isfinite(factor) & (factor > 0)).item():
            raise InvalidValueError(f"[key_factors] layer {index}: expected finite numbers above 0")
