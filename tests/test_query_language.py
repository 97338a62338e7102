"""What queries are understood as."""

from __future__ import annotations

import pytest

from isthmus.service.query_language import MOST_PARTS, parse, unknown_silos


def parts(query):
    return [(part.kind, part.value) for part in parse(query).parts]


@pytest.mark.parametrize(
    ("query", "words", "expected"),
    [
        ("tidal  power ", "tidal  power ", []),
        ('tidal "spring tide"', "tidal spring tide", [("phrase", "spring tide")]),
        ("“spring tide”, again", "spring tide , again", [("phrase", "spring tide")]),
        ("«marée haute»", "marée haute", [("phrase", "marée haute")]),
        ("tidal -lagoon", "tidal", [("without", "lagoon")]),
        ('-"spring tide" moon', "moon", [("without", "spring tide")]),
        ("-state-of-the-art tide", "tide", [("without", "state-of-the-art")]),
        ("turb* tide", "tide", [("prefix", "turb")]),
        ("silo:north -silo:south x", "x", [("silo", "north"), ("other_silo", "south")]),
        ("TYPE:.PDF -type:html x", "x", [("type", "pdf"), ("other_type", "html")]),
        ('silo:"north" x', "x", [("silo", "north")]),
        ("after:2019 before:2024-06 x", "x", [("after", "2019"), ("before", "2024-06")]),
        ("-note:private x", "x", [("without", "note private")]),
        ("type:pdf", "", [("type", "pdf")]),
        # words
        ('tidal "spring tide', 'tidal "spring tide', []),
        ('"" x', '"" x', []),
        ("- x", "- x", []),
        ("a - b -- c --d", "a - b -- c --d", []),
        ("well-known x-ray", "well-known x-ray", []),
        ("https://example.org std::vector 12:30 C:\\x", "https://example.org std::vector 12:30 C:\\x", []),
        ("type: pdf", "type: pdf", []),
        ("before:banana after:2024-13 -after:2020", "before:banana after:2024-13 -after:2020", []),
        ("a* *b c*d", "a* *b c*d", []),
        ("", "", []),
    ],
)
def test_what_is_understood(query, words, expected):
    assert parts(query) == expected
    assert parse(query).words == words


def test_dates_are_the_first_moment_of_what_is_named():
    query = parse("after:2020 after:2019-02-03 before:2021 before:2020-12 x")
    assert (query.since, query.until) == (1_577_836_800, 1_606_780_800)
    assert (parse("x").since, parse("x").until) == (None, None)


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("note:x y", "note: is no filter"),
        ("before:banana", "before: wants a date"),
        ("a*", "at least 2 characters"),
        ("-w " * (MOST_PARTS + 1), "only 20 filters"),
    ],
)
def test_what_may_have_been_meant_is_said(query, hint):
    (said,) = parse(query).hints
    assert hint in said
    assert not parse("plain words").hints


@pytest.mark.parametrize(
    ("query", "misread"),
    [
        ("before:Easter note:private norm", ["before:Easter", "note:private"]),
        ("type:pdf note:x tide", ["note:x"]),
        ("a* -note:x before:2020 tide", []),
    ],
)
def test_the_places_of_what_was_misread_are_known(query, misread):
    assert [query[place.start : place.stop] for place in parse(query).misread] == misread


def test_silos_by_name_in_any_case_and_those_that_there_are_not():
    query = parse("silo:North silo:east -silo:east x")
    assert query.silos(["north", "east", "west"]) == ["north"]
    assert parse("-silo:west x").silos(["north", "west"]) == ["north"]
    assert not unknown_silos(query, ["north", "east"])
    assert "no silo is called east; there are north" in unknown_silos(query, ["north"])[0]
    assert not query.narrows
    assert parse("x -y").narrows
