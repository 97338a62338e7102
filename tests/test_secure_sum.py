"""The secure sum: exact, survives drop-outs, and shows the relay nothing but the total."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import PrivacyError, ProtocolError
from isthmus.private.secure_sum import (
    FixedPoint,
    Member,
    Summation,
    as_signed,
    as_words,
    least_threshold,
    sum_in_memory,
)

SESSION = b"round 7"


def members(count: int, threshold: int) -> dict[str, Member]:
    return {f"s{i}": Member(f"s{i}", SESSION, threshold) for i in range(count)}


def exchange(silos: dict[str, Member]) -> tuple[list, dict[str, dict[str, bytes]]]:
    adverts = [silo.advertise() for silo in silos.values()]
    sealed = {name: silo.share(adverts) for name, silo in silos.items()}
    boxes = {name: {peer: sealed[peer][name] for peer in silos if peer != name} for name in silos}
    return adverts, boxes


def total(silos, adverts, masked, revealed) -> np.ndarray:
    """What the relay opens of these shares, where boxes of all silos were handed out."""
    named = {advert.name: advert for advert in adverts}
    return Summation(SESSION, 3, 0, named, {name: {} for name in silos}, masked, {}, revealed).total()


@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(3, 9),
    gone=st.integers(0, 2),
    vector=st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=20),
)
def test_the_total_is_the_sum_of_those_who_answered(count: int, gone: int, vector: list[int]) -> None:
    vectors = {f"s{i}": np.array(vector) * (i + 1) - i for i in range(count)}
    threshold = least_threshold(count)
    dropped = [f"s{i}" for i in range(min(gone, count - threshold))]
    summed = sum_in_memory(vectors, threshold=threshold, session=SESSION, dropped=dropped)
    expected = sum(values for name, values in vectors.items() if name not in dropped)
    np.testing.assert_array_equal(as_signed(summed), expected)


def test_a_masked_vector_looks_uniform_and_differs_from_session_to_session() -> None:
    zeros = np.zeros(4096, dtype=np.int64)
    seen = []
    for _ in range(2):
        silos = members(3, 3)
        _, boxes = exchange(silos)
        seen.append(silos["s0"].mask(zeros, boxes["s0"]))
    assert not np.array_equal(*seen)
    bits = np.unpackbits(seen[0].view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.01


def test_too_few_shares_reveal_nothing() -> None:
    silos = members(4, 3)
    adverts, boxes = exchange(silos)
    masked = {name: silo.mask([1, 2], boxes[name]) for name, silo in silos.items()}
    signatures = {name: silo.confirm(list(masked)) for name, silo in silos.items()}
    revealed = {name: silos[name].reveal(signatures) for name in ("s0", "s1")}
    with pytest.raises(ProtocolError, match="3 are needed"):
        total(silos, adverts, masked, revealed)


def test_a_member_answers_once_and_never_gives_both_secrets_of_a_peer() -> None:
    silos = members(4, 3)
    adverts, boxes = exchange(silos)
    with pytest.raises(ProtocolError, match="already"):
        silos["s0"].share(adverts)
    for name, silo in silos.items():
        silo.mask([5], boxes[name])
    answered = ["s0", "s1", "s2"]
    signatures = {name: silos[name].confirm(answered) for name in answered}
    shares = silos["s0"].reveal(signatures)
    assert set(shares.seeds) == set(answered)
    assert set(shares.keys) == {"s3"}
    with pytest.raises(ProtocolError, match="already"):
        silos["s0"].reveal(signatures)
    with pytest.raises(ProtocolError, match="already"):
        silos["s0"].mask([6], boxes["s0"])


def test_a_member_is_carried_from_process_to_process_at_every_step() -> None:
    silos = members(4, 3)

    def carry() -> None:
        silos.update({name: Member.resumed(silo.to_bytes()) for name, silo in silos.items()})

    adverts, boxes = exchange(silos)
    carry()
    masked = {name: silos[name].mask([3, -1], boxes[name]) for name in list(silos)[:3]}
    carry()
    signatures = {name: silos[name].confirm(list(masked)) for name in masked}
    carry()
    revealed = {name: silos[name].reveal(signatures) for name in masked}
    carry()
    summed = total(silos, adverts, masked, revealed)
    np.testing.assert_array_equal(as_signed(summed), [9, -3])
    with pytest.raises(ProtocolError, match="already"):
        silos["s0"].reveal(signatures)
    with pytest.raises(ProtocolError, match="older release"):
        Member.resumed(b'{"name": "s0"}')


@pytest.mark.parametrize(("count", "threshold"), [(3, 2), (4, 2), (5, 3), (6, 4), (9, 6)])
def test_a_threshold_of_two_thirds_or_less_is_refused(count: int, threshold: int) -> None:
    with pytest.raises(ProtocolError, match="above two thirds"):
        exchange(members(count, threshold))
    exchange(members(count, threshold + 1))
    with pytest.raises(PrivacyError, match="at least 2"):
        Member("s0", SESSION, 1)


def test_a_relay_that_swaps_keys_is_caught_when_identities_are_known() -> None:
    identity = {name: Ed25519PrivateKey.generate() for name in ("s0", "s1", "s2")}
    trusted = {name: key.public_key() for name, key in identity.items()}
    silos = {name: Member(name, SESSION, 3, identity=key, trusted=trusted) for name, key in identity.items()}
    adverts = [silo.advertise() for silo in silos.values()]
    assert silos["s1"].share(adverts)
    stranger = Member("s1", SESSION, 3).advertise()
    with pytest.raises(ProtocolError, match="not signed"):
        silos["s0"].share([adverts[0], dataclasses.replace(stranger, signature=bytes(64)), adverts[2]])
    replayed = Member("s1", b"round 6", 3, identity=identity["s1"]).advertise()
    with pytest.raises(ProtocolError, match="not signed"):
        silos["s0"].share([adverts[0], replayed, adverts[2]])


def test_boxes_from_another_session_or_tampered_with_are_refused() -> None:
    silos = members(3, 3)
    _, boxes = exchange(silos)
    box = boxes["s0"]["s1"]
    for bad in (box[:-1], box[:20] + bytes([box[20] ^ 1]) + box[21:], b""):
        with pytest.raises(ProtocolError, match="not sealed"):
            silos["s0"].mask([1], {**boxes["s0"], "s1": bad})


def test_fixed_point_is_unbiased_and_refuses_what_would_wrap() -> None:
    point = FixedPoint(members=10, bits=8)
    rng = np.random.default_rng(0)
    values = np.full(20_000, 0.3)
    encoded = point.encode(values, rng)
    assert set(np.unique(encoded)) == {76, 77}
    assert abs(point.decode(as_words(encoded)).mean() - 0.3) < 1e-4
    np.testing.assert_allclose(point.decode(as_words(point.encode([-2.5], rng))), [-2.5])
    for bad in (np.nan, np.inf, point.limit * 1.01):
        with pytest.raises(PrivacyError, match="secure sum"):
            point.encode([bad], rng)


def test_real_vectors_must_be_quantised() -> None:
    with pytest.raises(PrivacyError, match="integers"):
        as_words([0.5])
