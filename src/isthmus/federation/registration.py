"""Registration of silos: their names, what each reports about its data, and the nodes that reach them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from isthmus.asking import Silos
from isthmus.errors import FederationError
from isthmus.federation.flower import Grid, Message, MessageType
from isthmus.federation.messages import METRICS, GridCarrier, connected, order, unpack
from isthmus.federation.runtimes import check_claim
from isthmus.federation.settings import Rounds
from isthmus.rankers import ScalingStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegisteredSilo:
    """A silo's description of its data at registration: sizes, highest grade and sums for feature scaling."""

    rows: int
    queries: int
    width: int
    highest: int
    stats: ScalingStats


class Registration:
    """The silos registered so far. Nodes may come and go.

    A silo is asked once to describe itself, and again only if it could not be reached in time.
    """

    def __init__(self, scaling: str, rounds: Rounds) -> None:
        self.silos: dict[str, RegisteredSilo] = {}
        self._scaling, self._rounds = scaling, rounds
        self._names: dict[int, str | None] = {}

    def gather(self, grid: Grid, expected: int) -> dict[str, int]:
        """Register new nodes and return the connected node of every usable silo, by silo name in sorted
        order. Waits until `expected` nodes are connected or the deadline has passed."""
        nodes = connected(grid, expected, self._rounds.deadline)
        self._meet(grid, [node for node in nodes if node not in self._names], expected)
        reached = {self._names[node]: node for node in nodes if node in self._names}
        return {name: reached[name] for name in sorted(self.silos) if name in reached}

    def stats(self) -> ScalingStats:
        """Return the sum of the silos' scaling statistics, always added in the order of names."""
        first, *others = (self.silos[name].stats for name in sorted(self.silos))
        return sum(others, start=first)

    def counts(self, *, whole_queries: bool) -> dict[str, int]:
        """Return the number of examples that every silo declared: queries if `whole_queries`, else rows."""
        return {name: silo.queries if whole_queries else silo.rows for name, silo in self.silos.items()}

    def _meet(self, grid: Grid, strangers: list[int], expected: int) -> None:
        if not strangers:
            return
        content = order(None, {"scaling": self._scaling})
        nodes = {node: node for node in strangers}
        carrier = GridCarrier(grid, f"{MessageType.QUERY}.describe", nodes, self._rounds)
        enough = max(1, expected - len(self.silos))
        asker = Silos(tuple(strangers), carrier, self._rounds.deadline, least=0, enough=enough)

        def read(node: int, reply: Message) -> tuple[str, RegisteredSilo]:
            name, silo = _described(reply)
            check_claim(grid, node, name)
            return name, silo

        answers = asker.collect(content, read, shows="a silo's name, sizes and the sums of its features")
        failed = {node: why for node, why in answers.failed.items() if not isinstance(why, TimeoutError)}
        for node, (name, silo) in sorted(answers.by_silo.items()):
            try:
                self._welcome(name, silo)
                self._names[node] = name
            except FederationError as error:
                failed[node] = error
        for node, why in failed.items():  # one unusable node must not stop the others
            self._names[node] = None
            logger.warning("node %s cannot take part: %s", node, why)

    def _welcome(self, name: str, silo: RegisteredSilo) -> None:
        if name in self.silos:
            raise FederationError(f"a silo called {name!r} is already there")
        other = next(iter(self.silos.values()), silo)
        if silo.width != other.width:
            raise FederationError(f"{name} has {silo.width} features where others have {other.width}")
        self.silos[name] = silo


def _described(reply: Message) -> tuple[str, RegisteredSilo]:
    records, metrics = reply.content.array_records, reply.content.metric_records[METRICS]
    name = bytes(unpack(records["silo"])["name"]).decode()
    sums = unpack(records["sums"])
    numbers = {key: int(metrics[key]) for key in ("rows", "queries", "width", "highest")}  # type: ignore[arg-type]
    possible = all(len(array) == numbers["width"] and np.isfinite(array).all() for array in sums.values())
    if not possible or min(numbers.values()) < 0:
        raise FederationError(f"{name} describes itself in numbers that cannot be")
    stats = ScalingStats(numbers["rows"], sums["total"], sums["squares"], sums["low"], sums["high"])
    return name, RegisteredSilo(**numbers, stats=stats)
