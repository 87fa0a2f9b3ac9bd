"""What a sealed prefix costs in quality: KL against full precision on real text.

    python benchmarks/fidelity.py [--model SOURCE] [--prefix 1024] [--scored 512] [--passages 3]

Text: the language reference that Python carries (`pydoc_data.topics`).
"""

import argparse
import json

from mlx_qkvshare import QuantSpec, load
from mlx_qkvshare.bench import kl_divergence
from mlx_qkvshare.measure import report

SPECS = [(16, 16), (8, 8), (8, 4), (6, 6), (4, 8), (4, 4)]
SKIPS = [0, 2000, 4000]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=512)
    parser.add_argument("--passages", type=int, default=len(SKIPS), choices=range(1, len(SKIPS) + 1))
    args = parser.parse_args()
    lm, rows = load(args.model), []
    print("quant       bytes/token  mean KL of each passage          worst KL  top-1")
    for k_bits, v_bits in SPECS:
        quant = QuantSpec(k_bits, v_bits)
        runs = [
            kl_divergence(lm, prefix_tokens=args.prefix, scored_tokens=args.scored, skip=skip, quant=quant)
            for skip in SKIPS[: args.passages]
        ]
        means = [run["mean_kl"] for run in runs]
        worst, agreement = max(run["max_kl"] for run in runs), min(run["top1_agreement"] for run in runs)
        # The mean over the prefix: sliding layers hold fewer rows than tokens.
        per_token = round(quant.packed_bytes(lm.spec, args.prefix) / args.prefix)
        row = {"quant": str(quant), "bytes_per_token": per_token, "mean_kl": means}
        rows.append(row | {"max_kl": worst, "top1_agreement": agreement})
        shown = "  ".join(f"{mean:8.2e}" for mean in means)
        print(f"{quant!s:<10} {per_token:>12}  {shown:<28}   {worst:8.2e}  {agreement:.3f}")
    print(json.dumps(report("fidelity", args.model or "default", rows)))


if __name__ == "__main__":
    main()
