"""`AgentBatch`: several sessions of one manager decode together, and each shared segment is read once a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from .attention import QuantizedAttention, nan_error, quantized_attention
from .batch_cache import BatchLayerCache, bytes_read, group_segments
from .context import Progress
from .errors import InvalidValueError, QKVShareError, SessionClosedError
from .manager import SharedKVCacheManager
from .session import AgentSession, StreamChunk, Turn


class BatchEvent(NamedTuple):
    """What one step gave one session: the next chunk, or the error with which it left the batch."""

    session: AgentSession
    chunk: StreamChunk | None
    error: QKVShareError | None


@dataclass(eq=False)
class _Member:
    session: AgentSession
    turn: Turn
    held: contextlib.ExitStack  # the session's own call, open as long as it is in the batch
    token: mx.array
    is_nan: mx.array  # are the logits that `token` was picked from NaN?
    num_left: int


class AgentBatch:
    """Steps any sessions of one manager and model together; they join and leave between any two steps.

    A session in a batch is busy for everybody else. The order of the sessions and who else is there
    change a session's logits by float noise only. A model whose attention cannot be routed is stepped
    one session after another, exactly; `is_together` tells how the last step went.

    One thread at a time may use a batch.
    """

    def __init__(self, manager: SharedKVCacheManager, *, attention: QuantizedAttention | None = None):
        self.manager = manager
        self.is_together = False
        self.kv_bytes_read = 0
        """KV bytes that the last step read: each distinct segment once when together, and every tail."""
        self._attention = attention or QuantizedAttention()
        self._members: dict[AgentSession, _Member] = {}
        self._can_route = False

    def __enter__(self) -> AgentBatch:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._members)

    def join(
        self,
        session: AgentSession,
        prompt: str | Sequence[int] | None = None,
        *,
        max_tokens: int = 256,
        ignore_eos: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Prefill `prompt` as `AgentSession.stream` does, and take part in the steps from now on.

        Raises what `stream` raises, and leaves the batch as it was then.
        """
        if session.manager is not self.manager:
            raise InvalidValueError(f"[AgentBatch.join] {session.name}: expected a session of the batch's manager")
        if any(member.session._model.model is not session._model.model for member in self._members.values()):
            raise InvalidValueError(f"[AgentBatch.join] {session.name}: expected the model of the other sessions")
        with contextlib.ExitStack() as stack:
            stack.enter_context(session._working())
            turn = stack.enter_context(session._turn(prompt, max_tokens, ignore_eos, progress))
            token = session._pick(session._next_logits(), 0)
            mx.eval(token)
            self._members[session] = _Member(session, turn, stack.pop_all(), token, mx.array(False), max_tokens)

    def leave(self, session: AgentSession) -> None:
        """End the session's turn here; what was shown is in its conversation. Not being in is harmless."""
        member = self._members.pop(session, None)
        if member is not None:
            member.held.close()

    def close(self) -> None:
        """Every session leaves."""
        for session in list(self._members):
            self.leave(session)

    def stream(self) -> Iterator[BatchEvent]:
        """Step until all have finished. Sessions may join and leave meanwhile."""
        while self._members:
            yield from self.step()

    def step(self) -> list[BatchEvent]:
        """One token for every session, in the order in which they joined; the finished ones leave.

        A session that is closed or finds no room in the budget leaves with its error; the others go on. If
        the model itself fails, all stay, at their last consistent length, and the error is raised.
        """
        events = self._expel()
        members = list(self._members.values())
        if not members:
            return events
        try:
            tokens = mx.stack([member.token for member in members])
            logits = self._forward(members, tokens)
            is_nan = mx.any(mx.isnan(logits), axis=-1)
            following = [
                member.session._pick(logits[row], 1) if member.num_left > 1 else member.token
                for row, member in enumerate(members)
            ]
            mx.async_eval(is_nan, *following)
            values, spoiled = tokens.tolist(), mx.stack([member.is_nan for member in members]).tolist()
        except BaseException:
            for member in members:
                member.session._roll_back()
            raise
        for row, member in enumerate(members):
            if spoiled[row]:  # type: ignore[index]
                member.session._rewind(1)  # the keys and values of the token before are not finite either
                events.append(self._fail(member, nan_error(member.session._model.spec.fingerprint.architecture)))
                continue
            member.session._accept(int(values[row]), logits[row])  # type: ignore[index, arg-type]
            member.token, member.is_nan, member.num_left = following[row], is_nan[row], member.num_left - 1
            events.append(BatchEvent(member.session, member.turn.show(member.session._tail_ids[-1]), None))
            if member.turn.is_done:
                self.leave(member.session)
        return events

    def _forward(self, members: list[_Member], tokens: mx.array) -> mx.array:
        """Logits [N, V] behind one more token [N] of every session."""
        caches = [member.session.caches for member in members]
        groups = group_segments([layers[0] for layers in caches])
        self.is_together = len(members) > 1 and self._is_routed(members)
        if not self.is_together:
            logits = mx.stack([member.session._run(member.token.reshape(1))[-1] for member in members])
            self.kv_bytes_read = sum(bytes_read(group_segments(layers[:1]), [layers]) for layers in caches)
            return logits
        offset = mx.array([layers[0].offset for layers in caches])
        batched = [BatchLayerCache(rows, groups, offset) for rows in zip(*caches, strict=True)]
        with quantized_attention(self._attention):
            logits = members[0].session._model.model(tokens[:, None], cache=batched)[:, -1]
        self.kv_bytes_read = bytes_read(groups, caches)
        return logits

    def _is_routed(self, members: list[_Member]) -> bool:
        """Is it known, from a step of a session alone, that every layer's attention reaches ours?"""
        if not self._can_route:
            caches = (member.session.caches for member in members)
            self._can_route = any(all(cache.is_decoding_routed for cache in layers) for layers in caches)
        return self._can_route

    def _expel(self) -> list[BatchEvent]:
        """Make room for one token of everyone; those that are closed or find none leave."""
        events, is_clean = [], False
        for member in list(self._members.values()):
            session = member.session
            try:
                if session._is_closed:
                    raise SessionClosedError(f"[AgentBatch] {session.name} was closed")
                is_clean |= session._make_room(1, is_clean=is_clean)
            except QKVShareError as error:
                events.append(self._fail(member, error))
        return events

    def _fail(self, member: _Member, error: QKVShareError) -> BatchEvent:
        self.leave(member.session)
        return BatchEvent(member.session, None, error)
