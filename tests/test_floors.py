"""Who may import whom, and who may touch which library; read from the syntax trees, nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module imports only from lower floors; on one floor only the pairs of HELPERS do.
FLOORS = {
    "digest": -1,
    "errors": 0,
    "folders": 0,
    "policy": 0.5,
    "spec": 0,
    "versions": 0,
    "quantize": 1,
    "sampling": 1,
    "kernels": 1,
    "fingerprint": 1,
    "gguf_file": 1,
    "segment": 1.5,
    "segment_file": 1.6,
    "segment_layout": 1.7,
    "state_cache": 2.1,
    "gguf_architectures": 1.2,
    "gguf_tokenizer": 1.2,
    "gguf_convert": 1.5,
    "gguf_cache": 1.5,
    "headers": 1.6,
    "download": 1.8,
    "layer_cache": 2,
    "prefix": 1.8,
    "integrity": 2.5,
    "table": 2,
    "parts": 2,
    "routes": 1,
    "batch_cache": 2.2,
    "cascade": 2.5,
    "part_kernel": 2.1,
    "pack_kernel": 2.1,
    "cascade_kernel": 2.5,
    "model": 2.2,
    "chat": 2,
    "card": 2.5,
    "verdict": 2.5,
    "guard": 2.5,
    "allocate": 2.6,
    "packing": 2.7,
    "figures": 2.8,
    "manager": 3,
    "attention": 3,
    "package": 3,
    "context": 3.5,
    "store_files": 1,
    "store": 3.5,
    "archive": 3.6,
    "spill": 3.6,
    "session": 4,
    "batch": 4.5,
    "restore": 4.5,
    "task": 4.6,
    "handoff": 5,
    "schedule": 5,
    "scheduler": 5.5,
    "serve": 5.5,
    "measure": 6,
    "passages": 6.1,
    "calibrate": 6.2,
    "bench_stock": 6.4,
    "peak": 6.3,
    "plan": 6.4,
    "fidelity": 6.5,
    "doctor": 6.55,
    "bench": 6.5,
    "bench_decode": 6.55,
    "bench_prefill": 6.55,
    "bench_attention": 6.55,
    "bench_latency": 6.55,
    "bench_restore": 6.55,
    "bench_all": 6.58,
    "bench_compare": 6.5,
    "plots": 6.5,
    "__init__": 6.6,  # the public face
    "cli": 7,
    "benchmarks": 7,
}
HELPERS = {("spec", "errors"), ("cli", "cli"), ("benchmarks", "benchmarks")}
OWNERS = {
    "mlx_lm": {
        *("model", "attention", "session", "state_cache", "serve"),
        *("bench_stock", "bench", "bench_decode", "bench_latency", "benchmarks"),
    },
    "huggingface_hub": {"download"},
    "matplotlib": {"plots"},
    # `digest` alone decides how bytes are digested; the others keep to what wheels and manifests on disk have.
    "hashlib": {"digest", "download", "fingerprint", "gguf_cache"},
    "typer": {"cli"},
    "rich": {"cli"},
    "click": set(),  # typer brings its own
}


def source_files() -> dict[Path, str]:
    """Every file of library, cli and benchmarks, with the name of its module in FLOORS."""
    files = {path: path.stem for path in sorted((ROOT / "mlx_qkvshare").rglob("*.py"))}
    for folder in ("cli", "benchmarks"):
        files |= dict.fromkeys(sorted((ROOT / folder).rglob("*.py")), folder)
    return files


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, wherever it stands; relative names made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_in_cli = module == "cli" and node.level == 1
                base = ".".join(filter(None, ["mlx_qkvshare", "cli" if is_in_cli else "", base]))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in {"import_module", "__import__"} and node.args:
            text = next((n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)), "")
            yield node.lineno, str(text)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", "")


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The simple statements that an import runs: not those inside functions."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [part.body for part in getattr(statement, "handlers", []) + getattr(statement, "cases", [])]
        if any(blocks):
            for block in blocks:
                yield from run_at_import(block)
        else:
            yield statement


def import_faults(tree: ast.Module, module: str) -> Iterator[str]:
    for line, dotted in imports(tree, module):
        top, *rest = dotted.split(".")
        if top in OWNERS and module not in OWNERS[top]:
            yield f"line {line}: {module} may not touch {top} (only {sorted(OWNERS[top])})"
        if top != "mlx_qkvshare":
            continue
        target = rest[0] if rest and rest[0] in FLOORS else "__init__"
        if FLOORS[target] >= FLOORS[module] and (module, target) not in HELPERS:
            yield f"line {line}: {module} (floor {FLOORS[module]}) imports {target} (floor {FLOORS[target]})"


def conduct_faults(tree: ast.Module, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "metal_kernel" and module != "kernels":
            yield f"line {node.lineno}: only kernels.py touches metal_kernel"
        # Batch and schedule run code of others, and one agent's failure, of whatever kind, must not reach another.
        if isinstance(node, ast.ExceptHandler) and module not in ("cli", "schedule", "batch"):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or _name(kind) == "Exception" for kind in caught):
                yield f"line {node.lineno}: catches everything; name the errors"


def patch_faults(tree: ast.Module) -> Iterator[str]:
    """Assignments into foreign objects while the module is being imported."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for statement in run_at_import(tree.body):
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) and _root(target) in imported:
                yield f"line {statement.lineno}: patches {ast.unparse(target)} at import"
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _name(node.func) in {"setattr", "delattr"}:
                yield f"line {node.lineno}: {ast.unparse(node)} at import"


def faults(source: str, module: str) -> list[str]:
    tree = ast.parse(source)
    return [*import_faults(tree, module), *conduct_faults(tree, module), *patch_faults(tree)]


def test_every_module_has_a_floor() -> None:
    missing = sorted({module for module in source_files().values() if module not in FLOORS})
    assert not missing, f"give {missing} a floor in FLOORS (and in the docs): which modules may they import?"


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_keeps_to_its_floor(path: Path) -> None:
    module = source_files()[path]
    if module not in FLOORS:
        pytest.fail(f"{module} has no floor")
    assert faults(path.read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("manager", "from .session import AgentSession"),
        ("manager", "from .attention import QuantizedAttention"),
        ("manager", "from . import package"),
        ("manager", "from . import AgentSession"),
        ("manager", "def f():\n    import mlx_qkvshare.handoff"),
        ("gguf_convert", "from .model import load"),
        ("__init__", "from .cli import app"),
        ("benchmarks", "from mlx_qkvshare.cli import app"),
        ("manager", "import mlx_lm.models.base"),
        ("manager", "import importlib\nimportlib.import_module(f'mlx_lm.models.{kind}')"),
        ("cli", "from mlx_lm import load"),
        ("session", "from huggingface_hub import snapshot_download"),
        ("measure", "import typer"),
        ("cli", "import click"),
        ("segment_file", "import hashlib"),
        ("attention", "import mlx.core as mx\nmx.fast.metal_kernel(name='k')"),
        ("session", "try:\n    f()\nexcept Exception:\n    pass"),
        ("session", "try:\n    f()\nexcept:\n    pass"),
        ("session", "try:\n    f()\nexcept (ValueError, Exception):\n    pass"),
        ("attention", "from mlx_lm.models import base\nbase.scaled_dot_product_attention = None"),
        ("attention", "import sys\nif True:\n    sys.modules['x'] = None"),
        ("attention", "import mlx.core as mx\nsetattr(mx, 'quantize', None)"),
    ],
)
def test_a_breach_is_seen(module: str, source: str) -> None:
    assert faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spec", "from .errors import InvalidValueError"),
        ("model", "from .gguf_convert import convert\nfrom mlx_lm import load"),
        ("session", "from . import manager\nfrom .attention import x"),
        ("__init__", "from .handoff import HandoffCoordinator"),
        ("cli", "import typer\nfrom . import app\nfrom ..session import AgentSession\nfrom .. import measure"),
        ("benchmarks", "import mlx_lm\nfrom mlx_qkvshare import AgentSession, measure"),
        ("attention", "from mlx_lm.models import base\ndef f():\n    base.x = 1"),
        ("session", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert faults(source, module) == []
