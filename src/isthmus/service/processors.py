"""Threads for processor-bound work. The thread that finished last works next, since its memory is warm.

    processors = Processors(2, "search")
    hits = await processors.run(lambda: search("tidal power"))

A future of `concurrent.futures` has its own locks and is copied into one of asyncio; here there is a single
future, which the event loop settles.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Processors:
    """At most `most` threads, which are started when they are needed and end with the process."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._lock, self._started = threading.Lock(), 0
        self._idle: list[SimpleQueue[_Job]] = []
        self._waiting: deque[_Job] = deque()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on one of the threads and return its result. Cancelling gives up the place in the queue,
        or frees the thread once running work has ended."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if not self._idle and self._started < self._most:
                self._start()
            if self._idle:
                self._idle.pop().put((work, future))
            else:
                self._waiting.append((work, future))
        result: T = await future
        return result

    def _start(self) -> None:
        self._started += 1
        turns = SimpleQueue[_Job]()
        self._idle.append(turns)
        name = f"{self._name}_{self._started}"
        threading.Thread(target=self._serve, args=(turns,), name=name, daemon=True).start()

    def _serve(self, turns: SimpleQueue[_Job]) -> None:
        job = turns.get()
        while True:
            _do(*job)
            del job  # free its data before waiting for the next one
            with self._lock:
                if self._waiting:
                    job = self._waiting.popleft()
                    continue
                self._idle.append(turns)
            job = turns.get()


def _do(work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
    if future.cancelled():
        return
    result, error = None, None
    try:
        result = work()
    except BaseException as failure:  # any failure is passed to the caller
        error = failure
    with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
        future.get_loop().call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
