"""GGUF files: what is read, what is undone, what is refused. Files are written here; no network."""

import json
import struct
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, load_tokenizer
from tiny import tiny_config, tiny_model, tiny_tokenizer

from mlx_qkvshare.errors import ModelLoadError, UnsupportedModelError
from mlx_qkvshare.fingerprint import parameters
from mlx_qkvshare.gguf_architectures import ARCHITECTURES
from mlx_qkvshare.gguf_convert import TOP_NAMES, convert, make_config
from mlx_qkvshare.gguf_file import read_gguf

GEMMA = {
    "model_type": "gemma3_text", "layers": 6, "sliding_window": 16, "rope_theta": 1e6, "query_pre_attn_scalar": 64,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14}


def _string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value):
    """(type id, bytes) of one metadata value, as llama.cpp writes it."""
    if isinstance(value, list):
        item_type = _value(value[0])[0]
        return 9, struct.pack("<IQ", item_type, len(value)) + b"".join(_value(item)[1] for item in value)
    if isinstance(value, str):
        return 8, _string(value)
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    return (4, struct.pack("<I", value)) if isinstance(value, int) else (6, struct.pack("<f", value))


def write_gguf(path, metadata, tensors):
    """tensors: name -> (type name, shape with rows first, raw bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        head += _string(key) + struct.pack("<I", kind) + data
    body = b""
    for name, (kind, shape, data) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += _string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", TYPES[kind], len(body))
        body += data + b"\0" * (-len(data) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path


def quantize(values, kind):
    """(raw bytes, the float32 values they stand for), block by block from the format's definition."""
    blocks = values.reshape(-1, 32)
    if kind == "F32":
        return values.astype("<f4").tobytes(), values
    if kind == "F16":
        return values.astype("<f2").tobytes(), values.astype(np.float16).astype(np.float32)
    low = blocks.min(axis=1, keepdims=True) if kind == "Q4_1" else np.zeros((len(blocks), 1), np.float32)
    top = {"Q4_0": 7, "Q4_1": 15, "Q8_0": 127}[kind]
    span = (blocks - low).max(axis=1, keepdims=True) if kind == "Q4_1" else abs(blocks).max(axis=1, keepdims=True)
    scale, low = (span / top).astype(np.float16), low.astype(np.float16)
    codes = np.rint((blocks - low) / scale.astype(np.float32))
    exact = codes * scale.astype(np.float32) + low.astype(np.float32)
    if kind == "Q8_0":
        rows = [scale.view(np.uint8), codes.astype(np.int8).view(np.uint8)]
    else:
        codes = (codes + (8 if kind == "Q4_0" else 0)).clip(0, 15).astype(np.uint8)
        packed = codes[:, :16] | (codes[:, 16:] << 4)
        rows = [scale.view(np.uint8), *([low.view(np.uint8)] if kind == "Q4_1" else []), packed]
    return np.concatenate(rows, axis=1).tobytes(), exact.reshape(values.shape)


def interleave(weight, heads):
    """What llama.cpp's converter does to q and k: halves to pairs."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tiny_metadata(**changes):
    backend = json.loads(tiny_tokenizer()._tokenizer.backend_tokenizer.to_str())
    vocabulary = sorted(backend["model"]["vocab"], key=backend["model"]["vocab"].get)
    return {
        "general.architecture": "llama",
        "llama.embedding_length": 128,
        "llama.block_count": 2,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 64,
        "llama.attention.value_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 512,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3] * 4 + [1] * (len(vocabulary) - 4),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in backend["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": tiny_tokenizer().chat_template,
        **changes,
    }


def gemma_metadata(**changes):
    """As llama.cpp writes it: without the pattern of sliding layers and without their RoPE base."""
    metadata = {name.replace("llama.", "gemma3."): value for name, value in tiny_metadata().items()}
    gemma = {"block_count": 6, "attention.sliding_window": 16, "rope.freq_base": 1e6,
             "attention.layer_norm_rms_epsilon": 1e-6}  # fmt: skip
    return metadata | {"general.architecture": "gemma3"} | {f"gemma3.{k}": v for k, v in gemma.items()} | changes


def as_llama_cpp_stores(name, values, architecture):
    if architecture == "gemma3":
        return values + 1 if name.endswith("norm") else values
    if name.endswith(("q_proj", "k_proj")):
        return interleave(values, tiny_config()["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    return values


def tiny_tensors(model, kind, architecture="llama"):
    """(file tensors, the values they stand for under mlx-lm's names) of a tiny model, matrices in `kind`."""
    block_of = {v: k for k, v in ARCHITECTURES[architecture].block_names.items()}
    top_of = {v: k for k, v in TOP_NAMES.items()}
    tensors, exact = {}, {}
    for name, array in parameters(model):
        base, _, leaf = name.rpartition(".")
        values = np.array(array)
        _, exact[name] = quantize(values, kind if values.ndim == 2 else "F32")
        data, _ = quantize(as_llama_cpp_stores(base, values, architecture), kind if values.ndim == 2 else "F32")
        if base.startswith("model.layers."):
            _, _, index, rest = base.split(".", 3)
            name = f"blk.{index}.{block_of[rest]}.{leaf}"
        else:
            name = f"{top_of[base]}.{leaf}"
        tensors[name] = (kind if values.ndim == 2 else "F32", values.shape, data)
    return tensors, exact


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_simple_types_need_no_gguf_package_and_keep_the_logits(tmp_path, monkeypatch, kind, tied):
    monkeypatch.setitem(sys.modules, "gguf", None)
    model = tiny_model(tie_word_embeddings=tied, attention_bias=True, fresh=True)
    noise = [(name, array + mx.random.normal(array.shape) * 0.1) for name, array in parameters(model) if "bias" in name]
    model.load_weights(noise, strict=False)  # biases are made as zeros, whose order cannot be wrong
    tensors, exact = tiny_tensors(model, kind)
    convert(write_gguf(tmp_path / "t.gguf", tiny_metadata(), tensors), tmp_path / "out", mx.float32)
    loaded, config = load_model(tmp_path / "out")
    assert config["tie_word_embeddings"] is tied
    for name, array in parameters(loaded):
        np.testing.assert_array_equal(np.array(array), exact[name], err_msg=name)
    model.load_weights([(name, mx.array(values)) for name, values in exact.items()])
    ids = mx.array([[0, 17, 99, 250, 31, 7]])
    assert mx.abs(loaded(ids) - model(ids)).max().item() < 1e-4


def test_the_interleave_matters(tmp_path):
    """The check above is not vacuous: without undoing the interleave the logits are far off."""
    tensors, _ = tiny_tensors(tiny_model(), "F32")
    tensors["blk.0.attn_q.weight"] = (
        *tensors["blk.0.attn_q.weight"][:2],
        np.array(tiny_model().layers[0].self_attn.q_proj.weight).tobytes(),
    )
    convert(write_gguf(tmp_path / "t.gguf", tiny_metadata(), tensors), tmp_path / "out", mx.float32)
    ids = mx.array([[0, 17, 99, 250, 31, 7]])
    assert mx.abs(load_model(tmp_path / "out")[0](ids) - tiny_model()(ids)).max().item() > 1e-3


def tiny_gemma(**changes):
    """Norms of all kinds differ from 1 and from each other, in numbers that "1 +" and "- 1" keep exactly."""
    model = tiny_model(**GEMMA, **changes, fresh=True)
    norms = [name for name, _ in parameters(model) if name.endswith("norm.weight")]
    model.load_weights(
        [(n, mx.random.randint(-512, 512, (dict(parameters(model))[n].size,)) / 1024) for n in norms], strict=False
    )
    return model


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_gemma_keeps_its_tensors_and_its_logits(tmp_path, kind, tied):
    model = tiny_gemma()
    if tied:
        model.sanitize({})  # what mlx-lm does for files without a head
    tensors, exact = tiny_tensors(model, kind, "gemma3")
    convert(write_gguf(tmp_path / "t.gguf", gemma_metadata(), tensors), tmp_path / "out", mx.float32)
    loaded, config = load_model(tmp_path / "out")
    assert dict(parameters(loaded)).keys() == exact.keys() and loaded.tie_word_embeddings is tied
    for name, array in parameters(loaded):
        np.testing.assert_array_equal(np.array(array), exact[name], err_msg=name)
    model.load_weights([(name, mx.array(values)) for name, values in exact.items()])
    ids = mx.random.randint(0, 343, (1, 60))  # longer than the window
    assert mx.abs(loaded(ids) - model(ids)).max().item() < 1e-4
    assert [type(cache).__name__ for cache in loaded.make_cache()] == ["RotatingKVCache"] * 5 + ["KVCache"]
    assert (config["sliding_window"], config["rope_theta"], config["rope_local_base_freq"]) == (16, 1e6, 1e4)


@pytest.mark.parametrize(
    "changes",
    [
        {"gemma3.attention.sliding_window": 17},
        {"gemma3.attention.sliding_window_pattern": 3},
        {"gemma3.rope.freq_base": 1e4},
        {"gemma3.rope.freq_base_swa": 1e6},
        {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
    ],
)
def test_what_a_gemma_file_says_of_its_layers_is_heard(tmp_path, changes):
    tensors, _ = tiny_tensors(tiny_gemma(), "F32", "gemma3")
    convert(write_gguf(tmp_path / "t.gguf", gemma_metadata(**changes), tensors), tmp_path / "out", mx.float32)
    ids = mx.random.randint(0, 343, (1, 60))
    assert mx.abs(load_model(tmp_path / "out")[0](ids) - tiny_gemma()(ids)).max().item() > 1e-3


def test_the_largest_gemma_scales_its_queries_by_its_width(tmp_path):
    metadata = gemma_metadata(**{"gemma3.block_count": 62, "gemma3.embedding_length": 128})
    gguf = read_gguf(write_gguf(tmp_path / "t.gguf", metadata, {}))
    assert make_config(gguf)["query_pre_attn_scalar"] == 128 // 4  # not the head dim, 64


def test_the_tokenizer_comes_back_whole(tmp_path):
    tensors, _ = tiny_tensors(tiny_model(), "F32")
    convert(write_gguf(tmp_path / "t.gguf", tiny_metadata(), tensors), tmp_path / "out", mx.float32)
    ours, tiny = load_tokenizer(tmp_path / "out"), tiny_tokenizer()
    for text in ("The planner reads 128 keys.", "naïve 🦙 日本\n\n\tx", "<|im_start|>user", " leading", ""):
        assert ours.encode(text) == tiny.encode(text)
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == tiny.apply_chat_template(messages)
    assert (ours.bos_token_id, ours.eos_token_ids) == (0, {3})


def test_smollm_splits_digits_and_llama3_groups_them(tmp_path):
    tensors, _ = tiny_tensors(tiny_model(), "F32")
    pieces = {}
    for pre in ("smollm", "llama-bpe"):
        metadata = tiny_metadata(**{"tokenizer.ggml.pre": pre})
        convert(write_gguf(tmp_path / "t.gguf", metadata, tensors), tmp_path / pre, mx.float32)
        backend = load_tokenizer(tmp_path / pre)._tokenizer.backend_tokenizer
        pieces[pre] = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a 12345")]
    assert pieces == {"smollm": ["a", "Ġ", "1", "2", "3", "4", "5"], "llama-bpe": ["a", "Ġ", "123", "45"]}


def test_llama3_takes_whole_words_of_the_vocabulary(tmp_path):
    """Its vocabulary holds words that no chain of merges reaches (`ignore_merges`)."""
    tensors, _ = tiny_tensors(tiny_model(), "F32")
    metadata = tiny_metadata(**{"tokenizer.ggml.pre": "llama-bpe"})
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:1]
    word, index = max(
        (token, i) for i, token in enumerate(metadata["tokenizer.ggml.tokens"]) if token.isascii() and len(token) > 2
    )
    convert(write_gguf(tmp_path / "t.gguf", metadata, tensors), tmp_path / "out", mx.float32)
    assert load_tokenizer(tmp_path / "out").encode(word, add_special_tokens=False) == [index]


@pytest.mark.parametrize("like", ["llama", "gemma"])
def test_sentencepiece_tokenizers_match_sentencepiece(tmp_path, like):
    """Gemma: no space in front of a text, and runs of spaces and of line ends are words, which the file spells out."""
    spm, is_gemma = pytest.importorskip("sentencepiece"), like == "gemma"
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(["the planner reads the document", "the writer writes the answer", "a b c d e"] * 50))
    options = {"model_type": "bpe", "vocab_size": 330, "byte_fallback": True, "hard_vocab_limit": False}
    words = ["\n", "\n\n", "▁▁", "▁▁▁", "[multimodal]"] if is_gemma else []
    if is_gemma:
        options |= {"user_defined_symbols": words, "add_dummy_prefix": False}
    spm.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "m"), minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False, **options,
    )  # fmt: skip
    reference = spm.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    size = reference.vocab_size()
    tokens = [reference.IdToPiece(i) for i in range(size)]
    kinds = [
        2 if reference.IsUnknown(i) else 3 if reference.IsControl(i) else 6 if reference.IsByte(i) else 1
        for i in range(size)
    ]
    metadata = tiny_metadata(
        **{
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [token.replace("▁", " ") if token in words else token for token in tokens],
            "tokenizer.ggml.scores": [float(reference.GetScore(i)) for i in range(size)],
            "tokenizer.ggml.token_type": [4 if t in words else k for t, k in zip(tokens, kinds, strict=True)],
            "tokenizer.ggml.add_space_prefix": not is_gemma,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    tensors, _ = tiny_tensors(tiny_model(), "F32")
    convert(write_gguf(tmp_path / "t.gguf", metadata, tensors), tmp_path / "out", mx.float32)
    ours = load_tokenizer(tmp_path / "out")
    texts = ["the planner writes", "readers  and\nwriters, ünïcode 🦙", "document"]
    for text in [*texts, *(["a  b", "  the\n\n\n    answer ", "the    [multimodal]  \n"] if is_gemma else [])]:
        assert ours.encode(text) == [1, *reference.encode(text)]
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text


def test_llama3_rope_scaling_is_rebuilt_from_its_tensor(tmp_path):
    rope_scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    reference = tiny_model(rope_scaling=rope_scaling, rope_theta=500000.0)
    plain = 500000.0 ** (np.arange(0, 64, 2) / 64)
    factors = (np.array(reference.layers[0].self_attn.rope._freqs) / plain).astype(np.float32)
    assert factors.min() < 1.01 and factors.max() > 7.9
    tensors, _ = tiny_tensors(reference, "F32")
    tensors["rope_freqs.weight"] = ("F32", factors.shape, factors.tobytes())
    metadata = tiny_metadata(**{"llama.rope.freq_base": 500000.0})
    convert(write_gguf(tmp_path / "t.gguf", metadata, tensors), tmp_path / "out", mx.float32)
    ids = mx.random.randint(0, 343, (1, 400))
    loaded, config = load_model(tmp_path / "out")
    assert config["rope_scaling"] == rope_scaling
    assert mx.abs(loaded(ids) - reference(ids)).max().item() < 1e-4
    tensors["rope_freqs.weight"] = ("F32", factors.shape, (factors + np.float32(0.5)).tobytes())
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        convert(write_gguf(tmp_path / "t.gguf", metadata, tensors), tmp_path / "out2", mx.float32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "qwen2"}, "expected architecture 'llama' or 'gemma3', got 'qwen2'"),
        ({"general.architecture": "gemma2"}, "gemma2"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 32}, "rotary over all 64 dims, got 32"),
        ({"llama.attention.value_length": 32}, "equal K and V"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.pre": "falcon"}, "falcon"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, changes, named):
    tensors, _ = tiny_tensors(tiny_model(), "F32")
    source = write_gguf(tmp_path / "t.gguf", tiny_metadata(**changes), tensors)
    with pytest.raises(UnsupportedModelError, match=named):
        convert(source, tmp_path / "out", mx.float32)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gemma3.final_logit_softcapping": 30.0}, "gemma3: expected logits without a soft cap, got one of 30.0"),
        ({"gemma3.attention.sliding_window_pattern": [True, False]}, "every n-th layer"),
        ({"gemma3.expert_count": 8}, "8 experts"),
    ],
)
def test_what_is_not_gemma_3_is_refused_by_name(tmp_path, changes, named):
    tensors, _ = tiny_tensors(tiny_gemma(), "F32", "gemma3")
    with pytest.raises(UnsupportedModelError, match=named):
        convert(write_gguf(tmp_path / "t.gguf", gemma_metadata(**changes), tensors), tmp_path / "out", mx.float32)
    tensors["rope_freqs.weight"] = ("F32", (32,), b"\0" * 128)  # Llama 3's: another model's file
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        convert(write_gguf(tmp_path / "t.gguf", gemma_metadata(), tensors), tmp_path / "out", mx.float32)


def test_a_gemma_file_without_its_window_is_damaged(tmp_path):
    metadata = gemma_metadata()
    del metadata["gemma3.attention.sliding_window"]
    with pytest.raises(ModelLoadError, match=r"no 'gemma3\.attention\.sliding_window'"):
        convert(write_gguf(tmp_path / "t.gguf", metadata, {}), tmp_path / "out", mx.float32)


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    tensors, _ = tiny_tensors(tiny_model(), "F32")
    tensors["blk.0.attn_sinks.weight"] = ("F32", (4,), b"\0" * 16)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_sinks"):
        convert(write_gguf(tmp_path / "t.gguf", tiny_metadata(), tensors), tmp_path / "out", mx.float32)


def test_a_damaged_file_is_one_error_and_never_a_crash(tmp_path):
    tensors, _ = tiny_tensors(tiny_model(), "Q4_1")
    whole = write_gguf(tmp_path / "t.gguf", tiny_metadata(), tensors).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 10, 100, 5000, len(whole) // 2, len(whole) - 5000):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            read_gguf(cut)
    cut.write_bytes(b"PK" + whole)
    with pytest.raises(ModelLoadError, match="expected a GGUF file"):
        read_gguf(cut)
    with pytest.raises(ModelLoadError, match=r"none\.gguf"):
        read_gguf(tmp_path / "none.gguf")


def k_quant_file(tmp_path):
    """Hidden 256 and one Q6_K matrix of zeros with a scale of 1: each block is 210 bytes for 256 values."""
    model = tiny_model(hidden=256)
    tensors, _ = tiny_tensors(model, "F32")
    block = bytes([0x11] * 128) + bytes([0] * 64) + bytes([1] * 16) + np.float16(0.5).tobytes()
    tensors["blk.0.ffn_up.weight"] = ("Q6_K", (256, 256), block * 256)
    return write_gguf(tmp_path / "k.gguf", tiny_metadata(**{"llama.embedding_length": 256}), tensors)


def test_k_quants_go_through_the_gguf_package(tmp_path):
    pytest.importorskip("gguf")
    convert(k_quant_file(tmp_path), tmp_path / "out", mx.float32)
    weight = load_model(tmp_path / "out")[0].layers[0].mlp.up_proj.weight
    assert mx.all(weight == 0.5 * 1 * (1 - 32)).item()  # scale * block scale * (code - 32)


def test_k_quants_without_the_package_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match=r"types \['F32'.*\[14\].*pip install 'mlx_qkvshare\[gguf\]'"):
        convert(k_quant_file(tmp_path), tmp_path / "out", mx.float32)


def test_float16_rounds_and_float32_does_not(tmp_path):
    tensors, exact = tiny_tensors(tiny_model(), "Q4_1")
    source = write_gguf(tmp_path / "t.gguf", tiny_metadata(), tensors)
    reports = []
    convert(source, tmp_path / "half", mx.float16, lambda done, total: reports.append((done, total)))
    name = "model.embed_tokens.weight"
    half = mx.load(str(tmp_path / "half" / "model.safetensors"))[name]
    assert half.dtype == mx.float16
    np.testing.assert_array_equal(np.array(half), exact[name].astype(np.float16))
    assert reports[0] == (0, len(tensors)) and reports[-1] == (len(tensors), len(tensors))
