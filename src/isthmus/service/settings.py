"""Configuration of a node, of the broker and of the coordinator, as TOML.

    silo = "north"                          [peers.broker]
    folder = "north"                        search = true
    port = 8101                             snippets = true
    sources = [{kind = "folder", path = "papers"}]

Relative paths are relative to the folder of the file in which they stand. Every server listens on loopback by
default, and elsewhere only with TLS. Secrets come from files or from the environment: a value `env:NAME` is
looked up there.
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
"""Name of the source of documents that an operator has put one by one."""
ANONYMOUS = "anonymous"
"""Name of the peer whose policy applies to callers without TLS, which only loopback allows."""
SCOPES = ("search", "feedback", "documents", "counts", "metrics", "admin", "audit")
"""Scopes of a key; `admin` sees the views of silos, training and calibration, and all else except the audit
log, in which actions of administrators are recorded."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")

SecretText = str
"""Text that may be `env:NAME`; `secret` reads it."""


@dataclass(frozen=True)
class Tls:
    """A party's own certificate and key, and the authority that must have issued those of others."""

    certificate: Path
    key: Path
    authority: Path

    @property
    def revoked(self) -> Path:
        """Path of the list of revoked certificates, beside the authority; it may not exist."""
        return self.authority.with_suffix(".crl")

    @property
    def former_key(self) -> Path:
        """Path of the previous key, used while the certificate still belongs to it."""
        return self.key.with_suffix(".former")


@dataclass(frozen=True)
class Policy:
    """Rights of a peer. `budget` is the ε that any one document may spend on it."""

    search: bool = False
    snippets: bool = False
    counts: bool = False
    matches: bool = False
    """May get the exact number of documents that match a query: in all, by type and by year."""
    suggestions: bool = False
    """May get words of at least three documents that are spelled like a word of the query."""
    learning: bool = False
    """May request sums over the silo's judged queries, and install a model to search with."""
    feedback: bool = False
    noised_counts: bool = False
    """May get the noised number of documents that answer a question; needs no `search`."""
    judgements: bool = False
    """May add judgements by document id, and read those that came through it."""
    open: bool = False
    """May open whole documents, each with the ticket of a hit that it was shown."""
    ask: Literal["", "pseudonym", "name"] = ""
    """Whether people may ask the owner for a document, by the peer's pseudonym for them or by name."""
    manage: bool = False
    """Its administrators see requests and unreadable files, and may answer for the owner."""
    operate: bool = False
    people: bool = False
    """States with every search and opening, signed, which person asks; it is refused otherwise."""
    budget: float | None = None
    most_seen: float | None = None
    """Share of the silo's documents that one person may see in a year, in hits or opened; of a peer that
    names no persons, the share of all of its callers together."""
    most_seen_a_day: float | None = None
    most_opened_a_day: int | None = None
    """Whole documents a day of one person, or of a peer that names none."""
    most_seen_by_peer: float | None = None
    """Like `most_seen`, for all persons of the peer together, because it makes their pseudonyms."""
    alarm_seen: float | None = None
    """Share from which a person is named in log, metrics and audit log; half of `most_seen` by default."""

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
    """Rights of a person, or of those in a group, within those of their peer; granted by default."""

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
    """What peers with the right `learning` may learn about judgements.

    Every sum covers at least `least_queries` judged queries, and the silo takes no part while it has too few;
    a peer may begin `sessions` sessions a day. Sums leave under masks on which silos agree by the cards in
    the folder `keys` (isthmus keys). A peer reads the total of at least three silos, or of two if both owners
    set `consent = "two"`. `reports` lets it see this silo's own errors on judged queries, which mode fedrisk
    needs.
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

    All clients behind one proxy or office address share `connections_per_address`. When all are in use, those
    that have waited longest without a valid key are closed, so nobody with a key is shut out.
    """

    per_second: float = 20.0
    burst: int = 40
    body_bytes: int = 1 << 20
    operator_body_bytes: int = 64 << 20
    depth: int = 16
    query_characters: int = LONGEST_QUERY
    hits: int = MOST_HITS
    concurrent: int = 64
    """Simultaneous requests of all callers with a key or a certificate."""
    strangers: int = 16
    """Simultaneous requests of all callers with neither, at most a quarter of them from one address."""
    header_bytes: int = 16 << 10
    header_seconds: float = 10.0
    """Seconds from opening a connection, TLS included, to the end of its first request's headers."""
    idle_seconds: float = 75.0
    """Seconds for which a connection stays open between two requests."""
    connections: int = 512
    connections_per_address: int = 128

    def __post_init__(self) -> None:
        for each in fields(self):
            require(getattr(self, each.name) > 0, f"{each.name} = {getattr(self, each.name)} must be above 0")


PEER_LIMITS = RequestLimits(per_second=500.0, burst=1_000, body_bytes=32 << 20, connections_per_address=512)
"""Limits of a peer at a node: a broker asks for many people, and sends the sums of all silos."""


@dataclass(frozen=True)
class AuditSettings:
    """Contents of the audit log, and how long they are stored.

    People are recorded as pseudonyms and queries as digests, both under the log's own key, unless `names` and
    `queries` are set. Files are deleted as a whole once all their entries are older than `keep_days`.
    """

    names: bool = False
    queries: bool = False
    keep_days: float = 365.0
    rotate_mb: float = 64.0
    """Approximate size of the largest file, in megabytes; a file also covers at most one day."""
    key: Path | None = None
    """File of the log's key; by default `audit.key` in the folder."""

    def __post_init__(self) -> None:
        require(self.keep_days >= 1, f"keep_days = {self.keep_days:g} must be at least 1")
        require(self.rotate_mb > 0, f"rotate_mb = {self.rotate_mb:g} must be above 0")


@dataclass(frozen=True)
class TracingSettings:
    """Where spans of searches are sent by OTLP over HTTP, and for which share of searches; nowhere by
    default.

    OTEL_EXPORTER_OTLP_ENDPOINT and OpenTelemetry's other variables work too.
    """

    endpoint: str = ""
    share: float = 1.0

    def __post_init__(self) -> None:
        known = self.endpoint.startswith(("http://", "https://"))
        require(
            not self.endpoint or known,
            f"endpoint = {self.endpoint!r} must be the whole address, such as http://127.0.0.1:4318/v1/traces",
        )
        require(  # other programs log addresses
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
    """An existing engine that has the documents, as `isthmus attach` writes it; it is only read.

    - `source` is a table, a collection or an index, and `id`, `title`, `body`, `type` and `date` are its
      fields; `search_by` is searched instead where that is no text field (a tsvector, a vector's name);
    - `filter` selects this silo's documents, in the engine's own language;
    - level full: the node counts terms in the documents' texts, and scores compare with other silos'; scores:
      the engine's own scores are used, and judgements calibrate them.
    """

    url: SecretText
    source: str
    id: str = "id"
    title: str = ""
    body: str = "body"
    type: str = ""
    date: str = ""
    link: str = ""
    """Address at which people see a document, as `Source.link`."""
    allow: tuple[str, ...] = ()
    """Principals who may see documents without rules of their own, as `Source.allow`."""
    allow_field: str = ""
    """Field of the principals who may see a document, by which searches are filtered."""
    search_by: str = ""
    filter: str = ""
    key: SecretText = ""
    level: Literal["full", "scores"] = "scores"
    language: str = "en"
    """Language of the documents, by its code."""
    seconds: float = 5.0
    """Seconds that the server has to answer."""

    def __post_init__(self) -> None:
        require(0 < self.seconds <= 600, f"seconds = {self.seconds:g} must lie in (0, 600]")
        object.__setattr__(self, "allow", principals_of(self.allow))
        if self.link:
            _check_link(self.link)
        from isthmus.languages import code_of

        code_of(self.language)


@dataclass(frozen=True)
class PathRule:
    """Principals who may see the documents of a source whose ids match a pattern: * any letters, ? one, [ab]
    a or b."""

    path: str
    allow: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", principals_of(self.allow))
        require(bool(self.path and self.allow), "a rule of a source needs a path and whom it allows")


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    - folder: text, Markdown, HTML, PDF, Word, PowerPoint, Excel and mail files under `path`, and tables;
    - table: the .csv, .tsv or .parquet at `path`, one document per row;
    - beir: a `corpus.jsonl`, or a folder with one, at `path`; if `part` is named, only the documents of that
      silo;
    - sql: rows (id, title, body) or (id, body) of `query` at `url`, sqlite:///file or postgresql://…
    """

    kind: Literal["folder", "table", "beir", "sql"]
    path: Path | None = None
    part: str | None = None
    url: SecretText = ""
    query: str = ""
    name: str = ""
    """Name that stays the same when the path or the query changes; without it, these identify the source."""
    link: str = ""
    """Address at which people see a document: http or https with `{id}`, "https://wiki.example.org/{id}"."""
    columns: Columns | None = None
    """Columns of tables with id, title and body; by default those with usual names."""
    language: str = "auto"
    """Language of the documents, as a code (de) or in English (German); auto: detected for each document."""
    allow: tuple[str, ...] = ()
    """Principals who may see documents without rules of their own ("group:doctors"); if empty, all."""
    rules: tuple[PathRule, ...] = ()
    """Rules for some of the documents; the first whose path matches takes precedence over `allow`."""
    redact: tuple[Redaction, ...] = ()
    """Parts of the documents that are withheld, and who may see them nevertheless."""
    subject_noun: str = ""
    """Noun for a subject of the documents: patient, customer."""
    keep_days: int | None = None
    """Days for which documents are stored, from their date or else their arrival; then they are erased."""
    keep_by: Literal["date", "arrival"] = "date"
    keep_judgements_days: int | None = None
    """Days for which judgements of the documents are stored."""

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
        """Name under which a store records the documents of this source."""
        return self.name or self.unnamed

    def allowed(self, id: str) -> tuple[str, ...]:
        """Return the principals who may see a document without rules of its own; () for all."""
        name = normalize("NFC", id)  # file systems differ in the Unicode form of accents
        fitting = (rule for rule in self.rules if fnmatchcase(name, normalize("NFC", rule.path)))
        return next((rule.allow for rule in fitting), self.allow)

    def link_to(self, id: str) -> str:
        """Return the address of one of its documents; "" for none."""
        own = next((id.removeprefix(f"{name}:") for name in self.prefixes if id.startswith(f"{name}:")), id)
        return linked(self.link, own)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of ids that another source has too: the source's name, and the one used without a name."""
        digest = hashlib.blake2b(self.unnamed.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
        return (*((self.name,) if self.name else ()), f"{self.kind}-{digest}")


@dataclass(frozen=True)
class EncoderSettings:
    """Encoder of the dense retriever: built in and fitted on the silo's own text (lsa), or loaded from a
    fitted file that silos share (`path`); or one that `isthmus encoder add` has added (encoder), given by
    `name`, by a folder's `path`, or by an endpoint's address as its name.

    `limit` is the most that it reads of a text at once: in tokens, or for an endpoint in words (512 by
    default). Longer documents are split into passages.
    """

    kind: Literal["lsa", "encoder", "transformer", "none"] = "lsa"
    """`transformer` is a former name of `encoder`."""
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

    A `ranker` (isthmus train) scores candidates, or a `fuser` (isthmus fuse --save) joins the retrievers. The
    `calibrator` (isthmus calibrate --save) is the silo's own and turns the scores into probabilities.
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
    """How a silo's term statistics may leave it, to peers whose policy allows counts.

    The private form is charged to every document's budget: `epsilon` for one replaced word. It is released
    again when the share `renew` of documents has changed, if the budget allows. `fields` adds separate
    statistics of title and body, which a shared ranker reads, at the same ε once more.
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
    """Cost of a question that is answered with a noised count, for peers whose policy allows them.

    Every question is charged to every document: `epsilon` for one document more, less or replaced. A question
    that was asked before gets the same answer for nothing, until the share `renew` of documents has changed.
    """

    epsilon: float = 0.2
    renew: float = 0.2

    def __post_init__(self) -> None:
        require(self.epsilon >= 0.001, f"epsilon = {self.epsilon:g} must be at least 0.001")
        require(0 < self.renew <= 1, f"renew = {self.renew:g} must lie in (0, 1]")


@dataclass(frozen=True)
class SiloTraining:
    """The process that a node starts to take part in training and counts.

    `data` are feature rows to train on. With `private`, a folder of keys (isthmus keys), the node stores
    sketches of its documents there and answers other silos' questions about counts; `queries` are its own
    questions.
    """

    retired: ClassVar[Mapping[str, str]] = MappingProxyType({"superlink": "it is called coordinator now"})
    coordinator: str
    """Address of the coordinator, host:port."""
    data: Path
    tls: Tls
    """The silo's own certificate for training, which `isthmus keys make --training` makes."""
    name: str = "coordinator"
    """Name in the coordinator's certificate."""
    private: Path | None = None
    queries: Path | None = None
    masked_only: bool = False
    """Whether updates may leave only under a secure sum."""
    most_clip: float | None = None
    """Largest norm of an update that leaves, whatever a coordinator proposes; needs `least_noise`."""
    least_noise: float | None = None
    """Least noise multiplier for such an update."""
    least_colluding: int = 1
    """Exchanges whose noise holds against fewer colluding silos are refused."""
    most_width: int = 1 << 18
    """Exchanges with wider sketches of totals are refused."""
    user: str = ""
    """User of the process, if the node runs as root."""

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
    """Settings of a silo's node."""

    silo: str
    folder: Path
    host: str = "127.0.0.1"
    port: int = 8101
    tls: Tls | None = None
    hosts: tuple[str, ...] = ()
    """Further names by which peers reach it; with TLS, any name is accepted if none is listed."""
    keys: Path | None = None
    """File of API keys, hashed, as `isthmus keys` writes it."""
    peers: Mapping[str, Policy] = field(default_factory=dict)
    people: Mapping[str, PersonPolicy] = field(default_factory=dict)
    """Rights of single persons, by their ids."""
    groups: Mapping[str, PersonPolicy] = field(default_factory=dict)
    """Rights of persons without a table of their own, by group; `everyone` if none of theirs has one."""
    sources: tuple[Source, ...] = ()
    forget_sources: bool = False
    """Whether an empty list of sources means that all documents from sources are to be removed."""
    engine: EngineSettings | None = None
    """Engine that has the documents, in place of sources."""
    reading: ParsingLimits = field(default_factory=ParsingLimits)
    """Limits for reading one file of a source."""
    store: StoreSettings = field(default_factory=StoreSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    depth: int = 100
    """Candidates from each retriever."""
    models: Models = field(default_factory=Models)
    statistics: SharedStatistics = field(default_factory=SharedStatistics)
    noised_counts: NoisedCounts = field(default_factory=NoisedCounts)
    learning: Learning = field(default_factory=Learning)
    budget: float = 9.0
    """The ε that a document, or all documents of a subject together, may spend on all peers together."""
    unit: Literal["subject", "document"] = "subject"
    """Owner of the budget for documents with a subject: all of the subject's together, or each document."""
    per_subject: int = 3
    """Documents of one subject in a release of statistics; its ε counts as many times for the subject."""
    erased_models: Literal["relearn", "withdraw"] = "relearn"
    """Treatment of a model that was learned with judgements of documents erased since: it is marked until
    another is learned, or no longer used from that moment on."""
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
        self._check_release()
        if self.engine is not None:
            self._check_attached(self.engine)

    def _check_release(self) -> None:
        """Refuse private statistics of which one release costs more than a budget: they would never leave."""
        statistics = self.statistics
        cost, twice = statistics.epsilon, ""
        if statistics.fields:
            cost, twice = 2 * cost, " with fields = true"
        limits = {f"peers.{name}.budget": each.budget for name, each in self.peers.items() if each.counts}
        if statistics.form != "private" or not limits:
            return
        for key, limit in {"budget": self.budget, **limits}.items():
            require(
                limit is None or cost <= limit * (1 + 1e-9),
                f"statistics.epsilon = {statistics.epsilon:g}{twice} costs a document ε = {cost:g} a release "
                f"and {key} = {limit} is less, so no statistics would leave: lower epsilon, raise {key}, or "
                'set statistics.form = "none"',
            )

    def _check_attached(self, engine: EngineSettings) -> None:
        """Refuse settings that need documents or an index of the node's own."""
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
        """Return a peer's policy limited to a person's rights: those of the person's own table, else of any
        of their groups' tables, else of `everyone`."""
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
        """Noun for a subject, if all sources that state one agree; else ""."""
        nouns = {source.subject_noun for source in self.sources} - {""}
        return nouns.pop() if len(nouns) == 1 else ""

    @property
    def ledger(self) -> Path:
        """Path of the one ledger for all that leaves: that of private counts, if there are any."""
        private = None if self.training is None else self.training.private
        return self.folder / "ledger.db" if private is None else private / "silo.ledger"

    @property
    def cards(self) -> Path | None:
        """Folder of the silo's identity and of the cards it trusts, if it has one."""
        return self.learning.keys or (None if self.training is None else self.training.private)


@dataclass(frozen=True)
class SiloAddress:
    """Address of a node. Beyond this machine it is reached over TLS, unless `unencrypted` states that the
    connection is protected otherwise."""

    url: str
    unencrypted: bool = False
    people: bool = False
    """Whether every search names the person to this silo: by a pseudonym for this silo alone, and groups."""
    identities: bool = False
    """Whether it gets the person's own id in place of the pseudonym, for rules by name."""
    about: str = ""
    """What the silo contains, for the start page and for programs that choose among silos."""

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
    """Circuit breaker: after `failures` in a row a silo is not asked for `pause` seconds, twice as long each
    time up to `longest`; then one search tries it again."""

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
    """When the broker starts learning runs by itself: `every` so often ("1 day"), or not at all ("")."""

    every: str = ""
    mode: Literal["masked", "fedrisk"] = "masked"

    def __post_init__(self) -> None:
        require(
            not self.every or self.seconds > 0,
            f'every = {self.every!r} must be a time such as "6 hours", "1 day" or "2 weeks"',
        )

    @property
    def seconds(self) -> float:
        """Seconds between two runs; 0 without a schedule."""
        matched = _SPAN.fullmatch(self.every)
        return int(matched[1]) * _SECONDS[matched[2]] if matched else 0.0


@dataclass(frozen=True)
class PageText:
    """Text of the page before anything is searched: when a document is right here, and example queries."""

    about: str = ""
    queries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.about) <= 1_000, "page.about has more than 1,000 letters")
        require(len(self.queries) <= 10, "page.queries has more than 10")
        require(all(0 < len(each) <= 200 for each in self.queries), "page.queries have 1 to 200 letters each")


@dataclass(frozen=True)
class OidcSettings:
    """Sign-in at an OpenID Connect provider, where this broker is registered as a client.

    `groups` gives the provider's groups scopes of API keys; `"*"` is everybody who can sign in.
    """

    issuer: str
    client_id: str
    address: str
    """Address of the broker as browsers see it; at the provider, register ADDRESS/v1/signin/callback."""
    groups: Mapping[str, tuple[str, ...]]
    client_secret_file: Path | None = None
    """File of the client secret; None for a public client, which is protected by PKCE alone."""
    groups_claim: str = "groups"
    """Claim with the groups, in ID token or user info: a name, or a path such as realm_access.roles."""
    id_claim: str = "sub"
    """Claim with a person's id; `email` only if the provider has verified it."""
    silo_groups: tuple[str, ...] = ()
    """Groups that are sent to silos in addition to those in `groups`; `"*"` is all."""
    scope: str = "openid profile email"
    """Scope that is requested; some providers need a further word to send groups, or to allow renewal."""
    minutes: float = 15.0
    """Minutes after which the provider is asked again about a person; it has as long again to answer."""
    authority: Path | None = None
    """Certificate of the authority that issued the provider's, if the system does not know it."""

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
        """Exact address to which the provider sends people back."""
        return f"{self.address.rstrip('/')}/v1/signin/callback"


@dataclass(frozen=True)
class BrokerSettings:
    """Settings of the broker. Without `keys` or `oidc` anyone may search, which only loopback allows."""

    name: str = "broker"
    folder: Path = Path("broker")
    host: str = "127.0.0.1"
    port: int = 8100
    tls: Tls | None = None
    """The broker's own certificate, which it also shows to nodes."""
    https: bool = False
    """Whether people reach the broker over TLS with that certificate too."""
    hosts: tuple[str, ...] = ()
    """Further names by which people reach the broker."""
    keys: Path | None = None
    oidc: OidcSettings | None = None
    node_key: SecretText = ""
    """API key that it shows to nodes that it reaches without a certificate."""
    silos: Mapping[str, SiloAddress] = field(default_factory=dict)
    deadline_ms: int = 1_000
    threshold: float = 0.0
    share_statistics: bool = True
    """Whether to sum the silos' statistics and send the sum back, so that scores compare."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    limits: RequestLimits = field(default_factory=RequestLimits)
    training: Path | None = None
    """Folder of a training run, for the Training view."""
    page: PageText = field(default_factory=PageText)
    learning: LearningSchedule = field(default_factory=LearningSchedule)
    log_queries: bool = False
    mcp: bool = False
    """Whether assistants may call the broker at /mcp, each with a person's key; needs the extra mcp."""
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
    """Bytes of the longest reply that is accepted."""

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
"""By kind of configuration: its owner, top-level keys that only it has, and the command that reads it."""


def _other_kind(kind: type, path: str | os.PathLike[str]) -> ConfigError | None:
    """Return the error for a configuration that is not of this kind and has keys of another; else None."""
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
    """Return the text itself or, for `env:NAME`, the value of that environment variable."""
    if not text.startswith("env:"):
        return text
    name = text.removeprefix("env:")
    if name not in os.environ:
        raise ConfigError(f"{key} names the environment variable {name}, which is not set", key=key)
    return os.environ[name]


def literal_secrets(settings: Any) -> list[str]:
    """Return the keys of settings with a secret in the file itself: a key, or an address with a password."""
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
    """Return the configuration with relative paths resolved against `root`."""
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
    """Whether an address uses https, or is on this machine's loopback."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return bool(parts.hostname) and (parts.scheme == "https" or (parts.scheme == "http" and _is_here(url)))


def _is_here(url: str) -> bool:
    """Whether an address is on this machine's loopback."""
    return is_loopback(urlsplit(url).hostname or "")


def is_loopback(host: str) -> bool:
    """Whether a host, by name or number, is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_name(key: str, name: str) -> None:
    """Check a name, which is used in addresses (`silo/id`), certificates and file names."""
    plain = name.replace("-", "").replace("_", "").replace(".", "")
    if not (plain.isascii() and plain.isalnum() and len(name) <= 64):
        raise ValueError(f"{key} = {name!r} must be letters, digits, '-', '_' or '.', at most 64")


def linked(link: str, id: str) -> str:
    """Return the address of a document by a template; "" for none."""
    if not link or not {".", ".."}.isdisjoint(id.split("/")):  # `.` and `..` lead elsewhere on that server
        return ""
    return link.replace("{id}", quote(id, safe="/", errors="replace"))


def _check_link(link: str) -> None:
    """Check that an address fixes its server: a document's id may choose a page there and nothing else."""
    parts = urlsplit(link)
    plain = link.isascii() and link.isprintable() and " " not in link and len(link) <= 1_000
    fixed = parts.scheme in ("http", "https") and parts.netloc and not {"{", "@"} & set(parts.netloc)
    if not (plain and fixed and link.count("{id}") == 1):
        raise ValueError(f"link = {link!r} must be an address such as https://wiki.example.org/{{id}}")


def _check_address(host: str, port: int, tls: Tls | None, needed: str = "[tls]") -> None:
    if host not in LOOPBACK and tls is None:
        raise ValueError(f"host = {host!r} needs {needed}: only loopback may go without")
    require(0 <= port <= 65_535, f"port = {port} must lie in 0..65535")
