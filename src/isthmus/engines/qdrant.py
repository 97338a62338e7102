"""A collection of Qdrant: searched by vectors if their encoder is known, otherwise by words.

A search by words ranks texts by how many words of the query they have, according to Qdrant's own text
conditions; an index on the payload makes that fast. A cluster is used like a single server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar
from uuid import UUID

import numpy as np

from isthmus.encoders import Vectors
from isthmus.engines.engine import ANY, MOST_FACETS, Constraints, Matches
from isthmus.engines.remote import (
    BATCH,
    JsonServer,
    Location,
    RemoteDocument,
    RemoteProblem,
    RemoteSource,
    document_of,
    json_filter,
    kinds_of,
    latest,
    names_of,
    sees_unruled,
    type_name,
    words_of,
)

PROPOSED = 1_000
"""Minimum number of points with a word of the query that are compared."""


class QdrantEngine:
    """See `VectorEngine`. `search_by` is the name of a vector, the filter is JSON, and ids are those of
    points."""

    noun: ClassVar[str] = "Qdrant"
    ranks_alone: ClassVar[bool] = True

    def __init__(self, location: Location) -> None:
        self._at = self.location = location
        self._server = JsonServer(location, self.noun, {"api-key": location.key} if location.key else {})
        self._filter = json_filter(location)
        self._distance = ""

    def _points(self, verb: str, body: Any) -> Any:
        return self._server.ask("POST", f"/collections/{self._at.source}/points{verb}", body)["result"]

    def _only(self, *conditions: Any, only: Constraints = ANY) -> dict[str, Any]:
        must, must_not = [*self._filter, *conditions], list[Any]()
        for types, clauses in ((only.types, must), (only.other_types, must_not)):
            if types:
                spellings = [form for each in types for form in (each, each.upper(), each.capitalize())]
                clauses.append({"key": self._at.type, "match": {"any": spellings}})
        bounds = {
            name: bound for name, bound in (("gte", only.since), ("lt", only.until)) if bound is not None
        }
        if bounds:  # one range for dates as numbers, one for dates as texts
            texts = {name: np.datetime_as_string(np.datetime64(at, "s")) + "Z" for name, at in bounds.items()}
            ranges = [{"key": self._at.date, "range": each} for each in (bounds, texts)]
            must.append({"should": ranges})
        if only.readers is not None:
            named = [{"key": self._at.allow, "match": {"any": names_of(only.readers)}}]
            if sees_unruled(only.readers, self._at):
                named.append({"is_empty": {"key": self._at.allow}})
            must.append({"should": named})
        both = {name: each for name, each in (("must", must), ("must_not", must_not)) if each}
        return {"filter": both} if both else {}

    def _payload(self) -> list[str]:
        at = self._at
        return [name for name in (at.title, at.body, at.type, at.date, at.allow) if name]

    def sources(self) -> list[RemoteSource]:
        """Collections whose payload has a text."""
        names = self._server.ask("GET", "/collections")["result"]["collections"]
        return [source for each in names if (source := self._source(each["name"])) is not None]

    def _source(self, name: str) -> RemoteSource | None:
        about = self._server.ask("GET", f"/collections/{name}")["result"]
        some = self._server.ask("POST", f"/collections/{name}/points/scroll", {"limit": 20})["result"][
            "points"
        ]
        kinds = kinds_of([point.get("payload") or {} for point in some])
        vectors = about["config"]["params"].get("vectors") or {}
        named = {} if "size" in vectors else dict.fromkeys(vectors, "search")
        if "text" not in kinds.values():
            return None
        return RemoteSource(name, int(about.get("points_count") or 0), {"id": "id", **kinds, **named})

    def check_rules(self) -> None:
        """Do nothing: Qdrant filters by any field of the payload."""

    def documents(self, only: Constraints = ANY) -> int:
        """Count the points that meet filter and constraints."""
        return self._count(self._only(only=only))

    def _count(self, only: dict[str, Any]) -> int:
        return int(self._points("/count", {"exact": True, **only})["count"])

    def version(self) -> str:
        """The number of points."""
        return f"points {self.documents()}"

    def search(
        self, text: str, vector: Vectors, depth: int, only: Constraints = ANY
    ) -> list[tuple[str, float]]:
        """The nearest points with similarities from 0 to 1. Without a vector, the points with the largest
        share of matching pairs of a word and a field."""
        if vector.any():
            query = {
                "query": vector.tolist(),
                **({"using": self._at.search_by} if self._at.search_by else {}),
            }
            hits = self._points("/query", {**query, "limit": depth, **self._only(only=only)})["points"]
            return [(str(hit["id"]), self._similarity(float(hit["score"]))) for hit in hits]
        having = self._having(text)
        if not having:
            return []
        conditions = [each for word in having for each in word]
        body = {
            "prefetch": {
                "limit": max(PROPOSED, 10 * depth),
                **self._only({"should": conditions}, only=only),
            },
            "query": {"formula": {"sum": [{"sum": word} for word in having]}},
            "limit": depth,
        }
        hits = self._points("/query", body)["points"]
        return [(str(hit["id"]), float(hit["score"]) / len(conditions)) for hit in hits]

    def _having(self, text: str) -> list[list[Any]]:
        """For every word of a text, the conditions that title or body has it."""
        fields = [name for name in (self._at.title, self._at.body) if name]
        return [[{"key": field, "match": {"text": word}} for field in fields] for word in words_of(text)]

    def matches(self, text: str, only: Constraints = ANY) -> Matches:
        """Count the points with any of the words; by type if the payload has an index on it."""
        conditions = [each for word in self._having(text) for each in word]
        if not conditions:
            return Matches(0, {}, {})
        among = self._only({"should": conditions}, only=only)
        types: Counter[str] = Counter()
        if self._at.type:
            body = {"key": self._at.type, "limit": MOST_FACETS, "exact": True, **among}
            with suppress(RemoteProblem):  # the field has no keyword index
                path = f"/collections/{self._at.source}/facet"
                for each in self._server.ask("POST", path, body)["result"]["hits"]:
                    types[type_name(each["value"])] += int(each["count"])
        return Matches(self._count(among), dict(types.most_common(MOST_FACETS)), {})

    def _similarity(self, score: float) -> float:
        """Map a score of the collection's distance to a number from 0 to 1, larger for nearer points."""
        if not self._distance:
            about = self._server.ask("GET", f"/collections/{self._at.source}")["result"]["config"]["params"]
            vectors = about["vectors"]
            self._distance = (vectors if "size" in vectors else vectors[self._at.search_by])["distance"]
        if self._distance == "Cosine":
            return (1 + score) / 2
        return 1 / (1 + np.exp(-score)) if self._distance == "Dot" else 1 / (1 + max(score, 0.0))

    def get(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """Points by their ids, which are whole numbers or UUIDs; other ids are left out."""
        points = [point for id in ids if (point := _point(id)) is not None]
        documents: dict[str, RemoteDocument] = {}
        for start in range(0, len(points), BATCH):
            some = self._only({"has_id": points[start : start + BATCH]})
            body = {"limit": BATCH, "with_payload": self._payload(), **some}
            for point in self._points("/scroll", body)["points"]:
                documents[str(point["id"])] = document_of(point["id"], point["payload"], self._at)
        return documents

    def vectors(self, ids: Sequence[str]) -> dict[str, Vectors]:
        """The vectors of points that have one."""
        points = [point for id in ids if (point := _point(id)) is not None]
        rows = self._points("", {"ids": points, "with_vector": True, "with_payload": False})
        name = self._at.search_by
        vectors = {str(row["id"]): row["vector"][name] if name else row["vector"] for row in rows}
        return {id: np.array(vector, dtype=np.float32) for id, vector in vectors.items()}

    def newest(self, depth: int, only: Constraints = ANY) -> list[str]:
        """The latest points, sorted here: Qdrant sorts only by a field with an index, and omits points
        without the field."""
        return latest(self.scan(only), depth)

    def scan(self, only: Constraints = ANY) -> Iterator[list[RemoteDocument]]:
        """Points in the order of their ids."""
        body: dict[str, Any] = {"limit": BATCH, "with_payload": self._payload(), **self._only(only=only)}
        while True:
            page = self._points("/scroll", body)
            yield [document_of(point["id"], point["payload"], self._at) for point in page["points"]]
            if page.get("next_page_offset") is None:
                return
            body["offset"] = page["next_page_offset"]

    def close(self) -> None:
        """Close the connections."""
        self._server.close()


def _point(id: str) -> int | str | None:
    """An id in Qdrant's form; None if it cannot be one."""
    if id.isascii() and id.isdigit():
        return int(id) if int(id) < 1 << 64 else None
    try:
        return str(UUID(id))
    except ValueError:
        return None
