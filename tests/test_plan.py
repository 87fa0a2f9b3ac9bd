"""`qkvshare plan`: what it predicts against what is measured, and that no weight is read for it."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from cli_run import run, save_tiny
from core_helpers import K8V8
from mlx.utils import tree_flatten
from test_gguf_convert import tiny_metadata, tiny_tensors, write_gguf
from tiny import RECURRENT, SLIDING, tiny_config, tiny_loaded, tiny_model, tiny_tokenizer
from zoo_configs import build

from mlx_qkvshare import AgentSession, LoadedModel, QuantSpec, SharedKVCacheManager, load
from mlx_qkvshare.bench import ours_live
from mlx_qkvshare.bench_prefill import prefill_and_seal
from mlx_qkvshare.bench_stock import StockCache
from mlx_qkvshare.download import hub_headers
from mlx_qkvshare.errors import InvalidValueError, ModelLoadError, UnsupportedModelError
from mlx_qkvshare.folders import default_cache_dir
from mlx_qkvshare.headers import Header, write_headers
from mlx_qkvshare.measure import AS_ASKED, live_bytes, peak_bytes, sample_tokens
from mlx_qkvshare.model import Outline, describe, outline
from mlx_qkvshare.peak import step_bytes
from mlx_qkvshare.plan import plan
from mlx_qkvshare.spec import PRESETS, StateSpec

KINDS = {"full": {"layers": 4}, "sliding": {"layers": 4, **SLIDING}, "recurrent": RECURRENT}
SHAPES = [(1, 400, 16), (2, 100, 40), (4, 64, 16)]  # agents, shared tokens, private tokens
LIVE_TOLERANCE, PEAK_SHARE = 0.03, 0.5


def outlined(**overrides) -> tuple[Outline, LoadedModel]:
    lm = tiny_loaded(max_position=4096, **overrides)
    return Outline(lm.model, tiny_config(max_position=4096, **overrides), lm.spec), lm


def planned(model: Outline, agents: int, shared: int, private: int, quant: QuantSpec = K8V8, available: int = 2**40):
    sizes = {"agents": agents, "shared_tokens": shared, "private_tokens": private}
    return plan(model, **sizes, quant=quant, available_bytes=available)


def peak_of_prefill(lm: LoadedModel, num_tokens: int, quant: QuantSpec) -> int:
    ids = sample_tokens(lm.tokenizer, num_tokens)
    return peak_bytes(lambda: prefill_and_seal(lm, ids, quant))


def peak_of_last_agent(lm: LoadedModel, agents: int, shared: int, private: int, quant: QuantSpec) -> int:
    """Beside the weights, while the last of `agents` prefills its tokens."""
    before, ids = live_bytes(), sample_tokens(lm.tokenizer, shared + private)
    manager, held = SharedKVCacheManager(lm.spec, quant, **AS_ASKED), []
    with AgentSession("prefill", lm, manager) as first:
        first.prefill(ids[:shared])
        first.seal()
    for index in range(agents):
        held.append(AgentSession(f"agent {index}", lm, manager))
        live_bytes()
        mx.reset_peak_memory()
        held[-1].prefill(ids[:shared] + ids[shared + index :] + ids[shared : shared + index])
    return mx.get_peak_memory() - before


def assert_bounds(model: Outline, lm: LoadedModel, quant: QuantSpec, shape: tuple[int, int, int]) -> None:
    """Both peaks stay below what is planned, and near it."""
    found = planned(model, *shape, quant)
    peaks = (peak_of_prefill(lm, shape[1], quant), peak_of_last_agent(lm, *shape, quant))
    assert found.is_bound and found.needed_bytes == max(found.prefill_peak_bytes, found.turn_peak_bytes)
    for peak, bound in zip(peaks, (found.prefill_peak_bytes, found.turn_peak_bytes), strict=True):
        bound -= found.weights_bytes
        assert PEAK_SHARE * bound <= peak <= bound, (shape, peaks, found)


def assert_predicts(model: Outline, lm: LoadedModel, quant: QuantSpec, shape: tuple[int, int, int]):
    agents, shared, private = shape
    measured = ours_live(lm, sample_tokens(lm.tokenizer, shared), agents, private, quant)[agents]
    found = planned(model, *shape, quant)
    surplus = found.live_bytes - found.weights_bytes - measured
    # A state is budgeted twice; the one to go back to is not there at every moment.
    least, most = -LIVE_TOLERANCE * measured, LIVE_TOLERANCE * measured + agents * model.spec.state_bytes
    assert least <= surplus <= most, (found, measured)


@pytest.mark.parametrize("kind", KINDS)
def test_live_bytes_are_predicted(kind):
    model, lm = outlined(**KINDS[kind])
    for quant, shape in zip((K8V8, QuantSpec.preset("tight"), QuantSpec(16, 16)), SHAPES, strict=True):
        assert_predicts(model, lm, quant, shape)


def test_separate_caches_are_predicted():
    model, lm = outlined(layers=4)
    layers = StockCache(lm, sample_tokens(lm.tokenizer, 240)).layers
    rows = [array[..., : layer.offset, :] for layer in layers for array in (layer.keys, layer.values)]
    assert planned(model, 3, 200, 40).separate_bytes == 3 * sum(array.nbytes for array in rows)


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("quant", [K8V8, QuantSpec.preset("tight")], ids=str)
def test_both_peaks_stay_below_the_bound_and_near_it(kind, quant):
    model, lm = outlined(**KINDS[kind])
    for shape in ((1, 100, 60), (3, 1000, 700)):
        assert_bounds(model, lm, quant, shape)


def zoo_outlined(name: str) -> tuple[Outline, LoadedModel]:
    model, config = build(name)
    config |= {"max_position_embeddings": 8192}
    spec = describe(model, config)
    return Outline(model, config, spec), LoadedModel(model, tiny_tokenizer(), spec)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "gpt_oss"])
def test_the_peaks_of_models_beside_the_fused_route_are_bounds(name):
    """Latent attention, which unpacks a layer, an index of keys, and sinks."""
    assert_bounds(*zoo_outlined(name), K8V8, (2, 1500, 300))


def test_a_model_that_looks_at_what_it_computes_is_refused():
    with pytest.raises(UnsupportedModelError, match="shapes alone"):
        planned(zoo_outlined("dbrx")[0], 1, 100, 16)


def test_of_a_recurrent_model_no_bound_is_claimed():
    model, lm = outlined(**RECURRENT)
    found = planned(model, 1, 600, 16)
    assert not found.is_bound
    about = found.prefill_peak_bytes - found.weights_bytes
    assert PEAK_SHARE * about <= peak_of_prefill(lm, 600, K8V8) <= about / PEAK_SHARE


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "gemma-3-270m-for-tests-float32"], ids=["SmolLM2", "Gemma 3"])
def test_real_models_are_predicted(name):
    folder = None if name is None else default_cache_dir() / name
    if folder is not None and not folder.exists():
        pytest.skip(f"{name} is not here; tests/test_gemma.py fetches it")
    lm, model = load(folder, dtype="float32"), outline(folder, dtype="float32")
    assert model.spec.layers == lm.spec.layers
    quants = (QuantSpec(), QuantSpec.preset("tight"), QuantSpec(16, 16))
    for quant, shape in zip(quants, [(1, 400, 16), (4, 256, 64), (8, 128, 16)], strict=True):
        assert_predicts(model, lm, quant, shape)
    for shape in ((1, 600, 200), (8, 256, 256)):
        assert_bounds(model, lm, QuantSpec.preset("safe"), shape)


# --- from headers alone ---------------------------------------------------------------------------


def assert_outlines(source, folder: Path, dtype: str = "float32") -> None:
    """`source` outlined costs nothing, and is what the mlx-lm directory `folder` is loaded as."""
    before = live_bytes()
    mx.reset_peak_memory()
    found = outline(source, dtype=dtype, cache_dir=folder.parent / "none")
    planned(found, 2, 100, 10)
    assert mx.get_peak_memory() - before < 10_000, "something was evaluated"
    lm = load(folder, dtype=dtype)
    assert found.spec.layers == lm.spec.layers and found.spec.dtype == lm.spec.dtype
    assert found.spec.max_context_tokens == lm.spec.max_context_tokens
    assert found.weights_bytes == sum(array.nbytes for _, array in tree_flatten(lm.model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_is_outlined_by_its_headers(tmp_path, kind, dtype):
    folder = save_tiny(tmp_path / "model", **KINDS[kind])
    assert_outlines(folder, folder, dtype)


def test_packed_weights_count_as_packed(tmp_path):
    folder, model = save_tiny(tmp_path / "model"), tiny_model(fresh=True)
    whole = outline(folder).weights_bytes
    nn.quantize(model, 64, 4)
    config = tiny_config() | {"quantization": {"group_size": 64, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    assert_outlines(folder, folder)
    assert outline(folder).weights_bytes < whole / 4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gguf_file_is_outlined_by_its_header(tmp_path, dtype):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_metadata(), tiny_tensors(tiny_model(), "F32")[0])
    load(path, dtype=dtype, cache_dir=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    assert_outlines(path, folder, dtype)
    assert not (tmp_path / "none").exists(), "converted"


def test_headers_take_no_room(tmp_path):
    path = tmp_path / "model.safetensors"
    write_headers(path, {"a": Header("F32", [1 << 20, 64], 1 << 28)})
    assert path.stat().st_size > 1 << 28 and path.stat().st_blocks * 512 < 1 << 20
    array = mx.load(str(path))["a"]
    assert array.shape == (1 << 20, 64) and array.dtype == mx.float32


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """A Hub that has the repository a/b: its address, and how many bytes of which file it gave."""
    given: list[tuple[str, int]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2].partition("?")[0]
            if self.path.startswith("/api/models/a/b"):
                files = [{"rfilename": path.name} for path in folder.iterdir()]
                data = json.dumps({"id": "a/b", "sha": "0" * 40, "siblings": files}).encode()
            else:
                data = (folder / name).read_bytes()
                wanted = self.headers.get("range", "")
                if self.command == "GET" and wanted.startswith("bytes="):
                    first, last = (int(it) for it in wanted.removeprefix("bytes=").split("-"))
                    data = data[first : last + 1]
                given.append((name, len(data) if self.command == "GET" else 0))
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", given
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_of_a_hub_repository_only_headers_are_fetched(tmp_path, capfd):
    folder = save_tiny(tmp_path / "model")
    size = (folder / "model.safetensors").stat().st_size
    with hub(folder) as (address, given):
        hub_headers("a/b", tmp_path / "headers", lambda *progress: None, endpoint=address)
    fetched = sum(count for name, count in given if name.endswith(".safetensors"))
    assert {name for name, _ in given} == {"config.json", "model.safetensors"} and 0 < fetched < size / 4
    assert capfd.readouterr() == ("", "")
    assert_outlines(tmp_path / "headers", folder)


def test_what_cannot_be_outlined_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_qkvshare.download._probe", lambda repo, endpoint=None: "no network")
    with pytest.raises(ModelLoadError, match=r"nobody/nothing.*no network"):
        outline("nobody/nothing", cache_dir=tmp_path)
    with pytest.raises(ModelLoadError, match=r"SmolLM2.*no network"):
        outline(cache_dir=tmp_path)
    with pytest.raises(ModelLoadError, match="no such path"):
        outline(tmp_path / "none")
    with pytest.raises(ModelLoadError, match=r"none\.gguf"):
        outline(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        outline(tmp_path)
    with pytest.raises(InvalidValueError, match="dtype"):
        outline(tmp_path, dtype="int8")
    folder = save_tiny(
        tmp_path / "ntk", model_type="internlm2", bias=False, rope_scaling={"type": "dynamic", "factor": 2.0}
    )
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        outline(folder)


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant", [K8V8, QuantSpec(16, 4), *PRESETS.values()], ids=str)
def test_the_terms_make_up_the_sum(kind, quant):
    model, _ = outlined(**KINDS[kind])
    found = planned(model, 3, 200, 20, quant)
    assert sum(term.nbytes for term in found.layers) == found.shared_bytes == quant.packed_bytes(model.spec, 200)
    assert sum(term.count for term in found.layers) == len(model.spec.layers)
    assert found.live_bytes == found.weights_bytes + found.shared_bytes + 3 * found.private_bytes
    assert any(term.name == "state" for term in found.layers) == any(
        isinstance(it, StateSpec) for it in model.spec.layers
    )


@pytest.mark.parametrize("name", ["moe_topk", "num_experts_per_tok", "top_k_experts", "vocab_size", "hidden_size"])
def test_lists_by_layer_do_not_stop_a_plan(name):
    model, _ = outlined(layers=4)
    listed = model._replace(config={**model.config, name: [2, 2, 2, 2]})
    assert planned(listed, 2, 100, 10) == planned(model, 2, 100, 10)


def test_weights_are_put_back():
    model, _ = outlined(layers=4)
    before, contiguous = dict(tree_flatten(model.model.parameters())), mx.contiguous
    step_bytes(model, K8V8, 100, 20)
    after = dict(tree_flatten(model.model.parameters()))
    assert all(after[name] is array for name, array in before.items()) and mx.contiguous is contiguous


def test_what_cannot_be_exported_is_planned_as_on_a_cpu(monkeypatch):
    model, _ = outlined(layers=4)
    wanted, export, calls = step_bytes(model, K8V8, 100, 20), mx.export_function, []

    def fails_once(*args: object) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise ValueError("Unable to get state for primitive Kernel")
        export(*args)

    monkeypatch.setattr(mx, "export_function", fails_once)
    assert step_bytes(model, K8V8, 100, 20) == wanted and len(calls) == 2


def test_what_fits_is_told_from_what_does_not():
    model, _ = outlined(layers=4)
    large = QuantSpec(16, 16)
    # Many agents, so that the peak of the prefill is no matter; one token, so that all read their bytes packed.
    needs = {name: planned(model, 400, 800, 1, quant).needed_bytes for name, quant in PRESETS.items()}
    assert needs["safe"] > needs["balanced"] > needs["tight"]
    for name, least in needs.items():
        found = planned(model, 400, 800, 1, large, available=least)
        assert not found.fits and found.preset == name and not found.separate_fits
        assert planned(model, 400, 800, 1, PRESETS[name], available=least).fits
    assert planned(model, 400, 800, 1, available=needs["tight"] - 1).preset is None


@pytest.mark.parametrize(
    ("sizes", "words"), [((0, 10, 10), "agents"), ((1, 4090, 10), "at most 4096"), ((1, 1, 0), "private")]
)
def test_bad_counts_are_refused(sizes, words):
    with pytest.raises(InvalidValueError, match=words):
        planned(outlined(layers=4)[0], *sizes)


def test_the_command(monkeypatch, tmp_path):
    folder = save_tiny(tmp_path, layers=4)
    options = ["plan", "--model", folder, "--agents", 200, "--shared", 400, "--private", 1]
    shown = run(monkeypatch, *options, "--preset", "tight")
    assert shown.code == 0 and "it fits" in shown.out and "weights + shared + 200 x private" in shown.out
    (line,) = run(monkeypatch, *options, "--preset", "tight", "--json").out.splitlines()
    (row,) = json.loads(line)["results"]
    assert row["fits"] and row["needed_bytes"] == max(row["turn_peak_bytes"], row["prefill_peak_bytes"])
    assert f"{row['live_bytes']:,}" in shown.out and f"{row['shared_bytes']:,}" in shown.out
    least = row["needed_bytes"]
    shown = run(monkeypatch, *options, "--bits", 8, "--memory", least)
    assert "it does not fit" in shown.out and "--preset tight would fit" in shown.out
    assert "nor would any preset" in run(monkeypatch, *options, "--bits", 8, "--memory", least - 1).out
    assert run(monkeypatch, *options, "--memory", "lots").code == 2
    assert "assumed" not in shown.out and "assumed" in run(monkeypatch, *options).out
    shutil.rmtree(folder)


def test_the_command_counts_one_and_refuses_the_absurd(monkeypatch, tmp_path):
    folder = save_tiny(tmp_path, layers=1)
    shown = run(monkeypatch, "plan", "--model", folder, "--agents", 1, "--shared", 1, "--private", 1).out
    assert "1 agent on 1 shared token, 1 private one each" in shown and "1 layer x" in shown
    shown = run(monkeypatch, "plan", "--model", folder, "--agents", 10**20)
    assert shown.code == 2 and "--agents" in shown.err
    (folder / "model.safetensors").unlink()
    shown = run(monkeypatch, "plan", "--model", folder)
    assert shown.code == 2 and "expected config.json and model*.safetensors" in shown.err
