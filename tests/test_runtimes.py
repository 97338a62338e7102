"""The in-process grid: Flower's contract, and what happens to silos that fail or are late."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MessageType
from flwr.clientapp import ClientApp

from isthmus.federation.messages import answer, order, pack, unpack
from isthmus.federation.runtimes import LocalGrid, WorkerPool, can_fork


@pytest.fixture
def echo():
    """An app that gives the model back with the silo's number added, or misbehaves as it is told."""
    app, released = ClientApp(), threading.Event()

    @app.train()
    def train(message, context):
        place = int(context.node_config["partition-id"])
        if place == 3:
            raise ValueError("disk full")
        if place == 4:
            released.wait(60)
        arrays = unpack(message.content.array_records["arrays"])
        return answer(message, {"num-examples": 1, "steps": 1}, arrays={"w": arrays["w"] + place})

    app.released = released
    return app


def ask(grid, nodes, timeout=None):
    content = order(pack({"w": np.zeros(3, np.float32)}), {}, round=1)
    messages = [Message(content, node, MessageType.TRAIN) for node in nodes]
    return {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(messages, timeout=timeout)}


def test_every_node_answers_for_itself(echo):
    grid = LocalGrid(echo, 3, workers=2)
    replies = ask(grid, grid.get_node_ids())
    assert set(replies) == set(grid.get_node_ids())
    for place, node in enumerate(grid.get_node_ids()):
        np.testing.assert_array_equal(unpack(replies[node].content.array_records["arrays"])["w"], place)
    grid.close()


def test_a_failing_silo_is_an_error_message_and_the_others_answer(echo):
    grid = LocalGrid(echo, 4, workers=2)
    nodes = list(grid.get_node_ids())
    replies = ask(grid, nodes)
    assert replies[nodes[3]].has_error()
    assert "disk full" in replies[nodes[3]].error.reason
    assert not any(replies[node].has_error() for node in nodes[:3])
    grid.close()


def test_a_late_silo_is_not_waited_for(echo):
    grid = LocalGrid(echo, 5, workers=5)
    nodes = list(grid.get_node_ids())
    replies = ask(grid, nodes, timeout=1.0)
    echo.released.set()  # only now would the last one answer
    assert nodes[4] not in replies
    assert len(replies) == 4
    assert ask(grid, nodes[:2]).keys() == set(nodes[:2]), "its answer does not turn up in the next round"
    grid.close()


def test_push_and_pull_give_each_reply_once(echo):
    grid = LocalGrid(echo, 2, workers=1)
    content = order(pack({"w": np.zeros(3, np.float32)}), {}, round=1)
    pushed = list(
        grid.push_messages([Message(content, node, MessageType.TRAIN) for node in grid.get_node_ids()])
    )
    pulled = []
    while len(pulled) < 2:
        pulled += grid.pull_messages(pushed)
    assert {reply.metadata.reply_to_message_id for reply in pulled} == set(pushed)
    assert not list(grid.pull_messages(pushed))
    grid.close()


def test_workers_run_at_the_same_time():
    app, barrier = ClientApp(), threading.Barrier(3, timeout=60)

    @app.train()
    def train(message, context):
        barrier.wait()
        return answer(message, {"num-examples": 1, "steps": 1})

    grid = LocalGrid(app, 3, workers=3)
    replies = ask(grid, grid.get_node_ids())
    assert not any(reply.has_error() for reply in replies.values())
    grid.close()


def test_global_generators_are_left_alone(echo):
    before, numpy_before = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    grid = LocalGrid(echo, 3)
    ask(grid, grid.get_node_ids())
    grid.close()
    assert random.getstate() == before
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


# workers that are processes


@pytest.fixture
def crew():
    """A grid of four silos over two forked workers; a silo tells its worker and counts what it was asked."""
    if not can_fork():
        pytest.skip("processes cannot be forked here")
    app, barrier = ClientApp(), get_context("fork").Barrier(2)

    @app.train()
    def train(message, context):
        barrier.wait(20)
        seen = context.state["seen"]["times"] if "seen" in context.state else 0
        context.state["seen"] = ConfigRecord({"times": seen + 1})
        return answer(message, {"worker": os.getpid(), "times": seen + 1})

    @app.query()
    def end(message, context):
        os.kill(os.getpid(), signal.SIGKILL)

    grid = LocalGrid(WorkerPool(app, 2), 4, workers=2)
    yield grid
    grid.close()
    grid._app.close()


def numbers(replies):
    return [reply.content["metrics"] for reply in replies.values()]


def test_forked_workers_answer_at_the_same_time_and_states_travel(crew):
    nodes = list(crew.get_node_ids())
    for times in (1, 2, 3):
        told = numbers(ask(crew, nodes[::-1] if times == 2 else nodes))
        assert len({one["worker"] for one in told} - {os.getpid()}) == 2
        assert [one["times"] for one in told] == [times] * 4


def test_a_worker_that_is_killed_costs_one_answer(crew):
    nodes = list(crew.get_node_ids())
    content = order(None, {}, round=1)
    (reply,) = crew.send_and_receive([Message(content, nodes[0], MessageType.QUERY)])
    assert "the process that served the silo ended" in reply.error.reason
    told = numbers(ask(crew, nodes))
    assert len(told) == 4
    assert os.getpid() in {one["worker"] for one in told}, "the caller takes its place"


def test_what_cannot_be_sent_leaves_the_worker_in_step(crew):
    node, *others = crew.get_node_ids()
    content = order(None, {}, round=1)
    crew._contexts[node].state = None
    (reply,) = crew.send_and_receive([Message(content, node, MessageType.TRAIN)])
    assert "AttributeError" in reply.error.reason
    told = numbers(ask(crew, others[:2]))
    assert len({one["worker"] for one in told} - {os.getpid()}) == 2
    assert [one["times"] for one in told] == [1, 1]


def test_a_daemon_does_not_fork():
    here, there = get_context("fork").Pipe()
    daemon = get_context("fork").Process(target=lambda: there.send(can_fork()), daemon=True)
    daemon.start()
    assert here.poll(20)
    assert not here.recv()
    daemon.join()


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_workers_do_not_outlive_a_killed_parent():
    script = (
        "from isthmus.federation.runtimes import WorkerPool\n"
        "crew = WorkerPool(lambda message, context: message, 2)\n"
        "print(*(worker.process.pid for worker in crew._workers), flush=True)\n"
        "input()\n"
    )
    told = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **told) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    until = time.monotonic() + 120
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.0),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
    ],
)
def test_arrays_travel_in_the_form_flower_reads(array):
    record = pack({"a": array})
    for read in (record["a"].numpy(), unpack(record)["a"]):
        np.testing.assert_array_equal(read, array)
        assert read.dtype == array.dtype


def test_arrays_flower_wrote_are_read():
    from flwr.app import Array, ArrayRecord

    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(unpack(ArrayRecord({"a": Array(array)}))["a"], array)


def test_an_unpacked_array_is_ones_own():
    record = pack({"a": np.zeros(3)})
    unpack(record)["a"] += 1
    assert not unpack(record)["a"].any()
