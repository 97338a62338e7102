"""`isthmus node` as a process: killed while it indexes, started again, asked, and stopped politely."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from isthmus.cli import main
from isthmus.service.limits import message_header
from loopback_ports import free_base

WORDS = ["tide", "wave", "turbine", "harbour", "lamp", "bridge", "river", "iron", "apple", "pear"]


@pytest.fixture
def config(tmp_path):
    port = free_base()
    with open(tmp_path / "corpus.jsonl", "w") as out:
        for at in range(9_000):
            text = " ".join(WORDS[(at * step) % 10] for step in (1, 3, 7)) + f" number{at}"
            out.write(json.dumps({"_id": f"d{at}", "title": "", "text": text}) + "\n")
    (tmp_path / "silo.toml").write_text(
        f'silo = "north"\nfolder = "north"\nport = {port}\n'
        'sources = [{kind = "beir", path = "corpus.jsonl"}]\n'
        "[encoder]\ndimensions = 8\n"
        "[peers.anonymous]\nsearch = true\nsnippets = true\noperate = true\nfeedback = true\n"
    )
    return tmp_path / "silo.toml", f"http://127.0.0.1:{port}"


def start(path, log):
    command = [sys.executable, "-m", "isthmus", "node", "--config", str(path)]
    with open(log, "ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})


def ready(url):
    try:
        return httpx.get(f"{url}/v1/ready", timeout=30).json()
    except httpx.TransportError:
        return None


def wait_until(happened, process, seconds=400):
    until = time.monotonic() + seconds
    while not (found := happened()):
        assert process.poll() is None, "the node has ended"
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)
    return found


def search(url, query):
    found = httpx.post(f"{url}/v1/search", json={"query": query}, headers=message_header(), timeout=60)
    assert found.status_code == 200
    return [hit["document"] for hit in found.json()["hits"]]


def test_killed_while_indexing_it_goes_on_where_it_was(config, tmp_path, soak_count):
    path, url = config
    index = tmp_path / "north" / "index"
    for kill in range(soak_count(2, 20)):
        process = start(path, tmp_path / "log")
        try:
            # once while sources are read, then while the index is written
            happened = (lambda: (tmp_path / "north" / "documents.db").exists()) if not kill else index.exists
            wait_until(happened, process)
            time.sleep(0.15 * kill)
        finally:
            process.kill()
            process.wait()
    process = start(path, tmp_path / "log")
    try:
        told = wait_until(lambda: (now := ready(url)) and now["indexed"] == 9_000 and now, process)
        assert told.pop("encoder").startswith("lsa-")
        assert told.pop("encoder_name") == "lsa"
        said = {
            "ready": True,
            "detail": "",
            "documents": 9_000,
            "indexed": 9_000,
            "statistics": "",
            "unread": 0,
        }
        assert {name: told[name] for name in said} == said
        for at in (0, 4_321, 8_999):
            assert search(url, f"number{at}") == [f"d{at}"]
        put = httpx.put(
            f"{url}/v1/documents",
            json={"documents": [{"id": "new", "body": "zanzibar"}]},
            headers=message_header(),
            timeout=30,
        )
        assert put.json()["added"] == 1
        process.kill()
        process.wait()
        began = time.monotonic()
        process = start(path, tmp_path / "log")
        wait_until(lambda: ready(url), process)
        assert search(url, "zanzibar") == ["new"]
        assert time.monotonic() - began < 120
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert b'"stopped"' in (tmp_path / "log").read_bytes()
    finally:
        process.kill()
        process.wait()


def test_index_only_and_what_goes_wrong_is_one_line(config, tmp_path, capsys):
    path, _ = config
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "corpus.jsonl").write_text("".join(lines[:300]))
    status = main(["node", "--config", str(path), "--index-only", "--json", "--set", 'encoder.kind="none"'])
    assert status == 0
    counted = {"documents": 300, "added": 300, "changed": 0, "removed": 0, "errors": 0}
    summary = json.loads(capsys.readouterr().out)
    (source,) = summary.pop("sources")
    assert summary == counted
    assert (source["documents"], source["failed"], source["errors"]) == (300, "", [])
    for options, told in (
        (("--set", "host=0.0.0.0"), "only loopback may go without"),
        (("--set", "ports=1"), "did you mean 'port'?"),
        (("--set", 'models.fuser="nowhere"'), "cannot be read"),
    ):
        assert main(["node", "--config", str(path), *options]) == 1
        failed = capsys.readouterr().err
        assert told in failed
        assert failed.count("\n") == 1


def test_one_process_a_folder_and_sources_read_again_on_a_signal(config, tmp_path, capsys):
    path, url = config
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/a.md").write_text("# Lamp\n\nA lamp in the harbour.")
    told = path.read_text().replace(
        '{kind = "beir", path = "corpus.jsonl"}', '{kind = "folder", path = "papers"}'
    )
    path.write_text(told)
    process = start(path, tmp_path / "log")
    try:
        wait_until(lambda: (ready(url) or {}).get("ready"), process)
        export = ("judgements", "export", "--rows", "-o", str(tmp_path / "out"))
        for command in (("node", "--index-only"), ("node", "--set", "port=0"), export):
            assert main([*command, "--config", str(path)]) == 1
            assert "in use by another isthmus node" in capsys.readouterr().err
        (tmp_path / "papers/b.md").write_text("# Zephyr\n\nA gentle breeze.")
        process.send_signal(signal.SIGUSR1)

        def found():
            asked = httpx.post(f"{url}/v1/search", json={"query": "zephyr"}, headers=message_header())
            return asked.json()["hits"]

        assert wait_until(found, process)[0]["document"] == "b.md"
    finally:
        process.kill()
        process.wait()
    assert main(["node", "--config", str(path), "--index-only"]) == 0
    assert (tmp_path / "north").stat().st_mode & 0o077 == 0  # documents are in it
    capsys.readouterr()
    assert main(["ledger", "show", str(tmp_path / "north"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"]
