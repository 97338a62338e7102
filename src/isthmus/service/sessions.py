"""Sessions of the page: a random id in a cookie stands for an API key, or for a provider's grant to a person.

    sessions = Sessions(keys, provider)
    cookie = sessions.open(token)       # its hash is stored, the key is not
    cookie = sessions.begin(grant)      # for a person whom the provider has signed in
    sessions.caller(cookie)             # while the key or the grant is valid and the session is used
    sessions.close(cookie)
    sessions.end("ada")                 # all of a person's

They are in the broker's memory only: after a restart people sign in again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from isthmus.errors import Refused
from isthmus.service.security import ApiKeys, Caller

if TYPE_CHECKING:
    from starlette.types import Scope

COOKIE, SECURE_COOKIE = "isthmus_session", "__Host-isthmus_session"
"""Names of the cookie over plain HTTP, which only loopback and a proxy on this machine use, and over TLS."""
FORMER_COOKIE = "isthmus_key"
"""Name of an earlier cookie with the API key itself, which is removed from browsers that still have it."""
IDLE, LONGEST = 12 * 3600.0, 7 * 86400.0
"""Seconds after which a session ends: since its last use, and since its beginning."""
MOST, EACH = 10_000, 20
"""Most sessions of all people, and of one key or person; beyond that, the longest unused one is ended."""
RETRY = 60.0
"""Seconds between two requests to a provider that does not answer."""

Reason = Literal["again", "denied", "groups", "provider"]
_log = logging.getLogger("isthmus.service")


class NotSignedIn(Refused):
    """A person is not signed in; `reason` is what the page shows.

    again: the sign-in was not begun in this browser, or took too long; denied: the provider refused; groups:
    none of the person's groups has a scope here; provider: it does not answer, or its answer cannot be
    trusted.
    """

    def __init__(self, reason: Reason, problem: str) -> None:
        self.reason: Reason = reason
        super().__init__(problem)


@dataclass(frozen=True)
class Grant:
    """A person as the provider has confirmed them; to be renewed from `due` on, and valid until `until`."""

    caller: Caller[Any]
    subject: str
    due: float
    until: float
    refresh: str = field(default="", repr=False)


class SignInProvider(Protocol):
    """A service that signs people in."""

    @property
    def host(self) -> str:
        """Host name by which people know it."""

    @property
    def secure(self) -> bool:
        """Whether browsers reach the broker over TLS."""

    async def begin(self) -> tuple[str, str]:
        """Begin a sign-in. Returns the address of its page, and the sealed state that the browser keeps."""

    async def finish(self, parameters: Mapping[str, str], pending: str) -> Grant:
        """Finish a sign-in with these parameters; raises NotSignedIn if it failed."""

    async def renew(self, grant: Grant) -> Grant:
        """Ask about a person again; raises NotSignedIn if the provider refuses."""

    async def end_address(self) -> str | None:
        """Address of its own page for signing out; None if it has none."""


@dataclass(frozen=True)
class _Session:
    owner: str
    """The id of an API key, or the person's subject at the provider."""
    opened: float
    used: float
    grant: Grant | None = None


class Sessions:
    """Open sessions by the hash of their ids, the longest unused first."""

    def __init__(
        self,
        keys: ApiKeys | None,
        provider: SignInProvider | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys, self.provider, self._clock = keys, provider, clock
        self._open: OrderedDict[bytes, _Session] = OrderedDict()
        self._renewing: dict[bytes, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def with_keys(self) -> bool:
        """Whether sessions can be opened with an API key."""
        return self._keys is not None

    def open(self, token: str) -> str | None:
        """Open a session for the owner of an API key. Returns its id; None if the key is not valid."""
        key = None if self._keys is None else self._keys.key_of(token)
        return None if key is None else self._begun(key.id, None)

    def begin(self, grant: Grant) -> str:
        """Open a session for a person whom the provider has signed in. Returns its id."""
        return self._begun(grant.subject, grant)

    def _begun(self, owner: str, grant: Grant | None) -> str:
        own = [
            name
            for name, each in self._open.items()
            if each.owner == owner and (each.grant is None) == (grant is None)
        ]
        for name in own[: max(0, len(own) - EACH + 1)]:
            del self._open[name]
        if len(self._open) >= MOST:
            self._open.popitem(last=False)
        number, now = secrets.token_urlsafe(32), self._clock()
        self._open[_digest(number)] = _Session(owner, now, now, grant)
        return number

    def caller(self, number: str) -> Caller[Any] | None:
        """Return the caller of a session, and record its use; None if it, its key or its grant is over."""
        name, now = _digest(number), self._clock()
        session = self._open.get(name)
        if session is None:
            return None
        over = now - session.used > IDLE or now - session.opened > LONGEST
        caller = None if over else self._caller_of(session)
        if caller is None:
            del self._open[name]
            return None
        self._open[name] = replace(session, used=now)
        self._open.move_to_end(name)
        return caller

    def _caller_of(self, session: _Session) -> Caller[Any] | None:
        if session.grant is not None:
            return session.grant.caller if self._clock() < session.grant.until else None
        return None if self._keys is None else self._keys.caller(session.owner)

    def _person_of(self, session: _Session) -> Caller[Any] | None:
        """Return the person of a session, even if its grant has lapsed and awaits renewal at its next use."""
        return session.grant.caller if session.grant and session.grant.refresh else self._caller_of(session)

    async def renew(self, scope: Scope) -> None:
        """Ask the provider again about the person of a request's session, if that is due: once for all
        requests that arrive meanwhile. If it refuses, the session is ended."""
        if self.provider is None:
            return
        name = _digest(session_in(scope) or "")
        session = self._open.get(name)
        if session is None or session.grant is None or self._clock() < session.grant.due:
            return
        if name not in self._renewing and session.grant.refresh:
            self._renewing[name] = asyncio.create_task(self._renew(name, session.grant))
        if name in self._renewing:
            await asyncio.shield(self._renewing[name])

    async def _renew(self, name: bytes, grant: Grant) -> None:
        try:
            new = None if self.provider is None else await self.provider.renew(grant)
        except NotSignedIn as refusal:
            _log.warning("a session could not be renewed: %s", refusal)
            # while the provider does not answer, the session goes on until the grant ends
            new = replace(grant, due=self._clock() + RETRY) if refusal.reason == "provider" else None
        finally:
            del self._renewing[name]
        session = self._open.get(name)
        if session is not None and new is not None:
            self._open[name] = replace(session, grant=new)
        elif session is not None:
            del self._open[name]

    def list(self) -> list[tuple[Caller[Any], float, float]]:
        """Return the callers with a session, each with the times of its beginning and its last use."""
        callers = [(self._person_of(each), each.opened, each.used) for each in self._open.values()]
        return [(caller, opened, used) for caller, opened, used in callers if caller is not None]

    def end(self, person: str) -> int:
        """End all sessions of a person, by their name or their id at the provider. Returns how many."""
        gone = [
            name
            for name, session in self._open.items()
            if (caller := self._person_of(session)) is not None and caller.name == person
        ]
        for name in gone:
            del self._open[name]
        return len(gone)

    def caller_in(self, scope: Scope) -> Caller[Any] | None:
        """Return the caller of the session in a request, if any; raises Refused if it is over."""
        number = session_in(scope)
        if number is None:
            return None
        caller = self.caller(number)
        if caller is None:
            raise Refused("the session has ended: sign in again")
        return caller

    def close(self, number: str) -> None:
        """End a session."""
        self._open.pop(_digest(number), None)


def session_in(scope: Scope) -> str | None:
    """Return the session's id in a request; over TLS only from the cookie that no other host can set.

    A proxy may terminate TLS: a browser that sends data says in `Origin` how it reached the page.
    """
    origins = [value for name, value in scope["headers"] if name == b"origin"]
    secure = scope.get("scheme") == "https" or any(each.startswith(b"https:") for each in origins)
    names = (SECURE_COOKIE,) if secure else (SECURE_COOKIE, COOKIE)
    cookies = [value.decode("latin-1") for name, value in scope["headers"] if name == b"cookie"]
    parts = [part.strip().partition("=") for cookie in cookies for part in cookie.split(";")]
    present = {name: value for name, _, value in reversed(parts)}
    return next((present[name] for name in names if present.get(name)), None)


def _digest(number: str) -> bytes:
    return hashlib.sha256(number.encode("utf-8", "replace")).digest()
