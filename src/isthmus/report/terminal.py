"""Messages during work: progress bars and the closing summary, all on stderr.

stdout is data only. A bar appears when stderr is a terminal and the work has lasted two seconds; a bar opened
while another is shown is drawn below it. If stderr is a file, a line is printed from time to time instead:
from the command line (`show_lines`), or for work of hours that asks for `lines`.
"""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds of work before a bar appears."""
PAUSE = 20.0
"""Seconds between two lines if stderr is no terminal."""
WIDTH = 80
"""Columns of a summary."""

_lines = False  # whether lines replace bars if stderr is no terminal
_display: Bars | None = None  # the display of all bars of the process, while there are bars
_lock = threading.RLock()


def show_lines(wanted: bool) -> None:
    """Set whether lines replace bars if stderr is no terminal; a bar's own `lines` takes precedence."""
    global _lines
    _lines = wanted


def progress(items: Iterable[T], *, total: int | None = None, label: str) -> Iterator[T]:
    """Yield the same items, with a bar on stderr during the work."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(label, total) as bar:
        for item in items:
            yield item
            bar.advance()


class Progress:
    """A bar that is advanced by hand.

    >>> with Progress("training", 3) as bar:
    ...     for _ in range(3):
    ...         bar.advance(note="nDCG@10 0.41")
    """

    def __init__(
        self, label: str, total: int | None = None, *, done: int = 0, lines: bool | None = None
    ) -> None:
        self.label, self.total, self.lines = label, total, _lines if lines is None else lines
        self._before, self._done, self._note = done, done, ""
        self._began = 0.0
        self._timer: threading.Timer | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        # While there is a display, stderr is rich's own stream, which does not report being a terminal.
        self._began = time.monotonic()
        if _display is not None or sys.stderr.isatty():
            self._start(PATIENCE, self._appear)
        elif self.lines:
            self._start(PAUSE, self._say)
        return self

    def _start(self, seconds: float, then: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, then)
        self._timer.daemon = True
        self._timer.start()

    def _say(self) -> None:
        """Print the progress on a line of its own, and again after a pause; runs in the timer's thread."""
        with _lock:
            if self._timer is None:  # closed in the meantime
                return
            seconds = time.monotonic() - self._began
            of = "" if self.total is None else f" of {self.total}"
            step = f" {self._done}{of}" if self._done or of else ""
            note = f", {self._note}" if self._note else ""
            left, new = "", self._done - self._before
            if self.total is not None and new > 0 and self._done < self.total:
                left = f", about {_minutes(seconds / new * (self.total - self._done))} left"
            print(f"{self.label}:{step} after {_minutes(seconds)}{left}{note}", file=sys.stderr, flush=True)
            self._start(PAUSE, self._say)

    def advance(self, steps: int = 1, *, note: str | None = None) -> None:
        """Count some steps as done; the note stays beside the bar until the next one."""
        with _lock:
            self._done += steps
            self._note = self._note if note is None else note
            if _display is not None and self._task is not None:
                _display.update(self._task, completed=self._done, note=self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _display
        if self._timer is not None:
            self._timer.cancel()
        with _lock:
            self._timer = None
            if _display is not None and self._task is not None:
                _display.remove_task(self._task)
                self._task = None
                if not _display.tasks:
                    _display.stop()
                    _display = None

    def _appear(self) -> None:
        """Draw the bar below existing ones; runs in the timer's thread."""
        global _display
        with _lock:
            if self._timer is None:  # closed in the meantime
                return
            _display = _display or _new_bars()
            self._task = _display.add_task(
                self.label, total=self.total, completed=self._done, note=self._note
            )
            _display.start()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def summary(title: str, facts: Mapping[str, object], *, wrote: Iterable[str | PathLike[str]] = ()) -> None:
    """Print the closing box of a long command on stderr: results, wrapped to 80 columns, and paths."""
    column = max(map(len, (*facts, "wrote")))
    fill = textwrap.TextWrapper(max(WIDTH - column - 7, 20), break_long_words=False, break_on_hyphens=False)
    lines = [
        (name if at == 0 else "", part)
        for name, value in facts.items()
        for at, part in enumerate(fill.wrap(str(value)) or [""])
    ]
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
        parts.TaskProgressColumn("{task.completed}/{task.total}"),  # empty if the total is unknown
        parts.TimeElapsedColumn(),
        parts.TimeRemainingColumn(),
        parts.TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )
