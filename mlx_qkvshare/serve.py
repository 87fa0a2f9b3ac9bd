"""mlx-lm's own server on shared caches: a prompt that begins like an earlier one reads its segments by reference.

Of mlx-lm nothing is copied: three of its classes are extended, and stand in for the originals while the server runs.
Requests are served one after another, since mlx-lm batches only caches that can be merged, that is, copied.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm import server as _server

from .attention import quantized_attention
from .errors import BudgetExceededError, NonFiniteError, UnsafeQuantError, UnsupportedModelError
from .layer_cache import LayerCache
from .manager import DEFAULT_BUDGET_BYTES, SharedKVCacheManager
from .model import describe
from .prefix import SharedPrefix
from .spec import QuantSpec
from .state_cache import leaves

server: Any = _server  # its classes are exchanged for a while, which its types do not foresee
log = logging.getLogger(__name__)


class SharedPromptCache:
    """What mlx-lm's `LRUPromptCache` does, over a manager: prompts are matched by tokens, sealed once, never copied.

    A stored context is held by nobody, so the manager evicts the least recently used when its budget is short.
    """

    def __init__(self, manager: SharedKVCacheManager):
        self._manager = manager

    def __len__(self) -> int:
        return len(self._manager.segments())

    @property
    def nbytes(self) -> int:
        return self._manager.stats().used_bytes

    def fetch_nearest_cache(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Caches on the longest stored beginning of `tokens`, less the last one, and the tokens that are missing."""
        prefix = self._manager.match_prefix(tokens[:-1])
        return self._manager.make_caches(prefix), list(tokens[prefix.num_tokens :])

    def insert_cache(self, model: Any, tokens: Sequence[int], prompt_cache: list[Any], *, cache_type: str = "") -> None:
        """Seal what `prompt_cache` has of `tokens` beyond its shared prefix, and let go of it."""
        found = leaves(prompt_cache)
        prefix: Any = found[0].prefix
        assert isinstance(prefix, SharedPrefix)
        try:
            self._seal(prefix, found, list(tokens)[prefix.num_tokens :])
        except (BudgetExceededError, NonFiniteError) as error:
            log.warning("this context is not kept: %s", error)
        finally:
            prefix.release()

    def _seal(self, prefix: SharedPrefix, found: list[LayerCache], token_ids: list[int]) -> None:
        stop = prefix.num_tokens + len(token_ids)
        offsets = {leaf.offset for leaf in found if isinstance(leaf, LayerCache)}
        if offsets <= {stop}:
            self._manager.seal(prefix, found, token_ids)
            self._manager.compact(prefix)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """The manager's budget bounds the bytes; what is asked for beyond that drops all that nobody holds."""
        if (n_bytes is not None and self.nbytes > n_bytes) or (n_sequences is not None and len(self) > n_sequences):
            self._manager.evict_unreferenced()

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        return {"shared": {"n_sequences": len(self), "n_bytes": self.nbytes}}


class SharedModelProvider(_server.ModelProvider):
    """Gives every model that it loads a manager, and caches on it. What cannot be shared is served as by mlx-lm."""

    quant: QuantSpec | str | None = None
    budget_bytes = DEFAULT_BUDGET_BYTES
    allow_unsafe = False
    manager: SharedKVCacheManager | None = None

    def _load(self, *key: Any) -> None:
        self.manager = None
        super()._load(*key)
        draft_model: Any = self.draft_model
        if draft_model is not None:
            log.warning("a draft model is in use: caches are mlx-lm's own")
            return
        model: Any = self.model
        try:
            spec = describe(model, vars(model.args), self.tokenizer)
            manager = SharedKVCacheManager(
                spec, self.quant, budget_bytes=self.budget_bytes, allow_unsafe=self.allow_unsafe
            )
        except (UnsupportedModelError, UnsafeQuantError) as error:
            log.warning("%s: caches are mlx-lm's own", error)
            return
        self.manager = manager
        model.make_cache = lambda: manager.make_caches(manager.get_shared_kv_cache(()))
        self.is_batchable = False


class SharedResponseGenerator(_server.ResponseGenerator):
    """Its thread attends to packed bytes, and keeps prompts in the manager of the model that is loaded."""

    def __init__(self, model_provider: SharedModelProvider, prompt_cache: Any):
        self._stock, self._provider = prompt_cache, model_provider
        self._of_manager: tuple[Any, Any] = (None, prompt_cache)
        super().__init__(model_provider, prompt_cache)

    def _run_generate(self) -> None:
        try:
            with quantized_attention():
                super()._run_generate()
        finally:
            mx.clear_streams()  # else the process may abort at exit, as mlx-lm's own server does on Linux

    @property
    def prompt_cache(self) -> Any:
        manager = self._provider.manager
        if self._of_manager[0] is not manager:
            self._of_manager = (manager, self._stock if manager is None else SharedPromptCache(manager))
        return self._of_manager[1]

    @prompt_cache.setter
    def prompt_cache(self, value: Any) -> None:
        """mlx-lm's own is kept for models that cannot be shared."""

    @prompt_cache.deleter
    def prompt_cache(self) -> None:
        self._of_manager = (None, self._stock)


@contextlib.contextmanager
def shared_server(
    *,
    quant: QuantSpec | str | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    allow_unsafe: bool = False,
) -> Iterator[Any]:
    """mlx-lm's `server` module, in which shared caches stand in for its own until the block ends; `quant` and
    `allow_unsafe` as of `SharedKVCacheManager`.

    Call its `main()`, or its `run(host, port, server.ModelProvider(arguments))`, inside.
    """
    provider = type(
        "Provider", (SharedModelProvider,), {"quant": quant, "budget_bytes": budget_bytes, "allow_unsafe": allow_unsafe}
    )
    before = server.ModelProvider, server.ResponseGenerator
    server.ModelProvider, server.ResponseGenerator = provider, SharedResponseGenerator
    try:
        yield server
    finally:
        server.ModelProvider, server.ResponseGenerator = before
