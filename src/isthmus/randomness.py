"""Named seed streams: the same name always draws the same numbers, whatever else was drawn before.

>>> streams = Streams(7)
>>> streams("round", 3, "silo", "north").integers(100)
np.int64(20)

A stream depends on the seed and its name only, never on call order, thread or process; so results do
not change with the number of workers. Names may hold strings and integers. Live privacy noise never
comes from here: it comes from the operating system's entropy, through `isthmus.private`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from isthmus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Streams:
    """A family of independent generators under one seed."""

    seed: int
    prefix: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        if len(str(self.seed)) > hashlib.blake2b.MAX_KEY_SIZE:
            raise ConfigError("the seed has more than 64 digits", key="seed", value=self.seed)

    def __call__(self, *name: str | int) -> np.random.Generator:
        """The generator of that name."""
        return np.random.Generator(np.random.PCG64(self.entropy(*name)))

    def under(self, *name: str | int) -> Streams:
        """The sub-family below a name: `streams.under("fold", 2)("init")` is `streams("fold", 2, "init")`."""
        return Streams(self.seed, (*self.prefix, *name))

    def entropy(self, *name: str | int) -> int:
        """A 128-bit seed for that name, for libraries that want an integer."""
        spelled = "\x1f".join(_spell(part) for part in (*self.prefix, *name))
        digest = hashlib.blake2b(spelled.encode(), key=str(self.seed).encode(), digest_size=16).digest()
        return int.from_bytes(digest, "little")


def _spell(part: str | int) -> str:
    """Encode a part of a name, so that 3 differs from "3" and no string can contain the separator."""
    if isinstance(part, (int, np.integer)):
        return f"i{int(part)}"
    return "s" + part.replace("\\", "\\\\").replace("\x1f", "\\x1f")
