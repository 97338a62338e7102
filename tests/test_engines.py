"""The in-process grid: Flower's contract, and what happens to silos that fail or are late."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from flwr.app import Message, MessageType
from flwr.clientapp import ClientApp

from isthmus.federation.engines import LocalGrid
from isthmus.federation.messages import answer, order, pack, unpack


@pytest.fixture
def echo():
    """An app that gives the model back with the silo's number added, or misbehaves as it is told."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        place = int(context.node_config["partition-id"])
        if place == 3:
            raise ValueError("disk full")
        if place == 4:
            time.sleep(0.4)
        arrays = unpack(message.content.array_records["arrays"])
        return answer(message, {"num-examples": 1, "steps": 1}, arrays={"w": arrays["w"] + place})

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
    began = time.perf_counter()
    replies = ask(grid, nodes, timeout=0.1)
    assert time.perf_counter() - began < 0.35
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
    app, barrier = ClientApp(), threading.Barrier(3, timeout=5)

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
