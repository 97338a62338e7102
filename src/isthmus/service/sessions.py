"""Sessions of the page: a random id in a cookie stands for an API key, which the browser does not keep.

    sessions = Sessions(keys)
    cookie = sessions.open(token)       # its hash is stored, the key is not
    sessions.caller(cookie)             # as long as the key is valid and somebody uses the session
    sessions.close(cookie)

They live in the broker's memory: after a restart people sign in again.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isthmus.errors import Refused
from isthmus.service.security import ApiKeys, Caller

if TYPE_CHECKING:
    from starlette.types import Scope

COOKIE, SECURE_COOKIE = "isthmus_session", "__Host-isthmus_session"
"""The cookie over plain HTTP, which only loopback and a proxy on this machine use; and over TLS."""
FORMER_COOKIE = "isthmus_key"
"""Held the API key itself, and is removed from browsers that still have it."""
IDLE, LONGEST = 12 * 3600.0, 7 * 86400.0
"""Seconds after which a session ends: since its last use, and since its beginning."""
MOST, EACH = 10_000, 20
"""Sessions of all keys, and of one; the one unused for longest makes room."""


@dataclass(frozen=True)
class _Session:
    key: str
    opened: float
    used: float


class Sessions:
    """Open sessions by the hash of their ids, those unused for longest first."""

    def __init__(self, keys: ApiKeys, *, clock: Callable[[], float] = time.time) -> None:
        self._keys, self._clock = keys, clock
        self._open: OrderedDict[bytes, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, token: str) -> str | None:
        """The id of a new session for whoever has this API key; None if nobody has."""
        key = self._keys.key_of(token)
        if key is None:
            return None
        own = [name for name, session in self._open.items() if session.key == key.id]
        for name in own[: max(0, len(own) - EACH + 1)]:
            del self._open[name]
        if len(self._open) >= MOST:
            self._open.popitem(last=False)
        number, now = secrets.token_urlsafe(32), self._clock()
        self._open[_digest(number)] = _Session(key.id, now, now)
        return number

    def caller(self, number: str) -> Caller[Any] | None:
        """Whose session this is; None for one that is unknown or over, or whose key is."""
        name, now = _digest(number), self._clock()
        session = self._open.get(name)
        if session is None:
            return None
        over = now - session.used > IDLE or now - session.opened > LONGEST
        caller = None if over else self._keys.caller(session.key)
        if caller is None:
            del self._open[name]
            return None
        self._open[name] = replace(session, used=now)
        self._open.move_to_end(name)
        return caller

    def caller_in(self, scope: Scope) -> Caller[Any] | None:
        """Whose session a request carries, None if none; Refused if it is over."""
        number = session_in(scope)
        if number is None:
            return None
        caller = self.caller(number)
        if caller is None:
            raise Refused("the session has ended: sign in again")
        return caller

    def close(self, number: str) -> None:
        """Sign out."""
        self._open.pop(_digest(number), None)


def session_in(scope: Scope) -> str | None:
    """The session's id in a request; over TLS only from the cookie that no other host can set.

    A proxy may speak TLS for us: a browser that sends something says in `Origin` how it reached the page.
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
