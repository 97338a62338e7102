"""A small search server of its own: words of documents, scores that mean nothing, in several dialects."""

from __future__ import annotations

import json
import math
import random
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TOPICS = ("tide", "lamp", "apple", "bridge", "ferry", "gravel", "harbour", "iron")
QUERIES = [f"{topic} {word}" for topic in TOPICS for word in ("power", "works", "history")]


def documents(count=400, seed=1):
    """Titles and texts; about a topic if its word stands in the title."""
    draw = random.Random(seed)
    rows = []
    for at in range(count):
        topic = TOPICS[at % len(TOPICS)]
        words = draw.choices([*TOPICS, "power", "works", "history", "paper", "note"], k=12)
        titled = topic if draw.random() < 0.6 else draw.choice(TOPICS)
        rows.append({"id": f"d{at}", "title": f"{titled} {at}", "body": " ".join(words)})
    return rows


def is_right(query, row):
    return query.split()[0] in row["title"]


class Search:
    """Documents, and how many requests came."""

    def __init__(self):
        self.rows, self.requests, self.headers = documents(), [], []

    def find(self, query, k=10):
        wanted = query.lower().split()
        scored = []
        for row in self.rows:
            words = row["body"].split()
            score = sum(math.log1p(words.count(word)) for word in wanted)
            score += 0.9 * sum(word in row["title"] for word in wanted)
            if score:
                noise = random.Random(f"{query} {row['id']}").random()
                scored.append((round(7 * score + 6 * noise, 4), row))
        scored.sort(key=lambda each: -each[0])
        return scored[:k]


DIALECTS = {
    "/search": lambda hits: {"took": 3, "results": [{"score": s, **row} for s, row in hits]},
    "/papers/_search": lambda hits: {
        "hits": {
            "total": {"value": len(hits)},
            "hits": [{"_id": row["id"], "_score": s, "_source": row} for s, row in hits],
        }
    },
    "/collections/p/documents/search": lambda hits: {
        "found": len(hits),
        "hits": [{"document": row, "text_match": s, "highlights": []} for s, row in hits],
    },
    "/indexes/p/search": lambda hits: {"hits": [{"_rankingScore": s / 100, **row} for s, row in hits]},
    "/collections/p/points/query": lambda hits: {
        "result": {"points": [{"id": int(row["id"][1:]), "score": s, "payload": row} for s, row in hits]}
    },
    "/distances": lambda hits: [{"id": row["id"], "score": -s, "title": row["title"]} for s, row in hits],
    "/unscored": lambda hits: {"results": [row for _, row in hits]},
}


@contextmanager
def searching(fail=None):
    """A server on loopback: its address, and what it has. `fail(path)` may answer instead: status, headers
    and body."""
    search = Search()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words):
            pass

        def answer(self, status, headers, body):
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.respond(b"")

        def do_POST(self):
            self.respond(self.rfile.read(int(self.headers.get("content-length", 0))))

        def respond(self, body):
            parts = urlsplit(self.path)
            search.requests.append((self.command, self.path, body))
            search.headers.append(dict(self.headers.items()))
            failure = fail(parts.path) if fail else None
            if failure is not None:
                return self.answer(*failure)
            asked = parse_qs(parts.query)
            query = asked.get("q", [""])[0]
            if body:
                sent = json.loads(body)
                query = sent.get("q") or sent.get("query", query)
                while isinstance(query, dict):
                    query = next(iter(query.values()))
            if parts.path not in DIALECTS:
                return self.answer(404, {"content-type": "application/json"}, b"{}")
            k = int(asked.get("k", ["10"])[0])
            content = json.dumps(DIALECTS[parts.path](search.find(query, k))).encode()
            return self.answer(200, {"content-type": "application/json"}, content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", search
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
