"""Parts of `isthmus demo`, run from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def demonstrated(folder: Path, part: str) -> tuple[Any, str, Path]:
    """What one part of the demonstration prints and says, and its folder; it ends by itself."""
    command = [sys.executable, "-m", "isthmus", "demo", "--headless", "--json", "--only", part]
    command += ["--out", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=850)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, folder
