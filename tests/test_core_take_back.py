"""Turns that are taken back: the session is what it was before them, and a new turn equals a cold run."""

from __future__ import annotations

import pytest
from reference import T, assert_warm_is_cold
from tiny import RECURRENT, SLIDING, tiny_loaded

from mlx_qkvshare import AgentSession, HandoffCoordinator, Message, SharedKVCacheManager
from mlx_qkvshare.errors import InvalidValueError


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


@pytest.mark.parametrize("count", [0, -1, 2])
def test_too_many_or_none_are_refused(count: int) -> None:
    session = AgentSession("a", T, SharedKVCacheManager(T.spec))
    session.reply("one", max_tokens=3)
    before = session.token_ids, list(session.messages)
    with pytest.raises(InvalidValueError, match=r"expected 1\.\.1 turns"):
        session.take_back(count)
    assert (session.token_ids, session.messages) == before
