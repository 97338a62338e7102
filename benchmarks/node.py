"""A node beside bare tantivy, bm25s and PostgreSQL: indexing, and searches with snippets and features.

    python -m benchmarks.node             40,000 documents, then 200,000
    python -m benchmarks.node 10000       another number
    python -m benchmarks.node million     the limits at a million documents
    python -m benchmarks.node growth      from ten thousand to a million, as docs/sizing.py draws it
    python -m benchmarks.node recall      its first hundred and first ten beside those of an exact index

Documents have 65 words drawn by Zipf's law from 60,000, queries have four, so that queries meet long postings
lists. All times are processor time, PostgreSQL's that of its own process. A node and bare tantivy are
measured in turn and the least of three times counts, since other load only adds to it. Vectors are not
measured.

The engines differ in their work: a node stores every document in SQLite under its id, and counts its terms by
field in rows of its own; node and tantivy both stem, index with positions, and commit to disk after every
20,000 documents. Bare tantivy stores texts, but does not handle repeated ids, changes, fields or crashes
between two stores. Its search returns a hundred hits by its BM25 and ten snippets; a node's search returns
these in the exact order, with the sixteen features of all hundred and every hit's explanation.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._rows import least, limited, row
from isthmus.corpora import load
from isthmus.retrieval import BM25
from isthmus.service.index import Index
from isthmus.service.scoring import Bm25Scorer, Scored
from isthmus.service.searching import Searcher
from isthmus.service.settings import EncoderSettings
from isthmus.service.stores import Draft, SqliteStore
from isthmus.service.wire import Search
from isthmus.tables import Documents, Queries, Run

DOCUMENTS, MANY, WORDS, LENGTH = 40_000, 200_000, 60_000, 65
QUERIES, DEPTH, SHOWN, ROUNDS = 300, 100, 10, 3
INDEXING, SEARCHING = 1 / 2, 1 / 2.5
"""Goals as ratios: at most twice tantivy's time for indexing, two and a half times for a search."""
MILLION, SECONDS, P99_MS, GIGABYTES, OPEN_SECONDS = 1_000_000, 600.0, 60.0, 1.5, 2.0
"""Limits: processor time of two cores in five minutes; a search (ms); memory (GB); opening again (s)."""
GROWTH = (10_000, 30_000, 100_000, 300_000, 1_000_000)
NO_VECTORS = EncoderSettings("none")
COLLECTIONS = ("cran", "npl", "cisi", "pydocs")
RECALL, SAME, APART = 0.999, 0.999, 1e-6
"""Goals: share of an exact index's first 100; share of queries with the same first 10; gap in scores."""


def main(*counts: int) -> list[dict[str, Any]]:
    """Run this benchmark for each number of documents and return its rows."""
    return [row for count in counts or (DOCUMENTS, MANY) for row in beside_peers(count)]


def beside_peers(count: int) -> list[dict[str, Any]]:
    """Measure the costs of a node with `count` documents beside those of its peers."""
    (ours, bare), rows = _in_turns(("ours", "tantivy"), count), []
    goals = {"index": INDEXING, "search": SEARCHING}
    units = {"index": "s", "search": "ms"}
    names = {"index": "indexing", "search": f"a search for {DEPTH}, {SHOWN} snippets, features"}
    for peer, wanted in (("tantivy", goals), ("bm25s", {}), ("PostgreSQL", {})):
        theirs = bare if peer == "tantivy" else _apart(peer, count)
        rows += [
            row(
                f"node: {names[what]}, {count:,} documents ({units[what]} of processor time)",
                ours[what],
                theirs[what],
                peer,
                goal=wanted.get(what, 0),
            )
            for what in goals
            if theirs
        ]
    title = f"node: opening {count:,} documents again (s)"
    return [*rows, limited(title, ours["open"], OPEN_SECONDS)]


def million(count: int = MILLION) -> list[dict[str, Any]]:
    """Measure a node with a million documents against the limits."""
    ours = _apart("ours", count)
    limits = {
        "index": ("indexing (s of processor time)", SECONDS),
        "p99": ("a search, the 99th of 100 (ms of processor time)", P99_MS),
        "memory": ("memory while indexing, at most (GB)", GIGABYTES),
        "open": ("opening again (s)", OPEN_SECONDS),
    }
    return [
        limited(f"node: {count:,} documents: {name}", ours[what], limit)
        for what, (name, limit) in limits.items()
    ]


def growth() -> dict[str, dict[str, dict[str, float]]]:
    """Return the costs of a node and of bare tantivy, by number of documents, ten thousand to a million."""
    costs: dict[str, dict[str, dict[str, float]]] = {"node": {}, "tantivy": {}}
    for size in GROWTH:
        for name, who in (("node", "ours"), ("tantivy", "tantivy")):
            costs[name][str(size)] = _apart(who, size)
            print(f"{name} {size:>9,}", costs[name][str(size)], file=sys.stderr, flush=True)
    return costs


def recall() -> list[dict[str, Any]]:
    """Measure how many of an exact index's hits a node returns, on collections and on texts by Zipf's law."""
    rows = []
    for name in COLLECTIONS:
        corpus = load(name)
        rows += _recalled(name, corpus.documents, corpus.queries.texts)
    drafts, texts = list(_documents(DOCUMENTS)), tuple(zipf_texts(QUERIES, 4, 1))
    ids, titles, bodies = zip(*((each.id, each.title, each.body) for each in drafts), strict=True)
    zipf = Documents(ids, titles, bodies, np.zeros(len(ids), dtype=np.int64))
    return rows + _recalled(f"{len(ids):,} by Zipf's law", zipf, texts)


def _recalled(name: str, documents: Documents, texts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rows of one collection; queries for which an exact index has no hit are left out."""
    ids = tuple(map(str, range(len(texts))))
    queries = Queries(ids, texts, np.zeros(len(ids), dtype=np.int64), ("test",) * len(ids))
    exact = BM25().index(documents).search(queries, DEPTH)
    shares, same, apart = [], [], 0.0
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        store = SqliteStore(Path(folder) / "documents.db")
        store.put(map(Draft, documents.ids, documents.titles, documents.bodies))
        index = Index(Path(folder) / "index", store, encoder=NO_VECTORS)
        index.catch_up()
        for at, text in enumerate(texts):
            wanted, hits = _of_query(exact, ids[at]), _hits(index, text)
            if wanted:
                shares.append(len(wanted.keys() & hits.keys()) / len(wanted))
                same.append(list(wanted)[:SHOWN] == list(hits)[:SHOWN])
                apart = max([apart, *(abs(wanted[id] - hits[id]) for id in wanted.keys() & hits.keys())])
        index.close()
        store.close()
    title = f"node: {name}, {len(same)} queries:"
    return [
        least(f"{title} recall of an exact index's first {DEPTH}", float(np.mean(shares)), RECALL),
        least(f"{title} with the same first {SHOWN}", float(np.mean(same)), SAME),
        limited(f"{title} largest difference of scores", max(apart, 1e-16), APART),
    ]


def _of_query(run: Run, query: str) -> dict[str, float]:
    """Return the scores of a query's documents by id, best first."""
    if query not in run.queries:
        return {}
    at = run.queries.index(query)
    rows = slice(run.offsets[at], run.offsets[at + 1])
    return dict(zip(run.documents[rows].tolist(), run.scores[rows].tolist(), strict=True))


def _hits(index: Index, text: str) -> dict[str, float]:
    """Return a node's scores for a query by document id, best first."""
    candidates = index.snapshot.find(text, DEPTH)
    order = Bm25Scorer().score(index.snapshot, candidates).order.tolist()
    return {candidates.documents[at]: float(candidates.scores["bm25"][at]) for at in order}


def _apart(who: str, count: int) -> dict[str, float]:
    """Measure one engine in a process of its own, which gives it memory of its own."""
    command = [sys.executable, "-m", "benchmarks.node", "measure", who, str(count)]
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        done = subprocess.run([*command, folder], stdout=subprocess.PIPE, check=True)
    costs: dict[str, float] = json.loads(done.stdout)
    return costs


def _in_turns(who: Sequence[str], count: int) -> list[dict[str, float]]:
    """Measure engines in turn for a few rounds. Returns the least of each cost."""
    rounds = [[_apart(each, count) for each in who] for _ in range(ROUNDS)]
    return [
        {name: min(costs[name] for costs in of_one) for name in of_one[0]}
        for of_one in zip(*rounds, strict=True)
    ]


def zipf_texts(count: int, length: int, seed: int) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, WORDS + 1) ** 1.05
    ends = np.cumsum(share / share.sum())
    words = np.array([f"{at:05x}x" for at in range(WORDS)])
    for size in [*[10_000] * (count // 10_000), count % 10_000]:
        for found in np.searchsorted(ends, rng.random((size, length))):
            yield " ".join(words[np.minimum(found, WORDS - 1)])


def _documents(count: int) -> Iterator[Draft]:
    for at, text in enumerate(zipf_texts(count, LENGTH, 0)):
        title, _, body = text.partition(" ")
        yield Draft(f"d{at}", title, body)


def _without_texts(count: int, take: Callable[[list[Draft]], None]) -> float:
    """Return the processor seconds that `take` needs for all documents, without those of generating them."""
    spent, batch = 0.0, 20_000
    source = _documents(count)
    while drafts := [draft for draft, _ in zip(source, range(batch), strict=False)]:
        began = time.process_time()
        take(drafts)
        spent += time.process_time() - began
    return spent


def _searches(search: Callable[[str], object]) -> list[float]:
    """Return the processor milliseconds of every search, after warming up."""
    texts = list(zipf_texts(QUERIES, 4, 1))
    for text in texts[:50]:
        search(text)
    times = []
    for text in texts:
        began = time.process_time()
        search(text)
        times.append((time.process_time() - began) * 1000)
    return times


class Featured(Bm25Scorer):
    """Scores by BM25, but first computes all features of every candidate."""

    def score(self, snapshot: Any, candidates: Any) -> Scored:
        """Compute the candidates' features, then score them by BM25."""
        snapshot.features(candidates)
        return super().score(snapshot, candidates)


def ours(count: int, folder: Path) -> dict[str, float]:
    """Measure a node's store, index and searcher."""
    store = SqliteStore(folder / "documents.db")
    index = Index(folder / "index", store, encoder=NO_VECTORS)

    def take(drafts: list[Draft]) -> None:
        store.put(drafts)
        index.catch_up()

    spent = _without_texts(count, take)
    began = time.process_time()
    index.close()
    spent += time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    openings = []
    for _ in range(ROUNDS):
        index.close()
        began = time.perf_counter(), time.process_time()
        index = Index(folder / "index", store, encoder=NO_VECTORS)
        index.snapshot.find("anything", 10)
        openings.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    searcher = Searcher("silo", index, store, Featured(), DEPTH)
    times = _searches(lambda text: searcher.search(Search(query=text, k=SHOWN, explain=True), snippets=True))
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9
    index.close()
    return {
        "index": spent,
        "search": float(np.mean(times)),
        "p99": float(np.quantile(times, 0.99)),
        "open": min(by_clock for by_clock, _ in openings),
        "opening": min(spent for _, spent in openings),
        "memory": memory,
        "disk": disk,
    }


def bare_tantivy(count: int, folder: Path) -> dict[str, float]:
    """Measure tantivy as in its documentation: stored text, its English stemmer, positions, its snippets."""
    import tantivy

    builder = tantivy.SchemaBuilder()
    builder.add_text_field("id", stored=True, tokenizer_name="raw")
    for name in ("title", "body"):
        builder.add_text_field(name, stored=True, tokenizer_name="en_stem")
    schema = builder.build()
    index = tantivy.Index(schema, path=str(folder))
    writer = index.writer(128_000_000, 1)

    def take(drafts: list[Draft]) -> None:
        for draft in drafts:
            writer.add_document(tantivy.Document(id=draft.id, title=draft.title, body=draft.body))
        writer.commit()

    spent = _without_texts(count, take)
    began = time.process_time()
    writer.wait_merging_threads()
    spent += time.process_time() - began
    index.reload()
    searcher = index.searcher()

    def search(text: str) -> None:
        query = index.parse_query(text, ["title", "body"])
        hits = searcher.search(query, DEPTH).hits
        snippets = tantivy.SnippetGenerator.create(searcher, query, schema, "body")
        for _, address in hits[:SHOWN]:
            document = searcher.doc(address)
            document.get_first("title")
            snippets.snippet_from_doc(document).fragment()

    return {"index": spent, "search": float(np.mean(_searches(search)))}


def bm25s_in_memory(count: int, folder: Path) -> dict[str, float]:
    """Measure bm25s with its own tokeniser and PyStemmer: it scores every document and stores no texts.

    Its index cannot be changed afterwards.
    """
    import bm25s
    from Stemmer import Stemmer

    texts = [f"{draft.title} {draft.body}" for draft in _documents(count)]
    stemmer = Stemmer("english")
    began = time.process_time()
    scorer = bm25s.BM25()
    scorer.index(bm25s.tokenize(texts, stemmer=stemmer, show_progress=False), show_progress=False)
    spent = time.process_time() - began

    def search(text: str) -> None:
        tokens = bm25s.tokenize(text, stemmer=stemmer, show_progress=False)
        scorer.retrieve(tokens, k=DEPTH, show_progress=False)

    return {"index": spent, "search": float(np.mean(_searches(search)))}


def postgres(count: int, folder: Path) -> dict[str, float]:
    """Measure PostgreSQL's full-text search with a GIN index, ranks and headlines; empty without a server."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        print("· no PostgreSQL server here", file=sys.stderr)
        return {}
    import psycopg

    with _server(programs[-1].parent) as address, psycopg.connect(address, autocommit=True) as db:
        db.execute("CREATE TABLE d (id TEXT PRIMARY KEY, title TEXT, body TEXT, words TSVECTOR)")
        ((backend,),) = db.execute("SELECT pg_backend_pid()").fetchall()
        began = _spent_by(backend)
        with db.cursor() as cursor:
            statement = "INSERT INTO d VALUES (%s, %s, %s, to_tsvector('english', %s))"
            for draft in _documents(count):
                cursor.execute(statement, (draft.id, draft.title, draft.body, f"{draft.title} {draft.body}"))
        db.execute("CREATE INDEX ON d USING gin (words)")
        spent = _spent_by(backend) - began
        began = _spent_by(backend)
        texts = list(zipf_texts(QUERIES // 10, 4, 1))
        for text in texts:
            db.execute(
                """SELECT id, ts_headline('english', body, q) FROM (
                    SELECT id, body, q FROM d, to_tsquery('english', %s) q WHERE words @@ q
                    ORDER BY ts_rank_cd(words, q) DESC LIMIT %s) best LIMIT %s""",
                (" | ".join(text.split()), DEPTH, SHOWN),
            ).fetchall()
        return {"index": spent, "search": (_spent_by(backend) - began) / len(texts) * 1000}


def _spent_by(process: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _server(programs: Path) -> Iterator[str]:
    """Start a PostgreSQL server for this benchmark on a Unix socket. Yields its connection string."""
    with tempfile.TemporaryDirectory(prefix="isthmus-pg-") as name:
        owner: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            from pwd import getpwnam

            account = getpwnam("postgres")
            os.chown(name, account.pw_uid, account.pw_gid)
            owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        data, options = (
            f"{name}/data",
            f"-c listen_addresses='' -c unix_socket_directories={name} -c fsync=off",
        )

        def run(*command: str) -> None:
            subprocess.run(command, check=True, cwd=name, stdout=subprocess.DEVNULL, **owner)

        run(str(programs / "initdb"), "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "-N")
        run(str(programs / "pg_ctl"), "-D", data, "-w", "-l", f"{name}/log", "-o", options, "start")
        try:
            yield f"host={name} user=postgres dbname=postgres"
        finally:
            run(str(programs / "pg_ctl"), "-D", data, "-m", "immediate", "stop")


MEASURED = {"ours": ours, "tantivy": bare_tantivy, "bm25s": bm25s_in_memory, "PostgreSQL": postgres}

if __name__ == "__main__":
    what, *rest = sys.argv[1:] or [""]
    if what == "measure":
        print(json.dumps(MEASURED[rest[0]](int(rest[1]), Path(rest[2]))))
    elif what == "growth":
        print(json.dumps(growth(), indent=1))
    else:
        for each in {"million": million, "recall": recall}.get(what, lambda: main(*map(int, what.split())))():
            print(each)
