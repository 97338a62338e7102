"""Judgements from files and into files: through a broker to silos that have the documents, and in one."""

from __future__ import annotations

import csv
import json
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cli import main
from isthmus.cli.judgements import _explain
from isthmus.errors import DataError, Refused, ServiceError
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.client import Client
from isthmus.service.judgement_files import read_judgements, write_judgements
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.security import ApiKeys
from isthmus.service.settings import (
    BrokerSettings,
    EncoderSettings,
    Learning,
    NodeSettings,
    Policy,
    RequestLimits,
    SiloAddress,
    Source,
)
from isthmus.service.stores import Draft, Judgement, SqliteStore
from isthmus.service.wire import Imported, NamedJudgement
from silo_stand_in import Loop

ALLOWED = Policy(search=True, snippets=True, feedback=True, judgements=True)
PEER = "anonymous"
"""What the broker is called by nodes on loopback."""


def said(query, document, relevant=True, silo=None):
    return NamedJudgement(query=query, document=document, relevant=relevant, silo=silo)


def node_settings(folder, name, policy):
    rows = [{"_id": f"{name[0]}{at}", "title": "tide", "text": f"turbine number{at}"} for at in range(5)]
    rows.append({"_id": "read me.md", "title": "tide", "text": "in both"})
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row).replace("read me.md", "readme.md") + "\n" for row in rows))
    return NodeSettings(
        silo=name,
        folder=folder / name,
        sources=(Source("beir", path),),
        peers={PEER: policy},
        encoder=EncoderSettings("none"),
        learning=Learning(least_queries=3),
    )


@contextmanager
def federation(folder, *, south=ALLOWED, limits=None):
    """Two silos behind a broker: their nodes, and a client for each of the keys."""
    loop = Loop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        nodes, addresses = {}, {}
        for name, policy in (("north", ALLOWED), ("south", south)):
            node = nodes[name] = stack.enter_context(Node(node_settings(folder, name, policy)).offline())
            node.read_sources()
            node.index.catch_up()
            node._read.set()
            addresses[name] = SiloAddress(f"http://127.0.0.1:{loop.serve(node_app(node)).port}")
        keys = ApiKeys(folder / "api-keys.json")
        settings = BrokerSettings(
            folder=folder / "broker",
            keys=keys.path,
            silos=addresses,
            share_statistics=False,
            deadline_ms=10_000,
            limits=limits or RequestLimits(),
        )

        async def made():
            return Broker(settings)

        url = f"http://127.0.0.1:{loop.serve(broker_app(loop.run(made())), lifespan='on').port}"
        clients = {}
        for name, scopes in (("admin", ["admin"]), ("ada", None), ("bob", None)):
            token = keys.add(name, scopes=scopes or ["search", "feedback"])
            (folder / f"{name}.key").write_text(token)
            (folder / f"{name}.key").chmod(0o600)
            clients[name] = stack.enter_context(Client(url, key=token))
        yield nodes, clients, url


class TestFiles:
    def test_qrels_with_either_kind_of_queries(self, tmp_path):
        qrels = tmp_path / "qrels.txt"
        qrels.write_text("q1 0 d1 2\nq1 0 d2 1\nq1 0 d3 0\nq2 0 d1 -1\n")
        (tmp_path / "topics.tsv").write_text("q1\ttidal power \nq2\tdredging\n")
        (tmp_path / "queries.jsonl").write_text(
            '{"_id": "q1", "text": "tidal power"}\n{"_id": "q2", "text": "dredging"}\n'
        )
        expected = [
            said("tidal power", "d1"),
            said("tidal power", "d2"),
            said("tidal power", "d3", False),
            said("dredging", "d1", False),
        ]
        assert read_judgements(qrels, queries=tmp_path / "topics.tsv") == expected
        assert read_judgements(qrels) == expected, "queries.jsonl stands beside them"
        strict = read_judgements(qrels, least_grade=2, silo="north")
        assert [each.relevant for each in strict] == [True, False, False, False]
        assert {each.silo for each in strict} == {"north"}

    def test_csv(self, tmp_path):
        file = tmp_path / "judged.csv"
        file.write_text(
            '\ufeffsilo,relevant,query,document\nnorth,1,"tides,\nwaves",d1\n,no,tides,a b.md\n\n,3,x,d2\n',
            encoding="utf-8",
        )
        assert read_judgements(file) == [
            said("tides,\nwaves", "d1", silo="north"),
            said("tides", "a b.md", False),
            said("x", "d2"),
        ]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("query,relevant\n", r"judged.csv:1: not the columns.*query,relevant.*query,document,relevant"),
            ("query,document,relevant,x\n", "not the columns"),
            ("query,document,relevant\na,b\n", r":2: 2 columns where the first line has 3"),
            ("query,document,relevant\na,b,maybe\n", r":2: relevant is no grade: 'maybe' \(1 or 0"),
            ("query,document,relevant\n ,b,1\n", r":2: query: .*1 to 2,000 letters"),
            ("query,document,relevant\na,,1\n", r":2: document: .*1 to 1,000"),
            ('query,document,relevant\n"a"b,c,1\n', r":2: not CSV"),
            (
                "query,document,relevant\na,b,1\na,c,1\na,b,0\n",
                r":4: document 'b' is right here and wrong in line 2",
            ),
            ("", "the file is empty"),
            ("query,document,relevant\n\n", r"judged.csv: no judgement in it \(a line each"),
        ],
    )
    def test_a_line_that_is_wrong_is_named(self, tmp_path, content, message):
        file = tmp_path / "judged.csv"
        file.write_text(content)
        with pytest.raises(DataError, match=message):
            read_judgements(file)

    def test_qrels_whose_queries_are_not_known(self, tmp_path):
        qrels = tmp_path / "qrels.txt"
        qrels.write_text("q1 0 d1 1\nq2 0 d1 0\n")
        with pytest.raises(DataError, match=r"qrels.txt: qrels name queries by numbers.*--queries FILE"):
            read_judgements(qrels)
        (tmp_path / "queries.tsv").write_text("q1\ttides\n")
        with pytest.raises(
            DataError, match=r"queries.tsv: query 'q2' is judged in .*qrels.txt and has no text"
        ):
            read_judgements(qrels)
        (tmp_path / "queries.tsv").write_text("q1\ttides\nq2\ttides\n")
        with pytest.raises(DataError, match="document 'd1' is right here and wrong in query q1"):
            read_judgements(qrels)

    @given(
        st.dictionaries(
            st.tuples(
                st.text(min_size=1, max_size=9).map(str.strip).filter(lambda text: text and "\0" not in text),
                st.text(st.characters(min_codepoint=33, exclude_categories=["Cc", "Cs", "Z"]), min_size=1),
                st.sampled_from(["north", "south"]),
            ),
            st.booleans(),
            min_size=1,
        ),
        st.booleans(),
    )
    def test_what_is_written_is_read_back(self, tmp_path_factory, pairs, as_csv):
        folder = tmp_path_factory.mktemp("round")
        every = [said(query, document, right, silo) for (query, document, silo), right in pairs.items()]
        every = [each for each in every if each.query.encode("utf-8", "ignore").decode() == each.query]
        if not every:
            return
        write_judgements(every, folder / "judged.csv" if as_csv else folder / "judged")
        if as_csv:
            assert read_judgements(folder / "judged.csv") == every
            return
        again = read_judgements(folder / "judged" / "qrels.txt")
        twice = [each.document for each in {(one.document, one.silo): one for one in every}.values()]
        names = [
            (each.query, each.document if twice.count(each.document) == 1 else f"{each.silo}/{each.document}")
            for each in every
        ]
        assert sorted((each.query, each.document, each.relevant) for each in again) == sorted(
            (*name, each.relevant) for name, each in zip(names, every, strict=True)
        )

    def test_qrels_cannot_hold_white_space(self, tmp_path):
        with pytest.raises(DataError, match=r"white space of 'a b' \(-o FILE.csv\)"):
            write_judgements([said("q", "a b")], tmp_path / "out")


class TestStore:
    def test_only_what_differs_is_written(self, tmp_path):
        store = SqliteStore(tmp_path / "documents.db")
        store.put([Draft("a", "", "x"), Draft("b", "", "x")])
        first = [
            Judgement("q", "a", True, "p", 1.0, person="i"),
            Judgement("q", "b", False, "p", 1.0, person="i"),
        ]
        assert store.merge_judgements(first).added == 2
        again = [replace(first[0], at=2.0), replace(first[1], at=2.0, relevant=True)]
        done = store.merge_judgements(again)
        assert (done.added, done.changed) == (0, 1)
        assert [(each.document, each.relevant, each.at) for each in store.judgements()] == [
            ("a", True, 1.0),
            ("b", True, 2.0),
        ]
        assert store.merge_judgements([replace(first[0], person="another")]).added == 1
        store.withdraw("q", "a", peer="p", person="i")
        store.withdraw("q", "a", peer="p", person="i")
        assert {(each.document, each.person) for each in store.judgements()} == {("a", "another"), ("b", "i")}
        store.close()


class TestThroughTheBroker:
    def test_each_goes_to_the_silo_that_has_the_document(self, tmp_path):
        judgements = [
            said("tides", "n1"),
            said("tides", "s1", False),
            said("tides", "nobody"),
            said("tides", "readme.md"),
            said("tides", "readme.md", silo="south"),
            said("tides", "north/readme.md"),
        ]
        with federation(tmp_path) as (nodes, people, _):
            done = people["admin"].import_judgements(judgements)
            assert (done.added, done.changed, done.unchanged) == (4, 0, 0)
            assert (done.unknown, done.unplaced, done.unanswered) == ([2], [], {})
            assert done.ambiguous == {3: ["north", "south"]}
            stored = {
                name: [(each.document, each.relevant) for each in node.store.judgements()]
                for name, node in nodes.items()
            }
            assert stored == {
                "north": [("n1", True), ("readme.md", True)],
                "south": [("readme.md", True), ("s1", False)],
            }
            persons = {each.person for node in nodes.values() for each in node.store.judgements()}
            assert len(persons) == 2, "each silo knows whoever brought them by another name"
            assert not any("admin" in person for person in persons)
            again = people["admin"].import_judgements([*judgements, said("tides", "n1", False)][1:])
            assert (again.added, again.changed, again.unchanged) == (0, 1, 3)

    def test_round_trip_and_its_place_in_the_ledger(self, tmp_path, monkeypatch):
        monkeypatch.setattr("isthmus.service.judgements.PAGE_BYTES", 40)
        monkeypatch.setattr("isthmus.service.client.BATCH_BYTES", 200)
        judgements = [said(f"query {at}", f"{silo[0]}{at % 5}", at % 3 > 0, silo)
                      for at in range(20) for silo in ("north", "south")]  # fmt: skip
        with federation(tmp_path) as (nodes, people, _):
            seen = []
            done = people["admin"].import_judgements(judgements, progress=seen.append)
            assert done.added == sum(seen) == 40
            assert len(seen) > 5
            before = departed(nodes["north"])
            back = people["admin"].export_judgements()
            assert sorted(back, key=str) == sorted(judgements, key=str)
            assert departed(nodes["north"]) - before == 20
            assert people["admin"].export_judgements(["south"]) == [
                each for each in back if each.silo == "south"
            ]

    def test_only_what_came_through_the_broker_goes_back(self, tmp_path):
        with federation(tmp_path) as (nodes, people, _):
            nodes["north"].store.judge(Judgement("secret", "n1", True, "another", 1.0))
            people["admin"].import_judgements([said("tides", "n1")])
            assert [each.query for each in people["admin"].export_judgements()] == ["tides"]

    def test_a_silo_that_does_not_allow_it(self, tmp_path):
        with federation(tmp_path, south=replace(ALLOWED, judgements=False)) as (nodes, people, _):
            rows = [said("tides", "n1"), said("tides", "s1"), said("tides", "s2", silo="south")]
            done = people["admin"].import_judgements(rows)
            assert (done.added, done.unknown, done.unplaced) == (1, [], [1, 2])
            assert done.unanswered == {"south": "its policy does not allow this"}
            assert not nodes["south"].store.judgements()
            with pytest.raises(ServiceError, match="south: its policy does not allow this"):
                people["admin"].export_judgements()

    def test_a_peer_that_sees_no_ids_uses_the_names_it_sees(self, tmp_path):
        blind = Policy(search=True, feedback=True, judgements=True)
        with federation(tmp_path, south=blind) as (nodes, people, _):
            hits = [hit for hit in people["ada"].search("number3").hits if hit.silo == "south"]
            name = hits[0].document
            assert name != "s3"
            done = people["admin"].import_judgements([said("tides", name), said("tides", "s3")])
            assert (done.added, done.unknown) == (1, [1])
            assert [each.document for each in nodes["south"].store.judgements()] == ["s3"]
            assert [each.document for each in people["admin"].export_judgements(["south"])] == [name]

    def test_administrators_alone(self, tmp_path):
        with federation(tmp_path) as (_, people, _):
            with pytest.raises(Refused, match="admin"):
                people["ada"].import_judgements([said("tides", "n1")])
            with pytest.raises(Refused, match="admin"):
                people["ada"].export_judgements(["north"])
            with pytest.raises(ServiceError, match="only names that there are: north, south"):
                people["admin"].import_judgements([said("tides", "n1", silo="east")])

    def test_a_silo_is_sent_no_id_of_another(self, tmp_path, monkeypatch):
        from isthmus.service.http_client import HttpClient

        sent, ask = [], HttpClient.ask

        async def overheard(self, method, path, **more):
            sent.append((self.port, more.get("body", b"")))
            return await ask(self, method, path, **more)

        with federation(tmp_path) as (_, people, _):
            monkeypatch.setattr(HttpClient, "ask", overheard)
            people["admin"].import_judgements([said("tides", "n1"), said("tides", "who-gets-fired.pdf")])
        assert not any(b"who-gets-fired" in body for _, body in sent)
        assert len({port for port, body in sent if b'"n1"' in body}) == 1


def departed(node):
    node._ahead.settle()
    rows = node.ledger.summary()["departures"]
    return sum(row["items"] for row in rows if row["kind"] == "feedback")


class TestOwn:
    def test_remembered_changed_undone_and_nobody_elses(self, tmp_path):
        with federation(tmp_path) as (nodes, people, _):
            ada, bob = people["ada"], people["bob"]
            hits = ada.search("tide").hits[:3]
            assert ada.judgements("tide", hits) == [None, None, None]
            ada.judge("tide", hits[0], relevant=True)
            ada.judge("tide", hits[1], relevant=False)
            bob.judge("tide", bob.search("tide").hits[0], relevant=False)
            again = ada.search("tide").hits[:3]
            assert ada.judgements("tide", again) == [True, False, None]
            assert bob.judgements("tide", bob.search("tide").hits[:3]) == [False, None, None]
            ada.judge("tide", again[0], relevant=False)
            assert ada.judgements("tide", again)[0] is False
            ada.judge("tide", again[0], relevant=None)
            ada.judge("tide", again[0], relevant=None)
            assert ada.judgements("tide", again) == [None, False, None]
            assert bob.judgements("tide", again) == [False, None, None], "bob's stays"
            assert ada.judgements("another query", again) == [None, None, None], "tokens are of a query"
            assert sum(len(node.store.judgements()) for node in nodes.values()) == 2

    def test_a_silo_is_not_told_who_asks(self, tmp_path, monkeypatch):
        from isthmus.service.http_client import HttpClient

        sent, ask = [], HttpClient.ask

        async def overheard(self, method, path, **more):
            sent.append((path, more.get("body", b"")))
            return await ask(self, method, path, **more)

        with federation(tmp_path) as (_, people, _):
            hits = people["ada"].search("tide").hits
            monkeypatch.setattr(HttpClient, "ask", overheard)
            bodies = []
            for name in ("ada", "bob"):
                people[name].judgements("tide", hits)
                bodies.append(sorted(sent))
                sent.clear()
        assert bodies[0] == bodies[1]
        assert {path for path, _ in bodies[0]} == {"/v1/judged"}

    def test_a_token_that_does_not_open_says_nothing(self, tmp_path):
        with federation(tmp_path) as (_, people, _):
            hit = people["ada"].search("tide").hits[0]
            people["ada"].judge("tide", hit, relevant=True)
            forged = hit.model_copy(update={"token": "A" * 64})
            bare = hit.model_copy(update={"token": ""})
            assert people["ada"].judgements("tide", [bare, forged, hit]) == [None, None, True]


class TestWaiting:
    def test_a_client_waits_where_it_is_told_to_and_not_for_ever(self, tmp_path, monkeypatch):
        waits = []
        with federation(tmp_path, limits=RequestLimits(per_second=0.05, burst=1)) as (_, people, _):
            people["ada"].search("tide")
            clock = SimpleNamespace(sleep=waits.append, monotonic=time.monotonic)  # no time passes
            monkeypatch.setattr("isthmus.service.client.time", clock)
            with pytest.raises(Refused, match=r"more requests than this caller may make \(again in \d+ s\)"):
                people["ada"].search("tide")
        assert 40 < sum(waits) <= 60
        assert all(wait > 10 for wait in waits), "as long as the broker says"

    def test_it_gets_through_in_the_end(self, tmp_path):
        with federation(tmp_path, limits=RequestLimits(per_second=5, burst=1)) as (_, people, _):
            assert all(people["ada"].search("tide").hits for _ in range(4))


class TestInASilo:
    def test_the_operators_judgements_let_learning_begin(self, tmp_path):
        """Also beside a few of other people, which hide among them."""
        settings = node_settings(tmp_path, "north", replace(ALLOWED, learning=True))
        with Node(settings).offline() as node:
            node.read_sources()
            node.index.catch_up()
            node.store.judge(Judgement("hers", "n2", True, "broker", 1.0, person="ada"))
            assert node.learner.queries("broker").folds == 0
            rows = [said(f"query {at}", f"n{at % 5}") for at in range(30)]
            file = tmp_path / "judged.csv"
            write_judgements(rows, file)
            config = tmp_path / "silo.toml"
            config.write_text(f'silo = "north"\nfolder = "{settings.folder}"\n')
            assert main(["judgements", "import", str(file), "--config", str(config)]) == 0
            judged = node.learner.queries("broker")
            assert judged.folds >= 2
            assert len(judged.queries) == 31

    def test_an_administrators_import_lets_learning_begin_and_others_wait(self, tmp_path):
        with federation(tmp_path, south=ALLOWED) as (nodes, people, _):
            node = nodes["north"]
            hit = next(hit for hit in people["ada"].search("tide").hits if hit.silo == "north")
            people["ada"].judge("tide", hit, relevant=True)
            people["admin"].import_judgements([said(f"query {at}", f"n{at % 5}") for at in range(30)])
            judged = node.learner.queries(PEER)
            assert judged.folds >= 2
            assert "tide" not in judged.queries, "what ada said would show to whoever brought the others"
            assert len(judged.queries) == 30

    def test_import_and_export(self, tmp_path, capsys):
        settings = node_settings(tmp_path, "north", ALLOWED)
        config = tmp_path / "silo.toml"
        config.write_text(f'silo = "north"\nfolder = "{settings.folder}"\n')
        file = tmp_path / "judged.csv"
        file.write_text(
            "query,document,relevant,silo\ntides,n1,1,\ntides,n2,0,north\ntides,s1,1,south\nx,zz,1,\n"
        )
        command = ["judgements", "import", str(file), "--config", str(config), "--by", "eve", "--json"]
        assert main(command) == 1
        assert "this silo has no documents yet (isthmus node" in capsys.readouterr().err
        with Node(settings).offline() as node:
            node.read_sources()
        assert main(command) == 0
        out, err = capsys.readouterr()
        record = json.loads(out)
        assert (record["judgements"], record["added"], record["unchanged"]) == (4, 2, 0)
        assert [each["document"] for each in record["unknown"]] == ["s1", "zz"]
        assert "2 judgements of documents that no silo has" in err
        assert "s1, zz" in err
        assert main([*command, "--silo", "south"]) == 1
        assert "is of the silo north" in capsys.readouterr().err
        other = tmp_path / "other.csv"
        other.write_text("query,document,relevant\nx,zz,1\n")
        assert main(["judgements", "import", str(other), "--config", str(config), "--silo", "north"]) == 1
        assert "1 judgement of documents that north has not" in capsys.readouterr().err
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["unchanged"] == 2
        out = tmp_path / "back"
        assert main(["judgements", "export", "--config", str(config), "-o", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"out": str(out), "queries": 1, "judgements": 2}
        assert read_judgements(out / "qrels.txt") == [said("tides", "n1"), said("tides", "n2", False)]
        assert main(["judgements", "export", "--config", str(config), "-o", str(out / "x.csv")]) == 0
        with (out / "x.csv").open() as stream:
            assert [row["silo"] for row in csv.DictReader(stream)] == ["north", "north"]
        with Node(settings).offline() as node:
            assert {(each.peer, each.person) for each in node.store.judgements()} == {("operator", "eve")}

    def test_nothing_to_export_and_rows_from_afar(self, tmp_path, capsys):
        settings = node_settings(tmp_path, "north", ALLOWED)
        config = tmp_path / "silo.toml"
        config.write_text(f'silo = "north"\nfolder = "{settings.folder}"\n')
        with Node(settings).offline() as node:
            node.read_sources()
        assert main(["judgements", "export", "--config", str(config), "-o", str(tmp_path / "out")]) == 1
        assert "nobody has judged" in capsys.readouterr().err
        assert main(["judgements", "export", "--rows", "-o", str(tmp_path / "out")]) == 1
        assert "feature rows do not leave a silo (expected --config" in capsys.readouterr().err


def test_the_command_through_a_broker(tmp_path, capsys):
    file = tmp_path / "judged.csv"
    file.write_text("query,document,relevant\ntides,n1,1\ntides,s1,0\ntides,readme.md,1\n")
    with federation(tmp_path) as (_, _, url):
        where = ["--broker", url, "--key", str(tmp_path / "admin.key")]
        assert main(["judgements", "import", str(file), *where, "--json"]) == 0
        out, err = capsys.readouterr()
        record = json.loads(out)
        assert (record["added"], record["ambiguous"][0]["silos"]) == (2, ["north", "south"])
        assert "1 judgement of documents that several silos have: name the silo" in err
        assert main(["judgements", "export", "-o", str(tmp_path / "back"), *where]) == 0
        back = read_judgements(tmp_path / "back" / "qrels.txt")
        assert sorted(each.document for each in back) == ["n1", "s1"]
        wrong = tmp_path / "wrong.csv"
        wrong.write_text("query,document,relevant\ntides,zz,1\n")
        assert main(["judgements", "import", str(wrong), *where]) == 1, "nothing of it is anywhere"


def test_a_silo_that_did_not_answer_is_not_said_to_lack_documents(capsys):
    done = Imported(unknown=[0], unanswered={"south": "it is down"})
    _explain(done, [NamedJudgement(query="tides", document="n9", relevant=True)], None)
    err = capsys.readouterr().err
    assert "south: it is down" in err
    assert "of documents that no silo has" in err
