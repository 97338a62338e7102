"""The side of the silos: a process for each, with its own rows and key, in which XGBoost trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from isthmus.errors import ConfigError, DataError, FederationError, MissingExtra, check_extra
from isthmus.rankers import LambdaMART, check_trainable, tree_library
from isthmus.tables import Letor
from isthmus_reproduce.trees.certificates import Seat, make_papers
from isthmus_reproduce.trees.exchange import Exchange


def train_silos(silos: Mapping[str, Letor], model: LambdaMART, *, deadline: float = 600) -> LambdaMART:
    """Train one LambdaMART over silos simulated on this machine: a process each, TLS on the loopback.

    Raises FederationError if a silo fails, dies or is not done by the deadline (seconds); no process is left
    behind. `model` gives the parameters and is not changed; its library must be XGBoost.
    """
    _check_ready(silos, model)
    with TemporaryDirectory(prefix="isthmus-trees-") as folder, ExitStack() as stack:
        papers = make_papers(Path(folder), len(silos))
        exchange = stack.enter_context(Exchange.open(list(silos), papers, patience=deadline))
        parts: dict[str, _Part] = {}
        for rank, (silo, letor) in enumerate(silos.items()):
            seat = papers.seat(rank, len(silos), exchange.address)
            parts[silo] = stack.enter_context(_Part.start(Path(folder) / f"part{rank}", letor, model, seat))
        _wait(parts, deadline)
        texts = [part.model_text() for part in parts.values()]
    if len(set(texts)) > 1:
        raise FederationError("the silos ended with different trees")
    return model.with_model(texts[0], next(iter(silos.values())).width)


def train_silo(letor: Letor, model: LambdaMART, seat: Seat, *, deadline: float = 600) -> LambdaMART:
    """Train one silo's part in a federation with a remote exchange; returns the common model.

    XGBoost cannot be interrupted while it waits for the others, so it runs in a process of its own, which is
    ended at the deadline (seconds).
    """
    named = {f"silo {seat.rank}": letor}
    _check_ready(named, model)
    with TemporaryDirectory(prefix="isthmus-trees-") as folder, ExitStack() as stack:
        part = stack.enter_context(_Part.start(Path(folder) / "part", letor, model, seat))
        _wait(dict.fromkeys(named, part), deadline)
        return model.with_model(part.model_text(), letor.width)


@dataclass(frozen=True)
class _Part:
    """One silo's process and its folder, with rows and job as input, model and log as output."""

    folder: Path
    process: subprocess.Popen[bytes]

    @classmethod
    @contextmanager
    def start(cls, folder: Path, letor: Letor, model: LambdaMART, seat: Seat) -> Iterator[_Part]:
        """Start the silo's process; it is ended with the context."""
        folder.mkdir()
        for name in ("features", "grades", "offsets"):
            np.save(folder / f"{name}.npy", getattr(letor, name), allow_pickle=False)
        job = {"seat": asdict(seat), "parameters": model.xgboost_parameters(), "trees": model.trees}
        (folder / "job.json").write_text(json.dumps(job))
        # Reach the exchange directly, whatever proxy the environment names.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "no_grpc_proxy": seat.address.rpartition(":")[0]}
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "isthmus_reproduce.trees", str(folder)],
                stdin=subprocess.PIPE,  # never written to: it closes when this process dies, however it dies
                stdout=log,
                stderr=log,
                env=environment,
            )
        try:
            yield cls(folder, process)
        finally:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def model_text(self) -> str:
        return (self.folder / "model.json").read_text()

    def last_words(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it left no word")


def _wait(parts: Mapping[str, _Part], deadline: float) -> None:
    """Wait until every process is done; FederationError at the first that fails, or at the deadline."""
    end = time.monotonic() + deadline
    waiting = dict(parts)
    while waiting:
        for silo, part in list(waiting.items()):
            status = part.process.poll()
            if status:
                raise FederationError(f"{silo} ended with status {status}: {part.last_words()}")
            if status == 0:
                del waiting[silo]
        if time.monotonic() > end:
            late = ", ".join(waiting)
            raise FederationError(f"not done after {deadline:g} s: {late} (give more time, or fewer trees)")
        time.sleep(0.02)


def _check_ready(silos: Mapping[str, Letor], model: LambdaMART) -> None:
    if model.library != "xgboost":
        raise ConfigError(
            f"federated LambdaMART runs on XGBoost, and the model says {model.library}", key="library"
        )
    if not tree_library("xgboost").build_info().get("USE_FEDERATED"):
        raise MissingExtra(
            "trees", "federated LambdaMART (this XGBoost was built without its federated part)"
        )
    check_extra("trees", "federated LambdaMART", "grpc")
    widths = {letor.width for letor in silos.values()}
    if len(widths) != 1:
        raise DataError(f"the silos have {sorted(widths)} features", cure="all need the same features")
    for silo, letor in silos.items():
        if not letor.rows:
            raise DataError(f"{silo} has no rows", cure="leave it out")
        check_trainable(letor)
