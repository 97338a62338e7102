"""Named streams: the numbers depend on seed and name, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import ConfigError
from isthmus.randomness import Streams


def draw(streams: Streams, *name: str | int) -> list[int]:
    return streams(*name).integers(1 << 30, size=4).tolist()


def test_the_documented_number_holds_in_every_release() -> None:
    assert Streams(0).entropy() == 132515244034499675849111942613162410914


def test_a_stream_does_not_know_what_was_drawn_before() -> None:
    streams = Streams(7)
    first = draw(streams, "round", 3)
    draw(streams, "round", 2)
    assert draw(streams, "round", 3) == first
    assert draw(Streams(7), "round", 3) == first


def test_seed_and_every_part_of_the_name_count() -> None:
    names = [
        ("round", 3),
        ("round", 4),
        ("round", "3"),
        ("round3",),
        ("round",),
        (3, "round"),
        ("round", 3, ""),
    ]
    drawn = [tuple(draw(Streams(7), *name)) for name in names] + [tuple(draw(Streams(8), "round", 3))]
    assert len(set(drawn)) == len(drawn)


def test_a_sub_family_is_a_longer_name() -> None:
    streams = Streams(7)
    assert draw(streams.under("fold", 2), "init") == draw(streams, "fold", 2, "init")
    assert draw(streams.under("fold").under(2), "init") == draw(streams, "fold", 2, "init")


def test_numpy_integers_are_integers() -> None:
    assert draw(Streams(7), "round", np.int64(3)) == draw(Streams(7), "round", 3)


def test_a_seed_that_is_too_long() -> None:
    draw(Streams(2**128), "x")
    with pytest.raises(ConfigError, match="more than 64 digits"):
        Streams(10**64)


parts = st.one_of(
    st.integers(), st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\x1f\\i3s"))
)


@given(st.lists(parts, max_size=4), st.lists(parts, max_size=4))
def test_different_names_never_share_a_stream(one: list, two: list) -> None:
    same = [(type(part), part) for part in one] == [(type(part), part) for part in two]
    assert (Streams(0).entropy(*one) == Streams(0).entropy(*two)) == same
