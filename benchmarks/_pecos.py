"""The peer of `xmtc`: PECOS's XR-Linear, in an interpreter that has it (requirements-bench-pecos.txt).

Reads `train.npz`, `labels.npz` and `test.npz` (SciPy CSR) from a folder, trains and predicts on a given
number of threads with PECOS's defaults, writes `scores.npz`, and prints processor seconds, wall-clock seconds
and peak memory as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel
from scipy.sparse import csr_matrix, load_npz, save_npz

BEAM = 10


def main() -> None:
    folder, k, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rows, labels, queries = (
        csr_matrix(load_npz(folder / f"{name}.npz"), dtype=np.float32) for name in ("train", "labels", "test")
    )
    spans = {}

    def timed(name: str, work: Any) -> Any:
        clock, processor = time.perf_counter(), time.process_time()
        result = work()
        spans[f"{name} clock"] = time.perf_counter() - clock
        spans[name] = time.process_time() - processor
        return result

    def fit() -> Any:
        clusters = Indexer.gen(LabelEmbeddingFactory.create(labels, rows), threads=threads, seed=0)
        return XLinearModel.train(rows, labels, C=clusters, threads=threads)

    model = timed("fit", fit)
    scores = timed(
        "predict", lambda: model.predict(queries, only_topk=k, beam_size=max(BEAM, k), threads=threads)
    )
    save_npz(folder / "scores.npz", csr_matrix(scores))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({**spans, "memory": peak}))


if __name__ == "__main__":
    main()
