"""What the wheel and the sdist hold once installed, and what importing the library may do."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY_FILES = sorted((ROOT / "mlx_qkvshare").glob("*.py"))
SHIPPED_DATA = [
    "mlx_qkvshare/py.typed",
    *(f"mlx_qkvshare/metal/{path.name}" for path in sorted((ROOT / "metal").glob("*.metal"))),
    *(f"mlx_qkvshare/cli/data/{path.name}" for path in sorted((ROOT / "cli" / "data").glob("*.*"))),
    *(f"mlx_qkvshare/texts/{path.name}" for path in sorted((ROOT / "mlx_qkvshare" / "texts").iterdir())),
]


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    """pip without network: what is installed here already serves the clean venvs too."""
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel built from the tree and a wheel built from the sdist, by name; the tree stays clean."""
    base = tmp_path_factory.mktemp("build")
    tree, out, unpacked = base / "tree", base / "dist", base / "from_sdist"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "results.json")
    shutil.copytree(ROOT, tree, ignore=ignored)
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", out, cwd=tree)
    (sdist,) = out.glob("*.tar.gz")
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", unpacked, sdist, cwd=base)
    return {"wheel": next(out.glob("*.whl")), "sdist": next(unpacked.glob("*.whl"))}


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(
    request: pytest.FixtureRequest, distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a clean venv in which the package is installed; its dependencies are this venv's."""
    home = tmp_path_factory.mktemp(request.param)
    venv.create(home / "venv", with_pip=False, symlinks=True)
    python = home / "venv" / "bin" / "python"
    pip("--python", python, "install", "--no-deps", "--no-index", distributions[request.param], cwd=home)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=home).strip()
    # A path line, not addsitedir: an editable install of this repository must not shine through.
    paths = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    Path(site, "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    return home


def test_wheel_is_pure_python_and_leaks_no_top_level_name(distributions: dict[str, Path]) -> None:
    for wheel in distributions.values():
        assert wheel.name.endswith("-py3-none-any.whl")
        names = zipfile.ZipFile(wheel).namelist()
        top_level = {name.split("/")[0] for name in names}
        assert {name for name in top_level if not name.endswith(".dist-info")} == {"mlx_qkvshare"}
        assert set(SHIPPED_DATA) <= set(names)
        assert any(name.endswith("licenses/LICENSE") for name in names)


def test_kernels_demo_document_and_texts_are_shipped() -> None:
    assert any(name.endswith(".metal") for name in SHIPPED_DATA)
    assert any("/cli/data/" in name for name in SHIPPED_DATA)
    texts = ROOT / "mlx_qkvshare" / "texts"
    assert sum(path.stat().st_size for path in texts.iterdir()) < 2**20
    listed = (texts / "README.md").read_text()
    assert "public domain" in listed and all(path.name in listed for path in texts.glob("*.txt"))


def test_installed_package_is_whole(installed: Path) -> None:
    code = """
        import importlib.util as util, json, pathlib
        import mlx_qkvshare
        package = pathlib.Path(mlx_qkvshare.__file__).parent
        sources = {}
        if util.find_spec("mlx_qkvshare.kernels"):
            from mlx_qkvshare import kernels
            if hasattr(kernels, "kernel_source"):
                sources = {p.stem: kernels.kernel_source(p.stem) for p in (package / "metal").glob("*.metal")}
        print(json.dumps({
            "package": str(package),
            "files": [str(p.relative_to(package.parent)) for p in package.rglob("*")],
            "empty_kernels": [name for name, source in sources.items() if not source[1].strip()],
            "leaks": [name for name in ("cli", "metal") if util.find_spec(name)],
        }))
    """
    found = json.loads(run(installed / "venv/bin/python", "-c", textwrap.dedent(code), cwd=installed))
    assert Path(found["package"]).is_relative_to(installed)
    assert set(SHIPPED_DATA) <= set(found["files"])
    assert found["empty_kernels"] == []
    assert found["leaks"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is preloaded")
def test_a_python_without_mlx_is_told_apart_from_a_missing_blas() -> None:
    command = [sys.executable, "-S", "tools/openblas.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.endswith("has no MLX: run this with the Python that has it (.venv/bin/python)\n")


def test_installed_script_runs(installed: Path) -> None:
    assert "demo" in run(installed / "venv/bin/qkvshare", "--help", cwd=installed)


def test_import_writes_nothing_and_needs_only_mlx(tmp_path: Path) -> None:
    """As in an app that brings Python and MLX alone: no other package, no writable home, no process."""
    code = """
        import os, sys

        MISSING = {"mlx_lm", "transformers", "tokenizers", "typer", "rich", "gguf", "huggingface_hub"}
        WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        ACTS = ("os.", "shutil.", "subprocess.", "socket.", "tempfile.")
        READS = {"os.listdir", "os.scandir", "os.walk"}

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in MISSING:
                    raise ModuleNotFoundError(f"{name} is not here", name=name)

        def watch(event, arguments):
            if event.startswith(ACTS) and event not in READS:
                seen.append(f"{event}{arguments}")
            elif event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
                seen.append(f"open{arguments}")

        import mlx.core, numpy  # what they themselves do at import is not ours
        seen = []
        sys.meta_path.insert(0, Blocker())
        sys.addaudithook(watch)
        before = dict(os.environ)
        import mlx_qkvshare
        assert not seen, seen
        assert dict(os.environ) == before
    """
    tmp_path.chmod(0o500)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(tmp_path))
    assert run(sys.executable, "-c", textwrap.dedent(code), cwd=tmp_path, env=env) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=lambda path: path.name)
def test_library_prints_nothing_and_reads_no_environment(path: Path) -> None:
    faults = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            faults.append(f"line {node.lineno}: print()")
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) and node.module == "os" else []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names.append(node.attr)
        faults += [f"line {node.lineno}: os.{name}" for name in names if name in {"environ", "environb", "getenv"}]
    assert faults == []
