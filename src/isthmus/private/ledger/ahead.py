"""What leaves often and is charged to no document, in the ledger before it leaves, a block at a time.

A search cannot wait for a disk. So a block of departures is written down ahead, durably, and searches use it
up in memory; the next block is twice as large. `settle` lowers the last block to what was used. A process
that dies without settling leaves more in its ledger than left the silo, never less.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from isthmus.private.ledger.book import Ledger

FIRST, MOST = 64, 1 << 14
"""Items of the first block of a kind, and of the largest."""


@dataclass(slots=True)
class _Block:
    """A departure in the ledger of `size` items, of which some are used; and when it was written."""

    number: int
    size: int
    begun: float
    used: int = 0


class Ahead:
    """Departures of one process, by kind, peer and note; for all its threads."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._turn = threading.Lock()
        self._blocks: dict[tuple[str, str, str], _Block] = {}
        self._sizes: dict[tuple[str, str, str], int] = {}

    def note(self, kind: str, peer: str, items: int, note: str) -> None:
        """So many things are about to leave: in the ledger when this returns, or a PrivacyError."""
        key = (kind, peer, note)
        with self._turn:
            while items > 0:
                block = self._blocks.get(key)
                if block is None or block.used == block.size:
                    block = self._blocks[key] = self._written(key, items)
                some = min(items, block.size - block.used)
                block.used += some
                items -= some

    def _written(self, key: tuple[str, str, str], items: int) -> _Block:
        kind, peer, note = key
        size = max(items, self._sizes.get(key, FIRST))
        number = self._ledger.record(kind, peer, items=size, note=note)
        self._sizes[key] = min(MOST, 2 * size)
        return _Block(number, size, time.monotonic())

    def settle(self, *, older: float = 0.0) -> None:
        """Have the ledger say what left, of all blocks or of those written so many seconds ago."""
        until = time.monotonic() - older
        with self._turn:
            ready = {key: block for key, block in self._blocks.items() if block.begun <= until}
            self._ledger.lower({block.number: block.used for block in ready.values()})
            self._blocks = {key: block for key, block in self._blocks.items() if key not in ready}
