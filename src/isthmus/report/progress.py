"""Talk while work goes on: progress bars and the closing summary, all on stderr.

stdout is data only. A bar appears when stderr is a terminal and the work has lasted two seconds; a bar
opened inside another one is drawn below it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar, Token
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds of work before a bar appears."""

_outer: ContextVar[Progress | None] = ContextVar("outer_progress", default=None)


def progress(items: Iterable[T], *, total: int | None = None, label: str) -> Iterator[T]:
    """The same items, with a bar on stderr while they are worked through."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(label, total) as bar:
        for item in items:
            yield item
            bar.advance()


class Progress:
    """A bar that is moved by hand.

    >>> with Progress("training", 3) as bar:
    ...     for _ in range(3):
    ...         bar.advance(note="nDCG@10 0.41")
    """

    def __init__(self, label: str, total: int | None = None) -> None:
        self.label, self.total = label, total
        self._done, self._note = 0, ""
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._parent: Progress | None = None
        self._token: Token[Progress | None] | None = None
        self._bars: Bars | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        self._parent = _outer.get()
        self._token = _outer.set(self)
        # Inside a bar stderr is rich's own stream, which does not say that it is a terminal.
        outside = sys.stderr.isatty() if self._parent is None else self._parent._timer is not None
        if outside:
            self._timer = threading.Timer(PATIENCE, self._appear)
            self._timer.daemon = True
            self._timer.start()
        return self

    def advance(self, steps: int = 1, *, note: str | None = None) -> None:
        """Some steps are done; the note stands beside the bar until the next one."""
        with self._lock:
            self._done += steps
            self._note = self._note if note is None else note
            if self._bars is not None and self._task is not None:
                self._bars.update(self._task, completed=self._done, note=self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None and _outer.get() is self:  # a generator may end in another context
            _outer.reset(self._token)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            if self._bars is not None and self._task is not None:
                self._bars.remove_task(self._task)
                if not self._bars.tasks:
                    self._bars.stop()
            self._bars = None

    def _appear(self) -> Bars | None:
        """Draw the bar, below the outer one if there is one; runs in the timer's thread."""
        outer = self._parent._appear() if self._parent is not None else None
        with self._lock:
            if self._timer is None:  # closed in the meantime
                return None
            if self._bars is None:
                self._bars = _new_bars() if outer is None else outer
                self._task = self._bars.add_task(
                    self.label, total=self.total, completed=self._done, note=self._note
                )
                self._bars.start()
            return self._bars


def summary(title: str, facts: Mapping[str, object], *, wrote: Iterable[str | PathLike[str]] = ()) -> None:
    """The closing box of a long command, on stderr: what came out, and the paths written."""
    lines = [(name, str(value)) for name, value in facts.items()]
    lines += [("wrote" if at == 0 else "", str(path)) for at, path in enumerate(wrote)]
    print(box(title, lines), file=sys.stderr)


def box(title: str, lines: Iterable[tuple[str, str]]) -> str:
    """A frame around (name, value) lines.

    >>> print(box("done", [("nDCG@10", "0.413"), ("wrote", "out/run.txt")]))
    ╭─ done ────────────────╮
    │ nDCG@10  0.413        │
    │ wrote    out/run.txt  │
    ╰───────────────────────╯
    """
    pairs = list(lines)
    column = max((len(name) for name, _ in pairs), default=0)
    body = [f" {name:<{column}}  {value}  " for name, value in pairs]
    width = max([len(title) + 5, *(len(line) for line in body)])
    top = f"╭─ {title} ".ljust(width + 1, "─") + "╮"
    return "\n".join([top, *(f"│{line:<{width}}│" for line in body), "╰" + "─" * width + "╯"])


def _new_bars() -> Bars:
    from rich import progress as parts
    from rich.console import Console

    return parts.Progress(
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        parts.MofNCompleteColumn(),
        parts.TimeElapsedColumn(),
        parts.TimeRemainingColumn(),
        parts.TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )
