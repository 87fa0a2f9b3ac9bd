"""Peak memory of prefill + seal against mlx-lm's full-precision prefill of the same tokens.

    python benchmarks/prefill_peak.py [--model SOURCE] [--tokens 512,1024,2048]

Both sides prefill in chunks of 512 tokens; bytes are above the weights.
"""

import argparse
import json

from mlx_qkvshare import load
from mlx_qkvshare.bench import prefill_peaks
from mlx_qkvshare.measure import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", default="512,1024,2048")
    args = parser.parse_args()
    lm, rows = load(args.model), []
    print("tokens   ours MiB   mlx-lm MiB   ratio")
    for tokens in map(int, args.tokens.split(",")):
        row = prefill_peaks(lm, tokens)
        rows.append(row)
        ours, stock = row["ours_peak_bytes"], row["stock_peak_bytes"]
        print(f"{tokens:>6} {ours / 2**20:>10.1f} {stock / 2**20:>12.1f} {ours / stock:>7.3f}")
    print(json.dumps(report("prefill_peak", args.model or "default", rows)))


if __name__ == "__main__":
    main()
