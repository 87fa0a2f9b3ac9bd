"""Few cases out of a large product of settings, in which every two values of every two settings meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]], *, tries: int = 60) -> list[dict[str, Any]]:
    """Greedy all-pairs selection; the same `factors` give the same cases."""
    draw, names = random.Random(0), list(factors)
    values = {name: [str(v) for v in factors[name]] for name in names}
    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(values[a], values[b])
    }
    cases = []
    while missing:
        candidates = [{name: draw.choice(factors[name]) for name in names} for _ in range(tries)]
        first = min(missing)  # one pair that is missing is in every candidate, so that this ends
        for candidate in candidates:
            for name, text in (first[:2], first[2:]):
                candidate[name] = factors[name][values[name].index(text)]
        gained = [
            {(a, str(c[a]), b, str(c[b])) for a, b in itertools.combinations(names, 2)} & missing for c in candidates
        ]
        best = max(range(len(candidates)), key=lambda i: len(gained[i]))
        missing -= gained[best]
        cases.append(candidates[best])
    return cases
