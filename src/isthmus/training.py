"""Train a ranker on data in memory, in a simulated federation, and rank with it.

>>> import numpy as np
>>> from isthmus.tables import Letor
>>> rng = np.random.default_rng(0)
>>> features = rng.normal(size=(1200, 4))
>>> queries = [f"q{row // 20}" for row in range(1200)]
>>> letor = Letor.of(queries, features, (features[:, 0] > 1).astype(int), name="rows")
>>> training = train(letor, silos=4, rounds=3)
>>> training.rounds, len(training.label_counts.counts)
(3, 4)
>>> rank(training, letor[:2]).queries
('q0', 'q1')
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.config import load, to_mapping
from isthmus.rankers import Ranker, load_ranker
from isthmus.tables import Fold, Letor, Run

if TYPE_CHECKING:
    from isthmus.federation import Config, FedRisk, Training


def train(
    data: Letor | Fold,
    *,
    silos: int | None = None,
    strategy: str | FedRisk | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    config: Config | None = None,
) -> Training:
    """Train one ranker across simulated silos in this process, each with its own queries of `data`.

    `config` has all other settings; without it the number of silos follows from the number of queries, up to
    10 of them train in each of 100 rounds with `strategy="fedrisk"`, and the coordinator's judged queries are
    those for validation. The other keywords override `config`. Of a Letor, or a fold without a validation
    part, a fifth of the queries is used for validation; if there is no test part, the ranker is measured on
    those, which flatters it a little. Raises MissingExtra without Flower (the extra `train`), ConfigError for
    settings that do not fit together, and DataError for more silos than queries, or if no document is
    relevant.
    """
    from isthmus.federation import Config, FedRisk, train

    fold = data if isinstance(data, Fold) else Fold(data.name or "data", data, data[:0], data[:0])
    settings = to_mapping(Config() if config is None else config)
    if silos is not None:
        settings["dealing"]["silos"] = silos
        if config is not None and config.rounds.silos is not None:
            settings["rounds"]["silos"] = min(config.rounds.silos, silos)
    if isinstance(strategy, FedRisk):
        settings["strategy"] |= {"name": "fedrisk", "risk": to_mapping(strategy)}
    elif strategy is not None:
        settings["strategy"]["name"] = strategy
    chosen: dict[str, Any] = {"count": rounds} if rounds is not None else {}
    settings["rounds"] |= chosen
    settings |= {"seed": seed} if seed is not None else {}
    return train(load(Config, settings), fold)


def rank(model: Ranker | Training | str | PathLike[str], letor: Letor, *, name: str = "") -> Run:
    """Rank each query's documents by a ranker's scores.

    `model` is a fitted ranker, the result of `train`, a saved ranker's file, or the folder of a training run.
    """
    if isinstance(model, str | PathLike):
        model = load_ranker(model_file(model))
    ranker = model if isinstance(model, Ranker) else model.ranker
    return ranker.rank(letor, name=name)


def model_file(path: str | PathLike[str]) -> Path:
    """The file itself, or the model's file in the folder of a training run."""
    if not Path(path).is_dir():
        return Path(path)
    from isthmus.federation import MODEL

    return Path(path) / MODEL
