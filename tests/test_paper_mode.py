"""`train --mode paper`: FedRisk as printed, by one flag."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from command_line import isthmus
from easy_rows import easy
from isthmus.config import load
from isthmus.federation import Config
from isthmus.tables import write_letor


def test_one_flag_is_the_paper_s_configuration_and_warns(tmp_path: Path) -> None:
    write_letor(easy("train", 60), tmp_path / "rows.txt")
    rounds = ("--rounds", 3, "--silos", 4, "--per-round", 2, "--out", tmp_path / "run")
    isthmus("train", tmp_path / "rows.txt", "--mode", "paper", *rounds)
    config = load(Config, tmp_path / "run" / "config.toml", [])
    assert config.dealing.kind == "dirichlet-pair"
    assert (config.local.loss, config.local.epochs, config.local.batch) == ("cross_entropy", 5, 64)
    assert config.model.hidden == ()
    assert config.model.scoring == "expected"
    assert config.strategy.risk.mode == "paper"
    assert (config.strategy.risk.alpha_mix, config.strategy.risk.beta_mix) == (1.0, 1.0)
    assert config.probe is None
    norms = [record["norm"] for record in _rounds(tmp_path / "run")]
    assert np.diff(np.log2(norms)).min() > 0.5, "parameters about double in every round"


def _rounds(folder: Path) -> list[dict[str, float]]:
    import json

    records: list[dict[str, float]] = json.loads((folder / "rounds.json").read_text())
    return records
