"""What holds for every text that somebody types as a query."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from isthmus.service.query_language import FIELDS, MOST_PARTS, parse

pieces = st.sampled_from(
    [
        '"',
        "“",
        "»",
        "-",
        "*",
        ":",
        " ",
        "\t",
        "a",
        "tide",
        "北京",
        "_",
        "2024",
        "é",
        "̈",
        *FIELDS,
    ]
)
queries = st.lists(pieces | st.characters(), max_size=30).map("".join)


@given(queries)
@example('""-"')
@example('"a"-b')
def test_every_text_is_a_query(query):
    understood = parse(query)
    assert len(understood.words) <= len(query)
    assert len(understood.parts) <= MOST_PARTS
    assert all(0 <= part.start < part.end <= len(query) for part in understood.parts)
    assert all(a.end <= b.start for a, b in zip(understood.parts, understood.parts[1:], strict=False))
    assert all(any(sign.isalnum() for sign in part.value) for part in understood.parts)
    if not understood.parts:
        assert understood.words == query


@given(queries)
def test_a_part_that_is_cut_out_is_gone_and_the_others_stay(query):
    understood = parse(query)
    for at, part in enumerate(understood.parts):
        rest = query[: part.start] + " " + query[part.end :]
        others = understood.parts[:at] + understood.parts[at + 1 :]
        again = parse(rest).parts[: len(others)]
        assert [(each.kind, each.value) for each in again] == [(each.kind, each.value) for each in others]


words = st.text(st.characters(categories=["Ll", "Nd"]), min_size=1, max_size=8)


@given(st.lists(words, max_size=4), words, words, words)
def test_what_is_written_so_is_read_so(plain, phrase, without, other):
    query = " ".join([*plain, f'"{phrase} {other}"', f"-{without}", f"type:{other}", f"silo:{without}"])
    understood = parse(query)
    assert understood.phrases == (f"{phrase} {other}",)
    assert understood.without == (without,)
    assert understood.of("type") == (other.lower(),)
    assert understood.of("silo") == (without,)
    assert understood.words.split() == [*plain, phrase, other]
