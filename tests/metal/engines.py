"""Where kernel tests run: four simulated modes, and Metal itself where there is a device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import metalsim
import mlx.core as mx
import pytest

SIMULATED = {f"sim-{mode}": mode for mode in metalsim.MODES}
ENGINES = [*SIMULATED, "gpu"] if mx.metal.is_available() else [*SIMULATED]


@dataclass(frozen=True)
class Engine:
    """What `mx.fast.metal_kernel` means during a test; `session` is None on a GPU."""

    name: str
    session: metalsim.Session | None = None

    @property
    def mode(self) -> metalsim.Mode | None:
        """The simulated mode; None on a GPU."""
        return self.session.settings.mode if self.session else None

    @property
    def report(self) -> metalsim.Report:
        """Of the last launch; only where it is simulated."""
        assert self.session is not None and self.session.reports, self.name
        return self.session.reports[-1]


def require_simulator() -> None:
    """Skip the test where kernels cannot be built; fail it if METALSIM_REQUIRED says that they must be."""
    try:
        metalsim.require_toolchain()
    except metalsim.ToolchainMissing as reason:
        if os.environ.get("METALSIM_REQUIRED"):
            pytest.fail(f"METALSIM_REQUIRED is set, but metalsim {reason}")
        pytest.skip(f"metalsim {reason}")
