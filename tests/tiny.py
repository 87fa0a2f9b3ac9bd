"""The tiny fixture T: a random Llama and a byte-level BPE tokenizer, built offline in well under a second.

Hidden 128, 2 layers, 4 query heads, 2 KV heads, head dim 64, vocabulary 343, 512 positions, float32, seed 0.
"""

from __future__ import annotations

import functools
import json

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mlx_qkvshare.model import LoadedModel, describe

VOCAB_SIZE = 343
BOS, EOS = "<s>", "<|im_end|>"
SPECIAL_TOKENS = [BOS, "</s>", "<|im_start|>", EOS]  # ids 0, 1, 2, 3

CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHORT_NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "hidden_size",
    "max_position": "max_position_embeddings",
}

# Of other kinds than T: layers that slide over a window, and layers that keep a state.
SLIDING = {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2}
RECURRENT = {
    "model_type": "lfm2",
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_ff_dim": 256,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
}

_CORPUS = """
The planner reads the document and writes down what has to be done. The researcher looks for the facts that the
planner asked for, and the writer turns them into an answer. Each of the three agents sees the same context, since
the keys and the values of its tokens are computed once and then shared. A system message says who speaks, the user
asks a question, and the assistant answers it. Numbers such as 12, 64, 128 and 343 are part of the text as well.
"""


def tiny_config(**overrides) -> dict:
    """Overrides by config name, or by a short one: layers, heads, kv_heads, hidden, max_position."""
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 3,
    }
    return config | {_SHORT_NAMES.get(name, name): value for name, value in overrides.items()}


@functools.cache
def _cached_model(config_text: str, seed: int) -> nn.Module:
    return _make_model(json.loads(config_text), seed)


def _make_model(config: dict, seed: int) -> nn.Module:
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_model(seed: int = 0, fresh: bool = False, **overrides) -> nn.Module:
    """The random model; one object for equal arguments, unless `fresh` (for tests that change it)."""
    config = tiny_config(**overrides)
    return _make_model(config, seed) if fresh else _cached_model(json.dumps(config, sort_keys=True), seed)


@functools.cache
def tiny_tokenizer(chat_template: str | None = CHATML) -> TokenizerWrapper:
    """Byte-level BPE: any text survives encode and decode; `encode` prepends one `<s>`, and so does the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, f"expected {VOCAB_SIZE} tokens, got {tokenizer.get_vocab_size()}"
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def tiny_loaded(seed: int = 0, fresh: bool = False, chat_template: str | None = CHATML, **overrides) -> LoadedModel:
    """Model, tokenizer and spec, as `load()` gives them."""
    model, tokenizer = tiny_model(seed, fresh, **overrides), tiny_tokenizer(chat_template)
    return LoadedModel(model, tokenizer, describe(model, tiny_config(**overrides), tokenizer))
