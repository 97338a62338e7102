"""Real silos on loopback: four processes over mutual TLS exchange private features, train on pairs across
them; one is killed during training and comes back, and one that is not on the list is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import isthmus
from isthmus.arrays import Ids
from isthmus.config import load
from isthmus.federation.deployment import Cooperation
from isthmus.federation.semisupervised.labelling import SiloRows
from isthmus.federation.semisupervised.training import cotrain
from isthmus.private.counts import Desk, in_memory
from isthmus.private.exchange import Exchange, Party, Turn
from isthmus.private.keys import GroupKey
from isthmus.private.ledger import Budget, Ledger
from isthmus.private.store import SiloFolder
from isthmus.private.sums import Agreed
from isthmus.private.views import Seeker
from isthmus.rankers import load_ranker
from isthmus.tables import Letor, read_letor, read_queries, write_letor
from isthmus.text import tokenise
from isthmus_reproduce import synthetic_text
from loopback_ports import free_base

DEPLOY = Path(__file__).parents[2] / "deploy"
SILOS = ("east", "north", "south", "west")
STEP = 240.0
CORPUS = synthetic_text.text(80, 12, 4, seed=5, words=40)

pytestmark = pytest.mark.timeout(900)


def rows(name, queries, seed, asked=()):
    """Judged rows of so many queries, `asked` first, as wide as what silos exchange."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(queries * 8, 16)).astype(np.float32)
    grades = np.digitize(features[:, 0] + features[:, 1] + rng.normal(size=len(features)), [1, 2])
    names = [*asked, *(f"{name}{query}" for query in range(queries))]
    return Letor.of([names[row // 8] for row in range(len(features))], features, grades)


def happens(what, seconds=STEP):
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def wait_for(what, told, seconds=STEP):
    found = happens(what, seconds)
    if not found:
        pytest.fail(f"{told} did not happen within {seconds:.0f} s")
    return found


class Site:
    """Everything of the deployment in one folder."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_base()
        self.running = []

    def do(self, *command):
        return isthmus(*command, folder=self.folder).stdout

    def start(self, name, *command):
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "isthmus", *(str(part) for part in command)],
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def silo(self, name):
        return self.start(name, "node", "--config", f"{name}.toml", "--training-only")

    def coordinate(self, *run):
        return self.do("coordinate", "--config", "coordinator.toml", *run)

    def said(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self):
        for process in self.running:
            end(process)


def end(process):
    """End a process and everything it started, without a word of farewell."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def deployed(folder):
    site = Site(folder)
    try:
        yield site
    finally:
        site.stop()


def lay_out(site):
    """Keys, settings and rows of every silo, and the coordinator's run with its judged queries."""
    folder = site.folder
    everybody = (*SILOS, "thief")
    site.do("keys", "make", "keys", "--coordinator", "--training", ",".join(everybody))
    tls = 'certificate = "keys/{0}/tls.crt"\nkey = "keys/{0}/tls.key"\nauthority = "keys/{0}/ca.crt"\n'.format
    coordinator = (DEPLOY / "coordinator.toml").read_text()
    for old, new in (("port = 9092", f"port = {site.port}"), ('host = "0.0.0.0"', 'host = "127.0.0.1"')):
        assert old in coordinator
        coordinator = coordinator.replace(old, new)
    (folder / "coordinator.toml").write_text(coordinator)
    for at, name in enumerate(everybody):
        (folder / name).mkdir()
        own = CORPUS.silo(CORPUS.silos[at]).queries.ids if name in SILOS else ()
        write_letor(rows(name, 12, at, own), folder / name / "rows.txt")
        (folder / f"{name}.toml").write_text(
            f'silo = "{name}"\nfolder = "{name}/node"\n[training]\ncoordinator = "127.0.0.1:{site.port}"\n'
            f'data = "{name}/rows.txt"\nprivate = "{name}/private"\nqueries = "{name}/q.tsv"\n'
            f"[training.tls]\n{tls(f'{name}.training')}"
        )
    for at, name in enumerate(("validation", "test", "probe")):
        write_letor(rows(name, 24, 50 + at), folder / f"{name}.txt")
    told = (DEPLOY / "federation.toml").read_text()
    for old, new in (
        ('"runs/first"', f'"{folder}/run"'),
        *((f'"judged/{name}.txt"', f'"{folder}/{name}.txt"') for name in ("validation", "test", "probe")),
        ("count = 50", "count = 3"),
        ("minimum = 2", "minimum = 3"),
        ("deadline = 120.0", "deadline = 90.0"),
    ):
        assert old in told
        told = told.replace(old, new)
    (folder / "federation.toml").write_text(told)


def lay_out_private(site):
    """Keys, cards and sketches of every silo, and what each of them asks."""
    key, folders = GroupKey.fresh(epoch=1), {}
    for name in SILOS:
        folders[name] = SiloFolder.at(site.folder / name / "private", create=True)
        folders[name].keys.begin(name)
        folders[name].keys.join(key)
    for name, silo in zip(SILOS, CORPUS.silos, strict=True):
        for other in SILOS:
            if other != name:
                folders[name].keys.trust(folders[other].keys.identity().card)
        own = CORPUS.silo(silo)
        folders[name].build(own.documents, budget=Budget(), width=1 << 10)
        pairs = zip(own.queries.ids, own.queries.texts, strict=True)
        (site.folder / name / "q.tsv").write_text("".join(f"{query}\t{text}\n" for query, text in pairs))
    told = (DEPLOY / "exchange.toml").read_text().replace("runs/exchange", f"{site.folder}/exchange")
    (site.folder / "exchange.toml").write_text(f"{told}width = 4096\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A coordinator's files and four silos, with one more that is not on its list."""
    with deployed(tmp_path_factory.mktemp("site")) as site:
        lay_out(site)
        lay_out_private(site)
        site.nodes = {name: site.silo(name) for name in (*SILOS, "thief")}
        yield site


def test_four_silos_exchange_features(site):
    site.coordinate("--exchange", "exchange.toml")
    record = site.folder / "exchange" / "exchange.json"
    turns = json.loads(record.read_text())["turns"]
    assert turns[-1]["done"] == sorted(SILOS)
    pairs, fields = 4 * 3, 2
    assert turns[-1]["letters"] == pairs * fields * 4  # catalogue and cells, each asked for and brought
    for name, silo in zip(SILOS, CORPUS.silos, strict=True):
        features = site.folder / name / "private" / "features"
        assert sorted(path.stem for path in features.iterdir()) == sorted(set(SILOS) - {name})
        with Ledger(site.folder / name / "private" / "silo.ledger") as ledger:
            assert ledger.spent(CORPUS.silo(silo).documents.ids[0]) == 9.0
            assert {row["peer"] for row in ledger.departures()} == set(SILOS) - {name}
    found = read_letor(site.folder / "north" / "private" / "features" / "south.txt")
    np.testing.assert_allclose(found.features, called(site, "north", "south").features, rtol=1e-5)


def called(site, asking, holder):
    """What a call in one process brings of another silo's documents: the same keys make the same noise."""
    mine, theirs = (SiloFolder.at(site.folder / name / "private") for name in (asking, holder))
    queries = read_queries(site.folder / asking / "q.tsv")
    (session,) = (mine.path / "exchange").iterdir()
    agreed = Agreed(bytes.fromhex(session.name), SILOS, len(SILOS), 4096)
    through = Exchange(Party(mine, queries), Turn(agreed, 9))
    tokens = tokenise(queries.texts)
    words = Ids.of(tokens.terms.words)
    own = {name: mine.words(name) for name in mine.fields()}
    seeker = Seeker(mine.keys.group_key(), own, mine.keys.decoys(), through.totals)
    with theirs.ledger() as ledger:
        desk = Desk(*(theirs.owner(name, 8.0, ledger.charge_all) for name in theirs.fields()))
        answers = seeker.read(seeker.ask(in_memory(desk, asking), theirs.fields(), words), words)
    return answers.letor(queries, tokens, answers.candidates(tokens, 100), name=holder)


def test_four_silos_train_on_pairs_across_them(site):
    """After the exchange: local models, their average labels the cross pairs, training goes on with them. One
    process with the same seed and the silos' noise secrets comes to the same model."""
    told = (DEPLOY / "cotraining.toml").read_text()
    for old, new in (
        ('"runs/cotraining"', f'"{site.folder}/cotraining"'),
        ("local_epochs = 60", "local_epochs = 4"),
        ("rounds = 20", "rounds = 1"),
        ("# [training.labelling]", "[training.labelling]"),
        ("# kind", "kind"),
        ("# beta", "beta"),
        ("# calibrated", "calibrated"),
    ):
        assert old in told
        told = told.replace(old, new)
    file = site.folder / "cotraining.toml"
    file.write_text(told)
    site.coordinate("--cotrain", file)
    assert (site.folder / "cotraining" / "metrics.json").exists()
    (record,) = json.loads((site.folder / "cotraining" / "rounds.json").read_text())
    assert set(record["asked"]) == set(SILOS)

    run, silos = load(Cooperation, file), []
    for name in SILOS:
        labelled = read_letor(site.folder / name / "rows.txt")
        cross = Letor.concat([called(site, name, other) for other in SILOS if other != name])
        silos.append(SiloRows(labelled, cross, np.zeros(cross.rows)))
        assert set(cross.queries) <= set(labelled.queries)
    expected = cotrain(silos, run.training, grades=run.grades, names=SILOS)
    assert run.training.labelling is not None
    assert run.training.anchor is not None
    made = load_ranker(site.folder / "cotraining" / "model")
    for name, array in expected.parameters.items():
        np.testing.assert_allclose(made.parameters_[name], array, atol=1e-4)
    alone = cotrain(silos, replace(run.training, labelling=None), grades=run.grades, names=SILOS)
    assert not np.allclose(alone.parameters["weight0"], expected.parameters["weight0"], atol=1e-3)


def test_four_silos_one_killed_one_refused(site):
    run = site.start("run", "coordinate", "--config", "coordinator.toml", "--train", "federation.toml")
    wait_for((site.folder / "run" / "checkpoint").exists, "the first round")
    end(site.nodes["west"])
    assert run.wait(3 * STEP) == 0, site.said("run")

    metrics = json.loads((site.folder / "run" / "metrics.json").read_text())
    history = json.loads((site.folder / "run" / "rounds.json").read_text())
    assert metrics["rounds"] == 3
    assert metrics["final"]["nDCG@10(empty=skip)"] > 0.5
    assert set(history[0]["weights"]) == set(SILOS)
    assert all("thief" not in record["asked"] for record in history)
    assert "west" not in history[-1]["weights"]
    assert load_ranker(site.folder / "run" / "model").score(rows("new", 3, 9)).shape == (24,)
    assert "the coordinator answered 403" in site.said("thief")


def test_an_interrupted_run_goes_on_and_a_silo_that_comes_back_takes_part(site):
    told = (site.folder / "federation.toml").read_text()
    for old, new in ((f'"{site.folder}/run"', f'"{site.folder}/again"'), ("count = 3", "count = 5")):
        assert old in told
        told = told.replace(old, new)
    (site.folder / "again.toml").write_text(told)
    site.nodes["west"] = site.silo("west")
    run = site.start("again", "coordinate", "--config", "coordinator.toml", "--train", "again.toml")
    wait_for((site.folder / "again" / "checkpoint").exists, "the first round")
    end(run)
    site.coordinate("--train", "again.toml")
    history = json.loads((site.folder / "again" / "rounds.json").read_text())
    assert [record["round"] for record in history] == [1, 2, 3, 4, 5]
    assert set(history[-1]["weights"]) == set(SILOS)


def test_silos_train_under_a_secure_sum(site):
    told = (site.folder / "federation.toml").read_text()
    for old, new in (
        (f'"{site.folder}/run"', f'"{site.folder}/secure"'),
        ("[training]", "[training]\nsecure = true"),
        ("count = 3", "count = 1"),
    ):
        assert old in told
        told = told.replace(old, new)
    (site.folder / "secure.toml").write_text(told)
    site.coordinate("--train", "secure.toml")
    (record,) = json.loads((site.folder / "secure" / "rounds.json").read_text())
    assert set(record["weights"]) == {*SILOS, "memory"}
    assert record["protection"].startswith("secure sum")
