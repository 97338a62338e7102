"""Processes to work in: they end with their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

OWNER = """
import os, time
from isthmus.workers import hired

if __name__ == "__main__":
    with hired(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(60)
"""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_workers_end_when_their_owner_is_killed(tmp_path):
    file = tmp_path / "owner.py"
    file.write_text(OWNER)
    with subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        assert _lives(worker)
        owner.send_signal(signal.SIGKILL)
        until = time.monotonic() + 60
        while _lives(worker) and time.monotonic() < until:
            time.sleep(0.1)
        assert not _lives(worker)
