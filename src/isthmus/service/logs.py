"""The log of a process that serves, and how the process ends together with the one that started it.

The log is one JSON object a line on stderr, also for libraries, warnings and uncaught exceptions. On a
terminal it is plain text for people. Queries are not in it unless the operator asks for them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Any

from isthmus.errors import IsthmusError, plain

ACCESS = "isthmus.access"
RUNNERS = ("asyncio", "uvicorn.error")
"""Loggers of libraries that run our code, and log the exceptions it raises."""
ABOUT = "about"
"""Attribute of a record whose entries become fields of its line: `extra={ABOUT: {"silo": "north"}}`."""

_log = logging.getLogger("isthmus.service")


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC, with milliseconds."""
    whole, micros = divmod(round(seconds * 1_000_000), 1_000_000)
    return f"{_iso_second(whole)}.{micros // 1_000:03d}Z"


@lru_cache(maxsize=16)
def _iso_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().removesuffix("+00:00")


def place_of(error: BaseException) -> str:
    """Return where in the code an exception was raised. This may be logged, unlike its message."""
    trace, places = error.__traceback__, []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-6:]))


class _Lines(logging.Formatter):
    """The text of a record. Exceptions that reach `RUNNERS` are logged by kind and place alone, as those that
    we catch ourselves: their messages may quote a query."""

    def words(self, record: logging.LogRecord) -> tuple[str, str]:
        """Return the message and the trace."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.name in RUNNERS:
            return f"a failure that nobody caught: {type(error).__name__} at {place_of(error)}", ""
        return record.getMessage(), self.formatException(record.exc_info) if record.exc_info else ""


class JsonLines(_Lines):
    """A record as one line of JSON; the access log's records are JSON already."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == ACCESS:
            return record.getMessage()
        message, trace = self.words(record)
        fields = {
            "time": iso_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **getattr(record, ABOUT, {}),
        }
        if trace:
            fields["trace"] = trace
        return json.dumps(fields, default=str)  # ASCII: no character ends a line or controls a terminal


class PlainLines(_Lines):
    """A record as plain text for a person at a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text, trace = self.words(record)
        if record.name == ACCESS:
            fields = json.loads(text)
            about = " ".join(str(fields[name]) for name in ("method", "path", "status", "caller"))
            text = f"{about} {fields['ms']} ms"
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        lines = [f"isthmus {self.formatTime(record, '%H:%M:%S')} {level}{plain(text)}"]
        return "\n".join([*lines, *map(plain, trace.splitlines())])


def log_to_stderr(*, access: bool = True) -> None:
    """Send the log of this process to stderr; with `access` a line for every request too."""
    # lines do not say where in the code they were logged: finding that out takes longer than writing them
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(PlainLines() if sys.stderr.isatty() else JsonLines())
    for name, level in (
        ("", logging.WARNING),
        ("isthmus.service", logging.INFO),
        (ACCESS, logging.INFO if access else logging.WARNING),
        ("uvicorn.error", logging.ERROR),  # no line for every malformed request
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [out], False
        logger.setLevel(level)
    logging.getLogger("flwr").propagate = False  # Flower has its own handler
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # we report a broken file once
    warnings.showwarning = _log_warning  # type: ignore[assignment]  # the rest is where it arose
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )


def _log_warning(message: Warning | str, category: type[Warning], *place: Any) -> None:
    logging.getLogger("py.warnings").warning("%s: %s", category.__name__, message)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt | SystemExit):
        _log.critical("this failure was not foreseen: %s", kind.__name__, exc_info=(kind, error, trace))


def status_of(serve: Callable[[], None]) -> int:
    """Run a server to its end. Returns the exit status: 1 if it fails, and then the log says why."""
    try:
        serve()
    except IsthmusError as error:
        _log.error("%s", error)
        return 1
    return 0


def end_with_stdin() -> None:
    """End this process when its stdin closes: the parent process holds the other end of that pipe."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
