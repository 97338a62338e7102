"""Ways to train on pairs across silos that nobody judged, side by side on the same tables.

`Ways.rankers` yields one ranker per way: every silo alone, all silos' judged pairs, the same with labelled
cross pairs (CS-F-LTR), and the product's default, which is drawn to BM25 if judged queries are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from isthmus.federation.rounds import State
from isthmus.federation.semisupervised import training
from isthmus.federation.semisupervised.labelling import Labelling, SiloRows
from isthmus.federation.semisupervised.silos import CrossTables
from isthmus.rankers import Parameters, Scaling, scores_of
from isthmus.tables import Letor

Scorer = Callable[[Letor], NDArray[Any]]

PLAIN = training.CoTraining()
LABELLINGS: Mapping[str, Labelling] = {"CS-F-LTR": Labelling("soft"), "all-zero": Labelling("zero", beta=0.3)}
"""Labels of the cross pairs, by way: the averaged model's soft grades, or 0 for every pair."""
ANCHORED = "anchored Global"
DEFAULT = ANCHORED
"""The product's default.

On validation queries of the judged collections, this way and its noise-aware twin lead, within .001 of each
other. At smaller budgets noise-aware training loses much if counts are read by shrinking; this way does not.
"""


class Way(NamedTuple):
    """A trained ranker: its row in a table of results, and "all" or the silo whose own model it is."""

    row: str
    part: str
    score: Scorer


class Ways:
    """Tables to train and to rank on; `labels` limits the number of judged queries per silo.

    `plain` has the training options. Rankers of lists label cross pairs only when calibrated, and have no
    anchor.
    """

    def __init__(
        self,
        tables: CrossTables,
        *,
        seed: int,
        labels: int | None = None,
        plain: training.CoTraining = PLAIN,
    ) -> None:
        self.tables, self.seed, self.labels, self.plain = tables, seed, labels, plain
        self.grades = tables.world.grades

    def rankers(self, *, every: bool = True) -> Iterator[Way]:
        """Yield the ranker of every way; without `every`, leave out those that a control does not need."""
        silos = self.silos(self.tables.inside)
        config, lists = self._paced(replace(self.plain, seed=self.seed)), self.plain.model in training.LISTS
        start, models = self.begun(silos, config)
        if every:
            yield from self.alone(models, silos, config, start.scaling)
            yield Way("averaged labeller", "all", network(start.parameters, start.scaling))
        else:
            yield from self._each("Local", models, silos, start.scaling)
        yield Way("Global", "all", self.trained(silos, config))
        if not lists:
            yield Way(ANCHORED, "all", self.trained(silos, replace(config, anchor=training.Anchor())))
        yield Way("noise-aware Global", "all", self.trained(self.silos(self.tables.noised), config))
        for name, labelling in LABELLINGS.items():  # plain epochs: the number of cross pairs does not change
            calibrated = replace(labelling, calibrated=lists and labelling.asks)
            labelled = replace(config, epochs=self.plain.epochs, labelling=calibrated)
            yield Way(name, "all", self.trained(silos, labelled, start))

    def silos(self, inside: Mapping[str, Letor]) -> list[SiloRows]:
        """Return the silos' training data, given their judged rows."""
        return self.tables.silos(inside, self.labels)

    def alone(
        self, models: list[Parameters], silos: list[SiloRows], config: training.CoTraining, scaling: Scaling
    ) -> Iterator[Way]:
        """Yield `Local`, and `Local+`, which trains again on cross pairs that it labels itself."""
        yield from self._each("Local", models, silos, scaling)
        calibrated = config.model in training.LISTS
        taught = replace(config, labelling=Labelling("soft", beta=0.1, calibrated=calibrated))
        again = training.self_taught(models, silos, taught, scaling, grades=self.grades)
        yield from self._each("Local+", again, silos, scaling)

    def _paced(self, config: training.CoTraining) -> training.CoTraining:
        """Return options with more passes over fewer judged rows, so that all runs take as many steps."""
        some, every = (self.tables.silos(self.tables.inside, labels) for labels in (self.labels, None))
        rows = [sum(silo.labelled.rows for silo in silos) for silos in (some, every)]
        times = max(1, round(rows[1] / max(rows[0], 1)))
        return replace(config, epochs=config.epochs * times, local_epochs=config.local_epochs * times)

    def _each(
        self, row: str, models: list[Parameters], silos: list[SiloRows], scaling: Scaling
    ) -> Iterator[Way]:
        """Yield one ranker per silo, except for silos without judged rows."""
        for name, model, silo in zip(self.tables.inside, models, silos, strict=True):
            if silo.labelled.rows:
                yield Way(row, name, network(model, scaling))

    def begun(self, silos: list[SiloRows], config: training.CoTraining) -> tuple[State, list[Parameters]]:
        """Train the silos' own models. Returns a state with their average, which labels pairs and starts
        CS-F-LTR, and the models themselves."""
        scaling = training.fitted_scaling(silos, config.scaling)
        models = training.local_models(silos, config, scaling, grades=self.grades)
        return State(0, training.averaged(models), scaling), models

    def trained(
        self, silos: list[SiloRows], config: training.CoTraining, start: State | None = None
    ) -> Scorer:
        """Train a ranker with these silos and return its scoring function."""
        result = self.model(silos, config, start)
        return network(result.parameters, result.scaling)

    def model(
        self, silos: list[SiloRows], config: training.CoTraining, start: State | None = None
    ) -> training.CoTrained:
        """Train a ranker with these silos; without `start`, from an untrained first model."""
        if config.labelling is None:
            silos = [silo.without_cross() for silo in silos]
        if start is None:
            scaling = training.fitted_scaling(silos, config.scaling)
            start = State(0, training.first_model(config, scaling, self.grades), scaling)
        return training.cotrain(silos, config, grades=self.grades, start=start)


def network(parameters: Mapping[str, NDArray[Any]], scaling: Scaling) -> Scorer:
    """Return a network's scoring function, which scales rows first."""
    return lambda table: scores_of(dict(parameters), scaling(table))
