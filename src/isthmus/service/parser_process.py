"""Files are parsed in a process of their own, which may be ended: whatever is in a file, the node goes on.

    node                                    parser
    {"path": …, "within": …}       →        soft limit of processor time from now on
    length, {"title", "body"}      ←        or {"error", "text", "cure"}

The parser has limits of processor time, memory and output, no environment but what finds programs and
modules, and may write no file. It is started with the first file and reads one after the other; a file that
ends it is one DataError, and the next file starts another.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

from isthmus.errors import DataError
from isthmus.service.parsing import Reading, parse

PATIENCE = 60
"""Seconds on the clock that a file is waited for, and ten more for each of processor time that it has."""
AHEAD = 8
"""Files that the parser is sent before it has answered: few enough for their names to fit into a pipe."""
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL")
_PREFIX = 8
_UTF8 = ("utf-8", "surrogatepass")


class Parser:
    """The node's end of it. One thread at a time.

    Files that do not lie `within` its folder, when they are opened, are not read.
    """

    def __init__(self, limits: Reading | None = None, *, within: Path | None = None) -> None:
        self.limits = limits or Reading()
        self._within = "" if within is None else os.path.realpath(within)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Parser:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def parse_all(self, paths: Iterable[Path]) -> Iterator[tuple[Path, tuple[str, str] | DataError]]:
        """Every file, in order, with its title and body or why it has none."""
        rest, sent = iter(paths), deque[Path]()
        while True:
            for path in islice(rest, AHEAD - len(sent)):
                self._send(path, sent)
            if not sent:
                return
            path = sent[0]
            answer = self._parsed(path)
            sent.popleft()
            if self._process is None:  # it ended with this file; others that it was sent are sent again
                again = list(sent)
                sent.clear()
                for each in again:
                    self._send(each, sent)
            yield path, answer

    def _send(self, path: Path, sent: deque[Path]) -> None:
        with suppress(BrokenPipeError):  # noticed where the answer is read
            _write(self._running().stdin, {"path": os.path.abspath(path), "within": self._within})
        sent.append(path)

    def _parsed(self, path: Path) -> tuple[str, str] | DataError:
        process = self._running()
        try:
            answer = self._answer(process)
        except EOFError:
            return self._ended(process, path)
        except TimeoutError:
            self._end()
            return self.limits.beyond("seconds", f"{self._patience:,} seconds on the clock", path)
        if answer.get("spent"):
            self._end()
        if "error" in answer:
            return DataError(answer["error"], file=path, text=answer["text"], cure=answer["cure"])
        return answer["title"], answer["body"]

    @property
    def _patience(self) -> int:
        return PATIENCE + 10 * self.limits.seconds

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            limits = self.limits
            values = (limits.seconds, limits.memory_mb, limits.pages, limits.characters)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-B", "-m", __name__, *map(str, values)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # an interrupt at the terminal is the node's
            )
        return self._process

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """The parser's next answer; EOFError if it ended before that, TimeoutError if there is none."""
        until = time.monotonic() + self._patience
        size = int.from_bytes(_bytes(process, _PREFIX, until), "little")
        answer: dict[str, Any] = json.loads(_bytes(process, size, until).decode(*_UTF8))
        return answer

    def _ended(self, process: subprocess.Popen[bytes], path: Path) -> DataError:
        """Why a parser ended in the middle of a file."""
        self._end()
        if process.returncode == -signal.SIGXCPU:
            return self.limits.beyond("seconds", f"{self.limits.seconds:,} seconds of processor time", path)
        return DataError("ended the process that read it", file=path, cure="remove or repair the file")

    def _end(self) -> None:
        """End the parser and the programs it started."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)  # it ends by itself between two files
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the system ends when that lets go
            process.wait(5)


def _bytes(process: subprocess.Popen[bytes], size: int, until: float) -> bytes:
    pipe, data = process.stdout, bytearray()
    if pipe is None:
        raise EOFError
    while len(data) < size:
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError
        block = os.read(pipe.fileno(), min(size - len(data), 1 << 20))
        if not block:
            raise EOFError
        data += block
    return bytes(data)


def _write(pipe: IO[bytes] | None, message: dict[str, Any]) -> None:
    if pipe is None:
        raise EOFError
    data = json.dumps(message, ensure_ascii=False).encode(*_UTF8)
    pipe.write(len(data).to_bytes(_PREFIX, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next message; None when there is none to come."""
    prefix = pipe.read(_PREFIX)
    if len(prefix) < _PREFIX:
        return None
    message: dict[str, Any] = json.loads(pipe.read(int.from_bytes(prefix, "little")).decode(*_UTF8))
    return message


def main(values: list[str]) -> None:
    """The parser's end: answer one file after the other until there are no more."""
    limits = Reading(*map(int, values))
    _limit(resource.RLIMIT_AS, limits.memory_mb << 20)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # what a library prints is no answer
    while (request := _read(sys.stdin.buffer)) is not None:
        path, within = Path(request["path"]), Path(request["within"]) if request["within"] else None
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + limits.seconds)
        try:
            _write(answers, _parsed(path, limits, within))
        except MemoryError:  # of the answer itself, too; what is left of the memory is in pieces
            error = limits.beyond("memory_mb", f"{limits.memory_mb:,} MB of memory", path)
            _write(answers, _problem(error) | {"spent": True})


def _parsed(path: Path, limits: Reading, within: Path | None) -> dict[str, Any]:
    try:
        title, body = parse(path, limits, within=within)
    except DataError as error:
        return _problem(error)
    except OSError as error:
        return _problem(DataError(f"cannot be read: {error.strerror or error}", cure="check the file"))
    except MemoryError:
        raise
    except Exception as error:  # a reader stumbled over something that nobody foresaw
        return _problem(DataError("cannot be read", text=type(error).__name__, cure="check the file"))
    return {"title": title, "body": body}


def _problem(error: DataError) -> dict[str, Any]:
    return {"error": error.problem, "text": error.text, "cure": error.cure}


def _limit(kind: int, value: int) -> None:
    """A soft limit, where the system knows it; the hard one stays, so that the next file has its own."""
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
