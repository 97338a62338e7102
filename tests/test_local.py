"""Ports for a federation on this machine."""

from __future__ import annotations

import socket

import pytest

from isthmus.errors import ConfigError
from isthmus.service.connections import listen_problem
from isthmus.service.local import free_ports


def test_free_ports_are_free_and_others_are_refused():
    base = free_ports(3)
    assert not any(map(listen_problem, range(base, base + 3)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert listen_problem(port)
        with pytest.raises(ConfigError, match="not all free"):
            free_ports(1, port)
