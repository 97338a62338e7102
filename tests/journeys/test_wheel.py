"""The built wheel, installed alone: what a stranger gets from `pip install`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from core_walk import Core

ROOT = Path(__file__).resolve().parent.parent.parent
UNREACHABLE = ("ConnectionError", "NewConnectionError", "NameResolutionError", "Temporary failure")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the pinned backend of this environment."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        metadata = packed.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        commands = packed.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"isthmus"}
    source = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "isthmus").rglob("*.py")}
    assert source <= set(names)
    assert "isthmus/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "isthmus = isthmus.cli:main" in commands
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_installed_alone_it_works(wheel: Path, tmp_path: Path) -> None:
    """An empty environment, the wheel, its dependencies as pinned, and nothing of this folder."""
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {"ISTHMUS_CACHE": str(tmp_path / "cache")}

    pip = [str(python), "-m", "pip", "install", "-qq", "--no-compile", "-c", str(ROOT / "requirements.txt")]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, cwd=tmp_path, env=clean)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip("no package index can be reached from here")
    assert done.returncode == 0, done.stderr

    core = Core([str(home / "bin" / "isthmus")], [str(python)], tmp_path, clean)
    found = json.loads(core.run("doctor", "--json").stdout)
    assert all(package["ok"] for package in found["packages"])
    assert not any(extra["ok"] for extra in found["extras"]), "nothing but the core was asked for"
    core.adds_under_masks()
    core.is_searched()
