"""`AgentBatch`: several sessions of one manager decode together, and each shared segment is read once a step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from .attention import QuantizedAttention, nan_error, quantized_attention
from .batch_cache import BatchLayerCache, SegmentGroup, bytes_read
from .context import Progress
from .errors import InvalidValueError, QKVShareError, RevokedError, SessionClosedError, typed_error
from .manager import SharedKVCacheManager
from .session import AgentSession, StreamChunk, Turn
from .state_cache import grouped


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
    num_left: int
    # Of the logits that `token` was picked from: is it NaN, for all of the step that made them, and whose row in it.
    is_nan: mx.array
    row: int = 0


class Joining:
    """A session on its way into a batch: its prompt is prefilled in chunks. Busy for everybody else meanwhile."""

    def __init__(
        self,
        batch: AgentBatch,
        session: AgentSession,
        turn: Turn,
        num_left: int,
        max_tokens: int,
        held: contextlib.ExitStack,
    ):
        self.session, self.num_left = session, num_left
        """`num_left`: prompt tokens that are not computed yet."""
        self._batch, self._turn, self._max_tokens, self._held = batch, turn, max_tokens, held
        self._is_open = True

    def advance(self, max_tokens: int | None = None) -> bool:
        """Prefill one chunk of at most `max_tokens` more tokens; True as soon as the session is in the batch.

        Raises what `AgentSession.stream` raises; the session is at its last consistent length then, and free.
        """
        if not self._is_open:
            raise InvalidValueError(
                f"[Joining.advance] {self.session.name}: expected one that is joining, not one that was"
            )
        self._is_open = False  # also when this fails or is interrupted
        with self._held.pop_all() as held:
            if self.num_left:
                try:
                    self.num_left = self._turn.prefilling.send(max_tokens)
                except StopIteration:
                    self.num_left = 0
            if self.num_left == 0:
                self._batch._add(self.session, self._turn, held, self._max_tokens)
                return True
            self._held, self._is_open = held.pop_all(), True
            return False

    def abandon(self) -> None:
        """Let the session go. What was computed of a message's prompt is kept for a retry."""
        self._is_open = False
        self._held.close()


class AgentBatch:
    """Steps any sessions of one manager and model together; they join and leave between any two steps.

    A session in a batch is busy for everybody else. The order of the sessions and who else is there
    change a session's logits by float noise only. A model whose attention cannot be routed is stepped
    one session after another, exactly; `is_together` tells how the last step went. `attention` routes what is done
    together; whether a session reads the base of nested precision is its own attention's to say.

    One thread at a time may use a batch.
    """

    def __init__(self, manager: SharedKVCacheManager, *, attention: QuantizedAttention | None = None):
        self.manager = manager
        self.is_together = False
        self._stepped: tuple[weakref.ref[AgentSession], ...] = ()  # the sessions of the last step
        self._attention = attention or QuantizedAttention()
        self._members: dict[AgentSession, _Member] = {}
        self._untold: list[BatchEvent] = []  # a step that raises tells its events with the next one
        self._can_route = self._is_alone = False

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
        stop: str | Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        """Prefill `prompt` as `AgentSession.stream` does, and take part in the steps from now on.

        Raises what `stream` raises, and leaves the batch as it was then.
        """
        joining = self.begin(
            session, prompt, max_tokens=max_tokens, ignore_eos=ignore_eos, stop=stop, progress=progress
        )
        while not joining.advance():
            pass

    def begin(
        self,
        session: AgentSession,
        prompt: str | Sequence[int] | None = None,
        *,
        max_tokens: int = 256,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
        progress: Progress | None = None,
        is_budgeted: bool = False,
    ) -> Joining:
        """`join` in steps, so that the batch may go on in between: nothing is computed yet.

        With `is_budgeted` the bytes of the whole reply are taken into the manager's budget at once, so that it
        cannot run out half-way; what was not used is given back at the end.
        """
        if session.manager is not self.manager:
            raise InvalidValueError(f"[AgentBatch.join] {session.name}: expected a session of the batch's manager")
        self._check_model(session)
        with contextlib.ExitStack() as stack:
            stack.enter_context(session._working())
            turn = stack.enter_context(
                session._turn(prompt, max_tokens, ignore_eos, stop, progress, is_budgeted=is_budgeted)
            )
            return Joining(self, session, turn, next(turn.prefilling, 0), max_tokens, stack.pop_all())

    def _check_model(self, session: AgentSession) -> None:
        if any(member.session._model.model is not session._model.model for member in self._members.values()):
            raise InvalidValueError(f"[AgentBatch.join] {session.name}: expected the model of the other sessions")

    def _add(self, session: AgentSession, turn: Turn, held: contextlib.ExitStack, max_tokens: int) -> None:
        self._check_model(session)  # again: another may have joined first
        token = session._pick(session._next_logits(), 0)
        mx.eval(token)
        self._members[session] = _Member(session, turn, held.pop_all(), token, max_tokens, mx.array([False]))

    def leave(self, session: AgentSession) -> None:
        """End the session's turn here; what was shown is in its conversation. Not being in is harmless."""
        member = self._members.pop(session, None)
        if member is not None:
            self._untold = [event for event in self._untold if event.session is not session]
            member.held.close()

    def close(self) -> None:
        """Every session leaves."""
        for session in list(self._members):
            self.leave(session)

    def stream(self) -> Iterator[BatchEvent]:
        """Step until all have finished. Sessions may join and leave meanwhile."""
        while self._members:
            yield from self.step()

    def step(self, sessions: Collection[AgentSession] | None = None) -> list[BatchEvent]:
        """One token for every session, or those of `sessions`, in the order in which they joined.

        The finished ones leave. A session that is closed or finds no room in the budget leaves with its error;
        the others go on. If the model itself fails, all stay, at their last consistent length, and the error is
        raised.
        """
        chosen = [m for s, m in self._members.items() if sessions is None or s in sessions]
        self._expel(chosen)
        members = [member for member in chosen if member.session in self._members]
        try:
            if members:
                self._step(members)
        except BaseException as error:
            for member in members:
                if member.session in self._members:
                    member.session._roll_back()
            if not isinstance(error, RevokedError):
                raise
            self._expel(members)  # whose context went in the middle of the step; the others take it again
        events, self._untold = self._untold, []
        return events

    def _step(self, members: list[_Member]) -> None:
        tokens = mx.stack([member.token for member in members])
        spoiled = mx.stack([member.is_nan[member.row] for member in members])
        mx.async_eval(tokens, spoiled)  # apart, so that they can be read while the step behind them runs
        logits = self._forward(members, tokens)
        is_nan = mx.any(mx.isnan(logits), axis=-1)
        errors: dict[_Member, BaseException] = {}
        following = [member.token for member in members]
        for row, member in enumerate(members):
            if member.num_left > 1:
                try:
                    following[row] = member.session._pick(logits[row], 1)
                except Exception as error:  # its own sampler's; the others have been asked already
                    errors[member] = error
        mx.async_eval(is_nan, *following)
        picked: Any = tokens.tolist(), spoiled.tolist()
        for row, (member, token, is_spoiled) in enumerate(zip(members, *picked, strict=True)):
            session = member.session
            if is_spoiled:
                session._roll_back()
                session._rewind(1)  # the keys and values of the token before are not finite either
                self._fail(member, nan_error(session._model.spec.fingerprint.architecture))
            elif member in errors:
                session._roll_back()
                self._fail(member, typed_error(errors[member], f"[AgentBatch] {session.name}: the sampler"))
            else:
                session._accept(token, logits[row])
                member.token, member.num_left = following[row], member.num_left - 1
                member.is_nan, member.row = is_nan, row
                self._show(member, token)

    def _show(self, member: _Member, token: int) -> None:
        try:
            event = BatchEvent(member.session, member.turn.show(token), None)
        except Exception as error:  # a token that the tokenizer does not know
            self._fail(member, typed_error(error, f"[AgentBatch] {member.session.name}: token {token}"))
            return
        if member.turn.is_done:
            self.leave(member.session)
        self._untold.append(event)

    @property
    def kv_bytes_read(self) -> int:
        """KV bytes that the last step read: each distinct segment once when together, and every tail. Counted now,
        over those of its sessions that live, as they stand."""
        caches = [session._leaves for it in self._stepped if (session := it()) is not None]
        return bytes_read(caches) if self.is_together else sum(bytes_read([layers]) for layers in caches)

    def _forward(self, members: list[_Member], tokens: mx.array) -> mx.array:
        """Logits [N, V] behind one more token [N] of every session."""
        self._stepped = tuple(weakref.ref(member.session) for member in members)
        self.is_together = len(members) > 1 and self._is_routed(members)
        if self.is_together:
            try:
                return self._forward_together(members, tokens)
            except (AttributeError, TypeError, ValueError):
                # The model wants more of a cache than a batch of lengths has, such as one offset for all rows. A fault
                # of its own it raises again.
                for member in members:
                    member.session._roll_back()
                self.is_together, self._is_alone = False, True
        return mx.stack([member.session._run(member.token.reshape(1))[-1] for member in members])

    def _forward_together(self, members: list[_Member], tokens: mx.array) -> mx.array:
        caches = [member.session._leaves for member in members]
        groups: dict[int, tuple[SegmentGroup, ...]] = {}
        offset = mx.array([layers[0].offset for layers in caches])
        batched = grouped(
            [BatchLayerCache(rows, groups, offset) for rows in zip(*caches, strict=True)], self.manager.spec.grouping
        )
        with quantized_attention(self._attention):
            return members[0].session._model.model(tokens[:, None], cache=batched)[:, -1]

    def _is_routed(self, members: list[_Member]) -> bool:
        """Is it known, from a step of a session alone, that every layer's attention reaches ours?"""
        if not self._can_route and not self._is_alone:
            caches = (member.session._leaves for member in members)
            self._can_route = any(all(leaf.can_batch and leaf.is_decoding_routed for leaf in each) for each in caches)
        return self._can_route and not self._is_alone

    def _expel(self, members: list[_Member]) -> None:
        """Make room for one token of each; those that are closed or find none leave."""
        is_clean = False
        for member in members:
            session = member.session
            try:
                if session._is_closed:
                    raise SessionClosedError(f"[AgentBatch] {session.name} was closed")
                session.prefix.require_readable()
                is_clean |= session._make_room(1, is_clean=is_clean)
            except QKVShareError as error:
                self._fail(member, error)

    def _fail(self, member: _Member, error: QKVShareError) -> None:
        self.leave(member.session)
        self._untold.append(BatchEvent(member.session, None, error))
