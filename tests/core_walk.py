"""All that the core does without an extra, from outside: files, a masked sum, a federation to search."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loopback_ports import free_base

PATIENCE = 240.0
SILOS = ("north", "south")
MASKED_SUM = """
import os, sys
from isthmus.private import exchange  # the exchange between silos, which carries such sums
from isthmus.private.secure_sum import sum_in_memory
vectors = {"north": [1, 2], "south": [10, 20], "west": [100, 200], "east": [1000, 2000]}
opened = sum_in_memory(vectors, threshold=3, session=os.urandom(16), dropped=["east"])
assert opened.tolist() == [111, 222], opened
assert not {"flwr", "grpc", "matplotlib"} & {name for name, module in sys.modules.items() if module}
"""


@dataclass(frozen=True)
class Core:
    """An installation: how its command line and its interpreter are started, and in which environment."""

    isthmus: Sequence[str]
    python: Sequence[str]
    folder: Path
    environment: Mapping[str, str]

    def run(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """A command that must end with this status."""
        command = [*self.isthmus, *arguments]
        done = self._run(command)
        assert done.returncode == status, (arguments, done.stderr)
        return done

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=self.environment, timeout=PATIENCE
        )

    def write_runs(self) -> int:
        """Judgements and two runs of as many rows as it returns."""
        pairs = [(f"q{q}", f"d{d}", (q + d) % 3 == 0) for q in range(30) for d in range(6)]
        (self.folder / "q.rels").write_text("".join(f"{q} 0 {d} {int(rel)}\n" for q, d, rel in pairs))
        for name, good in (("one", 2.0), ("two", 1.0)):
            lines = [
                f"{q} Q0 {d} 1 {good * rel + at % 7 / 7} {name}\n" for at, (q, d, rel) in enumerate(pairs)
            ]
            (self.folder / f"{name}.run").write_text("".join(lines))
        return len(pairs)

    def works_on_files(self) -> None:
        """Evaluate, calibrate and fuse."""
        count = self.write_runs()
        rows = json.loads(self.run("evaluate", "q.rels", "one.run", "-m", "MRR@10", "--json").stdout)
        assert [(row["measure"], row["value"], row["queries"]) for row in rows] == [("MRR@10", 1.0, 30)]
        self.run("calibrate", "one.run", "--qrels", "q.rels", "--method", "platt", "-o", "calibrated.run")
        self.run("fuse", "one.run", "two.run", "--qrels", "q.rels", "-o", "fused.run")
        assert (self.folder / "fused.run").read_text().count("\n") == count

    def adds_under_masks(self) -> None:
        """Silos add up, one of them gone."""
        done = self._run([*self.python, "-c", MASKED_SUM])
        assert done.returncode == 0, done.stderr

    def is_searched(self) -> None:
        """Two nodes behind a broker answer one search."""
        port = free_base(len(SILOS) + 1)
        self.run("new", "federation", "--silos", ",".join(SILOS), "--port", str(port))
        for silo in SILOS:
            (self.folder / f"federation/{silo}/documents/tides.md").write_text(f"Tidal power, says {silo}.\n")
        search = ["search", "tidal power", "--broker", f"http://127.0.0.1:{port}", "--json"]
        search += ["--key", "federation/broker/admin.key"]
        with self._serving(*(f"{silo}/silo.toml" for silo in SILOS), "broker.toml") as logs:
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end:
                done = self._run([*self.isthmus, *search])
                hits = [] if done.returncode else json.loads(done.stdout)["hits"]
                if {hit["silo"] for hit in hits} == {*SILOS}:
                    return
                time.sleep(0.2)
            raise AssertionError("\n".join(log.read_text() for log in logs) + done.stdout + done.stderr)

    @contextmanager
    def _serving(self, *configs: str):
        started, logs = [], []
        try:
            for config in configs:
                logs.append(self.folder / f"{config.replace('/', '-')}.log")
                verb = "broker" if config.startswith("broker") else "node"
                command = [*self.isthmus, verb, "--config", f"federation/{config}"]
                with open(logs[-1], "wb") as log:
                    process = subprocess.Popen(
                        command, cwd=self.folder, env=self.environment, stdout=log, stderr=log
                    )
                started.append(process)
            yield logs
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(PATIENCE)
