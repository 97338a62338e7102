"""Processes that answer for silos, because threads cannot train at the same time.

A mini-batch is some twenty short NumPy calls, and between any two of them a thread needs Python's lock: two
threads that train get less done than one. So the app is forked into a process for every core. A worker serves
any silo: what a silo keeps from message to message travels with the message, and its rows lie in memory that
all of them share (`holdings.Tables`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from isthmus.errors import FederationError
from isthmus.federation.flower import (
    Context,
    ContextBytes,
    Error,
    Message,
    MessageBytes,
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from isthmus.rankers import one_blas_thread

App = Callable[[Message, Context], Message]
_RAISED = 2  # Flower's code for "the ClientApp raised an exception"
_LOOK = 1.0  # seconds between two looks whether the parent still lives


class Worker(NamedTuple):
    """A forked process and the line to it."""

    process: Any
    line: Connection


class Crew:
    """An app whose calls are answered by forked processes: as many at once as there are workers.

    Where a process ends before its time the silo it served has failed, and its place is taken by the thread
    that calls.
    """

    def __init__(self, app: App, workers: int) -> None:
        self._app = app
        self._workers = [_forked(app) for _ in range(workers)]
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def __call__(self, message: Message, context: Context) -> Message:
        """The app's reply; the context's state is then what the app left behind."""
        worker = self._idle.get()
        try:
            if worker is None:
                return self._app(message, context)
            try:
                return _asked(worker, message, context)
            except (EOFError, OSError) as error:
                worker = None
                raise FederationError("the process that served the silo ended") from error
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes; one that is still at work works for nobody."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()


def can_fork() -> bool:
    """Whether processes can be forked safely: elsewhere the system's own libraries forbid it, and Python
    lets no daemon have children."""
    return sys.platform == "linux" and not current_process().daemon


def answered(app: App, message: Message, context: Context) -> Message:
    """The app's reply; whatever it raises is that silo's failure, not the round's."""
    try:
        return app(message, context)
    except Exception as error:
        return Message(Error(_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


def _asked(worker: Worker, message: Message, context: Context) -> Message:
    _send(worker.line, message, context)
    reply, left = _receive(worker.line)
    context.state = left.state
    return reply


def _forked(app: App) -> Worker:
    fork = get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=_serve, args=(app, there, os.getpid()), daemon=True)
    with warnings.catch_warnings():  # newer Pythons warn of the parent's other threads; the child needs none
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    return Worker(process, here)


def _serve(app: App, line: Connection, parent: int) -> None:
    """Answer until the parent has gone."""
    gc.freeze()  # looking for garbage among what the parent left would copy all of it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to deal with
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with one_blas_thread():
        while os.getppid() == parent:
            if line.poll(_LOOK):
                message, context = _receive(line)
                _send(line, answered(app, message, context), context)


def _send(line: Connection, message: Message, context: Context) -> None:
    """Both or none: half of it would be taken for the beginning of the next."""
    parts = message_to_proto(message).SerializeToString(), context_to_proto(context).SerializeToString()
    for part in parts:
        line.send_bytes(part)


def _receive(line: Connection) -> tuple[Message, Context]:
    message, context = line.recv_bytes(), line.recv_bytes()
    return (
        message_from_proto(MessageBytes.FromString(message)),
        context_from_proto(ContextBytes.FromString(context)),
    )
