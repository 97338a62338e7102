"""A circuit breaker: a silo that keeps failing is not asked for a while, and then tried again.

closed ── failures in a row ──▶ open ── pause over ──▶ half open ── success ──▶ closed
                                  ▲                        │
                                  └── failure, pause × 2 ──┘

Only failures of the silo itself count, not delays by a queue of the broker's own searches: while the silo
answers other requests, a late answer means that it is busy.

A search does not wait for a half-open silo until the deadline, but only as long again as the others took.
The same holds for a silo on trial: one that answers often enough to stay closed, but is late often enough
to hold searches up. Every delay that the silo caused is a debt of `TIMELY` answers; above `TRIAL`, the
silo is on trial until the debt is zero.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

from isthmus.service.settings import BreakerSettings
from isthmus.service.wire import Status

State = Literal["closed", "open", "half open"]
TIMELY = 20
"""Number of answers before the deadline that make up for one delay. A silo that is late less often than that
is waited for."""
TRIAL, MOST_DEBT = 2 * TIMELY, 4 * TIMELY


class Breaker:
    """The circuit breaker of one silo: decides whether a search asks it. Half open, it admits one search."""

    def __init__(
        self,
        settings: BreakerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[float | None, str], None] = lambda seconds, reason: None,
    ) -> None:
        """`changed(None, reason)` is called when the breaker opens, and `changed(seconds, reason)` when the
        silo answers again after so many seconds."""
        self._settings, self._clock, self._changed = settings, clock, changed
        self._since: float | None = None
        self._failures, self._pause, self._until = 0, settings.pause, 0.0
        self._probing, self._last_response, self._latest = False, -math.inf, -math.inf
        self._debt = 0
        self.on_trial = False
        """Whether the silo has recently held up too many searches to be waited for."""
        self.last: Status = "down"
        self.reason = ""
        """The reason of the last failure."""

    @property
    def state(self) -> State:
        """Closed (the silo is asked), open (it is not), or half open (one search tries it)."""
        if self._failures < self._settings.failures:
            return "closed"
        return "open" if self._clock() < self._until else "half open"

    def admits(self) -> bool:
        """Whether to ask the silo now; a caller that gets True must report the outcome by a method below."""
        state = self.state
        if state == "half open" and not self._probing:
            self._probing = True
            return True
        return state == "closed"

    @property
    def trusted(self) -> bool:
        """Whether a search waits for the silo until the deadline."""
        return not self.on_trial and self.state == "closed"

    @property
    def wait(self) -> float:
        """Seconds until the silo is tried again."""
        return max(0.0, self._until - self._clock())

    def succeeded(self) -> None:
        """Record an answer before the deadline: resets the failures and lowers the debt of delays by one."""
        self._failures, self._pause, self._probing = 0, self._settings.pause, False
        self._debt = max(0, self._debt - 1)
        self.on_trial &= self._debt > 0
        if self._since is not None:
            seconds, self._since = self._clock() - self._since, None
            self._changed(seconds, self.reason)

    def delayed(self) -> None:
        """Record a delay that the silo caused: `TIMELY` answers in time make up for it."""
        self._debt = min(MOST_DEBT, self._debt + TIMELY)
        self.on_trial |= self._debt > TRIAL

    def failed(self, status: Status, reason: str) -> None:
        """Record a failure; after `failures` in a row the breaker opens for a pause."""
        tried, self._probing = self._probing, False
        self.last, self.reason = status, reason
        self._failures += 1
        if self._failures < self._settings.failures:
            return
        if tried:
            self._pause = min(self._pause * 2, self._settings.longest)
        elif self._failures > self._settings.failures:
            return  # requested before the breaker opened: the pause has already begun
        self._until = self._clock() + self._pause
        if self._since is None:
            self._since = self._clock()
            self._changed(None, reason)

    def responded(self, since: float = -math.inf) -> None:
        """Record a response to a request sent at `since`, even if nobody waits for it any more."""
        self._last_response, self._latest = self._clock(), max(self._latest, since)

    def late(self, since: float) -> None:
        """Record that a request sent at `since` had no answer in time: a failure, unless the silo answered
        others."""
        if self._last_response >= since:
            self.dropped()
        else:
            self.failed("late", "no answer in time")

    def held_up(self, since: float) -> None:
        """Record that other silos answered this search in time and this one did not.

        A queue of the broker's requests explains the delay only if the silo has answered requests that
        were in it before. If it has answered nothing since, or a request sent in the second half of this
        wait, the delay is the silo's own.
        """
        if self._last_response < since or self._latest >= (since + self._clock()) / 2:
            self.delayed()

    def dropped(self) -> None:
        """Record a request without an outcome: it was cancelled, or the silo was busy."""
        self._probing = False
