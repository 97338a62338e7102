"""What operators see of a running federation: logs, metrics, traces, and what the doctor says of faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml

from isthmus.cli import main
from isthmus.service.certificates import client_context, files, server_name
from isthmus.service.versions import ModelVersions
from isthmus.service.wire import LearnedVersion
from running_federation import RunningFederation, until

SILOS = ("north", "south", "west")
DEPLOYED = Path(__file__).parents[2] / "deploy" / "grafana"
SECRET = "zyzzogeton"
AHEAD = 30.0
FAULTS = {("south", "certificate"), ("west", "clock"), ("north", "budget")}
"""Which silo has what to be mended."""
SKEWED = f"""
import sys, time
true = time.time
time.time = lambda: true() + {AHEAD}
from isthmus.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP."""

    def __init__(self):
        self.bodies = []
        super().__init__(("127.0.0.1", 0), Receiver)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def spans(self):
        """Every span so far: its name, ids and attributes, and all that came as text."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in list(self.bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {each.key: each.value.string_value for each in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    values = {
                        each.key: getattr(each.value, each.value.WhichOneof("value"))
                        for each in span.attributes
                    }
                    found.append((about, span, values))
        return found


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.server.bodies.append(body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *about):
        pass


@pytest.fixture(scope="module")
def collector():
    pytest.importorskip("opentelemetry.sdk")
    with Collector() as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def federation(tmp_path_factory, collector):
    """Three silos and a broker; south's certificate ends soon, and west's clock is ahead."""
    folder = tmp_path_factory.mktemp("operated") / "federation"
    running = RunningFederation(folder, SILOS)
    for silo in SILOS:
        (folder / silo / "documents" / "tides.md").write_text(f"# Tides\n\nOf tidal power, by {silo}.\n")
    assert main(["keys", "renew", str(folder), "south", "--days", "5"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        try:
            running.start("north", "budget=1.0", "peers.broker.budget=1.0")
            running.start("south")
            command = [sys.executable, "-c", SKEWED, "node", "--config", "west/silo.toml"]
            with open(folder / "west.log", "ab") as log:
                running.running["west"] = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
            running.start("broker", "breaker.longest=1.0")
            until(lambda: running.found() == set(SILOS), "every silo answers")
            yield running
        finally:
            running.close()


def through_broker(federation):
    key = str(federation.folder / "broker" / "admin.key")
    return ["--broker", f"http://127.0.0.1:{federation.port}", "--key", key]


def doctor(federation, capsys, wanted, options=None):
    """What it finds by (party, check), once that is what is wanted and no more: statistics take a while to
    come, and a silo of a busy machine may be late. It goes by the broker's settings unless told otherwise."""

    def ask():
        capsys.readouterr()
        where = options or ["--config", str(federation.folder)]
        status = main(["doctor", "--federation", "--json", *where])
        told = json.loads(capsys.readouterr().out)
        assert set(told["silos"]) == set(SILOS)
        assert status == (1 if told["findings"] else 0)
        findings = {(each["party"], each["check"]): each for each in told["findings"]}
        return (findings,) if findings.keys() == wanted else None

    (findings,) = until(ask, f"the doctor finds {sorted(wanted)}")
    return findings


def test_one_trace_has_the_broker_every_silo_and_its_node(federation, collector):
    with federation.client() as broker:
        broker.search(f"tidal power {SECRET}")

    def whole():
        spans = collector.spans()
        for _, root, values in spans:
            if root.name == "search" and values["isthmus.answered"] == len(SILOS):
                own = [each for each in spans if each[1].trace_id == root.trace_id]
                if len(own) == 1 + 2 * len(SILOS):
                    return root, own
        return None

    root, spans = until(whole, "a trace of seven spans")
    assert not root.parent_span_id
    asked = {values["isthmus.silo"]: (span, values) for _, span, values in spans if span.name == "silo"}
    nodes = {values["isthmus.silo"]: (about, span) for about, span, values in spans if span.name == "node"}
    assert set(asked) == set(nodes) == set(SILOS)
    for silo, (span, values) in asked.items():
        assert span.parent_span_id == root.span_id
        about, node = nodes[silo]
        assert node.parent_span_id == span.span_id
        assert (about["service.name"], about["service.instance.id"]) == ("isthmus-node", silo)
        assert values["isthmus.state"] == "answered"
        assert values["isthmus.hits"] >= 1
        assert values["isthmus.ms"] > 0
    everything = b"".join(collector.bodies)
    assert SECRET.encode() not in everything  # nor who asked
    assert b"admin" not in everything


def test_every_metric_and_label_of_the_dashboard_and_the_alerts_is_there(federation):
    with federation.client() as broker:
        assert list(broker.search_stream("tidal power"))  # as the page searches
        text = broker.metrics()
    broker_tls = files(federation.folder / "broker")
    with httpx.Client(verify=client_context(broker_tls)) as node:
        url = f"https://127.0.0.1:{federation.port + 1}/metrics"
        reply = node.get(url, extensions={"sni_hostname": server_name("north")})
        assert reply.status_code == 200
        text += reply.text
        assert 'isthmus_budget_epsilon{of="left"} 0' in reply.text
    board = json.loads((DEPLOYED / "isthmus.json").read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    rules = yaml.safe_load((DEPLOYED / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    used = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used += [rule["expr"] for group in rules for rule in group["rules"]]
    names = {name for line in used for name in re.findall(r"\bisthmus_\w+", line)}
    known = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= known
    labels: dict[str, set[str]] = {}
    for name, inner in re.findall(r"^(isthmus_\w+)\{(.*)\} ", text, re.M):
        labels.setdefault(name, {"job", "instance"}).update(re.findall(r'(\w+)="', inner))
    for line in used:
        for name in labels.keys() & set(re.findall(r"\bisthmus_\w+", line)):
            wanted = re.findall(r"[{,] *(\w+) *[=!]", line) + re.findall(
                r"\w+", "".join(re.findall(r"\bby \((.*?)\)", line))
            )
            assert set(wanted) <= labels[name], line
        for paths in re.findall(r'path=~?"(.*?)"', line):
            for path in ("/v1/search", "/v1/search/stream"):
                assert f'isthmus_request_seconds_count{{path="{path}"}}' in text
                assert re.fullmatch(paths, path), line
    jobs = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text(encoding="utf-8"))
    assert (DEPLOYED / jobs["rule_files"][0]).exists()


def test_the_doctor_names_every_fault_and_its_cure(federation, capsys):
    findings = doctor(federation, capsys, FAULTS)
    assert "ends in 5 days" in findings["south", "certificate"]["fact"]
    assert "isthmus keys renew" in findings["south", "certificate"]["cure"]
    assert re.search(r"(29|30|31) s ahead", findings["west", "clock"]["fact"])
    assert "spent" in findings["north", "budget"]["fact"]
    doctor(federation, capsys, FAULTS, through_broker(federation))
    assert main(["doctor", "--federation", "--config", str(federation.folder)]) == 1
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "need attention" in shown.err


def test_a_silo_without_the_model_is_named(federation, capsys):
    versions = ModelVersions(federation.folder / "broker" / "learned")
    version = LearnedVersion(version=versions.new(), learned="2026-01-01T00:00:00Z", mode="masked", by="ada")
    versions.add(version, b"no model at all")  # which no silo can be given
    versions.use(version.version)
    try:
        wanted = FAULTS | {(silo, "model") for silo in SILOS}
        findings = doctor(federation, capsys, wanted, through_broker(federation))
        assert version.version in findings["north", "model"]["fact"]
    finally:
        versions.use("none")


def test_a_key_that_is_no_administrators_is_told_so(federation, capsys):
    keys = str(federation.folder / "broker" / "api-keys.json")
    assert main(["keys", "api", "add", keys, "ada", "--scopes", "search", "--json"]) == 0
    key = federation.folder / "ada.key"
    key.write_text(json.loads(capsys.readouterr().out)["key"])
    key.chmod(0o600)
    address = f"http://127.0.0.1:{federation.port}"
    assert main(["doctor", "--federation", "--broker", address, "--key", str(key)]) == 1
    assert "admin key" in capsys.readouterr().err
    assert main(["doctor", "--key", str(key)]) == 1
    assert "--federation too" in capsys.readouterr().err


def test_every_line_of_the_logs_is_json_and_tells_of_silos_that_come_and_go(federation, capsys):
    before = len(federation.log("broker").splitlines())
    federation.running["south"].kill()
    federation.running["south"].wait()

    def told(event):
        lines = map(json.loads, federation.log("broker").splitlines()[before:])
        return next((line for line in lines if (line.get("event"), line.get("silo")) == (event, "south")), {})

    until(lambda: federation.found() and told("silo down"), "the silo is down")
    findings = doctor(federation, capsys, FAULTS - {("south", "certificate")} | {("south", "reached")})
    assert "isthmus node" in findings["south", "reached"]["cure"]
    assert main(["keys", "renew", str(federation.folder), "south"]) == 0
    federation.start("south")
    until(lambda: federation.found() and told("silo back"), "the silo is back")
    gone = [datetime.fromisoformat(told(event)["time"]) for event in ("silo down", "silo back")]
    assert told("silo back")["seconds"] == pytest.approx((gone[1] - gone[0]).total_seconds(), abs=1)
    bad = httpx.post(f"http://127.0.0.1:{federation.port}/v1/search", content=b"{", headers={"x": SECRET})
    assert bad.status_code in (401, 415)
    for name in ("west", "north", "broker"):
        federation.restart(name)
    until(lambda: federation.found() == set(SILOS), "every silo answers")
    doctor(federation, capsys, set())
    admin = (federation.folder / "broker" / "admin.key").read_text().strip()
    for name in (*SILOS, "broker"):
        text = federation.log(name)
        assert SECRET not in text
        assert admin not in text
        lines = [json.loads(line) for line in text.splitlines()]
        assert {"stopped"} <= {line.get("message") for line in lines} or name == "south"
        times = [datetime.fromisoformat(line["time"]) for line in lines]
        assert all(each.utcoffset() == timedelta(0) for each in times)
        assert all(line["level"] for line in lines)
        assert any(line.get("path") == "/v1/search" for line in lines)
        assert any(" at http" in line.get("message", "") for line in lines)
