"""Parts of documents that are withheld from most: neither searched nor counted nor encoded, and shown to few.

    redact = [{field = "From", unless = ["group:doctors"]}, {field = "body", pattern = "[0-9]{10}"}]

What is withheld is taken out when a source is read, before anything is indexed: nobody's search finds it,
not even theirs to whom it is shown. The store has the whole text beside it, for them and for the owner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from isthmus.config import require
from isthmus.engines import principals_of

MASK = "▮▮▮"
"""In the place of what is withheld: no word."""
LINK = "link"

Texts = tuple[str, str]
"""Title and body."""


@dataclass(frozen=True)
class Redaction:
    """A field that is withheld from all but some: `title`, `body`, `link`, or what lines of the body begin
    with ("From" of "From: …"). With a `pattern`, those parts of title or body alone."""

    field: str
    unless: tuple[str, ...] = ()
    """Who sees it; without any, the owner alone."""
    pattern: str = ""
    """A regular expression."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "unless", principals_of(self.unless))
        require(
            bool(self.field) and self.field.isprintable(), "redact needs a field: title, body, link, From"
        )
        allowed = not self.pattern or self.field in ("title", "body")
        require(allowed, f"redact: a pattern is of title or body, not of {self.field}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"redact: {self.pattern!r} is no regular expression: {error}") from None

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        if self.field in ("title", "body"):
            return re.compile(self.pattern or r"(?s).+", re.MULTILINE)
        return re.compile(rf"(?<=^{re.escape(self.field)}:)[^\n]+", re.MULTILINE | re.IGNORECASE)

    def hides_from(self, principals: frozenset[str] | None) -> bool:
        """Whether it is withheld from these principals; None is of all."""
        return principals is None or principals.isdisjoint(self.unless)

    def __call__(self, texts: Texts) -> Texts:
        """A document without what is withheld."""
        title, body = texts
        if self.field == "title":
            return self._expression.sub(MASK, title), body
        return texts if self.field == LINK else (title, self._expression.sub(MASK, body))


def redacted(texts: Texts, rules: Iterable[Redaction], principals: frozenset[str] | None = None) -> Texts:
    """Title and body as these principals see them; None is as they are searched."""
    for rule in rules:
        if rule.hides_from(principals):
            texts = rule(texts)
    return texts
