"""Our sealed prefix scored by mlx-quant-fidelity, and TurboQuant's 4 bits beside it. What is not installed is left out.

    python benchmarks/peers.py [--model SOURCE] [--prefix 512] [--scored 256]    (pip install '.[peers]')

Mean KL, full precision || packed, behind a prefix. *own*: `fidelity.Reference`. *fidelity*: mlx-quant-fidelity has the
prefix packed and goes on with what it gets. TurboQuant *live* packs while it prefills, *converted* the finished prefix,
and both the scored tokens, too; *sealed* packs the finished prefix and nothing else, as ours do.
"""

import argparse
import json
from importlib.util import find_spec
from types import SimpleNamespace

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_qkvshare import AgentSession, QuantSpec, SharedKVCacheManager, load, quantized_attention
from mlx_qkvshare.bench_stock import PREFILL_STEP
from mlx_qkvshare.fidelity import Candidate, Reference
from mlx_qkvshare.measure import AS_ASKED, report
from mlx_qkvshare.passages import TEXTS, passage, text_of


def pack(lm, prefix, way, full):
    """Caches of `prefix` to go on with, and the bytes that it takes packed. `full`: mlx-lm's caches of it."""
    if isinstance(way, QuantSpec):
        manager = SharedKVCacheManager(lm.spec, way, **AS_ASKED)
        agent = AgentSession("peer", lm, manager, prefill_step_tokens=PREFILL_STEP)
        agent.prefill(prefix)
        agent.seal()
        return agent.caches, agent.prefix.shared_bytes
    from turboquant_mlx.layers.polar_kv_cache import convert_cache_to_turboquant, make_turboquant_cache

    packed = make_turboquant_cache(lm.model, 4) if way == "live" else convert_cache_to_turboquant(full, 4)
    for start in range(packed[0].offset, len(prefix), PREFILL_STEP):
        lm.model(mx.array(prefix[start : start + PREFILL_STEP])[None], cache=packed)
    caches = [KVCache() for _ in packed] if way == "sealed" else packed
    for cache, layer in zip(caches, packed, strict=True):
        if cache is not layer:
            cache.update_and_fetch(*(rows.astype(getattr(mx, lm.spec.dtype)) for rows in layer.fused_fallback_fetch()))
    return caches, sum(layer.nbytes for layer in packed)


def by_fidelity(lm, prefix, scored, way):
    from mlx_quant_fidelity.corpora import Corpus, CorpusProvenance
    from mlx_quant_fidelity.probes.kv import score_kv_config

    packed, ids = [], mx.array([*prefix, *scored, 0])  # of the last one only the perplexity is taken
    method = SimpleNamespace(
        name="peers", params={}, guard=quantized_attention, check=lambda **model: [], probe_capability=id,
        convert_prefix=lambda full: packed.extend(pack(lm, prefix, way, full)) or packed[0], report_warnings=list,
        **dict.fromkeys(("bytes_per_token", "working_set_bytes", "measured_bytes"), lambda *a, **k: 0), provenance=dict,
    )  # fmt: skip
    corpus = Corpus((ids,), CorpusProvenance(*["peers"] * 3, ids.size, ids.size, *["none"] * 3, ids.size))
    found = score_kv_config(lm.model, corpus, model_id="peers", method=method, quantize_start=len(prefix))
    return {"bytes_per_token": packed[1] / len(prefix), "fidelity_kl": found.kl.mean}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"model": "", "prefix": 512, "scored": 256}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    peers = {name: find_spec(name) is not None for name in ("mlx_quant_fidelity", "turboquant_mlx")}
    print(f"installed: {peers}", *(f"{title:<20}" for title in ("\ncache", "text", "own", "bytes a token", "fidelity")))
    lm, rows, ours = load(args.model or None), [], [QuantSpec(), QuantSpec(4, 4), QuantSpec.preset("tight")]
    sizes = {"prefix_tokens": args.prefix, "scored_tokens": args.scored}
    for name in TEXTS:
        reference = Reference(lm, text := passage(lm.tokenizer, name, text_of(name), **sizes))
        for way in [*ours, *(("live", "converted", "sealed") if all(peers.values()) else ())]:
            own = float(reference.scores(Candidate("", way)).kl.mean()) if way in ours else None
            row = {"cache": str(way) if way in ours else f"TurboQuant {way}", "text": name, "own_kl": own}
            if peers["mlx_quant_fidelity"]:
                row |= by_fidelity(lm, text.prefix, text.scored, way)
            print(*(f"{it:<20.5g}" if isinstance(it, float) else f"{it!s:<20}" for it in row.values()), flush=True)
            rows.append(row)
    print(json.dumps(report("peers", args.model or "default", rows)))


if __name__ == "__main__":
    main()
