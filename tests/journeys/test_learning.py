"""Three silos as processes: judgements from a file, `isthmus learn`, versions, and a silo that comes back."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
import time
from itertools import combinations

import pytest

from isthmus.service import create_federation, run_federation
from isthmus.service.local import _started
from learning_silos import TOPICS, texts
from loopback_ports import free_base

NAMES = ("north", "south", "west")
WORDS = " ".join(TOPICS).split()
QUERIES = [f"{one} {other}" for one, other in combinations(WORDS, 2)]
PATIENCE = 60.0
PATIENT = "patient-zanzibar-4711"
LETTERS = {
    f"letter-of-zanzibar-{at}.md": f"kumquatarian pelicans resigned number{at} on thursdayish mornings"
    for at in range(3)
}


def isthmus(*arguments):
    """What a command prints as JSON; it must end well."""
    command = [sys.executable, "-m", "isthmus", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A federation as `isthmus new` writes it, with documents, and a file of judgements: a document is right
    if its title is a word of the query."""
    folder = tmp_path_factory.mktemp("learning") / "federation"
    create_federation(folder, NAMES, port=free_base(len(NAMES) + 1))
    rows = []
    for seed, name in enumerate(NAMES, 1):
        documents = folder / name / "documents"
        (documents / "example.md").unlink()
        for draft in texts(seed):
            (documents / f"{draft.id}.md").write_text(f"# {draft.title}\n\n{draft.body}\n", encoding="utf-8")
            right = (query for query in QUERIES if draft.title in query.split())
            rows += [(query, f"{draft.id}.md", 1, name) for query in right]
    for id, text in LETTERS.items():
        letter = f"---\nsubject: {PATIENT}\n---\n# Letter\n\n{text}\n"
        (folder / "north" / "documents" / id).write_text(letter, encoding="utf-8")
        rows += [(query, id, 0, "north") for query in QUERIES[:3]]
    with open(folder / "judged.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("query", "document", "relevant", "silo"), *rows])
    return folder


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.3)
    return value


def withdrawn(folder, broker, version):
    """A patient withdraws from a federation that has searched, judged and learned: it is found nowhere, in
    the folders of nodes and broker, their stores, logs, indices and models; only the source still has it."""
    pieces = [PATIENT.encode(), *(id.encode() for id in LETTERS)]
    pieces += {text[at : at + 12].encode() for text in LETTERS.values() for at in range(len(text) - 11)}

    def left():
        files = (path for path in folder.rglob("*") if path.is_file())
        aside = (folder / "north" / "documents", folder / "judged.csv")
        searched = [path for path in files if not any(path.is_relative_to(each) for each in aside)]
        return [path for path in searched if any(piece in path.read_bytes().lower() for piece in pieces)]

    until(
        lambda: set(LETTERS) & {hit.document for hit in broker.search("pelicans").hits}, "letters are found"
    )
    names = {path.name for path in left()}
    assert {"judged.json"} <= names
    assert any(name.startswith("documents.db") for name in names)
    receipt = isthmus("documents", "erase", "--subject", PATIENT, "--config", folder / "north" / "silo.toml")
    assert {each["id"] for each in receipt["documents"]} == set(LETTERS)
    assert receipt["judgements"] == 3 * len(LETTERS)
    assert any(line.startswith(version) for line in receipt["relearn"])
    assert left() == []
    assert not set(LETTERS) & {hit.document for hit in broker.search("pelicans").hits}
    releases = {silo.silo: silo.release for silo in broker.silos().silos}
    assert [name for name, release in releases.items() if release.outdated_model] == ["north"]
    isthmus("node", "reload", "--config", folder / "north" / "silo.toml")
    assert left() == [], "its source does not bring it back"


def test_silos_learn_and_one_that_comes_back_gets_the_model(folder):
    config = folder / "broker.toml"
    with run_federation(folder) as federation, federation.client() as broker:
        before = broker.search("tide wave")
        assert {hit.probability for hit in before.hits} == {None}
        assert isthmus("learn", "--config", config, "--list") == []
        key = ("--broker", federation.url, "--key", federation.key)
        assert isthmus("judgements", "import", folder / "judged.csv", *key)["added"] > 1000
        sockets = shutil.ignore_patterns("*.sock")
        shutil.copytree(folder / "west" / "index", folder / "copy", ignore=sockets)  # as it serves, a backup

        first = isthmus("learn", "--config", config)
        record = first["record"]
        assert (first["current"], first["usable"], first["problem"]) == (True, True, "")
        assert (record["queries"], record["silos"]) == (len(QUERIES), sorted(NAMES))
        assert record["adopted"], record["why"]
        assert record["kind"] == "linear"
        assert record["models"]["linear"]["difference"]["low"] > 0

        def learned(version):
            answer = broker.search("tide wave", explain=True)
            return answer if {answer.model, *(silo.model for silo in answer.silos)} == {version} else None

        answer = until(lambda: learned(first["version"]), "all silos have the model")
        assert [curve.silo for curve in broker.calibration().curves] == ["all silos"]
        assert answer.model == first["version"]
        assert answer.hits[0].title in ("tide", "wave")
        for hit in answer.hits:
            odds = sum(part.contribution for part in hit.explanation)
            assert 1 / (1 + math.exp(-odds)) == pytest.approx(hit.probability, abs=1e-9)
        strange = broker.search("zebra crossing violin")
        assert not strange.hits or strange.hits[0].probability < answer.hits[0].probability

        second = isthmus("learn", *key)  # the broker itself
        assert second["version"] > first["version"]
        assert second["by"] == "admin"
        versions = isthmus("learn", *key, "--list")
        assert [version["current"] for version in versions] == [True, False]
        assert isthmus("learn", "--config", config, "--rollback")["current"] == first["version"]
        until(lambda: learned(first["version"]), "all silos are back at the first version")
        view = broker.learning()
        assert (view.state, view.current) == ("idle", first["version"])

        withdrawn(folder, broker, first["version"])
        for _ in range(2):  # the second time the broker knows that it had it
            west = federation.processes["west"]
            west.kill()
            west.wait()
            shutil.rmtree(folder / "west" / "index")
            shutil.copytree(folder / "copy", folder / "west" / "index")
            federation.processes["west"] = _started(folder, "west", "node", folder / "west" / "silo.toml")
            answer = until(lambda: learned(first["version"]), "west has fetched the model by itself")
            assert all(hit.probability is not None for hit in answer.hits)
        isthmus("learn", "--config", config, "--rollback", "none")
        answer = until(
            lambda: (answer := learned("")) and not answer.model and answer, "nothing learned is used"
        )
        assert {hit.probability for hit in answer.hits} == {None}
