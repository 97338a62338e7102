"""Servers of search engines that tests start on loopback, fill with documents, and end."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from engine_servers.packages import program
from loopback_ports import free_base

KEY = "secret-of-the-tests-0123456789"
PATIENCE = 60.0
"""Seconds to start, and for documents to be found."""


@dataclass
class EngineServer:
    """One that runs: how tests fill it, and what `isthmus attach` is told."""

    port: int
    name = ""
    level = "scores"
    noun = ""
    key = KEY

    @property
    def url(self) -> str:
        """The address that is attached."""
        return self.at(self.port)

    def at(self, port: int) -> str:
        """The same by another port."""
        return f"{self.name}://127.0.0.1:{port}"

    @property
    def target(self) -> int | Path:
        """Where it listens."""
        return self.port

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Send a message."""
        url = f"http://127.0.0.1:{self.port}{path}"
        reply = httpx.request(method, url, json=body, headers=self.headers(), timeout=30, **options)
        reply.raise_for_status()
        return reply.json() if "json" in reply.headers.get("content-type", "") else reply.text

    def headers(self) -> dict[str, str]:
        return {}

    def fill(self, source: str, documents: Sequence[dict[str, Any]]) -> None:
        """Bring documents {id, title, body, kind, at, acl} into a new collection; found when this returns.
        `at` is a date in seconds and `acl` a list of principals; both may be lacking."""
        raise NotImplementedError

    def id(self, name: str) -> str:
        """What the engine calls the document that tests call `name`."""
        return name

    def filter(self, kind: str) -> str:
        """Only documents of a kind, in the engine's own language."""
        raise NotImplementedError


class QdrantServer(EngineServer):
    name, noun = "qdrant", "Qdrant"

    def headers(self) -> dict[str, str]:
        return {"api-key": KEY}

    def id(self, name: str) -> str:
        return name.lstrip("d")

    def fill(self, source: str, documents: Sequence[dict[str, Any]], vectors: Any = None) -> None:
        width = 2 if vectors is None else len(vectors[0])
        self.ask("PUT", f"/collections/{source}", {"vectors": {"size": width, "distance": "Cosine"}})
        for field in ("title", "body"):
            schema = {"type": "text", "tokenizer": "word", "lowercase": True}
            self.ask(
                "PUT", f"/collections/{source}/index?wait=true", {"field_name": field, "field_schema": schema}
            )
        schema = {"field_name": "kind", "field_schema": "keyword"}
        self.ask("PUT", f"/collections/{source}/index?wait=true", schema)
        points = [
            {
                "id": int(self.id(each["id"])),
                "vector": [1.0, at] if vectors is None else [float(value) for value in vectors[at]],
                "payload": {name: each[name] for name in ("title", "body", "kind", "acl") if name in each}
                | _dated(each),
            }
            for at, each in enumerate(documents)
        ]
        self.ask("PUT", f"/collections/{source}/points?wait=true", {"points": points})

    def filter(self, kind: str) -> str:
        return json.dumps({"key": "kind", "match": {"value": kind}})


class TypesenseServer(EngineServer):
    name, noun = "typesense", "Typesense"

    def headers(self) -> dict[str, str]:
        return {"x-typesense-api-key": KEY}

    def fill(self, source: str, documents: Sequence[dict[str, Any]]) -> None:
        fields = [{"name": name, "type": "string"} for name in ("title", "body")]
        fields.append({"name": "kind", "type": "string", "facet": True})
        fields.append({"name": "at", "type": "int64", "optional": True})
        fields.append({"name": "acl", "type": "string[]", "optional": True})
        self.ask("POST", "/collections", {"name": source, "fields": fields})
        lines = "\n".join(map(json.dumps, documents))
        reply = httpx.post(
            f"http://127.0.0.1:{self.port}/collections/{source}/documents/import",
            content=lines.encode(),
            headers=self.headers(),
            timeout=60,
        )
        assert reply.text.count('"success":true') == len(documents), reply.text[:500]

    def filter(self, kind: str) -> str:
        return f"kind:={kind}"


class MeilisearchServer(EngineServer):
    name, noun = "meilisearch", "Meilisearch"

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {KEY}"}

    def fill(self, source: str, documents: Sequence[dict[str, Any]]) -> None:
        self.ask("POST", "/indexes", {"uid": source, "primaryKey": "id"})
        self.ask("PUT", f"/indexes/{source}/settings/filterable-attributes", ["kind", "at", "acl"])
        task = self.ask("POST", f"/indexes/{source}/documents", list(documents))["taskUid"]
        until = time.monotonic() + PATIENCE
        while (state := self.ask("GET", f"/tasks/{task}"))["status"] in ("enqueued", "processing"):
            assert time.monotonic() < until, state
            time.sleep(0.05)
        assert state["status"] == "succeeded", state

    def filter(self, kind: str) -> str:
        return f"kind = {kind}"


@dataclass
class PostgresServer(EngineServer):
    """A database of a server on a socket."""

    port: int
    dsn: str = ""
    name, noun, level, key = "postgresql", "PostgreSQL", "full", ""

    @property
    def url(self) -> str:
        return self.dsn

    def _parts(self) -> dict[str, str]:
        return dict(part.split("=") for part in self.dsn.split())

    def at(self, port: int) -> str:
        return f"postgresql://postgres@127.0.0.1:{port}/{self._parts()['dbname']}"

    @property
    def target(self) -> Path:
        return Path(self._parts()["host"]) / ".s.PGSQL.5432"

    def fill(self, source: str, documents: Sequence[dict[str, Any]]) -> None:
        import psycopg

        vector = "to_tsvector('english', coalesce(title, '') || ' ' || coalesce(body, ''))"
        with psycopg.connect(self.dsn, autocommit=True) as db, db.cursor() as cursor:
            db.execute(
                f"""CREATE TABLE {source} (id text PRIMARY KEY, title text, body text, kind text,
                at timestamptz, acl text[], tsv tsvector GENERATED ALWAYS AS ({vector}) STORED)"""
            )
            db.execute(f"CREATE INDEX ON {source} USING gin (tsv)")
            rows = [
                tuple(each.get(name) for name in ("id", "title", "body", "kind", "at", "acl"))
                for each in documents
            ]
            cursor.executemany(f"INSERT INTO {source} VALUES (%s, %s, %s, %s, to_timestamp(%s), %s)", rows)
            db.execute("SELECT pg_stat_force_next_flush()")

    def filter(self, kind: str) -> str:
        return f"kind = '{kind}'"


def _dated(document: dict[str, Any]) -> dict[str, Any]:
    """The date of a document as a text, if it has one."""
    if "at" not in document:
        return {}
    return {"at": datetime.fromtimestamp(document["at"], UTC).isoformat()}


def _command(name: str, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """How a server is started: its arguments and its environment."""
    own = str(program(name))
    if name == "qdrant":
        settings = {
            "SERVICE__HOST": "127.0.0.1",
            "SERVICE__HTTP_PORT": str(port),
            "SERVICE__GRPC_PORT": str(free_base()),
            "SERVICE__API_KEY": KEY,
            "STORAGE__STORAGE_PATH": str(folder / "storage"),
            "STORAGE__SNAPSHOTS_PATH": str(folder / "snapshots"),
            "TELEMETRY_DISABLED": "true",
        }
        return [own], {f"QDRANT__{key}": value for key, value in settings.items()}
    if name == "typesense":
        where = [f"--data-dir={folder}", f"--api-key={KEY}", "--api-address=127.0.0.1", f"--api-port={port}"]
        peers = ["--peering-address=127.0.0.1", f"--peering-port={free_base()}"]
        return [own, *where, *peers], {}
    where = [
        "--http-addr",
        f"127.0.0.1:{port}",
        "--db-path",
        str(folder / "db"),
        "--dump-dir",
        str(folder / "dumps"),
    ]
    return [own, *where, "--master-key", KEY, "--no-analytics", "--env", "production"], {}


SERVERS = {"qdrant": QdrantServer, "typesense": TypesenseServer, "meilisearch": MeilisearchServer}
HEALTH = {"qdrant": "/readyz", "typesense": "/health", "meilisearch": "/health"}


@contextmanager
def running(name: str, folder: Path) -> Iterator[EngineServer]:
    """A server on a free port of loopback, until this ends; raises NotToBeHad."""
    port = free_base()
    command, settings = _command(name, port, folder)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    try:
        until = time.monotonic() + PATIENCE
        while not _is_up(f"http://127.0.0.1:{port}{HEALTH[name]}"):
            words = (folder / "log").read_text(encoding="utf-8", errors="replace")[-2_000:]
            is_starting = process.poll() is None and time.monotonic() < until
            assert is_starting, f"{name} did not start: {words}"
            time.sleep(0.05)
        yield SERVERS[name](port)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
