"""A small node with private statistics and no network, whose files a test loses and whose texts it edits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from isthmus.retrieval import Statistics
from isthmus.service.node import Node
from isthmus.service.settings import EncoderSettings, NodeSettings, Policy, SharedStatistics
from isthmus.service.stores import Draft

PEER = "broker"
WORDS = [f"word{number}" for number in range(80)]
BUDGET = 9.0


def private_settings(folder: Path) -> NodeSettings:
    return NodeSettings(
        silo="north",
        folder=folder,
        sources=(),
        peers={PEER: Policy(search=True, counts=True)},
        budget=BUDGET,
        encoder=EncoderSettings("lsa", dimensions=4),
        statistics=SharedStatistics(width=4096, renew=0.2),
    )


def texts(count: int = 100) -> list[Draft]:
    rng = np.random.default_rng(3)
    return [
        Draft(f"d{at}", "", " ".join(rng.choice(WORDS, size=int(rng.integers(5, 30))))) for at in range(count)
    ]


@contextmanager
def node(settings: NodeSettings, *drafts: Draft) -> Iterator[Node]:
    """The node, with these documents written and everything indexed."""
    with Node(settings).offline() as opened:
        opened.store.put(drafts, source="operator")
        while opened.index.update():
            pass
        yield opened


def released(opened: Node) -> Statistics:
    return Statistics.from_bytes(opened.statistics(PEER))
