"""Sessions that decode together: each as if it were alone, and the shared prefix read once."""

import copy
import itertools

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import loaded
from reference import Forced, T, assert_consistent
from tiny import tiny_loaded

from mlx_qkvshare import (
    AgentBatch,
    AgentSession,
    QuantizedAttention,
    QuantSpec,
    Route,
    Sampling,
    SharedKVCacheManager,
    quantized_attention,
)
from mlx_qkvshare.batch_cache import BatchLayerCache, group_segments
from mlx_qkvshare.errors import (
    BudgetExceededError,
    ContextLimitError,
    InvalidValueError,
    SessionBusyError,
    SessionClosedError,
)

SHARED = [0, *range(60, 140)]
ROUTES = [QuantizedAttention(route=Route.PACKED), QuantizedAttention(route=Route.DEQUANTIZE), QuantizedAttention()]


def team(count, *, model=T, quant=None, tails=None, shared=SHARED, **options):
    """`count` sessions on one sealed context, each with a private tail of its own length."""
    manager = SharedKVCacheManager(model.spec, quant)
    with AgentSession("first", model, manager) as first:
        first.prefill(shared)
        first.seal()
    sessions = []
    for index, tail in enumerate(tails or range(1, count + 1)):
        session = AgentSession(f"agent {index}", model, manager, **options)
        session.prefill([*shared, *(150 + (7 * index + i) % 150 for i in range(tail))])
        sessions.append(session)
    return manager, sessions


def together(sessions, tokens, attention=None):
    """Logits [N, V] of one token each, in one pass; the sessions do not change."""
    caches = [copy.deepcopy(session.caches) for session in sessions]
    groups: dict = {}
    offset = mx.array([layers[0].offset for layers in caches])
    batched = [BatchLayerCache(rows, groups, offset) for rows in zip(*caches, strict=True)]
    with quantized_attention(attention):
        return np.array(sessions[0]._model.model(mx.array(tokens)[:, None], cache=batched)[:, -1])


def alone(session, token):
    with quantized_attention(QuantizedAttention(route=Route.PACKED)):
        return np.array(session._model.model(mx.array([[token]]), cache=copy.deepcopy(session.caches))[0, -1])


@pytest.mark.parametrize("attention", ROUTES, ids=["packed", "dequantize", "default"])
@pytest.mark.parametrize("quant", [QuantSpec(), QuantSpec(4, 3, 32), QuantSpec(16, 16)], ids=str)
@pytest.mark.parametrize("tails", [(1, 7, 13), (3, 13, 40, 137), (300, 2), (5,)], ids=str)
def test_b5_b60_sessions_of_any_length_step_together_as_alone(tails, quant, attention):
    _, sessions = team(len(tails), quant=quant, tails=tails)
    tokens = [200 + 3 * i for i in range(len(tails))]
    found = together(sessions, tokens, attention)
    for row, session, token in zip(found, sessions, tokens, strict=True):
        np.testing.assert_allclose(row, alone(session, token), atol=1e-4)


def test_a_tree_of_segments_shorter_views_and_strangers_in_one_batch():
    manager, (branch, short, whole) = team(3, tails=(2, 1, 4))
    branch.seal()
    deeper = branch.fork("deeper")
    deeper.prefill(range(20, 60))
    deeper.seal()
    short.rewind(40)  # a shorter view of the shared segment
    stranger, empty = (AgentSession(name, T, manager) for name in ("stranger", "empty"))
    stranger.prefill([0, 30, 31, 32])
    stranger.seal()
    empty.prefill([0, 9])
    sessions = [branch, deeper, short, whole, stranger, empty]
    groups = group_segments([session.caches[0] for session in sessions])
    assert len(groups) == len(manager.segments()) == 4
    tokens = [200, 201, 202, 203, 204, 205]
    for attention in ROUTES:
        found = together(sessions, tokens, attention)
        for row, session, token in zip(found, sessions, tokens, strict=True):
            np.testing.assert_allclose(row, alone(session, token), atol=1e-4, err_msg=session.name)
    # Who else is there, and in what order, changes nothing but float noise.
    turned = together(sessions[::-1], tokens[::-1])[::-1]
    np.testing.assert_allclose(turned, together(sessions, tokens), atol=1e-5)


@pytest.mark.parametrize("overrides", [{"model_type": "qwen2"}, {"model_type": "qwen3"}, {"head_dim": 80}], ids=str)
def test_other_architectures_step_together(overrides):
    model = loaded(**overrides)
    _, sessions = team(3, model=model, quant=QuantSpec(8, 8, 32))
    for row, session in zip(together(sessions, [7, 8, 9]), sessions, strict=True):
        np.testing.assert_allclose(row, alone(session, [7, 8, 9][sessions.index(session)]), atol=1e-4)


def run_batch(sessions, prompts, count):
    """Logits that every session picked its tokens from, stepped together; tokens are forced."""
    with AgentBatch(sessions[0].manager) as batch:
        for session, tokens in zip(sessions, prompts, strict=True):
            session._sampler = Forced(tokens)
            batch.join(session, max_tokens=count, ignore_eos=True)
        together_steps = 0
        while len(batch):
            batch.step()
            together_steps += batch.is_together
    return [np.array(mx.stack(session._sampler.logits)) for session in sessions], together_steps


def test_a_batch_gives_each_session_the_logits_of_its_solo_run():
    prompts = [[10 + i, 20 + i, 30 + i, 40 + i, 50 + i] for i in range(4)]
    _, sessions = team(4, tails=(2, 3, 9, 20))
    found, together_steps = run_batch(sessions, prompts, 5)
    assert together_steps == 4, "all but the first, which shows that attention is routed"
    _, twins = team(4, tails=(2, 3, 9, 20))
    for got, twin, tokens in zip(found, twins, prompts, strict=True):
        (expected,), _ = run_batch([twin], [tokens], 5)
        np.testing.assert_allclose(got, expected, atol=1e-4)
    for session, twin in zip(sessions, twins, strict=True):
        assert session.token_ids == twin.token_ids
        assert_consistent(session)


def test_sessions_join_and_leave_between_steps_and_the_longest_goes_first():
    _, (first, longest, late) = team(3, tails=(2, 60, 5))
    _, (solo, _, late_solo) = team(3, tails=(2, 60, 5))
    with AgentBatch(first.manager) as batch:
        for session in (first, longest):
            batch.join(session, max_tokens=10, ignore_eos=True)
        for _ in range(3):
            batch.step()
        batch.leave(longest)
        batch.join(late, max_tokens=4, ignore_eos=True)
        events = list(batch.stream())
    texts = {session: [e.chunk.token for e in events if e.session is session] for session in (first, late)}
    assert [len(t) for t in texts.values()] == [7, 4]
    assert texts[first] == [chunk.token for chunk in solo.stream(max_tokens=10, ignore_eos=True)][3:]
    assert texts[late] == [chunk.token for chunk in late_solo.stream(max_tokens=4, ignore_eos=True)]
    assert longest.num_tokens == len(SHARED) + 60 + 3
    first.manager.check_integrity(checksums=True)


def test_a_shared_segment_is_read_once_however_many_hold_it():
    manager, sessions = team(8, tails=(4,) * 8)
    with AgentBatch(manager) as batch:
        for session in sessions:
            batch.join(session, max_tokens=3, ignore_eos=True)
        batch.step()
        assert not batch.is_together
        apart = batch.kv_bytes_read
        batch.step()
        assert batch.is_together
        (segment,) = manager.segments()
        tails = 8 * (4 + 2) * manager.spec.private_token_bytes
        assert batch.kv_bytes_read == segment.nbytes + tails
        assert apart > 7 * segment.nbytes


def test_b70_seeded_sessions_draw_in_a_batch_as_alone():
    def agents():
        manager, sessions = team(3, tails=(2, 2, 2))
        return manager, [
            AgentSession(s.name, T, manager, sampling=Sampling(temperature=1.0, seed=i)) for i, s in enumerate(sessions)
        ]

    manager, sessions = agents()
    prompts = [[*SHARED, 41 + i] for i in range(3)]
    drawn = {session.name: [] for session in sessions}
    with AgentBatch(manager) as batch:
        for session, prompt in zip(sessions, prompts, strict=True):
            batch.join(session, prompt, max_tokens=12, ignore_eos=True)
        for event in batch.stream():
            drawn[event.session.name].append(event.chunk.token)
    _, solos = agents()
    for session, prompt in zip(solos, prompts, strict=True):
        expected = [chunk.token for chunk in session.stream(prompt, max_tokens=12, ignore_eos=True)]
        assert drawn[session.name] == expected


def test_messages_and_whole_characters_in_a_batch():
    manager = SharedKVCacheManager(T.spec)
    texts = ["ok 👩‍👩‍👧 日本", "é 🏳️‍🌈 fin"]
    sessions, shown = [], {}
    with AgentBatch(manager) as batch:
        for i, text in enumerate(texts):
            ids = T.tokenizer.encode(text, add_special_tokens=False)
            session = AgentSession(f"agent {i}", T, manager, sampler=Forced([*ids, 3, 3]))
            batch.join(session, "hello", max_tokens=len(ids) + 1)
            sessions.append(session)
        for event in batch.stream():
            shown.setdefault(event.session, []).append(event.chunk)
    for session, text in zip(sessions, texts, strict=True):
        assert "".join(chunk.text for chunk in shown[session]) == text
        assert shown[session][-1].finish_reason == "stop"
        assert [m.role for m in session.messages] == ["user", "assistant"] and session.messages[-1].content == text


def test_a_session_in_a_batch_is_busy_and_free_again_after():
    manager, (one, two) = team(2)
    with AgentBatch(manager) as batch:
        batch.join(one, max_tokens=2, ignore_eos=True)
        with pytest.raises(SessionBusyError):
            one.generate_token()
        with pytest.raises(SessionBusyError):
            batch.join(one)
        assert len(batch) == 1
    assert one.generate_token() >= 0 and two.generate_token() >= 0


def test_one_that_fails_leaves_and_the_others_never_notice():
    manager, (one, two, three) = team(3)
    _, (solo, *_) = team(3)
    with AgentBatch(manager) as batch:
        for session in (one, two, three):
            batch.join(session, max_tokens=30, ignore_eos=True)
        tokens, errors = [], {}
        for count in itertools.count():
            if count == 2:
                two.close()
            if count == 4:  # the next growth of a tail does not fit
                manager._take(manager.stats().free_bytes, "everything else")
            for event in batch.step():
                if event.error is not None:
                    errors[event.session] = type(event.error)
                elif event.session is one:
                    tokens.append(event.chunk.token)
            if not len(batch):
                break
    assert errors == {two: SessionClosedError, one: BudgetExceededError, three: BudgetExceededError}
    assert 4 < len(tokens) < 30
    assert tokens == [c.token for c in solo.stream(max_tokens=30, ignore_eos=True)][: len(tokens)]
    assert one.num_tokens == len(SHARED) + 1 + len(tokens)
    manager._take(-1 * (manager.budget_bytes - manager.stats().protected_bytes), "given back")
    manager.check_integrity(checksums=True)


class Failing:
    """A model that raises when told to."""

    def __init__(self, model):
        self._model, self.is_failing = model, False

    def __call__(self, *args, **options):
        result = self._model(*args, **options)
        if self.is_failing:
            raise MemoryError("no memory")
        return result


def test_b41_a_failing_step_leaves_all_at_their_length_and_can_be_tried_again():
    failing = Failing(T.model)
    manager, sessions = team(3, model=T._replace(model=failing))
    _, solos = team(3)
    drawn = {session: [] for session in sessions}
    with AgentBatch(manager) as batch:
        for session in sessions:
            batch.join(session, max_tokens=6, ignore_eos=True)
        for count in range(6):
            if count in (1, 3):
                failing.is_failing = True
                lengths = [session.num_tokens for session in sessions]
                with pytest.raises(MemoryError):
                    batch.step()
                failing.is_failing = False
                assert [session.num_tokens for session in sessions] == lengths
                for session in sessions:
                    assert {cache.offset for cache in session.caches} == {session.num_tokens}
            for event in batch.step():
                drawn[event.session].append(event.chunk.token)
    for session, solo in zip(sessions, solos, strict=True):
        assert drawn[session] == [chunk.token for chunk in solo.stream(max_tokens=6, ignore_eos=True)]


def test_a_session_whose_logits_are_nan_leaves_at_a_consistent_length():
    class Spoiled:
        is_spoiling = False

        def __call__(self, *args, **options):
            logits = T.model(*args, **options)
            return logits * float("nan") if self.is_spoiling else logits

    model = Spoiled()
    manager, sessions = team(2, model=T._replace(model=model))
    with AgentBatch(manager) as batch:
        for session in sessions:
            batch.join(session, max_tokens=6, ignore_eos=True)
        batch.step()
        model.is_spoiling = True
        events = [*batch.step(), *batch.step()]
    assert [type(event.error).__name__ for event in events[2:]] == ["UnsupportedModelError"] * 2
    model.is_spoiling = False
    for session in sessions:
        assert_consistent(session)
        assert session.generate_token() >= 0


def test_who_left_in_a_step_that_failed_is_told_by_the_next():
    failing = Failing(T.model)
    manager, (one, two) = team(2, model=T._replace(model=failing))
    with AgentBatch(manager) as batch:
        for session in (one, two):
            batch.join(session, max_tokens=6, ignore_eos=True)
        two.close()
        failing.is_failing = True
        with pytest.raises(MemoryError):
            batch.step()
        failing.is_failing = False
        left, stepped = batch.step()
    assert left.session is two and isinstance(left.error, SessionClosedError)
    assert stepped.session is one and stepped.chunk is not None


def test_a_chosen_few_step_and_the_others_stay():
    manager, sessions = team(3)
    _, solos = team(3)
    drawn = {session: [] for session in sessions}
    with AgentBatch(manager) as batch:
        for session in sessions:
            batch.join(session, max_tokens=6, ignore_eos=True)
        for count in range(9):
            for event in batch.step(sessions if count % 3 == 0 else [sessions[count % 3]]):
                drawn[event.session].append(event.chunk.token)
    for session, solo in zip(sessions, solos, strict=True):
        expected = [chunk.token for chunk in solo.stream(max_tokens=6, ignore_eos=True)]
        assert drawn[session] == expected[: len(drawn[session])] and len(drawn[session]) >= 3


def test_what_cannot_join_is_refused_and_changes_nothing():
    manager, (one, _) = team(2)
    _, (stranger, _) = team(2)
    with AgentBatch(manager) as batch:
        with pytest.raises(InvalidValueError, match="manager"):
            batch.join(stranger)
        with pytest.raises(ContextLimitError):
            batch.join(one, max_tokens=10_000)
        with pytest.raises(InvalidValueError, match="max_tokens"):
            batch.join(one, max_tokens=0)
        assert len(batch) == 0 and batch.step() == []
    assert one.generate_token() >= 0


def test_a_model_that_is_not_routed_is_stepped_one_by_one_and_says_so():
    model = tiny_loaded(
        model_type="gemma2", query_pre_attn_scalar=64, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )
    manager, sessions = team(2, model=model)
    with AgentBatch(manager) as batch:
        for session in sessions:
            batch.join(session, max_tokens=3, ignore_eos=True)
        drawn = {session: [] for session in sessions}
        while len(batch):
            for event in batch.step():
                drawn[event.session].append(event.chunk.token)
            assert not batch.is_together
    _, solos = team(2, model=model)
    for session, solo in zip(sessions, solos, strict=True):
        assert drawn[session] == [chunk.token for chunk in solo.stream(max_tokens=3, ignore_eos=True)]
