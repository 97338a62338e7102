"""Fixtures that every test may use."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pwd import getpwnam
from uuid import uuid4

import pytest
from hypothesis import settings

SOAKING = os.environ.get("ISTHMUS_SOAK") == "1"

# Workers of xdist name the size of a terminal; without one, commands do not fold what they say.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# A busy machine is not a failure. Examples are the same in every run, and new ones in the long trials.
settings.register_profile(
    "isthmus", deadline=None, derandomize=not SOAKING, max_examples=500 if SOAKING else 50
)
settings.load_profile("isthmus")


# A file is the work of one worker; the longest begin first, so that all workers end together.
LONGEST = (
    "journeys/test_demo.py",
    "journeys/test_demo_story.py",
    "journeys/test_search_faults.py",
    "journeys/test_search_service.py",
    "journeys/test_recipes.py",
    "journeys/test_deployment.py",
    "journeys/test_learning.py",
    "tests/test_trees.py",
    "tests/test_docs.py",
    "attacks/test_training_port.py",
    "tests/test_training.py",
    "tests/test_fusion.py",
    "tests/test_csfltr.py",
    "tests/test_secure_training.py",
    "tests/test_calibration.py",
    "attacks/test_flood.py",
    "journeys/test_node.py",
    "journeys/test_train.py",
    "tests/test_fedrisk.py",
    "journeys/test_wheel.py",
    "journeys/test_core.py",
)


# Tests beyond the core: with a browser, with servers of others, with Flower over a network, with the whole
# demonstration, or trials of a federation under load and faults.
BEYOND = (
    "attacks/test_flood.py",
    "attacks/test_training_port.py",
    "journeys/test_attach.py",
    "journeys/test_demo.py",
    "journeys/test_demo_story.py",
    "journeys/test_deployment.py",
    "journeys/test_learning.py",
    "journeys/test_recipes.py",
    "journeys/test_search_faults.py",
    "tests/test_attach_engines.py",
    "tests/test_integrations.py",
    "tests/test_mutants.py",
)
collect_ignore = ["integrations"]  # for another environment: tests/test_integrations.py runs them
OTHERS = {"browser", "postgres_url", "_postgres_server"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `make core` leaves out, and what may be run a second time: journeys wait for processes of
    others and draw fresh keys. The summary names those that were."""
    if item.path.parent.name == "journeys":
        item.add_marker(pytest.mark.flaky(reruns=1))
    if item.path.as_posix().endswith(BEYOND) or OTHERS.intersection(item.fixturenames):  # type: ignore[attr-defined]
        item.add_marker("beyond")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first and leave the others as they are."""

    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((at for at, name in enumerate(LONGEST) if path.endswith(f"/{name}")), len(LONGEST))

    items.sort(key=place)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The real collections, or a skip that says how to provide them."""
    named = os.environ.get("ISTHMUS_DATA")
    if not named:
        pytest.skip("ISTHMUS_DATA is not set; it names the folder of the real collections")
    path = Path(named)
    if not path.is_dir():
        pytest.skip(f"ISTHMUS_DATA names {path}, which is not a folder")
    return path


@pytest.fixture(scope="session")
def integrations_python() -> str:
    """The Python of the environment that `make test` makes from requirements-integrations.txt, or a skip."""
    python = os.environ.get("ISTHMUS_INTEGRATIONS_PYTHON") or f"{sys.prefix}/integrations/bin/python"
    if not Path(python).exists():
        pytest.skip("there is no environment with LangChain, LlamaIndex, Haystack, PyTerrier and MLflow")
    return python


@pytest.fixture(scope="session")
def soak_count() -> Callable[[int, int], int]:
    """`soak_count(small, full)`: how often a long trial repeats; `full` only with ISTHMUS_SOAK=1."""
    return lambda small, full: full if SOAKING else small


@pytest.fixture(autouse=True)
def _service_logs():
    """A command that a test runs in this process logs to that test's stderr, and no further."""
    loggers = [logging.getLogger(name) for name in ("", "isthmus.service", "isthmus.access", "uvicorn.error")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    hooks = sys.excepthook, threading.excepthook
    yield
    sys.excepthook, threading.excepthook = hooks
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Nothing a test caches reaches the user's cache folder, in this process or in its children.

    All workers have one: what one has collected, read or encoded the others need not.
    """
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISTHMUS_CACHE", str(cache))
        yield


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium; or a skip that says how to have it."""
    from playwright import sync_api

    if shutil.which("chromium") is None:
        pytest.skip("no chromium; .ci/run installs it")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=quiet)
        yield started
        started.close()


POSTGRES = Path("/usr/lib/postgresql")


@pytest.fixture(scope="session")
def _postgres_server(tmp_path_factory: pytest.TempPathFactory):
    """A PostgreSQL server of this test session's own, on a socket; or a skip that says how to have one."""
    programs = sorted(POSTGRES.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not programs or find_spec("psycopg") is None:
        told = "no PostgreSQL server under /usr/lib/postgresql or no psycopg; .ci/run installs the one"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    folder = Path(tempfile.mkdtemp(prefix="isthmus-pg-"))  # short: a socket's path has 107 characters
    owner = {}
    if os.geteuid() == 0:  # which PostgreSQL refuses to run as
        account = getpwnam("postgres")
        os.chown(folder, account.pw_uid, account.pw_gid)
        owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    run = partial(subprocess.run, check=True, capture_output=True, cwd=folder, **owner)
    home, data = programs[-1].parent, folder / "data"
    run([home / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "-N"])
    options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off -c max_connections=50"
    run(
        [home / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start"],
        capture_output=False,
    )
    try:
        yield folder
    finally:
        run([home / "pg_ctl", "-D", data, "-m", "immediate", "stop"])
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(_postgres_server: Path):
    """The address of an empty database on a real server."""
    import psycopg

    name = f"t{uuid4().hex}"
    with psycopg.connect(f"host={_postgres_server} user=postgres dbname=postgres", autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}")
    yield f"host={_postgres_server} user=postgres dbname={name}"
    with psycopg.connect(f"host={_postgres_server} user=postgres dbname=postgres", autocommit=True) as db:
        db.execute(f"DROP DATABASE {name} WITH (FORCE)")
