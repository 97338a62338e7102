"""The apps of real nodes, without the nodes: whose rows are read, and what a silo's ledger says."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from isthmus.config import load
from isthmus.errors import ConfigError
from isthmus.federation.clients import own_book
from isthmus.federation.deployment import Deployment, client
from isthmus.federation.flower import give_identity
from isthmus.federation.messages import order, unpack
from isthmus.federation.settings import PrivateUpdates
from isthmus.private.ledger import Budget, Ledger
from isthmus.tables import Letor, write_letor


@pytest.fixture
def silo(tmp_path):
    """The context of a node whose rows and ledger lie in a folder."""
    give_identity()
    features = np.arange(12, dtype=np.float32).reshape(6, 2)
    write_letor(Letor.of(["q1"] * 3 + ["q2"] * 3, features, [0, 1, 2, 0, 0, 1]), tmp_path / "rows.txt")
    Ledger(tmp_path / "silo.ledger", Budget()).close()
    told = {"silo": "north", "data": str(tmp_path / "rows.txt"), "ledger": str(tmp_path / "silo.ledger")}
    return Context(1, 7, told, RecordDict(), {})


def describe(context):
    message = Message(order(None, {"scaling": "zscore"}), 7, "query.describe")
    return client(message, context)


def test_a_silo_describes_the_rows_of_its_own_folder(silo):
    reply = describe(silo)
    assert bytes(unpack(reply.content.array_records["silo"])["name"]).decode() == "north"
    assert reply.content.metric_records["metrics"]["queries"] == 2
    np.testing.assert_allclose(unpack(reply.content.array_records["sums"])["total"], [30, 36])


def test_what_leaves_is_in_the_ledger_first(silo):
    describe(silo)
    own_book(silo, "model update", PrivateUpdates(multiplier=20.0), "round 1")
    own_book(silo, "model update", None, "round 2")
    with Ledger(silo.node_config["ledger"]) as ledger:
        left = list(ledger.departures())
    assert [entry["kind"] for entry in left] == ["sums", "model update", "model update"]
    assert [entry["epsilon"] is None for entry in left] == [True, False, True]
    assert all(entry["peer"] == "coordinator" for entry in left)


def test_a_node_that_does_not_say_who_it_is_says_so(silo):
    del silo.node_config["silo"]
    with pytest.raises(ConfigError, match="silo"):
        describe(silo)


def test_a_deployment_is_read_from_toml(tmp_path):
    (tmp_path / "run.toml").write_text(
        'out = "run"\nvalidation = "v.txt"\n[training]\nprobe = "p.txt"\n[training.dealing]\nsilos = 10\n'
    )
    told = load(Deployment, tmp_path / "run.toml")
    assert told.training.dealing.silos == 10
    assert told.training.probe.name == "p.txt"


def test_a_coordinator_without_rows_needs_a_probe_of_its_own():
    with pytest.raises(ConfigError, match="must be a file"):
        load(Deployment, {"out": "run", "training": {"dealing": {"silos": 10}}})
