"""Exchanges in one process, and a memory of envelopes that lasts as long."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.errors import ProtocolError
from isthmus.private.exchange import Exchange, ExchangeRelay, Party


class GuardInMemory:
    """Remembers questions as long as the process lives."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def __call__(self, sender: str, number: int) -> None:
        if number <= self._last.get(sender, -1):
            raise ProtocolError("an envelope that was received before")
        self._last[sender] = number


def exchange_in_memory(parties: Mapping[str, Party], relay: ExchangeRelay | None = None) -> ExchangeRelay:
    """A whole exchange in one process; the same bytes as over a network."""
    relay = relay or ExchangeRelay(len(parties))
    turns = {name: relay.first() for name in parties}
    while turns:
        turns = relay.next({name: Exchange(parties[name], turn).reply() for name, turn in turns.items()})
    return relay
