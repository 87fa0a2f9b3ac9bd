"""The tokenizer of a GGUF file: byte-level BPE (GPT-2, SmolLM, Llama 3) or SentencePiece BPE (Llama 2, Gemma)."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .gguf_file import GGUFFile

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_KINDS = ("llama-bpe", "llama3", "llama-v3")
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"


def make_tokenizer(gguf: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The fast tokenizer and its tokenizer_config.

    Raises:
        UnsupportedModelError: a tokenizer or pre-tokenizer kind that is not known here; a guess would split
            text in another way than the model was trained on.
    """

    def get(key: str, default: Any = None) -> Any:
        return gguf.get(f"tokenizer.ggml.{key}", default)

    tokens, types = gguf.metadata["tokenizer.ggml.tokens"], gguf.metadata["tokenizer.ggml.token_type"]
    kind, pre = get("model"), get("pre", "default")
    gguf.require(kind in ("gpt2", "llama"), f"tokenizer 'gpt2' or 'llama', got {kind!r}")
    tokenizer = _byte_level_bpe(gguf, tokens, pre) if kind == "gpt2" else _sentencepiece_bpe(gguf, tokens, types)
    for special, wanted in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        added = [
            AddedToken(t, normalized=False, special=special) for t, k in zip(tokens, types, strict=True) if k in wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.of_architecture("context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (index := get(f"{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[index]
    # llama.cpp's own defaults where the file does not say.
    if get("add_bos_token", kind == "llama" or pre in _LLAMA3_KINDS):
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    if template := gguf.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return tokenizer, config


def _byte_level_bpe(gguf: GGUFFile, tokens: list[str], pre: str) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in gguf.metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3_KINDS))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in _LLAMA3_KINDS:
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    else:
        known = ("gpt-2", "smollm", *_LLAMA3_KINDS)
        gguf.require(pre == "gpt-2", f"one of the pre-tokenizers {known}, got {pre!r}")
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(gguf: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Llama 2's and Gemma's tokenizer: a merge for each way to build a piece of two others, best score first."""
    scores = gguf.metadata["tokenizer.ggml.scores"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN, _BYTE, _USER_DEFINED):
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        local = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        ranked += [
            (-score, pair) for pair in sorted(local, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ]
    merges = [pair for _, pair in sorted(ranked, key=lambda item: item[0])]
    unknown = tokens[gguf.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = gguf.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
