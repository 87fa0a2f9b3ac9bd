"""What each technique costs in time: tokens sealed per second and a decode step, as ratios to plain K8 V8.

    python benchmarks/techniques.py [--model SOURCE] [--tokens 1024]

All of them in one process, in turn, on the same rows. Ratios above 1 are faster seals and slower steps.
"""

import argparse
import dataclasses
import json

from mlx_qkvshare import AgentSession, QuantizedAttention, QuantSpec, SharedKVCacheManager, load
from mlx_qkvshare.calibrate import calibrate
from mlx_qkvshare.fidelity import Reference
from mlx_qkvshare.guard import Guard
from mlx_qkvshare.measure import AS_ASKED, interleaved_medians, report, seconds
from mlx_qkvshare.passages import Passage, text_of, tokens_of
from mlx_qkvshare.spec import PRESETS

PLAIN, NESTED = QuantSpec(), QuantSpec(is_nested=True)
FLAGS = {"sinks": {"sink_tokens": 4}, "rotated": {"is_rotated": True}, "centred": {"is_centred": True}}
CASES = {"plain K8V8": PLAIN} | {name: dataclasses.replace(PLAIN, **flag) for name, flag in FLAGS.items()}
CASES |= {"nested": NESTED, "nested, base only": NESTED, "K6V6": QuantSpec(6, 6), "K4V4": QuantSpec(4, 4)} | PRESETS
CASES |= {"safe, factors": PRESETS["safe"], "K4V4, guarded": QuantSpec(4, 4)}
CASES["tight, adaptive"] = dataclasses.replace(PRESETS["tight"], is_adaptive=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    lm = load(args.model)
    *ids, last = tokens_of(lm.tokenizer, text_of("moby-dick"), args.tokens + 1)
    reference, factors = Reference(lm, Passage("", tuple(ids), (last,))), calibrate(lm)
    seals, steps, sessions = {}, {}, []
    for name, quant in CASES.items():
        options = {"key_factors": factors if "factors" in name else None}
        options |= {"guard": Guard()} if "guarded" in name else {}
        manager = SharedKVCacheManager(lm.spec, quant, **(AS_ASKED | options))

        def seal(manager=manager):
            slot = manager.allocate_shared_slot(args.tokens)
            return manager.quantize_and_store(slot, ids, list(reference.rows), looked=reference.looked)

        session = AgentSession(name, lm, manager, attention=QuantizedAttention(reads_base="base" in name))
        prefix = seal()
        session.prefill([*ids, *[last] * 8])
        prefix.release()
        sessions.append(session)
        seals[name] = lambda seal=seal: seconds(lambda: seal().release())
        steps[name] = lambda session=session: seconds(lambda: [session.generate_token() for _ in range(4)]) / 4
    look = {"look": lambda: seconds(lambda: sessions[0].look(8))}
    seal_times, step_times = (interleaved_medians(runs, args.repeats) for runs in (seals, steps | look))
    rows = []
    print(f"{'':<20} seal, tokens/s    ratio   decode step, ratio")
    for name in CASES:
        rate, faster = args.tokens / seal_times[name], seal_times["plain K8V8"] / seal_times[name]
        slower = step_times[name] / step_times["plain K8V8"]
        rows.append({"name": name, "seal_tokens_per_second": rate, "seal_ratio": faster, "decode_ratio": slower})
        print(f"{name:<20} {rate:>14,.0f} {faster:>8.2f} {slower:>20.2f}")
    print(f"the guard's look at the last tokens: {step_times['look'] / step_times['plain K8V8']:.2f} decode steps")
    print(json.dumps(report("techniques", args.model or "default", rows)))


if __name__ == "__main__":
    main()
