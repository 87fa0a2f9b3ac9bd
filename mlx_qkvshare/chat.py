"""From messages to token ids: the model's chat template with contents spliced in as their own ids.

Contents are tokenized apart from the template's own text. So a generated reply keeps the ids that were
generated (its text may tokenize otherwise), and a control token spelled out in a user's or another
agent's text stays text.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import AccessError, ChatTemplateError, InvalidValueError
from .policy import TEAM, Access

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """One turn. `token_ids` are the generated ids of `content`, `author` who spoke, `domain` who may read."""

    role: str
    content: str
    author: str | None = None
    token_ids: tuple[int, ...] | None = None
    domain: str = TEAM

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidValueError(f"[Message] role: expected one of {ROLES}, got {self.role!r}")
        # Lone surrogates (undecodable terminal input) cannot be tokenized; U+FFFD stands for them.
        clean = self.content.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        object.__setattr__(self, "content", clean)


def require_readable(messages: Sequence[Message], access: Access) -> None:
    """Raise `AccessError` unless `access` may read all that was said: it is computed again from the texts."""
    for number, message in enumerate(messages):
        if not access.may_read({message.domain}):
            raise AccessError(
                f"[handoff] message {number}: expected one of the domains {sorted(access.reads or ())}, "
                f"got {message.domain!r}"
            )


class ChatFormat:
    """Renders conversations with `tokenizer`'s chat template (an mlx-lm or Hugging Face tokenizer)."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added = [text for text in tokenizer.get_added_vocab() if text.strip()]
        longest_first = sorted(added, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if added else None
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._bos = tokenizer.bos_token_id
        self._adds_bos = self._bos is not None and tokenizer.encode("")[:1] == [self._bos]
        self._encode_piece = functools.lru_cache(maxsize=256)(self._encode)
        # SentencePiece puts a space before every text that it gets; behind an anchor it does not.
        self._anchor_ids: tuple[int, ...] = ()
        anchor_ids, plain, anchored = (self._encode(text, False) for text in ("\n", "a", "\na"))
        if anchored[: len(anchor_ids)] == anchor_ids and anchored[len(anchor_ids) :] != plain:
            self._anchor_ids = anchor_ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text: control tokens spelled out in it become ordinary tokens, no BOS is added."""
        return self._encode_parts(self._defused(text))

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, is_start: bool = True
    ) -> list[int]:
        """Token ids of the whole conversation, with one BOS if the tokenizer adds one; without if not `is_start`.

        A template that refuses the conversation (no system role, roles that do not alternate) gets it
        folded: the system text leads the first user turn, neighbours of one role become one turn.

        Raises `ChatTemplateError` when there is no template, or it refuses the folded form too.
        """
        try:
            ids = self._splice(list(messages), add_generation_prompt)
        except _Refused:
            try:
                ids = self._splice(_fold(messages), add_generation_prompt)
            except _Refused as error:
                raise ChatTemplateError(f"[ChatFormat.render] the model's chat template refuses: {error}") from error
        if self._adds_bos and (ids[:1] == [self._bos]) != is_start:
            ids = [self._bos, *ids] if is_start else ids[1:]
        return ids

    def _splice(self, messages: list[Message], add_generation_prompt: bool) -> list[int]:
        left, right = _unused_marks(messages)
        marked = [replace(m, content=f"{left}{i}{right}", token_ids=None) for i, m in enumerate(messages)]
        spliced: dict[str, list[str] | Sequence[int]] = {}
        shown = list(marked)
        for i in self._transformed(messages, marked, add_generation_prompt):
            # The template edits this content (strips a think block, trims): it must see the text itself,
            # with only spelled-out control tokens hidden.
            content, hidden = self._hide_control(messages[i].content, left, right, len(messages) + len(spliced))
            shown[i] = replace(marked[i], content=content)
            spliced |= hidden
        for i, message in enumerate(messages):
            if shown[i] is marked[i]:
                ids = message.token_ids
                # A control token that the model itself sampled must not pass for the template's own.
                is_plain = ids is not None and self._special_ids.isdisjoint(ids)
                spliced[marked[i].content] = ids if is_plain and ids is not None else self._defused(message.content)
        text = self._template(shown, add_generation_prompt)
        parts: list[str | Sequence[int]] = []
        for piece in re.split(f"({left}\\d+{right})", text):
            known = spliced.get(piece, [piece])
            if known and isinstance(known[0], int):
                parts.append(known)  # type: ignore[arg-type]
            else:
                parts.extend(known)  # type: ignore[arg-type]
        return self._encode_parts(parts)

    def _transformed(self, messages: list[Message], marked: list[Message], prompt: bool) -> list[int]:
        """Indices of the messages whose content the template does not copy verbatim."""
        base = self._template(marked, prompt)

        def is_verbatim(indices: range | list[int]) -> bool:
            mixed, expected = list(marked), base
            for i in indices:
                mixed[i] = replace(marked[i], content=messages[i].content)
                expected = expected.replace(marked[i].content, messages[i].content)
            return self._template(mixed, prompt) == expected

        everything = range(len(messages))
        return [] if is_verbatim(everything) else [i for i in everything if not is_verbatim([i])]

    def _hide_control(
        self, content: str, left: str, right: str, first: int
    ) -> tuple[str, dict[str, list[str] | Sequence[int]]]:
        hidden: dict[str, list[str] | Sequence[int]] = {}

        def hide(match: re.Match[str]) -> str:
            mark = f"{left}{first + len(hidden)}{right}"
            hidden[mark] = self._defused(match[0])
            return mark

        return (self._control.sub(hide, content) if self._control else content), hidden

    def _template(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        from jinja2.exceptions import TemplateError

        if not getattr(self._tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "[ChatFormat.render] expected a tokenizer with a chat template, got one without, as base models have; "
                "take an instruction-tuned model, give token ids, or set tokenizer.chat_template"
            )
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise _Refused(str(error)) from error

    def _defused(self, text: str) -> list[str]:
        """`text` cut behind the first character of every control token in it, so that none is recognized."""
        pieces, start = [], 0
        while self._control and (match := self._control.search(text, start)):
            cut = match.start() + 1
            pieces.append(text[:cut])
            text, start = text[cut:], 0
        return [*pieces, text]

    def _encode_parts(self, parts: Sequence[str | Sequence[int]]) -> list[int]:
        """Texts and ready ids, one after another, as one text would be tokenized between its control tokens."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                follows_text = bool(ids) and ids[-1] not in self._special_ids
                ids.extend(self._encode_piece(part, follows_text))
            else:
                ids.extend(part)
        return ids

    def _encode(self, text: str, follows_text: bool) -> tuple[int, ...]:
        if not text:
            return ()
        if follows_text and self._anchor_ids:
            ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
            if tuple(ids[: len(self._anchor_ids)]) == self._anchor_ids:
                return tuple(ids[len(self._anchor_ids) :])
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class _Refused(Exception):
    """The template raised."""


def _unused_marks(messages: Sequence[Message]) -> tuple[str, str]:
    """Two private-use characters that no content holds."""
    used = set().union(*(m.content for m in messages)) if messages else set()
    left, right = itertools.islice((c for c in map(chr, range(0xE000, 0xF8FF)) if c not in used), 2)
    return left, right


def _fold(messages: Sequence[Message]) -> list[Message]:
    """The system text at the head of the first user turn, and neighbours of one role joined by a blank line."""
    folded: list[Message] = []
    for message in messages:
        if message.role == "system":
            message = replace(message, role="user", token_ids=None)
        if folded and folded[-1].role == message.role:
            joined = f"{folded[-1].content}\n\n{message.content}"
            folded[-1] = replace(folded[-1], content=joined, token_ids=None)
        else:
            folded.append(message)
    if folded and folded[0].role == "assistant":
        folded.insert(0, Message("user", ""))
    return folded
