"""A certified OpenID Connect provider (npm: oidc-provider) for tests, pinned by hash, on loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_servers.packages import HOME, NotToBeHad, fetch, locked

HERE = Path(__file__).parent
FOLDER = HOME / "oidc-provider-9.13.3"


def installed() -> Path:
    """The folder with its packages, fetched if they are not here yet; raises NotToBeHad."""
    with locked("oidc-provider"):
        if not FOLDER.exists():
            if shutil.which("npm") is None or shutil.which("node") is None:
                raise NotToBeHad("no npm; .ci/run installs it")
            with tempfile.TemporaryDirectory(dir=HOME) as folder:
                whole = Path(folder) / FOLDER.name
                whole.mkdir()
                for name in ("package.json", "package-lock.json"):
                    shutil.copy(HERE / name, whole)
                fetch(["npm", "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"], whole)
                whole.rename(FOLDER)
    return FOLDER


@contextmanager
def running(
    folder: Path, people: dict[str, dict[str, object]], *, redirect: str, secret: str
) -> Iterator[str]:
    """The issuer's address; or a skip that says why there is none. It reads `folder/people.json`."""
    try:
        packages = installed()
    except NotToBeHad as reason:
        pytest.skip(f"no oidc-provider: {reason}")
    (folder / "people.json").write_text(json.dumps(people))
    shutil.copy(HERE / "provider.mjs", folder)
    (folder / "node_modules").symlink_to(packages / "node_modules")
    with (folder / "provider.log").open("wb") as log:
        process = subprocess.Popen(
            ["node", "provider.mjs", "people.json", redirect, secret],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(b"http"):
                break
        else:
            problem = (folder / "provider.log").read_text()
            if "SyntaxError" in problem or "ERR_" in problem:
                pytest.skip(f"this node cannot run oidc-provider: {problem[-300:]}")
            pytest.fail(problem[-2000:])
        yield line.decode().strip()
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
