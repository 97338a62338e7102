"""The ways to train on pairs across silos, side by side on the built-in world.

A chapter of the demonstration. Documents of other silos are seen through what these release; judged pairs lie
inside silos alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.evaluation import Interval, bootstrap
from isthmus.experiments.csfltr_pictures import mean_of
from isthmus.experiments.csfltr_rows import ANCHORED, DEFAULT_ROW, Bench, cross_share, measured
from isthmus.experiments.csfltr_world import Case, World
from isthmus.report import Estimate, Table
from isthmus.tables.ids import FloatArray

Found = Mapping[str, Any]
"""What `measured` says of every row."""

QUERIES = 160
SHOWN = {
    "BM25": "nobody trains: BM25 from private counts",
    "Local": "every silo alone (mean of the four)",
    "Local+": "and on cross pairs it labels itself (mean)",
    "averaged labeller": "the four models averaged",
    "Global": "judged pairs of all silos, federated",
    "CS-F-LTR": "and on cross pairs that the average labels",
    "all-zero": "the same with every cross pair labelled 0",
    "noise-aware Global": "judged pairs as noisy as others' documents",
    ANCHORED: "Global, drawn to BM25 where judged queries are few",
}


@dataclass(frozen=True)
class Story:
    """The ways beside each other, and which of them the product uses."""

    share: float
    table: Table
    sentence: str


def tell(*, seed: int = 0) -> Story:
    """Deal, release, train every way, and compare on test queries."""
    case = Case("pydocs", seed=seed, own_deal=True, most=QUERIES, reader="shrink", width=8192)
    world = World(case)
    found = measured(world, "private", Bench(world.tables["private"]).points(every_way=True))
    rows = tuple((row, told, _estimate(found, row), _against(found, row)) for row, told in SHOWN.items())
    table = Table(("way", "what it learns from", "nDCG@10", "the default is better by"), rows, digits=3)
    return Story(cross_share(world), table, _sentence(found))


def _queries(found: Found, row: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A row's nDCG@10 query by query, the mean over silos where there are several models."""
    parts = [list(value["queries"].values()) for name, value in found.items() if name.split("|")[0] == row]
    means: FloatArray = np.mean(parts, axis=0)
    return means


def _shown(interval: Interval) -> Estimate:
    return Estimate(interval.value, interval.low, interval.high)


def _estimate(found: Found, row: str) -> Estimate:
    return _shown(bootstrap(_queries(found, row)))


def _against(found: Found, row: str) -> Estimate | None:
    if row == DEFAULT_ROW:
        return None
    return _shown(bootstrap(_queries(found, DEFAULT_ROW) - _queries(found, row)))


def _sentence(found: Found) -> str:
    default, printed, bm25 = (mean_of(found, row) for row in (DEFAULT_ROW, "CS-F-LTR", "BM25"))
    gain = bootstrap(_queries(found, DEFAULT_ROW) - _queries(found, "CS-F-LTR"))
    apart = f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
    return (
        f"Isthmus uses {DEFAULT_ROW} training on counts read by shrinking: judged pairs of all silos, the"
        " model the closer to BM25 the fewer there are, and nobody has to guess grades that nobody gave; here"
        f" it comes to {default:.3f}, {apart} beside the {printed:.3f} of CS-F-LTR as printed, and BM25 alone"
        f" to {bm25:.3f}."
    )
