"""Counts, facets, spellings and digests give away no more than a silo's policy says."""

from __future__ import annotations

import json

import httpx
import pytest

from isthmus.service import wire
from isthmus.service.display import day_of
from isthmus.service.limits import message_header
from isthmus.service.results import folded, group_copies, suggestion_of
from isthmus.service.settings import Policy
from isthmus.service.stores import Draft
from searching_silos import NORTH, OPEN, searching
from silo_stand_in import answer, hit

PLAIN = Policy(search=True, snippets=True)
ALL = {"matches": True, "suggest": True, "fold": True}


def ask(silos, name, **body):
    """A node's own answer to whoever asks for all there is."""
    reply = httpx.post(
        f"{silos.settings.silos[name].url}/v1/search", json=body, headers=message_header(), timeout=60
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    policies = {"north": PLAIN, "south": Policy(search=True, matches=True, suggestions=True)}
    with searching(tmp_path_factory.mktemp("silos"), policies) as made:
        yield made


def test_a_policy_without_them_gives_no_counts_and_no_spellings(silos):
    told = ask(silos, "north", query="watr", **ALL)
    assert (told["matches"], told["spellings"]) == (None, None)
    told = ask(silos, "south", query="watr", **ALL)
    assert (told["matches"]["count"], told["spellings"][0]["like"]) == (0, ["water"])
    merged = silos.search("tidal", facets=True, suggest=True)
    assert merged["facets"]["silos"] == {"south": 1}
    assert {each["silo"]: each["matches"] for each in merged["silos"]} == {"north": None, "south": 1}
    assert Policy() == Policy(matches=False, suggestions=False)


def test_a_peer_that_sees_no_text_has_no_digest_type_or_date_of_it(silos):
    told = ask(silos, "south", query="tide", **ALL)
    assert told["hits"]
    for each in told["hits"]:
        assert (each["digest"], each["type"], each["date"], each["title"]) == ("", "", "", "")
    listed = ask(silos, "south", query="", only={"types": ["md"]}, **ALL)["hits"]
    assert {(each["digest"], each["date"], each["snippet"]) for each in listed} == {("", "", None)}
    assert not {each["document"] for each in listed} & {"copy.md", "turbine.md"}
    assert [each["score"] for each in listed] == [-place for place in range(len(listed))], "no date either"


def test_a_score_by_date_is_the_day_that_a_hit_shows(silos):
    dated = [each for each in ask(silos, "north", query="", only={"types": ["md"]})["hits"] if each["date"]]
    assert dated
    for each in dated:
        assert each["score"] % 86_400 == 0
        assert day_of(int(each["score"])) == each["date"]


def test_no_digest_without_a_key_of_the_silos_own(tmp_path):
    with searching(tmp_path, {"south": PLAIN}, key="isthmus") as known:
        assert {each["digest"] for each in ask(known, "south", query="tide", fold=True)["hits"]} == {""}


def test_a_word_of_few_documents_is_never_proposed(tmp_path):
    """Names that one or two documents have, or that only the stem of many others is like."""
    rare = [Draft(f"r{at}", "", "zanzibari and kilimanjar") for at in range(2)]
    spelled = [Draft("once", "", "lagoonish"), *(Draft(f"l{at}", "", "lagoon") for at in range(3))]
    forms = [Draft(f"f{at}", "", word) for at, word in enumerate(["connector", "connection", "connected"])]
    with searching(tmp_path, {"north": OPEN}, drafts={"north": [*NORTH, *rare, *spelled, *forms]}) as silos:
        slips = ["zanzibarj", "kilimanjra", "zyzzogetan", "wyvernfli", "lagoonisch", "connectoin", "conected"]
        for query in slips:
            told = ask(silos, "north", query=query, **ALL)["spellings"]
            assert [each["like"] for each in told] == [[]], query
        assert ask(silos, "north", query="lagon", **ALL)["spellings"][0]["like"] == ["lagoon"]
        node = silos.nodes["north"]
        for gone in ("l0", "l1"):
            node.remove(gone)  # with lagoon.md two documents are left
        assert ask(silos, "north", query="lagon", **ALL)["spellings"][0]["like"] == []


def test_all_of_it_is_in_the_ledger(silos):
    ask(silos, "south", query="watr", **ALL)
    release = silos.nodes["south"].release()
    kinds = {each.kind: each.guarantee for each in release.departures}
    assert kinds["sums"] == kinds["snippets"] == "no DP guarantee"


@pytest.mark.parametrize(
    "lie",
    [
        {"matches": {"count": -1}},
        {"matches": {"count": 1, "types": {str(at): 1 for at in range(51)}}},
        {"matches": {"count": 1, "years": {"<b>": 1}}},
        {"spellings": [{"word": "a", "like": ["b"] * 4}]},
        {"spellings": [{"word": "a" * 101}]},
    ],
)
def test_extras_of_another_form_are_no_answer(lie):
    with pytest.raises(ValueError, match="validation error"):
        wire.NodeAnswer.model_validate_json(json.dumps(answer("east", [], **lie)))


def test_no_silo_speaks_for_another(silos):
    """What a silo says of copies elsewhere is not taken over, and a digest of its own folds nothing else."""
    lie = {"silo": "west", "document": "w", "probability": 1.0, "score": 1.0}
    digests = enumerate(("", "ab"))
    hits = [wire.Hit(**hit("east", at, 0.5, also=[lie], digest=digest)) for at, digest in digests]
    assert [each.also for each in map(folded, group_copies(hits))] == [[], []]


@pytest.mark.parametrize(
    "like", ["tide silo:evil", "tide -x", "tide*", "silo:evil", "advertisement", "ti\nde"]
)
def test_no_silo_puts_filters_or_its_own_words_into_a_query(like):
    """A suggestion is one word spelled like the one there is, whatever a silo proposes."""
    told = wire.NodeAnswer(**answer("evil", [], spellings=[{"word": "tyde", "like": [like]}]))
    assert suggestion_of("tyde", {"evil": told}) is None
    told = wire.NodeAnswer(**answer("evil", [], spellings=[{"word": "tyde", "like": [like, "tide"]}]))
    assert suggestion_of("tyde", {"evil": told}).query == "tide"


def test_filters_cannot_be_made_expensive(silos):
    """Many of them are words, and what a node is sent directly has bounds."""
    query = " ".join(f'-"a{at} b"' for at in range(100)) + " tide"
    assert silos.search(query[:2000])["understood"]["hints"]
    url = silos.settings.silos["north"].url
    for only in ({"without": ["x"] * 21}, {"prefixes": ["x" * 2001]}, {"since": 10**13}, {"unknown": 1}):
        body = {"query": "tide", "only": only}
        assert httpx.post(f"{url}/v1/search", json=body, headers=message_header()).status_code == 422
    for prefix in ("a.*", "[", "(((((", "\\", "x|y", ".*.*.*"):
        told = ask(silos, "north", query="tide", only={"prefixes": [prefix]})
        assert told["hits"] == []  # it is text, not a pattern
