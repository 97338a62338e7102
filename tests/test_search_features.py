"""Phrases, filters, pages, counts, spellings and duplicates, from a query at the broker to documents."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from isthmus.cli.broker import further_lines
from isthmus.cli.documents import _hit
from isthmus.engines import CannotNarrow
from isthmus.errors import ServiceError
from isthmus.service import wire
from isthmus.service.display import digest_of
from isthmus.service.query_language import parse
from isthmus.service.results import folded, group_copies, has_more, in_order, suggestion_of
from isthmus.service.settings import RequestLimits
from isthmus.service.spelling import edits
from isthmus.service.stores import Draft
from searching_silos import OPEN, searching
from silo_stand_in import Loop, StandIn, answer, hit


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    with searching(tmp_path_factory.mktemp("silos"), {"north": OPEN, "south": OPEN}) as made:
        yield made


class TestNarrowing:
    def test_a_phrase_stands_as_it_is_written(self, silos):
        assert set(silos.found('"tidal flats"')) == {"power.txt"}
        assert set(silos.found('"power of the sea" lagoon')) <= {f"tide-{at:02d}.pdf" for at in range(40)}
        assert silos.found('"flats tidal"') == []
        assert set(silos.found("tidal flats", k=100)) > {"power.txt", "lagoon.md", "turbine.md"}

    def test_what_is_excluded_is_in_no_hit(self, silos):
        assert set(silos.found("tidal -sea -lagoon", k=100)) == {"power.txt", "turbine.md"}
        assert "power.txt" not in silos.found('tidal -"tidal flats"', k=100)

    def test_words_by_their_beginning(self, silos):
        assert set(silos.found("turb*")) == {"lagoon.md", "turbine.md"}
        assert set(silos.found("turbines*")) == {"lagoon.md", "turbine.md"}
        assert set(silos.found("water turb*")) == {"lagoon.md"}
        assert silos.found("xyz*") == []

    def test_only_the_silos_that_are_named(self, silos):
        told = silos.search("silo:south water")
        assert [each["silo"] for each in told["silos"]] == ["south"]
        assert {each["silo"] for each in silos.search("-silo:south water")["silos"]} == {"north"}
        told = silos.search("silo:west water")
        assert (told["silos"], told["hits"]) == ([], [])
        assert told["understood"]["hints"] == ["no silo is called west; there are north, south"]

    def test_types_and_dates(self, silos):
        assert {each.rpartition(".")[2] for each in silos.found("tidal water type:md", k=100)} == {"md"}
        assert "lagoon.md" not in silos.found("tidal -type:md", k=100)
        assert set(silos.found("tidal after:2016", k=100)) == {"lagoon.md", "power.txt"}
        assert set(silos.found("tidal after:2016 before:2019", k=100)) == {"power.txt"}
        assert len(silos.found("tidal before:1971", k=100)) == 5

    def test_as_many_hits_as_there_are_under_a_filter(self, silos):
        """The one document is the worst of forty by BM25, and k is 1."""
        assert silos.found("tide power type:txt", k=1) == ["power.txt"]

    def test_a_query_that_only_narrows_is_listed_by_date(self, silos):
        told = silos.search("type:md")
        assert [each["document"] for each in told["hits"]] == ["lagoon.md", "turbine.md", "copy.md"]
        assert [each["date"] for each in told["hits"]] == ["2019-04-14", "2011-01-26", ""]
        assert {each["scorer"] for each in told["silos"]} == {"date"}
        assert all(each["token"] == "" for each in told["hits"])
        assert silos.found("type:md", threshold=0.5) == []
        assert len(silos.found("silo:south", k=100)) == 10

    def test_what_was_understood_is_said(self, silos):
        told = silos.search('the tide "spring tide" -lagoon x:y')["understood"]
        assert told["words"] == "the tide spring tide x:y"
        assert [(part["kind"], part["start"], part["end"]) for part in told["parts"]] == [
            ("phrase", 9, 22),
            ("without", 23, 30),
        ]
        assert "x: is no filter" in told["hints"][0]
        assert told["marked"] == ["tide", "spring", "x", "y"]  # no stop words
        assert silos.search("to be")["understood"]["marked"] == ["to", "be"]

    def test_a_judgement_is_about_the_words(self, silos):
        query = '"spring tide" silo:north'
        (first,) = silos.search(query)["hits"]
        said = {"query": query, "silo": "north", "token": first["token"], "relevant": True}
        assert silos.post("/v1/feedback", **said).status_code == 204
        judged = silos.nodes["north"].store.judgements()
        assert {(each.query, each.document) for each in judged} == {("spring tide", "same.txt")}
        own = silos.post("/v1/judged", query=query, hits=[{"silo": "north", "token": first["token"]}])
        assert own.json()["relevant"] == [True]

    def test_an_engine_that_cannot_says_so(self, silos, monkeypatch):
        def cannot(*_, **__):
            raise CannotNarrow("its engine cannot search for phrases")

        monkeypatch.setattr(type(silos.nodes["south"].index.snapshot.reader), "matching", cannot)
        told = silos.search('"moon moves"')
        assert told["hits"] == []
        assert {each["detail"] for each in told["silos"]} == {"its engine cannot search for phrases"}


class TestPages:
    @pytest.mark.parametrize("query", ["tidal", "water", "tide -lagoon", "type:pdf", "water moon tide sea"])
    def test_pages_are_the_list_and_nothing_is_lost_or_twice(self, silos, query):
        whole = [(each["silo"], each["document"]) for each in silos.search(query, k=100)["hits"]]
        paged, offset = [], 0
        while True:
            told = silos.search(query, k=7, offset=offset)
            paged += [(each["silo"], each["document"]) for each in told["hits"]]
            offset += 7
            if not told["more"]:
                break
        assert paged == whole

    def test_depth_is_bounded(self, silos):
        assert silos.post("/v1/search", query="x", offset=100).status_code == 422
        assert not silos.search("tidal", k=20, offset=99)["more"]

    def test_a_threshold_ends_the_pages(self):
        lists = [[wire.Hit(**hit("a", at, 0.9 - at / 10)) for at in range(5)]]
        assert has_more(lists, 5, 0.5)
        assert not has_more(lists, 5, 0.6)
        assert not has_more(lists, 6, 0.0)
        assert not has_more([lists[0] * 20], 100, 0.0)

    def test_a_silo_that_allows_fewer_hits_is_no_broken_one(self, tmp_path):
        limits = replace(RequestLimits(per_second=500, burst=1000), hits=10)
        with searching(tmp_path, {"south": OPEN}, limits=limits) as small:
            (status,) = small.search("water", k=10, offset=10)["silos"]
            assert status["status"] == "refused"
            assert small.search("water", k=10)["silos"][0]["status"] == "answered"


class TestCounts:
    def test_matches_and_facets_of_all_silos(self, silos):
        told = silos.search("tidal", k=2, facets=True)
        assert {each["silo"]: each["matches"] for each in told["silos"]} == {"north": 42, "south": 1}
        facets = told["facets"]
        assert facets["matches"] == 43
        assert facets["types"] == {"pdf": 40, "md": 2, "txt": 1}
        assert sum(facets["years"].values()) == 43
        assert list(facets["years"]) == sorted(facets["years"], key=int, reverse=True)
        assert silos.search("tidal type:md", facets=True)["facets"]["matches"] == 2
        assert silos.search("tidal")["facets"] is None
        assert silos.search("type:md", facets=True)["facets"]["silos"] == {"north": 1, "south": 2}

    def test_a_threshold_changes_no_count(self, silos):
        told = silos.search("tidal", facets=True, threshold=0.9)
        assert (told["hits"], told["facets"]["matches"]) == ([], 43)


class TestDuplicates:
    def test_one_hit_names_both_silos(self, silos):
        hits = silos.search('"spring tide"')["hits"]
        assert len(hits) == 1
        assert {hits[0]["silo"], hits[0]["also"][0]["silo"]} == {"north", "south"}
        assert {hits[0]["document"], hits[0]["also"][0]["document"]} == {"same.txt", "copy.md"}
        assert hits[0]["digest"] == ""  # it ends at the broker

    def test_every_copy_is_opened_by_its_own_ticket(self, tmp_path):
        with searching(
            tmp_path, {name: replace(OPEN, open=True, ask="name") for name in ("north", "south")}
        ) as silos:
            (first,) = silos.search('"spring tide"')["hits"]
            (copy,) = first["also"]
            assert copy["access"] == first["access"] == ["open", "ask", "name"]
            for each, other in ((first, copy), (copy, first)):
                path = f"/v1/documents/{each['silo']}/{each['document']}"
                opened = silos.http.get(path, params={"ticket": each["ticket"]})
                assert opened.status_code == 200
                assert "spring tide" in opened.json()["body"].lower()
                assert silos.http.get(path, params={"ticket": other["ticket"]}).status_code == 404

    def test_the_same_words_have_the_same_digest_under_one_key_alone(self):
        one, other = Draft("a", "T", "a b, c"), Draft("b", "t", "A  b\n(c)")
        key = b"k" * 16
        assert digest_of(one, key) == digest_of(other, key)
        assert digest_of(one, key) != digest_of(one, b"l" * 16)
        assert digest_of(one, key) != digest_of(Draft("a", "T", "a c b"), key)
        plain, dashed = Draft("a", "T_1", "It's 12:30\x0b[A]"), Draft("b", "t_1", "it s—12 30 \xa0a")
        assert digest_of(plain, key) == digest_of(dashed, key)

    def test_copies_in_one_silo_stay_apart_and_the_best_place_counts(self):
        def of(silo, number, probability, digest):
            return wire.Hit(**hit(silo, number, probability, digest=digest))

        lists = [
            [of("a", 0, 0.9, "aa"), of("a", 1, 0.8, "aa"), of("a", 2, 0.3, "bb")],
            [of("b", 0, 0.95, "bb"), of("b", 1, 0.7, "aa"), of("b", 2, 0.6, "")],
        ]
        hits = [folded(group) for group in group_copies(in_order(lists))]
        names = [(each.document, [copy.document for copy in each.also]) for each in hits]
        assert names == [("b/0", ["a/2"]), ("a/0", ["b/1"]), ("a/1", []), ("b/2", [])]


class TestSpellings:
    def test_a_word_that_more_documents_have_is_proposed_and_not_searched(self, silos):
        told = silos.search('tidl powr -lagoon "sea"', suggest=True)
        assert (
            told["suggestion"]["query"] == 'tidl power -lagoon "sea"'
            or "tidal" in told["suggestion"]["query"]
        )
        told = silos.search("watr", suggest=True)
        assert told["suggestion"] == {"query": "water", "words": {"watr": "water"}, "silos": ["south"]}
        assert told["hits"] == []
        assert silos.search("watr")["suggestion"] is None
        assert silos.search("water", suggest=True)["suggestion"] is None

    def test_a_silo_that_has_the_word_vetoes(self):
        def of(silo, *spellings):
            told = [wire.Spelling(word=word, like=like) for word, like in filter(None, spellings)]
            told = None if spellings == (None,) else told
            return wire.NodeAnswer(**answer(silo, [], spellings=told))

        rare = of("a", ("tyde", ["tide", "tyre"]))
        assert suggestion_of("Tyde x", {"a": rare}).query == "tide x"
        assert suggestion_of("tyde", {"a": rare, "b": of("b")}) is None
        assert suggestion_of("tyde", {"a": rare, "b": of("b", None)}).words == {"tyde": "tide"}
        both = {"a": rare, "b": of("b", ("tyde", ["tyre"]))}
        assert suggestion_of("tyde", both).words == {"tyde": "tyre"}
        assert suggestion_of("tyde", {}) is None
        assert suggestion_of("note:tyde", {"a": rare}, parse("note:tyde").misread) is None
        query = "note:tyde TYDE"
        assert suggestion_of(query, {"a": rare}, parse(query).misread).query == "note:tyde tide"

    def test_a_word_of_a_misread_filter_is_not_corrected(self, silos):
        told = silos.search("note:watr powr", suggest=True)
        assert told["suggestion"]["query"] == "note:watr power"
        assert silos.search("before:watr", suggest=True)["suggestion"] is None

    @pytest.mark.parametrize(
        ("one", "other", "distance"),
        [
            ("tide", "tide", 0),
            ("tide", "tied", 1),
            ("tide", "tid", 1),
            ("tde", "tide", 1),
            ("tide", "moon", 3),
        ],
    )
    def test_edits(self, one, other, distance):
        assert edits(one, other, 2) == edits(other, one, 2) == distance


def test_a_node_of_the_release_before_is_asked_what_it_knows_and_named_where_that_is_not_enough(tmp_path):
    """It refuses keys that it does not know."""

    class Older(StandIn):
        def reply(self, path, body):
            known = {"query", "k", "deadline_ms", "explain", "threshold", "silos"}
            if path == "/v1/search" and not json.loads(body).keys() <= known:
                return 422, b"application/problem+json", b'{"title": "no", "status": 422}'
            return super().reply(path, body)

    from isthmus.service.broker import Broker
    from isthmus.service.settings import BrokerSettings, SiloAddress

    loop = Loop()
    try:
        ports = {name: loop.serve(Older(name)).port for name in ("a", "b")}
        addresses = {name: SiloAddress(f"http://127.0.0.1:{port}") for name, port in ports.items()}

        async def asked():
            broker = Broker(BrokerSettings(folder=tmp_path, silos=addresses, share_statistics=False))
            await broker.start()
            try:
                plain = await broker.search(
                    wire.Search(query="tides", facets=True, suggest=True, k=2, offset=1)
                )
                narrow = await broker.search(wire.Search(query="tides type:pdf"))
                again = await broker.search(wire.Search(query="silo:a tides"))
            finally:
                await broker.stop()
            return plain, narrow, again

        plain, narrow, again = loop.run(asked())
    finally:
        loop.close()
    assert [each.probability for each in plain.hits] == [0.9, 0.5]
    assert (plain.facets, plain.suggestion) == (None, None)
    assert {each.status for each in narrow.silos} == {"refused"}
    assert not narrow.hits
    assert "knows no filters" in narrow.silos[0].detail
    assert [each.silo for each in again.hits] == ["a"] * 3


class TestLines:
    """What the command line says of an answer."""

    COUNTED = wire.SiloStatus(silo="north", status="answered", matches=3)
    OTHER = wire.SiloStatus(silo="south", status="answered")

    def test_a_silo_that_did_not_count_is_named_where_counts_are_wanted(self):
        answer = wire.Answer(hits=[], silos=[self.COUNTED, self.OTHER], threshold=0, took_ms=1)
        assert further_lines(answer, 1, facets=True) == ["matches are not counted in south"]
        assert further_lines(answer, 1) == []

    def test_a_document_of_a_silo_that_is_down_is_not_called_no_hit(self):
        down = wire.SiloStatus(silo="south", status="down", detail="no connection")

        class Broker:
            def search(self, query, **options):
                return wire.Answer(hits=[], silos=[down], threshold=0, took_ms=1)

        with pytest.raises(ServiceError, match="south is down: no connection"):
            _hit(Broker(), "south/a.md", "tides")
