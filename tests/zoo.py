"""Every model module of the installed mlx-lm through one scenario, against mlx-lm itself, and the table of verdicts.

python tests/zoo.py [module …]      progress and verdicts
python benchmarks/models.py         writes docs/models.md
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from core_helpers import FULL, K8V8, logits_behind
from mlx_lm.models.cache import make_prompt_cache
from tiny import VOCAB_SIZE, tiny_tokenizer
from zoo_configs import build, model_module, model_names

from mlx_qkvshare import AgentBatch, AgentSession, HandoffCoordinator, LoadedModel, SharedKVCacheManager
from mlx_qkvshare.errors import UnsupportedModelError
from mlx_qkvshare.model import describe
from mlx_qkvshare.spec import CacheSpec, LayerSpec, StateSpec
from mlx_qkvshare.state_cache import leaves

COMMAND = "PYTHONPATH=tests python benchmarks/models.py"
TOLERANCE = 1e-4
"""Of 16-bit sharing: the largest difference of a logit, over the largest logit if that is above 1."""
MAX_KL = 2e-3
"""Of K8V8 in groups of 32: mean KL(mlx-lm || ours) in nats over 24 tokens behind a sealed prefix of 100."""

ON_CPU = {"phi3small": "its forward pass corrupts the heap of MLX's CPU backend"}
"""Modules that must not even be tried on a CPU."""
STEPWISE = {"plamo3": "mlx-lm sees 17 tokens in a prefill and 16 in decoding where the window is 16; ours sees 16"}
"""Modules whose stock prefill and stock decoding differ: the reference takes one token at a time."""
NOTES = {
    "longcat_flash_ngram": "a context shorter than its n-gram cannot be sealed",
    "nemotron-nas": "refused where attention is replaced by a linear layer, whose cache stays empty",
}

TRUNK = [int(t) for t in np.random.default_rng(0).integers(5, VOCAB_SIZE, 176)]
BRANCH = [*TRUNK[:24], *(int(t) for t in np.random.default_rng(1).integers(5, VOCAB_SIZE, 16))]


@dataclass(frozen=True)
class Verdict:
    """How one module fares. `kind` is one of KINDS."""

    module: str
    kind: str
    caches: str = ""
    note: str = ""
    kl: float = 0.0
    seconds: float = 0.0

    @property
    def row(self) -> str:
        return f"| `{self.module}` | {self.caches} | {self.kind} | {self.note} |"


FUSED, FALLBACK, STATE, REFUSED, NOT_RUN, FAULT = KINDS = (
    "fused", "exact fallback", "state", "refused", "not run", "FAULT",
)  # fmt: skip
EXACT = (FUSED, FALLBACK, STATE)


class Mismatch(AssertionError):
    """Ours is not mlx-lm's."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Mismatch(message)


# --- mlx-lm's own logits ----------------------------------------------------------------------------


def stock(model: nn.Module, token_ids: Sequence[int], step: int = 0) -> np.ndarray:
    """Logits [L, V] of all of `token_ids` by mlx-lm alone on its own caches, `step` at a time or all at once."""
    cache, step = make_prompt_cache(model), step or len(token_ids)
    chunks = [token_ids[start : start + step] for start in range(0, len(token_ids), step)]
    return np.concatenate([np.array(model(mx.array([chunk]), cache=cache)[0]) for chunk in chunks])


class Script:
    """A sampler that follows a text whatever the logits are, and compares them with mlx-lm's on the way."""

    def __init__(self, expected: np.ndarray, text: Sequence[int], what: str):
        self.expected, self.text, self.what = expected, text, what
        self.place, self.seen = 0, list[tuple[int, mx.array]]()

    def __call__(self, logits: mx.array) -> mx.array:
        self.seen.append((self.place, logits))
        self.place += 1
        return mx.array(self.text[self.place - 1])

    def check(self) -> None:
        for place, logits in self.seen:
            compare(np.array(logits)[None], self.expected[place - 1 : place], f"{self.what}, token {place}")
        self.seen.clear()


def compare(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    error = float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))
    require(error <= TOLERANCE, f"{what}: logits differ by {error:.1e}")  # NaN differs, too


# --- the scenario -----------------------------------------------------------------------------------


class Scenario:
    """Sessions of one model at 16 bits, each compared with mlx-lm after whatever is done to it."""

    def __init__(self, model: LoadedModel, step: int = 0):
        self.model, self.manager = model, SharedKVCacheManager(model.spec, FULL)
        self.trunk, self.branch = (stock(model.model, text, step) for text in (TRUNK, BRANCH))
        self.sessions: list[AgentSession] = []

    def open(self, name: str) -> AgentSession:
        return self.watch(AgentSession(name, self.model, self.manager, prefill_step_tokens=40))

    def watch(self, session: AgentSession) -> AgentSession:
        session._sampler = Script(self.trunk, TRUNK, session.name)
        self.sessions.append(session)
        return session

    def decode(self, session: AgentSession, num_tokens: int) -> None:
        session._sampler.place = session.num_tokens  # type: ignore[union-attr]
        for _ in session.stream(max_tokens=num_tokens, ignore_eos=True):
            pass
        self.check(session, "decoding", probe=False)

    def check(self, session: AgentSession, what: str, *, probe: bool = True) -> None:
        script, place = session._sampler, session.num_tokens
        assert isinstance(script, Script)
        script.what = f"{session.name} {what} at {place}"
        script.check()
        require(session.token_ids == list(script.text[:place]), f"{script.what}: other tokens are held")
        if probe:
            found = logits_behind(self.model.model, session.caches, script.text[place : place + 2])
            compare(found, script.expected[place : place + 2], script.what)
        accounted, held = session._prefix.private_bytes, session.private_bytes
        require(accounted >= held, f"{script.what}: {held} private bytes, {accounted} budgeted")

    def run(self) -> tuple[int, int]:
        """Open, prefill, seal, fork, hand off, rewind, prefill at length, decode alone and together.

        Returns how many attention layers reached ours in decoding, and how many there are.
        """
        one = self.open("one")
        one.prefill(TRUNK[:40])
        self.check(one, "prefilled")
        self.decode(one, 8)
        fork = self.watch(one.fork("fork"))  # seals
        one.prefill(TRUNK[48:51])
        self.check(one, "behind the seal")
        self.decode(fork, 8)
        for count in (2, 30):
            left = fork.num_tokens - count
            fork.rewind(count)
            require(fork.num_tokens == left, f"rewind by {count}: expected {left} tokens, got {fork.num_tokens}")
            self.check(fork, "rewound")
        self._hand_off(fork)
        three = self.open("three")
        three.prefill(TRUNK[:160])
        self.check(three, "prefilled at length")
        three.seal()
        self.decode(three, 2)
        self._decode_together(three)
        self.manager.check_integrity(checksums=True)
        routed = [leaf.is_decoding_routed for leaf in leaves(three.caches) if isinstance(leaf.spec, LayerSpec)]
        self._close()
        return sum(routed), len(routed)

    def _hand_off(self, fork: AgentSession) -> None:
        two = self.open("two")
        for session in (fork, two):
            session._sampler = Script(self.branch, BRANCH, session.name)
        fork.prefill(BRANCH[24:30])
        self.check(fork, "on a branch")
        HandoffCoordinator(self.manager).request_handoff(fork, two)
        self.check(two, "received")
        self.decode(two, 3)

    def _decode_together(self, three: AgentSession) -> None:
        """Sessions of different lengths, which fall back to one after another where a model needs it."""
        group = [three, self.watch(three.fork("four")), self.watch(three.fork("five"))]
        group[1].prefill(TRUNK[three.num_tokens : three.num_tokens + 3])
        with AgentBatch(self.manager) as batch:
            for session in group:
                session._sampler.place = session.num_tokens  # type: ignore[union-attr]
                batch.join(session, max_tokens=4, ignore_eos=True)
            errors = [event.error for event in batch.stream() if event.error]
        require(not errors, f"decoding together: {errors}")
        for session in group:
            self.check(session, "together")

    def _close(self) -> None:
        for session in self.sessions:
            session.close()
        stats = self.manager.stats()
        left = (stats.private_bytes, stats.protected_bytes, stats.num_holders)
        require(left == (0, 0, 0), f"after close: private, protected bytes and holders {left}")


def divergence(model: LoadedModel, expected: np.ndarray) -> float:
    """Mean KL(mlx-lm || K8V8) in nats of the 24 tokens behind 100 sealed ones, half of them decoded one by one."""
    manager = SharedKVCacheManager(model.spec, K8V8)
    with AgentSession("quantized", model, manager, prefill_step_tokens=40) as session:
        session.prefill(TRUNK[:100])
        session.seal()
        found = [np.array(session.score(TRUNK[100:112]))]
        found += [np.array(session.score(TRUNK[place : place + 1])) for place in range(112, 124)]
        manager.check_integrity(checksums=True)
    p, q = (_log_softmax(logits) for logits in (expected[100:124], np.concatenate(found)))
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


# --- the verdict ------------------------------------------------------------------------------------


def examine(name: str) -> Verdict | None:
    """The verdict on one module; None if it holds no model."""
    start = time.perf_counter()
    if name in ON_CPU:
        return Verdict(name, NOT_RUN, note=ON_CPU[name])
    try:
        if not hasattr(model_module(name), "Model"):
            return None
        model, config = build(name)
    except (Exception, SystemExit) as error:  # a new one: `zoo_configs` wants a value for it
        return Verdict(name, FAULT, note=f"not built: {_text(error)}")
    try:
        spec = describe(model, config)
    except UnsupportedModelError as error:
        note = str(error).removeprefix(f"{name}: ")
        return Verdict(name, REFUSED, _kinds_of(make_prompt_cache(model)), note)
    except Exception as error:
        if failure := _stock_failure(model):
            return Verdict(name, NOT_RUN, _kinds_of(make_prompt_cache(model)), failure)
        return Verdict(name, FAULT, note=f"describe: {_text(error)}")
    caches = summary(spec)
    if failure := _stock_failure(model):
        return Verdict(name, NOT_RUN, caches, failure)
    loaded = LoadedModel(model, tiny_tokenizer(), spec)
    try:
        scenario = Scenario(loaded, step=1 if name in STEPWISE else 0)
        routed, total = scenario.run()
        kl = divergence(loaded, scenario.trunk)
        require(kl <= MAX_KL, f"K8V8: KL {kl:.1e}")
    except Exception as error:
        return Verdict(name, FAULT, caches, _text(error))
    notes = [f"{routed} of {total} attention layers"] if 0 < routed < total else []
    note = "; ".join(notes + [said[name] for said in (STEPWISE, NOTES) if name in said])
    kind = STATE if not total else FUSED if routed else FALLBACK
    return Verdict(name, kind, caches, note, kl, time.perf_counter() - start)


def _stock_failure(model: nn.Module) -> str:
    """Why mlx-lm itself cannot run the model here."""
    try:
        stock(model, TRUNK[:8], 4)
    except Exception as error:
        if "metal_kernel" in str(error):
            return "needs a Metal device"
        return f"mlx-lm fails on it: {_text(error)}"
    return ""


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def summary(spec: CacheSpec) -> str:
    """Its layers, such as "2 full, 2 window 16, 1 state"."""
    names = [_layer_name(layer) for layer in spec.layers]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _layer_name(layer: LayerSpec | StateSpec) -> str:
    if isinstance(layer, StateSpec):
        return "state"
    return f"{layer.kind} {layer.window}" if layer.window else "full"


def _kinds_of(caches: Sequence[Any]) -> str:
    names = [type(leaf).__name__ for leaf in leaves(caches)]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


# --- all of them ------------------------------------------------------------------------------------


def examine_all(names: Sequence[str], progress: Callable[[str], None] = print) -> list[Verdict]:
    """The verdicts on all modules that hold a model, made in a process that may die without ending the rest."""
    verdicts, waiting = [], list(names)
    while waiting:
        for name, verdict in _worker(list(waiting)):
            waiting.remove(name)
            if verdict is not None:
                verdicts.append(verdict)
                told = f"{verdict.kind:<15} {verdict.seconds:5.1f} s  KL {verdict.kl:.0e}  {verdict.caches}"
                progress(f"[{len(names) - len(waiting)}/{len(names)}] {name:<22} {told}  {verdict.note}")
    return verdicts


def _worker(names: Sequence[str]) -> Iterator[tuple[str, Verdict | None]]:
    command = [sys.executable, __file__, "--worker", *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        done = 0
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                done += 1
                yield found["module"], Verdict(**found) if "kind" in found else None
    if done < len(names):
        yield names[done], Verdict(names[done], FAULT, note=f"the process died with status {process.returncode}")


def work(names: Sequence[str]) -> None:
    mx.set_default_device(mx.cpu)  # where the page's verdicts are from, on any machine
    mx.disable_compile()  # compiling each model's fused operations takes longer than running them
    for name in names:
        verdict = examine(name)
        print(json.dumps(dataclasses.asdict(verdict) if verdict else {"module": name}), flush=True)
        mx.clear_cache()


def page(verdicts: Sequence[Verdict]) -> str:
    """docs/models.md."""
    count = {kind: sum(verdict.kind == kind for verdict in verdicts) for kind in KINDS}
    exact = sum(count[kind] for kind in EXACT)
    decided = exact + count[REFUSED] + count[FAULT]
    share = math.floor(1000 * exact / decided) / 10 if decided else 0.0
    return PAGE.format(
        version=mlx_lm.__version__,
        command=COMMAND,
        total=len(verdicts),
        counts=", ".join(f"{count[kind]} {kind}" for kind in KINDS if count[kind]),
        exact=exact,
        decided=decided,
        share=share,
        tolerance=TOLERANCE,
        kl=MAX_KL,
        rows="\n".join(verdict.row for verdict in verdicts),
    )


PAGE = """# Every model of mlx-lm: shared exactly, or refused by name

mlx-lm {version}: {total} modules hold a model, and all of them keep a cache: {counts}.
Of the {decided} that run on MLX's CPU device, {exact} are shared exactly: **{share} %**.

Made by `{command}`; `pytest -m slow tests/test_models.py` fails when it is stale.

Each is a tiny random model in float32, made of the module's own argument class, so that every kind of layer occurs:
prefilled in chunks, decoded, sealed, forked, rewound by 2 and by 30 tokens, handed over, prefilled at length beyond its
windows, and decoded by three sessions together. At 16 bits each logit equals mlx-lm's own within {tolerance:g}
(relative to the largest, where that is above 1); at K8V8 in groups of 32 the mean KL is at most {kl:g} nats. These
weights are random: what quantization costs a trained model is in [benchmarks/README.md](../benchmarks/README.md).

- **fused**: attention over packed bytes in decoding; where the note says so the other layers take the exact fallback.
- **exact fallback**: the model computes with keys or values itself and gets them unpacked, in full precision.
- **state**: it has no attention; its state is shared as it is, where a segment ends.
- **refused**: `load` raises `UnsupportedModelError` with this reason.
- **not run**: mlx-lm itself cannot run it on MLX's CPU device, so nothing is claimed.

| module | layers' caches | verdict | note |
|---|---|---|---|
{rows}
"""


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    else:
        examine_all(sys.argv[1:] or model_names())


if __name__ == "__main__":
    main()
