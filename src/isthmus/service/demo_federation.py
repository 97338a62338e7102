"""A federation on a judged collection: created, filled, trained and calibrated, ready to be started.

What takes a federation its first months happens here within a minute, by the product's own steps:

    found       configuration, certificates and keys, as `isthmus new` writes them
    index       every silo reads its documents; the silos' statistics are summed and handed back
    judge       what people would say of the hits for train and validation queries, kept by their silo
    train       one ranker on the rows of all silos; only the sum of their models leaves them
    calibrate   from scores to probabilities: from sums over all silos' hits, drawn to each silo's own
    measure     how honest the probabilities are that the nodes give for the part test

Silos work side by side, each in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus import __version__
from isthmus.arrays import FloatArray, IntArray
from isthmus.asking import Silos
from isthmus.calibration import LabelledScores, Platt, save_calibrator
from isthmus.errors import ConfigError
from isthmus.federation import MODEL, Config, Training, train
from isthmus.report import Progress
from isthmus.retrieval import Statistics, summed
from isthmus.service.broker import merge_hits
from isthmus.service.connections import listen_problem
from isthmus.service.node import Node, open_store
from isthmus.service.reliability import SHOWN, reliability_curve, save_curves
from isthmus.service.scaffold import BROKER, create_federation
from isthmus.service.settings import read_broker, read_node
from isthmus.service.sources import load_all
from isthmus.service.stores import Judgement
from isthmus.service.training import NAMES
from isthmus.service.wire import Hit, ReliabilityCurve, Search
from isthmus.tables import Corpus, Fold, Letor, write_corpus_beir
from isthmus.workers import hired

T = TypeVar("T")

CANDIDATES = 25
"""Documents that each retriever of a silo proposes for a judged query."""
SHOWN_HITS = 10
SHRINKAGE = 200.0
"""Right hits of a silo at which its own calibrator counts as much as that of all silos. They come by the
query, and by the family of linked documents, so that they tell less than as many independent ones."""
ROUNDS = 20
CALIBRATOR, RELIABILITY, TRAINING = "calibrator", "reliability.json", "training"
STAGED = "staged.json"
"""Written last: a folder without it was not finished."""


@dataclass(frozen=True)
class Staged:
    """A federation on disk, before its processes are started."""

    folder: Path
    judgements: int
    training: Training
    curves: tuple[ReliabilityCurve, ...]


Proposed = tuple[IntArray, NDArray[np.str_], NDArray[np.float32], FloatArray]
"""A silo's candidates row by row: query by number, document, features, BM25 with all silos' statistics."""


def is_staged(folder: Path, world: Corpus, seed: int, port: int | None) -> bool:
    """Whether the folder has this federation, staged by this code and seed, at ports that are free."""
    try:
        stamp = json.loads((folder / STAGED).read_text(encoding="utf-8"))
        settings = read_broker(folder / "broker.toml")
    except (OSError, ValueError, ConfigError):
        return False
    return (
        stamp == _stamp(world, seed)
        and port in (None, settings.port)
        and not any(map(listen_problem, range(settings.port, settings.port + len(world.silos) + 1)))
    )


def _stamp(world: Corpus, seed: int) -> dict[str, object]:
    """What a staged federation depends on: the collection, the seed, and the code of the service."""
    digest = hashlib.sha256()
    for text in (*world.documents.ids, *world.documents.bodies, *world.queries.texts):
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return {"isthmus": __version__, "seed": seed, "silos": list(world.silos), "sha256": digest.hexdigest()}


def stage(world: Corpus, folder: Path, *, port: int, seed: int = 0, workers: int = 2) -> Staged:
    """Make a federation of the world's silos in a new folder, its broker at the port."""
    create_federation(folder, world.silos, port=port)
    for silo in world.silos:
        _fill(folder / silo, world.silo(silo))
    pool = _hired(workers)
    try:
        with Progress("preparing the silos", 3 * len(world.silos)) as bar:
            silos = _Silos(world, folder, pool, bar.advance)
            rows = silos.proposed()
            judged = _judge(world, folder, rows)
            config = Config.of_sites(world.name, len(world.silos), rounds=ROUNDS, seed=seed)
            training = train(config, _fold(world, rows), out=folder / TRAINING)
            _name_silos(world, folder / TRAINING / NAMES)
            _calibrate(world, folder, rows, training)
            curves = silos.measured()
    finally:
        pool.shutdown(cancel_futures=True)
    (folder / STAGED).write_text(json.dumps(_stamp(world, seed)), encoding="utf-8")
    return Staged(folder, judged, training, curves)


def _fill(own: Path, part: Corpus) -> None:
    """Write the silo's documents in place of the example, and name them in its configuration."""
    (own / "documents" / "example.md").unlink()
    write_corpus_beir(part, own / "documents")
    _edit(own / "silo.toml", {'{ kind = "folder", ': '{ kind = "beir", '})


def _edit(file: Path, changes: Mapping[str, str]) -> None:
    """Change a configuration file as its operator would; what is not there cannot be changed."""
    text = file.read_text(encoding="utf-8")
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ConfigError(f"{file.name} has no line {old!r} to change", value=old)
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


# what silos do, in processes of their own


def _hired(workers: int) -> ProcessPoolExecutor:
    """Processes to work in; an interrupt at the terminal is for us alone, who then end them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which they inherit
    try:
        pool = hired(workers)
        pool.submit(os.getpid)  # they start now
        return pool
    finally:
        signal.signal(signal.SIGINT, before)


def _node(own: Path) -> Node:
    return Node(read_node(own / "silo.toml"))


def _index(own: Path) -> bytes:
    """Read and index the silo's documents; its statistics, as they may leave it."""
    node = _node(own)
    with node.offline():
        load_all(node.settings.sources, node.store, _raise)
        node.index.catch_up()
        return node.statistics(BROKER)


def _raise(error: Exception) -> None:
    raise error


def _propose(own: Path, total: bytes, texts: Sequence[str], own_documents: Sequence[str | None]) -> Proposed:
    """The silo's candidates for every query but the query's own document, with their features."""
    node = _node(own)
    queries, documents, tables, scores = [], [], [], []
    with node.offline():
        node.share(total)
        snapshot = node.index.snapshot
        for number, (text, itself) in enumerate(zip(texts, own_documents, strict=True)):
            candidates = snapshot.find(text, CANDIDATES)
            names = np.array(candidates.documents, dtype=np.str_)
            mask = names != (itself or "")
            queries.append(np.full(int(mask.sum()), number))
            documents.append(names[mask])
            tables.append(snapshot.features(candidates)[mask].astype(np.float32))
            scores.append(candidates.scores["bm25"][mask])
    join = np.concatenate
    return join(queries), join(documents), join(tables), join(scores)


def _answer(own: Path, texts: Sequence[str], own_documents: Sequence[str | None]) -> list[list[Hit]]:
    """What the silo's node says to every query, reasons and all, without the query's own document."""
    node = _node(own)
    results = []
    with node.offline():
        for text, itself in zip(texts, own_documents, strict=True):
            request = Search(query=text, k=SHOWN_HITS + 1, explain=True)
            answer = node.searcher.search(request, snippets=False)
            results.append([hit for hit in answer.hits if hit.document != itself])
    return results


@dataclass(frozen=True)
class _Silos:
    """The silos' work, one task a silo in a pool of processes."""

    world: Corpus
    folder: Path
    pool: ProcessPoolExecutor
    advance: Callable[[], None]

    def each(self, work: Callable[..., T], *arguments: object) -> list[T]:
        """Run `work(folder, *arguments)` for every silo; the results in the order of silos."""
        tasks = [self.pool.submit(work, self.folder / silo, *arguments) for silo in self.world.silos]
        done = []
        for task in tasks:
            done.append(task.result())
            self.advance()
        return done

    def proposed(self) -> CandidateRows:
        """Candidates of every silo for all queries, scored with the sum of all silos' statistics."""
        total = summed(Statistics.from_bytes(packed) for packed in self.each(_index)).to_bytes()
        queries = self.world.queries
        candidates = self.each(_propose, total, queries.texts, queries.own or (None,) * len(queries))
        return CandidateRows.of(self.world, candidates)

    def measured(self) -> tuple[ReliabilityCurve, ...]:
        """The reliability of what nodes say to test queries, and every silo's share of it in its folder."""
        test = self.world.split("test")
        own = test.queries.own or (None,) * len(test.queries)
        answers = self.each(_answer, test.queries.texts, own)
        outcomes: dict[tuple[str, str], list[tuple[float, bool]]] = {}
        for query, *lists in zip(test.queries.ids, *answers, strict=True):
            right = {name for name, grade in test.qrels[[query]].to_dict()[query].items() if grade > 0}
            for hit in merge_hits((hit for hits in lists for hit in hits), k=SHOWN_HITS, threshold=0.0)[0]:
                named = {SHOWN: hit.probability} | {
                    part.retriever: part.probability for part in hit.explanation or ()
                }
                for retriever, probability in named.items():
                    if probability is not None:
                        outcomes.setdefault((hit.silo, retriever), []).append(
                            (probability, hit.document in right)
                        )
        curves = tuple(
            reliability_curve(*zip(*pairs, strict=True), silo=silo, retriever=retriever)
            for (silo, retriever), pairs in sorted(outcomes.items())
        )
        for silo in self.world.silos:
            save_curves([curve for curve in curves if curve.silo == silo], self.folder / silo / RELIABILITY)
        return curves


# what is learnt of all silos' rows


@dataclass(frozen=True, eq=False)
class CandidateRows:
    """All silos' candidates, query by query; `parts` are the queries' splits."""

    queries: IntArray
    silos: IntArray
    documents: NDArray[np.str_]
    features: NDArray[np.float32]
    scores: FloatArray
    relevant: NDArray[np.bool_]
    parts: NDArray[np.str_]

    @classmethod
    def of(cls, world: Corpus, candidates: Sequence[Proposed]) -> CandidateRows:
        queries, documents, features, scores = (
            np.concatenate(column) for column in zip(*candidates, strict=True)
        )
        silos = np.repeat(np.arange(len(candidates)), [len(each[0]) for each in candidates])
        judged = world.qrels.to_dict()
        grades = [judged.get(query, {}) for query in world.queries.ids]
        pairs = zip(queries.tolist(), documents.tolist(), strict=True)
        relevant = np.array([grades[query].get(document, 0) > 0 for query, document in pairs])
        parts = np.array(world.queries.splits)[queries]
        order = np.argsort(queries, kind="stable")
        columns: tuple[NDArray[Any], ...] = (queries, silos, documents, features, scores, relevant, parts)
        return cls(*(each[order] for each in columns))

    def top_hits(self, scores: FloatArray) -> NDArray[np.bool_]:
        """Which rows are among the hits shown if all silos' candidates are ordered by these scores."""
        order = np.lexsort((self.documents, -scores, self.queries))
        starts = np.searchsorted(self.queries, self.queries)
        mask = np.zeros(len(order), dtype=np.bool_)
        mask[order] = np.arange(len(order)) - starts < SHOWN_HITS
        return mask

    def letor(self, chosen: NDArray[np.bool_], names: Sequence[str]) -> Letor:
        """Rows to learn from; `names[i]` names the list that row i belongs to."""
        picked = np.flatnonzero(chosen)
        return Letor.of(
            [names[row] for row in picked.tolist()],
            self.features[picked],
            self.relevant[picked].astype(np.int32),
            documents=self.documents[picked].tolist(),
        )


def _judge(world: Corpus, folder: Path, rows: CandidateRows) -> int:
    """Store judgements of the ten best hits of each query, and of all relevant rows, in their silos."""
    chosen = (rows.top_hits(rows.scores) | rows.relevant) & (rows.parts != "test")
    now = time.time()
    for at, silo in enumerate(world.silos):
        mine = np.flatnonzero(chosen & (rows.silos == at)).tolist()
        store = open_store(read_node(folder / silo / "silo.toml"))
        judged_rows = (
            (world.queries.texts[rows.queries[row]], str(rows.documents[row]), bool(rows.relevant[row]))
            for row in mine
        )
        store.judge(*(Judgement(*fields, peer=BROKER, at=now) for fields in judged_rows))
        store.close()
    return int(chosen.sum())


def _fold(world: Corpus, rows: CandidateRows) -> Fold:
    """Training rows stay with the silo of their document; lists to watch are of all silos together."""
    ids = world.queries.ids
    apart = [
        f"{world.silos[silo]}/{ids[query]}"
        for query, silo in zip(rows.queries.tolist(), rows.silos.tolist(), strict=True)
    ]
    whole = [ids[query] for query in rows.queries.tolist()]
    train, validation, test = (rows.parts == part for part in ("train", "validation", "test"))
    return Fold(world.name, rows.letor(train, apart), rows.letor(validation, whole), rows.letor(test, whole))


def _name_silos(world: Corpus, file: Path) -> None:
    """The run dealt sites to silos in the order of their names."""
    names = {f"silo-{at}": name for at, name in enumerate(sorted(world.silos))}
    file.write_text(json.dumps(names), encoding="utf-8")


def _calibrate(world: Corpus, folder: Path, rows: CandidateRows, training: Training) -> None:
    """Every silo's calibrator, from hits shown for validation queries; then the configuration has all."""
    watched = rows.parts == "validation"
    scores = np.zeros(len(watched))
    whole = rows.letor(watched, [str(query) for query in rows.queries.tolist()])
    scores[watched] = training.ranker.score(whole)
    top = rows.top_hits(scores) & watched
    mine = [top & (rows.silos == at) for at in range(len(world.silos))]
    pairs = [LabelledScores(scores[each], rows.relevant[each].astype(np.float64)) for each in mine]
    silos = Silos.in_memory(dict(zip(world.silos, (own.answer for own in pairs), strict=True)))
    pooled = Platt().fit_sums(silos.sum)
    for silo, own in zip(world.silos, pairs, strict=True):
        save_calibrator(pooled.shrunk(own, shrinkage=SHRINKAGE), folder / silo / CALIBRATOR)
        (folder / silo / MODEL).write_bytes((folder / TRAINING / MODEL).read_bytes())
        _edit(folder / silo / "silo.toml", {f"# {line}": line for line in _MODELS})
    _edit(folder / "broker.toml", {'# training = "runs/first"  ': f'training = "{TRAINING}"  '})


_MODELS = (
    "[models]\n",
    f'ranker = "{MODEL}"\n',
    f'calibrator = "{CALIBRATOR}"\n',
    f'reliability = "{RELIABILITY}"\n',
)
