"""Cross-silo federated ranking, Table 4 and Figures 6 and 8: printed values and results.

Everything is evaluated on real judgements: queries and documents of a collection are dealt into silos, and
test queries are ranked over the documents of all of them. The paper's own protocol has rows of its own: its
labels are ranks in a run, so that it measures how well a run is imitated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from isthmus.corpora import available
from isthmus_reproduce.csfltr.plots import Place, Results
from isthmus_reproduce.csfltr.report import cells_of, page_of
from isthmus_reproduce.csfltr.rows import curve_unit, point_unit, printed_unit, table_unit
from isthmus_reproduce.csfltr.world import Case
from isthmus_reproduce.notebook import Notebook, Reproduction, Unit

DATA = ("cran", "cisi", "med", "npl", "pydocs", "synthetic")
SMOKE = ("cran", "synthetic")
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, float("inf"))
SKEWS = {"topic": 0.0, "half": 0.5, "random": 1.0}
OPTIONS = 3
"""Seeds on which every option is measured; the others have only the rows that are tested."""
ROUGH: dict[str, Any] = {"epsilon": 2.0, "moved": 1.0}
"""The setting of the map in which most relevant pairs lie across silos and their counts are very noisy."""
LABELS: tuple[int | None, ...] = (2, 5, 10, None)


@dataclass(frozen=True)
class Config:
    """What to reproduce: `data` is a name, a path, or "all" for the available sets."""

    data: str = "all"
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0
    seeds: int = 20
    """Seeds of Table 4 at full scale; figures take a fifth of them, the map a tenth."""
    figures: bool = True

    def seeds_of(self, what: Literal["table", "rough", "figure", "map"]) -> range:
        """Return the seeds of a table, the rough setting, a figure's points or the map's settings."""
        full = max(2, self.seeds // {"table": 1, "rough": 2, "figure": 5, "map": 10}[what])
        return range(self.seed, self.seed + (full if self.scale == "full" else 2))

    @property
    def small(self) -> bool:
        """Whether the scale is smoke."""
        return self.scale == "smoke"


@dataclass(frozen=True)
class Piece:
    """A unit of work on one collection: a seed of the table, of a curve, or of a point of a figure or map."""

    data: str
    kind: Literal["table", "printed", "curve", "budget", "silos", "rough", "map"]
    seed: int
    deal: str = ""
    epsilon: float = Case.epsilon
    silos: int = Case.silos


def reproduce(config: Config, out: str | PathLike[str], *, workers: int | None = None) -> Reproduction:
    """Compute what is missing in the folder, and write the report."""
    notebook = Notebook(out, config)
    names = _names(config)
    results_by_piece: dict[Piece, Any] = {}
    work_by_kind = list(_work(names, config))
    notebook.announce(work_by_kind, workers)
    for label, work, units in work_by_kind:
        results_by_piece |= notebook.compute(work, units, label=label, workers=workers)
    results = {name: _sorted(name, results_by_piece) for name in names}
    cells = tuple(cell for name in names for cell in cells_of(name, results[name]))
    page = page_of(results, cells, seeds=len(config.seeds_of("table")))
    return notebook.publish(cells, page)


def _names(config: Config) -> tuple[str, ...]:
    if config.data != "all":
        return (config.data,)
    there = available()
    among = SMOKE if config.small else DATA
    return tuple(name for name in among if name == "synthetic" or there.get(name))


def _work(names: Sequence[str], config: Config) -> Iterator[tuple[str, Any, list[Unit]]]:
    tables = [unit for name in names for unit in _table_units(name, config)]
    yield "Table 4", table_unit, tables
    yield (
        "Table 4 as printed",
        printed_unit,
        [unit for name in names for unit in _printed_units(name, config)],
    )
    if config.figures:
        yield "Figure 6", curve_unit, [unit for name in names for unit in _curve_units(name, config)]
        yield "points", point_unit, [unit for name in names for unit in _point_units(name, config)]


def _case(name: str, config: Config, seed: int, **more: Any) -> dict[str, Any]:
    circular = {"circular": True} if name == "synthetic" else {}
    return {"data": name, "seed": seed, "small": config.small, **circular, **more}


def _short(name: str) -> str:
    return Path(name).name


def _table_units(name: str, config: Config) -> Iterator[Unit]:
    for seed in config.seeds_of("table"):
        more = seed - config.seed < OPTIONS
        yield Unit(Piece(_short(name), "table", seed), {"case": _case(name, config, seed), "more": more})


def _printed_units(name: str, config: Config) -> Iterator[Unit]:
    for seed in config.seeds_of("figure"):
        case = {**_case(name, config, seed), "circular": True}
        yield Unit(Piece(_short(name), "printed", seed), {"case": case})


def _curve_units(name: str, config: Config) -> Iterator[Unit]:
    for seed in config.seeds_of("figure"):
        yield Unit(Piece(_short(name), "curve", seed), {"case": _case(name, config, seed, reader="shrink")})


def _point_units(name: str, config: Config) -> Iterator[Unit]:
    """Yield points of Figures 8a and 8b and of the map, all read by plain shrinking, which is cheaper."""
    epsilons = EPSILONS if not config.small else (0.5, 8.0, float("inf"))
    silos = range(1, 9) if not config.small else (1, 2, 4)
    skews = SKEWS if not config.small else {"topic": 0.0, "random": 1.0}

    def point(piece: Piece, labels: Sequence[int | None] = (None,), **more: Any) -> Unit:
        case = _case(name, config, piece.seed, reader="shrink", **more)
        return Unit(piece, {"case": case, "labels": list(labels)})

    short = _short(name)
    for seed in config.seeds_of("figure"):
        for epsilon in epsilons:
            yield point(Piece(short, "budget", seed, epsilon=epsilon), epsilon=epsilon)
        for count in silos:
            if count != Case.silos:  # the budget figure has this point; `_sorted` adds it
                yield point(Piece(short, "silos", seed, silos=count), silos=count)
    for seed in config.seeds_of("rough"):
        yield point(Piece(short, "rough", seed), **ROUGH)
    labels = LABELS if not config.small else (2, None)
    for seed in config.seeds_of("map"):
        for skew, moved in skews.items():
            for epsilon in (2.0, 8.0, float("inf")) if not config.small else (2.0, 8.0):
                piece = Piece(short, "map", seed, deal=skew, epsilon=epsilon)
                yield point(piece, labels, epsilon=epsilon, moved=moved)


def _sorted(name: str, results: Mapping[Piece, Any]) -> Results:
    """Group a collection's results by kind of unit; those of figures and map by the parameters they vary."""
    mine = {piece: result for piece, result in results.items() if piece.data == _short(name)}

    def of(kind: str) -> dict[Piece, Any]:
        return {piece: result for piece, result in mine.items() if piece.kind == kind}

    budget: dict[float, list[Any]] = {}
    silos: dict[int, list[Any]] = {}
    places: dict[Place, list[Any]] = {}
    for piece, result in of("budget").items():
        budget.setdefault(piece.epsilon, []).append(result)
    for piece, result in of("silos").items():
        silos.setdefault(piece.silos, []).append(result)
    for piece, result in of("map").items():
        places.setdefault(Place(piece.deal, piece.epsilon), []).append(result)
    if Case.epsilon in budget:
        silos[Case.silos] = budget[Case.epsilon]
    plain = {kind: list(of(kind).values()) for kind in ("table", "printed", "curve", "rough")}
    return Results(**plain, budget=budget, silos=dict(sorted(silos.items())), places=places)
