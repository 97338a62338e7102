"""`isthmus attach`: inspect a running engine, propose a silo's settings for it, and determine its level.

    1. list tables, collections or indexes, and fields that may be id, title and body
    2. sample documents: their language, and whether the engine finds each by the terms of our analysis
    3. if the encoder of its vectors is named, check that it gives those documents the vectors they have
    4. try a query made from one of them

Level *full* needs an engine that counts terms and finds the sampled documents by at least a share of
`AGREEING` of their terms; everything else is *scores*.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from isthmus.encoders import Vectors
from isthmus.engines import (
    STOP,
    Constraints,
    CountedEngine,
    RemoteDocument,
    RemoteEngine,
    RemoteProblem,
    RemoteSource,
    VectorEngine,
    vector_of,
    well_formed,
)
from isthmus.errors import ConfigError, several
from isthmus.languages import DEFAULT, NAMES, detect, tokeniser_of, usual
from isthmus.service.attached import remote_of
from isthmus.service.encoding import NoQueries, QueryEncoder, ready_encoder
from isthmus.service.settings import EncoderSettings, EngineSettings

SAMPLED, READ = 50, 2_000
"""Number of documents in the sample that determines the level, and number of documents it is chosen from."""
AGREEING = 0.9
"""Least share of their terms by which an engine must find the sampled documents for level *full*."""
TITLES = ("title", "name", "headline", "subject", "heading", "caption", "label")
BODIES = (
    "body",
    "text",
    "content",
    "contents",
    "description",
    "abstract",
    "article",
    "message",
    "document",
    "page",
)
IDS = ("id", "_id", "docid", "doc_id", "uuid", "key", "slug")
ENCODED, ALIKE = 16, 0.9
"""Number of documents on which an encoder is tried, and least median cosine to their stored vectors."""
WORDS = 8
"""Most words of the trial query."""


@dataclass(frozen=True)
class Inspected:
    """The result of an inspection, and the settings that follow from it."""

    settings: EngineSettings
    noun: str
    documents: int
    reasons: tuple[str, ...]
    """Reasons for the level, and further remarks for the operator."""
    query: str = ""
    hits: tuple[str, ...] = ()
    milliseconds: float = 0.0
    others: tuple[str, ...] = field(default=())
    """Further sources of the server."""


@dataclass(frozen=True)
class _Wish:
    """The highest level that is wanted, and the encoder of the engine's vectors."""

    level: str = ""
    encoder: str = ""


def inspect_engine(wanted: EngineSettings, level: str = "", encoder: str = "") -> Inspected:
    """Inspect a server and propose the settings that `wanted` leaves empty. `level` is the highest level that
    is wanted, `encoder` the one that made the engine's vectors."""
    with closing(remote_of(wanted)) as remote, well_formed(remote.noun):
        sources = remote.sources()
        source = _chosen(sources, wanted.source, remote.noun)
        proposed = _fields(wanted, source)
    with closing(remote_of(proposed)) as remote, well_formed(remote.noun):
        sample = _sampled(remote)
        others = tuple(each.name for each in sources if each.name != source.name)
        _check_filters(remote, sample)
        if proposed.allow_field:
            remote.check_rules()
        settings = replace(proposed, language=_language(sample))
        return _proved(remote, settings, source, sample, _Wish(level, encoder), others)


def _chosen(sources: Sequence[RemoteSource], name: str, noun: str) -> RemoteSource:
    """Return the source with this name, or the largest if no name is given."""
    named = {each.name: each for each in sources}
    if not sources:
        raise ConfigError(f"{noun} has nothing with a text that these credentials may read", key="--source")
    if name and name not in named:
        raise ConfigError(f"{noun} has no {name}", key=name, value=name, known=named)
    return named[name] if name else max(sources, key=lambda each: each.documents)


def _fields(wanted: EngineSettings, source: RemoteSource) -> EngineSettings:
    """Choose the fields for id, title and body by their kinds and names. Fields that `wanted` names must
    exist, else a ConfigError is raised."""
    for option in ("id", "title", "body", "type", "date", "allow_field"):
        name, key = getattr(wanted, option), f"--{option.replace('_', '-')}"
        if name and name not in source.fields:
            raise ConfigError(f"{source.name} has no field {name}", key=key, known=source.fields)
    kinds = source.fields
    ids = [name for name, kind in kinds.items() if kind == "id"]
    id = wanted.id or _named(IDS, ids) or (ids[0] if ids else "")
    texts = [name for name, kind in kinds.items() if kind in ("text", "id") and name != id]
    if not id:
        raise ConfigError(f"{source.name} has no unique key", key="--id", expected="the field that is one")
    title = wanted.title or _named(TITLES, [name for name in texts if name != wanted.body])
    bodies = [name for name in texts if name != title]
    body = wanted.body or _named(BODIES, bodies) or (bodies[0] if bodies else title)
    if not body:
        raise ConfigError(f"{source.name} has no text", key="--body", expected="the field with the text")
    title = "" if title == body else title
    searched = wanted.search_by or next((name for name, kind in kinds.items() if kind == "search"), "")
    return replace(wanted, source=source.name, id=id, title=title, body=body, search_by=searched)


def _named(names: Iterable[str], among: Sequence[str]) -> str:
    """Return the field with the first of some names, else one whose name ends with one of them, else ""."""
    lower = {each.lower(): each for each in among}
    for name in names:
        if name in lower:
            return lower[name]
    return next(
        (lower[each] for name in names for each in lower if each.endswith(("_" + name, "." + name))), ""
    )


def _sampled(remote: RemoteEngine) -> list[RemoteDocument]:
    """Return a sample of documents with a text, evenly spread over the first `READ`."""
    documents = [each for each in _first(remote, READ) if each.body.strip() or each.title.strip()]
    places = np.linspace(0, len(documents), SAMPLED, endpoint=False).astype(int).tolist()
    return [documents[at] for at in dict.fromkeys(places)] if documents else []


def _first(remote: RemoteEngine, count: int) -> list[RemoteDocument]:
    return list(islice((each for batch in remote.scan() for each in batch), count))


def _check_filters(remote: RemoteEngine, sample: Sequence[RemoteDocument]) -> None:
    """Check on the sampled documents that the engine filters by the named type and date; raises a
    ConfigError."""
    types, dates = [each.type for each in sample if each.type], [each.date for each in sample]
    dated = sorted(date for date in dates if date is not None)
    for option, values in (("type", types), ("date", dated)):
        name = getattr(remote.location, option)
        if not name or not sample:
            continue
        if not values:
            form = "words" if option == "type" else "Unix seconds, or ISO 8601"
            raise ConfigError(f"no sampled document has a {option} in {name}", key=name, expected=form)
        some, none = (
            (Constraints(types=tuple(set(types))), Constraints(types=("\u2014",)))
            if option == "type"
            else (
                Constraints(since=dated[0], until=dated[-1] + 1),
                Constraints(since=dated[0], until=dated[0]),
            )
        )
        try:
            is_filtered = remote.documents(some) >= len(values) and not remote.documents(none)
        except RemoteProblem as problem:
            raise ConfigError(f"no filter by {name}: {problem}", key=f"--{option}") from None
        if not is_filtered:
            clash = f"{remote.noun} finds other documents by {name} than have it"
            raise ConfigError(clash, key=f"--{option}", expected="a field that it filters by")


def _language(sample: Sequence[RemoteDocument]) -> str:
    return usual(detect(f"{each.title}\n{each.body}" for each in sample)) or DEFAULT


def _proved(
    remote: RemoteEngine,
    settings: EngineSettings,
    source: RemoteSource,
    sample: Sequence[RemoteDocument],
    wish: _Wish,
    others: tuple[str, ...],
) -> Inspected:
    """Determine the level and try a query."""
    reasons = list(source.remarks)
    queries: QueryEncoder = NoQueries()
    if wish.encoder:
        queries = ready_encoder(encoder_settings(wish.encoder)) or queries
        reasons.append(_vectors_proved(remote, sample, queries, wish.encoder))
    elif isinstance(remote, VectorEngine):
        reasons.append("found by words; --encoder NAME, that which made its vectors, finds by meaning")
    if not settings.search_by and remote.noun == "PostgreSQL":
        columns = [name for name in (settings.title, settings.body) if name]
        expression = vector_of(columns, NAMES.get(settings.language, "english").lower())
        settings = replace(settings, search_by=expression)
        remote = remote_of(settings)
        reasons.append(
            "no full-text index: every search reads the whole table; "
            f"CREATE INDEX ON {source.name} USING gin ({expression}) makes it fast"
        )
    full, why = _agreement(remote, sample, settings.language, wish.level)
    settings = replace(settings, level="full" if full else "scores")
    query, hits, took = _tried(remote, settings, sample, queries)
    return Inspected(
        settings, remote.noun, remote.documents(), (why, *reasons), query, tuple(hits), took, others
    )


def encoder_settings(name: str) -> EncoderSettings:
    """Return the settings of an encoder, given its name, address or folder."""
    if Path(name).is_dir():
        return EncoderSettings("encoder", path=Path(name).resolve())
    return EncoderSettings("encoder", name)


def _vectors_proved(
    remote: RemoteEngine, sample: Sequence[RemoteDocument], queries: QueryEncoder, name: str
) -> str:
    """Check that an encoder made the engine's vectors. Returns the result in words; raises a ConfigError if
    its vectors differ."""
    if not isinstance(remote, VectorEngine):
        raise ConfigError(f"{remote.noun} is not searched by vectors", key="--encoder", expected="no encoder")
    stored = remote.vectors([each.id for each in sample[:ENCODED]])
    some = [each for each in sample[:ENCODED] if each.id in stored]
    widths = {len(vector) for vector in stored.values()}
    if not widths <= {queries.width}:
        clash = f"{name} makes vectors of {queries.width} numbers, the engine's have {max(widths)}"
        raise ConfigError(
            clash, key="--encoder", expected="the encoder that made them, or another --search-by"
        )
    theirs = np.array([stored[each.id] for each in some])
    whole = [f"{each.title}\n{each.body}" if each.title else each.body for each in some]
    ways = (whole, [each.body for each in some])  # both, since titles may or may not have been encoded
    alike = max((_median_cosine(queries.documents(texts), theirs) for texts in ways if texts), default=0.0)
    proof = f"{name} gives {several(len(stored), 'sampled document')} vectors whose cosine to those stored is"
    if alike < ALIKE:
        raise ConfigError(f"{proof} {alike:.2f}", key="--encoder", expected=f"at least {ALIKE:g}")
    return f"{proof} {alike:.2f}"


def _median_cosine(one: Vectors, other: Vectors) -> float:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(np.median((one * other).sum(axis=1) / np.maximum(lengths, 1e-9)))


def _agreement(
    remote: RemoteEngine, sample: Sequence[RemoteDocument], language: str, level: str
) -> tuple[bool, str]:
    """Return whether the level is full, and why."""
    if not isinstance(remote, CountedEngine):
        return False, f"{remote.noun} gives scores of its own and no term counts"
    if level == "scores":
        return False, "as --level says"
    if not sample:
        return False, "there is no document yet to prove term counts on"
    terms = _terms(sample, language)
    total = sum(map(len, terms.values()))
    agreeing = remote.agreement(terms)
    share = agreeing / max(total, 1)
    sampled = several(len(sample), "sampled document")
    proof = f"{remote.noun} finds {sampled} by {share:.1%} of their {total:,} terms"
    return share >= AGREEING, proof if share >= AGREEING else f"{proof}: {AGREEING:.0%} would be full"


def _terms(sample: Sequence[RemoteDocument], language: str) -> Mapping[str, Sequence[str]]:
    """Return the distinct content terms of documents, by id."""
    tokens = tokeniser_of(language)(f"{each.title}\n{each.body}" for each in sample)
    every = {each.id: sorted(set(tokens.words(at))) for at, each in enumerate(sample)}
    return {id: [word for word in words if not word.startswith(STOP)] for id, words in every.items()}


def _tried(
    remote: RemoteEngine, settings: EngineSettings, sample: Sequence[RemoteDocument], queries: QueryEncoder
) -> tuple[str, list[str], float]:
    """Search with a query made from a document. Returns the query, its hits' titles, and milliseconds."""
    if not sample:
        return "", [], 0.0
    some = sample[len(sample) // 2]
    texts = [RemoteDocument("title", "", some.title), RemoteDocument("body", "", some.body)]
    has_words = _terms(texts, settings.language)
    query = " ".join((some.title if has_words["title"] else some.body).split()[:WORDS])
    began = time.monotonic()
    if isinstance(remote, CountedEngine) and settings.level == "full":
        weights = dict.fromkeys(_terms([RemoteDocument("query", "", query)], settings.language)["query"], 1.0)
        ids = remote.matching(weights, 3)
    else:
        ids = [id for id, _ in remote.search(query, queries.query(query, query.split()), 3)]
    took = 1000 * (time.monotonic() - began)
    documents = remote.get(ids)
    return query, [documents[id].title or documents[id].body[:80] for id in ids if id in documents], took
