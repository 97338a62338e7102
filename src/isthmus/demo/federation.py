"""The four silos as a federation of separate processes, set up and used like any other.

    create     as by `isthmus new`, with the silos' documents as sources
    start      four nodes and a broker, which queries them over HTTPS
    judge      the links of train and validation queries, imported through the broker
    learn      as by `isthmus learn`: sums over the silos, under masks
    measure    test queries, which nobody judged, searched before and after

Everything goes through the broker, with an administrator's key.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import isthmus
from isthmus.corpora import load
from isthmus.errors import ConfigError, ServiceError
from isthmus.evaluation import evaluate
from isthmus.partition import linked_queries
from isthmus.report import Progress, progress
from isthmus.tables import Corpus, Qrels, Run, write_corpus_beir, write_whole

if TYPE_CHECKING:
    from isthmus.service import Answer, Client, Federation, LearnedVersion, NamedJudgement

HITS = 10
QUERIES = (
    "Compute the eigenvalues of a general matrix",
    "Return evenly spaced numbers over a specified interval",
    "Compute the roots of a polynomial",
)
"""Example queries: judged ones with relevant documents in three silos."""
NOBODYS = "parking garage opening hours"
"""A query about a topic that no silo has."""
ABOUT = (
    "Docstrings of NumPy, SciPy and scikit-learn in four silos. A query is the first sentence of a docstring,"
    " without its name. Right is the page it was taken from, and what that page links under See Also."
)
OUTCOME = "outcome.json"
"""File that is written last: a folder without it was not finished."""
DEADLINE_MS, LEARNING_SECONDS, LEAVING_SECONDS = 30_000, 900.0, 30.0
"""Time limits: milliseconds for a measured search, seconds for learning, and seconds for processes of an
earlier start to end."""


@dataclass(frozen=True)
class SearchOutcome:
    """Results seen from outside. Lists of queries and of hits come with their groups of linked queries."""

    documents: dict[str, int]
    """Number of searched documents, by silo."""
    judgements: int
    before: list[float]
    """nDCG@10 of every test query before learning."""
    after: list[float]
    groups: list[int]
    probabilities: list[float]
    """Probability of every hit shown after learning."""
    right: list[bool]
    hit_groups: list[int]
    single: list[list[float]]
    """(probability, 1 if right) of every hit shown when a single silo was searched."""
    learned: dict[str, Any]
    """The learned version, as printed by `isthmus learn --list --json`."""
    departures: list[dict[str, Any]]
    """Releases by the silos' ledgers: silo, kind, guarantee and number of items."""
    nobodys: dict[str, Any]
    """Answer to the query that no silo covers: query, highest probability, number of hits, unlike."""


MADE = (
    "Every silo becomes a node with its own certificate, index and ledger, behind a broker. The silos are"
    " searched, told what people found right for other queries, left to learn together, and searched again."
)


@contextmanager
def searched(
    out: Path, *, port: int | None = None, tell: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Federation, SearchOutcome]]:
    """Yield the federation in `out`, running, and its results; create it unless it is there and current.

    A federation is current if code and collection are the same. `tell` is called with every stage, or with
    the time at which an existing federation was measured.
    """
    from isthmus.service import run_federation

    world, folder = load("pydocs"), out / "federation"
    stamp = _stamp(world)
    outcome = read_outcome(folder, stamp, port, len(world.silos))
    if outcome is not None:
        tell(f"The federation of {outcome.learned['learned']} is started again; this was measured then.")
        with run_federation(folder) as federation:
            yield federation, outcome
        return
    tell(MADE)
    create(world, folder, port=port)
    with run_federation(folder) as federation:
        outcome = _lived(world, federation)
        write_whole(folder / OUTCOME, json.dumps({"stamp": stamp, **asdict(outcome)}).encode())
        yield federation, outcome


def read_outcome(folder: Path, stamp: str, port: int | None, silos: int) -> SearchOutcome | None:
    """Read the results of a federation that can be started again; None if it must be created anew."""
    from isthmus.service import listen_problem, read_broker

    try:
        saved = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
        first = read_broker(folder / "broker.toml").port
        if saved.pop("stamp") != stamp or port not in (None, first):
            return None
        outcome = SearchOutcome(**saved)
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    return None if any(map(listen_problem, range(first, first + silos + 1))) else outcome


def _stamp(world: Corpus) -> str:
    """Return a digest of the collection and of all code: a federation made from others is created anew."""
    digest = hashlib.sha256(isthmus.__version__.encode())
    for text in (*world.documents.ids, *world.documents.bodies, *world.queries.texts):
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    for path in sorted(Path(isthmus.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def create(world: Corpus, folder: Path, *, port: int | None = None) -> None:
    """Create a federation of the collection's silos with their documents, in place of an earlier one."""
    from isthmus.service import PageText, Source, create_federation, free_ports

    _remove(folder)
    first = free_ports(len(world.silos) + 1, port)
    sources = dict.fromkeys(world.silos, (Source("beir", Path("documents")),))
    create_federation(folder, world.silos, port=first, sources=sources, page=PageText(ABOUT, QUERIES))
    for silo in world.silos:
        write_corpus_beir(world.silo(silo), folder / silo / "documents")


def _remove(folder: Path) -> None:
    """Delete a folder, repeatedly: processes of a start that was killed may still write while they end."""
    until = time.monotonic() + LEAVING_SECONDS
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _lived(world: Corpus, federation: Federation) -> SearchOutcome:
    """Judge, learn and measure."""
    test = world.split("test")
    relevant = relevant_of(world)
    texts = dict(zip(test.queries.ids, test.queries.texts, strict=True))
    judgements = judgements_of(world, "train", "validation")
    with federation.client() as broker:
        before = _ndcg(_answers(broker, texts, "searching before"), relevant)
        _imported(broker, judgements)
        learned = _learned(broker, federation)
        answers = _answers(broker, texts, "searching after")
        in_turn = _answers(broker, texts, "searching one silo", in_turn=world.silos)
        silos = [silo for silo in broker.silos().silos if silo.release is not None and silo.ready is not None]
        nobodys = broker.search(NOBODYS, deadline_ms=DEADLINE_MS)
    group_of = dict(zip(world.queries.ids, linked_queries(world).tolist(), strict=True))
    hits = [(query, hit) for query, answer in answers.items() for hit in answer.hits]
    return SearchOutcome(
        documents={silo.silo: silo.ready.documents for silo in silos if silo.ready is not None},
        judgements=len(judgements),
        before=before,
        after=_ndcg(answers, relevant),
        groups=[group_of[query] for query in answers],
        probabilities=[hit.probability or 0.0 for _, hit in hits],
        right=[hit.document in relevant[query] for query, hit in hits],
        hit_groups=[group_of[query] for query, _ in hits],
        single=[
            [hit.probability or 0.0, float(hit.document in relevant[query])]
            for query, answer in in_turn.items()
            for hit in answer.hits
        ],
        learned=learned.model_dump(),
        departures=[
            {"silo": silo.silo, "kind": each.kind, "guarantee": each.guarantee, "items": each.items}
            for silo in silos
            for each in (silo.release.departures if silo.release is not None else ())
        ],
        nobodys={
            "query": NOBODYS,
            "probability": max((hit.probability or 0.0 for hit in nobodys.hits), default=0.0),
            "hits": len(nobodys.hits),
            "unlike": nobodys.unlike,
        },
    )


def relevant_of(world: Corpus) -> dict[str, frozenset[str]]:
    """Return, by query, the page from which it was taken and the pages linked there."""
    own = dict(zip(world.queries.ids, map(str, world.queries.own or ()), strict=True))
    linked = world.qrels.to_dict()
    return {
        query: frozenset([own[query], *(name for name, grade in linked.get(query, {}).items() if grade > 0)])
        for query in world.queries.ids
    }


def judgements_of(world: Corpus, *splits: str) -> list[NamedJudgement]:
    """Return the relevant documents of the queries in these splits, as judgements by people."""
    from isthmus.service import NamedJudgement

    relevant = relevant_of(world)
    queries = zip(world.queries.ids, world.queries.texts, world.queries.splits, strict=True)
    return [
        NamedJudgement(query=text, document=document, relevant=True)
        for query, text, split in queries
        if split in splits
        for document in sorted(relevant[query])
    ]


def _answers(
    broker: Client, texts: Mapping[str, str], label: str, *, in_turn: Sequence[str] = ()
) -> dict[str, Answer]:
    """Search every query in all silos, or in one of those in turn. Raises ServiceError unless all silos
    searched answered with the same model."""
    answers = {}
    for number, (query, text) in enumerate(progress(texts.items(), total=len(texts), label=label)):
        silos = [in_turn[number % len(in_turn)]] if in_turn else None
        answer = broker.search(text, k=HITS, silos=silos, deadline_ms=DEADLINE_MS)
        for silo in answer.silos:
            if silo.status != "answered" or silo.model != answer.model:
                raise ServiceError(f"{silo.silo}: {silo.status} {silo.detail}: nothing can be measured so")
        answers[query] = answer
    return answers


def _ndcg(answers: Mapping[str, Answer], relevant: Mapping[str, frozenset[str]]) -> list[float]:
    """Return the nDCG@10 of every query."""
    qrels = Qrels.from_dict({query: dict.fromkeys(relevant[query], 1) for query in answers})
    lists = {
        query: {hit.document: -float(rank) for rank, hit in enumerate(answer.hits)}
        for query, answer in answers.items()
    }
    values = evaluate(qrels, Run.from_dict(lists), ["nDCG@10"]).per_query("nDCG@10")
    return [values[query] for query in answers]


def _imported(broker: Client, judgements: Sequence[NamedJudgement]) -> None:
    with Progress("judgements", len(judgements)) as bar:
        done = broker.import_judgements(judgements, progress=bar.advance)
    missing = len(done.unknown) + len(done.ambiguous) + len(done.unplaced)
    if missing:
        raise ServiceError(f"{missing} of {len(judgements)} judgements came to no silo: {done.unanswered}")


def _learned(broker: Client, federation: Federation) -> LearnedVersion:
    """Let the silos learn and return the version; ServiceError if a process ends or learning fails."""
    until = time.monotonic() + LEARNING_SECONDS
    with Progress("learning") as bar:

        def look(stage: str) -> None:
            bar.advance(0, note=stage)
            federation.check()
            if time.monotonic() > until:
                raise ServiceError(f"the silos have not learned within {LEARNING_SECONDS:.0f} s")

        version = broker.learn_to_end(progress=look)
    if not version.usable:
        raise ServiceError(f"the silos could not learn together: {version.problem}")
    return version
