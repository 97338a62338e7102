"""A coordinator that proposes hardly any clipping and noise, and then says that there was plenty."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from easy_rows import easy
from isthmus.errors import FederationError, RoundFailed
from isthmus.federation import clients, rounds, runtimes
from isthmus.federation.apps import train
from isthmus.federation.messages import update_length
from isthmus.federation.noise import spent
from isthmus.federation.settings import (
    Config,
    FedRisk,
    Model,
    NoiseFloor,
    PrivateUpdates,
    Rounds,
    StrategyOptions,
)
from isthmus.partition import Dealing
from isthmus.private.ledger import Ledger
from isthmus.rankers import LocalTraining
from isthmus.tables import Fold

FOLD = Fold("small", easy("train", 40), easy("validation", 10), easy("test", 10))
WEAK = PrivateUpdates(clip=1e6, multiplier=1e-6, delta=0.9)
FLOOR = NoiseFloor(0.5, 3.0)


def config(**more: object) -> Config:
    settings = {
        "dealing": Dealing(silos=4),
        "rounds": Rounds(count=1, silos=4, attempts=1, norm_limit=1e9),
        "model": Model(hidden=()),
        "strategy": StrategyOptions("fedavg"),
        "local": LocalTraining(batch=4),
        **more,
    }
    return Config(**settings)  # type: ignore[arg-type]


@pytest.fixture
def insisting(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Silos whose own configuration has a floor."""
    own, floor = runtimes._context, {"most-clip": 0.5, "least-noise": 3.0}

    def context(partition: int, partitions: int) -> object:
        node = own(partition, partitions)
        node.node_config.update(floor)
        return node

    monkeypatch.setattr(runtimes, "_context", context)
    return floor


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PrivateUpdates, float]]:
    """What silos really did to their updates, and how long the clipped ones were."""
    seen: list[tuple[PrivateUpdates, float]] = []
    own = clients.private

    def watched(model: dict, start: dict, options: PrivateUpdates) -> object:
        left = own(model, start, options)
        seen.append((options, update_length(left, start)))
        return left

    monkeypatch.setattr(clients, "private", watched)
    return seen


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("proposed", [None, WEAK])
@pytest.mark.usefixtures("insisting")
def test_a_silo_clips_and_noises_by_its_own_floor(
    secure: bool, proposed: PrivateUpdates | None, used: list[tuple[PrivateUpdates, float]], tmp_path: Path
) -> None:
    train(config(privacy=proposed, secure=secure, ledgers=tmp_path, workers=1), FOLD)
    assert [options for options, _ in used] == [PrivateUpdates(0.5, 3.0)] * 4
    assert all(length > 1.0 for _, length in used), "noise of 1.5 a parameter"
    with Ledger(tmp_path / "silo-2.ledger") as ledger:
        (entry,) = [row for row in ledger.departures() if row["kind"] == "model update"]
    assert entry["epsilon"] == pytest.approx(spent([("silo",)], PrivateUpdates(0.5, 3.0)))
    assert "δ = 1e-05" in entry["unit"]


@pytest.mark.usefixtures("insisting")
def test_noise_that_the_server_would_add_is_added_by_the_silo(
    used: list[tuple[PrivateUpdates, float]],
) -> None:
    train(config(privacy=PrivateUpdates(where="server"), workers=1), FOLD)
    assert {options for options, _ in used} == {PrivateUpdates(0.5, 3.0)}


def test_a_stricter_proposal_stands() -> None:
    strict = PrivateUpdates(clip=0.1, multiplier=9.0, delta=1e-9)
    assert FLOOR.tightened(strict) == strict
    assert FLOOR.tightened(PrivateUpdates(clip=0.1)) == PrivateUpdates(0.1, 3.0)


@pytest.mark.usefixtures("insisting")
def test_reports_that_no_noise_covers_are_refused() -> None:
    own = StrategyOptions("fedrisk", risk=FedRisk(columns="quantile"))
    with pytest.raises(RoundFailed, match="a report on its own rows has none"):
        train(config(strategy=own), FOLD)


def test_half_a_floor_is_none(insisting: dict[str, float]) -> None:
    del insisting["least-noise"]
    with pytest.raises(RoundFailed, match="'most-clip' alone"):
        train(config(), FOLD)


def test_the_ledger_has_the_noise_that_was_added_and_not_what_the_coordinator_says_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The order to train has hardly any noise; the order to mask claims a lot."""
    own = rounds.Coordinator._settings

    def weak(self: rounds.Coordinator, scaling: object) -> str:
        return json.dumps(json.loads(own(self, scaling)) | {"privacy": {"clip": 1.0, "multiplier": 0.01}})

    monkeypatch.setattr(rounds.Coordinator, "_settings", weak)
    train(config(privacy=PrivateUpdates(multiplier=50.0), secure=True, ledgers=tmp_path), FOLD)
    with Ledger(tmp_path / "silo-0.ledger") as ledger:
        (entry,) = [row for row in ledger.departures() if row["kind"] == "model update"]
    assert entry["epsilon"] == pytest.approx(spent([("silo",)], PrivateUpdates(multiplier=0.01)))
    assert not np.isclose(entry["epsilon"], spent([("silo",)], PrivateUpdates(multiplier=50.0)))


def test_a_silo_of_masks_only_reports_no_errors_row_by_row() -> None:
    """Of a model that says 0 to everything they are the squares of all grades."""
    context = Context(1, 2, {"masked-only": True}, RecordDict(), {})
    settings = {"privacy": None, "report": "batch"}
    with pytest.raises(FederationError, match="row by row"):
        clients.own_privacy(context, settings)
    assert clients.own_privacy(context, settings | {"report": "probe"}) is None
