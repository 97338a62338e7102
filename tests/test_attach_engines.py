"""One suite for all engines: the embedded one, real servers, and OpenSearch by documented answers.

Every engine has the same documents: forty topics of three documents each, two of them of the kind `open`.
Their texts are of several lengths and their titles of several words, so that no two lists are quite alike.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from string import ascii_lowercase

import numpy as np
import pytest

from command_line import isthmus
from engine_servers import ENGINES, Switch, running
from isthmus.engines import Constraints, Location, attached, open_remote, remote
from isthmus.engines.remote import base_url
from isthmus.engines.tally import DocumentTally
from isthmus.errors import ConfigError, DataError, Refused, ServiceError
from isthmus.service import Draft, EncoderSettings, Node, NodeSettings, read_node
from isthmus.service.display import Extras
from isthmus.service.erasure import erase
from isthmus.service.people import Person
from isthmus.service.wire import (
    AttributedBatch,
    AttributedFeedback,
    AttributedOpening,
    NamedJudgement,
    Narrowing,
    NodeSearch,
    Search,
)

FIRST = ("harbour", "glacier", "orchard", "railway", "lantern", "granite", "monsoon", "cathedral")
SECOND = ("keepers", "surveys", "repairs", "festivals", "accounts")
FILLER = "The report of the year describes how people worked there and what was decided about it."
MORE = "Further pages follow. "
TOPICS = [f"{first} {second}" for first in FIRST for second in SECOND]
YEARS = [int(datetime(year, 3, 1, 12, tzinfo=UTC).timestamp()) for year in (2019, 2020, 2021)]
DOCUMENTS = [
    {
        "id": f"d{3 * at + part + 1}",
        "title": f"{' '.join(topic.title().split()[: 1 + at % 2])} {('north', 'south', 'east')[part]}",
        "body": f"{FILLER} {MORE * (part + 3 * (at % 7))} All about {topic}, {topic} and their neighbours.",
        "kind": "open" if part < 2 else "closed",
        "at": YEARS[part] + 86_400 * at,
    }
    for at, topic in enumerate(TOPICS)
    for part in range(3)
]
TITLES = {each["id"]: each["title"] for each in DOCUMENTS}


@pytest.fixture(scope="module")
def servers(request, tmp_path_factory):
    """Servers with the documents by name, each started when it is first wanted."""
    started = {"embedded": None}
    with ExitStack() as stack:

        def named(name):
            if name not in started:
                url = database(request.getfixturevalue("_postgres_server")) if name == "postgresql" else ""
                started[name] = stack.enter_context(running(name, tmp_path_factory.mktemp(name), url))
                started[name].fill("papers", DOCUMENTS)
            return started[name]

        yield named


def database(folder):
    """A database of our own on the tests' PostgreSQL server."""
    import psycopg

    with psycopg.connect(f"host={folder} user=postgres dbname=postgres", autocommit=True) as db:
        db.execute("CREATE DATABASE engines")
    return f"host={folder} user=postgres dbname=engines"


@pytest.fixture(params=("embedded", *ENGINES))
def server(request, servers):
    """A server with the documents; None for the embedded engine."""
    return servers(request.param)


elsewhere = pytest.mark.parametrize("server", ENGINES, indirect=True)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    for name, value in (("LOOK", 0.1), ("FRESH", 0.0), ("REST", 0.2)):
        monkeypatch.setattr(attached, name, value)


@pytest.fixture(autouse=True)
def key(monkeypatch, server):
    monkeypatch.setenv("ENGINE_KEY", "" if server is None else server.key)


def attach(server, folder, *options, url=""):
    """What `isthmus attach` writes, and says."""
    key = ("--key", "env:ENGINE_KEY") if server.key else ()
    done = isthmus("attach", url or server.url, "--out", folder, "--silo", "north", "--json", *key, *options)
    return read_node(folder / "north" / "silo.toml"), json.loads(done.stdout)


@contextmanager
def serving(server, folder, *options, url=""):
    """A node over the engine, that is ready."""
    if server is None:
        settings = NodeSettings("north", folder / "north", encoder=EncoderSettings("none"))
    else:
        settings, _ = attach(server, folder, *options, url=url)
    with Node(settings) as node:
        if server is None:
            node.put([Draft(each["id"], each["title"], each["body"]) for each in DOCUMENTS])
        until = time.monotonic() + 60
        while not (node.ready().ready and len(node.index.snapshot)) and time.monotonic() < until:
            time.sleep(0.02)
        assert node.ready().ready, node.ready()
        yield node


def search(node, query, k=10, **options):
    return node.searcher.search(Search(query=query, k=k), snippets=True, **options)


def named(server, id):
    return id if server is None else server.id(id)


def test_a_node_finds_what_the_engine_has(server, tmp_path):
    with serving(server, tmp_path / "w") as node:
        state = node.ready()
        assert (state.documents, state.indexed) == (len(DOCUMENTS), len(DOCUMENTS))
        assert (state.engine, state.level) == (("", "") if server is None else (server.noun, server.level))
        for at, topic in enumerate(TOPICS[:20]):
            answer = search(node, topic)
            right = {named(server, f"d{3 * at + part}") for part in (1, 2, 3)}
            assert {hit.document for hit in answer.hits[:3]} == right, topic
            scores = [hit.score for hit in answer.hits]
            assert scores == sorted(scores, reverse=True)
            assert all(topic.split()[0] in (hit.title + hit.snippet).lower() for hit in answer.hits[:3])
        assert search(node, "zzyzx").hits == search(node, "?").hits == []
        plain, signed = (search(node, query).hits for query in ("harbour keepers", 'harbour -"keepers'))
        assert [hit.document for hit in signed] == [hit.document for hit in plain]
        one = search(node, "harbour", k=100).hits
        assert len(one) == 15
        first = DOCUMENTS[0]
        (text,) = node.store.get([named(server, "d1"), "no such id", "9" * 30]).values()
        assert (text.title, text.body) == (first["title"], first["body"])


def test_hits_are_judged_and_documents_of_a_list_are_known(server, tmp_path):
    with serving(server, tmp_path / "w") as node:
        seal = node.tokens.seal
        hit = search(node, TOPICS[0], token=lambda id: seal(id, query=TOPICS[0], peer="broker")).hits[0]
        said = {"query": TOPICS[0], "silo": "north", "token": hit.token, "person": "ada"}
        node.judge(AttributedFeedback(relevant=True, **said), "broker")
        assert [(each.document, each.relevant) for each in node.store.judgements()] == [(hit.document, True)]
        node.judge(AttributedFeedback(relevant=None, **said), "broker")
        assert not node.store.judgements()
        assert set(node._ids()) == {named(server, id) for id in TITLES}
        rows = node.store.listed(words="harbour east")
        assert {row[1] for row in rows} == {
            title for title in TITLES.values() if title.startswith("Harbour") and title.endswith("east")
        }
        rows = [
            NamedJudgement(query="q", document=id, relevant=True) for id in (named(server, "d5"), "none such")
        ]
        done = node.judgements.take(AttributedBatch(judgements=rows, person="ada"), "broker", str)
        assert (done.added, done.unknown) == (1, [1])


def test_judgements_make_probabilities_in_the_engine_s_order(server, tmp_path):
    with serving(server, tmp_path / "w") as node:
        rows = []
        for at, topic in enumerate(TOPICS):
            right = {named(server, f"d{3 * at + part}") for part in (1, 2)}
            for hit in search(node, topic).hits[:6]:
                rows.append(
                    NamedJudgement(query=topic, document=hit.document, relevant=hit.document in right)
                )
        node.judgements.take(AttributedBatch(judgements=rows, person="ada"), "broker", str)
        node.calibrate_alone()
        answer = search(node, TOPICS[3])
        probabilities = [hit.probability for hit in answer.hits]
        assert None not in probabilities
        assert probabilities == sorted(probabilities, reverse=True)
        right = {named(server, f"d{9 + part}") for part in (1, 2, 3)}
        chances = {hit.document: hit.probability for hit in answer.hits}
        others = [value for document, value in chances.items() if document not in right]
        assert min(chances[document] for document in right) > max(others, default=0.0)
        explained = node.searcher.search(Search(query=TOPICS[3], explain=True), snippets=False).hits[0]
        own = "engine" if answer.scorer == "engine" else "bm25"
        assert explained.explanation[0].retriever == own
        odds = np.log(explained.probability / (1 - explained.probability))
        assert sum(part.contribution for part in explained.explanation) == pytest.approx(odds, abs=1e-6)


def test_the_level_says_what_takes_part(server, tmp_path):
    with serving(server, tmp_path / "w") as node:
        if server is not None and server.level == "scores":
            assert node.searcher.scorer.name == "engine"
            with pytest.raises(Refused):
                node.statistics("broker")
            assert not node.share(
                b"the sum of other silos"
            )  # which a broker hands to all: not used, no error
            judged = node.learner.queries("broker")
            assert (judged.alone, judged.queries) == (True, [])
        else:
            assert node.searcher.scorer.name == "bm25"
            statistics = node.index.snapshot.exact_statistics("north", ("text.having",))
            assert statistics.documents == len(DOCUMENTS)
            assert statistics.counts("text.having", ["harbour", "glacier", "keeper"]).tolist() == [15, 15, 24]


@elsewhere
def test_a_filter_holds_for_everything_that_is_shown(server, tmp_path):
    with serving(server, tmp_path / "w", "--filter", server.filter("open")) as node:
        closed = {server.id(each["id"]) for each in DOCUMENTS if each["kind"] == "closed"}
        assert len(node.index.snapshot) == len(DOCUMENTS) - len(closed)
        hits = [hit for topic in TOPICS[:10] for hit in search(node, topic, k=100).hits]
        assert hits
        assert not {hit.document for hit in hits} & closed
        assert not set(node._ids()) & closed
        assert not node.store.get(sorted(closed))


@pytest.mark.parametrize("wrong", ["{nonsense", "nowhere ((= 1"])
@elsewhere
def test_a_filter_that_the_engine_cannot_do_is_refused(server, tmp_path, wrong):
    key = ("--key", "env:ENGINE_KEY") if server.key else ()
    command = ("attach", server.url, "--out", tmp_path / "w", "--filter", wrong, *key)
    done = isthmus(*command, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "w").exists()


FIELDS = ("--type", "kind", "--date", "at", "--link", "https://wiki.example.org/{id}")


@elsewhere
def test_types_and_dates_are_filtered_in_the_engine_counted_and_shown(server, tmp_path, monkeypatch):
    with serving(server, tmp_path / "w", *FIELDS) as node:

        def narrowed(query, k=10, **only):
            wanted = NodeSearch(query=query, k=k, only=Narrowing(**only), matches=True)
            return node.searcher.search(wanted, snippets=True, extras=Extras(matches=True))

        def ids(answer):
            assert not answer.detail
            return {hit.document for hit in answer.hits}

        north, south, east = (server.id(f"d{at}") for at in (1, 2, 3))
        every = node.searcher.search(
            NodeSearch(query="harbour", k=100, matches=True), snippets=True, extras=Extras(matches=True)
        )
        assert (every.matches.count, every.matches.types) == (15, {"open": 10, "closed": 5})
        years = {2019: 5, 2020: 5, 2021: 5} if server.level == "full" else {}
        assert every.matches.years == years, "by year where the engine counts them"
        shown = {hit.document: (hit.type, hit.date) for hit in every.hits}
        assert (shown[north], shown[east]) == (("open", "2019-03-01"), ("closed", "2021-03-01"))
        assert ids(narrowed("harbour keepers", types=["closed"], k=1)) == {east}
        assert ids(narrowed("harbour keepers", other_types=["open"], k=1)) == {east}
        assert ids(narrowed("harbour keepers", since=YEARS[1], until=YEARS[2], k=1)) == {south}
        closed = narrowed("harbour", types=["closed"], since=YEARS[2] + 86_400, k=100)
        assert ids(closed) == {server.id(f"d{3 * at + 3}") for at in range(1, 5)}
        assert closed.matches.count == 4
        assert ids(narrowed("harbour", types=["none such"])) == set()
        # the best of few: what is filtered here would find none of them among the first
        few = node.searcher.index.snapshot.find("harbour", 2, Constraints(types=("closed",)))
        assert set(few.documents) <= {server.id(f"d{3 * at + 3}") for at in range(5)}
        assert len(few.documents) == 2
        # phrases, beginnings and exclusions are read in the texts of candidates
        assert ids(narrowed("harbour keepers", phrases=["harbour keepers"])) == {north, south, east}
        assert ids(narrowed("harbour keepers", without=["keepers"])).isdisjoint({north, south, east})
        assert ids(narrowed("harbour", prefixes=["keep"])) == {north, south, east}
        assert narrowed("harbour", phrases=["harbour keepers"]).matches is None
        assert node.documents.links([north]) == {north: f"https://wiki.example.org/{north}"}
        # without words, by date
        latest = narrowed("", types=["open"], k=3)
        assert [hit.document for hit in latest.hits] == [server.id(f"d{at}") for at in (119, 116, 113)]
        assert (latest.scorer, latest.detail, latest.matches.count) == ("date", "", 80)
        others = narrowed("", types=["open"], without=["wood", "accounts"], until=YEARS[1], k=2)
        assert [hit.document for hit in others.hits] == [server.id(f"d{at}") for at in (115, 112)]
        node.store.block([server.id("d119")], at=time.time())
        assert ids(narrowed("", types=["open"], k=2)) == {server.id("d116")}
        node.store.readmit([server.id("d119")])
        monkeypatch.setattr(remote, "MOST_LISTED", 79)
        if server.noun in ("Qdrant", "Meilisearch"):
            assert "more than 79" in narrowed("", types=["open"]).detail
        else:
            assert len(narrowed("", types=["open"], k=100).hits) == 80


@elsewhere
def test_what_an_engine_has_no_field_for_is_refused_by_name(server, tmp_path):
    with serving(server, tmp_path / "w") as node:
        for only, words in (({"types": ["open"]}, "no types"), ({"since": 0}, "no dates")):
            wanted = NodeSearch(query="harbour", only=Narrowing(**only), matches=True)
            answer = node.searcher.search(wanted, snippets=True, extras=Extras(matches=True))
            assert (answer.hits, answer.matches) == ([], None)
            assert words in answer.detail
    for option, name, words in (("--type", "nothing", "no field"), ("--date", "title", "title")):
        key = ("--key", "env:ENGINE_KEY") if server.key else ()
        done = isthmus("attach", server.url, "--out", tmp_path / "x", option, name, *key, check=False)
        assert done.returncode == 1
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "x").exists()


@elsewhere
def test_a_query_of_very_many_words_is_searched_by_the_rarest_that_there_are(server, tmp_path):
    with serving(server, tmp_path / "w") as node:
        words = [first + second for first in ascii_lowercase for second in ascii_lowercase]
        query = f"{TOPICS[0]} {' '.join(words[:650])}"
        answer = search(node, query)
        if server.noun != "Typesense":  # which leaves words out from the end, and not so many
            assert {hit.document for hit in answer.hits} & {server.id(f"d{at}") for at in (1, 2, 3)}
        if server.level == "full":
            assert {hit.document for hit in answer.hits[:3]} == {server.id(f"d{at}") for at in (1, 2, 3)}


@elsewhere
def test_documents_are_changed_where_they_are(server, tmp_path):
    with (
        serving(server, tmp_path / "w") as node,
        pytest.raises(Refused, match=f"{server.noun}, which is only"),
    ):
        node.put([Draft("x", "", "text")])
    listed = isthmus("documents", "list", "--config", tmp_path / "w" / "north" / "silo.toml")
    assert listed.stderr.endswith("isthmus: 100 of 120 documents\n")


@elsewhere
def test_an_erased_document_is_shown_no_more_though_the_engine_has_it(server, tmp_path):
    with serving(server, tmp_path / "w") as node:
        id, others = server.id("d1"), {server.id("d2"), server.id("d3")}
        node.judgements.take(
            AttributedBatch(judgements=[NamedJudgement(query="q", document=id, relevant=True)], person="ada"),
            "broker",
            str,
        )
        ticket = node.tokens.ticket(id, peer="broker")
        with pytest.raises(DataError, match="no document nobody"):
            erase(node, [id, "nobody"])
        assert node.store.present([id])
        receipt = erase(node, [id])
        assert [(each.removed, each.hidden) for each in receipt.documents] == [(False, True)]
        assert receipt.judgements == 1
        assert server.noun in receipt.remains[0]
        assert "whoever runs that engine" in receipt.remains[0]
        assert {hit.document for hit in search(node, TOPICS[0], k=3).hits} >= others
        assert id not in {hit.document for hit in search(node, TOPICS[0], k=100).hits}
        assert not node.store.get([id])
        assert not node.store.present([id])
        assert id not in node._ids()
        assert id not in {row[0] for row in node.store.listed()}
        opening = AttributedOpening(ticket=ticket, person="ada")
        with pytest.raises(DataError):
            node.documents.open(id, opening, peer="broker", name=str)
        tally = tmp_path / "w" / "north" / "index" / "index" / "tally"
        if server.level == "full":
            assert server.id("d2") in DocumentTally.load(tally).ids
            assert id not in DocumentTally.load(tally).ids
            until = time.monotonic() + 30
            while "hidden" not in node.index.snapshot.reader.tally.version and time.monotonic() < until:
                time.sleep(0.02)
            statistics = node.index.snapshot.exact_statistics("north", ("text.having",))
            assert statistics.counts("text.having", ["harbour", "keeper"]).tolist() == [14, 23]
        assert erase(node, [id]).documents[0].hidden is False
    with Node(node.settings) as again:
        assert not again.store.get([id])
        assert again.store.readmit([id]) == 1
        assert again.store.get([id])


@elsewhere
def test_a_server_that_is_down_or_silent_is_said_and_comes_back(server, tmp_path):
    switch = Switch(server.target)
    try:
        with serving(server, tmp_path / "w", "--seconds", "2", url=server.at(switch.port)) as node:
            assert search(node, TOPICS[0]).hits
            for mode in ("off", "silent"):
                switch.turn(mode)
                began = time.monotonic()
                with pytest.raises(ServiceError, match=server.noun):
                    search(node, TOPICS[0])
                assert time.monotonic() - began < 15
                state = node.ready()
                assert not state.ready
                assert state.detail == f"{server.noun} does not answer"
                switch.turn("on")
                until = time.monotonic() + 30
                while not node.ready().ready and time.monotonic() < until:
                    time.sleep(0.05)
                assert search(node, TOPICS[0]).hits
    finally:
        switch.close()


@elsewhere
def test_wrong_credentials_and_sources_are_one_line_with_the_cure(server, tmp_path, monkeypatch):
    wrong = isthmus(
        *("attach", server.url, "--out", tmp_path / "w", "--source", "nothing", "--key", "env:ENGINE_KEY"),
        check=False,
    )
    assert wrong.returncode == 1
    assert f"{server.noun} has no nothing" in wrong.stderr
    if server.key:
        monkeypatch.setenv("ENGINE_KEY", "wrong:key")
        wrong = isthmus("attach", server.url, "--out", tmp_path / "w", "--key", "env:ENGINE_KEY", check=False)
        assert wrong.returncode == 1
        assert "refuses these credentials" in wrong.stderr
        assert "wrong:key" not in wrong.stderr
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("server", ["embedded"], indirect=True)
def test_nothing_goes_in_the_clear_beyond_this_machine():
    with pytest.raises(ConfigError, match="in the clear"):
        open_remote(Location(url="http://search.example.org:9200"))
    for scheme in ("qdrant", "typesense", "meilisearch", "https"):
        assert base_url(f"{scheme}://search.example.org:1") == "https://search.example.org:1"
        with pytest.raises(ConfigError, match="no password"):
            open_remote(Location(url=f"{scheme}://ada:hush@search.example.org"))


@pytest.mark.parametrize("server", ["qdrant"], indirect=True)
def test_vectors_are_searched_by_the_encoder_that_made_them(server, tmp_path):
    from isthmus.encoders import load_encoder
    from tiny_encoders import WORDS as WORDS_KNOWN
    from tiny_encoders import lookup_encoder

    for seed, name in enumerate(("tiny", "other")):
        table = np.random.default_rng(seed).normal(size=(len(WORDS_KNOWN), 8)).astype(np.float32)
        lookup_encoder(tmp_path / name, table)
    texts = ["red pear", "green apple", "red apple", "green pear", "find me red", "pear apple green"]
    documents = [
        {"id": f"d{at}", "title": "", "body": text, "kind": "open"} for at, text in enumerate(texts, 1)
    ]
    server.fill("fruit", documents, load_encoder(str(tmp_path / "tiny")).encode(texts))
    options = ("--source", "fruit", "--encoder", tmp_path / "tiny")
    settings, said = attach(server, tmp_path / "w", *options)
    assert any("cosine to those stored is 1.00" in reason for reason in said["reasons"])
    with Node(settings) as node:
        for at, text in enumerate(texts, 1):
            hit = search(node, text).hits[0]
            assert hit.document == str(at)
            assert hit.score == pytest.approx(1.0, abs=1e-3)
    key = ("--key", "env:ENGINE_KEY", "--source", "fruit", "--encoder")
    other = isthmus("attach", server.url, "--out", tmp_path / "x", *key, tmp_path / "other", check=False)
    assert other.returncode == 1
    assert "at least 0.9" in other.stderr


RULES = ([], None, ["everyone"], ["doctors"], ["group:nurses"], ["user:ada", "nurses"], ["user:eve"])
PERSONS = (Person("ada", frozenset({"doctors"})), Person("bob", frozenset({"nurses", "everyone"})))


def ruled(server, folder, source, level):
    """A node over a collection whose documents say who may see them."""
    options = ("--source", "ruled", "--type", "kind", "--date", "at", "--allow-field", "acl")
    settings, _ = attach(server, folder, *options)
    engine = replace(settings.engine, source=source)
    assert (engine.allow_field, engine.level) == ("acl", level)
    folder = settings.folder.with_name(f"{source}-{level}")
    if level == "full":
        return Node(replace(settings, engine=engine, folder=folder, depth=400))
    statistics = replace(settings.statistics, form="none")
    return Node(replace(settings, engine=engine, folder=folder, statistics=statistics, depth=400))


@elsewhere
@pytest.mark.soak
def test_a_person_is_answered_as_if_there_were_no_documents_but_theirs(server, tmp_path, soak_count):
    """Byte for byte: hits, scores, explanations, counts, facets, by words and by date; nothing is opened."""
    for draw in range(soak_count(1, 10)):
        generator = np.random.default_rng(5 + draw)
        rules = [RULES[at] for at in generator.integers(len(RULES), size=len(DOCUMENTS))]
        documents = [
            {**each, **({} if rule is None else {"acl": rule})}
            for each, rule in zip(DOCUMENTS, rules, strict=True)
        ]
        topics = [TOPICS[at] for at in generator.choice(len(TOPICS), 2, replace=False)]
        words = generator.choice(sorted({word for topic in TOPICS for word in topic.split()}), 3)
        _check_law(server, tmp_path / str(draw), str(draw or ""), documents, [*topics, " ".join(words)])


def _check_law(server, folder, draw, documents, queries):
    server.fill(f"ruled{draw}", documents)
    asked = [
        NodeSearch(query=query, k=50, explain=True, matches=True, suggest=True, only=only)
        for query in (*queries, "harbour glacier decided", "keepers of the year", "harbuor")
        for only in (None, Narrowing(types=["closed"]), Narrowing(phrases=["harbour keepers"]))
    ] + [NodeSearch(query="", k=50, matches=True, only=Narrowing(types=["open"]))]

    def answers(node, person):
        extras = Extras(matches=True, suggestions=True, key=b"k" * 16)
        for each in asked:
            answer = node.searcher.search(each, snippets=True, extras=extras, principals=person.principals)
            yield answer.model_copy(update={"took_ms": 0.0}).model_dump_json()

    def caught_up(node):
        node.attached._looked = -1e9
        node.attached.maintain()
        node.attached.refresh()
        node.index.renew()
        return node

    shared = None
    for at, person in enumerate(PERSONS):
        names = {*person.principals, *person.groups} - {"group:everyone"}
        lacking = server.noun == "Typesense"  # which cannot look for documents without a rule
        seen = [
            each
            for each in documents
            if (not each.get("acl") and not lacking) or names.intersection(each.get("acl") or ())
        ]
        server.fill(f"seen{at}{draw}", seen)
        with (
            ruled(server, folder / "all", f"ruled{draw}", server.level).offline() as every,
            ruled(server, folder / "seen", f"seen{at}{draw}", server.level).offline() as alone,
        ):
            caught_up(every)
            caught_up(alone)
            if server.level == "full":
                shared = every.index.snapshot.exact_statistics("all", ("text.having",))
                every.index.share(shared)
                alone.index.share(shared)
            assert len(every.index.snapshot) == len(documents)
            first, second = (list(answers(node, person)) for node in (every, alone))
            assert first == second
            hidden = [server.id(each["id"]) for each in documents if each not in seen]
            assert all(every.documents.read(id, person.principals) is None for id in hidden if not lacking)
            assert not any(f'"{id}"' in text for id in hidden[:20] for text in first)


@elsewhere
def test_an_engine_that_cannot_filter_by_who_may_see_refuses_to_start(server, tmp_path):
    settings, _ = attach(server, tmp_path / "w", "--source", "papers")
    field = "title" if server.noun in ("OpenSearch", "Meilisearch") else "absent"
    engine = replace(settings.engine, allow_field=field)
    if server.noun != "Qdrant":  # where any field of the payload filters
        with pytest.raises(ConfigError) as refused:
            Node(replace(settings, engine=engine))
        assert refused.value.key == "engine.allow_field"
    if server.noun == "OpenSearch":
        scores = replace(engine, allow_field="acl", level="scores")
        statistics = replace(settings.statistics, form="none")
        with pytest.raises(ConfigError, match="depend on documents"):
            Node(replace(settings, engine=scores, statistics=statistics))
    closed = replace(settings, engine=replace(settings.engine, allow=("doctors",)))
    with Node(closed).offline() as node:  # a rule of the whole silo
        wanted = Search(query=TOPICS[0])
        one, other = (
            node.searcher.search(wanted, snippets=True, principals=each.principals).hits for each in PERSONS
        )
        assert one
        assert not other


@pytest.mark.parametrize("server", ["qdrant"], indirect=True)
def test_vectors_elsewhere_are_filtered_before_they_are_ranked(server):
    generator = np.random.default_rng(6)
    vectors = generator.normal(size=(len(DOCUMENTS), 4))
    rules = [RULES[at] for at in generator.integers(len(RULES), size=len(DOCUMENTS))]
    documents = [{**each, "acl": rule or []} for each, rule in zip(DOCUMENTS, rules, strict=True)]
    server.fill("directions", documents, vectors)
    engine = open_remote(Location(server.url, "directions", title="title", allow="acl", key=server.key))
    seen = [
        at
        for at, each in enumerate(documents)
        if not each["acl"] or {"everyone", "doctors", "user:ada"} & set(each["acl"])
    ]
    query = generator.normal(size=4)
    cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    best = sorted(seen, key=lambda at: -cosines[at])[:5]
    only = Constraints(readers=PERSONS[0].principals)
    hits = engine.search("", query.astype(np.float32), 5, only)
    assert [id for id, _ in hits] == [server.id(documents[at]["id"]) for at in best]
    assert engine.documents(only) == len(seen)
    engine.close()
