"""Fixtures of kernel tests: `engine` runs a test on every engine, `simulator` lets it choose the mode itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/, for metalsim

import metalsim
from engines import ENGINES, SIMULATED, Engine, require_simulator

from mlx_qkvshare.kernels import build_kernel


@pytest.fixture(scope="session")
def simulator() -> None:
    """For tests that choose the mode themselves."""
    require_simulator()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Kernels made in the test run on this engine; tests ask for some engines only by indirect parametrization."""
    name: str = request.param
    if name not in SIMULATED:
        if not mx.metal.is_available():  # a test that names it
            pytest.skip("no Metal device")
        yield Engine(name)
        return
    require_simulator()
    build_kernel.cache_clear()  # a kernel object belongs to the engine that it was made on
    with metalsim.install(SIMULATED[name], available=True) as session:
        yield Engine(name, session)
    build_kernel.cache_clear()
