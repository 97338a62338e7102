"""A silo wants to ruin what others learn with it, or a broker; a broker wants to end a silo's searches."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from isthmus.asking import Silos, TooFew
from isthmus.errors import IsthmusError, ProtocolError
from isthmus.learning import (
    COLUMNS,
    PROFILE,
    HitCalibration,
    LearningOptions,
    SearchModel,
    Weights,
    answer_bytes,
    answer_of,
    learn,
)
from isthmus.service import wire
from isthmus.service.broker import Broker
from isthmus.service.joint_learning import JointLearning
from isthmus.service.learning_runs import LearningRuns
from isthmus.service.merging import Merger
from isthmus.service.results import in_order
from isthmus.service.settings import BrokerSettings, SiloAddress
from isthmus.service.versions import ModelVersions
from learning_rows import FOLDS, dealt, made_rows

QUERIES = tuple(f"query {at}" for at in range(40))
COLLECTED = ("FoldsOf", "QueryColumns", "BestMargins", "OwnModel", "CrossExamination")
SUMS = ("Start", "RelevantOf", "ColumnMoments", "LossSums", "GainsOf", "HitsByCell")


def learned_beside(kind, lie):
    """What three silos learn, of which the last lies about one kind of question."""
    silos = dealt(made_rows(queries=len(QUERIES), candidates=20), 3)

    def hostile(question):
        answer = silos["silo2"].answer(question)
        return lie(answer) if type(question).__name__ == kind else answer

    mode = "fedrisk" if kind in ("OwnModel", "CrossExamination") else "sums"
    answers = {name: rows.answer for name, rows in silos.items()} | {"silo2": hostile}
    return learn(Silos.in_memory(answers), QUERIES, folds=FOLDS, options=LearningOptions(mode=mode))


@pytest.mark.parametrize("kind", COLLECTED)
@pytest.mark.parametrize(
    "lie",
    [
        lambda answer: answer[:-1],
        lambda answer: np.append(answer, 0.0),
        lambda answer: answer[:0],
        lambda answer: np.full_like(answer, np.inf),
        lambda answer: np.full_like(answer, -1e300),
    ],
    ids=["short", "long", "empty", "infinite", "huge"],
)
def test_an_answer_of_another_form_is_its_silos_failure(kind, lie):
    """Not everybody's: the broker goes on without that silo."""
    with pytest.raises(TooFew) as few:
        learned_beside(kind, lie)
    assert list(few.value.answers.reasons()) == ["silo2"]


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("value", [1e8, -1e8])
def test_totals_that_no_rows_have_make_no_model_that_breaks_searches(kind, value):
    """Masks hide who it was; the run fails, or what comes of it can be used."""
    try:
        model, record = learned_beside(kind, lambda answer: np.full_like(answer, value))
    except IsthmusError:
        return
    SearchModel.from_bytes(model.to_bytes())
    assert "NaN" not in record.to_json()


def test_infinite_margins_over_the_wire_are_read_as_such():
    assert answer_of(answer_bytes(np.array([-np.inf]))).tolist() == [-np.inf]
    with pytest.raises(ProtocolError):
        answer_of(answer_bytes(np.array([np.nan])))


# adoption


def a_model(version="v1", **more):
    size = len(COLUMNS)
    line = HitCalibration(
        *(2.0, 4.0, 0.5, -1.0, 0.6, 0.8, 0.3, 0.1, -2.0, 1.0),
        *(np.zeros(6), np.full(6, 0.01), np.array([1.0, -1.0, 0.5, -0.5, 0.1, 0.1])),
    )
    score = Weights(np.zeros(size), np.ones(size), np.ones(size))
    own = SearchModel("baseline", score, line)
    return SearchModel("linear", score, line, "", {"version": version, **more}, own)


def a_broker(folder):
    addresses = {"silo1": SiloAddress("http://127.0.0.1:9")}
    return Broker(BrokerSettings(folder=folder, silos=addresses, share_statistics=False))


@pytest.mark.parametrize("ruined", ["a model with NaN", "an error of its own"])
def test_a_run_that_is_ruined_changes_nothing_and_says_so(tmp_path, monkeypatch, ruined):
    """The version in use stays, before and after a restart, and the page says why the run failed."""

    async def learned(self):
        if ruined == "an error of its own":
            raise np.linalg.LinAlgError("Singular matrix")
        model = a_model()
        return replace(model, score=replace(model.score, weights=np.full(len(COLUMNS), np.nan))), None

    monkeypatch.setattr(JointLearning, "learn", learned)
    broker = a_broker(tmp_path)
    broker.models.versions.add(wire.LearnedVersion(version="1", learned="", mode="masked"), b"")
    runs = LearningRuns(broker)
    runs.versions.add(wire.LearnedVersion(version="2", learned="", mode="masked"), a_model("2").to_bytes())
    runs.versions.use("2")
    with pytest.raises((IsthmusError, np.linalg.LinAlgError)):
        asyncio.run(runs.once("masked", by="ada"))
    assert runs.versions.current == "2"
    assert runs.view().problem
    again = a_broker(tmp_path)
    assert again.models.model is not None


_ADOPTING = """
import sys
from pathlib import Path
from isthmus.service.versions import ModelVersions
from isthmus.service.wire import LearnedVersion

versions, model = ModelVersions(Path(sys.argv[1])), Path(sys.argv[2]).read_bytes()
for number in range(10**6):
    name = f"{number:07d}"
    versions.add(LearnedVersion(version=name, learned="", mode="masked"), model)
    versions.use(name)
    print(name, flush=True)
"""


def test_a_process_that_is_killed_while_it_adopts_leaves_a_whole_version(tmp_path):
    """At any moment: what is in use can be read, and what was in use is still there."""
    (tmp_path / "model").write_bytes(a_model().to_bytes())
    for wait in (0.0, 0.013, 0.041):
        folder = tmp_path / f"learned {wait}"
        command = [sys.executable, "-c", _ADOPTING, str(folder), str(tmp_path / "model")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            first = process.stdout.readline().strip()
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
        versions = ModelVersions(folder)
        assert versions.current >= first
        SearchModel.from_bytes(versions.model(versions.current))
        SearchModel.from_bytes(versions.model(first))
        assert all(each.usable for each in versions.history())
        versions.add(wire.LearnedVersion(version="next", learned="", mode="masked"), None)
        assert not list(folder.glob("*.begun"))


# what silos say of a search


def an_answer(silo, score=1.0, **more):
    hit = wire.Hit(document="d", silo=silo, probability=None, score=score)
    said = {"scorer": "learned", "model": "v1", "margins": [1.0, 0.5], "of_query": [1.0, 1.0], **more}
    return wire.NodeAnswer(silo=silo, hits=[hit], documents=1, statistics="", took_ms=1.0, **said)


@pytest.mark.parametrize(
    "said",
    [
        {"margins": [1e308] * 20},
        {"margins": [-1e308]},
        {"of_query": [1e308, -1e308]},
        {"retrieved": [(1e308, None)]},
        {"margins": [float("nan")]},
        {"model": "../" * 20},
    ],
)
def test_numbers_that_no_model_makes_are_no_answer(said):
    with pytest.raises(ValueError, match="validation error"):
        an_answer("silo1", **said)


@pytest.mark.parametrize("score", [1e308, -1e308, 1e12])
@pytest.mark.parametrize("margin", [1e12, -1e12])
def test_hits_of_all_silos_have_probabilities_whatever_one_says(score, margin):
    answers = {"one": an_answer("one"), "bad": an_answer("bad", score, margins=[margin] * 20)}
    merger = Merger.of(a_model(), "v1", answers)
    lists = [merger.hits(answer) for answer in answers.values()]
    assert all(0 <= hit.probability <= 1 for hits in lists for hit in hits)
    assert {hit.silo for hit in in_order(lists)} == {"one", "bad"}


@pytest.mark.parametrize("silos", [1, 2, 3])
def test_margins_for_which_calibrations_disagree_make_no_probability_no_number(silos):
    """Those of one silo's lists surely relevant, those of all silos' surely not."""
    model = a_model()
    sure, never = (replace(model.calibration, start=start) for start in (1e4, -1e4))
    for whole, single in ((sure, never), (never, sure)):
        mixed = replace(model, calibration=whole, single=single, silos=3)
        probabilities = mixed.probabilities(np.array([1.0, 0.0]), np.zeros(len(PROFILE)), silos)
        assert ((probabilities >= 0) & (probabilities <= 1)).all()


def test_an_explanation_that_adds_up_to_no_number_is_left_out():
    share = wire.Evidence(retriever="start", raw=None, probability=None, weight=None, contribution=1.7e308)

    def explained(silo, parts):
        answer = an_answer(silo)
        hits = [hit.model_copy(update={"explanation": parts}) for hit in answer.hits]
        return answer.model_copy(update={"hits": hits})

    bad = explained("bad", [share, share])
    good = explained("one", [share.model_copy(update={"contribution": 0.5})])
    merger = Merger.of(a_model(), "v1", {"bad": bad, "one": good})
    ((left_out,), (kept,)) = merger.hits(bad), merger.hits(good)
    assert left_out.explanation is None
    assert sum(part.contribution for part in kept.explanation) == pytest.approx(
        np.log(kept.probability / (1 - kept.probability))
    )


@pytest.mark.parametrize("version", ["x" * 41, "<img src=x>", "a\nb"])
def test_a_model_whose_version_no_answer_could_have_is_refused(tmp_path, version):
    """A broker that may learn would end the searches of all others."""
    from isthmus.service.settings import Policy
    from learning_silos import nodes

    with nodes(tmp_path, Policy(search=True, learning=True), seeds=(1,)) as (node,):
        with pytest.raises(ProtocolError, match="version"):
            node.adopt(a_model(version).to_bytes(), "curious")
        node.adopt(a_model("20261116-181500").to_bytes(), "curious")
        answer = node.searcher.search(wire.Search(query="tide"), snippets=False)
        assert answer.hits
