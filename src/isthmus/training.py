"""Train and rank data in memory: a federation in one call, and what it trained at work.

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

    `config` says everything else; without it the number of silos follows from that of the queries, up to 10
    train in each of 100 rounds with `strategy="fedrisk"`, and the coordinator's judged queries are those for
    validation. The other keywords replace what it says. A Letor, or a fold without a validation part, gives a
    fifth of its queries for validation; where there is no test part, the ranker is measured on those, which
    flatters it a little. MissingExtra without Flower, the extra `train`; ConfigError for settings that do not
    fit together; DataError for more silos than queries, and where no document is relevant.
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
    """The lists in the order of a ranker's scores.

    `model` is a fitted ranker, what `train` gave, a saved ranker's file, or the folder of a training run.
    """
    if isinstance(model, str | PathLike):
        model = load_ranker(model_file(model))
    ranker = model if isinstance(model, Ranker) else model.ranker
    return ranker.rank(letor, name=name)


def model_file(path: str | PathLike[str]) -> Path:
    """The file itself, or the model inside the folder of a training run."""
    if not Path(path).is_dir():
        return Path(path)
    from isthmus.federation import MODEL

    return Path(path) / MODEL
