"""A staged federation's parts: the calibrator of each silo, and the rows that all silos have together."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from isthmus.calibration import LabelledScores, Platt, load_calibrator, save_calibrator
from isthmus.errors import ConfigError
from isthmus.service import demo_federation
from isthmus.service.connections import listen_problem
from isthmus.service.local import free_ports


def hits(rng, count, slope, start):
    scores = rng.normal(size=count)
    relevant = (rng.random(count) < 1 / (1 + np.exp(-(slope * scores + start)))).astype(float)
    return LabelledScores(scores, relevant)


def log_odds(calibrator, scores):
    chances = calibrator.probabilities(scores)
    return np.log(chances) - np.log1p(-chances)


def test_a_silo_with_much_to_tell_bends_the_line_and_one_with_little_hardly(tmp_path):
    rng = np.random.default_rng(0)
    everybody = hits(rng, 4000, 1.0, -1.0)
    pooled = Platt().fit(everybody.scores, everybody.relevant)
    grid = np.linspace(-2, 2, 5)
    many, few = hits(rng, 40_000, 1.0, -3.0), hits(rng, 40, 1.0, -3.0)
    assert log_odds(pooled.shrunk(many, shrinkage=demo_federation.SHRINKAGE), grid) == pytest.approx(
        grid - 3, abs=0.35
    )
    drawn = log_odds(pooled.shrunk(few, shrinkage=demo_federation.SHRINKAGE), grid) - log_odds(pooled, grid)
    assert np.abs(drawn).max() < 0.3
    alone = Platt().fit(many.scores, many.relevant)
    trust = many.relevant.sum() / (many.relevant.sum() + demo_federation.SHRINKAGE)
    wanted = trust * log_odds(alone, grid) + (1 - trust) * log_odds(pooled, grid)
    made = pooled.shrunk(many, shrinkage=demo_federation.SHRINKAGE)
    assert log_odds(made, grid) == pytest.approx(wanted, abs=1e-9)
    save_calibrator(made, tmp_path / "calibrator")
    again = load_calibrator(tmp_path / "calibrator")
    assert log_odds(again, grid) == pytest.approx(wanted, abs=1e-9)


def test_a_silo_that_saw_one_kind_of_hit_has_the_line_of_all():
    everybody = hits(np.random.default_rng(0), 500, 1.0, 0.0)
    pooled = Platt().fit(everybody.scores, everybody.relevant)
    assert pooled.shrunk(LabelledScores(np.zeros(3), np.zeros(3)), shrinkage=200.0) is pooled


def test_the_hits_shown_are_the_best_of_all_silos():
    rows = demo_federation.CandidateRows(
        queries=np.repeat([0, 1], [24, 2]),
        silos=np.tile([0, 1], 13),
        documents=np.array([f"d{at:02}" for at in range(26)]),
        features=np.zeros((26, 1), dtype=np.float32),
        scores=np.zeros(26),
        relevant=np.zeros(26, dtype=bool),
        parts=np.full(26, "train"),
    )
    scores = np.concatenate((np.arange(24.0), [5.0, 1.0]))
    assert np.flatnonzero(rows.top_hits(scores)).tolist() == [*range(14, 24), 24, 25]


def test_a_configuration_that_is_not_as_expected_is_not_changed(tmp_path):
    file = tmp_path / "silo.toml"
    file.write_text("port = 1\n")
    with pytest.raises(ConfigError, match="no line"):
        demo_federation._edit(file, {"port = 2": "port = 3"})
    assert file.read_text() == "port = 1\n"


def test_free_ports_are_free_and_others_are_refused():
    base = free_ports(3)
    assert not any(map(listen_problem, range(base, base + 3)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert listen_problem(port)
        with pytest.raises(ConfigError, match="not all free"):
            free_ports(1, port)
