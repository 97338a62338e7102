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

from core_walk import free_base
from isthmus.service import create_federation, run_federation
from isthmus.service.local import _started
from learning_silos import TOPICS, texts

NAMES = ("north", "south", "west")
WORDS = " ".join(TOPICS).split()
QUERIES = [f"{one} {other}" for one, other in combinations(WORDS, 2)]
PATIENCE = 60.0


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
    with open(folder / "judged.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("query", "document", "relevant", "silo"), *rows])
    return folder


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.3)
    return value


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
