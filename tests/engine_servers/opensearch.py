"""Answers as OpenSearch and Elasticsearch document them, for the paths that the adapter asks.

No server of either can be had by package name, so this stands in: the form of every answer is that of the
documented interface, taken from its reference; what it finds is worked out here, word by word.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from engine_servers.servers import EngineServer
from isthmus.text import ENGLISH

SHARDS = {"total": 1, "successful": 1, "skipped": 0, "failed": 0}


class OpenSearchStandIn(EngineServer):
    """Indexes in memory, analysed as the analyser `english` does."""

    name, noun, level, key = "http", "OpenSearch", "full", "reader:hush"

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.indexes: dict[str, dict[str, dict[str, Any]]] = {}
        self.scrolls: dict[str, list[Any]] = {}
        self.requests: list[tuple[str, str]] = []

    def fill(self, source: str, documents: Sequence[dict[str, Any]]) -> None:
        self.indexes[source] = {
            each["id"]: {k: 1000 * v if k == "at" else v for k, v in each.items() if k != "id"}
            for each in documents
        }

    def filter(self, kind: str) -> str:
        return json.dumps({"term": {"kind": kind}})

    def answer(self, method: str, path: str, query: str, body: Any) -> tuple[int, Any]:
        """The status and the answer to one request."""
        self.requests.append((method, path))
        parts = path.strip("/").split("/")
        if path == "/_cat/indices":
            rows = [
                {"health": "green", "status": "open", "index": name, "docs.count": str(len(docs))}
                for name, docs in self.indexes.items()
            ]
            return 200, [
                *rows,
                {"health": "green", "status": "open", "index": ".security", "docs.count": "3"},
            ]
        if path == "/_search/scroll":
            return 200, self._scrolled(method, body)
        if parts[0] not in self.indexes:
            reason = {"type": "index_not_found_exception", "reason": f"no such index [{parts[0]}]"}
            return 404, {"error": {"root_cause": [reason], **reason}, "status": 404}
        documents = self.indexes[parts[0]]
        if parts[1] == "_mapping":
            text = {"type": "text", "analyzer": "english", "fields": {"keyword": {"type": "keyword"}}}
            fields = {"title": text, "body": text, "kind": {"type": "keyword"}, "at": {"type": "date"}}
            fields["acl"] = {"type": "keyword"}
            return 200, {parts[0]: {"mappings": {"properties": fields}}}
        if parts[1] == "_stats":
            done = {"index_total": len(documents), "delete_total": 0}
            return 200, {"_shards": SHARDS, "_all": {"primaries": {"indexing": done}}}
        if parts[1] == "_count":
            return 200, {"count": len(list(self._hits(documents, body))), "_shards": SHARDS}
        if parts[1] == "_mtermvectors":
            return 200, {"docs": [self._vectors(documents, each) for each in body["docs"]]}
        if _clauses(body["query"]) > 1024:
            reason = {"type": "too_many_clauses", "reason": "maxClauseCount is set to 1024"}
            return 400, {"error": {"root_cause": [reason], **reason}, "status": 400}
        return 200, self._page(documents, body, query)

    def _vectors(self, documents: Any, wanted: Any) -> dict[str, Any]:
        source = documents[wanted["_id"]]
        fields = {}
        for field in wanted["fields"]:
            words = ENGLISH([source[field]]).words(0)
            fields[field] = {"terms": {word: {"term_freq": words.count(word)} for word in words}}
        return {
            "_index": "x",
            "_id": wanted["_id"],
            "_version": 1,
            "found": True,
            "took": 0,
            "term_vectors": fields,
        }

    def _page(self, documents: Any, body: Any, query: str) -> dict[str, Any]:
        hits = sorted(self._hits(documents, body), key=lambda hit: -hit["_score"])
        for field, order in (
            pair for each in body.get("sort", ()) if each != "_doc" for pair in each.items()
        ):
            assert order == {"order": "desc", "missing": "_last"}
            hits.sort(key=lambda hit: hit["_source"].get(field, float("-inf")), reverse=True)
        rest = hits[body["size"] :]
        total = {"value": len(hits), "relation": "eq"}
        best = hits[0]["_score"] if hits else None
        page = {
            "took": 1,
            "timed_out": False,
            "_shards": SHARDS,
            "hits": {"total": total, "max_score": best, "hits": _shown(hits[: body["size"]], body)},
        }
        page["aggregations"] = {
            name: {"buckets": _buckets(hits, each)} for name, each in body.get("aggs", {}).items()
        }
        if "scroll=" in query:
            name = f"scroll-{len(self.scrolls)}"
            self.scrolls[name] = rest
            page["_scroll_id"] = name
        return page

    def _scrolled(self, method: str, body: Any) -> dict[str, Any]:
        if method == "DELETE":
            freed = [self.scrolls.pop(name, None) for name in body["scroll_id"]]
            return {"succeeded": True, "num_freed": len(freed)}
        rest = self.scrolls[body["scroll_id"]]
        self.scrolls[body["scroll_id"]] = rest[500:]
        hits = {"total": {"value": len(rest), "relation": "eq"}, "max_score": None, "hits": rest[:500]}
        return {
            "_scroll_id": body["scroll_id"],
            "took": 1,
            "timed_out": False,
            "_shards": SHARDS,
            "hits": hits,
        }

    def _hits(self, documents: Any, body: Any) -> Iterator[dict[str, Any]]:
        asked = body["query"]["bool"]
        for id, source in documents.items():
            if not all(_meets(id, source, each) for each in asked["filter"]):
                continue
            if any(_meets(id, source, each) for each in asked.get("must_not", ())):
                continue
            score = sum(_score(source, each) for each in asked.get("should", ()))
            if score > 0 or not asked.get("should"):
                yield {"_index": "x", "_id": id, "_score": float(score), "_source": source}


def _clauses(query: Any) -> int:
    """Queries for a word of a field."""
    if isinstance(query, list):
        return sum(map(_clauses, query))
    if not isinstance(query, dict):
        return 0
    if "multi_match" in query:
        return len(query["multi_match"]["query"].split()) * len(query["multi_match"]["fields"])
    return ("term" in query) + sum(map(_clauses, query.values()))


def _meets(id: str, source: Any, condition: Any) -> bool:
    if "ids" in condition:
        return id in condition["ids"]["values"]
    if "bool" in condition and "must_not" in condition["bool"]:
        return not any(_meets(id, source, each) for each in condition["bool"]["must_not"])
    if "bool" in condition:
        return any(_meets(id, source, each) for each in condition["bool"]["should"])
    if "terms" in condition:
        ((field, values),) = condition["terms"].items()
        return not set(source.get(field) or ()).isdisjoint(values)
    if "exists" in condition:
        return bool(source.get(condition["exists"]["field"]))
    if "range" in condition:
        ((field, bounds),) = condition["range"].items()
        assert bounds["format"] == "epoch_millis"
        return field in source and bounds.get("gte", 0) <= source[field] < bounds.get("lt", 1 << 60)
    ((field, value),) = condition["term"].items()
    if field == "_ignored":
        return False
    if isinstance(value, dict):
        return source[field].lower() == value["value"].lower()
    return source[field] == value


def _shown(hits: Any, body: Any) -> list[Any]:
    if body.get("_source") is not False:
        return list(hits)
    return [{name: value for name, value in hit.items() if name != "_source"} for hit in hits]


def _buckets(hits: Any, wanted: Any) -> list[Any]:
    """Of an aggregation, as the reference shows it."""
    if "terms" in wanted:
        counts = Counter(hit["_source"][wanted["terms"]["field"]] for hit in hits)
        return [{"key": key, "doc_count": count} for key, count in counts.most_common()]
    dates = [hit["_source"].get(wanted["date_histogram"]["field"]) for hit in hits]
    years = Counter(datetime.fromtimestamp(date / 1000, UTC).year for date in dates if date is not None)
    return [
        {"key_as_string": str(year), "key": 0, "doc_count": count} for year, count in sorted(years.items())
    ]


def _score(source: Any, clause: Any) -> float:
    if "multi_match" in clause:
        words = ENGLISH([clause["multi_match"]["query"]]).words(0)
        fields = clause["multi_match"]["fields"]
        return sum(_saturated(source[field], word) for field in fields for word in words)
    queries = [each["term"] for each in clause["dis_max"]["queries"]]
    return sum(_saturated(source[field], word) for each in queries for field, word in each.items())


def _saturated(text: str, word: str) -> float:
    words = _terms(text)
    return words[word] / (words[word] + 1.2 * (0.25 + 0.75 * words.total() / 20))


@cache
def _terms(text: str) -> Counter[str]:
    return Counter(ENGLISH([text]).words(0))


@contextmanager
def stand_in() -> Iterator[OpenSearchStandIn]:
    """The stand-in on a free port of loopback, until this ends."""
    holder: list[OpenSearchStandIn] = []

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            path, _, query = self.path.partition("?")
            size = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            allowed = re.fullmatch(r"Basic cmVhZGVyOmh1c2g=", self.headers.get("authorization", ""))
            status, answer = (
                holder[0].answer(self.command, path, query, body) if allowed else (401, {"status": 401})
            )
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json; charset=UTF-8")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _handle

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    holder.append(OpenSearchStandIn(server.server_port))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield holder[0]
    finally:
        server.shutdown()
        server.server_close()
