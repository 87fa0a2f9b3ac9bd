"""Many agents under load: everything ends with a result or a typed reason, and the process ends well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import scheduler_load


def test_a_short_load() -> None:
    found = scheduler_load.run(seed=0, num_steps=200)
    assert found["steps"] >= 200 and found["leaked_bytes"] == 0


@pytest.mark.slow
def test_ten_processes_exit_with_0_two_of_them_after_two_thousand_steps() -> None:
    def steps(seed: int) -> int:
        return 2000 if seed <= 2 else 300

    def run(seed: int) -> subprocess.CompletedProcess[str]:
        # Two at a time on few cores: BLAS threads of their own would only get in each other's way.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, scheduler_load.__file__, str(seed), str(steps(seed))]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)

    with ThreadPoolExecutor(2) as pool:
        seeds = range(1, 11)
        for seed, found in zip(seeds, pool.map(run, seeds), strict=True):
            assert (found.returncode, found.stderr) == (0, ""), found.stderr
            assert json.loads(found.stdout)["steps"] >= steps(seed)
