"""Turns that are taken back: the session is what it was before them, and a new turn equals a cold run."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from reference import NEXT, T, assert_warm_is_cold, decode
from tiny import RECURRENT, SLIDING, tiny_loaded

from mlx_qkvshare import AgentSession, HandoffCoordinator, Message, SharedKVCacheManager
from mlx_qkvshare.errors import ContextLimitError, InvalidValueError


@pytest.mark.parametrize("kind", [{}, SLIDING, RECURRENT], ids=["full", "sliding", "recurrent"])
def test_the_last_turns_are_forgotten(kind: dict) -> None:
    model = tiny_loaded(**kind)
    session = AgentSession("a", model, SharedKVCacheManager(model.spec), role_prompt="R")
    for text in ("one", "two", "three"):
        session.reply(text, max_tokens=5)
    session.seal()
    before, messages = session.num_tokens, list(session.messages)
    assert session.take_back() == before - session.num_tokens > 0
    assert session.messages == messages[:-2]
    assert session.take_back(2) > 0
    assert session.messages == [Message("system", "R", "a")] and session.num_tokens < 10
    with pytest.raises(InvalidValueError, match=r"expected 1\.\.0 turns, got 1"):
        session.take_back()
    session.manager.check_integrity()


def test_going_on_from_there_equals_a_cold_run() -> None:
    session = AgentSession("a", T, SharedKVCacheManager(T.spec), role_prompt="R")
    session.reply("one", max_tokens=5)
    tokens = session.num_tokens
    session.reply("two", max_tokens=5)
    session.take_back()
    assert tokens <= session.num_tokens + 1, "only what came after the first answer is gone"
    again = session.last_prefill
    session.reply("2", max_tokens=5)
    assert session.last_prefill.reused_tokens >= tokens - 1 and session.last_prefill is not again
    assert_warm_is_cold(session)


def test_a_role_that_was_taken_back_is_said_again() -> None:
    manager = SharedKVCacheManager(T.spec)
    planner, writer = (AgentSession(name, T, manager, role_prompt=f"You are {name}.") for name in ("planner", "writer"))
    planner.reply("plan", max_tokens=3)
    HandoffCoordinator(manager).request_handoff(planner, writer)
    writer.reply("write", max_tokens=3)
    writer.take_back()
    writer.reply("shorter", max_tokens=3)
    assert [m.content for m in writer.messages if m.role == "user"] == ["plan", "You are writer.\n\nshorter"]
    writer.reply("again", max_tokens=3)
    writer.take_back()
    writer.reply("more", max_tokens=3)
    assert [m.content for m in writer.messages if m.role == "user"][-1] == "more", "the role stands further up"


def test_tokens_in_front_of_the_conversation_stay() -> None:
    session = AgentSession("a", T, SharedKVCacheManager(T.spec))
    session.prefill(list(range(4, 24)))
    session.reply("one", max_tokens=3)
    session.take_back()
    assert session.token_ids == list(range(4, 24)) and session.messages == []


@pytest.mark.parametrize("is_sealed", [False, True], ids=["private", "sealed"])
@pytest.mark.parametrize("kind", [{}, SLIDING, RECURRENT], ids=["full", "sliding", "recurrent"])
def test_a_message_that_is_stopped_leaves_nothing(kind: dict, is_sealed: bool) -> None:
    model = tiny_loaded(**kind)
    manager = SharedKVCacheManager(model.spec)
    session = AgentSession("a", model, manager, role_prompt="R", prefill_step_tokens=16)
    session.reply("one", max_tokens=5)
    if is_sealed:
        session.seal()

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    def held() -> tuple:
        return session.num_tokens, list(session.messages), manager.stats().used_bytes

    before, ids = held(), session.token_ids
    for say in (session.say, lambda *args, **options: list(session.stream(*args, max_tokens=8, **options))):
        with pytest.raises(KeyboardInterrupt):
            say("a long text " * 30, progress=stop)
        assert held()[1] == before[1] and held()[0] <= before[0] and held()[2] <= before[2]
        assert session.token_ids == ids[: session.num_tokens]
        manager.check_integrity()
    # A ring that has moved on, and the state of a tail, may have to be computed again.
    assert held() == before or (bool(kind) and not is_sealed)
    undisturbed = AgentSession("a", model, SharedKVCacheManager(model.spec), role_prompt="R", prefill_step_tokens=16)
    undisturbed.reply("one", max_tokens=5)
    if is_sealed:
        undisturbed.seal()
    assert session.reply("two", max_tokens=5) == undisturbed.reply("two", max_tokens=5)
    np.testing.assert_allclose(decode(session, NEXT), decode(undisturbed, NEXT), rtol=0, atol=1e-4)
    with session.fork("b") as fork:
        assert fork.num_tokens == session.num_tokens


def test_a_message_that_is_refused_changes_nothing() -> None:
    session = AgentSession("a", T, SharedKVCacheManager(T.spec))
    session.say("one")  # ends with the prompt for an answer, which the next message would not keep
    before = session.token_ids
    with pytest.raises(ContextLimitError):
        session.say("a long text " * 300)
    assert session.token_ids == before
    assert len(list(session.stream(max_tokens=3))) == 3


def test_a_turn_that_fails_before_its_first_token_leaves_nothing() -> None:
    def broken(logits: mx.array) -> mx.array:
        raise ValueError("no")

    session = AgentSession("a", T, SharedKVCacheManager(T.spec), role_prompt="R", sampler=broken)
    session.say("one")
    ids, messages, used = session.token_ids, list(session.messages), session.manager.stats().used_bytes
    with pytest.raises(ValueError, match="no"):
        session.reply("a long text " * 30, max_tokens=8)
    # Where the next message begins the prompt for the last answer ended.
    assert ids[: session.num_tokens] == session.token_ids and session.num_tokens >= len(ids) - 8
    assert (session.messages, session.manager.stats().used_bytes) == (messages, used)


@pytest.mark.parametrize("count", [0, -1, 2])
def test_too_many_or_none_are_refused(count: int) -> None:
    session = AgentSession("a", T, SharedKVCacheManager(T.spec))
    session.reply("one", max_tokens=3)
    before = session.token_ids, list(session.messages)
    with pytest.raises(InvalidValueError, match=r"expected 1\.\.1 turns"):
        session.take_back(count)
    assert (session.token_ids, session.messages) == before
