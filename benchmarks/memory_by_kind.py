"""What is shared and what is copied, by kind of layer: a tiny random model of each kind on one context. Live bytes.

    python benchmarks/memory_by_kind.py [--tokens 2048]

mlx-lm: its own cache of the context, and what a `copy.deepcopy` of it adds once it is written to.
"""

import argparse
import copy
import json

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from mlx_qkvshare import AgentSession, HandoffCoordinator, LoadedModel, SharedKVCacheManager
from mlx_qkvshare.measure import live_bytes, report
from mlx_qkvshare.model import describe
from mlx_qkvshare.spec import StateSpec

OWN = 16
SIZES = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64,
         "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
         "rope_theta": 1e4}  # fmt: skip
KINDS = {
    "full attention": {"model_type": "llama"},
    "sliding windows": {"model_type": "gemma3_text", "sliding_window": 512, "query_pre_attn_scalar": 64},
    "recurrent, full": {
        "model_type": "qwen3_next", "num_hidden_layers": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "decoder_sparse_step": 1,
        "num_experts": 0, "num_experts_per_tok": 0, "shared_expert_intermediate_size": 64, "moe_intermediate_size": 64,
        "mlp_only_layers": [], "partial_rotary_factor": 0.5,
    },
    "latent (MLA)": {
        "model_type": "deepseek_v3", "kv_lora_rank": 128, "q_lora_rank": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "qk_nope_head_dim": 64, "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0},
    },
    "lists of caches": {"model_type": "falcon_h1", "mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_state": 64},
}  # fmt: skip


def ours(lm: LoadedModel, ids: list[int]) -> dict[str, int]:
    before, shared = live_bytes(), dict.fromkeys(("full", "window", "state"), 0)
    manager = SharedKVCacheManager(lm.spec)
    first, second = AgentSession("first", lm, manager), AgentSession("second", lm, manager)
    first.prefill(ids)
    first.seal()
    held = live_bytes()
    for layer, kv in zip(lm.spec.layers, first.prefix.views[0].segment.layers, strict=True):
        shared["state" if isinstance(layer, StateSpec) else layer.kind] += kv.nbytes
    spare = held - before - sum(shared.values())  # MLX hands out cached buffers that are up to two pages too large
    assert 0 <= spare < 0.01 * (held - before), (spare, shared)
    HandoffCoordinator(manager).request_handoff(first, second, keep_sender=True)
    handed = live_bytes() - held
    for token in ids[:OWN]:
        second.score([token])
    return {**shared, "handed": handed, "own": live_bytes() - held}


def stock(lm: LoadedModel, ids: list[int]) -> dict[str, int]:
    before, cache = live_bytes(), make_prompt_cache(lm.model)

    def feed(tokens: list[int], layers: list) -> None:
        lm.model(mx.array([tokens]), cache=layers)
        mx.eval([layer.state for layer in layers])

    for start in range(0, len(ids), 512):
        feed(ids[start : start + 512], cache)
    held, twin = live_bytes(), copy.deepcopy(cache)
    for token in ids[:OWN]:
        feed([token], twin)
    return {"stock": held - before, "stock_copy": live_bytes() - held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    args, rows = parser.parse_args(), []
    ids = [7 + (31 * i + i * i // 7) % 500 for i in range(args.tokens)]
    print(f"KiB               full rows  windows   states | handoff  {OWN} own | mlx-lm  deep copy, {OWN} own")
    for kind, config in KINDS.items():
        config = SIZES | config
        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
        mx.eval(model.parameters())
        lm = LoadedModel(model, None, describe(model, config))
        row = ours(lm, ids) | stock(lm, ids)
        rows.append({"kind": kind, "model": config["model_type"], **row})
        cells = [f"{value / 1024:8.1f}" for value in row.values()]
        print(f"{kind:<17} {' '.join(cells[:3])} | {' '.join(cells[3:5])} | {' '.join(cells[5:])}")
    print(json.dumps(report("memory_by_kind", "tiny random models", rows)))


if __name__ == "__main__":
    main()
