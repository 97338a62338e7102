"""Silos of this process in a session of masked sums, and the relay between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.asking import MaskedSilos, Numbered, Silos
from isthmus.private import FixedPoint, MaskedMember

SESSION = b"a session of 16 b"


def members(names: str, *, session: bytes = SESSION, least: int = 3) -> dict[str, MaskedMember]:
    """Silos who know each other by their identities and have not agreed on masks."""
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    known = {name: key.public_key() for name, key in keys.items()}
    return {name: MaskedMember(name, session, key, known, least) for name, key in keys.items()}


def agree(silos: Mapping[str, MaskedMember]) -> None:
    """What an honest relay does once."""
    adverts = {name: each.advertise() for name, each in silos.items()}
    for each in silos.values():
        each.agree(adverts)


def masked(answers: Mapping[str, Callable[[Any], Any]]) -> Silos:
    """Silos by name, each the function that answers, whose sums are masked; they have agreed."""
    silos, point = members("".join(answers)), FixedPoint(len(answers))
    agree(silos)

    def answer(name: str, asked: Numbered) -> Any:
        vector = point.encode(np.asarray(answers[name](asked.question), dtype=np.float64))
        return silos[name].mask(asked.number, repr(asked.question).encode(), vector)

    memory = Silos.in_memory({name: partial(answer, name) for name in answers})
    return MaskedSilos(memory.names, memory.carrier)
