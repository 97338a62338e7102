"""The built wheel, installed alone: what a stranger gets from `pip install`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


def link(wheel: Path, packages: Path) -> None:
    """Unpack a wheel into a folder of packages, beside links to all that it requires, and that requires."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(packages)
    (own,) = packages.glob("*.dist-info")
    queue, seen = [*needed(PathDistribution(own), ())], set()
    while queue:
        wanted = queue.pop()
        if (wanted.name, *sorted(wanted.extras)) in seen:
            continue
        seen.add((wanted.name, *sorted(wanted.extras)))
        there = distribution(wanted.name)
        queue += needed(there, wanted.extras)
        for top in {file.parts[0] for file in there.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(there.locate_file(top))


def needed(package, extras):
    """What a distribution requires, of its extras these."""
    for line in package.requires or ():
        wanted = Requirement(line)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield wanted


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_installed_alone_it_works(wheel: Path, tmp_path: Path, soak_count) -> None:
    """An empty environment, the wheel, what it requires, and nothing else of this folder or this environment.

    At full count pip installs it all, as pinned; else what it requires is linked from where it is.
    """
    home, installs = tmp_path / "env", soak_count(0, 1)
    venv.create(home, with_pip=bool(installs))
    python = home / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {"ISTHMUS_CACHE": str(tmp_path / "cache")}
    if installs:
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "-qq",
            "--no-compile",
            "-c",
            str(ROOT / "requirements.txt"),
        ]
        done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, cwd=tmp_path, env=clean)
        if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
            pytest.skip("no package index can be reached from here")
        assert done.returncode == 0, done.stderr
    else:
        link(wheel, Path(sysconfig.get_path("purelib", vars={"base": str(home)})))
    command = [str(home / "bin" / "isthmus")] if installs else [str(python), "-m", "isthmus"]
    core = Core(command, [str(python)], tmp_path, clean)
    found = json.loads(core.run("doctor", "--json").stdout)
    assert all(package["ok"] for package in found["packages"])
    assert not any(extra["ok"] for extra in found["extras"]), "nothing but the core was asked for"
    core.adds_under_masks()
    core.is_searched()
