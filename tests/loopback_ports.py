"""Ports that tests give to servers, and that nobody else takes in between."""

from __future__ import annotations

import os
import socket
from itertools import chain

FIRST, END = 10_000, 32_000
"""Below those that systems take for connections of their own accord."""
SLICES = 10
_WIDTH = (END - FIRST) // SLICES

_next = 0


def _slice() -> int:
    """Workers of one run have slices of their own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    number = int(worker.removeprefix("gw")) if worker else os.getpid()
    return FIRST + number % SLICES * _WIDTH


def free_base(count: int = 1) -> int:
    """A port that is free together with those after it; never one that was named before in this process."""
    global _next
    if not _next:
        _next = os.getpid() * 16 % _WIDTH  # two runs at once seldom meet
    start = _slice()
    for offset in chain(range(_next, _WIDTH - count, count), range(0, _next, count)):
        base = start + offset
        try:
            sockets = [socket.create_server(("127.0.0.1", base + number)) for number in range(count)]
        except OSError:
            continue
        for each in sockets:
            each.close()
        _next = offset + count
        return base
    raise RuntimeError("no free ports")
