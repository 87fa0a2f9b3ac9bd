"""Mixed precision against one precision: adaptive bits against uniform ones at equal bytes, and nested planes.

    python benchmarks/precision.py [--model SOURCE] [--prefix 1536] [--scored 512]

Adaptive: every block of 128 tokens has bits of its own (mlx_qkvshare/allocate.py). Nested: the 4-bit base of 8 bits.
"""

import argparse
import dataclasses
import json

from mlx_qkvshare import QuantizedAttention, QuantSpec, load
from mlx_qkvshare.fidelity import Candidate, fidelity
from mlx_qkvshare.measure import report
from mlx_qkvshare.passages import TEXTS, passage, text_of
from mlx_qkvshare.spec import PRESETS

TIGHT, NESTED = PRESETS["tight"], dataclasses.replace(PRESETS["safe"], is_nested=True)


def candidates() -> list[Candidate]:
    found = []
    for bits in (3, 4, 5):
        uniform = dataclasses.replace(TIGHT, k_bits=bits, v_bits=bits)
        found.append(Candidate(f"{bits} bits, uniform", uniform))
        found.append(Candidate(f"{bits} bits, adaptive", dataclasses.replace(uniform, is_adaptive=True)))
    base = QuantizedAttention(reads_base=True)
    found += [Candidate("safe", PRESETS["safe"]), Candidate("safe, nested", NESTED)]
    found.append(Candidate("safe, nested, base only", NESTED, attention=base))
    plain = QuantSpec(8, 8, is_nested=True)
    return [*found, Candidate("K8V8, nested, base only", plain, attention=base), Candidate("K4V4", QuantSpec(4, 4))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--prefix", type=int, default=1536)
    parser.add_argument("--scored", type=int, default=512)
    args = parser.parse_args()
    lm = load(args.model)
    sizes = {"prefix_tokens": args.prefix, "scored_tokens": args.scored}
    texts = [passage(lm.tokenizer, name, text_of(name), **sizes) for name in TEXTS]
    rows = fidelity(lm, candidates(), texts, dtype="float16", note=print)
    print(f"\n{'':<24} bytes/token   mean KL  of each text ({', '.join(TEXTS)})")
    for row in rows:
        each = "  ".join(f"{value:.2e}" for value in row.kl_by_passage.values())
        print(f"{row.config:<24} {row.bytes_per_token:>11} {row.kl_mean:>9.2e}  {each}")
    print(json.dumps(report("precision", args.model or "default", [dataclasses.asdict(row) for row in rows])))


if __name__ == "__main__":
    main()
