"""The Python client and `isthmus search`, against a broker on loopback."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading

import httpx
import pytest

from isthmus.cli import main
from isthmus.cli.broker import plain, show
from isthmus.errors import ConfigError, Refused, ServiceError, SiloUnavailable
from isthmus.service import client as client_module
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.certificates import Authority
from isthmus.service.client import AsyncClient, Client
from isthmus.service.security import ApiKeys
from isthmus.service.settings import BreakerSettings, BrokerSettings, RequestLimits, SiloAddress
from isthmus.service.wire import Answer, DocumentRequest, Hit, SiloStatus
from silo_stand_in import Loop, StandIn, hit

WHY = [
    {"retriever": "bm25", "raw": 7.1, "probability": 0.8, "weight": 0.5, "contribution": 0.693},
    {"retriever": "dense", "raw": None, "probability": 0.6, "weight": 2.0, "contribution": 0.5},
    {"retriever": "start", "raw": None, "probability": None, "weight": None, "contribution": 1.751},
]


class Site:
    def __init__(self, folder):
        self.folder, self.loop = folder, Loop()
        self.silos = {name: StandIn(name) for name in ("east", "west")}
        self.silos["west"].hits = [hit("west", 0, 0.95, title="\x1b[31mred\x1b[0m [bold]", explanation=WHY)]
        ports = {name: self.loop.serve(silo).port for name, silo in self.silos.items()}
        token = ApiKeys(folder / "api-keys.json").add("ada", scopes=["search", "feedback"])
        self.key = folder / "ada.key"
        self.key.write_text(token + "\n")
        self.key.chmod(0o600)
        told = BrokerSettings(
            folder=folder,
            keys=folder / "api-keys.json",
            silos={name: SiloAddress(f"http://127.0.0.1:{port}") for name, port in ports.items()},
            share_statistics=False,
            breaker=BreakerSettings(failures=1000),
            limits=RequestLimits(per_second=1000, burst=1000),
        )
        self.url = self.serve(told)
        tls = Authority.at(folder).issue("broker", clients=True)
        self.authority = tls.authority
        self.secure = self.serve(told, tls=tls).replace("http:", "https:")

    def serve(self, told, **options):
        async def made():
            return Broker(told)

        server = self.loop.serve(broker_app(self.loop.run(made())), lifespan="on", **options)
        return f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = Site(tmp_path_factory.mktemp("client"))
    yield made
    made.loop.close()


@pytest.fixture
def ask(site, capsys):
    """`isthmus search`, its status and what it printed."""

    def run(*arguments, url=None, key=True):
        keyed = ("--key", str(site.key)) if key else ()
        status = main(["search", "tides", "--broker", url or site.url, *keyed, *arguments])
        return status, *capsys.readouterr()

    return run


class TestClient:
    def test_search_and_feedback(self, site):
        with Client(site.url, key=site.key) as broker:
            answer = broker.search("tides", threshold=0.9, explain=True)
            assert [each.silo for each in answer.hits] == ["west", "east"]
            assert answer.hits[0].explanation[0].retriever == "bm25"
            broker.judge("tides", answer.hits[1], relevant=False)
            method, path, _, body, _ = site.silos["east"].asked[-1]
            assert (method, path) == ("POST", "/v1/feedback")
            assert json.loads(body)["relevant"] is False
            assert json.loads(body)["token"] == answer.hits[1].token == "east-0"
            assert {each.silo for each in broker.silos().silos} == {"east", "west"}
            assert broker.calibration().curves == []
            assert broker.training().rounds == []
            assert broker.health().role == "broker"

    def test_over_tls(self, site):
        with Client(site.secure, key=site.key, authority=site.authority) as broker:
            assert broker.search("tides").hits
        with (
            Client(site.secure, key=site.key) as broker,
            pytest.raises(SiloUnavailable, match=r"(?i)certificate"),
        ):
            broker.search("tides")

    @pytest.mark.parametrize(
        "content",
        [
            b"-----BEGIN PRIVATE KEY-----\nhush\n-----END PRIVATE KEY-----\n",
            b'hash_key = "hush"\n',
            b"hush\nhush\n",
            b"hush\xff\x00",
            "hush\N{EURO SIGN}".encode(),
            b"hush" * 1000,
        ],
    )
    def test_what_is_no_key_is_neither_sent_nor_repeated(self, site, content, tmp_path, monkeypatch, capsys):
        file = tmp_path / "wrong.key"
        file.write_bytes(content)
        file.chmod(0o600)
        assert main(["search", "tides", "--broker", site.url, "--key", str(file)]) == 1
        said = capsys.readouterr().err
        assert "wrong.key: not an API key (expected one line" in said
        assert "admin.key" in said
        assert "hush" not in said
        assert "BEGIN" not in said
        text = content.decode("latin-1")
        with pytest.raises(ServiceError, match="not an API key") as failure:
            Client(site.url, key=text)
        assert "hush" not in str(failure.value)
        if "\0" not in text:
            monkeypatch.setenv("ISTHMUS_API_KEY", text)
            with pytest.raises(ServiceError, match="ISTHMUS_API_KEY: not an API key"):
                Client(site.url)

    def test_failures_say_what_to_do(self, site, monkeypatch):
        with Client(site.url) as broker, pytest.raises(Refused, match="ISTHMUS_API_KEY"):
            broker.search("tides")
        monkeypatch.setenv("ISTHMUS_API_KEY", site.key.read_text().strip())
        with Client(site.url) as broker:
            assert broker.search("tides").hits
            with pytest.raises(ServiceError, match="query"):
                broker.search("")
            with pytest.raises(Refused, match="metrics"):
                broker.metrics()
        with Client("http://127.0.0.1:9") as broker, pytest.raises(SiloUnavailable, match="no broker at"):
            broker.health()
        secure = site.url.replace("http:", "https:")
        with Client(secure) as broker, pytest.raises(SiloUnavailable, match="say http://"):
            broker.health()
        with Client("broker") as broker, pytest.raises(SiloUnavailable, match="begin it with http"):
            broker.health()

    def test_what_is_no_broker_is_told(self, site):
        stranger = site.loop.serve(StandIn("x"))
        told = r"no broker of ours|does not know"
        url = f"http://127.0.0.1:{stranger.port}"
        with Client(url) as broker, pytest.raises(ServiceError, match=told):
            broker.health()


class Unsteady:
    """A broker that drops connections, or answers as it is told to; `asked` has the requests."""

    OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
    BUSY = (
        b"HTTP/1.1 %d Later\r\n%scontent-type: application/problem+json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%s"
    )

    def __init__(self):
        self.plan, self.asked, self.answer = [], [], b"{}"
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection = self.socket.accept()[0]
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(65_536).split(b" ")[1].decode())
                step = self.plan.pop(0) if self.plan else (200, b"")
                if step is not None:
                    connection.sendall(self._reply(*step))

    def _reply(self, status, headers):
        if status == 200:
            return self.OK % (len(self.answer), self.answer)
        problem = b'{"title": "Later", "status": %d}' % status
        return self.BUSY % (status, headers, len(problem), problem)


DROPPED, LATER = None, b"retry-after: 3\r\n"
ASKED = DocumentRequest(number="0" * 32, silo="east", document="d", query="q", state="allowed", at="now")


EMPTY = b'{"hits": [], "silos": [], "threshold": 0, "took_ms": 1}'


async def last_event(broker, query, **options):
    return [event async for event in broker.search_stream(query, **options)][-1]


class TestRetries:
    @pytest.fixture
    def unsteady(self):
        made = Unsteady()
        yield made
        made.socket.close()

    @pytest.fixture(params=["blocking", "asynchronous"])
    def client(self, request, unsteady):
        """What a call returns, and how long it has waited before each further try."""

        def run(call, **options):
            calls = AsyncClient if request.param == "asynchronous" else client_module._BlockingCalls
            broker, waits = calls(unsteady.url, **options), []

            async def sleep(seconds):
                waits.append(seconds)

            broker._transport.sleep = sleep

            async def result():
                async with broker:
                    return await call(broker)

            if request.param == "asynchronous":
                return asyncio.run(result()), waits
            return client_module._finished(result()), waits

        unsteady.answer = b'{"name": "x", "role": "broker", "version": "1"}'
        return run

    def test_a_dropped_connection_and_an_overloaded_broker_are_tried_again(self, client, unsteady):
        unsteady.plan = [DROPPED, (503, b"")]
        health, waits = client(AsyncClient.health)
        assert health.role == "broker"
        assert [0.2 <= waits[0] <= 0.3, 0.4 <= waits[1] <= 0.6] == [True, True]
        assert unsteady.asked == ["/v1/health"] * 3

    def test_it_waits_as_long_as_the_broker_says_and_no_longer_than_its_patience(self, client, unsteady):
        unsteady.plan = [(503, LATER), (429, LATER), (429, LATER), (429, LATER)]
        assert client(AsyncClient.health)[1] == [3.0] * 4
        unsteady.plan = [(429, LATER)] * 9
        with pytest.raises(Refused, match="again in 3 s"):
            client(AsyncClient.health, patience=7)
        assert len(unsteady.plan) == 6

    @pytest.mark.parametrize("step", [DROPPED, (503, LATER)])
    def test_it_gives_up(self, client, unsteady, step):
        unsteady.plan = [step] * 9
        with pytest.raises(SiloUnavailable):
            client(AsyncClient.health, retries=1)
        assert len(unsteady.asked) == 2

    @pytest.mark.parametrize(
        "call",
        [
            lambda broker: broker.ask("tides", Hit.model_validate(hit("east", 0, 0.5))),
            lambda broker: broker.open_allowed(ASKED),
            lambda broker: broker.answer(ASKED, allow=True),
            lambda broker: broker.learn(),
            lambda broker: broker.rollback(),
        ],
    )
    def test_what_may_not_happen_twice_is_sent_once(self, client, unsteady, call):
        unsteady.plan = [DROPPED]
        with pytest.raises(SiloUnavailable):
            client(call)
        assert len(unsteady.asked) == 1

    @pytest.mark.parametrize("search", [AsyncClient.search, last_event], ids=["whole", "streamed"])
    @pytest.mark.parametrize(("deadline_ms", "seconds"), [(None, 7.0), (60_000, 67.0)])
    def test_who_gives_silos_time_waits_for_it(self, client, unsteady, search, deadline_ms, seconds):
        waits = []

        def answer(request):
            waits.append(request.extensions["timeout"]["read"])
            streamed = request.url.path.endswith("stream")
            body = b"event: answer\ndata: %s\n\n" % EMPTY if streamed else EMPTY
            return httpx.Response(200, stream=httpx.ByteStream(body))

        async def asked(broker):
            kind = type(broker._transport.http)
            broker._transport.http = kind(base_url=unsteady.url, transport=httpx.MockTransport(answer))
            return await search(broker, "tides", deadline_ms=deadline_ms)

        assert client(asked, timeout=7.0)[0].hits == []
        assert waits == [seconds]

    def test_a_failure_that_lasts_is_not_tried_again(self, site, monkeypatch):
        again = lambda transport, seconds: pytest.fail("it was tried again")  # noqa: E731
        monkeypatch.setattr(client_module._Blocking, "sleep", again)
        with Client(site.url.replace("http:", "https:")) as broker, pytest.raises(SiloUnavailable):
            broker.health()


class TestSearch:
    def test_a_table(self, ask):
        status, out, _ = ask("--explain")
        assert status == 0
        assert "0.95 ━━━━━━━━━━" in out
        assert "Document 0" in out
        told = " ".join(out.split())
        assert "bm25: raw 7.1, probability 0.8, logit 1.39 × weight 0.50 = +0.69" in told
        assert "dense: probability 0.6, logit 0.41 × weight 2.00 -0.31 = +0.50" in told
        assert "start: +1.75 together: log-odds +2.94, which is the probability 0.950" in told
        assert "4 hits · 2 of 2 silos answered" in out

    def test_a_terminal_obeys_nobody_elses_text(self, ask):
        _, out, _ = ask()
        assert "\x1b[31m" not in out
        assert "[bold]" in out
        assert plain("a\x1b]0;x\x07b\nc") == "a ]0;x b c"

    def test_an_honest_empty_answer(self, ask):
        status, out, _ = ask("--threshold", "0.99")
        assert status == 0
        told = " ".join(out.split())
        assert "nothing found; of the best 10 of each silo, 4 are less likely than 0.99 · 2 of 2" in told
        told = " ".join(ask("--threshold", "0.99", "-k", "60", "--page", "2")[1].split())
        assert "of the best 100 of each silo" in told

    def test_hits_without_a_probability_are_not_said_to_be_below_a_threshold(self, ask, site, monkeypatch):
        for name, silo in site.silos.items():
            monkeypatch.setattr(silo, "hits", [hit(name, 0, None)])
        status, out, _ = ask("--threshold", "0.5")
        out = " ".join(out.split())
        assert status == 0
        assert "nothing found, 2 left out that have no probability yet (search without --threshold" in out
        assert "below" not in out
        out = ask()[1]
        assert "no probability yet" not in out
        assert "no probabilities: judge hits or import judgements, then run isthmus learn" in out

    def test_a_search_that_no_silo_answered_has_failed(self, ask, site, monkeypatch):
        for silo in site.silos.values():
            monkeypatch.setattr(silo, "hits", "no hits")
        for arguments in ((), ("--json",)):
            status, out, _ = ask(*arguments)
            assert status == 1
            assert "nothing found" not in out
        assert "no answer · 0 of 2 silos answered (east broken, west broken)" in ask()[1]

    def test_a_closed_pipe_is_left_to_the_program(self, monkeypatch):
        class Closed(io.StringIO):
            def write(self, text):
                if text:
                    raise BrokenPipeError
                return 0

        monkeypatch.setattr("sys.stdout", Closed())
        with pytest.raises(BrokenPipeError):
            show(Answer(hits=[hit("east", 0, 0.3)], silos=[], threshold=0.0, took_ms=1.0))

    def test_a_query_unlike_those_judged_is_said_to_be(self, capsys):
        said = Answer(hits=[hit("east", 0, 0.3)], silos=[], threshold=0.0, unlike=True, took_ms=1.0)
        show(said)
        out = capsys.readouterr().out
        assert "no judged query is like this one" in out
        assert "0.30 ━━━·······" in out, "bars can be read without colours"
        assert "probabilities are rough, high ones lowered" in out, "low ones stay as they are"
        assert "nothing here is 50% likely: the best hit has 0.30" in out
        show(Answer(hits=[hit("east", 0, 0.5), hit("east", 1, 0.1)], silos=[], threshold=0.0, took_ms=1.0))
        assert "nothing here" not in capsys.readouterr().out

    @pytest.mark.parametrize(("scorer", "hinted"), [("bm25", True), ("date", False)])
    def test_what_makes_probabilities_is_not_said_where_hits_are_by_date(self, capsys, scorer, hinted):
        silos = [SiloStatus(silo="east", status="answered", scorer=scorer)]
        silos += [SiloStatus(silo="west", status="down")]
        show(Answer(hits=[hit("east", 0, None)], silos=silos, threshold=0.0, took_ms=1.0))
        assert ("no probabilities: judge hits" in capsys.readouterr().out) is hinted

    def test_nothing_to_look_for_and_silos_that_are_not_there(self, ask, capsys):
        assert main(["search", " "]) == 1
        assert "isthmus: nothing to look for (expected words" in capsys.readouterr().err
        status, _, problem = ask("--silos", "north")
        assert status == 1
        assert "silos: only names that there are: east, west" in problem

    def test_another_page_is_named_and_too_many_hits_are_refused(self, ask):
        assert "there is another page: --page 2" in ask("-k", "1")[1]
        assert ask("-k", "101")[2] == "isthmus: 101 hits at once (expected at most 100)\n"

    def test_a_silo_that_failed_is_named(self, ask, site):
        site.silos["east"].behave = (403, b"application/problem+json", b"{}")
        try:
            _, out, _ = ask()
        finally:
            site.silos["east"].behave = "well"
        assert "1 of 2 silos answered (east refused)" in out
        assert "east: refused, its policy does not allow this" in out

    def test_json(self, ask):
        status, out, _ = ask("--json", "--silos", "east", "-k", "2")
        told = json.loads(out)
        assert status == 0
        assert [each["document"] for each in told["hits"]] == ["east/0", "east/1"]
        assert told["silos"][0]["status"] == "answered"

    def test_failures_are_one_line(self, ask):
        status, out, talk = ask(key=False)
        assert (status, out) == (1, "")
        assert talk.count("\n") == 1
        assert ask(url="http://127.0.0.1:9")[0] == 1
        with pytest.raises(SystemExit):
            ask("--threshold", "1.5")


class TestKeys:
    def test_make_add_list_revoke(self, tmp_path, capsys):
        folder = tmp_path / "keys"
        assert main(["keys", "make", str(folder), "--silos", "north,south", "--broker", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [each["name"] for each in told["parties"]] == ["north", "south", "broker"]
        for name in ("north", "south", "broker"):
            assert sorted(path.name for path in (folder / name).glob("[tc]*")) == [
                "ca.crt",
                "tls.crt",
                "tls.key",
            ]
        file = str(folder / "broker" / "api-keys.json")
        assert main(["keys", "api", "add", file, "ada", "--scopes", "search", "--days", "9", "--json"]) == 0
        printed = capsys.readouterr()
        made = json.loads(printed.out)
        assert "is a new file" not in printed.err
        assert ApiKeys(file).find(made["key"]).name == "ada"
        assert ApiKeys(file).find((folder / "broker" / "admin.key").read_text().strip()).may("admin")
        assert main(["keys", "api", "list", file, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert {row["name"] for row in rows} == {"admin", "ada"}
        assert made["key"].split("_", 2)[2] not in json.dumps(rows)
        assert main(["keys", "api", "revoke", file, made["id"]]) == 0
        assert ApiKeys(file).find(made["key"]) is None
        assert main(["keys", "api", "revoke", file, made["id"]]) == 1
        capsys.readouterr()
        assert main(["keys", "api", "list", str(folder / "nowhere.json")]) == 1
        assert "isthmus keys api add begins the file" in capsys.readouterr().err
        mistyped = str(folder / "broker" / "api-kyes.json")
        assert main(["keys", "api", "add", mistyped, "ben"]) == 0
        assert f"{mistyped} is a new file: a broker knows the key if" in capsys.readouterr().err

    def test_nothing_is_replaced_unasked(self, tmp_path, capsys):
        make = ["keys", "make", str(tmp_path), "--silos", "north"]
        assert main(make) == 0
        before = (tmp_path / "north" / "tls.crt").read_bytes()
        assert main(make) == 1
        assert "--renew" in capsys.readouterr().err
        assert (tmp_path / "north" / "tls.crt").read_bytes() == before
        authority = (tmp_path / "authority" / "ca.crt").read_bytes()
        assert main([*make, "--renew"]) == 0
        assert (tmp_path / "north" / "tls.crt").read_bytes() != before
        assert (tmp_path / "authority" / "ca.crt").read_bytes() == authority


class TestNew:
    def test_a_configuration_for_another_command_is_said_to_be_that(self, tmp_path, capsys):
        folder = tmp_path / "federation"
        assert main(["new", str(folder), "--silos", "a,b"]) == 0
        capsys.readouterr()
        assert main(["node", "--config", str(folder / "broker.toml")]) == 1
        problem = capsys.readouterr().err
        assert "broker.toml: this is a broker's configuration, not a silo's (expected a silo's; " in problem
        assert f"isthmus broker --config {folder / 'broker.toml'} reads this one" in problem
        assert main(["broker", "--config", str(folder / "a" / "silo.toml")]) == 1
        assert "silo.toml: this is a silo's configuration, not a broker's" in capsys.readouterr().err

    def test_a_silo_that_names_a_superlink_is_told_its_name_now(self, tmp_path):
        from isthmus.service.settings import read_node

        file = tmp_path / "silo.toml"
        file.write_text('silo = "a"\nfolder = "a"\n[training]\nsuperlink = "there:9092"\n')
        with pytest.raises(ConfigError, match=r"training\.superlink is no longer a key: .* coordinator now"):
            read_node(file)

    def test_the_settings_are_read_back(self, tmp_path, capsys):
        from isthmus.service.settings import read_broker, read_node

        folder = tmp_path / "my-federation"
        assert main(["new", str(folder), "--silos", "a,b,c", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == 5
        broker = read_broker(folder / "broker.toml")
        assert list(broker.silos) == ["a", "b", "c"]
        nodes = [read_node(folder / name / "silo.toml") for name in broker.silos]
        assert [f"https://127.0.0.1:{node.port}" for node in nodes] == [s.url for s in broker.silos.values()]
        assert len({node.statistics.hash_key for node in nodes}) == 1
        assert all(node.peers["broker"].search for node in nodes)
        assert (folder / "a" / "silo.toml").stat().st_mode & 0o077 == 0

    @pytest.mark.parametrize("silos", ["", "a,A", "broker", "../x", "authority"])
    def test_names_that_cannot_be(self, tmp_path, silos):
        assert main(["new", str(tmp_path / "f"), "--silos", silos]) == 1
        assert not (tmp_path / "x").exists()

    def test_a_folder_that_holds_something_is_left_alone(self, tmp_path):
        (tmp_path / "mine").write_text("x")
        assert main(["new", str(tmp_path)]) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
