"""A random walk through sessions, forks, handoffs, evictions and failures; the books balance after every step.

Every walk runs twice over: at 16 bits, where any state must equal stock mlx-lm, and at K8 V8, where it must
equal another session that reads the same segments.
"""

import contextlib
import functools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from core_helpers import FULL, K8V8, loaded, logits_behind, stock_logits
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny import RECURRENT

from mlx_qkvshare import (
    AgentSession,
    HandoffCoordinator,
    QuantSpec,
    SharedKVCacheManager,
    context,
    quantized_attention,
)
from mlx_qkvshare import spec as spec_module
from mlx_qkvshare.errors import BudgetExceededError, ContextLimitError

MAX_SESSIONS, MAX_CONTEXT, PROBE = 4, 60, [11, 3]
LETTERS = st.lists(st.sampled_from([5, 6, 7]), min_size=1, max_size=14)
WHICH = st.integers(0, MAX_SESSIONS - 1)


class Injected(Exception):
    """What a failing layer raises."""


class Faulty(nn.Module):
    """A layer's attention that raises on demand, before or after its keys and values reached the cache."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.countdown, self.is_late, self.error = inner, -1, False, Injected

    def __call__(self, *args, **kwargs):
        self.countdown -= 1
        if self.countdown == 0 and not self.is_late:
            raise self.error
        out = self.inner(*args, **kwargs)
        if self.countdown == 0:
            raise self.error
        return out


SIZES = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 32, "vocab_size": 16}
ARCHITECTURES = {
    "full": {},
    "window": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    # One layer that convolves, one that attends.
    "state": RECURRENT | {"block_dim": 32, "block_ff_dim": 32, "block_multiple_of": 8},
}


@functools.cache
def faulty_model(kind):
    """A tiny model both of whose layers can be made to fail."""

    def wrap(model):
        for layer in model.model.layers:
            name = "conv" if "conv" in layer else "self_attn"
            layer[name] = Faulty(layer[name])

    return loaded(wrap=wrap, max_position=MAX_CONTEXT, **SIZES, **ARCHITECTURES[kind])


def faults(model):
    """What can be made to fail."""
    return [layer["conv" if "conv" in layer else "self_attn"] for layer in model.model.model.layers]


class Walk(RuleBasedStateMachine):
    quant = FULL
    kind = "full"
    budget_tokens = 80  # in tokens of private tails: a few sessions fill it

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for module in (spec_module, context):
            self.patch.setattr(module, "WINDOW_SLACK_TOKENS", 5)  # so that the window moves within a short walk
        self.model = faulty_model(self.kind)
        spec = self.model.spec
        self.manager = SharedKVCacheManager(
            spec, self.quant, budget_bytes=self.budget_tokens * spec.private_token_bytes
        )
        self.coordinator = HandoffCoordinator(self.manager)
        self.sessions: list[AgentSession] = []
        self.fed: list[list[int]] = []  # the model: what each session was given and has generated
        self.steps = 0

    def teardown(self):
        for session in self.sessions:
            session.close()
        stats = self.manager.stats()
        assert (stats.protected_bytes, stats.private_bytes) == (0, 0)
        self.manager.evict_unreferenced()
        assert self.manager.stats().used_bytes == 0
        self.patch.undo()

    # --- what can happen ---------------------------------------------------------------------------

    def pick(self, which):
        return which % len(self.sessions)

    has_room = precondition(lambda self: len(self.sessions) < MAX_SESSIONS)
    has_two = precondition(lambda self: len(self.sessions) > 1)

    @initialize(prompts=st.lists(LETTERS, min_size=2, max_size=2))
    def begin(self, prompts):
        for i, prompt in enumerate(prompts):
            self.open()
            self.feed(i, prompt)

    @has_room
    @rule()
    def open(self):
        name = f"agent {self.steps}"
        self.sessions.append(AgentSession(name, self.model, self.manager, prefill_step_tokens=4))
        self.fed.append([])

    @rule(which=WHICH, prompt=LETTERS)
    def prefill(self, which, prompt):
        i = self.pick(which)
        self.feed(i, prompt)

    def feed(self, i, prompt):
        """Prefill: all of it, or nothing."""
        session, wanted = self.sessions[i], self.fed[i] + prompt
        try:
            report = session.prefill(prompt)
        except (BudgetExceededError, ContextLimitError, Injected, KeyboardInterrupt) as error:
            assert session.token_ids == self.fed[i]
            assert isinstance(error, ContextLimitError) == (len(wanted) > MAX_CONTEXT)
        else:
            assert report.reused_tokens + report.computed_tokens == len(wanted)
            self.fed[i] = wanted

    @rule(which=WHICH)
    def seal(self, which):
        i = self.pick(which)
        before = self.sessions[i].token_ids
        with contextlib.suppress(BudgetExceededError):
            self.sessions[i].seal()
            assert self.sessions[i].private_bytes == 0
        assert self.sessions[i].token_ids == before

    @has_room
    @rule(which=WHICH)
    def fork(self, which):
        i = self.pick(which)
        with contextlib.suppress(BudgetExceededError):
            self.sessions.append(self.sessions[i].fork(f"fork {self.steps}"))
            self.fed.append(list(self.fed[i]))

    @rule(which=WHICH, share=st.floats(0, 1))
    def rewind(self, which, share):
        i = self.pick(which)
        count = round(share * len(self.fed[i]))
        try:
            self.sessions[i].rewind(count)
        except BudgetExceededError:
            assert self.kind != "full" and self.sessions[i].token_ids == self.fed[i]
        else:
            del self.fed[i][len(self.fed[i]) - count :]

    @has_two
    @rule(which=WHICH, step=st.integers(1, 3), keep=st.booleans(), verify=st.booleans())
    def hand_over(self, which, step, keep, verify):
        i = self.pick(which)
        j = (i + 1 + (step - 1) % (len(self.sessions) - 1)) % len(self.sessions)
        used = self.manager.stats().used_bytes
        try:
            record = self.coordinator.request_handoff(
                self.sessions[i], self.sessions[j], keep_sender=keep, verify=verify
            )
        except BudgetExceededError:
            return
        assert record.bytes_copied == 0 and record.reused_tokens == len(self.fed[i])
        assert self.manager.stats().used_bytes <= used
        self.fed[j] = list(self.fed[i])
        if not keep:
            self.fed[i] = []

    @has_two
    @rule(which=WHICH, by_collector=st.booleans())
    def close(self, which, by_collector):
        i = self.pick(which)
        session = self.sessions.pop(i)
        del self.fed[i]
        if not by_collector:
            session.close()
            session.close()

    @rule()
    def evict_unreferenced(self):
        self.manager.evict_unreferenced()
        assert self.manager.stats().evictable_bytes == 0

    @rule(which=WHICH, count=st.integers(1, 3))
    def generate(self, which, count):
        i = self.pick(which)
        for _ in range(count if self.fed[i] else 0):
            self.generate_one(i)

    def generate_one(self, i):
        try:
            token = self.sessions[i].generate_token()
        except (BudgetExceededError, ContextLimitError, Injected, KeyboardInterrupt):
            assert self.sessions[i].token_ids == self.fed[i], "a failed step neither adds nor loses a token"
            return
        self.disarm()
        if self.quant is FULL:
            logits = stock_logits(self.model.model, self.fed[i])[-1]
            assert logits[token] >= logits.max() - 1e-4, "not what a cold run generates"
        self.fed[i].append(token)

    @rule(
        which=WHICH,
        prompt=LETTERS,
        layer=st.integers(0, 1),
        countdown=st.integers(1, 4),
        is_late=st.booleans(),
        error=st.sampled_from([Injected, KeyboardInterrupt]),
        is_decode=st.booleans(),
    )
    def fail(self, which, prompt, layer, countdown, is_late, error, is_decode):
        i = self.pick(which)
        faulty = faults(self.model)[layer]
        faulty.countdown, faulty.is_late, faulty.error = countdown, is_late, error
        try:
            if is_decode and self.fed[i]:
                self.generate_one(i)
            else:
                self.feed(i, prompt)
        finally:
            self.disarm()

    def disarm(self):
        for faulty in faults(self.model):
            faulty.countdown = -1

    # --- what must hold ----------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self):
        self.steps += 1
        self.manager.check_integrity(checksums=self.steps % 5 == 0)
        for session, tokens in zip(self.sessions, self.fed, strict=True):
            assert session.token_ids == tokens
            assert all(cache.offset == session.num_tokens == len(tokens) for cache in session.caches)
            assert session.private_bytes <= session.prefix.private_bytes, "an unbudgeted tail"

    @rule(which=WHICH)
    def equals_a_cold_run(self, which):
        i = self.pick(which)
        session = self.sessions[i]
        try:
            found = logits_behind(self.model.model, session.caches, PROBE)
            if self.quant is FULL:
                expected = stock_logits(self.model.model, self.fed[i] + PROBE)[-2:]
            else:
                expected = self.same_segments(session)
        except BudgetExceededError:
            return
        np.testing.assert_allclose(found, expected, atol=1e-4)

    def same_segments(self, session):
        """Logits of PROBE behind the very segments that `session` reads, its private tail computed afresh."""
        spans = [(view.segment.slot, view.length) for view in session.prefix.views]
        prefix = self.manager.get_shared_kv_cache(spans)
        caches = self.manager.make_caches(prefix)
        tail = session.token_ids[session.prefix.num_tokens :]
        if tail:
            with quantized_attention():
                mx.eval(self.model.model(mx.array([tail]), cache=caches))
        return logits_behind(self.model.model, caches, PROBE)


class QuantizedWalk(Walk):
    quant = K8V8
    budget_tokens = 60


class BasisWalk(QuantizedWalk):
    quant = QuantSpec(8, 8, 32, sink_tokens=4, is_rotated=True, is_centred=True)


class WindowWalk(Walk):
    kind = "window"


class QuantizedWindowWalk(QuantizedWalk):
    kind = "window"


class StateWalk(Walk):
    kind = "state"


class QuantizedStateWalk(QuantizedWalk):
    kind = "state"


SETTINGS = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
test_full_precision_walks = Walk.TestCase
test_quantized_walks = QuantizedWalk.TestCase
test_basis_walks = BasisWalk.TestCase
test_sliding_walks = WindowWalk.TestCase
test_quantized_sliding_walks = QuantizedWindowWalk.TestCase
test_recurrent_walks = StateWalk.TestCase
test_quantized_recurrent_walks = QuantizedStateWalk.TestCase
test_full_precision_walks.settings = test_quantized_walks.settings = SETTINGS
for _kind in (BasisWalk, WindowWalk, QuantizedWindowWalk, StateWalk, QuantizedStateWalk):
    _kind.TestCase.settings = settings(SETTINGS, max_examples=60)
