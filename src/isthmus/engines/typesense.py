"""A collection of Typesense, searched by its own search.

Its match scores pack several criteria into one number and cannot be compared between queries. Only the share
of the query's words that matched is used and, for equal shares, their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

from isthmus.encoders import Vectors
from isthmus.engines.engine import ANY, MOST_FACETS, Constraints, Matches
from isthmus.engines.remote import (
    JsonServer,
    Location,
    RemoteDocument,
    RemoteProblem,
    RemoteSource,
    document_of,
    names_of,
    type_name,
    words_of,
)
from isthmus.errors import ConfigError

PAGE = 250
"""Maximum number of hits that one search returns."""


class TypesenseEngine:
    """See `RemoteEngine`. The filter is a `filter_by`; a scoped search key adds its own."""

    noun: ClassVar[str] = "Typesense"
    ranks_alone: ClassVar[bool] = True

    def __init__(self, location: Location) -> None:
        self._at = self.location = location
        self._server = JsonServer(location, self.noun, {"x-typesense-api-key": location.key})
        self._fields = [name for name in (location.title, location.body) if name]

    def _search(self, *conditions: str, **search: Any) -> Any:
        """Send one search in the body of a request, since a URL has no room for many ids. Raises a
        RemoteProblem if it is refused."""
        body = {"collection": self._at.source, "filter_by": self._filters(*conditions), **search}
        (result,) = self._server.ask("POST", "/multi_search", {"searches": [body]})["results"]
        if "error" in result:
            code = str(result.get("code", ""))
            raise RemoteProblem(self.noun, str(result["error"])[:200], code=code)
        return result

    def _filters(self, *conditions: str) -> str:
        return " && ".join(f"({part})" for part in (self._at.filter, *conditions) if part)

    def _narrowed(self, only: Constraints) -> list[str]:
        """Filter expressions for documents that meet constraints; dates are numbers."""
        at, filters = self._at, list[str]()
        for types, sign in ((only.types, ":="), (only.other_types, ":!=")):
            values = ",".join(f"`{each.replace('`', ' ')}`" for each in types)
            filters += [f"{at.type}{sign}[{values}]"] if types else []
        for bound, sign in ((only.since, ":>="), (only.until, ":<")):
            filters += [] if bound is None else [f"{at.date}{sign}{bound}"]
        if only.readers is not None:  # it cannot search for a missing value: such documents stay hidden
            named = ",".join(f"`{each}`" for each in names_of(only.readers) if "`" not in each)
            filters.append(f"{at.allow}:=[{named}]")
        return filters

    def sources(self) -> list[RemoteSource]:
        """Collections with a text field."""
        sources = []
        for each in self._server.ask("GET", "/collections"):
            kinds = {
                field["name"]: "text" if field["type"].startswith("string") else "other"
                for field in each["fields"]
            }
            if "text" in kinds.values():
                sources.append(RemoteSource(each["name"], int(each["num_documents"]), {**kinds, "id": "id"}))
        return sources

    def check_rules(self) -> None:
        """Raise a ConfigError unless the field of principals holds strings and is indexed."""
        fields = self._server.ask("GET", f"/collections/{self._at.source}")["fields"]
        kind: dict[str, Any] = next((each for each in fields if each["name"] == self._at.allow), {})
        if kind.get("type") not in ("string", "string[]") or not kind.get("index", True):
            raise ConfigError(
                f"{self._at.allow} is {kind.get('type', 'no field')}",
                key="engine.allow_field",
                expected="a field of type string[] that is indexed",
            )

    def documents(self, only: Constraints = ANY) -> int:
        """Count the documents that meet filter and constraints."""
        return int(self._search(*self._narrowed(only), q="*", per_page=0)["found"])

    def version(self) -> str:
        """The number of documents."""
        return f"documents {self.documents()}"

    def _by_words(self, words: Sequence[str], depth: int) -> dict[str, Any]:
        """Parameters of a search that drops words one by one while too few documents have all of them."""
        return {
            "q": " ".join(words),
            "query_by": ",".join(reversed(self._fields)),
            "drop_tokens_threshold": min(depth, PAGE),
            "prefix": False,
        }

    def matches(self, text: str, only: Constraints = ANY) -> Matches:
        """Count what `search` finds, with words dropped; by type if the field is a facet."""
        words, at = words_of(text), self._at
        if not words:
            return Matches(0, {}, {})
        search = {**self._by_words(words, PAGE), "per_page": 0}
        facets = {"facet_by": at.type, "max_facet_values": MOST_FACETS} if at.type else {}
        try:
            result = self._search(*self._narrowed(only), **search, **facets)
        except RemoteProblem:
            if not facets:
                raise
            result = self._search(*self._narrowed(only), **search)
        counts: Counter[str] = Counter()
        for each in (each for facet in result.get("facet_counts", ()) for each in facet["counts"]):
            counts[type_name(each["value"])] += int(each["count"])
        return Matches(int(result["found"]), dict(counts.most_common(MOST_FACETS)), {})

    def search(
        self, text: str, vector: Vectors, depth: int, only: Constraints = ANY
    ) -> list[tuple[str, float]]:
        """The best documents in Typesense's order, scored by the share of the query's words that matched."""
        words = words_of(text)
        if not words:
            return []
        hits = self._search(
            *self._narrowed(only),
            **self._by_words(words, depth),
            per_page=min(depth, PAGE),
            include_fields="id",
        )["hits"]
        scored, lowest = [], 1.0
        for rank, hit in enumerate(hits):
            matched = min(int(hit.get("text_match_info", {}).get("tokens_matched", len(words))), len(words))
            lowest = min(lowest, (matched + 1 / (1 + rank)) / (len(words) + 1))
            scored.append((str(hit["document"]["id"]), lowest))
        return scored

    def get(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """Documents by their ids."""
        documents: dict[str, RemoteDocument] = {}
        plain = [id for id in ids if "`" not in id]
        for start in range(0, len(plain), PAGE):
            some = ",".join(f"`{id}`" for id in plain[start : start + PAGE])
            for hit in self._search(f"id:[{some}]", q="*", per_page=PAGE)["hits"]:
                document = hit["document"]
                documents[document["id"]] = document_of(document["id"], document, self._at)
        return documents

    def newest(self, depth: int, only: Constraints = ANY) -> list[str]:
        """Ids of the documents with the latest dates, at most `PAGE`."""
        order = {"sort_by": f"{self._at.date}:desc"} if self._at.date else {}
        page = {"q": "*", "per_page": min(depth, PAGE), "include_fields": "id", **order}
        return [str(hit["document"]["id"]) for hit in self._search(*self._narrowed(only), **page)["hits"]]

    def scan(self, only: Constraints = ANY) -> Iterator[list[RemoteDocument]]:
        """All documents from Typesense's export; the key needs documents:export."""
        read = [name for name in ("id", *self._fields, self._at.type, self._at.date, self._at.allow) if name]
        parameters = {"include_fields": ",".join(read)}
        if filters := self._filters(*self._narrowed(only)):
            parameters["filter_by"] = filters
        lines = self._server.lines(f"/collections/{self._at.source}/documents/export", params=parameters)
        while batch := list(islice(lines, PAGE)):
            yield [document_of(each["id"], each, self._at) for each in batch]

    def close(self) -> None:
        """Close the connections."""
        self._server.close()
