"""mlx-lm's server on shared caches: the same answers, and what prompts have in common is computed and held once."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from cli_run import COMMAND, save_tiny
from core_helpers import FULL, K8V8, loaded, stock_logits
from mlx_lm import server
from mlx_lm.generate import generate_step
from reference import some_ids
from tiny import RECURRENT, SLIDING

from mlx_qkvshare import QuantSpec, SharedKVCacheManager, load, quantized_attention, verdict
from mlx_qkvshare.serve import SharedModelProvider, SharedPromptCache, shared_server
from mlx_qkvshare.verdict import Refusal, Verdict

ARCHITECTURES = {"full": {}, "window": SLIDING, "state": RECURRENT}


def serve_once(cache: SharedPromptCache, model, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """What the server does for one request, greedily: the tokens, and how many of the prompt were cached."""
    found, rest = cache.fetch_nearest_cache("key", prompt)
    tokens = []
    with quantized_attention():
        for token, _ in generate_step(mx.array(rest), model, prompt_cache=found, max_tokens=num_tokens):
            tokens.append(token)
    cache.insert_cache("key", [*prompt, *tokens], found, cache_type="assistant")
    return tokens, len(prompt) - len(rest)


@pytest.mark.parametrize("quant", [FULL, K8V8], ids=str)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_prompts_that_begin_alike_share_what_is_sealed(kind, quant):
    model = loaded(**ARCHITECTURES[kind])
    manager = SharedKVCacheManager(model.spec, quant)
    cache = SharedPromptCache(manager)
    system = some_ids(30)
    first, cached = serve_once(cache, model.model, system, 6)
    assert cached == 0 and len(cache) == 1 and cache.nbytes == manager.stats().used_bytes > 0
    # The next turn of the same conversation, and another one behind the same system prompt.
    second, cached = serve_once(cache, model.model, [*system, *first, 7, 8, 9], 4)
    assert cached == 36
    _, cached = serve_once(cache, model.model, [*system, 50, 51], 4)
    assert cached == (30 if kind == "full" else 0), "only rows can be cut within a segment"
    assert manager.stats().private_bytes == 0 and manager.stats().num_holders == 0
    manager.check_integrity(checksums=True)
    if quant is FULL:
        for prompt, tokens in ((system, first), ([*system, *first, 7, 8, 9], second)):
            for number, token in enumerate(tokens):
                assert token == stock_logits(model.model, [*prompt, *tokens[:number]])[-1].argmax()
    cache.trim_to(n_bytes=0)
    assert len(cache) == 0 and manager.stats().used_bytes == 0


def test_a_context_that_finds_no_room_is_served_and_not_kept(caplog):
    model = loaded()
    manager = SharedKVCacheManager(model.spec, FULL, budget_bytes=model.spec.private_bytes(48) + 1)
    cache = SharedPromptCache(manager)
    serve_once(cache, model.model, some_ids(20), 2)
    found, _ = cache.fetch_nearest_cache("key", some_ids(30, seed=1))
    with quantized_attention():
        mx.eval(model.model(mx.array([some_ids(30, seed=1)]), cache=found))
    keys = found[0].keys
    found[0].keys = mx.full(keys.shape, float("nan"))
    cache.insert_cache("key", some_ids(30, seed=1), found)
    assert "not kept" in caplog.text and manager.stats().private_bytes == 0
    manager.check_integrity(checksums=True)


def test_the_originals_are_back_after_the_block():
    before = server.ModelProvider, server.ResponseGenerator
    with shared_server() as inside:
        assert inside is server and server.ModelProvider is not before[0] and server.ResponseGenerator is not before[1]
    assert (server.ModelProvider, server.ResponseGenerator) == before


@contextlib.contextmanager
def running(*command: str, may_abort: bool = False):
    """A server on a free port, from its first answer to its end by Ctrl-C. mlx-lm's own may abort then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            assert process.poll() is None, process.stderr.read()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0 or may_abort


def ask(url: str, *messages: tuple[str, str]) -> dict:
    body = {
        "messages": [{"role": role, "content": text} for role, text in messages],
        "max_tokens": 12,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_stock_client_gets_the_stock_servers_answers(tmp_path: Path, kind):
    folder = save_tiny(tmp_path / "model", **ARCHITECTURES[kind])
    system = ("system", "The planner reads the document and writes down what has to be done. " * 3)
    talks = [[system, ("user", "Who are you?")], [system, ("user", "Say something else.")]]
    stock = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder)]
    ours = [*COMMAND, "serve", "--bits", "16", "--model", str(folder)]
    with running(*stock, may_abort=True) as theirs, running(*ours) as url:
        for talk in talks:
            expected, found = ask(theirs, *talk), ask(url, *talk)
            assert found["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
        again = [*talks[0], ("assistant", "x"), ("user", "And now?")]
        cached = ask(url, *again)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > (30 if kind == "full" else -1)


@pytest.mark.parametrize("family", [{}, SLIDING], ids=["full", "sliding"])
def test_the_server_follows_what_the_doctor_found_for_the_same_model(tmp_path, monkeypatch, caplog, family):
    """`load` and mlx-lm's own loader read the same model: its verdict must be found by either."""
    folder = save_tiny(tmp_path / "model", **family)
    spec = load(folder).spec
    refusal = Refusal(QuantSpec(4, 4), False, "mean KL 0.2")
    monkeypatch.setattr(verdict, "default_cache_dir", lambda: tmp_path)
    Verdict(preset="balanced", refusals=(refusal,)).save(spec)

    def served(**options):
        model, tokenizer = mlx_lm.load(str(folder))
        provider = object.__new__(type("Provider", (SharedModelProvider,), options))
        loading = lambda self, *key: vars(self).update(model=model, tokenizer=tokenizer, draft_model=None)  # noqa: E731
        monkeypatch.setattr(server.ModelProvider, "_load", loading)
        provider._load("model")
        return provider.manager

    assert served().spec.fingerprint == spec.fingerprint
    assert served().quant == QuantSpec.preset("balanced")
    assert served(quant=QuantSpec(4, 4)) is None and "refused for this model" in caplog.text
    assert served(quant=QuantSpec(4, 4), allow_unsafe=True).quant == QuantSpec(4, 4)
