"""The socket by which an operator's commands reach a running node: for its owner alone, whatever is sent."""

from __future__ import annotations

import json
import os
import socket
import stat

import pytest

from isthmus.errors import DataError, ServiceError, SiloUnavailable
from isthmus.service import operating
from isthmus.service.operating import SOCKET, ask_node, operated
from isthmus.service.wire import Changed


@pytest.fixture
def folder(tmp_path):
    """Longer than a socket's name may be."""
    deep = tmp_path / ("x" * 100) / "north"
    deep.mkdir(parents=True)
    return deep


def test_a_command_is_done_and_answered_whatever_the_folder_is_called(folder):
    with operated(folder, {"count": lambda command: Changed(added=command["n"])}):
        assert ask_node(folder, "count", {"n": 3}, Changed).added == 3
        mode = (folder / SOCKET).stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600, "its owner alone"
    assert not (folder / SOCKET).exists()
    with pytest.raises(SiloUnavailable, match="no node answers"):
        ask_node(folder, "count", {"n": 3}, Changed)


def test_another_user_is_not_answered(folder, monkeypatch):
    monkeypatch.setattr(operating, "_is_owner", lambda connection: False)
    done = []
    with operated(folder, {"count": lambda command: done.append(1)}), pytest.raises(SiloUnavailable):
        ask_node(folder, "count", {}, Changed)
    assert not done


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the system does not tell who is there")
def test_the_system_says_who_is_there(monkeypatch):
    here, there = socket.socketpair()
    with here, there:
        assert operating._is_owner(here)
        real = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        assert operating._is_owner(here) == (real == 0), "root, or the node's own user"


@pytest.mark.parametrize(
    "line", [b"", b"no JSON", b"[]", b'{"task": "format"}', b'{"task": ["x"]}', b"[" * 100_000]
)
def test_nonsense_is_answered_and_the_node_goes_on(folder, line):
    with operated(folder, {"count": lambda command: Changed()}):
        with socket.socket(socket.AF_UNIX) as connection, operating._address(folder) as address:
            connection.connect(address)
            connection.sendall(line + b"\n")
            assert "error" in json.loads(operating._line(connection))
        assert ask_node(folder, "count", {}, Changed) == Changed()


def test_a_task_that_fails_says_why_or_where_to_look(folder):
    def fails(command):
        raise DataError("nobody foresaw it") if command["expected"] else ZeroDivisionError("a secret")

    with operated(folder, {"fail": fails}):
        with pytest.raises(ServiceError, match="nobody foresaw it"):
            ask_node(folder, "fail", {"expected": True}, Changed)
        with pytest.raises(ServiceError, match="log") as error:
            ask_node(folder, "fail", {"expected": False}, Changed)
        assert "secret" not in str(error.value)


def test_a_socket_that_a_killed_node_left_is_in_nobodys_way(folder):
    with socket.socket(socket.AF_UNIX) as left, operating._address(folder) as address:
        left.bind(address)
    assert (folder / SOCKET).exists()
    with operated(folder, {"count": lambda command: Changed(added=1)}):
        assert ask_node(folder, "count", {}, Changed).added == 1
