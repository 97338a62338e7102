"""The hits of a broker as texts with metadata, from which each retriever makes its own documents."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from isthmus.errors import ServiceError, SiloUnavailable
from isthmus.service import DEFAULT_URL, Answer, AsyncClient, Client, Hit, OpenedDocument, one_line, visible


@dataclass(frozen=True)
class Passage:
    """A hit: its address `silo/id`, a text, the score that orders it, and its metadata."""

    address: str
    text: str
    score: float
    """Its probability, or its score if the silo has no calibrator."""
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Passages:
    """A broker and the options of a search; `find` and `afind` search.

    Hits below `threshold` are left out. The text of a passage is the hit's snippet, or with `whole` the
    document, if the user may open it; each opening is recorded in the silo's ledger, and `whole` in the
    metadata says which text it is. If a silo does not show snippets to the user, passages have the titles as
    texts, with `withheld` true.
    """

    url: str = DEFAULT_URL
    key: str | Path | None = field(default=None, repr=False)
    authority: str | os.PathLike[str] | None = None
    k: int = 10
    threshold: float = 0.0
    silos: Iterable[str] | None = None
    whole: bool = False

    def find(self, query: str, *, k: int | None = None) -> list[Passage]:
        """The passages for a query, best first. Raises SiloUnavailable if no silo answered."""
        opened: dict[str, OpenedDocument] = {}
        with Client(self.url, key=self.key, authority=self.authority) as broker:
            answer = broker.search(query, **self._options(k))
            for hit in self._openable(answer):
                with suppress(ServiceError):
                    opened[hit.ticket] = broker.open(hit)
        return self._passages(answer, opened)

    async def afind(self, query: str, *, k: int | None = None) -> list[Passage]:
        """Like `find`, without blocking; cancelling it ends the search."""
        opened: dict[str, OpenedDocument] = {}
        async with AsyncClient(self.url, key=self.key, authority=self.authority) as broker:
            answer = await broker.search(query, **self._options(k))
            for hit in self._openable(answer):
                with suppress(ServiceError):
                    opened[hit.ticket] = await broker.open(hit)
        return self._passages(answer, opened)

    def _options(self, k: int | None) -> dict[str, Any]:
        silos = self.silos and list(self.silos)
        return {"k": self.k if k is None else k, "threshold": self.threshold, "silos": silos}

    def _openable(self, answer: Answer) -> list[Hit]:
        return [hit for hit in answer.hits if self.whole and "open" in hit.access]

    def _passages(self, answer: Answer, opened: Mapping[str, OpenedDocument]) -> list[Passage]:
        if not any(silo.status == "answered" for silo in answer.silos):
            states = ", ".join(f"{silo.silo} {silo.status}" for silo in answer.silos)
            raise SiloUnavailable(f"no silo of {self.url} has answered: {states}")
        return [_passage(answer, hit, opened.get(hit.ticket)) for hit in answer.hits]


def _passage(answer: Answer, hit: Hit, opened: OpenedDocument | None) -> Passage:
    metadata = {
        "document": one_line(hit.document),
        "silo": hit.silo,
        "title": one_line(hit.title),
        "probability": hit.probability,
        "score": hit.score,
        "link": hit.link,
        "type": one_line(hit.type),
        "date": one_line(hit.date),
        "whole": opened is not None,
        "withheld": hit.snippet is None and opened is None,
        "unanswered": [silo.silo for silo in answer.silos if silo.status != "answered"],
    }
    text = hit.snippet if opened is None else opened.body
    order = hit.score if hit.probability is None else hit.probability
    readable = visible(hit.title if text is None else text)  # models get no text that people cannot see
    name = hit.document if one_line(hit.document) == hit.document else quote(hit.document, errors="replace")
    return Passage(f"{hit.silo}/{name}", readable, order, metadata)
