"""A way to a server that can be closed, and opened again: what a node sees of a server that fails."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class Switch:
    """Listens on loopback and passes everything on to a port, or to a socket's path.

    `mode` is "on"; "off" for a server that is gone; "silent" for one that takes connections and says nothing.
    """

    def __init__(self, target: int | Path) -> None:
        self._target, self.mode = target, "on"
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def turn(self, mode: str) -> None:
        """What becomes of connections from now on; those that are open end."""
        self.mode = mode
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self._open.append(near)
            if self.mode == "off":
                near.close()
            elif self.mode == "on":
                self._join(near)

    def _join(self, near: socket.socket) -> None:
        if isinstance(self._target, Path):
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(self._target))
        else:
            far = socket.create_connection(("127.0.0.1", self._target))
        self._open.append(far)
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()

    def close(self) -> None:
        """End all."""
        self.turn("off")
        self._listening.close()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for each in (one, other):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
