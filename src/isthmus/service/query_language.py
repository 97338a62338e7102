"""Parse a person's query: words to rank by, and filters that narrow the search.

    tidal "spring tide" -lagoon turb* silo:north -type:pdf after:2019 before:2024-06

| written | understood |
|---|---|
| "spring tide" | a phrase that documents must have, and two words to rank by |
| -lagoon, -"spring tide" | a word or phrase that documents must not have |
| turb* | a word that begins with turb |
| silo:north, type:pdf | one of the silos, one of the types named; with - before, none of them |
| after:2019, before:2024-06 | from the first day of 2019 on; before the first day of June 2024 |

Every text is a query: a part that does not parse is read as words, with a hint if something else may have
been intended. A query without filters is its own words, unchanged to the last blank.

>>> understood = parse('tidal "spring tide" -lagoon')
>>> understood.words, understood.phrases, understood.without
('tidal spring tide', ('spring tide',), ('lagoon',))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

Kind = Literal["phrase", "without", "prefix", "silo", "other_silo", "type", "other_type", "after", "before"]
FIELDS = ("silo", "type", "before", "after")
MOST_PARTS = 20
"""Filters of all kinds together that are used; further ones are read as words."""
LEAST_PREFIX = 2
"""Characters that a prefix must have before the *."""
_QUOTES = '"“”„‟«»'
_PART = re.compile(
    rf"""(?P<minus>(?<!\S)-)?
    (?:(?P<field>[A-Za-z_]+):(?=[^\s:/\\]))?
    (?:[{_QUOTES}](?P<quoted>[^{_QUOTES}]*)[{_QUOTES}](?!\w)|(?P<bare>\S+))""",
    re.VERBOSE,
)
_SILOS: tuple[Kind, Kind] = ("silo", "other_silo")
_WORD = re.compile(r"[^\W_]")
_PREFIX = re.compile(r"(?P<stem>\w+)\*")
_DATE = re.compile(r"(?P<year>[0-9]{4})(?:-(?P<month>[0-9]{1,2})(?:-(?P<day>[0-9]{1,2}))?)?")


@dataclass(frozen=True, slots=True)
class Part:
    """A filter of a query, and its place in the query: characters `start` to `end`."""

    kind: Kind
    value: str
    start: int
    end: int
    date: int | None = None
    """Unix time of a date's first moment, UTC."""


@dataclass(frozen=True)
class ParsedQuery:
    """The words and filters of a query."""

    words: str
    """Words by which hits are ranked and to which judgements refer; empty if the query has filters alone."""
    parts: tuple[Part, ...] = ()
    hints: tuple[str, ...] = field(default=(), compare=False)
    misread: tuple[range, ...] = field(default=(), compare=False)
    """Places in the query of parts that look like filters and were read as words."""

    def of(self, kind: Kind) -> tuple[str, ...]:
        """The values of one kind, each once."""
        return tuple(dict.fromkeys(part.value for part in self.parts if part.kind == kind))

    @property
    def phrases(self) -> tuple[str, ...]:
        """Phrases that documents must have."""
        return self.of("phrase")

    @property
    def without(self) -> tuple[str, ...]:
        """Words and phrases that documents must not have."""
        return self.of("without")

    @property
    def since(self) -> int | None:
        """Unix time from which on documents must be dated: the latest of several."""
        return max(self._dates("after"), default=None)

    @property
    def until(self) -> int | None:
        """Unix time before which documents must be dated: the earliest of several."""
        return min(self._dates("before"), default=None)

    def _dates(self, kind: Kind) -> list[int]:
        return [part.date for part in self.parts if part.kind == kind and part.date is not None]

    @property
    def narrows(self) -> bool:
        """Whether the query has filters besides those of silos."""
        return any(part.kind not in _SILOS for part in self.parts)

    def silos(self, names: Sequence[str]) -> list[str]:
        """Return those of the named silos that are to be searched."""
        wanted, others = ({name.lower() for name in self.of(kind)} for kind in _SILOS)
        named = [name for name in names if not wanted or name.lower() in wanted]
        return [name for name in named if name.lower() not in others]


def parse(query: str) -> ParsedQuery:
    """Parse any text as a query."""
    words: list[str] = []
    parts: list[Part] = []
    hints: list[str] = []
    misread: list[range] = []
    for match in _PART.finditer(query):
        part, hint = _read(match)
        if part is not None and len(parts) == MOST_PARTS:
            part, hint = None, f"only {MOST_PARTS} filters are used; others were read as words"
        if hint and hint not in hints:
            hints.append(hint)
        if part is None:
            words.append(match.group())
            misread += [range(*match.span())] if hint and match["field"] else []
        else:
            parts.append(part)
            words += [part.value] if part.kind == "phrase" else []
    return ParsedQuery(" ".join(words) if parts else query, tuple(parts), tuple(hints), tuple(misread))


def _read(match: re.Match[str]) -> tuple[Part | None, str]:
    """Parse a match. Returns the filter, if it is one, and a hint if another reading may be intended."""
    minus, name, quoted, bare = match.group("minus", "field", "quoted", "bare")
    value = bare if quoted is None else quoted.strip()
    if not _WORD.search(value):
        return None, ""
    if name is not None and name.lower() in FIELDS:
        return _filter(match, name.lower(), value, bool(minus))
    start, end = match.span()
    if name is not None:
        known = ", ".join(f"{each}:" for each in FIELDS)
        part = Part("without", f"{name} {value}", start, end) if minus else None
        return part, f"{name}: is no filter and was read as a word; filters are {known}"
    if quoted is not None:
        return Part("without" if minus else "phrase", value, start, end), ""
    prefix = _PREFIX.fullmatch(value)
    if prefix is not None and not minus:
        if len(prefix["stem"]) < LEAST_PREFIX:
            return None, f"* stands after at least {LEAST_PREFIX} characters"
        return Part("prefix", prefix["stem"], start, end), ""
    if minus and value[0] != "-":
        return Part("without", value, start, end), ""
    return None, ""


def _filter(match: re.Match[str], name: str, value: str, minus: bool) -> tuple[Part | None, str]:
    """Return the filter of a known field, or None and a hint if its value is no date."""
    start, end = match.span()
    if name == "silo":
        return Part("other_silo" if minus else "silo", value, start, end), ""
    if name == "type":
        return Part("other_type" if minus else "type", value.lower().lstrip("."), start, end), ""
    moment = None if minus else first_moment(value)
    if moment is None:
        return None, f"{name}: wants a date (2024, 2024-05 or 2024-05-31) and was read as a word"
    return Part("after" if name == "after" else "before", value, start, end, moment), ""


def first_moment(date: str) -> int | None:
    """Return the Unix time at which a year, month or day begins, in UTC; None if the text is no date."""
    match = _DATE.fullmatch(date)
    if match is None:
        return None
    try:
        begin = datetime(int(match["year"]), int(match["month"] or 1), int(match["day"] or 1), tzinfo=UTC)
    except ValueError:
        return None
    return int(begin.timestamp())


def unknown_silos(query: ParsedQuery, names: Iterable[str]) -> tuple[str, ...]:
    """Return hints about silos that the query names but that do not exist."""
    known = list(names)
    lower = {name.lower() for name in known}
    named = dict.fromkeys(name for kind in _SILOS for name in query.of(kind))
    missing = [name for name in named if name.lower() not in lower]
    return (f"no silo is called {', '.join(missing)}; there are {', '.join(known)}",) if missing else ()


def judged_query(query: str) -> str:
    """Return the text to which a judgement of a hit refers: the words without filters, if there are any."""
    words = parse(query).words
    return words if words.strip() else query
