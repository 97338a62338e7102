"""A relay between silos whose sums are masked wants one silo's vector.

It says to every silo what it likes: who is there, which question has which number, and what the question is.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import PrivacyError, ProtocolError
from isthmus.private.secure_sum import Words, as_signed
from masked_session import SESSION, agree, masked, members

SECRET = np.array([11, -22, 33])


def opened(words: list[Words]) -> set[tuple[int, ...]]:
    """Every vector that a relay makes of words by adding and subtracting some of them."""
    sums = [
        sum(chosen, start=np.zeros(len(SECRET), np.uint64))
        for size in range(1, len(words) + 1)
        for chosen in combinations(words, size)
    ]
    every = [*sums, *(one - other for one, other in combinations(sums, 2))]
    return {tuple(as_signed(each).tolist()) for each in every}


@settings(max_examples=20, deadline=None)
@given(
    vectors=st.integers(1, 5).flatmap(
        lambda size: st.lists(
            st.lists(st.floats(-1e6, 1e6), min_size=size, max_size=size), min_size=3, max_size=6
        )
    )
)
def test_the_total_is_the_sum_and_every_question_has_masks_of_its_own(vectors) -> None:
    """To the rounding of fixed point, 2^-33 a silo."""
    silos = masked(
        {
            name: lambda times, own=own: times * np.array(own)
            for name, own in zip("abcdef", vectors, strict=False)
        }
    )
    for times in (1, 3):
        expected = times * np.sum(vectors, axis=0)
        np.testing.assert_allclose(silos.sum(times), expected, rtol=1e-12, atol=len(vectors) * 2.0**-33)


def test_words_without_the_others_are_noise() -> None:
    """Uniform whatever is masked: the same vector twice has nothing in common, not even its zeros."""
    silos = members("abc")
    agree(silos)
    zeros = np.zeros(4096, dtype=np.int64)
    one, other = (silos["a"].mask(number, b"question", zeros) for number in (0, 1))
    assert (one != other).all()
    bits = np.unpackbits(one.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.01
    assert np.corrcoef(one.astype(float), other.astype(float))[0, 1] < 0.1


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_sum_of_one_silo_or_two_is_refused(names: str) -> None:
    """A relay that leaves the others out: of two, each would know the other's."""
    silos = members("abc")
    adverts = {name: silos[name].advertise() for name in names}
    with pytest.raises(ProtocolError, match=f"{len(names)} silos add something"):
        silos["a"].agree(adverts)
    with pytest.raises(ProtocolError, match="before the members have agreed"):
        silos["a"].mask(0, b"question", SECRET)
    with pytest.raises(PrivacyError, match="at least 2"):
        members("a", least=1)


def test_silos_with_nothing_to_add_hide_nobody() -> None:
    """A relay finds silos without judgements to fill up the list: what they state is signed, zeros leave."""
    silos = members("abc")
    silos["b"].adds = silos["c"].adds = False
    adverts = {name: each.advertise() for name, each in silos.items()}
    silos["b"].agree(adverts)
    with pytest.raises(ProtocolError, match="1 silos add something"):
        silos["a"].agree(adverts)
    with pytest.raises(ProtocolError, match="not signed"):
        silos["a"].agree(adverts | {name: adverts[name][:32] + b"\1" + adverts[name][33:] for name in "bc"})
    silos = members("abcd")
    silos["d"].adds = False
    agree(silos)
    total = sum(each.mask(0, b"question", SECRET) for each in silos.values())
    assert as_signed(total).tolist() == (3 * SECRET).tolist()


def test_silos_that_a_relay_invents_are_refused() -> None:
    """Two puppets whose keys the relay knows would open the third; it has no card of theirs to show."""
    silos = members("abc")
    puppets = members("abc")  # the names of real silos under other identities
    adverts = {"a": silos["a"].advertise(), "b": puppets["b"].advertise(), "c": puppets["c"].advertise()}
    with pytest.raises(ProtocolError, match="not signed by the identity"):
        silos["a"].agree(adverts)
    strangers = members("xy")
    adverts = {"a": silos["a"].advertise()} | {name: each.advertise() for name, each in strangers.items()}
    with pytest.raises(ProtocolError, match="whose card this one does not have"):
        silos["a"].agree(adverts)


def test_keys_of_another_session_are_refused() -> None:
    """Recorded adverts are signed by the right silos, for another session."""
    silos = members("abc")
    recorded = {name: silos[name].advertise() for name in "bc"}
    again = silos["a"]
    later = type(again)("a", SESSION + b"!", again.identity, again.trusted)
    with pytest.raises(ProtocolError, match="not signed by the identity"):
        later.agree({"a": later.advertise(), **recorded})


def test_a_question_number_is_answered_once() -> None:
    """Two answers under the same masks differ by what was asked about: the masks would cancel."""
    silos = members("abc")
    agree(silos)
    silos["a"].mask(5, b"question", SECRET)
    for number in (5, 4):
        with pytest.raises(ProtocolError, match="used before"):
            silos["a"].mask(number, b"another question", 2 * SECRET)


def test_another_member_list_is_refused_within_a_session_and_opens_nothing_between_silos() -> None:
    """The relay shows silos different lists: masks do not cancel, whatever it adds up."""
    silos = members("abcd")
    adverts = {name: each.advertise() for name, each in silos.items()}
    for name, each in silos.items():
        each.agree({peer: adverts[peer] for peer in ("abc" if name != "d" else "abcd")})
    with pytest.raises(ProtocolError, match="settled"):
        silos["a"].agree({peer: adverts[peer] for peer in "abd"})
    vectors = {name: SECRET if name == "a" else np.arange(3) + ord(name) for name in "abcd"}
    words = [silos[name].mask(0, b"question", vectors[name]) for name in "abd"]
    reached = opened(words)
    for some in ("a", "ab", "abd", "bd"):
        assert tuple(sum(vectors[name] for name in some).tolist()) not in reached


def test_different_questions_under_one_number_open_nothing() -> None:
    """One silo is asked about something else than the others: what it says alone stays in the difference."""
    silos = members("abc")
    agree(silos)
    others = {"b": np.array([1, 2, 3]), "c": np.array([4, 5, 6])}
    words = [silos["a"].mask(0, b"this", SECRET), silos["a"].mask(1, b"that", 0 * SECRET)]
    words += [silos[name].mask(number, b"that", own) for number in (0, 1) for name, own in others.items()]
    reached = opened(words)
    assert tuple(sum(others.values()).tolist()) in reached, "the second number was honest"
    assert tuple(SECRET.tolist()) not in reached
    assert tuple((SECRET + sum(others.values())).tolist()) not in reached
