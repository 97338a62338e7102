"""A stranger at the training port: no code but the installed Isthmus runs at a silo."""

from __future__ import annotations

import pytest

from isthmus.errors import ConfigError
from isthmus.service.running import run_node
from isthmus.service.settings import NodeSettings, SuperNode


def test_a_node_starts_no_process_that_runs_what_it_is_sent(tmp_path):
    training = SuperNode("127.0.0.1:9092", tmp_path / "rows.txt", tmp_path / "ca.crt", tmp_path / "north.key")
    with pytest.raises(ConfigError, match=r"runs any app.*take it out of the configuration"):
        run_node(NodeSettings(silo="north", folder=tmp_path / "north", training=training))
    assert not (tmp_path / "north").exists()
