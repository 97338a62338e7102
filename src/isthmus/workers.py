"""Worker processes."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

_LOOK = 2.0  # seconds between two checks that the owner is alive


def hired(workers: int) -> ProcessPoolExecutor:
    """A pool of fresh processes with one BLAS thread each, which end with their owner, even if it is
    killed."""
    return ProcessPoolExecutor(workers, get_context("spawn"), _begin, (os.getpid(),))


def _begin(owner: int) -> None:
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)  # two BLAS threads on busy cores are ten times slower than one
    threading.Thread(target=_watch, args=(owner,), daemon=True).start()


def _watch(owner: int) -> None:
    """End this process when its owner is gone: a waiting worker holds both ends of its pipe, and would never
    notice."""
    while os.getppid() == owner:
        time.sleep(_LOOK)
    os._exit(1)
