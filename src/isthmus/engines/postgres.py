"""A table of PostgreSQL, searched by its own full-text search.

    … WHERE tsv @@ 'tidal' | 'power' ORDER BY Σ weight·tf/(tf + k1·(1 − b + b·length/average)) DESC

`ts_rank` of one term is w·6/π²·Σ 1/i² over its occurrences i, from which their number tf is computed; lengths
are in octets. So the order is nearly that of BM25, and exact scores decide afterwards. Connections are
read-only and see what their role may see: grants and row-level security apply.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

from isthmus.encoders import Vectors
from isthmus.engines.engine import ANY, MOST_FACETS, Constraints, Matches
from isthmus.engines.remote import (
    BATCH,
    LATEST,
    TOO_SLOW,
    Location,
    RemoteDocument,
    RemoteProblem,
    RemoteSource,
    names_of,
    rule_of,
    sees_unruled,
    words_of,
)
from isthmus.engines.terms import STOP
from isthmus.errors import ConfigError, MissingExtra, ServiceError
from isthmus.retrieval import BM25

GONE = ("08", "28", "3D", "53300", "57P")
"""SQLSTATEs of a server that cannot be used at all: no connection, no right to connect, no database, shut
down."""
IDLE = 4
"""Maximum number of idle connections that stay open."""
GRACE = 2
"""Multiple of `Location.seconds` after which the client stops waiting, if the server's own timeout did not
act."""
_SOURCES = """
    SELECT c.oid, quote_ident(n.nspname) || '.' || quote_ident(c.relname), n.nspname = 'public', c.reltuples
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname NOT IN ('pg_catalog', 'information_schema')
        AND n.nspname NOT LIKE 'pg\\_%%' AND has_table_privilege(c.oid, 'SELECT') ORDER BY 3 DESC, 2"""
_COLUMNS = """
    SELECT a.attname, format_type(a.atttypid, NULL), EXISTS (SELECT 1 FROM pg_index i
        WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum
            AND i.indpred IS NULL)
    FROM pg_attribute a WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""
_INDEXED = """
    SELECT pg_get_expr(i.indexprs, i.indrelid) FROM pg_index i
    WHERE i.indrelid = %s AND pg_get_expr(i.indexprs, i.indrelid) LIKE 'to_tsvector(%%'"""
_ALIKE = "{.1, .1, .1, .1}"
_TIMES = "(1 / (1.645 * greatest(1 - 10 * r{0}, 1e-4)) - 0.5)"
"""SQL for the number n of occurrences: Σ 1/i² up to n is less than π²/6 by about 1/(n + ½)."""
_SPREAD = f"({BM25().k1} * (1 - {BM25().b} + {BM25().b} * size))"
_CONFIGURATION = re.compile(r"to_tsvector\('(\w+)'")
_WHOLE = re.compile("-?[0-9]{1,18}")
_KINDS = {"text": "text", "character varying": "text", "character": "text", "tsvector": "search"}


class PostgresEngine:
    """See `CountedEngine`. `search_by` is a tsvector: a column, or an expression that has an index."""

    noun: ClassVar[str] = "PostgreSQL"
    ranks_alone: ClassVar[bool] = True

    def __init__(self, location: Location) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtra("postgres", "a table in PostgreSQL") from error
        self._psycopg, self._at, self.location = psycopg, location, location
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._key_type, self._average = "", 0.0
        self._source = location.source.replace("%", "%%")
        self._id = _quoted(location.id)
        vector = location.search_by
        self._vector = _quoted(vector) if vector.isidentifier() else vector.replace("%", "%%")
        configured = _CONFIGURATION.match(vector)
        self._configuration = f"'{configured[1]}', " if configured else ""
        columns = [_quoted(name) for name in (location.title, location.body) if name]
        self._texts = [f"coalesce({column}::text, '')" for column in columns]
        self._type = f"left(lower(trim({_quoted(location.type)}::text)), 100)" if location.type else "NULL"
        self._size = " + ".join(f"coalesce(octet_length({column}::text), 0)" for column in columns)
        named = f"{self._id} IS NOT NULL"
        self._where = (
            f"({location.filter})".replace("%", "%%") + f" AND {named}" if location.filter else named
        )

    @cached_property
    def _fields(self) -> str:
        """SQL columns for the fields of a `RemoteDocument`."""
        texts = (*(() if self._at.title else ("''",)), *self._texts)
        rules = f"coalesce({self._rules}, '{{}}')"
        return ", ".join((f"{self._id}::text", *texts, f"coalesce({self._type}, '')", self._dates[0], rules))

    def _document(self, row: Sequence[Any]) -> RemoteDocument:
        id, title, body, type, date, rule = row
        return RemoteDocument(id, title, body, type, date, rule_of(rule, self._at))

    @cached_property
    def _dates(self) -> tuple[str, str, str]:
        """SQL for the date as Unix time, the date's column, and the placeholder of a Unix time to compare
        with it."""
        if not self._at.date:
            return "NULL::bigint", "NULL::bigint", "%s"
        column = _quoted(self._at.date)
        ((kind,),) = self._rows(f"SELECT pg_typeof((SELECT {column} FROM {self._source} LIMIT 1))::text")
        if kind in ("smallint", "integer", "bigint"):
            return _dated(f"{column}::bigint"), column, "%s"
        if kind != "date" and not kind.startswith("timestamp"):
            raise ConfigError(
                f"{self._at.date} is {kind}", key="engine.date", expected="a timestamp, a date, or seconds"
            )
        seconds = f"CASE WHEN isfinite({column}) THEN {_dated(f'extract(epoch FROM {column})::bigint')} END"
        moment = "to_timestamp(%s)" + ("" if kind.endswith("with time zone") else " AT TIME ZONE 'UTC'")
        return seconds, column, moment

    def _narrowed(self, only: Constraints) -> tuple[str, list[Any]]:
        """The SQL condition for rows that meet constraints, and its values."""
        parts, values = [self._where], list[Any]()
        for wanted, test in ((only.types, "= ANY(%s)"), (only.other_types, "<> ALL(%s)")):
            if wanted:
                parts.append(f"coalesce({self._type}, '') {test}")
                values.append([each.replace("\0", " ") for each in wanted])
        for bound, test in ((only.since, ">="), (only.until, "<")):
            if bound is not None:
                _, column, moment = self._dates
                parts.append(f"{column} {test} {moment}")
                values.append(bound)
        if only.readers is not None:
            rule = f"{self._rules} && %s::text[]"
            if sees_unruled(only.readers, self._at):
                rule += f" OR coalesce(cardinality({self._rules}), 0) = 0"
            parts.append(f"({rule})")
            values.append([each.replace("\0", " ") for each in names_of(only.readers)])
        return " AND ".join(parts), values

    @cached_property
    def _rules(self) -> str:
        """SQL for the array of a row's principals."""
        if not self._at.allow:
            return "NULL::text[]"
        column = _quoted(self._at.allow)
        ((kind,),) = self._rows(f"SELECT pg_typeof((SELECT {column} FROM {self._source} LIMIT 1))::text")
        if kind in ("text[]", "character varying[]"):
            return f"{column}::text[]"
        if kind in ("text", "character varying"):
            split = f"regexp_split_to_array(btrim({column}, E' \\t\\n,;|'), E'\\\\s*[,;|\\n]\\\\s*')"
            return f"array_remove({split}, '')"
        raise ConfigError(
            f"{self._at.allow} is {kind}", key="engine.allow_field", expected="a column of text[], or of text"
        )

    def check_rules(self) -> None:
        """Raise a ConfigError unless the column of principals is of type text or text[]."""
        _ = self._rules

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection for exclusive use; after an error it is closed, otherwise reused."""
        with self._lock:
            db = self._idle.pop() if self._idle else None
        try:
            if db is None:
                db = self._connected()
            yield db
        except self._psycopg.OperationalError as error:
            if db is not None:
                db.close()
            raise self._unanswered(error) from None
        except self._psycopg.Error as error:
            if db is not None:
                db.close()
            raise self._refused(error) from None
        except BaseException:
            if db is not None:
                db.close()
            raise
        with self._lock:
            if len(self._idle) < IDLE:
                self._idle.append(db)
                return
        db.close()

    def _connected(self) -> Any:
        milliseconds = int(1000 * self._at.seconds)
        options = f"-c default_transaction_read_only=on -c statement_timeout={milliseconds}"
        seconds = max(2, round(self._at.seconds))
        return _bounded(self._psycopg.Connection, GRACE * self._at.seconds).connect(
            self._at.url,
            autocommit=True,
            connect_timeout=seconds,
            options=options,
            tcp_user_timeout=milliseconds,
            application_name="isthmus",
        )

    def _refused(self, error: Any) -> RemoteProblem:
        cure = "check engine.source, its columns and filter, and what the role may read"
        return RemoteProblem(self.noun, _first_line(error), cure, code=f"SQLSTATE {error.sqlstate}")

    def _unanswered(self, error: Any) -> ServiceError:
        if isinstance(error, self._psycopg.errors.QueryCanceled):
            cure = "an index on the tsvector makes it fast; engine.seconds lets it take longer"
            return RemoteProblem(self.noun, f"not within {self._at.seconds:g} s", cure, code=TOO_SLOW)
        if error.sqlstate and not error.sqlstate.startswith(GONE):  # this statement failed; the server works
            return self._refused(error)
        return ServiceError(
            f"PostgreSQL cannot be reached: {_first_line(error)} (check engine.url, and that the server runs)"
        )

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._connection() as db:
            try:
                rows: list[tuple[Any, ...]] = db.execute(statement.encode(), tuple(values)).fetchall()
            except self._psycopg.OperationalError:
                if not db.closed:
                    raise
                db.close()  # the server had closed it: retry once with a new connection
                with self._connected() as again:
                    rows = again.execute(statement.encode(), tuple(values)).fetchall()
            return rows

    def sources(self) -> list[RemoteSource]:
        """Tables and views with a text column, and what can be searched in them."""
        sources = []
        for oid, name, is_public, estimate in self._rows(_SOURCES):
            columns = self._rows(_COLUMNS, (oid,))
            kinds = {column: _KINDS.get(kind, "other") for column, kind, _ in columns}
            if "text" not in kinds.values():
                continue
            kinds |= {
                column: "id" for column, kind, unique in columns if unique and kinds[column] != "search"
            }
            kinds |= {expression: "search" for (expression,) in self._rows(_INDEXED, (oid,))}
            short = name.partition(".")[2] if is_public else name
            size = int(estimate) if estimate >= 0 else self._rows(f"SELECT count(*) FROM {name}")[0][0]
            sources.append(RemoteSource(short, size, kinds))
        return sources

    def documents(self, only: Constraints = ANY) -> int:
        """Count the rows that the role sees and that meet filter and constraints."""
        where, values = self._narrowed(only)
        return int(self._rows(f"SELECT count(*) FROM {self._source} WHERE {where}", values)[0][0])

    def version(self) -> str:
        """The number of rows ever written and removed, as the server counts them; for a view, its number of
        rows."""
        counted = self._rows(
            """SELECT n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_all_tables
            WHERE relid = to_regclass(%s)""",
            (self._at.source,),
        )
        return f"written {counted[0][0]}" if counted else f"rows {self.documents()}"

    def _query(self, text: str) -> tuple[str, list[str]]:
        """SQL for a tsquery of any of a text's words, and the words. The text search configuration is that of
        `search_by`, or the server's."""
        words = words_of(text)
        return "(" + " || ".join([f"plainto_tsquery({self._configuration}%s)"] * len(words)) + ")", words

    def search(
        self, text: str, vector: Vectors, depth: int, only: Constraints = ANY
    ) -> list[tuple[str, float]]:
        """The best rows by `ts_rank_cd` of any of the words."""
        query, words = self._query(text)
        if not words:
            return []
        where, values = self._narrowed(only)
        rows = self._rows(
            f"""SELECT {self._id}::text, ts_rank_cd({self._vector}, {query}, 32) FROM {self._source}
            WHERE {where} AND {self._vector} @@ {query} ORDER BY 2 DESC, 1 LIMIT %s""",
            (*words, *values, *words, depth),
        )
        return [(id, float(score)) for id, score in rows]

    def matches(self, text: str, only: Constraints = ANY) -> Matches:
        """Count the rows that `search` would find."""
        query, words = self._query(text)
        return self._matched(query, words, only) if words else Matches(0, {}, {})

    def having(self, terms: Sequence[str], only: Constraints = ANY) -> Matches:
        """Count the rows with any of the terms; stop words match nothing."""
        lexemes = [_lexeme(word) for word in terms if not word.startswith(STOP)]
        return self._matched("%s::tsquery", [" | ".join(lexemes)], only) if lexemes else Matches(0, {}, {})

    def _matched(self, query: str, words: Sequence[str], only: Constraints) -> Matches:
        where, values = self._narrowed(only)
        year = f"extract(year FROM to_timestamp({self._dates[0]}) AT TIME ZONE 'UTC')::int"
        rows = self._rows(
            f"""SELECT grouping(kind, year), kind, year, count(*) FROM (
                SELECT {self._type} AS kind, {year} AS year FROM {self._source}
                WHERE {where} AND {self._vector} @@ {query}) AS hits
            GROUP BY GROUPING SETS ((), (kind), (year)) ORDER BY 4 DESC, 1, 2, 3 LIMIT 1000""",
            (*values, *words),
        )
        types = [(kind, count) for by, kind, _, count in rows if by == 1 and kind]
        years = [(year, count) for by, _, year, count in rows if by == 2 and year is not None]
        total = next((count for by, _, _, count in rows if by == 3), 0)
        return Matches(total, dict(types[:MOST_FACETS]), dict(years[:MOST_FACETS]))

    def matching(self, weights: Mapping[str, float], depth: int, only: Constraints = ANY) -> list[str]:
        """Rows with any of the terms, nearly in the order of BM25 with these weights; stop words match
        nothing."""
        terms = {word: weight for word, weight in weights.items() if weight > 0 and not word.startswith(STOP)}
        if not terms:
            return []
        lexemes = [_lexeme(word) for word in terms]
        places = range(len(terms))
        where, values = self._narrowed(only)
        ranks = ", ".join(f"ts_rank('{_ALIKE}', v, %s::tsquery) AS r{at}" for at in places)
        parts = " + ".join(f"%s * (r{at} > 0)::int / (1 + {_SPREAD} / {_TIMES.format(at)})" for at in places)
        statement = f"""SELECT id FROM (SELECT id, size / %s::float AS size, {ranks} FROM (
            SELECT {self._id}::text AS id, {self._size} AS size, {self._vector} AS v FROM {self._source}
            WHERE {where} AND {self._vector} @@ %s::tsquery OFFSET 0) AS hits OFFSET 0) AS ranked
            ORDER BY {parts} DESC LIMIT %s"""
        query = (*values, " | ".join(lexemes))
        filled = (self._average_size(), *lexemes, *query, *terms.values(), depth)
        return [id for (id,) in self._rows(statement, filled)]

    def _average_size(self) -> float:
        """Average length of the first thousand rows, in octets."""
        if not self._average:
            sizes = f"SELECT {self._size} AS size FROM {self._source} WHERE {self._where} LIMIT 1000"
            self._average = float(self._rows(f"SELECT avg(size) FROM ({sizes}) AS sizes")[0][0] or 1)
        return self._average

    def agreement(self, terms: Mapping[str, Sequence[str]]) -> int:
        """How many of the documents' terms are lexemes of the same documents on the server."""
        total = 0
        for id, words in terms.items():
            where, value = self._keyed([id])
            statement = f"""SELECT count(*) FROM {self._source}, unnest(%s::text[]) AS term
                WHERE {where} AND {self._vector} @@ term::tsquery"""
            total += self._rows(statement, ([_lexeme(word) for word in words], value))[0][0]
        return total

    def get(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """The rows with these keys, by key."""
        documents: dict[str, RemoteDocument] = {}
        for start in range(0, len(ids), BATCH):
            where, value = self._keyed(list(ids[start : start + BATCH]))
            statement = f"SELECT {self._fields} FROM {self._source} WHERE {self._where} AND {where}"
            documents |= {row[0]: self._document(row) for row in self._rows(statement, (value,))}
        return documents

    def _keyed(self, ids: list[str]) -> tuple[str, list[str]]:
        """A condition that can use the key's index, and its value; ids that are not of the key's type are
        left out."""
        if not self._key_type:
            first = f"SELECT {self._id} FROM {self._source} LIMIT 1"
            ((kind,),) = self._rows(f"SELECT pg_typeof(({first}))::text")
            self._key_type = "bpchar" if kind == "character" else str(kind)  # a cast to `character` keeps one
        if self._key_type in ("smallint", "integer", "bigint"):
            ids = [id for id in ids if _WHOLE.fullmatch(id)]
            return f"{self._id} = ANY(%s::bigint[])", ids
        if self._key_type in ("text", "character varying"):
            return f"{self._id} = ANY(%s::text[])", [id.replace("\0", " ") for id in ids]
        return f"{self._id}::text = ANY(%s::text[])", [id.replace("\0", " ") for id in ids]

    def newest(self, depth: int, only: Constraints = ANY) -> list[str]:
        """Ids of the rows with the latest dates."""
        where, values = self._narrowed(only)
        statement = f"""SELECT {self._id}::text FROM {self._source} WHERE {where}
            ORDER BY {self._dates[0]} DESC NULLS LAST, 1 LIMIT %s"""
        return [id for (id,) in self._rows(statement, (*values, depth))]

    def scan(self, only: Constraints = ANY) -> Iterator[list[RemoteDocument]]:
        """All rows in key order, one statement for each batch, so that none runs for long."""
        key, (where, values) = self._id, self._narrowed(only)
        self._keyed([])
        last, after = "", "TRUE"
        while True:
            statement = f"""SELECT {self._fields} FROM {self._source}
                WHERE {where} AND {after} ORDER BY {key} LIMIT {BATCH}"""
            rows = self._rows(statement, (*values, *([last] if last else [])))
            if rows:
                yield [self._document(row) for row in rows]
            if len(rows) < BATCH:
                return
            last, after = rows[-1][0], f"{key} > %s::{self._key_type}"

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for db in self._idle:
                db.close()
            self._idle.clear()


def vector_of(columns: Sequence[str], configuration: str) -> str:
    """SQL for the tsvector of columns that have none; every search computes it again."""
    texts = " || ' ' || ".join(f"coalesce({_quoted(name)}::text, '')" for name in columns)
    if not configuration.replace("_", "").isalnum():
        raise ConfigError(f"{configuration!r} is no text search configuration", expected="english")
    return f"to_tsvector('{configuration}', {texts})"


def _bounded(connection: Any, seconds: float) -> Any:
    """A class of connections that give up if the server is silent or its answer has no end."""

    class BoundedConnection(connection):  # type: ignore[misc]
        """A connection that waits a limited time for each answer."""

        def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
            """Run one exchange with the server and return its result."""
            return super().wait(_within(gen, seconds), *arguments, **named)

    return BoundedConnection


def _within(exchange: Generator[Any, Any, Any], seconds: float) -> Generator[Any, Any, Any]:
    """Limit the duration of an exchange with the server; psycopg resumes it several times a second."""
    from psycopg import OperationalError

    until = time.monotonic() + seconds
    try:
        waits_for = next(exchange)
        while True:
            ready = yield waits_for
            if time.monotonic() > until:
                raise OperationalError(f"no answer within {seconds:g} s")
            waits_for = exchange.send(ready)
    except StopIteration as end:
        return end.value


def _dated(seconds: str) -> str:
    """SQL for a Unix time, or NULL if it is out of range."""
    return f"CASE WHEN {seconds} BETWEEN {-LATEST} AND {LATEST} THEN {seconds} END"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def _lexeme(word: str) -> str:
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
