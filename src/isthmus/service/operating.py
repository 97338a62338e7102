"""A running node as its operator's commands on the same machine reach it: a socket in the node's folder.

    with operated(folder, {"reload": …}):          # in the node
    ask_node(folder, "reload", {}, Reread)         # in the command

One line of JSON each way, {"task", …} and the task's result or {"error"}. Whoever may use the socket owns the
folder: it lies there for its owner alone, and the system says who is at the other end.
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
"""Bytes of a line."""
READING = 10.0
"""Seconds for a command to come, once somebody is there."""
TURN = 5.0
"""Seconds after which the thread looks whether it is to end, unless somebody knocks."""

Task = Callable[[Mapping[str, Any]], BaseModel]
M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger("isthmus.service")


@contextmanager
def operated(folder: Path, tasks: Mapping[str, Task]) -> Iterator[None]:
    """Do what the operator's commands ask for, while this lasts; one after the other."""
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
    """The answer to a command."""
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
    """Whether the other side is the node's user or root, where the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    about = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", about)[1] in (0, os.geteuid())


def _line(connection: socket.socket) -> bytes:
    """What comes up to the end of a line, or of the connection."""
    parts, size = list[bytes](), 0
    while block := connection.recv(1 << 16):
        parts.append(block)
        size += len(block)
        if block.endswith(b"\n") or size > LONGEST:
            break
    return b"".join(parts)


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """A name of the socket that is short enough, however long the folder's is."""
    if sys.platform != "linux":
        yield str(folder / SOCKET)
        return
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}/{SOCKET}"
    finally:
        os.close(number)


def ask_node(folder: Path, task: str, about: Mapping[str, Any], model: type[M]) -> M:
    """Have the node that works on this folder do something; waits as long as that takes.

    Raises SiloUnavailable where none does, and ServiceError where it could not be done.
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
