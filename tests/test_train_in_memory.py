"""`isthmus.train` and `isthmus.rank`: data in memory, the one trainer underneath."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import isthmus
from easy_rows import easy
from isthmus.errors import ConfigError, DataError
from isthmus.federation import Config, FedRisk, Model, Rounds, train
from isthmus.partition import Dealing
from isthmus.tables import Fold

LETOR = easy("train", 60)
FOLD = Fold("small", LETOR, easy("validation", 20), easy("test", 20))
SMALL = Config(dealing=Dealing(silos=4), rounds=Rounds(count=2, silos=3), model=Model(hidden=(6,)), probe=5)


@pytest.fixture(scope="module")
def training():
    return isthmus.train(LETOR, silos=5, strategy="fedrisk", rounds=3)


def test_rows_alone_are_enough(training):
    assert training.rounds == 3
    assert len(training.label_counts.counts) == 5
    assert training.label_counts.counts.sum() < LETOR.rows  # the rest is probe and validation
    assert 0 < training.final["nDCG@10"] <= 1


def test_it_is_the_one_trainer():
    assert isthmus.train(FOLD, config=SMALL).model_sha256 == train(SMALL, FOLD).model_sha256
    more = replace(SMALL, dealing=Dealing(silos=2), rounds=Rounds(count=3, silos=2), seed=4)
    ours = isthmus.train(FOLD, silos=2, rounds=3, seed=4, config=SMALL)
    assert ours.model_sha256 == train(more, FOLD).model_sha256


def test_a_strategy_is_a_name_or_fedrisk_with_settings():
    averaged = isthmus.train(FOLD, strategy="fedavg", config=SMALL)
    assert not averaged.history[-1].risks
    without = isthmus.train(FOLD, strategy=FedRisk(memory=False), config=SMALL)
    assert without.history[-1].risks
    assert "memory" not in without.history[-1].weights


def test_what_does_not_fit_is_told():
    with pytest.raises(ConfigError, match=r"strategy\.name = 'fedrisc'.*fedrisk"):
        isthmus.train(LETOR, strategy="fedrisc")
    with pytest.raises(ConfigError, match="at least one silo"):
        isthmus.train(LETOR, silos=0)
    with pytest.raises(
        DataError, match=r"48 queries cannot be dealt to 1,000 silos \(deal to at most 48 silos"
    ):
        isthmus.train(LETOR, silos=1000)


def test_ranking_takes_a_training_a_ranker_a_file_or_a_folder(training, tmp_path):
    run = isthmus.rank(training, FOLD.test, name="fedrisk")
    assert run.name == "fedrisk"
    assert run == training.ranker.rank(FOLD.test) == isthmus.rank(training.ranker, FOLD.test)
    training.ranker.save(tmp_path / "ranker")
    assert isthmus.rank(tmp_path / "ranker", FOLD.test) == run
    (tmp_path / "folder").mkdir()
    training.ranker.save(tmp_path / "folder" / "model")
    assert isthmus.rank(str(tmp_path / "folder"), FOLD.test) == run


def test_a_training_shows_its_rounds(training):
    assert repr(training).startswith("Training: 3 rounds: nDCG@10 0.")
    assert training.to_arrow()["round"].to_pylist() == [1, 2, 3]
    assert training._repr_html_().count("<tr>") == 4
    long = replace(training, history=tuple(replace(training.history[0], round=at) for at in range(1, 51)))
    shown = long._repr_html_()
    assert shown.count("<tr>") <= 21
    assert '<td class="number">50</td>' in shown
    assert replace(training, history=())._repr_html_()


def test_a_training_has_plots(training):
    pytest.importorskip("matplotlib")
    assert training.plot()._repr_svg_().startswith("<svg")
    assert "Weights" in training.page().html()


def test_without_flower_the_extra_is_named():
    script = """if True:
        import sys
        sys.modules["flwr"] = sys.modules["flwr.app"] = None  # not installed
        import isthmus
        letor = isthmus.Letor.of(["q"], [[1.0]], [1])
        try:
            isthmus.train(letor)
        except isthmus.MissingExtra as missing:
            print(missing)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "training across silos needs an optional package: pip install 'isthmus[train]'" in done.stdout
