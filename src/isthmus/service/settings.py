"""The configuration of a node and of the broker, as TOML.

    silo = "north"                          [peers.broker]
    folder = "north"                        search = true
    port = 8101                             snippets = true
    sources = [{kind = "folder", path = "papers"}]

A relative path is meant from the folder of the file it stands in. Everything listens on loopback unless told
otherwise, and nothing listens elsewhere without TLS. Secrets come from files or from the environment: a value
`env:NAME` is looked up there.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar
from unicodedata import normalize
from urllib.parse import quote, urlsplit

from isthmus.config import load, require
from isthmus.engines import EVERYONE, principals_of
from isthmus.errors import ConfigError
from isthmus.service.parsing import ParsingLimits
from isthmus.service.people import Person
from isthmus.service.redaction import Redaction
from isthmus.service.row_files import Columns
from isthmus.service.wire import LONGEST_QUERY, MOST_HITS

T = TypeVar("T")

OPERATOR = "operator"
"""What a store calls the source of documents that were put one by one."""
ANONYMOUS = "anonymous"
"""The peer whose policy holds for whoever reaches a node without TLS, which only loopback allows."""
SCOPES = ("search", "feedback", "documents", "counts", "metrics", "admin", "audit")
"""What a key may be good for; `admin` sees the views of silos, training and calibration, and all else but the
audit log, which has what administrators did."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")

SecretText = str
"""Text that may be `env:NAME`; `secret` reads it."""


@dataclass(frozen=True)
class Tls:
    """One's own certificate and key, and the authority that others' certificates must come from."""

    certificate: Path
    key: Path
    authority: Path

    @property
    def revoked(self) -> Path:
        """The list of certificates that hold no longer, beside the authority; there may be none."""
        return self.authority.with_suffix(".crl")

    @property
    def former_key(self) -> Path:
        """The key before this one, while the certificate is still that key's."""
        return self.key.with_suffix(".former")


@dataclass(frozen=True)
class Policy:
    """What a peer may do. `budget` is the ε that any one document may spend on it."""

    search: bool = False
    snippets: bool = False
    counts: bool = False
    matches: bool = False
    """May have exact numbers of the documents that match a query, in all, by type and by year."""
    suggestions: bool = False
    """May have words of at least three documents that are spelled like a word of the query."""
    learning: bool = False
    """May ask for sums over its judged queries, and bring a model to search with."""
    feedback: bool = False
    noised_counts: bool = False
    """May have, for a question, how many documents answer it, with noise; needs no `search`."""
    judgements: bool = False
    """May bring judgements by document id, and have back those that came through it."""
    open: bool = False
    """May have whole documents, each by the ticket of a hit that it was shown."""
    ask: Literal["", "pseudonym", "name"] = ""
    """People may ask the owner for a document, under the peer's pseudonym for them, or by their name."""
    manage: bool = False
    """Its administrators see what people ask for and what could not be read, and answer for the owner."""
    operate: bool = False
    people: bool = False
    """Says with every search and opening, under its signature, which person asks; without, it is refused."""
    budget: float | None = None
    most_seen: float | None = None
    """The share of the silo's documents that one person may see in a year, in hits or opened; of a peer that
    names no persons, all of it together."""
    most_seen_a_day: float | None = None
    most_opened_a_day: int | None = None
    """Whole documents of one person, or of a peer that names none."""
    most_seen_by_peer: float | None = None
    """As `most_seen`, of all persons of the peer together: pseudonyms are its own to make."""
    alarm_seen: float | None = None
    """The share at which somebody is named in log, metrics and audit log; half of `most_seen` if not said."""

    def __post_init__(self) -> None:
        require(self.budget is None or self.budget > 0, f"budget = {self.budget} must be an ε above 0")
        for name in ("most_seen", "most_seen_a_day", "most_seen_by_peer", "alarm_seen"):
            share = getattr(self, name)
            require(share is None or 0 < share <= 1, f"{name} = {share} must be a share in (0, 1]")
        opened = self.most_opened_a_day
        require(opened is None or opened >= 0, f"most_opened_a_day = {opened} must be at least 0")
        require(self.search or not self.snippets, "snippets come with hits: snippets needs search")
        for name in ("matches", "suggestions"):
            require(self.search or not getattr(self, name), f"{name} come with hits: {name} needs search")
        require(self.search or not (self.open or self.ask), "open and ask are of hits: they need search")


@dataclass(frozen=True)
class PersonPolicy:
    """What a person, or those of a group, may do of all that their peer may; what is not said, they may."""

    search: bool = True
    snippets: bool = True
    matches: bool = True
    suggestions: bool = True
    feedback: bool = True
    noised_counts: bool = True
    open: bool = True
    ask: bool = True


@dataclass(frozen=True)
class Learning:
    """What peers whose policy has `learning` may learn of judgements.

    Every sum covers at least `least_queries` judged queries, and the silo takes no part while it has too few;
    a peer may begin `sessions` sessions a day. Sums leave under masks that the silos agree on by the cards
    in the folder `keys` (isthmus keys), and a peer reads the total of at least three silos; of two, where
    both owners say `consent = "two"`. `reports` lets it see this silo's own errors on judged queries, which
    mode fedrisk needs.
    """

    least_queries: int = 10
    sessions: int = 8
    keys: Path | None = None
    consent: Literal["", "two"] = ""
    reports: bool = False

    def __post_init__(self) -> None:
        for name in ("least_queries", "sessions"):
            require(getattr(self, name) >= 1, f"{name} = {getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests by one caller, and of connections by callers without a key.

    A proxy or an office behind one address shares `connections_per_address`: when they are all taken, those
    that have waited longest without a valid key make room, so nobody with a key is shut out.
    """

    per_second: float = 20.0
    burst: int = 40
    body_bytes: int = 1 << 20
    operator_body_bytes: int = 64 << 20
    depth: int = 16
    query_characters: int = LONGEST_QUERY
    hits: int = MOST_HITS
    concurrent: int = 64
    """Requests at once of all who have a key or a certificate."""
    strangers: int = 16
    """Requests at once of all who have neither, a quarter of them from one address."""
    header_bytes: int = 16 << 10
    header_seconds: float = 10.0
    """From opening a connection, TLS included, to the end of its first request's headers."""
    idle_seconds: float = 75.0
    """How long a connection stays open between two requests."""
    connections: int = 512
    connections_per_address: int = 128

    def __post_init__(self) -> None:
        for each in fields(self):
            require(getattr(self, each.name) > 0, f"{each.name} = {getattr(self, each.name)} must be above 0")


PEER_LIMITS = RequestLimits(per_second=500.0, burst=1_000, body_bytes=32 << 20, connections_per_address=512)
"""What a peer may ask a node for: it speaks for many people, and brings the sums of all silos."""


@dataclass(frozen=True)
class AuditSettings:
    """What the audit log says, and for how long.

    People are pseudonyms under the log's own key, and queries digests under it, unless `names` and `queries`
    say otherwise. Whole files are deleted once all in them is older than `keep_days`.
    """

    names: bool = False
    queries: bool = False
    keep_days: float = 365.0
    rotate_mb: float = 64.0
    """A file is at most about so large, and of one day."""
    key: Path | None = None
    """The file of the log's key; `audit.key` in the folder unless it is said."""

    def __post_init__(self) -> None:
        require(self.keep_days >= 1, f"keep_days = {self.keep_days:g} must be at least 1")
        require(self.rotate_mb > 0, f"rotate_mb = {self.rotate_mb:g} must be above 0")


@dataclass(frozen=True)
class TracingSettings:
    """Where spans of searches go by OTLP over HTTP, and of which share of searches; nowhere by default.

    OTEL_EXPORTER_OTLP_ENDPOINT and OpenTelemetry's other variables do as well.
    """

    endpoint: str = ""
    share: float = 1.0

    def __post_init__(self) -> None:
        known = self.endpoint.startswith(("http://", "https://"))
        require(
            not self.endpoint or known,
            f"endpoint = {self.endpoint!r} must be the whole address, such as http://127.0.0.1:4318/v1/traces",
        )
        require(  # others would log it
            "@" not in self.endpoint and "?" not in self.endpoint,
            "endpoint has a name or key in its address, which belong into OTEL_EXPORTER_OTLP_HEADERS",
        )
        require(0 <= self.share <= 1, f"share = {self.share:g} must lie in 0..1")


@dataclass(frozen=True)
class StoreSettings:
    """Where documents and feedback are kept: a file in the node's folder, or a PostgreSQL server."""

    kind: Literal["sqlite", "postgres"] = "sqlite"
    url: SecretText = ""

    def __post_init__(self) -> None:
        if (self.kind == "postgres") != bool(self.url):
            raise ValueError('store.url belongs to kind = "postgres", which needs it')


@dataclass(frozen=True)
class EngineSettings:
    """An engine that runs already and has the documents, as `isthmus attach` writes it; it is only read.

    - `source` is a table, a collection or an index, and `id`, `title`, `body`, `type` and `date` are fields
      of it; `search_by` is what is searched where that is no field of text (a tsvector, a vector's name);
    - `filter` says which documents this silo has, in the engine's own language;
    - level full: terms are counted here in the documents' texts, and scores compare with other silos';
      scores: the engine's own scores, which judgements calibrate.
    """

    url: SecretText
    source: str
    id: str = "id"
    title: str = ""
    body: str = "body"
    type: str = ""
    date: str = ""
    link: str = ""
    """Where people see a document, as `Source.link`."""
    allow: tuple[str, ...] = ()
    """Who may see its documents that do not say so themselves, as `Source.allow`."""
    allow_field: str = ""
    """Its field of the principals who may see a document, by which it filters."""
    search_by: str = ""
    filter: str = ""
    key: SecretText = ""
    level: Literal["full", "scores"] = "scores"
    language: str = "en"
    """Of its documents, by its code."""
    seconds: float = 5.0
    """That the server has to answer."""

    def __post_init__(self) -> None:
        require(0 < self.seconds <= 600, f"seconds = {self.seconds:g} must lie in (0, 600]")
        object.__setattr__(self, "allow", principals_of(self.allow))
        if self.link:
            _check_link(self.link)
        from isthmus.languages import code_of

        code_of(self.language)


@dataclass(frozen=True)
class PathRule:
    """Who may see the documents of a source whose ids have a pattern: * any letters, ? one, [ab] a or b."""

    path: str
    allow: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", principals_of(self.allow))
        require(bool(self.path and self.allow), "a rule of a source needs a path and whom it allows")


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    - folder: text, Markdown, HTML, PDF, Word, PowerPoint, Excel and mail files under `path`, and tables;
    - table: the .csv, .tsv or .parquet at `path`, a document a row;
    - beir: a `corpus.jsonl` or a folder with one at `path`, only silo `part` of it if that is named;
    - sql: rows (id, title, body) or (id, body) of `query` at `url`, sqlite:///file or postgresql://…
    """

    kind: Literal["folder", "table", "beir", "sql"]
    path: Path | None = None
    part: str | None = None
    url: SecretText = ""
    query: str = ""
    name: str = ""
    """Stays the same when the path or the query changes; else these are its name."""
    link: str = ""
    """Where people see a document: an address of http or https with `{id}`, "https://wiki.example.org/{id}"."""
    columns: Columns | None = None
    """Of tables: where id, title and body are; else by their usual names."""
    language: str = "auto"
    """Of its documents, as a code (de) or in English (German); auto: of each what it seems to be in."""
    allow: tuple[str, ...] = ()
    """Who may see its documents that do not say so themselves: "group:doctors", "user:ada"; all without."""
    rules: tuple[PathRule, ...] = ()
    """Who may see some of them; the first whose path fits comes before `allow`."""
    redact: tuple[Redaction, ...] = ()
    """What is withheld of them, and from whom not."""
    subject_noun: str = ""
    """What a subject of its documents is called: patient, customer."""
    keep_days: int | None = None
    """How long its documents are stored, from their date or, without one, their arrival; then erased."""
    keep_by: Literal["date", "arrival"] = "date"
    keep_judgements_days: int | None = None
    """How long judgements of its documents are stored."""

    def __post_init__(self) -> None:
        if self.language != "auto":
            from isthmus.languages import code_of

            code_of(self.language)
        if self.name:
            _check_name("name", self.name)
        if self.name == OPERATOR:
            raise ValueError(f"name = {self.name!r} is that of documents which the operator has put")
        if self.link:
            _check_link(self.link)
        object.__setattr__(self, "allow", principals_of(self.allow))
        require(
            len(self.subject_noun) <= 40 and self.subject_noun.isprintable(),
            "subject_noun must be a noun of at most 40 letters, say patient",
        )
        for key in ("keep_days", "keep_judgements_days"):
            days = getattr(self, key)
            require(days is None or 1 <= days <= 100_000, f"{key} = {days} must lie in 1..100000")
        require(self.kind != "sql" or (self.url and self.query), "a source of kind sql needs url and query")
        require(self.kind == "sql" or self.path is not None, f"a source of kind {self.kind} needs a path")

    @property
    def unnamed(self) -> str:
        """The label of a source without a name; contains no secret."""
        where = self.path if self.kind != "sql" else " ".join(self.query.split())
        return f"{self.kind}:{where}" + (f"#{self.part}" if self.part else "")

    @property
    def label(self) -> str:
        """The name under which a store remembers what a source gave."""
        return self.name or self.unnamed

    def allowed(self, id: str) -> tuple[str, ...]:
        """Who may see a document that does not say so; () for all."""
        name = normalize("NFC", id)  # file systems differ in how they spell accents
        fitting = (rule for rule in self.rules if fnmatchcase(name, normalize("NFC", rule.path)))
        return next((rule.allow for rule in fitting), self.allow)

    def link_to(self, id: str) -> str:
        """The address of one of its documents; "" for none."""
        own = next((id.removeprefix(f"{name}:") for name in self.prefixes if id.startswith(f"{name}:")), id)
        return linked(self.link, own)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What ids begin with that another source has too: its name, and what it had before it got one."""
        digest = hashlib.blake2b(self.unnamed.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
        return (*((self.name,) if self.name else ()), f"{self.kind}-{digest}")


@dataclass(frozen=True)
class EncoderSettings:
    """The dense retriever's encoder: built in and fitted on the silo's own text (lsa), or loaded from a
    fitted file that silos share (`path`); or one that `isthmus encoder add` brought (encoder), by `name`,
    with a folder's `path` or an endpoint's address in its place.

    `limit` is how much of a text it reads at once, at most: tokens, and words of an endpoint (512 if not
    said). Longer documents are split into passages.
    """

    kind: Literal["lsa", "encoder", "transformer", "none"] = "lsa"
    """`transformer` is what `encoder` was called."""
    name: str = ""
    path: Path | None = None
    dimensions: int = 128
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "transformer":
            message = 'encoder.kind = "transformer" is called "encoder" now, with name = "minilm" or another'
            warnings.warn(message, FutureWarning, stacklevel=2)
            object.__setattr__(self, "name", self.name or "minilm")
        if self.kind == "encoder":
            expected = 'kind = "encoder" needs a name (bge-small, or an address) or a path, one of them'
            require(bool(self.name) != (self.path is not None), expected)
        require(self.dimensions >= 1, f"dimensions = {self.dimensions} must be at least 1")
        require(self.limit is None or self.limit >= 16, f"limit = {self.limit} must be at least 16")


@dataclass(frozen=True)
class Models:
    """Files that training and calibration wrote.

    A `ranker` (isthmus train) scores candidates, else a `fuser` (isthmus fuse --save) joins the retrievers.
    The `calibrator` (isthmus calibrate --save) is the silo's own and makes the scores probabilities.
    `reliability` is a JSON file of validation curves in the form of /v1/calibration. `reranker` names a
    cross-encoder (isthmus encoder add ms-marco-minilm), which reads the first 20 candidates for a fuser that
    joins bm25, dense and cross.
    """

    ranker: Path | None = None
    fuser: Path | None = None
    calibrator: Path | None = None
    reliability: Path | None = None
    reranker: str = ""

    def __post_init__(self) -> None:
        require(not (self.ranker and self.fuser), "name a ranker or a fuser, not both")


@dataclass(frozen=True)
class SharedStatistics:
    """How a silo's term statistics may leave it, to those whose policy allows counts.

    The private form is charged to every document's budget: `epsilon` for one replaced word. It is released
    again when the share `renew` of documents has changed, if the budget allows. `fields` adds statistics of
    title and body apart, which a shared ranker reads, at the same ε once more.
    """

    form: Literal["private", "exact", "none"] = "private"
    epsilon: float = 1.0
    fields: bool = False
    width: int = 1 << 18
    renew: float = 0.2
    hash_key: SecretText = "isthmus"

    def __post_init__(self) -> None:
        require(self.epsilon > 0, f"epsilon = {self.epsilon:g} must be above 0")
        require(0 < self.renew <= 1, f"renew = {self.renew:g} must lie in (0, 1]")


@dataclass(frozen=True)
class NoisedCounts:
    """What a question costs that is answered with a noised count, to those whose policy allows them.

    Every question is charged to every document: `epsilon` for one document more, less or replaced. A question
    that was asked before has the same answer for nothing, until the share `renew` of documents has changed.
    """

    epsilon: float = 0.2
    renew: float = 0.2

    def __post_init__(self) -> None:
        require(self.epsilon >= 0.001, f"epsilon = {self.epsilon:g} must be at least 0.001")
        require(0 < self.renew <= 1, f"renew = {self.renew:g} must lie in (0, 1]")


@dataclass(frozen=True)
class SiloTraining:
    """The process that a node starts to take part in training and counts.

    `data` are feature rows to train on. With `private`, a folder of keys (isthmus keys), the node keeps
    sketches of its documents there and answers other silos' questions about counts; `queries` are those it
    asks about.
    """

    retired: ClassVar[Mapping[str, str]] = MappingProxyType({"superlink": "it is called coordinator now"})
    coordinator: str
    """Its address, host:port."""
    data: Path
    tls: Tls
    """The silo's own certificate for training, which `isthmus keys make --training` makes."""
    name: str = "coordinator"
    """What the coordinator's certificate says."""
    private: Path | None = None
    queries: Path | None = None
    masked_only: bool = False
    """Whether updates may leave only under a secure sum."""
    most_clip: float | None = None
    """The longest update that leaves, whatever a coordinator proposes; with `least_noise`."""
    least_noise: float | None = None
    """The least multiplier of the noise on it."""
    least_colluding: int = 1
    """An exchange whose noise holds against fewer silos than these is refused."""
    most_width: int = 1 << 18
    """So is one with wider sketches of totals."""
    user: str = ""
    """The user that the process belongs to, where the node runs as root."""

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        host, colon, port = self.coordinator.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"coordinator = {self.coordinator!r} must be host:port")
        require((self.private is None) == (self.queries is None), "private and queries belong together")
        if (self.most_clip is None) != (self.least_noise is None):
            raise ValueError("most_clip and least_noise belong together")
        floors = (self.most_clip, self.least_noise, self.least_colluding, self.most_width)
        if not all(value > 0 for value in floors if value is not None):
            raise ValueError("most_clip, least_noise, least_colluding and most_width must be above 0")
        if self.user and self.private is None:
            raise ValueError("user needs private: the ledger is then there, where that user can write it")


@dataclass(frozen=True)
class NodeSettings:
    """A silo's node."""

    silo: str
    folder: Path
    host: str = "127.0.0.1"
    port: int = 8101
    tls: Tls | None = None
    hosts: tuple[str, ...] = ()
    """Further names that peers reach it by; with TLS any name does where none is listed."""
    keys: Path | None = None
    """API keys, hashed, as `isthmus keys` writes them."""
    peers: Mapping[str, Policy] = field(default_factory=dict)
    people: Mapping[str, PersonPolicy] = field(default_factory=dict)
    """What single persons may do, by their ids."""
    groups: Mapping[str, PersonPolicy] = field(default_factory=dict)
    """What persons of a group may do who have no table of their own; `everyone` is whoever has none."""
    sources: tuple[Source, ...] = ()
    forget_sources: bool = False
    """Whether no sources at all means that all that sources gave is to be removed."""
    engine: EngineSettings | None = None
    """Where the documents are, in place of sources."""
    reading: ParsingLimits = field(default_factory=ParsingLimits)
    """What one file of a source may take to read."""
    store: StoreSettings = field(default_factory=StoreSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    depth: int = 100
    """Candidates from each retriever."""
    models: Models = field(default_factory=Models)
    statistics: SharedStatistics = field(default_factory=SharedStatistics)
    noised_counts: NoisedCounts = field(default_factory=NoisedCounts)
    learning: Learning = field(default_factory=Learning)
    budget: float = 9.0
    """The ε that a document, or all documents of a subject, may spend on all peers together."""
    unit: Literal["subject", "document"] = "subject"
    """Whose budget it is where documents have a subject: theirs together, or each document's own."""
    per_subject: int = 3
    """Documents of one subject that a release of statistics counts; its ε counts so many times for them."""
    erased_models: Literal["relearn", "withdraw"] = "relearn"
    """What becomes of a model that was learned with judgements of erased documents: it is marked until
    another is learned, or not used any more from that moment on."""
    limits: RequestLimits = field(default_factory=lambda: PEER_LIMITS)
    training: SiloTraining | None = None
    log_queries: bool = False
    tracing: TracingSettings = field(default_factory=TracingSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)

    def __post_init__(self) -> None:
        _check_name("silo", self.silo)
        _check_address(self.host, self.port, self.tls)
        require(1 <= self.depth <= 10_000, f"depth = {self.depth} must lie in 1..10000")
        require(self.budget > 0, f"budget = {self.budget:g} must be above 0")
        require(self.per_subject >= 1, f"per_subject = {self.per_subject} must be at least 1")
        labels = [source.label for source in self.sources]
        for label in labels:
            require(labels.count(label) == 1, f"two sources are {label}: give each a name")
        if ANONYMOUS in self.peers and self.peers[ANONYMOUS].people:
            raise ValueError("people = true needs a certificate or an API key: anonymous can sign nothing")
        if self.engine is not None:
            self._check_attached(self.engine)

    def _check_attached(self, engine: EngineSettings) -> None:
        """What an engine elsewhere cannot do is refused."""
        require(engine.source and engine.id and engine.body, "[engine] needs source, id and body")
        require(not self.sources, "[engine] has the documents: a silo with one has no sources")
        require(self.store.kind == "sqlite", "[engine] has the documents: a silo with one has no [store]")
        may_encode = engine.level == "scores" and self.encoder.kind == "encoder"
        require(
            self.encoder.kind == "none" or may_encode,
            '[engine] has no vectors of this node\'s: encoder.kind = "none", or at level scores "encoder" '
            "with the name of the one that made the engine's vectors",
        )
        require(
            engine.level == "full" or self.statistics.form == "none",
            'statistics.form must be "none" at level scores: the engine\'s terms are not counted here',
        )
        counting = any(policy.noised_counts for policy in self.peers.values())
        require(
            engine.level == "full" or not counting, "noised_counts needs level full: it reads all documents"
        )

    def narrowed(self, policy: Policy, person: Person | None) -> Policy:
        """What a person may do of what their peer may: what any of the tables lets them that are theirs."""
        named = () if person is None else tuple(sorted(person.groups))
        tables = [self.people[person.id]] if person is not None and person.id in self.people else []
        tables = tables or [self.groups[name] for name in named if name in self.groups]
        tables = tables or [self.groups[name] for name in (EVERYONE,) if name in self.groups]
        if not tables:
            return policy

        def may(right: str) -> bool:
            searching = right == "noised_counts" or any(each.search for each in tables)
            return searching and any(getattr(each, right) for each in tables)

        every = fields(PersonPolicy)
        rights: dict[str, Any] = {each.name: may(each.name) and getattr(policy, each.name) for each in every}
        rights["ask"] = rights["ask"] or ""
        narrowed: Policy = replace(policy, **rights)
        return narrowed

    @property
    def subject_noun(self) -> str:
        """What a subject is called, where the sources agree; "" where none says so."""
        nouns = {source.subject_noun for source in self.sources} - {""}
        return nouns.pop() if len(nouns) == 1 else ""

    @property
    def ledger(self) -> Path:
        """One ledger for everything that leaves: that of private counts, where there are any."""
        private = None if self.training is None else self.training.private
        return self.folder / "ledger.db" if private is None else private / "silo.ledger"

    @property
    def cards(self) -> Path | None:
        """The folder of the silo's identity and the cards it trusts, where it has one."""
        return self.learning.keys or (None if self.training is None else self.training.private)


@dataclass(frozen=True)
class SiloAddress:
    """The address of a node. Beyond this machine it is reached over TLS, unless `unencrypted` says that the
    way there is protected otherwise."""

    url: str
    unencrypted: bool = False
    people: bool = False
    """Whether this silo learns with every search who asks: a pseudonym that is its alone, and groups."""
    identities: bool = False
    """The person's own id in the pseudonym's place, for rules by name."""
    about: str = ""
    """What it has, for the page's start and for programs that choose among silos."""

    def __post_init__(self) -> None:
        require(len(self.about) <= 300, f"about has {len(self.about)} characters, at most 300")
        require(self.people or not self.identities, "identities = true is said of people: people = true")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} must begin with https:// or http://")
        if self.url.startswith("http://") and not self.unencrypted and not _is_here(self.url):
            raise ValueError(
                f"url = {self.url!r} would send queries and the broker's key in the clear: use https://, "
                "or set unencrypted = true where the way there is protected otherwise"
            )


@dataclass(frozen=True)
class BreakerSettings:
    """After `failures` in a row a silo is left alone for `pause` seconds, twice as long each time up to
    `longest`; then one search tries it again."""

    failures: int = 3
    pause: float = 1.0
    longest: float = 30.0

    def __post_init__(self) -> None:
        if self.failures < 1 or not 0 < self.pause <= self.longest:
            raise ValueError("failures must be at least 1 and 0 < pause ≤ longest")


_SPAN = re.compile(r"(\d+) (minute|hour|day|week)s?")
_SECONDS = {"minute": 60.0, "hour": 3600.0, "day": 86_400.0, "week": 604_800.0}


@dataclass(frozen=True)
class LearningSchedule:
    """When the broker lets its silos learn by itself: `every` so often ("1 day"), or not at all ("")."""

    every: str = ""
    mode: Literal["masked", "fedrisk"] = "masked"

    def __post_init__(self) -> None:
        require(
            not self.every or self.seconds > 0,
            f'every = {self.every!r} must be a time such as "6 hours", "1 day" or "2 weeks"',
        )

    @property
    def seconds(self) -> float:
        """Between two runs; 0 where there is no schedule."""
        matched = _SPAN.fullmatch(self.every)
        return int(matched[1]) * _SECONDS[matched[2]] if matched else 0.0


@dataclass(frozen=True)
class PageText:
    """What the page says before anything is searched: when a document is right here, and queries to try."""

    about: str = ""
    queries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.about) <= 1_000, "page.about has more than 1,000 letters")
        require(len(self.queries) <= 10, "page.queries has more than 10")
        require(all(0 < len(each) <= 200 for each in self.queries), "page.queries have 1 to 200 letters each")


@dataclass(frozen=True)
class OidcSettings:
    """Sign-in at an OpenID Connect provider, where this broker is registered as a client.

    `groups` says what its groups may do, as scopes of API keys; `"*"` is everybody who can sign in.
    """

    issuer: str
    client_id: str
    address: str
    """The broker's own, as browsers have it; at the provider, register ADDRESS/v1/signin/callback."""
    groups: Mapping[str, tuple[str, ...]]
    client_secret_file: Path | None = None
    """None is a public client, which PKCE alone protects."""
    groups_claim: str = "groups"
    """Where they are in the ID token or the user info: a name, or a path such as realm_access.roles."""
    id_claim: str = "sub"
    """What a person's id is; `email` only where the provider has verified it."""
    silo_groups: tuple[str, ...] = ()
    """Groups that silos hear of beside those in `groups`; `"*"` is all."""
    scope: str = "openid profile email"
    """What the provider is asked for; some give groups, or a way to renew, for another word."""
    minutes: float = 15.0
    """After which the provider is asked again whether a person may still; it has as long again to answer."""
    authority: Path | None = None
    """The certificate that the provider's own comes from, where the system does not know it."""

    def __post_init__(self) -> None:
        for key in ("issuer", "address"):
            text = getattr(self, key)
            plain = is_safe_address(text) and not urlsplit(text).query and not urlsplit(text).fragment
            require(plain, f"{key} = {text!r} must be an https:// address, or http:// on loopback")
        require(urlsplit(self.address).path in ("", "/"), f"address = {self.address!r} must have no path")
        require(self.client_id, "client_id is what the provider calls this broker, and is missing")
        require("openid" in self.scope.split(), f'scope = "{self.scope}" must have the word openid')
        require(0 < self.minutes <= 1440, f"minutes = {self.minutes:g} must lie in (0, 1440]")
        scopes = [scope for each in self.groups.values() for scope in each]
        require(scopes, "groups gives nobody a scope: [oidc.groups] GROUP = ['search']")
        for scope in scopes:
            if scope not in SCOPES:
                raise ConfigError(f"unknown scope {scope!r} in groups", key=scope, known=SCOPES)

    @property
    def redirect(self) -> str:
        """Where the provider sends people back to, exactly."""
        return f"{self.address.rstrip('/')}/v1/signin/callback"


@dataclass(frozen=True)
class BrokerSettings:
    """The broker. Without `keys` or `oidc` whoever reaches it may search, which only loopback allows."""

    name: str = "broker"
    folder: Path = Path("broker")
    host: str = "127.0.0.1"
    port: int = 8100
    tls: Tls | None = None
    """Its own certificate, which it also shows to nodes."""
    https: bool = False
    """Whether people reach it over TLS with that certificate too."""
    hosts: tuple[str, ...] = ()
    """Further names that people reach it by."""
    keys: Path | None = None
    oidc: OidcSettings | None = None
    node_key: SecretText = ""
    """The API key it shows to nodes that it reaches without a certificate."""
    silos: Mapping[str, SiloAddress] = field(default_factory=dict)
    deadline_ms: int = 1_000
    threshold: float = 0.0
    share_statistics: bool = True
    """Whether to sum the silos' statistics and hand the sum back, so that scores compare."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    limits: RequestLimits = field(default_factory=RequestLimits)
    training: Path | None = None
    """A training run's folder, for the Training view."""
    page: PageText = field(default_factory=PageText)
    learning: LearningSchedule = field(default_factory=LearningSchedule)
    log_queries: bool = False
    mcp: bool = False
    """Whether assistants may call it at /mcp, each with a person's key; needs the extra mcp."""
    tracing: TracingSettings = field(default_factory=TracingSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        _check_address(self.host, self.port, self.tls if self.https else None, "https = true and [tls]")
        for silo in self.silos:
            _check_name("silos", silo)
        require(10 <= self.deadline_ms <= 60_000, f"deadline_ms = {self.deadline_ms} must lie in 10..60000")
        require(0 <= self.threshold <= 1, f"threshold = {self.threshold:g} must lie in 0..1")
        if self.keys is None and self.oidc is None and self.host not in LOOPBACK:
            raise ValueError(f"host = {self.host!r} needs keys or [oidc]: whoever reaches it could search")
        if self.oidc is not None and (self.hosts or self.host not in ("0.0.0.0", "::")):
            name = urlsplit(self.oidc.address).hostname or ""
            known = name in {*LOOPBACK, self.host.lower(), *(each.lower() for each in self.hosts)}
            require(known, f"oidc.address names {name}, which is no name of this broker: add it to hosts")


@dataclass(frozen=True)
class CoordinatorSettings:
    """The coordinator of training: where it listens, and the silos that may call."""

    silos: tuple[str, ...]
    tls: Tls
    host: str = "127.0.0.1"
    port: int = 9092
    body_bytes: int = 64 << 20
    """Of the longest reply that is taken."""

    def __post_init__(self) -> None:
        for silo in self.silos:
            _check_name("silos", silo)
        if len(set(self.silos)) != len(self.silos) or not self.silos:
            raise ValueError("silos must be one or more different names")
        require(0 < self.body_bytes <= 1 << 30, f"body_bytes = {self.body_bytes} must lie in 1..{1 << 30}")
        _check_address(self.host, self.port, self.tls)


def read_node(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> NodeSettings:
    """A node's configuration from a file, with `key=value` overrides."""
    return _read(NodeSettings, path, overrides)


def read_broker(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> BrokerSettings:
    """The broker's configuration from a file, with `key=value` overrides."""
    return _read(BrokerSettings, path, overrides)


def read_coordinator(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> CoordinatorSettings:
    """The coordinator's configuration from a file, with `key=value` overrides."""
    return _read(CoordinatorSettings, path, overrides)


def _read(kind: type[T], path: str | os.PathLike[str], overrides: Iterable[str]) -> T:
    try:
        settings: T = _moved(load(kind, path, overrides), Path(path).resolve().parent)
    except ConfigError as error:
        raise _other_kind(kind, path) or error from None
    return settings


_TELLING: dict[type, tuple[str, frozenset[str], str]] = {
    NodeSettings: ("a silo's", frozenset({"silo", "sources", "peers"}), "isthmus node"),
    BrokerSettings: ("a broker's", frozenset({"silos", "node_key", "share_statistics"}), "isthmus broker"),
}
"""Whose configuration each is, top-level keys that only it has, and the command that reads it."""


def _other_kind(kind: type, path: str | os.PathLike[str]) -> ConfigError | None:
    """What to say of a configuration that is not of this kind and has the keys of another."""
    try:
        keys = tomllib.loads(Path(path).read_text(encoding="utf-8")).keys()
    except (OSError, ValueError):
        return None
    for other, (whose, telling, command) in _TELLING.items():
        if other is not kind and kind in _TELLING and keys & telling and not keys & _TELLING[kind][1]:
            return ConfigError(
                f"{path}: this is {whose} configuration, not {_TELLING[kind][0]}",
                expected=f"{_TELLING[kind][0]}; {command} --config {path} reads this one",
            )
    return None


def secret(text: SecretText, key: str) -> str:
    """The text itself, or for `env:NAME` what the environment has under that name."""
    if not text.startswith("env:"):
        return text
    name = text.removeprefix("env:")
    if name not in os.environ:
        raise ConfigError(f"{key} names the environment variable {name}, which is not set", key=key)
    return os.environ[name]


def literal_secrets(settings: Any) -> list[str]:
    """The keys of settings that have a secret in the file itself: a key, or an address with a password."""
    if isinstance(settings, Mapping):
        return [key for item in settings.values() for key in literal_secrets(item)]
    if isinstance(settings, tuple):
        return [key for item in settings for key in literal_secrets(item)]
    if not is_dataclass(settings):
        return []
    keys: list[str] = []
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.type != "SecretText":
            keys += literal_secrets(value)
        elif value not in ("", each.default) and not value.startswith("env:"):
            is_open = each.name == "url" and not (urlsplit(value).password or "password=" in value)
            keys += [] if is_open else [each.name]
    return keys


def _moved(value: Any, root: Path) -> Any:
    """The same configuration with every relative path meant from `root`."""
    if isinstance(value, Path):
        return root / value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: _moved(getattr(value, each.name), root) for each in fields(value)}
        )
    if isinstance(value, Mapping):
        return {name: _moved(item, root) for name, item in value.items()}
    return tuple(_moved(item, root) for item in value) if isinstance(value, tuple) else value


def is_safe_address(url: str) -> bool:
    """Whether an address is of https, or of this machine's loopback."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return bool(parts.hostname) and (parts.scheme == "https" or (parts.scheme == "http" and _is_here(url)))


def _is_here(url: str) -> bool:
    """Whether an address is of this machine's loopback."""
    return is_loopback(urlsplit(url).hostname or "")


def is_loopback(host: str) -> bool:
    """Whether a host, by name or number, is this machine as only it can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_name(key: str, name: str) -> None:
    """Names stand in addresses (`silo/id`), in certificates and in file names."""
    plain = name.replace("-", "").replace("_", "").replace(".", "")
    if not (plain.isascii() and plain.isalnum() and len(name) <= 64):
        raise ValueError(f"{key} = {name!r} must be letters, digits, '-', '_' or '.', at most 64")


def linked(link: str, id: str) -> str:
    """The address of a document by a template; "" for none."""
    if not link or not {".", ".."}.isdisjoint(id.split("/")):  # these lead elsewhere on that server
        return ""
    return link.replace("{id}", quote(id, safe="/", errors="replace"))


def _check_link(link: str) -> None:
    """An address whose server is fixed: a document's id may choose a page there and nothing else."""
    parts = urlsplit(link)
    plain = link.isascii() and link.isprintable() and " " not in link and len(link) <= 1_000
    fixed = parts.scheme in ("http", "https") and parts.netloc and not {"{", "@"} & set(parts.netloc)
    if not (plain and fixed and link.count("{id}") == 1):
        raise ValueError(f"link = {link!r} must be an address such as https://wiki.example.org/{{id}}")


def _check_address(host: str, port: int, tls: Tls | None, needed: str = "[tls]") -> None:
    if host not in LOOPBACK and tls is None:
        raise ValueError(f"host = {host!r} needs {needed}: only loopback may go without")
    require(0 <= port <= 65_535, f"port = {port} must lie in 0..65535")
