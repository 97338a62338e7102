"""The shape of the package: imports point down in one total order, and some libraries have one home."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "isthmus"

ORDER = """
    __main__ integrations cli demo service learning training federation asking private features rankers losses
    classification engines retrieval encoders fusion calibration logistic corpora partition evaluation
    languages text config tables arrays report files randomness workers errors facade
"""
LEVEL = {part: level for level, tier in enumerate(ORDER.split()) for part in tier.split("|")}

HOMES = {
    "argparse": ("isthmus.cli",),
    "flwr": ("isthmus.federation",),
    "ray": ("isthmus.federation",),
    "fastapi": ("isthmus.service",),
    "starlette": ("isthmus.service",),
    "uvicorn": ("isthmus.service",),
    "mcp": ("isthmus.service.mcp",),
    "opentelemetry": ("isthmus.service.tracing",),
    "xgboost": ("isthmus.rankers",),
    "lightgbm": ("isthmus.rankers",),
    "langchain_core": ("isthmus.integrations.langchain",),
    "llama_index": ("isthmus.integrations.llamaindex",),
    "haystack": ("isthmus.integrations.haystack",),
    "pyterrier": ("isthmus.integrations.pyterrier",),
    "ir_datasets": ("isthmus.corpora",),
    "matplotlib": ("isthmus.report",),
    "tantivy": ("isthmus.engines",),
    "usearch": ("isthmus.engines",),
    "simsimd": ("isthmus.engines",),
    # never: global random state, code in data files, a second parser, gigabytes
    "random": (),
    "pickle": (),
    "joblib": (),
    "typer": (),
    "click": (),
    "torch": ("isthmus.encoders.torch_tuning",),  # a program of another Python's, which nothing imports
}
"""The only parts of the package that may import a library."""


def modules() -> list[tuple[str, Path]]:
    """Every module with its dotted name; a package's `__init__` has the package's name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("isthmus", *path.relative_to(PACKAGE).with_suffix("").parts)
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@cache
def imports(path: Path, module: str) -> list[tuple[int, str]]:
    """Every imported name with its line, wherever in the file it stands."""
    return list(_imports(path, module))


def _imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            source = (above + (node.module or "")).rstrip(".")
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def part_of(name: str) -> str:
    """The part of the package a dotted name lies in: `isthmus.tables.trec` is in `tables`."""
    return name.split(".")[1]


EVERYTHING = [(module, path) for module, path in modules() if module != "isthmus"]


@pytest.mark.parametrize(("module", "path"), EVERYTHING, ids=[module for module, _ in EVERYTHING])
def test_imports_point_down(module: str, path: Path) -> None:
    here = part_of(module)
    assert here in LEVEL, f"give {here} a place in ORDER"
    for line, name in imports(path, module):
        if not name.startswith("isthmus.") or name == "isthmus.__version__":
            continue
        there = part_of(name)
        assert there in LEVEL, f"{path.name}:{line} imports {name}: name the module, not the contents page"
        below = LEVEL[there] > LEVEL[here] or there == here
        assert below, f"{path.name}:{line}: {here} may not import {there}"


@pytest.mark.parametrize("library", HOMES)
def test_a_library_has_one_home(library: str) -> None:
    strangers = [
        f"{path.name}:{line}"
        for module, path in EVERYTHING
        if not any(module == home or module.startswith(home + ".") for home in HOMES[library])
        for line, name in imports(path, module)
        if name.split(".")[0] == library
    ]
    assert not strangers


def test_the_product_does_not_know_its_reproductions() -> None:
    for module, path in EVERYTHING:
        strangers = [line for line, name in imports(path, module) if name.startswith("isthmus_reproduce")]
        assert not strangers, f"{path.name}:{strangers}"


FACADES = [module for module, path in modules() if path.with_suffix(".pyi").exists()]


@pytest.mark.parametrize("module", FACADES)
def test_every_name_of_a_facade_is_there(module: str) -> None:
    facade = importlib.import_module(module)
    assert facade.__all__
    for name in facade.__all__:
        assert getattr(facade, name) is not None
    assert set(facade.__all__) <= set(dir(facade))
    with pytest.raises(AttributeError, match="nonsense"):
        facade.nonsense  # noqa: B018


@pytest.mark.parametrize("module", FACADES)
def test_a_facade_is_a_table_of_contents(module: str) -> None:
    path = next(path for name, path in modules() if name == module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.If)]
    seen = {alias.name for node in _stub(path).body for alias in getattr(node, "names", ())}
    assert seen == set(importlib.import_module(module).__all__)


def _stub(path: Path) -> ast.Module:
    return ast.parse(path.with_suffix(".pyi").read_text(encoding="utf-8"))


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import sys, isthmus; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"numpy", "pyarrow", "scipy", "sklearn", "flwr", "matplotlib", "rich"} & set(
        done.stdout.split()
    )


SERVING = "service.running service.node_api service.api service.client private.exchange private.secure_sum"
OFFLINE = "evaluation calibration fusion retrieval rankers tables federation.risk federation.settings"


@pytest.mark.parametrize("names", [SERVING, OFFLINE], ids=["serving", "offline"])
def test_the_core_imports_no_extra(names: str) -> None:
    """Nodes, brokers and what works on runs need neither Flower nor matplotlib, installed or not."""
    script = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            module = importlib.import_module(f"isthmus.{name}")
            for public in getattr(module, "__all__", ()):  # a facade loads its names when they are used
                getattr(module, public)
        print(*{name.split(".")[0] for name in sys.modules})
    """
    command = [sys.executable, "-c", script, *names.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {"flwr", "grpc", "matplotlib", "xgboost", "ray"} & set(done.stdout.split())


def test_a_server_starts_without_scientific_libraries() -> None:
    """Importing scikit-learn takes longer than all that a node needs to listen."""
    script = "import sys, isthmus.service.node_api, isthmus.service.api, isthmus.service.running"
    script += "; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"sklearn", "scipy", "httpx", "isthmus.evaluation"} & set(done.stdout.split())


def test_flower_is_imported_in_one_place() -> None:
    """All that carries messages says the same where the extra is missing."""
    eager = {
        path.name
        for _, path in EVERYTHING
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] == "flwr"
        and not node.level
    }
    assert eager == {"flower.py"}
