"""The log of a process that serves, and how it ends with whoever started it.

The log is one JSON object a line on stderr. Queries are not in it unless the operator asks for them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from contextlib import suppress


class JsonLines(logging.Formatter):
    """A record as one line of JSON; the access log's records are JSON already."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "isthmus.access":
            return record.getMessage()
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def log_to_stderr(*, access: bool = True) -> None:
    """Send the service's log to stderr."""
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(JsonLines())
    for name in ("isthmus.service", "isthmus.access"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [out], False
        logger.setLevel(logging.INFO if access or name != "isthmus.access" else logging.WARNING)
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.handlers, uvicorn.propagate = [out], False
    uvicorn.setLevel(logging.ERROR)  # not a line for every stranger's garbage
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what a file lacks is told once, by us


def end_with_stdin() -> None:
    """End when stdin does, which whoever started this process holds the other end of."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
