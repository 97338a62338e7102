"""Redaction: parts of documents that are neither searched nor counted nor encoded, and that only few may see.

    redact = [{field = "From", unless = ["group:doctors"]}, {field = "body", pattern = "[0-9]{10}"}]

Withheld parts are removed when a source is read, before anything is indexed, so no search finds them, not
even one by a person who may see them. The store also has the whole text, for those people and the owner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from isthmus.config import require
from isthmus.engines import principals_of

MASK = "▮▮▮"
"""Replaces withheld text; contains no word."""
LINK = "link"

Texts = tuple[str, str]
"""Title and body."""


@dataclass(frozen=True)
class Redaction:
    """A field that is withheld from most people: `title`, `body`, `link`, or the label of lines in the body
    ("From" for "From: …"). With a `pattern`, only the matching parts of title or body are withheld."""

    field: str
    unless: tuple[str, ...] = ()
    """Principals who may see the field; if empty, only the owner."""
    pattern: str = ""
    """Regular expression for the withheld parts; empty for the whole field."""

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
        """Whether the field is withheld from these principals; None stands for the text that is indexed."""
        return principals is None or principals.isdisjoint(self.unless)

    def __call__(self, texts: Texts) -> Texts:
        """Return title and body of a document without the withheld parts."""
        title, body = texts
        if self.field == "title":
            return self._expression.sub(MASK, title), body
        return texts if self.field == LINK else (title, self._expression.sub(MASK, body))


def redacted(texts: Texts, rules: Iterable[Redaction], principals: frozenset[str] | None = None) -> Texts:
    """Return title and body as these principals may see them; with None, as they are indexed."""
    for rule in rules:
        if rule.hides_from(principals):
            texts = rule(texts)
    return texts
