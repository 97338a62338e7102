"""The command line without a process of its own, for journeys that need none."""

from __future__ import annotations

import io
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess

from isthmus.cli import main


def isthmus(*arguments: object, folder: Path = Path(), check: bool = True) -> CompletedProcess[str]:
    """Run a command in a folder; with `check`, a status other than 0 fails with what was said."""
    words, out, err = [str(argument) for argument in arguments], io.StringIO(), io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
    assert not check or status == 0, f"isthmus {' '.join(words)}: {err.getvalue()}"
    return CompletedProcess(words, status, out.getvalue(), err.getvalue())
