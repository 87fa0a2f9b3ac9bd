"""`AgentSession`: one agent's place in the shared context: prefill, stream, seal, fork, hand over."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .attention import QuantizedAttention, quantized_attention, require_finite
from .chat import ChatFormat, Message
from .errors import (
    ContextLimitError,
    FingerprintMismatchError,
    IntegrityError,
    InvalidValueError,
    SessionBusyError,
    SessionClosedError,
)
from .layer_cache import LayerCache, tail_capacity
from .manager import SharedKVCacheManager, SharedPrefix
from .package import HandoffPackage, Span
from .sampling import Sampling

if TYPE_CHECKING:
    from .model import LoadedModel

Progress = Callable[[int, int], None]

# The last rows of a prefill run alone: logits, the widest matrix of all, are then made for few rows only.
_LAST_CHUNK_TOKENS = 32


@dataclass(frozen=True)
class PrefillReport:
    """What one prefill reused (tokens whose K/V stood ready) and what it computed."""

    reused_tokens: int
    computed_tokens: int


class StreamChunk(NamedTuple):
    """One generated token. `text` may be empty; `finish_reason` is None, "stop" or "length"."""

    text: str
    token: int
    finish_reason: str | None


class AgentSession:
    """One agent: a shared prefix by reference, a private tail, and the conversation so far.

    Args:
        name: shown to people and written into packages.
        model: what `load` returned.
        manager: where shared segments live; made for the same model.
        role_prompt: the agent's instructions: the system message of a fresh conversation; after a
            handoff the head of the agent's next turn, since shared keys cannot be moved.
        sampling: temperature, filters and seed; `sampler` (logits [V] -> token id array) overrides it.
        max_context_tokens: limit for shared + private + requested tokens (default: the model's).
        prefill_step_tokens: tokens per prefill chunk.

    A session runs one call at a time (`SessionBusyError` otherwise); sessions run beside each other on
    any threads. A failure in the middle of a call leaves it at its last consistent length. A worker
    thread should end with `mx.clear_streams()`, see the README.
    """

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        manager: SharedKVCacheManager,
        *,
        role_prompt: str | None = None,
        sampling: Sampling | None = None,
        sampler: Callable[[mx.array], mx.array] | None = None,
        max_context_tokens: int | None = None,
        prefill_step_tokens: int = 512,
        attention: QuantizedAttention | None = None,
    ):
        if (field := manager.spec.fingerprint.first_difference(model.spec.fingerprint)) is not None:
            raise FingerprintMismatchError(f"[AgentSession] {field}: the manager was made for another model")
        limit = model.spec.max_context_tokens if max_context_tokens is None else max_context_tokens
        if not 0 < limit <= model.spec.max_context_tokens:
            raise InvalidValueError(
                f"[AgentSession] max_context_tokens: expected 1..{model.spec.max_context_tokens}, got {limit}"
            )
        if prefill_step_tokens <= 0:
            raise InvalidValueError(f"[AgentSession] prefill_step_tokens: expected > 0, got {prefill_step_tokens}")
        self.name, self.manager, self.role_prompt = name, manager, role_prompt
        self.sampling, self.max_context_tokens = sampling or Sampling(), limit
        self.messages: list[Message] = []
        self.last_prefill = PrefillReport(0, 0)
        self._model, self._sampler, self._step = model, sampler, prefill_step_tokens
        self._attention = attention or QuantizedAttention()
        self._format: ChatFormat | None = None
        self._seed = secrets.randbits(32) if self.sampling.seed is None else self.sampling.seed
        self._num_drawn = 0
        self._id, self._sequence = secrets.token_hex(8), 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._role_is_due = True
        self._base_tokens = 0  # tokens in front of the conversation that came as ids, not as messages
        self._tail_ids: list[int] = []
        self._logits: mx.array | None = None  # of the last token, when its forward was the latest
        self._adopt(manager.get_shared_kv_cache(()))

    # --- looking -----------------------------------------------------------------------------------

    @property
    def prefix(self) -> SharedPrefix:
        """The shared prefix that this session holds."""
        return self._prefix

    @property
    def caches(self) -> list[LayerCache]:
        """The per-layer caches, as mlx-lm's models take them. `copy.deepcopy` of the list is a fork."""
        return self._caches

    @property
    def num_tokens(self) -> int:
        return self._prefix.num_tokens + len(self._tail_ids)

    @property
    def token_ids(self) -> list[int]:
        """Every token whose keys and values the session has, shared and private."""
        return self._prefix.token_ids + self._tail_ids

    @property
    def private_bytes(self) -> int:
        """Bytes of the private tail's buffers."""
        return sum(cache.nbytes for cache in self._caches)

    def __repr__(self) -> str:
        return f"AgentSession({self.name!r}, {self._prefix.num_tokens} shared + {len(self._tail_ids)} private tokens)"

    # --- prefill -----------------------------------------------------------------------------------

    def prefill(self, token_ids: Sequence[int], *, progress: Progress | None = None) -> PrefillReport:
        """Append `token_ids`; a fresh session first takes what the manager holds of them.

        Args:
            progress: called with (tokens done, tokens in all) after every chunk.

        Raises:
            ContextLimitError, BudgetExceededError: before any token is computed.
        """
        with self._working():
            return self._prefill_raw(token_ids, progress)

    def generate_kv_cache(self, token_ids: Sequence[int], *, progress: Progress | None = None) -> list[LayerCache]:
        """`prefill`, returning the caches."""
        self.prefill(token_ids, progress=progress)
        return self._caches

    def score(self, token_ids: Sequence[int]) -> mx.array:
        """Append `token_ids` [L] in one step and return their next-token logits [L, V]."""
        with self._working():
            self._check_room(len(token_ids))
            self._make_room(len(token_ids))
            logits = self._run(mx.array(token_ids))
            mx.eval(logits, [cache.state for cache in self._caches])
            self._tail_ids.extend(token_ids)
            self._start_conversation_here()
            return logits

    def sync(self, token_ids: Sequence[int], *, progress: Progress | None = None) -> PrefillReport:
        """Make the session hold exactly `token_ids`: keep the longest common token prefix, compute the rest."""
        with self._working():
            try:
                return self._prefill(list(token_ids), progress)
            finally:  # also after a failure, which leaves the part that was computed
                self._start_conversation_here()

    def _prefill_raw(
        self, token_ids: Sequence[int], progress: Progress | None = None, *, reserve: int = 0
    ) -> PrefillReport:
        start = self.num_tokens
        try:
            report = self._prefill([*self.token_ids, *token_ids], progress, reserve=reserve)
        except BaseException:  # all or nothing: a retry must not append the first chunks twice
            self._roll_back()
            self._rewind(max(0, self.num_tokens - start))
            raise
        self._start_conversation_here()
        return report

    def _start_conversation_here(self) -> None:
        """Tokens given as ids are context that no message stands for: later turns come behind them."""
        self._base_tokens, self.messages = self.num_tokens, []

    def _prefill(self, wanted: list[int], progress: Progress | None = None, *, reserve: int = 0) -> PrefillReport:
        needed = len(wanted) + reserve
        if needed > self.max_context_tokens:
            raise ContextLimitError(
                f"[AgentSession {self.name}] needed {needed} positions, available {self.max_context_tokens}"
            )
        held = self.token_ids
        common = next(
            (i for i, (a, b) in enumerate(zip(held, wanted, strict=False)) if a != b), min(len(held), len(wanted))
        )
        stored = self.manager.match_prefix(wanted)
        if stored.num_tokens > common:
            self._adopt(stored)
            common = stored.num_tokens
        else:
            stored.release()
            self._rewind(len(held) - common)
        self._compute(wanted[common:], progress)
        self.last_prefill = PrefillReport(common, len(wanted) - common)
        return self.last_prefill

    def _compute(self, token_ids: list[int], progress: Progress | None = None) -> None:
        total, done = len(token_ids), 0
        self._make_room(total)
        for size in _chunk_sizes(total, self._step):
            chunk = token_ids[done : done + size]
            logits = self._forward(mx.array(chunk))
            done += size
            if done == total:
                mx.eval(logits, [cache.state for cache in self._caches])
                require_finite(logits, self._model.spec.fingerprint.architecture)
                self._logits = logits
            else:
                mx.eval([cache.state for cache in self._caches])
            self._tail_ids.extend(chunk)
            mx.clear_cache()
            if progress:
                progress(done, total)

    def _make_room(self, num_tokens: int) -> None:
        """Grow every layer's tail for `num_tokens` more, or raise `BudgetExceededError` and grow none."""
        stop = len(self._tail_ids) + num_tokens
        if all(cache.capacity >= stop for cache in self._caches):
            return
        self._prefix.reserve_tail(tail_capacity(stop))
        # MLX hands out cached buffers up to two pages too large, which on a short tail is a third: start clean.
        mx.clear_cache()
        for cache in self._caches:
            cache.grow(tail_capacity(stop))
        mx.eval([cache.state for cache in self._caches])

    def _forward(self, token_ids: mx.array) -> mx.array:
        """The last token's logits [V], lazy, after `token_ids` [L] behind all that is cached."""
        return self._run(token_ids)[-1]

    def _run(self, token_ids: mx.array) -> mx.array:
        self._logits = None
        with quantized_attention(self._attention):
            return self._model.model(token_ids[None], cache=self._caches)[0]

    def _rewind(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        before = [(cache.shared_tokens, cache.tail_tokens) for cache in self._caches]
        trimmed = [cache.trim(num_tokens) for cache in self._caches]
        if any(count != num_tokens for count in trimmed):
            for cache, (shared, tail) in zip(self._caches, before, strict=True):
                cache.shared_tokens, cache.tail_tokens = shared, tail
            layer = next(i for i, count in enumerate(trimmed) if count != num_tokens)
            raise IntegrityError(
                f"[AgentSession.rewind] layer {layer}: expected to trim {num_tokens}, got {trimmed[layer]}"
            )
        self._logits = None
        if num_tokens <= len(self._tail_ids):
            del self._tail_ids[len(self._tail_ids) - num_tokens :]
        else:
            self._prefix.truncate(self.num_tokens - num_tokens)
            self._tail_ids.clear()

    # --- decode ------------------------------------------------------------------------------------

    def generate_token(self) -> int:
        """Sample one token behind all that is held, append it, and return its id."""
        with self._working():
            self._check_room(1)
            token = next(self._tokens())
            self._start_conversation_here()
            return token

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        max_tokens: int = 256,
        ignore_eos: bool = False,
        progress: Progress | None = None,
    ) -> Iterator[StreamChunk]:
        """Generate until the end of the turn (unless `ignore_eos`) or `max_tokens`, a `StreamChunk` per token.

        `prompt` is the user's next message (str), token ids to append, or None to go on from what is held.
        The reply joins `messages` when the prompt was a message, also when the iterator is dropped half-way.
        """
        with self._working():
            if max_tokens <= 0:
                raise InvalidValueError(f"[AgentSession {self.name}] max_tokens: expected > 0, got {max_tokens}")
            if isinstance(prompt, str):
                self._say(prompt, progress, reserve=max_tokens)
            elif prompt is not None:
                self._prefill_raw(prompt, progress, reserve=max_tokens)
            else:
                self._check_room(max_tokens)
            is_turn = prompt is None or isinstance(prompt, str)
            yield from self._decode(max_tokens, ignore_eos, is_turn=is_turn and self._awaits_reply())

    def reply(self, prompt: str | Sequence[int] | None = None, *, max_tokens: int = 256) -> str:
        """The whole text of `stream`."""
        return "".join(chunk.text for chunk in self.stream(prompt, max_tokens=max_tokens))

    def _decode(self, max_tokens: int, ignore_eos: bool, *, is_turn: bool) -> Iterator[StreamChunk]:
        detokenizer = self._model.tokenizer.detokenizer
        ends = () if ignore_eos else self._model.tokenizer.eos_token_ids
        shown, kept, is_done = "", [], False
        try:
            for count, token in enumerate(self._tokens(), start=1):
                reason = "stop" if token in ends else "length" if count == max_tokens else None
                if reason != "stop":
                    detokenizer.add_token(token)
                    kept.append(token)
                if reason:
                    detokenizer.finalize()
                text = detokenizer.last_segment
                shown, is_done = shown + text, reason is not None
                yield StreamChunk(text, token, reason)
                if is_done:
                    return
        finally:
            self._logits = None  # 4 bytes a word of the vocabulary: too much to keep for every idle agent
            if is_turn and (kept or is_done):
                self.messages.append(Message("assistant", shown, self.name, tuple(kept)))
            elif is_turn:  # failed before the first token: a retry finds the conversation as it was
                self._unsay()
            else:
                self._start_conversation_here()

    def _tokens(self) -> Iterator[int]:
        """Token after token, each appended when it is yielded; the step behind it is queued already."""
        token = self._pick(self._next_logits(), 0)
        while True:
            self._make_room(1)
            logits = self._forward(token.reshape(1))
            following = self._pick(logits, 1)
            mx.async_eval(following, logits)
            value = int(token.item())
            self._tail_ids.append(value)
            self._logits = logits
            self._num_drawn += 1
            yield value
            require_finite(logits, self._model.spec.fingerprint.architecture)
            token = following

    def _pick(self, logits: mx.array, ahead: int) -> mx.array:
        if self._sampler is not None:
            return self._sampler(logits)
        return self.sampling.pick(logits, self._seed, self._num_drawn + ahead)

    def _next_logits(self) -> mx.array:
        if self._logits is None:
            if self.num_tokens == 0:
                raise InvalidValueError(
                    f"[AgentSession {self.name}] expected tokens to go on from, got an empty session"
                )
            # All tokens came ready-made (a handoff, an exact hit): the last one is run again for its logits.
            last = self._tail_ids[-1] if self._tail_ids else self._prefix.views[-1].token_ids[-1]
            self._rewind(1)
            self._compute([last])
        assert self._logits is not None
        return self._logits

    def _check_room(self, num_tokens: int) -> None:
        if self.num_tokens + num_tokens > self.max_context_tokens:
            raise ContextLimitError(
                f"[AgentSession {self.name}] needed {self.num_tokens + num_tokens} positions, "
                f"available {self.max_context_tokens}"
            )

    # --- the conversation --------------------------------------------------------------------------

    def say(self, text: str, *, progress: Progress | None = None) -> PrefillReport:
        """Add a user message and prefill it, without answering."""
        with self._working():
            return self._say(text, progress)

    def _say(self, text: str, progress: Progress | None, *, reserve: int = 0) -> PrefillReport:
        self._num_before_say = len(self.messages)
        if self._role_is_due and self.role_prompt:
            if self.num_tokens:  # behind a shared context a system message would have to move it
                text = f"{self.role_prompt}\n\n{text}"
            else:
                self.messages.append(Message("system", self.role_prompt, self.name))
        self.messages.append(Message("user", text))
        try:
            turns = self._chat_format().render(self.messages, is_start=self._base_tokens == 0)
            report = self._prefill([*self.token_ids[: self._base_tokens], *turns], progress, reserve=reserve)
        except BaseException:
            self._unsay()
            raise
        self._role_is_due = False
        return report

    def _awaits_reply(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "user"

    def _unsay(self) -> None:
        del self.messages[self._num_before_say :]

    def _chat_format(self) -> ChatFormat:
        if self._format is None:
            self._format = ChatFormat(self._model.tokenizer)
        return self._format

    # --- seal, fork, rewind, hand over, close ------------------------------------------------------

    def seal(self) -> int:
        """Quantize the private tail once into a shared segment; the tokens sealed. Lossless to repeat: a no-op.

        Raises:
            NonFiniteError: the tail is kept as it is.
            BudgetExceededError: the same.
        """
        with self._working():
            return self._seal()

    def _seal(self) -> int:
        count = len(self._tail_ids)
        if count == 0:
            return 0
        if not self.manager.extend_if_sealed(self._prefix, self._tail_ids):
            slot = self.manager.allocate_shared_slot(count, replacing=self._prefix)
            layers = [cache.take_tail() for cache in self._caches]
            try:
                self.manager.quantize_and_store(slot, self._tail_ids, layers, prefix=self._prefix, consume=True)
            except BaseException:
                if all(layer is not None for layer in layers):  # nothing was consumed yet
                    for cache, (keys, values) in zip(self._caches, layers, strict=True):
                        cache.keys, cache.values = keys, values
                raise
        self._tail_ids.clear()
        self._logits = None
        self.manager.compact(self._prefix)
        for cache in self._caches:
            cache.reset_tail()
        return count

    def fork(self, name: str) -> AgentSession:
        """A new session on the same context: seals first, then shares every byte."""
        with self._working():
            self._seal()
            twin = AgentSession(
                name, self._model, self.manager, role_prompt=self.role_prompt, sampling=self.sampling,
                sampler=self._sampler, max_context_tokens=self.max_context_tokens,
                prefill_step_tokens=self._step, attention=self._attention,
            )  # fmt: skip
            twin._adopt(self._prefix.fork())
            twin.messages, twin._base_tokens = list(self.messages), self._base_tokens
            twin._role_is_due = self._role_is_due
            return twin

    def rewind(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens: the private tail's, then by a shorter view of the shared ones.

        Other holders never notice. `messages` stay: the next turn computes again what it needs of them.
        """
        with self._working():
            if not 0 <= num_tokens <= self.num_tokens:
                raise InvalidValueError(f"[AgentSession.rewind] expected 0..{self.num_tokens}, got {num_tokens}")
            self._rewind(num_tokens)
            self._base_tokens = min(self._base_tokens, self.num_tokens)

    def package_state(self) -> HandoffPackage:
        """Seal, and describe the whole context by reference. All of it is evaluated: any thread may receive it."""
        with self._working():
            self._seal()
            self._sequence += 1
            return HandoffPackage(
                manager=self.manager.id,
                sender=self.name,
                sender_id=self._id,
                sequence=self._sequence,
                fingerprint=self.manager.spec.fingerprint,
                quant=self.manager.quant,
                spans=tuple(Span.of(view) for view in self._prefix.views),
                base_tokens=self._base_tokens,
                messages=tuple(self.messages),
            )

    def receive_state(self, package: HandoffPackage) -> None:
        """Take over the context of `package`, by reference, in place of the own one.

        Raises `HandoffError` if a slot is gone; the session is then as it was. `HandoffCoordinator`
        checks the rest of a package.
        """
        with self._working():
            prefix = self.manager.get_shared_kv_cache((span.slot, span.length) for span in package.spans)
            self._adopt(prefix)
            self.messages, self._base_tokens = list(package.messages), package.base_tokens
            self._role_is_due = True

    def reset(self) -> None:
        """Let go of the whole context and conversation; the session may begin anew."""
        with self._working():
            self._adopt(self.manager.get_shared_kv_cache(()))
            self.messages, self._base_tokens, self._role_is_due = [], 0, True

    def close(self) -> None:
        """Release everything. Twice is harmless. Also on leaving a `with` block and when garbage collected."""
        self._is_closed = True
        self._prefix.release()
        self._tail_ids, self._logits, self._caches = [], None, []

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # --- one call at a time, all or nothing --------------------------------------------------------

    def _adopt(self, prefix: SharedPrefix) -> None:
        """Stand on `prefix` with an empty tail; what was held before is released after."""
        before = getattr(self, "_prefix", None)
        prefix.is_busy = self._lock.locked()
        self._prefix, self._caches = prefix, self.manager.make_caches(prefix)
        self._tail_ids, self._logits = [], None
        if before is not None:
            before.release()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError(f"[AgentSession {self.name}] another call on this session is still running")
        try:
            if self._is_closed:
                raise SessionClosedError(f"[AgentSession {self.name}] expected an open session, got a closed one")
            self._prefix.is_busy = True
            yield
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._prefix.is_busy = False
            self._lock.release()

    def _roll_back(self) -> None:
        """Bring every layer to the length of `token_ids`; if the tail cannot be evaluated, to the sealed length."""
        for cache in self._caches:
            cache.shared_tokens, cache.tail_tokens = self._prefix.num_tokens, len(self._tail_ids)
        try:
            mx.eval([cache.state for cache in self._caches])
            is_whole = not self._tail_ids or all(cache.keys is not None for cache in self._caches)
        except RuntimeError:
            is_whole = False
        if not is_whole:
            self._tail_ids, self._logits = [], None
            for cache in self._caches:
                cache.reset_tail()


def _chunk_sizes(total: int, step: int) -> list[int]:
    if total <= min(step, 2 * _LAST_CHUNK_TOKENS):
        return [total] if total else []
    last = min(step, _LAST_CHUNK_TOKENS)
    body = total - last
    return [min(step, body - done) for done in range(0, body, step)] + [last]
