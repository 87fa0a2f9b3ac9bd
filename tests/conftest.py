"""What every test may rely on."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator

import pytest
from store_work import python_path

from mlx_qkvshare import verdict


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "numprocesses", None):  # one thread for each process; they inherit it
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def _no_verdicts_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `qkvshare doctor` kept for this user must not decide how the tests pack."""
    folder = tmp_path_factory.mktemp("verdicts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdict, "default_cache_dir", lambda: folder)
        yield


@pytest.fixture(scope="module")
def processes():
    """Forks of one process that has the library imported and nothing computed."""
    context, before = multiprocessing.get_context("forkserver"), os.environ.get("PYTHONPATH")
    context.set_forkserver_preload(["store_work", "pytest"])
    os.environ["PYTHONPATH"] = python_path()  # the server does not look where this process does
    first = context.Process(target=print)
    first.start()
    first.join()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return context
