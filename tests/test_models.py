"""Every model module of mlx-lm is shared exactly or refused by name, and docs/models.md says so: see `zoo`."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.models
import pytest
from core_helpers import K8V8, loaded
from mlx_lm.models.cache import ArraysCache
from zoo import EXACT, FAULT, examine, examine_all, page
from zoo_configs import build, model_names

from mlx_qkvshare import AgentSession, SharedKVCacheManager
from mlx_qkvshare.errors import InvalidValueError, UnsupportedModelError
from mlx_qkvshare.model import describe

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "models.md").read_text(encoding="utf-8")

REPRESENTATIVES = {
    "llama": "full layers and windows",
    "gemma3n": "layers that attend another layer's keys and values",
    "gpt_bigcode": "one offset for all rows of a batch",
    "llama4": "chunks",
    "mamba2": "states alone",
    "qwen3_next": "states and full layers",
    "baichuan_m1": "lists of a state and a window",
    "deepseek_v32": "lists of two, one of them an index's",
    "minimax_m3_vl": "keys without values",
    "deepseek_v41": "a cache of its own",
}


@pytest.fixture(scope="module")
def quick():
    """The page's device, and no compilation, which takes longer than such models."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    yield
    mx.enable_compile()
    mx.set_default_device(before)


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_representative_of_each_kind_fares_as_the_page_says(quick, name):
    verdict = examine(name)
    assert verdict is not None and verdict.kind != FAULT, verdict
    assert verdict.row in PAGE


def test_the_page_lists_every_module_that_holds_a_model():
    folder = Path(next(iter(mlx_lm.models.__path__)))
    text = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in model_names()}
    models = {name for name in text if re.search(r"^(class|from \S+ import) Model\b(?! as)", text[name], re.M)}
    assert set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)) == models
    assert f"mlx-lm {mlx_lm.__version__}:" in PAGE, f"made for another version: {PAGE.splitlines()[2]}"


@pytest.mark.slow
def test_the_page_is_what_the_installed_mlx_lm_gives():
    verdicts = examine_all(model_names())
    assert [it for it in verdicts if it.kind == FAULT] == []
    exact = sum(it.kind in EXACT for it in verdicts)
    assert exact >= 0.95 * sum(it.kind in EXACT or it.kind == "refused" for it in verdicts)
    assert page(verdicts) == PAGE, "stale: run the command that the page names"


def test_a_state_that_never_stops_growing_is_refused_by_name(quick):
    class Growing:
        model_type = "growing"
        named_modules = staticmethod(list)

        def make_cache(self):
            return [ArraysCache(1)]

        def __call__(self, token_ids, cache):
            held = cache[0][0]
            cache[0][0] = token_ids if held is None else mx.concatenate([held, token_ids], axis=1)

    with pytest.raises(UnsupportedModelError, match="growing: layer 0 keeps a state that grows with the tokens"):
        describe(Growing(), {})


def test_a_context_too_short_for_a_state_that_fills_up_is_not_sealed_and_stays(quick):
    model, config = build("longcat_flash_ngram")
    lm = loaded()._replace(model=model, spec=describe(model, config))
    with AgentSession("one", lm, SharedKVCacheManager(lm.spec, K8V8)) as session:
        session.prefill([7])
        with pytest.raises(InvalidValueError, match="expected a state of 16 bytes, got 8"):
            session.seal()
        session.prefill([8])
        assert session.token_ids == [7, 8] and session.seal() == 2
        session.manager.check_integrity(checksums=True)
