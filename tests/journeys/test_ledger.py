"""The ledger from the outside: askers that are killed at any moment, and `isthmus ledger`."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from command_line import isthmus
from isthmus.private.cost import Cost, Covered
from isthmus.private.ledger import Budget, Ledger, fingerprint

ASKERS, BUDGET = 4, 2.0

ASKER = """
import json, os, sys, time
from isthmus.errors import BudgetExhausted
from isthmus.private.cost import Cost, Covered
from isthmus.private.ledger import Ledger, fingerprint

ledger, log, peer = Ledger(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), sys.argv[3]
number = 0
while True:
    number += 1
    dice = os.urandom(16)
    pool = int(2 * time.time())  # the documents in demand change, so that some always have budget left
    documents = sorted({f"{pool}-{pick % 24}" for pick in dice[: 1 + dice[15] % 10]})
    contents = [fingerprint(f"{name} {pick % 2}") for pick, name in zip(dice, documents)]
    fields = (("body",), ("title",), ("title", "body"))[dice[14] % 3]
    epsilon = 0.05 * (1 + dice[13] % 5)
    shared = dice[12] % 3 == 0
    name = f"noise {dice[11] % 4}" if shared else f"{peer} {os.getpid()} {number}"
    cost = Cost("one_shot" if shared else "scalar", fields, epsilon, 2.0, 1.0, name, shared=shared)
    try:
        covered = ledger.versions(documents, contents)
        ledger.charge(cost, covered, peer)
    except BudgetExhausted:
        continue
    told = [peer, name, shared, epsilon, fields, covered.documents, covered.versions]
    os.write(log, (json.dumps(told) + "\\n").encode())  # the answer has left
"""


class Truth:
    """What the askers' logs say has left, read as they grow."""

    def __init__(self, logs: list[Path]) -> None:
        self.logs = dict.fromkeys(logs, 0)
        self.seen: set[tuple[object, ...]] = set()
        self.spent: dict[tuple[str, str], float] = {}
        self.releases: set[str] = set()

    def read(self) -> None:
        for log, offset in self.logs.items():
            text = log.read_bytes()[offset:]
            whole = text[: text.rfind(b"\n") + 1]  # a line that was cut short did not leave
            self.logs[log] = offset + len(whole)
            for line in whole.splitlines():
                self._add(*json.loads(line))

    def _add(self, peer, name, shared, epsilon, fields, documents, versions) -> None:
        self.releases.add(name)
        for document, version in zip(documents, versions, strict=True):
            key = (version, name, epsilon, tuple(fields), None if shared else peer)
            if key in self.seen:
                continue
            self.seen.add(key)
            for field in fields:
                self.spent[document, field] = self.spent.get((document, field), 0.0) + epsilon


@pytest.mark.soak
def test_killed_at_any_moment_under_four_askers(tmp_path: Path, soak_count) -> None:
    """Recorded is never below what left and never above the budget, whoever is killed when."""
    path, logs = tmp_path / "silo.ledger", [tmp_path / f"left-{number}" for number in range(ASKERS)]
    for log in logs:
        log.touch()
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    truth, kills = Truth(logs), 0
    with Ledger(path, Budget(epsilon=BUDGET)) as ledger:
        askers = [ask(path, log) for log in logs]
        try:
            for trial in range(soak_count(6, 200)):
                victims = range(ASKERS) if trial % 5 == 4 else [int(rng.integers(ASKERS))]
                if trial % 7 != 6:  # else in the midst of opening the ledger
                    wait_for_answers([logs[victim] for victim in victims])
                time.sleep(float(rng.uniform(0.0, 0.05)))
                kill([askers[victim] for victim in victims])
                kills += len(victims)
                compare(ledger, truth)
                for victim in victims:
                    askers[victim] = ask(path, logs[victim])
            wait_for_answers(logs)
        finally:
            kill(askers)
            kills += ASKERS
        compare(ledger, truth)
        ledger.audit()
        recorded = {row["release"] for row in ledger.departures() if row["mechanism"] == "scalar"}
        assert len(recorded - truth.releases) <= kills, "a killed asker has at most one answer paid in vain"
        print(f"{kills} kills, {len(truth.releases)} releases, {ledger.summary()['charges']} charges")


def ask(path: Path, log: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", ASKER, str(path), str(log), log.name])


def kill(askers: list[subprocess.Popen[bytes]]) -> None:
    for asker in askers:
        assert asker.poll() is None, "an asker ended by itself"
        asker.send_signal(signal.SIGKILL)
    for asker in askers:
        asker.wait()


def wait_for_answers(logs: list[Path]) -> None:
    """Until these askers are at work, however slow the machine is."""
    before, until = [log.stat().st_size for log in logs], time.monotonic() + 240
    while any(log.stat().st_size == size for log, size in zip(logs, before, strict=True)):
        assert time.monotonic() < until, "an asker does not get an answer"
        time.sleep(0.002)


def compare(ledger: Ledger, truth: Truth) -> None:
    truth.read()  # first what left, then what is recorded: others go on charging between
    recorded = {
        (account.document, field): spent
        for account in ledger.accounts()
        for field, spent in account.fields.items()
    }
    for key, spent in truth.spent.items():
        assert recorded.get(key, 0.0) >= spent - 1e-9
    assert max(recorded.values(), default=0.0) <= BUDGET + 1e-6


@pytest.fixture
def silo(tmp_path: Path) -> Path:
    """A ledger with one of everything."""
    path = tmp_path / "silo.ledger"
    with Ledger(path, Budget()) as ledger:
        covered = ledger.versions(["north/1", "north/2"], [fingerprint("a"), fingerprint("b")])
        counts = Cost("one_shot", ("body",), 8.0, 2.0, 0.25, "body counts")
        for peer in ("south", "west"):
            ledger.charge(counts, covered, peer, kind="sketch")
        sums = Cost("noise_shares", ("title", "body"), 0.5, 2.0, 4.0, "document frequencies, refresh 1")
        ledger.charge(sums, Covered(["north/2"], covered.versions[1:]), "south", kind="sums")
        ledger.record("snippets", "broker", items=10)
    return path


def test_show_tells_what_left_and_what_it_means(silo: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = isthmus("ledger", "show", silo, "--audit")
    assert shown.stderr == "every sum is that of its charges\n"
    lines = shown.stdout.splitlines()
    assert lines[0] == "what left: 2 documents, 2 versions, 5 charges"
    assert [line.split()[:3] for line in lines[4:7]] == [
        ["sketch", "south", "one"],
        ["sketch", "west", "one"],
        ["sums", "south", "noise"],
    ]
    assert lines[7].split()[:5] == ["snippets", "broker", "no", "DP", "guarantee"]
    assert "each document's budget is ε = 9; the one that spent most has 0.5 left" in shown.stdout
    told = " ".join(shown.stdout.split())
    assert "at most 98.6 % certainty on average over draws of the noise, and 99.98 % after a single" in told


def test_show_as_json(silo: Path) -> None:
    told = json.loads(isthmus("ledger", "show", silo, "--json").stdout)
    assert (told["documents"], told["charges"], told["most_spent"], told["least_left"]) == (2, 5, 8.5, 0.5)
    assert told["budget"]["epsilon"] == 9
    assert [row["guarantee"] for row in told["departures"]] == [
        "ε = 8",
        "ε = 8",
        "ε = 0.5",
        "no DP guarantee",
    ]
    top = json.loads(isthmus("ledger", "show", silo, "--top", 1, "--json").stdout)
    assert [(row["document"], row["spent"], row["peers"]) for row in top] == [
        ("north/2", 8.5, {"south": 8.5, "west": 8.0})
    ]
    one = json.loads(isthmus("ledger", "show", silo, "--document", "north/1", "--json").stdout)
    assert (one["spent"], one["left"], len(one["charges"])) == (8.0, 1.0, 2)


def test_show_for_people(silo: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert "north/2" in isthmus("ledger", "show", silo, "--top", 1).stdout
    history = isthmus("ledger", "show", silo, "--document", "north/2").stdout
    assert "document frequencies, refresh 1" in history
    assert history.endswith("spent ε = 8.5, left 0.5; noise that all peers share counts once\n")
    assert (
        isthmus("ledger", "show", silo, "--document", "north/9").stderr
        == "nothing was ever charged to north/9\n"
    )


@pytest.mark.parametrize(("part", "rows"), [("charges", 5), ("departures", 4), ("documents", 2)])
def test_export_is_the_same_as_csv_and_json(silo: Path, tmp_path: Path, part: str, rows: int) -> None:
    told = json.loads(isthmus("ledger", "export", silo, "--part", part, "--json").stdout)
    assert len(told) == rows
    out = tmp_path / "history.csv"
    assert isthmus("ledger", "export", silo, "--part", part, "-o", out).stdout == ""
    written = list(csv.DictReader(out.open(encoding="utf-8")))
    assert [list(row) for row in written] == [list(row) for row in told]
    for name in ("document", "kind", "peer", "release"):
        assert [row.get(name) for row in written] == [row.get(name) for row in told]
    with Ledger(silo) as ledger:
        (nonce,) = ledger.versions(["north/1"], [fingerprint("a")]).versions
    assert nonce not in out.read_text() + json.dumps(told)


def test_no_ledger_is_one_line(tmp_path: Path) -> None:
    done = isthmus("ledger", "show", tmp_path / "none", check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "none: there is no ledger (check the path; isthmus sketch build and a node's first start create one)"
    )


def test_a_silos_folder_will_do(silo: Path, tmp_path: Path) -> None:
    assert isthmus("ledger", "show", silo.parent).stdout == isthmus("ledger", "show", silo).stdout
    (tmp_path / "empty").mkdir()
    assert (
        "empty/silo.ledger: there is no ledger"
        in isthmus("ledger", "show", tmp_path / "empty", check=False).stderr
    )
