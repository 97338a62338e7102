"""Control socket of a running node, for its operator's commands on the same machine, in the node's folder.

    with operated(folder, {"reload": …}):          # in the node
    ask_node(folder, "reload", {}, Reread)         # in the command

One line of JSON each way: {"task", …}, answered by the task's result or {"error"}. Only the folder's owner
may use the socket: its file has no rights for others, and the user at the other end is checked where the
system tells it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from isthmus.errors import IsthmusError, ServiceError, SiloUnavailable

SOCKET = "operator.sock"
LONGEST = 16 << 20
"""Bytes that a line may have."""
READING = 10.0
"""Seconds to wait for a command after a connection was made."""
TURN = 5.0
"""Seconds after which the thread checks whether it is to end, unless a connection wakes it earlier."""

Task = Callable[[Mapping[str, Any]], BaseModel]
M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger("isthmus.service")


@contextmanager
def operated(folder: Path, tasks: Mapping[str, Task]) -> Iterator[None]:
    """Run the operator's commands one after the other, as long as the context lasts."""
    path, stopped = folder / SOCKET, threading.Event()
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, _address(folder) as address:
        listener.bind(address)
        os.chmod(path, 0o600)
        listener.listen(4)
        listener.settimeout(TURN)
        thread = threading.Thread(
            target=_serve, args=(listener, tasks, stopped), name="operator", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            with suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
                knock.settimeout(1.0)
                knock.connect(address)
            thread.join(10)
            path.unlink(missing_ok=True)


def _serve(listener: socket.socket, tasks: Mapping[str, Task], stopped: threading.Event) -> None:
    while not stopped.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        with connection:
            if stopped.is_set():
                return
            try:
                connection.settimeout(READING)
                if _is_owner(connection):
                    connection.sendall(_done(_line(connection), tasks) + b"\n")
            except OSError:
                _log.warning("a command of the operator's went away before it was answered")


def _done(line: bytes, tasks: Mapping[str, Task]) -> bytes:
    """Run the command in a line. Returns its result, or an error, as JSON."""
    try:
        command = json.loads(line)
        return tasks[command["task"]](command).model_dump_json().encode()
    except IsthmusError as error:
        return json.dumps({"error": str(error)}).encode()
    except (ValueError, KeyError, TypeError):
        return json.dumps({"error": "not a command that this node knows"}).encode()
    except Exception:
        _log.exception("a command of the operator's failed")
        return json.dumps({"error": "it failed; the node's log says why"}).encode()


def _is_owner(connection: socket.socket) -> bool:
    """Whether the other process runs as the node's user or root; True where the system cannot tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    about = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", about)[1] in (0, os.geteuid())


def _line(connection: socket.socket) -> bytes:
    """Read up to the end of a line or of the connection."""
    parts, size = list[bytes](), 0
    while block := connection.recv(1 << 16):
        parts.append(block)
        size += len(block)
        if block.endswith(b"\n") or size > LONGEST:
            break
    return b"".join(parts)


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield a path of the socket; on Linux a short one, since the length of such paths is limited."""
    if sys.platform != "linux":
        yield str(folder / SOCKET)
        return
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}/{SOCKET}"
    finally:
        os.close(number)


def ask_node(folder: Path, task: str, about: Mapping[str, Any], model: type[M]) -> M:
    """Run a task in the node that works on this folder, and return its result, however long that takes.

    Raises SiloUnavailable if no node answers, and ServiceError if the task failed.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection, _address(folder) as address:
            connection.connect(address)
            connection.sendall(json.dumps({**about, "task": task}).encode() + b"\n")
            answer = json.loads(_line(connection))
    except (OSError, ValueError) as error:
        raise SiloUnavailable(
            f"no node answers at {folder} ({type(error).__name__}): does one run?"
        ) from error
    if "error" in answer:
        raise ServiceError(str(answer["error"]))
    try:
        return model.model_validate(answer)
    except ValidationError:
        raise ServiceError("the node that runs is of another release: restart it") from None
