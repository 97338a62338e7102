"""Fixtures of the reproductions' tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The real collections, or a skip that says how to provide them."""
    named = os.environ.get("ISTHMUS_DATA")
    if not named or not Path(named).is_dir():
        pytest.skip("ISTHMUS_DATA does not name the folder of the real collections")
    return Path(named)


@pytest.fixture(scope="session")
def soak_count() -> Callable[[int, int], int]:
    """`soak_count(small, full)`: how often a long trial repeats; `full` only with ISTHMUS_SOAK=1."""
    soaking = os.environ.get("ISTHMUS_SOAK") == "1"
    return lambda small, full: full if soaking else small


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing a test caches reaches the user's cache folder; all workers have one cache."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISTHMUS_CACHE", str(cache))
        yield
