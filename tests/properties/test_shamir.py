"""Secret sharing: any threshold of shares gives the secret back, fewer fit every secret."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import PrivacyError, ProtocolError
from isthmus.private.shamir import _PRIME, SECRET, SHARE, combine, split


@st.composite
def sharings(draw: st.DrawFn) -> tuple[bytes, int, int, list[int]]:
    count = draw(st.integers(1, 12))
    threshold = draw(st.integers(1, count))
    chosen = draw(st.permutations(range(count)))[:threshold]
    secret = draw(st.binary(min_size=SECRET, max_size=SECRET))
    return secret, threshold, count, chosen


@settings(max_examples=60)
@given(sharings())
def test_any_threshold_of_shares_gives_the_secret_back(sharing: tuple[bytes, int, int, list[int]]) -> None:
    secret, threshold, count, chosen = sharing
    shares = split(secret, threshold, count)
    assert {len(share) for share in shares} == {SHARE}
    assert combine([shares[at] for at in chosen]) == secret


@pytest.mark.parametrize("secret", [bytes(SECRET), b"\xff" * SECRET])
def test_the_least_and_the_greatest_secret(secret: bytes) -> None:
    assert combine(split(secret, 3, 5)[1:4]) == secret


@settings(max_examples=30)
@given(st.binary(min_size=SECRET, max_size=SECRET), st.binary(min_size=SECRET, max_size=SECRET))
def test_one_share_too_few_fits_every_secret(secret: bytes, other: bytes) -> None:
    """For shares 1 and 2 of three there is a third that makes them a sharing of whatever one likes."""
    first, second, third = (int.from_bytes(share[2:]) for share in split(secret, 3, 3))
    wanted = (third + int.from_bytes(other) - int.from_bytes(secret)) % _PRIME  # its factor at 0 is 1
    forged = [
        number.to_bytes(2) + value.to_bytes(33) for number, value in ((1, first), (2, second), (3, wanted))
    ]
    assert combine(forged) == other


def test_the_modulus_is_a_prime_above_every_secret() -> None:
    assert _PRIME > 1 << 256
    odd, twos = _PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller and Rabin
        power = pow(base, odd, _PRIME)
        assert power in (1, _PRIME - 1) or any(
            pow(power, 1 << step, _PRIME) == _PRIME - 1 for step in range(1, twos)
        )


def test_what_are_no_shares_is_refused() -> None:
    shares = split(bytes(SECRET), 2, 3)
    for wrong in (
        [],
        [shares[0], shares[0]],
        [shares[0], shares[1][:-1]],
        [shares[0], b"\0\0" + shares[1][2:]],
    ):
        with pytest.raises(ProtocolError, match="shares that are none"):
            combine(wrong)
    for secret, threshold, count in ((b"short", 2, 3), (bytes(SECRET), 0, 3), (bytes(SECRET), 4, 3)):
        with pytest.raises(PrivacyError):
            split(secret, threshold, count)


def test_shares_of_different_secrets_give_neither() -> None:
    one, other = (split(bytes([fill]) * SECRET, 2, 2) for fill in (1, 2))
    with suppress(ProtocolError):  # if what they give is above every secret
        assert combine([one[0], other[1]]) not in (b"\1" * SECRET, b"\2" * SECRET)


def test_flower_agrees_on_what_thresholds_do() -> None:
    """Flower shares in blocks of 16 bytes over another field: the same secret comes back."""
    flower = pytest.importorskip("flwr.common.secure_aggregation.crypto.shamir")
    secret = bytes(range(SECRET))
    theirs, ours = flower.create_shares(secret, 3, 5), split(secret, 3, 5)
    for chosen in ((0, 1, 2), (1, 3, 4), (4, 0, 2)):
        picked = [[shares[at] for at in chosen] for shares in (theirs, ours)]
        assert flower.combine_shares(picked[0]) == combine(picked[1]) == secret
    assert combine(ours[:2]) != secret
