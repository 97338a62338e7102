"""What silos gain by training together: each alone, all under a secure sum, and all rows in one place.

Every silo has queries that its own people judged, and documents. A row is a query with a candidate document
and the sixteen features that the document's silo works out from its own exact counts. Alone, a silo has the
rows of its own queries with its own documents. Together, the silos answer each other's queries with
features, each trains on the rows of its own queries, and only the sum of their models leaves them. Held-out
queries come from connected components of the link graph that no training query comes from, and intervals
resample components.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.evaluation import Interval, bootstrap, evaluate
from isthmus.features import letor
from isthmus.federation.apps import Training, train
from isthmus.federation.settings import Config
from isthmus.partition import linked_queries
from isthmus.rankers import MLP, LocalTraining, Ranker
from isthmus.tables import Corpus, Fold, Letor, Qrels, Run

MEASURE = "nDCG@10"
ROUNDS = 20
CANDIDATES = 25
"""Documents that each silo proposes for a query."""
LOCAL = LocalTraining(epochs=ROUNDS, learning_rate=3e-3, weight_decay=1.0)
"""As long and as fast as a silo trains in all rounds together."""


@dataclass(frozen=True)
class Together:
    """nDCG@10 of every held-out query under every ranker, and the training of the common one."""

    untrained: FloatArray
    alone: Mapping[str, FloatArray]
    """By silo: its own queries, its own documents."""
    informed: Mapping[str, FloatArray]
    """By silo: its own queries, everybody's documents."""
    central: FloatArray
    together: FloatArray
    components: IntArray
    training: Training
    seed: int

    def mean(self, values: FloatArray) -> Interval:
        """The mean, with an interval over components."""
        return bootstrap(values, groups=self.components, seed=self.seed)

    def gain(self, values: FloatArray) -> Interval:
        """By how much training together is better."""
        return self.mean(self.together - values)

    @property
    def best_alone(self) -> str:
        """The silo whose own ranker is best."""
        return max(self.alone, key=lambda silo: float(self.alone[silo].mean()))


def train_together(world: Corpus, lists: Mapping[str, Run], *, seed: int = 0) -> Together:
    """Train on a world whose silos have answered every query with these lists."""
    proposed = {silo: _rows(world, silo, lists[silo].top(CANDIDATES)) for silo in world.silos}
    everything = Letor.concat(list(proposed.values()))
    home = dict(zip(world.queries.ids, world.queries.silos.tolist(), strict=True))
    split = dict(zip(world.queries.ids, world.queries.splits, strict=True))

    def part(table: Letor, name: str, silo: int | None = None) -> Letor:
        chosen = [split[query] == name and silo in (None, home[query]) for query in table.queries]
        return table[np.array(chosen)]

    def fitted(table: Letor, silo: int | None = None) -> FloatArray:
        ranker = MLP(training=LOCAL, seed=seed)
        ranker.fit(part(table, "train", silo), validation=part(table, "validation", silo))
        return values(ranker)

    held_out, judged = part(everything, "test"), world.split("test").qrels

    def values(ranker: Ranker) -> FloatArray:
        return _values(judged, held_out.run(ranker.score(held_out)))

    sites = {query: f"{world.silos[at]}/{query}" for query, at in home.items()}
    known, watched = (_at_home(part(everything, name), sites) for name in ("train", "validation"))
    config = Config.of_sites(world.name, len(world.silos), rounds=ROUNDS, seed=seed)
    trained = train(config, Fold(world.name, known, watched, held_out))
    return Together(
        untrained=_values(judged, Run.concat(list(lists.values()))),
        alone={silo: fitted(proposed[silo], at) for at, silo in enumerate(world.silos)},
        informed={silo: fitted(everything, at) for at, silo in enumerate(world.silos)},
        central=fitted(everything),
        together=values(trained.ranker),
        components=linked_queries(world)[np.array([split[query] == "test" for query in world.queries.ids])],
        training=trained,
        seed=seed,
    )


def _rows(world: Corpus, silo: str, run: Run) -> Letor:
    """A silo's own documents for everybody's queries, with features from its own counts."""
    return letor(replace(world, documents=world.silo(silo).documents), run)


def _at_home(table: Letor, sites: Mapping[str, str]) -> Letor:
    return replace(table, queries=tuple(sites[query] for query in table.queries))


def _values(judged: Qrels, run: Run) -> FloatArray:
    """The measure of every judged query, in the order of the judgements."""
    (values,) = evaluate(judged, run, [MEASURE]).values.values()
    return values
