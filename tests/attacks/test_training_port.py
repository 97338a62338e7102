"""A stranger at the training port, and a coordinator that would like to run an app of its own at a silo.

The thief's app copies whatever its process can read. On Flower's own pair, SuperLink with TLS and node
authentication and a SuperNode, the theft succeeds: the control that the attack is one. Against our
coordinator and our silo the same steps come to nothing.
"""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from pwd import getpwnam

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict

from isthmus.federation.messages import order
from isthmus.private.ledger import Budget, Ledger
from isthmus.private.store import SiloFolder
from isthmus.service.certificates import Authority, client_context, files, server_name
from isthmus.service.coordination import FETCH, MESSAGE_TYPE, REPLY, coordinating
from isthmus.service.running import training
from isthmus.service.scaffold import make_keys
from isthmus.service.settings import CoordinatorSettings, NodeSettings, SiloTraining
from isthmus.service.silo_training import ENVIRONMENT
from isthmus.tables import Letor, write_letor
from loopback_ports import free_base

SECRET = "the-password-of-the-database"
PATIENCE = 120.0
FLOWER = (
    *(f"/v1/control/{verb}" for verb in ("register-node", "list-nodes", "start-run", "list-runs")),
    *(f"/v1/runtime/{verb}" for verb in ("acquire-task", "pull-task-input")),
    *(f"/v1/fleet/{verb}" for verb in ("register-node", "activate-node", "get-fab")),
    *("/flwr.proto.Control/StartRun", "/flwr.proto.Fleet/PullMessages", "/docs", "/openapi.json", "/health"),
)
THEFT = """
import os
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

app = ClientApp()
server = ServerApp()

@app.query()
def steal(message, context):
    loot = os.environ.get("NORTH_DB", "-") + Path({key!r}).read_text()
    Path({marker!r}).write_text(loot)
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    import time
    until = time.monotonic() + 180
    while not (nodes := list(grid.get_node_ids())) and time.monotonic() < until:
        time.sleep(0.2)
    list(grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes], timeout=60))
"""
PROJECT = """
[project]
name = "theft"
version = "1.0.0"
description = "-"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "thief"
[tool.flwr.app.components]
serverapp = "theft.app:server"
clientapp = "theft.app:app"
"""


def wait_for(what, seconds=PATIENCE):
    until = time.monotonic() + seconds
    while not (result := what()) and time.monotonic() < until:
        time.sleep(0.1)
    return result


@pytest.fixture
def keys(tmp_path):
    """Certificates of a coordinator and of a silo, once for searches and once for training."""
    make_keys(tmp_path / "keys", ["north", "north.training", "coordinator"])
    return tmp_path / "keys"


@pytest.fixture
def silo(tmp_path, keys):
    """A silo with rows, whose node has a key that nobody else may read."""
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    write_letor(Letor.of(["q1"] * 3 + ["q2"] * 3, rows, [0, 1, 2, 0, 0, 1]), tmp_path / "rows.txt")
    wanted = SiloTraining(f"127.0.0.1:{free_base()}", tmp_path / "rows.txt", files(keys / "north.training"))
    (tmp_path / "north").mkdir()
    return NodeSettings("north", tmp_path / "north", tls=files(keys / "north"), training=wanted)


def coordinator(keys, port=0, silos=("north",)):
    return CoordinatorSettings(tuple(silos), files(keys / "coordinator"), port=port)


def port_of(silo):
    return int(silo.training.coordinator.rpartition(":")[2])


def log_of(silo):
    path = silo.folder / "training.log"
    return path.read_text() if path.exists() else ""


def test_a_stranger_reaches_nothing_without_a_certificate(keys):
    addresses = []
    with coordinating(coordinator(keys), started=addresses.append):
        public = ssl.create_default_context(cafile=keys / "coordinator" / "ca.crt")
        with httpx.Client(base_url=f"https://{addresses[0]}", verify=public) as stranger:
            for path in (*FLOWER, FETCH, REPLY):
                with pytest.raises(httpx.TransportError):  # the handshake asks for a certificate
                    stranger.post(path)


def test_a_silos_certificate_opens_two_paths_and_a_searching_one_none(keys):
    make_keys(keys, ["south.training"], broker="broker")
    addresses = []
    with coordinating(coordinator(keys), started=addresses.append):
        url = f"https://{addresses[0]}"
        asked = {"extensions": {"sni_hostname": server_name("coordinator")}}
        with httpx.Client(base_url=url, verify=client_context(files(keys / "north.training"))) as north:
            assert [north.post(path, **asked).status_code for path in FLOWER] == [404] * len(FLOWER)
            busy = {"isthmus-busy": "0"}
            assert north.post(FETCH, headers=busy, **asked).status_code == 204
            kind = {"content-type": MESSAGE_TYPE}
            assert north.post(REPLY, content=b"\xff" * 99, headers=kind, **asked).status_code == 400
        for name in ("south.training", "broker"):  # a silo that is not on the list; a caller of nodes
            with httpx.Client(base_url=url, verify=client_context(files(keys / name))) as other:
                assert other.post(FETCH, **asked).status_code == 403
        searching = client_context(files(keys / "north"))  # not valid for clients
        with httpx.Client(base_url=url, verify=searching) as other, pytest.raises(httpx.TransportError):
            other.post(FETCH, **asked)


def test_another_machine_cannot_pose_as_the_coordinator(keys, silo):
    """A certificate of the same authority, of another name, gets no word from the silo."""
    make_keys(keys, ["south"])
    settings = CoordinatorSettings(("north",), files(keys / "south"), port=port_of(silo))
    with coordinating(settings) as grid, training(silo, silo.training):
        assert wait_for(lambda: "no answer from the coordinator" in log_of(silo))
        assert "CERTIFICATE_VERIFY_FAILED" in log_of(silo)
        assert not list(grid.get_node_ids())


def test_the_process_has_nothing_of_the_nodes_environment(silo, monkeypatch):
    monkeypatch.setenv("NORTH_DB", SECRET)
    with training(silo, silo.training) as process:
        entries = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
        status = Path(f"/proc/{process.pid}/status")
        assert wait_for(lambda: "NoNewPrivs:\t1" in status.read_text())
    assert {entry.partition("=")[0] for entry in entries if entry} <= {*ENVIRONMENT, "LC_CTYPE"}
    assert SECRET not in "".join(entries)


@pytest.fixture
def anybodys():
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of another user")
def test_another_user_cannot_read_the_nodes_key(anybodys):
    secret = Authority.at(anybodys / "keys").issue("north", clients=False).key
    for above in (secret.parent, secret.parent.parent):
        os.chmod(above, 0o755)  # so that its own mode is what keeps the key
    program = (
        "from isthmus.service.silo_training import confine\nimport os\n"
        "confine('nobody')\n"
        "assert os.getuid() != 0 and os.getgroups() == []\n"
        f"print(len(open({str(secret.with_name('tls.crt'))!r}).read()))\n"
        f"open({str(secret)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert int(done.stdout) > 100
    assert "PermissionError" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process of another user")
def test_a_process_of_another_user_answers_from_its_folder(anybodys, keys, silo):
    private, queries, rows = (anybodys / name for name in ("private", "queries.tsv", "rows.txt"))
    SiloFolder.at(private, create=True).ledger(Budget()).close()
    queries.write_text("q1\thow deep\n")
    rows.write_bytes(silo.training.data.read_bytes())
    wanted = replace(silo.training, data=rows, private=private, queries=queries, user="nobody")
    silo = replace(silo, training=wanted)
    with coordinating(coordinator(keys, port_of(silo))) as grid, training(silo, wanted) as process:
        assert wait_for(lambda: list(grid.get_node_ids()))
        assert Path(f"/proc/{process.pid}").stat().st_uid == getpwnam("nobody").pw_uid
        describe = Message(order(None, {"scaling": "zscore"}), 2, "query.describe")
        (reply,) = grid.send_and_receive([describe], timeout=PATIENCE)
        assert not reply.has_error()
    with Ledger(private / "silo.ledger") as ledger:
        assert [entry["kind"] for entry in ledger.departures()] == ["sums"]


def thief_app(folder, silo, marker):
    (folder / "theft").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "theft" / "__init__.py").write_text("")
    key = str(silo.tls.key)
    (folder / "theft" / "app.py").write_text(THEFT.format(key=key, marker=str(marker)))
    return folder


class Superlink:
    """Flower's own SuperLink, with TLS and node authentication, and the thief's command line for it."""

    def __init__(self, folder, keys, port):
        self.folder, self.port, self.running = folder, port, []
        self.binaries = Path(sys.executable).parent
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        path = f"{self.binaries}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, **quiet, "FLWR_HOME": str(folder / "flwr"), "PATH": path}
        (folder / "flwr").mkdir()
        self.authority = keys / "coordinator" / "ca.crt"
        (folder / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "there"\n\n[superlink.there]\n'
            f'address = "127.0.0.1:{port}"\nroot-certificates = "{self.authority}"\n'
        )
        own = keys / "coordinator"
        tls = ("--ssl-ca-certfile", own / "ca.crt", "--ssl-certfile", own / "tls.crt")
        tls += ("--ssl-keyfile", own / "tls.key")
        self.start("flower-superlink", "--host", "127.0.0.1", "--port", port, "--enable-supernode-auth", *tls)

    def start(self, program, *words, **environment):
        with open(self.folder / f"{program}.log", "wb") as log:
            process = subprocess.Popen(
                [str(self.binaries / program), *(str(word) for word in words)],
                env={**self.environment, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)

    def flwr(self, *words):
        command = [str(self.binaries / "flwr"), *(str(word) for word in words)]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=2 * PATIENCE
        )

    def stop(self):
        for process in self.running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def node_key(folder):
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    (folder / "own.key").write_bytes(private)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "own.key.pub").write_bytes(public + b"\n")
    return folder / "own.key"


@pytest.mark.timeout(900)
def test_a_coordinators_app_runs_on_flowers_own_node_and_not_on_a_silo(tmp_path, keys, silo, monkeypatch):
    """A real SuperLink at the coordinator's address, with its certificate, hands out the thief's app."""
    monkeypatch.setenv("NORTH_DB", SECRET)
    marker = tmp_path / "loot"
    app = thief_app(tmp_path / "app", silo, marker)
    there = Superlink(tmp_path, keys, port_of(silo))
    try:
        with training(silo, silo.training):
            key = node_key(tmp_path)
            assert wait_for(
                lambda: there.flwr("supernode", "register", f"{key}.pub", "there").returncode == 0
            )
            assert there.flwr("run", app, "there").returncode == 0  # no key, no password: the public ca.crt
            assert wait_for(lambda: "the coordinator answered 404" in log_of(silo))
            assert not marker.exists()
            words = ("--superlink", f"127.0.0.1:{there.port}", "--root-certificates", there.authority)
            words += ("--auth-supernode-private-key", key, "--host", "127.0.0.1", "--port", free_base())
            there.start("flower-supernode", *words)  # the control: Flower's own node, on the same machine
            assert wait_for(marker.exists), (tmp_path / "flower-supernode.log").read_text()
            assert SECRET in marker.read_text()
            assert "PRIVATE KEY" in marker.read_text()
            marker.unlink()
            time.sleep(1.0)
            assert not marker.exists()
    finally:
        there.stop()


def test_a_message_of_another_app_is_answered_with_an_error(keys, silo, tmp_path):
    """The coordinator speaks our protocol and asks for what only an app of its own would know."""
    with coordinating(coordinator(keys, port_of(silo))) as grid, training(silo, silo.training):
        assert wait_for(lambda: list(grid.get_node_ids()))
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(RecordDict(), node, "query.steal")], timeout=PATIENCE)
        assert reply.has_error()
        assert str(tmp_path) not in reply.error.reason
        (reply,) = grid.send_and_receive([Message(RecordDict(), node, "query.describe")], timeout=PATIENCE)
        assert str(tmp_path) not in str(reply.error.reason if reply.has_error() else "")
