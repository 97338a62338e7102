"""Federated training beside Flower's Ray simulation with torch: time, processor time and memory of a round.

100 silos, 10 a round, 5 epochs over 12,000 rows of 136 features each, a network 136-64-5, batches of 256.
Both sides read one table that all silos share, so that loading data is not timed. Each side runs in processes
of its own, which are measured from outside: every process with the benchmark's mark in its environment
counts. The peer needs an interpreter with torch and flwr[simulation], named by ISTHMUS_TORCH_PYTHON; without
it only Isthmus is measured.

    python -m benchmarks.federation growth FOLDER    plots how a round's time grows with silos and with rows
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._rows import row

CLIENTS, PER_ROUND, EPOCHS, BATCH, ROWS = 100, 10, 5, 256, 12_000
WARM, TIMED = 2, 8
ALL = WARM + TIMED + 1  # one more round, so that all processes still run when they are measured
MARK = "ISTHMUS_BENCH_MARK"
PEER = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import _flower_torch as p; p.main()"


@dataclass(frozen=True)
class Cost:
    """Cost of one round: wall-clock seconds, processor seconds, and the memory of all processes in MB."""

    clock: float
    processor: float
    memory: float


def main() -> list[dict[str, Any]]:
    """Run this benchmark and return its rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_rows(folder)
        ours = _watch([sys.executable, "-m", "benchmarks.federation", name], folder)
        python = os.environ.get("ISTHMUS_TORCH_PYTHON")
        arguments = [name, *map(str, (ALL, CLIENTS, PER_ROUND, EPOCHS, BATCH))]
        peer = _watch([python, "-c", PEER, *arguments], folder) if python else None
    name = "Flower + Ray + torch" if peer else "no ISTHMUS_TORCH_PYTHON"
    idle = {count: _idle(count) for count in (10, 1000)}
    return [
        row("federated round, 10 of 100 silos (s)", ours.clock, peer and peer.clock, name, goal=2.5),
        row("… processor (s)", ours.processor, peer and peer.processor, name, goal=2.5),
        row("… memory (MB)", ours.memory, peer and peer.memory, name, goal=2),
        {**row("an idle silo (ms)", idle[1000], None, "limit 1 ms", goal=1), "ratio": 1 / idle[1000]},
        row("… one of 1,000 beside one of 10 (ms)", idle[1000], idle[10], "ten silos", goal=0.7),
    ]


def _write_rows(folder: Path) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(ROWS, 136)).astype(np.float32)
    grades = np.digitize(features[:, :5].sum(axis=1), [0, 1.5, 3, 4.5]).astype(np.int32)
    np.save(folder / "features.npy", features)
    np.save(folder / "grades.npy", grades)


def _watch(command: list[str], folder: Path) -> Cost:
    """Run one side and measure its processes whenever it prints a line "ROUND n"."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = {
        **os.environ,
        MARK: mark,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_HOME": str(folder / "flwr"),
    }
    moments: dict[int, tuple[float, float]] = {}
    memory = 0.0
    told = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **told) as running:
        for line in running.stdout:
            if line.startswith("ROUND "):
                moments[int(line.split()[1])] = time.perf_counter(), _processor(mark)
                memory = max(memory, _memory(mark)) if len(moments) > WARM else 0.0
    if running.returncode:
        raise RuntimeError(f"{command[0]} ended with {running.returncode}")
    first, last = moments[WARM], moments[WARM + TIMED]
    return Cost((last[0] - first[0]) / TIMED, (last[1] - first[1]) / TIMED, memory)


def _marked(mark: str) -> list[Path]:
    """Return the /proc folders of the processes with this mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
        except OSError:
            continue
    return found


def _processor(mark: str) -> float:
    ticks = 0
    for process in _marked(mark):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(fields[at]) for at in (11, 12, 13, 14))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory(mark: str) -> float:
    """Return the proportional set size in MB, in which shared pages count once."""
    total = 0
    for process in _marked(mark):
        try:
            told = (process / "smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in told.splitlines() if line.startswith("Pss:"))
    return total / 1024


def _ours(folder: Path) -> None:
    """Run Isthmus's side of the protocol, through the same coordinator that `isthmus train` uses."""
    features, grades = (np.load(folder / f"{name}.npy") for name in ("features", "grades"))
    _train(
        _table(features, grades),
        silos=CLIENTS,
        per_round=PER_ROUND,
        rounds=ALL,
        after=lambda state: print("ROUND", state.round, flush=True),
    )


def _table(features: np.ndarray, grades: np.ndarray) -> Any:
    from isthmus.tables import Letor

    return Letor.of(np.repeat(np.arange(len(grades) // 60), 60).astype(str).tolist(), features, grades)


def _train(
    table: Any,
    *,
    silos: int,
    per_round: int,
    rounds: int,
    after: Callable[[Any], None],
    workers: int | None = None,
) -> None:
    from isthmus.federation.apps import simulate
    from isthmus.federation.rounds import HeldOut
    from isthmus.federation.settings import Config, Model, Rounds, StrategyOptions
    from isthmus.partition import Dealing
    from isthmus.rankers import LocalTraining

    local = LocalTraining(
        loss="cross_entropy", optimiser="sgd", learning_rate=0.01, epochs=EPOCHS, batch=BATCH
    )
    config = Config(
        dealing=Dealing(silos=silos),
        rounds=Rounds(count=rounds, silos=per_round, release="last"),
        strategy=StrategyOptions("fedavg"),
        local=local,
        model=Model(hidden=(64,), scaling="none"),
        workers=workers,
    )
    simulate(config, [table] * silos, HeldOut(), remember=after)


def growth(folder: Path) -> None:
    """Plot processor time per round against silos per round, 10 to 1,000, and against rows per silo."""
    from isthmus.report import Series, line_plot

    folder.mkdir(parents=True, exist_ok=True)
    silos = [10, 30, 100, 300, 1000]
    rows = [600, 1200, 2400, 4800, 9600]
    by_silos = Series(silos, [_round_cost(600, per_round=count) for count in silos])
    by_rows = Series(rows, [_round_cost(count, per_round=10) for count in rows])
    told = {"y": "processor seconds a round", "caption": "136 features, network 136-64-5, 5 epochs"}
    for name, x, line in (("silos", "silos a round", by_silos), ("rows", "rows a silo", by_rows)):
        print(x, dict(zip(line.x, np.round(line.y, 3).tolist(), strict=True)))
        print(f"wrote {line_plot({name: line}, x=x, **told).save(folder / f'growth-{name}.svg')}")


def _round_cost(rows: int, *, per_round: int) -> float:
    rng = np.random.default_rng(rows)
    features = rng.normal(size=(rows, 136)).astype(np.float32)
    table = _table(features, rng.integers(0, 5, rows).astype(np.int32))
    moments: list[float] = []
    _train(
        table,
        silos=1000,
        per_round=per_round,
        rounds=4,
        after=lambda state: moments.append(time.process_time()),
        workers=1,  # in this process, whose time is measured
    )
    return min(np.diff(moments).tolist())


def _idle(silos: int, *, repeats: int = 15) -> float:
    """Return milliseconds per silo that only returns the model, the least of several rounds."""
    from flwr.app import Message, MessageType
    from flwr.clientapp import ClientApp

    from isthmus.federation.aggregation import combine
    from isthmus.federation.messages import answer, order, pack, unpack
    from isthmus.federation.runtimes import LocalGrid

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        arrays = unpack(message.content.array_records["arrays"])
        return answer(message, {"num-examples": 1, "steps": 1}, arrays=arrays)

    shapes = {"weight0": (136, 64), "bias0": (64,), "weight1": (64, 5), "bias1": (5,)}
    model = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    grid = LocalGrid(app, silos)
    best = np.inf
    for _ in range(repeats):
        began = time.perf_counter()
        content = order(pack(model), {}, round=1)
        messages = [Message(content, node, MessageType.TRAIN) for node in grid.get_node_ids()]
        replies = grid.send_and_receive(messages)
        models = {
            str(reply.metadata.src_node_id): unpack(reply.content.array_records["arrays"])
            for reply in replies
        }
        combine(dict.fromkeys(models, 1 / silos), models)
        best = min(best, time.perf_counter() - began)
    grid.close()
    return 1000 * best / silos


if __name__ == "__main__":
    growth(Path(sys.argv[2])) if sys.argv[1] == "growth" else _ours(Path(sys.argv[1]))
