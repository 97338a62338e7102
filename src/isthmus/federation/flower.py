"""Everything that training imports from Flower, the extra `train`; no other module imports Flower.

Every module of this folder that carries messages needs it, and raises MissingExtra if it is not installed.
Settings, weights, the judge and the tables of pairs across silos work without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from isthmus.errors import MissingExtra
from isthmus.federation.aggregation import Arrays, below

# fmt: off
# isort: off
try:
    from flwr.app import Array as Array, ArrayRecord as ArrayRecord, ConfigRecord as ConfigRecord
    from flwr.app import Context as Context, Error as Error, Message as Message, MessageType as MessageType
    from flwr.app import MetricRecord as MetricRecord, RecordDict as RecordDict, UserConfig as UserConfig
    from flwr.clientapp import ClientApp as ClientApp
    from flwr.clientapp.typing import ClientAppCallable as ClientAppCallable, Mod as Mod
    from flwr.common.serde import context_from_proto as context_from_proto
    from flwr.common.serde import context_to_proto as context_to_proto
    from flwr.common.serde import message_from_proto as message_from_proto
    from flwr.common.serde import message_to_proto as message_to_proto
    from flwr.proto.message_pb2 import Context as ContextBytes, Message as MessageBytes  # noqa: F401
    from flwr.serverapp import Grid as Grid, ServerApp as ServerApp, strategy
    from flwr.supercore.run import Run as Run
    from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
except ModuleNotFoundError as error:
    raise MissingExtra("train", "training across silos") from error
# isort: on
# fmt: on


RUN_ID = COORDINATOR = 1
"""Number of the run, and of the coordinator's node, if nothing else assigns them."""


def give_identity() -> None:
    """Give this process the task identity that Flower's messages need, unless it already has one."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, COORDINATOR, RUN_ID


def stamp(message: Message, **details: str | int) -> None:
    """Write details into a message's metadata, which have no setter, as Flower's own grids do."""
    message.metadata.__dict__.update({f"_{name}": detail for name, detail in details.items()})


class NodeGrid(Grid):
    """Common part of the grids: a run, and messages to nodes."""

    def __init__(self, run_id: int) -> None:
        give_identity()
        self._run = Run.create_empty(run_id)

    def set_run(self, run: Run) -> None:
        """Set the run's details."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's details."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


class _Adapter(strategy.FedAvg):
    """Mixin between Flower's strategies and their FedAvg: replies are already checked and counted, no
    messages are made, and the mean may already be known."""

    mean: ArrayRecord | None = None

    def configure_train(self, *arguments: Any) -> list[Message]:
        """Return no messages; the strategy that calls this only records the model."""
        return []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Return the mean, computed unless it is known."""
        return super().aggregate_train(server_round, replies) if self.mean is None else (self.mean, None)

    def _check_and_log_replies(self, replies: Iterable[Message], *arguments: Any, **more: Any) -> Any:
        return list(replies), []


def _adapted(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (kind, _Adapter), {})


_CENTRES = {"fedmedian": _adapted(strategy.FedMedian), "fedtrimmedavg": _adapted(strategy.FedTrimmedAvg)}
_OPTIMISERS = {
    "momentum": _adapted(strategy.FedAvgM),
    "adam": _adapted(strategy.FedAdam),
    "yogi": _adapted(strategy.FedYogi),
    "adagrad": _adapted(strategy.FedAdagrad),
}


def centre(name: str, replies: Iterable[Message], **options: float) -> Arrays:
    """Return the strategy's mean, median or trimmed mean of the models in checked replies."""
    record, _ = _CENTRES.get(name, _Adapter)(**options).aggregate_train(0, replies)
    return {key: array.numpy() for key, array in record.items()}


def server_step(
    name: str, options: Mapping[str, float], old: Arrays, mean: Arrays, state: Arrays, *, number: int
) -> tuple[Arrays, Arrays]:
    """Take a step of one of Flower's server optimisers. Returns the next model and the optimiser's state."""
    optimiser = _OPTIMISERS[name](**options)
    for moment in ("m_t", "v_t"):
        setattr(optimiser, moment, below(state, moment) or None)
    if velocity := below(state, "momentum_vector"):
        optimiser.momentum_vector = [velocity[str(at)] for at in range(len(velocity))]
    optimiser.configure_train(number, ArrayRecord(_packed(old)), ConfigRecord(), None)
    optimiser.mean = ArrayRecord(_packed(mean))
    record, _ = optimiser.aggregate_train(number, [])
    moments: dict[str, dict[Any, Any]] = {"m_t": optimiser.m_t or {}, "v_t": optimiser.v_t or {}}
    moments["momentum_vector"] = dict(enumerate(getattr(optimiser, "momentum_vector", None) or []))
    memory = {f"{key}/{at}": array for key, arrays in moments.items() for at, array in arrays.items()}
    return {key: array.numpy() for key, array in record.items()}, memory


def _packed(arrays: Arrays) -> dict[str, Array]:
    return {key: Array(array) for key, array in arrays.items()}


def simulate(server: ServerApp, client: ClientApp, silos: int, *, workers: int) -> None:
    """Run the apps in Flower's Ray simulation, one core per worker."""
    from flwr.simulation import run_simulation  # the import takes a second and needs Ray

    resources: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": workers, "log_to_driver": False},
    }
    with _without_telemetry():
        run_simulation(server, client, silos, backend_config=resources)


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Disable Flower's and Ray's telemetry and Flower's log messages: the run's record has it all."""
    from flwr.supercore import telemetry

    enabled, usage = telemetry.FLWR_TELEMETRY_ENABLED, os.environ.get("RAY_USAGE_STATS_ENABLED")
    logger = logging.getLogger("flwr")
    level = logger.level
    telemetry.FLWR_TELEMETRY_ENABLED = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        telemetry.FLWR_TELEMETRY_ENABLED = enabled
        logger.setLevel(level)
        if usage is None:
            del os.environ["RAY_USAGE_STATS_ENABLED"]
        else:
            os.environ["RAY_USAGE_STATS_ENABLED"] = usage
