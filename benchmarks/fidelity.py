"""What a sealed prefix costs in quality: KL against full precision on real text.

    python benchmarks/fidelity.py [--model SOURCE] [--prefix 1024] [--scored 512] [--passages 3]

Text: the language reference that Python carries (`pydoc_data.topics`). The presets run without and with key factors,
which are calibrated on another part of it.
"""

import argparse
import json

from mlx_qkvshare import QuantSpec, load
from mlx_qkvshare.bench import kl_divergence
from mlx_qkvshare.calibrate import calibrate
from mlx_qkvshare.measure import report, sample_tokens
from mlx_qkvshare.spec import PRESETS

PLAIN = [QuantSpec(k_bits, v_bits) for k_bits, v_bits in ((16, 16), (8, 8), (8, 4), (6, 6), (4, 8), (4, 4))]
SKIPS = [0, 2000, 4000]
CALIBRATION_SKIP = 30000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=512)
    parser.add_argument("--passages", type=int, default=len(SKIPS), choices=range(1, len(SKIPS) + 1))
    args = parser.parse_args()
    lm, rows = load(args.model), []
    factors = calibrate(lm, sample_tokens(lm.tokenizer, 512, skip=CALIBRATION_SKIP))
    cases = [(quant, None) for quant in PLAIN] + [(q, f) for q in PRESETS.values() for f in (None, factors)]
    print("quant                       bytes/token  mean KL of each passage          worst KL  top-1")
    for quant, key_factors in cases:
        sizes = {"prefix_tokens": args.prefix, "scored_tokens": args.scored}
        runs = [
            kl_divergence(lm, **sizes, skip=skip, quant=quant, key_factors=key_factors)
            for skip in SKIPS[: args.passages]
        ]
        means = [run["mean_kl"] for run in runs]
        worst, agreement = max(run["max_kl"] for run in runs), min(run["top1_agreement"] for run in runs)
        # The mean over the prefix: sliding layers hold fewer rows than tokens.
        per_token = round(quant.packed_bytes(lm.spec, args.prefix) / args.prefix)
        name = f"{quant}{', calibrated' if key_factors else ''}"
        row = {"quant": name, "bytes_per_token": per_token, "mean_kl": means}
        rows.append(row | {"max_kl": worst, "top1_agreement": agreement})
        shown = "  ".join(f"{mean:8.2e}" for mean in means)
        print(f"{name:<26} {per_token:>12}  {shown:<28}   {worst:8.2e}  {agreement:.3f}")
    print(json.dumps(report("fidelity", args.model or "default", rows)))


if __name__ == "__main__":
    main()
