"""LambdaMART across silos: the central trees, and nobody left waiting when something fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coarse_rows
from coarse_rows import dealt, table
from isthmus.errors import ConfigError, DataError, FederationError, MissingExtra
from isthmus.evaluation import evaluate
from isthmus.rankers import LambdaMART
from isthmus.tables import Letor

pytest.importorskip("xgboost", reason="the extra `trees` is not installed")
pytest.importorskip("lightgbm", reason="the extra `trees` is not installed")

from isthmus_reproduce.trees import (
    Exchange,
    Papers,
    make_papers,
    train_silo,
    train_silos,
)
from isthmus_reproduce.trees import exchange as exchange_module
from isthmus_reproduce.trees import silos as silos_module

SMALL = LambdaMART(library="xgboost", trees=8, depth=3, learning_rate=0.2)


def compare_with_central(silos: dict[str, Letor], test: Letor, model: LambdaMART) -> dict[str, float]:
    """nDCG@10 of test queries: trained on pooled rows, across silos, and (mean) in each silo alone."""
    measure = "nDCG@10(empty=skip)"

    def measured(ranker: LambdaMART) -> float:
        return evaluate(test.qrels(), ranker.rank(test), [measure])[measure]

    pooled = Letor.concat(list(silos.values()))
    return {
        "central": measured(copy(model).fit(pooled)),
        "federated": measured(train_silos(silos, model)),
        "alone": float(np.mean([measured(copy(model).fit(letor)) for letor in silos.values()])),
    }


def test_on_coarse_features_silos_grow_the_central_trees() -> None:
    data = table()
    central = LambdaMART(library="xgboost", trees=30, depth=4, learning_rate=0.1)
    federated = train_silos(dealt(data, 4), central)
    assert not hasattr(central, "model_")
    np.testing.assert_array_equal(federated.score(data), central.fit(data).score(data))


def test_skewed_silos_stay_close_to_the_pooled_model_and_repeat_exactly() -> None:
    data, test = table(120, levels=1000), table(60, seed=1, levels=1000)
    worth = np.bincount(data.query_of_row, data.grades, minlength=len(data))
    parts = np.array_split(np.argsort(worth, kind="stable"), 3)
    silos = {f"silo {rank}": data[np.sort(part)] for rank, part in enumerate(parts)}
    model = LambdaMART(library="xgboost", trees=20, depth=3, learning_rate=0.2)
    found = compare_with_central(silos, test, model)
    assert found["federated"] >= 0.97 * found["central"]
    assert found["federated"] > found["alone"]
    one, two = (train_silos(silos, SMALL).score(test) for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_a_single_silo_is_the_central_model() -> None:
    data = table(20)
    alone = train_silos({"only": data}, SMALL)
    central = LambdaMART(library="xgboost", trees=8, depth=3, learning_rate=0.2).fit(data)
    np.testing.assert_array_equal(alone.score(data), central.score(data))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The silos' processes as they are started; afterwards none may be left."""
    processes: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def remembering(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(original(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(silos_module.subprocess, "Popen", remembering)
    yield processes
    assert all(process.poll() is not None for process in processes)


def test_a_killed_silo_ends_the_training_for_all(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of a meeting: the others are told at once, not at the deadline."""
    meet = Exchange.meet

    def killing(self: Exchange, method: str, message: Any) -> bytes:
        if message.rank == 1 and message.number == 30:
            started[1].kill()
        return meet(self, method, message)

    monkeypatch.setattr(Exchange, "meet", killing)
    begun = time.monotonic()
    with pytest.raises(FederationError, match="silo 1"):
        train_silos(dealt(table(), 3), LambdaMART(library="xgboost", trees=200), deadline=240)
    assert time.monotonic() - begun < 120
    assert len(started) == 3


def test_a_silo_that_fails_is_named_with_its_reason(started: list[subprocess.Popen[bytes]]) -> None:
    silos = dealt(table(), 2)
    broken = silos["silo 1"].features.copy()
    broken[0, 0] = np.inf
    silos["silo 1"] = replace(silos["silo 1"], features=broken)
    with pytest.raises(FederationError, match=r"silo 1 ended with status 1: .*inf"):
        train_silos(silos, SMALL, deadline=60)


def test_the_deadline_holds(started: list[subprocess.Popen[bytes]]) -> None:
    begun = time.monotonic()
    with pytest.raises(FederationError, match="not done after 2 s"):
        train_silos(dealt(table(), 2), LambdaMART(library="xgboost", trees=100_000), deadline=2)
    assert time.monotonic() - begun < 60


def test_a_silent_silo_is_named_to_those_who_wait(tmp_path: Path) -> None:
    """Two seats, one taken: after the exchange's patience the silo that came is told who did not."""
    papers = make_papers(tmp_path, 2)
    told = pytest.raises(FederationError, match="no word from south for 2 s")
    with Exchange.open(["north", "south"], papers, patience=2) as exchange, told:
        train_silo(table(10), SMALL, papers.seat(0, 2, exchange.address), deadline=60)


def test_a_silo_may_not_speak_for_another(tmp_path: Path) -> None:
    papers = make_papers(tmp_path, 2)
    seat = replace(papers.seat(1, 2, ""), rank=0)
    told = pytest.raises(FederationError, match="another silo's certificate was shown for seat 0")
    with Exchange.open(["north", "south"], papers, patience=30) as exchange, told:
        train_silo(table(10), SMALL, replace(seat, address=exchange.address), deadline=60)


def test_a_stranger_s_certificate_is_not_let_in(tmp_path: Path) -> None:
    """Signed by another authority: no message of it is ever handled."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    papers, others = make_papers(tmp_path / "ours", 1), make_papers(tmp_path / "theirs", 1)
    with Exchange.open(["north"], papers, patience=30) as exchange:
        seat = replace(others.seat(0, 1, exchange.address), authority=str(papers.authority))
        with pytest.raises(FederationError, match="not done after"):
            train_silo(table(10), SMALL, seat, deadline=4)
        assert exchange.received == {"north": 0}


def test_silos_meet_over_the_network_interface_alone(tmp_path: Path) -> None:
    """Each silo's call, as real silos make it: its own seat, the same model at the end."""
    data = table(30)
    silos, papers = dealt(data, 2), make_papers(tmp_path, 2)
    models: dict[int, LambdaMART] = {}
    with Exchange.open(list(silos), papers, patience=60) as exchange:
        assert exchange.address.startswith("127.0.0.1:")

        def take_part(rank: int, letor: Letor) -> None:
            models[rank] = train_silo(letor, SMALL, papers.seat(rank, 2, exchange.address))

        threads = [
            threading.Thread(target=take_part, args=(rank, letor))
            for rank, letor in enumerate(silos.values())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert min(exchange.received.values()) > 0
    np.testing.assert_array_equal(models[0].score(data), models[1].score(data))


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    papers = make_papers(tmp_path, 1)
    with Exchange.open(["north"], papers) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(FederationError, match=f"cannot listen on 127.0.0.1:{port}"):
            Exchange.open(["north"], papers, port=port).__enter__()


def test_silos_do_not_outlive_the_coordinator(tmp_path: Path) -> None:
    """kill -9 of the process that runs the simulation takes the silos' processes with it."""
    script = tmp_path / "simulate.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from coarse_rows import dealt, table\n"
        "from isthmus.rankers import LambdaMART\n"
        "from isthmus_reproduce.trees import train_silos\n"
        "train_silos(dealt(table(), 2), LambdaMART(library='xgboost', trees=100_000))\n"
    )
    coordinator = subprocess.Popen([sys.executable, str(script), str(Path(coarse_rows.__file__).parent)])
    try:
        children = _until(lambda: _children(coordinator.pid), lambda found: len(found) == 2)
    finally:
        coordinator.kill()
        coordinator.wait()
    assert _until(lambda: [pid for pid in children if _alive(pid)], lambda left: not left) == []


def _children(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def _until(look: Callable[[], list[int]], enough: Callable[[list[int]], bool]) -> list[int]:
    end = time.monotonic() + 120
    found = look()
    while not enough(found) and time.monotonic() < end:
        time.sleep(0.1)
        found = look()
    return found


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    papers = make_papers(tmp_path, 2)
    keys = sorted(tmp_path.rglob("*.key"))
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    assert [path.parent.name for path in keys] == ["exchange", "seat0", "seat1"]
    assert isinstance(papers, Papers)


def test_what_cannot_be_federated_is_refused_before_anything_starts(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    silos = dealt(table(12), 2)
    with pytest.raises(ConfigError, match="XGBoost"):
        train_silos(silos, LambdaMART(library="lightgbm"))
    narrow = replace(silos["silo 1"], features=silos["silo 1"].features[:, :5])
    with pytest.raises(DataError, match=r"\[5, 6\] features"):
        train_silos({**silos, "silo 1": narrow}, SMALL)
    empty = silos["silo 1"][np.zeros(len(silos["silo 1"]), dtype=bool)]
    with pytest.raises(DataError, match="silo 1 has no rows"):
        train_silos({**silos, "silo 1": empty}, SMALL)
    with pytest.raises(DataError, match="torn"):
        train_silos({**silos, "silo 1": replace(silos["silo 1"], torn=True)}, SMALL)
    monkeypatch.setattr("xgboost.build_info", lambda: {"USE_FEDERATED": False})
    with pytest.raises(MissingExtra, match="without its federated part"):
        train_silos(silos, SMALL)
    assert started == []


# The exchange's messages


def test_messages_are_read_as_protocol_buffers_write_them() -> None:
    parse = exchange_module._Message.parse
    data = b"\x08\x96\x01\x10\x03\x1a\x02hi\x20\x02\x28\x02"
    assert parse(data) == exchange_module._Message(150, 3, b"hi", 2, 2)
    assert parse(b"") == exchange_module._Message(0, 0, b"")
    for wrong in (b"\x08", b"\x0d\x00\x00\x00\x00", b"\x08" + b"\xff" * 11):
        with pytest.raises(FederationError):
            parse(wrong)
    assert exchange_module._reply(b"x" * 300) == b"\x0a\xac\x02" + b"x" * 300


def test_sums_do_not_depend_on_who_comes_first() -> None:
    """Floating-point addition is not associative: the exchange adds in the order of the silos."""
    values = [np.array([1e16]), np.array([1.0]), np.array([-1e16])]
    answers = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        meeting = exchange_module._Meeting("Allreduce")
        for rank in order:
            message = exchange_module._Message(7, rank, values[rank].tobytes(), 2, 2)
            meeting.add("Allreduce", message)
        answers.append(meeting.combined())
    assert len(set(answers)) == 1


def test_silos_out_of_step_are_told() -> None:
    meeting = exchange_module._Meeting("Allreduce")
    meeting.add("Allreduce", exchange_module._Message(1, 0, b"\0" * 8, 2, 2))
    with pytest.raises(FederationError, match="out of step"):
        meeting.add("Broadcast", exchange_module._Message(1, 1, b""))
    meeting.add("Allreduce", exchange_module._Message(1, 1, b"\0" * 16, 2, 2))
    with pytest.raises(FederationError, match="out of step"):
        meeting.combined()


@pytest.mark.realdata
@pytest.mark.soak
def test_on_mq2008_skewed_silos_reach_the_central_model(
    data_dir: Path, soak_count: Callable[[int, int], int]
) -> None:
    """Official folds, four silos of queries sorted by grade; exponential gain, empty queries skipped."""
    from isthmus.corpora import load_folds

    model = LambdaMART(library="xgboost", trees=100, depth=5, learning_rate=0.1)
    found = []
    for fold in islice(load_folds("mq2008"), soak_count(1, 5)):
        train = fold.train
        worth = np.bincount(train.query_of_row, train.grades, minlength=len(train)) / np.diff(train.offsets)
        parts = np.array_split(np.argsort(worth, kind="stable"), 4)
        silos = {f"silo {rank}": train[np.sort(part)] for rank, part in enumerate(parts)}
        found.append(compare_with_central(silos, fold.test, model))
    means = {name: np.mean([one[name] for one in found]) for name in found[0]}
    assert means["federated"] >= (0.99 if len(found) == 5 else 0.97) * means["central"]  # a fold is small
    assert means["central"] > 0.69
    assert means["alone"] < 0.66
