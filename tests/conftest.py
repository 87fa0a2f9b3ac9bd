"""What every test may rely on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlx_qkvshare import verdict


@pytest.fixture(autouse=True, scope="session")
def _no_verdicts_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `qkvshare doctor` kept for this user must not decide how the tests pack."""
    folder = tmp_path_factory.mktemp("verdicts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdict, "default_cache_dir", lambda: folder)
        yield
