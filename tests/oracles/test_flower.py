"""Our strategies against Flower's unchanged classes, and our grid under Flower's own loop."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, MessageType
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy.fedopt import FedOpt

from isthmus.federation.messages import answer, order, pack, unpack
from isthmus.federation.rounds import State
from isthmus.federation.runtimes import LocalGrid
from isthmus.federation.settings import StrategyOptions
from rounds_by_hand import SCALING, coordinator

START = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.zeros(4, np.float32)}

PAIRS = [
    (StrategyOptions("fedavg"), lambda: flower.FedAvg()),
    (StrategyOptions("fedavgm", momentum=0.7), lambda: flower.FedAvgM(server_momentum=0.7)),
    (
        StrategyOptions("fedavgm", momentum=0.7, rate=0.5),
        lambda: flower.FedAvgM(server_momentum=0.7, server_learning_rate=0.5),
    ),
    (StrategyOptions("fedprox", proximal=0.3), lambda: flower.FedProx(proximal_mu=0.3)),
    (StrategyOptions("fedopt"), lambda: FedOpt()),
    (StrategyOptions("fedadam", rate=0.02), lambda: flower.FedAdam(eta=0.02)),
    (StrategyOptions("fedyogi"), lambda: flower.FedYogi()),
    (StrategyOptions("fedadagrad"), lambda: flower.FedAdagrad()),
    (StrategyOptions("fedmedian"), lambda: flower.FedMedian()),
    (StrategyOptions("fedtrimmedavg", trim=0.3), lambda: flower.FedTrimmedAvg(beta=0.3)),
]


def noisy_app():
    """Silos that answer with the model plus something of their own that depends on the round."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        place = int(context.node_config["partition-id"])
        number = int(message.content.config_records["config"]["server-round"])
        rng = np.random.default_rng((place, number))
        arrays = unpack(message.content.array_records["arrays"])
        moved = {
            key: value + rng.normal(0, 0.1, value.shape).astype(np.float32) for key, value in arrays.items()
        }
        return answer(message, {"num-examples": 10 + place, "steps": 3, "loss": 0.0}, arrays=moved)

    return app


def in_order(replies):
    return sorted(replies, key=lambda reply: reply.metadata.src_node_id)


def play(strategy, grid, rounds=4):
    """A strategy's models when every silo is asked each round; Flower's draw order does not matter then.

    As the coordinator does, models are brought back to their own type: Adam's are wider.
    """
    record, models = pack(START), []
    for number in range(1, rounds + 1):
        messages = strategy.configure_train(number, record, ConfigRecord(), grid)
        record, _ = strategy.aggregate_train(number, in_order(grid.send_and_receive(messages)))
        models.append({key: array.astype(np.float32) for key, array in unpack(record).items()})
        record = pack(models[-1])
    return models


@pytest.mark.parametrize(("options", "original"), PAIRS, ids=[options.name for options, _ in PAIRS])
def test_the_same_numbers_as_flowers_own_class(options, original):
    grid = LocalGrid(noisy_app(), 5, workers=2)
    ours, state = coordinator(options, grid, silos=5), State(0, START, SCALING)
    ours._sample = lambda *_: {node: f"silo-{at}" for at, node in enumerate(grid.get_node_ids())}
    for theirs in play(original(), grid):
        state = ours._round(state)
        for key in START:
            np.testing.assert_array_equal(state.parameters[key], theirs[key])
    grid.close()


def test_flowers_own_loop_runs_on_our_grid():
    grid = LocalGrid(noisy_app(), 4, workers=2)
    result = flower.FedAvg(fraction_evaluate=0.0).start(grid, pack(START), num_rounds=2)
    assert set(result.train_metrics_clientapp) == {1, 2}
    assert result.arrays["w"].shape == (3, 4)
    grid.close()


def test_a_message_of_ours_survives_flowers_serialisation():
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    LocalGrid(noisy_app(), 1).close()
    message = FlowerMessage(order(pack(START), {"seed": 3}, round=2), 9, MessageType.TRAIN)
    contents = {key: nested.deflate() for key, nested in get_all_nested_objects(message).items()}
    back = inflate_object_from_contents(message.object_id, contents)
    np.testing.assert_array_equal(unpack(back.content.array_records["arrays"])["w"], START["w"])
