"""Everything Isthmus raises on purpose, branched by who can act on it.

    IsthmusError
    ├── DataError (ValueError)          the person with the file: file, line, text, cure
    ├── ConfigError (ValueError)        the person with the configuration: key, value, expected, nearest
    ├── MissingExtra (ImportError)      the person with the environment: pip install isthmus[…]
    ├── MissingDistribution (ImportError)  the same person: pip install ./reproduce
    ├── PrivacyError                    the silo's owner
    │   ├── BudgetExhausted             a release would overspend: peer, requested, left
    │   └── ProtocolError               a message that is not what the protocol says
    ├── FederationError                 the coordinator
    │   ├── RoundFailed                 too few usable answers: round, silos
    │   └── IncompatibleUpdate          silo, expected, got
    └── ServiceError                    the operator
        ├── SiloUnavailable
        └── Refused

A message names both clashing facts and the cure, on one line. Messages that travel to a peer never
echo terms, ids or counts.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from os import PathLike
from typing import Any


class IsthmusError(Exception):
    """The root of the tree: `except IsthmusError` catches every failure that Isthmus foresees."""

    def __reduce__(self) -> tuple[Any, ...]:
        # errors of worker processes are pickled; the default would call __init__ with the message alone
        return _revived, (type(self), self.args, self.__dict__)


class DataError(IsthmusError, ValueError):
    """Input that cannot be read as what it claims to be."""

    def __init__(
        self,
        problem: str,
        *,
        file: str | PathLike[str] | None = None,
        line: int | None = None,
        text: str | None = None,
        cure: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = None if file is None else str(file)
        self.line = line
        self.text = None if text is None else _shorten(text)
        self.cure = cure
        where = "" if self.file is None else f"{self.file}:{line}: " if line else f"{self.file}: "
        quoted = "" if self.text is None else f": {self.text!r}"
        hint = "" if cure is None else f" ({cure})"
        super().__init__(f"{where}{problem}{quoted}{hint}")

    @classmethod
    def unreadable(cls, file: str | PathLike[str], error: OSError) -> DataError:
        """The error for a file that cannot be opened or read."""
        return cls(f"cannot be read: {error.strerror or error}", file=file, cure="check the path")


class ConfigError(IsthmusError, ValueError):
    """A configuration key or value that Isthmus does not know.

    `key` is dotted (`train.rounds`); `known` are the names that are valid in the place of its last part.
    """

    def __init__(
        self,
        problem: str,
        *,
        key: str | None = None,
        value: object = None,
        expected: str | None = None,
        known: Iterable[str] = (),
    ) -> None:
        names = list(known)
        self.key = key
        self.value = value
        self.expected = expected
        word = key or ""
        self.nearest = nearest(word, names) or nearest(word.rpartition(".")[2], names)
        cures = [] if expected is None else [f"expected {expected}"]
        if self.nearest:
            cures.append(f"did you mean {self.nearest!r}?")
        elif names:
            cures.append(f"known: {', '.join(names)}")
        super().__init__(f"{problem} ({'; '.join(cures)})" if cures else problem)


class MissingExtra(IsthmusError, ImportError):
    """An optional package is missing; the message names the extra that installs it."""

    def __init__(self, extra: str, purpose: str) -> None:
        self.extra = extra
        super().__init__(f"{purpose} needs an optional package: pip install 'isthmus[{extra}]'")


def check_extra(extra: str, purpose: str, *modules: str) -> None:
    """Raise MissingExtra if a module of an extra is not installed, without importing it."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        raise MissingExtra(extra, purpose)


class MissingDistribution(IsthmusError, ImportError):
    """The command belongs to another distribution, which is not installed."""

    def __init__(self, distribution: str, command: str, cure: str) -> None:
        self.distribution = distribution
        super().__init__(f"isthmus {command} comes with {distribution}, which is not installed: {cure}")


class PrivacyError(IsthmusError):
    """A release that is not allowed, or a message that is not what it should be."""


class BudgetExhausted(PrivacyError):
    """A release would spend more than the budget has left; nothing was released."""

    def __init__(self, peer: str, requested: float, left: float) -> None:
        self.peer, self.requested, self.left = peer, requested, left
        super().__init__(
            f"the release asks for ε = {requested:g} but only {left:g} is left for {peer}"
            " (raise the budget in the silo's policy, or ask for less)"
        )


class ProtocolError(PrivacyError):
    """A malformed, replayed, truncated or oversized message."""


class FederationError(IsthmusError):
    """Training across silos could not go on."""


class RoundFailed(FederationError):
    """Too few silos gave a usable answer."""

    def __init__(self, round: int, silos: dict[str, str], needed: int, cure: str = "") -> None:
        self.round, self.silos, self.needed = round, silos, needed
        reasons = ", ".join(f"{silo}: {why}" for silo, why in sorted(silos.items())) or "no silo answered"
        super().__init__(f"round {round} needs {needed} usable answers ({reasons}){cure and f'; {cure}'}")


class IncompatibleUpdate(FederationError):
    """A silo's parameters do not fit the model."""

    def __init__(self, silo: str, expected: str, got: str) -> None:
        self.silo, self.expected, self.got = silo, expected, got
        super().__init__(f"{silo} sent {got} where the model has {expected}")


class ServiceError(IsthmusError):
    """A node or the broker could not serve."""


class SiloUnavailable(ServiceError):
    """A silo did not answer in time, or at all."""


class Refused(ServiceError):
    """The other side recognised the caller and refused the request."""


def _revived(kind: type[IsthmusError], args: tuple[Any, ...], state: dict[str, Any]) -> IsthmusError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, or None if none is close enough."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def several(number: int, one: str, many: str = "") -> str:
    """A number with its noun.

    >>> several(1, "query", "queries"), several(2_000, "row")
    ('1 query', '2,000 rows')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def plain(text: str) -> str:
    """Text from elsewhere without anything that a terminal would obey.

    >>> plain("a\\x1b[2Jb")
    'a [2Jb'
    """
    return "".join(sign if sign.isprintable() else " " for sign in text)
