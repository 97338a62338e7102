"""Shamir's secret sharing (1979) of 32 bytes: any `threshold` shares restore them, fewer reveal nothing.

The secret is the constant term of a random polynomial of degree threshold − 1 over the integers modulo a
prime above 2^256; a share is its number, from 1, and the polynomial's value there. Shares are not
authenticated: a caller that needs to be sure of the restored secret must compare it with something.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from isthmus.errors import PrivacyError, ProtocolError

SECRET = 32
SHARE = 2 + SECRET + 1
"""Bytes of a share: its number, and a value that may be just above 2^256."""

_PRIME = 2**256 + 297
_SPARE = 16  # extra random bytes, so that a remainder is uniform to within 2^-127


def split(
    secret: bytes, threshold: int, count: int, entropy: Callable[[int], bytes] = os.urandom
) -> list[bytes]:
    """Split a secret into `count` shares, of which `threshold` are needed."""
    if len(secret) != SECRET or not 1 <= threshold <= count < 1 << 16:
        raise PrivacyError(f"{threshold} of {count} shares of {len(secret)} bytes")
    drawn = [int.from_bytes(entropy(SECRET + 1 + _SPARE)) % _PRIME for _ in range(threshold - 1)]
    polynomial = [*drawn, int.from_bytes(secret)]  # coefficients, highest power first
    shares = []
    for number in range(1, count + 1):
        value = 0
        for coefficient in polynomial:
            value = (value * number + coefficient) % _PRIME
        shares.append(number.to_bytes(2) + value.to_bytes(SECRET + 1))
    return shares


def combine(shares: Sequence[bytes]) -> bytes:
    """Restore the secret from as many shares as its threshold, by Lagrange's interpolation at 0."""
    points = {int.from_bytes(share[:2]): int.from_bytes(share[2:]) for share in shares}
    possible = all(len(share) == SHARE for share in shares) and 0 not in points
    if not shares or not possible or len(points) != len(shares):
        raise ProtocolError("shares that are none, or the same one twice")
    secret = 0
    for number, value in points.items():
        above = below = 1
        for other in points.keys() - {number}:
            above = above * other % _PRIME
            below = below * (other - number) % _PRIME
        secret = (secret + value * above * pow(below, -1, _PRIME)) % _PRIME
    if secret >> (8 * SECRET):
        raise ProtocolError("shares that do not fit together")
    return secret.to_bytes(SECRET)
