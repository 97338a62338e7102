"""Ports and processes of a federation on this machine."""

from __future__ import annotations

import socket
import subprocess
from types import SimpleNamespace

import pytest

from isthmus.cli import demo
from isthmus.errors import ConfigError, ServiceError
from isthmus.service.connections import listen_problem
from isthmus.service.local import Federation, free_ports, log_of
from isthmus.service.settings import BrokerSettings


@pytest.fixture
def federation(tmp_path):
    """Two silos and a broker that do nothing, with a log each."""
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "admin.key").write_text("key")
    processes = {name: subprocess.Popen(["sleep", "60"]) for name in ("north", "south", "broker")}
    for name in processes:
        log_of(tmp_path, name).write_text('{"message": "new models are in use"}\n')
    yield Federation(tmp_path, BrokerSettings(), processes)
    for process in processes.values():
        process.kill()
        process.wait()


def killed(federation, name):
    federation.processes[name].kill()
    federation.processes[name].wait()


def test_the_reason_of_a_killed_process_is_its_signal(federation):
    federation.check()
    killed(federation, "south")
    with pytest.raises(ServiceError, match=r"^south was ended by signal 9 \(Killed\)$"):
        federation.check()
    assert list(federation.check_serving()) == ["south"]
    killed(federation, "north")
    with pytest.raises(ServiceError, match=r"north was ended by signal 9 .*; south was ended"):
        federation.check_serving()


def test_a_served_federation_goes_on_without_a_silo_until_its_broker_ends(federation, monkeypatch, capsys):
    steps = iter(["south", None, None, "broker"])

    def step(seconds):
        name = next(steps)
        if name is not None:
            killed(federation, name)

    monkeypatch.setattr("isthmus.demo.open_page", lambda link: None, raising=False)
    monkeypatch.setattr(demo, "time", SimpleNamespace(sleep=step))
    with pytest.raises(ServiceError, match=r"^broker was ended by signal 9"):
        demo._serve(federation)
    said = capsys.readouterr().err
    assert said.count("south was ended by signal 9 (Killed); the other silos go on") == 1


def test_free_ports_are_free_and_others_are_refused():
    base = free_ports(3)
    assert not any(map(listen_problem, range(base, base + 3)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert listen_problem(port)
        with pytest.raises(ConfigError, match="not all free"):
            free_ports(1, port)
    with pytest.raises(ConfigError, match=r"port 65533 leaves too few.*expected a port from 1 to 65,531"):
        free_ports(5, 65_533)
