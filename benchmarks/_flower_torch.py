"""The peer of `federation`: the same protocol on Flower's Ray simulation with torch.

Imported and run by an interpreter that has torch and flwr[simulation]; prints a line after every round. It
must be imported, not run as a script, so that Ray's workers find its functions by name and can cache.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

RATE = 0.01


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(136, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))


@lru_cache(maxsize=1)
def rows(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    features, grades = (np.load(folder / f"{name}.npy") for name in ("features", "grades"))
    return torch.from_numpy(features), torch.from_numpy(grades.astype(np.int64))


def trained(model: torch.nn.Module, folder: Path, epochs: int, batch: int) -> None:
    features, grades = rows(folder)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(epochs):
        order = torch.randperm(len(features))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(features[chosen]), grades[chosen]).backward()
            optimiser.step()


def client_app(folder: Path, epochs: int, batch: int) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        trained(model, folder, epochs, batch)
        content: dict[str, Any] = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(rows(folder)[0])}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def server_app(rounds: int, clients: int, per_round: int) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=per_round / clients, min_available_nodes=clients, fraction_evaluate=0.0
        )
        result = strategy.start(
            grid,
            ArrayRecord(network().state_dict()),
            num_rounds=rounds,
            evaluate_fn=lambda number, arrays: print("ROUND", number, flush=True),
        )
        if not result.arrays:
            raise RuntimeError("no client trained")

    return app


def main() -> None:
    folder = Path(sys.argv[1])
    rounds, clients, per_round, epochs, batch = map(int, sys.argv[2:7])
    run_simulation(
        server_app(rounds, clients, per_round),
        client_app(folder, epochs, batch),
        clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "log_to_driver": False},
        },
    )
