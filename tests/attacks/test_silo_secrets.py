"""What a silo's names, files and database connections tell: nothing to whom they are not meant for."""

from __future__ import annotations

import stat
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from isthmus.errors import ConfigError, DataError, ServiceError
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.running import warn_of_open_files
from isthmus.service.settings import (
    NodeSettings,
    Policy,
    SharedStatistics,
    Source,
    literal_secrets,
    read_broker,
)
from isthmus.service.sources import read

TELLING = "patients/ada-lovelace-hiv-2024.txt"


@pytest.fixture
def papers(tmp_path):
    path = tmp_path / "papers" / TELLING
    path.parent.mkdir(parents=True)
    path.write_text("tide tables")
    (tmp_path / "papers" / "b.txt").write_text("tide power")
    return tmp_path / "papers"


def answers(papers, folder, policy):
    """What somebody on loopback with this policy is told, twice."""
    settings = NodeSettings(
        silo="north",
        folder=folder,
        sources=(Source("folder", papers),),
        peers={"anonymous": policy},
        statistics=SharedStatistics(form="none"),
    )
    with Node(settings) as node:
        node._read.wait(60)
        node._await_indexed()
        with TestClient(node_app(node), base_url="http://127.0.0.1/v1") as client:
            yield from (client.post("/search", json={"query": "tide"}).json()["hits"] for _ in range(2))
            hit = client.post("/search", json={"query": "tide"}).json()["hits"][0]
            said = {"query": "tide", "silo": "north", "token": hit["token"], "relevant": True}
            assert client.post("/feedback", json=said).status_code == 204
            assert len(node.store.judgements()) == 1


def test_a_file_name_is_not_told_to_whom_no_snippet_is(papers, tmp_path):
    first, again = answers(papers, tmp_path / "north", Policy(search=True, feedback=True))
    assert len(first) == 2
    assert all(telling not in str(first) for telling in ("patients", "ada", "hiv", "2024", "txt"))
    names = [hit["document"] for hit in first]
    assert len(set(names)) == 2
    assert names == [hit["document"] for hit in again], "a name is the same every time"
    elsewhere, _ = answers(papers, tmp_path / "south", Policy(search=True, feedback=True))
    assert not {hit["document"] for hit in elsewhere} & set(names), (
        "and cannot be computed without the silo's key"
    )
    seen, _ = answers(papers, tmp_path / "north", Policy(search=True, snippets=True, feedback=True))
    assert {hit["document"] for hit in seen} == {TELLING, "b.txt"}


def test_what_a_node_writes_is_its_owners_alone(papers, tmp_path):
    folder = tmp_path / "north"
    folder.mkdir(mode=0o755)
    config = tmp_path / "silo.toml"
    config.write_text('silo = "north"\nfolder = "north"\nsources = [{kind = "folder", path = "papers"}]\n')

    def index() -> None:
        command = [sys.executable, "-m", "isthmus", "node", "--config", str(config), "--index-only"]
        subprocess.run(command, check=True, capture_output=True, umask=0o022)

    index()
    (folder / "documents.db").chmod(0o644)  # as an older release left them
    (folder / "index").chmod(0o755)
    index()
    written = list(folder.rglob("*"))
    assert {"documents.db", "ledger.db", "manifest.json", "lock"} <= {path.name for path in written}
    open_to_others = {
        path.name: oct(path.stat().st_mode) for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077
    }
    assert not open_to_others


@pytest.mark.parametrize(
    ("key", "mode", "warned"),
    [("", 0o644, False), ("hush", 0o600, False), ("env:KEY", 0o644, False), ("hush", 0o644, True)],
)
def test_a_secret_in_a_file_that_others_read_is_warned_of(tmp_path, caplog, key, mode, warned):
    config = tmp_path / "broker.toml"
    config.write_text(f'node_key = "{key}"\n[silos.north]\nurl = "http://127.0.0.1:1"\n')
    config.chmod(mode)
    warn_of_open_files(config, read_broker(config))
    assert ("node_key" in caplog.text) == warned
    assert "hush" not in caplog.text


def test_an_address_with_a_password_is_a_secret():
    sources = [Source("sql", url=url, query="SELECT 1") for url in SECRET_URLS]
    assert [literal_secrets(each) for each in sources] == [["url"], ["url"], [], []]


def test_a_folder_that_others_open_is_warned_of(tmp_path, caplog):
    (tmp_path / "broker").mkdir(mode=0o700)
    config = tmp_path / "broker.toml"
    config.write_text('[silos.north]\nurl = "http://127.0.0.1:1"\n')
    warn_of_open_files(config, read_broker(config))
    assert not caplog.text
    (tmp_path / "broker").chmod(0o755)
    warn_of_open_files(config, read_broker(config))
    assert "chmod 700" in caplog.text


SECRET_URLS = (
    "postgresql://reader:hush@127.0.0.1/papers",
    "postgresql:///papers?password=hush",
    "postgresql://127.0.0.1/papers",
    "env:DB",
)
BEYOND = ["db.example", "10.0.0.7", "::ffff:10.0.0.7", "127.0.0.1,db.example"]
LOCAL = ["127.0.0.1", "localhost", "::1", "/run/postgresql", "127.0.0.1,/run/postgresql", ""]


@pytest.fixture
def connections(monkeypatch):
    """What libpq would be told, instead of a connection."""
    psycopg = pytest.importorskip("psycopg")

    for name in ("PGHOST", "PGHOSTADDR", "PGSSLMODE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    asked = []

    def connect(conninfo, **options):
        asked.append(psycopg.conninfo.conninfo_to_dict(conninfo))
        raise psycopg.OperationalError("not in this test")

    monkeypatch.setattr(psycopg, "connect", connect)
    return asked


def attempts(url):
    """A store there, and a source."""
    from isthmus.service.postgres import PostgresStore

    source = Source("sql", url=url, query="SELECT 1, 2")
    return (lambda: PostgresStore(url)), (lambda: list(read(source, pytest.fail)))


@pytest.mark.parametrize("host", BEYOND)
def test_a_database_beyond_loopback_is_reached_by_verified_tls(host, connections):
    for attempt in attempts(f"host='{host}' dbname=north password=secret"):
        with pytest.raises((ServiceError, DataError)):
            attempt()
    assert [each["sslmode"] for each in connections] == ["verify-full"] * 2


@pytest.mark.parametrize("host", BEYOND)
@pytest.mark.parametrize("mode", ["disable", "allow", "prefer"])
def test_a_database_beyond_loopback_is_never_reached_in_the_clear(host, mode, connections, monkeypatch):
    for attempt in attempts(f"host='{host}' password=secret sslmode={mode}"):
        with pytest.raises(ConfigError, match=rf"sslmode={mode}.*verify-full") as raised:
            attempt()
        assert "secret" not in str(raised.value)
    monkeypatch.setenv("PGSSLMODE", mode)
    for attempt in attempts(f"host='{host}' password=secret"):
        with pytest.raises(ConfigError, match=rf"sslmode={mode}"):
            attempt()
    assert not connections


def test_where_a_database_is_may_come_from_the_environment(connections, monkeypatch):
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.setenv("PGHOSTADDR", "10.0.0.7")
    for url in ("dbname=north", "service=north", "host=127.0.0.1 hostaddr=10.0.0.7"):
        for attempt in attempts(url):
            with pytest.raises((ServiceError, DataError)):
                attempt()
    assert [each["sslmode"] for each in connections] == ["verify-full"] * 6


@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
def test_what_the_operator_wrote_of_tls_stays(mode, connections):
    for attempt in attempts(f"postgresql://north:secret@db.example/north?sslmode={mode}"):
        with pytest.raises((ServiceError, DataError)):
            attempt()
    assert [each["sslmode"] for each in connections] == [mode] * 2


@pytest.mark.parametrize("host", LOCAL)
def test_a_database_on_this_machine_needs_no_tls(host, connections):
    for attempt in attempts(f"host='{host}' dbname=north"):
        with pytest.raises((ServiceError, DataError)):
            attempt()
    assert not any("sslmode" in each for each in connections)


def test_an_address_that_is_none_does_not_show_its_password(connections):
    for attempt in attempts("postgresql://north:secret@db.example:nonsense=/north"):
        with pytest.raises((ConfigError, ServiceError, DataError)) as raised:
            attempt()
        assert "secret" not in str(raised.value)
