"""Stop strings: the text ends in front of them, whatever tokens they are spread over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Forced, T, assert_warm_is_cold

from mlx_qkvshare import AgentBatch, AgentSession, SharedKVCacheManager
from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.session import Turn


class Pieces:
    """A tokenizer whose token i is the i-th of some texts."""

    eos_token_ids = (999,)

    def __init__(self, pieces):
        self.detokenizer = self
        self._pieces, self.last_segment = pieces, ""

    def add_token(self, token):
        self.last_segment = self._pieces[token]

    def finalize(self):
        pass


def shown(pieces, stop) -> tuple[list[str], str | None]:
    turn = Turn(Pieces(pieces), len(pieces), False, stop)
    texts = []
    for token in range(len(pieces)):
        chunk = turn.show(token)
        texts.append(chunk.text)
        if chunk.finish_reason:
            assert turn.is_done and turn.text == "".join(texts)
            return texts, chunk.finish_reason
    raise AssertionError("the last token ends it")


@pytest.mark.parametrize(
    ("pieces", "stop", "texts", "reason"),
    [
        (["one ", "ST", "OP two"], ("STOP",), ["one ", "", ""], "stop"),
        (["one ", "ST", "AY"], ("STOP",), ["one ", "", "STAY"], "length"),
        (["one ", "STO"], ("STOP",), ["one ", "STO"], "length"),
        (["STOP"], ("STOP",), [""], "stop"),
        (["a", "a", "a", "b"], ("aab",), ["", "", "a", ""], "stop"),
        (["x END y STOP"], ("STOP", "END"), ["x "], "stop"),
        (["xab", "cd"], ("abcd", "bc"), ["x", "a"], "stop"),
        (["日本", "語。", "次"], ("。",), ["日本", "語"], "stop"),
        (["a", "b"], (), ["a", "b"], "length"),
    ],
)
def test_text_ends_in_front_of_a_stop_string(pieces, stop, texts, reason):
    assert shown(pieces, stop) == (texts, reason)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_it_does_not_matter_how_the_text_is_cut_into_tokens(pieces, stop):
    whole = "".join(pieces)
    ends = min(((whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole), default=None)
    texts, reason = shown(pieces, stop)
    assert "".join(texts) == (whole if ends is None else whole[: ends[1]])
    assert reason == ("length" if ends is None else "stop")
    assert "".join(texts) == "".join(shown([*whole] or [""], stop)[0])


def test_the_conversation_goes_on_from_the_text_that_was_shown():
    manager = SharedKVCacheManager(T.spec)
    said = T.tokenizer.encode("fine. STOP and more", add_special_tokens=False)
    session = AgentSession("agent", T, manager, sampler=Forced(said))
    assert session.reply("hello", max_tokens=60, stop="STOP") == "fine. "
    assert (session.messages[-1].content, session.messages[-1].token_ids) == ("fine. ", None)
    session._sampler = None
    session.reply("and now?", max_tokens=3)
    decoded = T.tokenizer.decode(session.token_ids)
    assert "fine. <|im_end|>" in decoded and "more" not in decoded
    assert_warm_is_cold(session)


def test_what_is_held_back_when_the_turn_is_dropped_is_not_in_the_conversation():
    manager = SharedKVCacheManager(T.spec)
    said = T.tokenizer.encode("one STO", add_special_tokens=False)
    session = AgentSession("agent", T, manager, sampler=Forced(said))
    stream = session.stream("hello", max_tokens=60, stop="STOP")
    for _ in said:
        next(stream)
    stream.close()
    assert (session.messages[-1].content, session.messages[-1].token_ids) == ("one ", None)


def test_a_stop_string_ends_a_turn_in_a_batch_and_only_that():
    manager = SharedKVCacheManager(T.spec)
    ids = T.tokenizer.encode("one two three four", add_special_tokens=False)
    one, two = (AgentSession(name, T, manager, sampler=Forced(ids)) for name in ("one", "two"))
    text = {one: "", two: ""}
    with AgentBatch(manager) as batch:
        batch.join(one, "hi", max_tokens=len(ids), stop=["three"])
        batch.join(two, "hi", max_tokens=len(ids))
        for event in batch.stream():
            text[event.session] += event.chunk.text
    assert text == {one: "one two ", two: "one two three four"}


@pytest.mark.parametrize("stop", ["", ["a", ""], [3], [None]])
def test_a_stop_that_is_no_text_is_refused_and_changes_nothing(stop):
    session = AgentSession("agent", T, SharedKVCacheManager(T.spec))
    with pytest.raises(InvalidValueError, match="stop"):
        session.reply("hello", stop=stop)
    assert session.num_tokens == 0 and session.messages == []
