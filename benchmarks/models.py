"""Every model module of the installed mlx-lm through `tests/zoo.py`, and the table of verdicts in docs/models.md.

    PYTHONPATH=tests python benchmarks/models.py

Takes some three minutes. Exits with 1, and writes nothing, if a module is neither exact nor refused.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from zoo import FAULT, examine_all, page
from zoo_configs import model_names

from mlx_qkvshare.measure import report

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"


def main() -> None:
    verdicts = examine_all(model_names())
    counts = dict(Counter(verdict.kind for verdict in verdicts))
    print(json.dumps(report("models", "tiny, random", [counts])))
    if FAULT in counts:
        sys.exit("\n".join(f"{it.module}: {it.note}" for it in verdicts if it.kind == FAULT))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(verdicts), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
