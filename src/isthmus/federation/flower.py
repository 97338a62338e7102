"""What training takes from Flower, the extra `train`: the only place that imports it when it is imported.

Every module of this folder that carries messages needs it, and raises MissingExtra where it is missing.
Settings, weights, the judge and the tables of pairs across silos do without.
"""

from isthmus.errors import MissingExtra

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
    from flwr.proto.message_pb2 import Context as ContextBytes, Message as MessageBytes
    from flwr.serverapp import Grid as Grid, ServerApp as ServerApp, strategy as strategy
    from flwr.serverapp.strategy.fedopt import FedOpt as FedOpt
    from flwr.supercore.run import Run as Run
    from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
except ModuleNotFoundError as error:
    raise MissingExtra("train", "training across silos") from error
# isort: on
# fmt: on

__all__ = ["ContextBytes", "MessageBytes"]  # the others are re-exported by their `as`
