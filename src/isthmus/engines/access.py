"""Access rules: principals, and which of a silo's documents they may see.

A principal is `user:ID`, `group:NAME` or `everyone`; a bare name is a group's. A document that names
principals is visible to those only. One that names none follows its source's rule, and without any rule it is
visible to everybody whom the silo's policy admits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

EVERYONE = "everyone"
ANYBODY = frozenset({EVERYONE})
"""The principals of an unidentified person."""
LONGEST_NAME, MOST_PRINCIPALS = 300, 1_000
_SEPARATOR = re.compile(r"[,;|\n]")
_KINDS = ("user:", "group:")


def principals_of(stated: object) -> tuple[str, ...]:
    """Parse the principals in a text (`group:doctors; user:ada`) or a list. Returns each once, sorted.

    Raises a ValueError for anything else: a rule that cannot be read must not open a document.
    """
    if stated is None:
        return ()
    if not isinstance(stated, str | list | tuple):
        raise ValueError(f"allow is a {type(stated).__name__}, not a text or a list of texts")
    parts: Iterable[object] = _SEPARATOR.split(stated) if isinstance(stated, str) else stated
    principals = sorted({_principal(part) for part in parts if part != "" and not _is_blank(part)})
    if len(principals) > MOST_PRINCIPALS:
        raise ValueError(f"allow names {len(principals):,} principals, more than {MOST_PRINCIPALS:,}")
    return tuple(principals)


def may_see(allow: Iterable[str], principals: frozenset[str]) -> bool:
    """Whether a person with these principals may see a document that allows `allow`; everybody may if that is
    empty."""
    named = frozenset(allow)
    return not named or not named.isdisjoint(principals)


def _is_blank(part: object) -> bool:
    return isinstance(part, str) and not part.strip()


def _principal(part: object) -> str:
    if not isinstance(part, str):
        raise ValueError(f"allow has a {type(part).__name__} in it, not a text")
    text = part.strip()
    kind, colon, name = text.partition(":")
    if colon and f"{kind}:" not in _KINDS:
        raise ValueError(f"{text[:60]!r} is no principal: user:ID, group:NAME or {EVERYONE}")
    name = name.strip() if colon else text
    if not _is_name(name):
        raise ValueError(f"{text[:60]!r} is no principal: a name has 1 to {LONGEST_NAME} letters in one line")
    if text == EVERYONE:
        return EVERYONE
    return f"{kind}:{name}" if colon else f"group:{name}"


def subject_of(stated: object) -> str:
    """The person that a document is about, as a source's field states it; "" for nobody."""
    subject = "" if stated is None else str(stated).strip()
    if subject and not _is_name(subject):
        raise ValueError(f"a subject has at most {LONGEST_NAME} letters in one line")
    return subject


def _is_name(text: str) -> bool:
    return 0 < len(text) <= LONGEST_NAME and not any(ord(sign) < 32 or ord(sign) == 127 for sign in text)
