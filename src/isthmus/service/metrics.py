"""Counters, gauges and histograms in the text form that Prometheus reads.

>>> metrics = Metrics()
>>> searches = metrics.counter("searches_total", "Searches, by outcome.", "outcome")
>>> searches.add(outcome="answered")
>>> print(metrics.text())
# HELP searches_total Searches, by outcome.
# TYPE searches_total counter
searches_total{outcome="answered"} 1
<BLANKLINE>
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from threading import Lock

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the buckets for times."""

Labels = tuple[str, ...]


class Counter:
    """A number that only grows, one a combination of labels."""

    def __init__(self, name: str, told: str, labels: Labels) -> None:
        self.name, self.told, self.labels = name, told, labels
        self._values: dict[Labels, float] = {}
        self._lock = Lock()

    def add(self, amount: float = 1, **labels: str) -> None:
        """Count something."""
        key = tuple(labels[name] for name in self.labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def lines(self) -> Iterator[str]:
        """One line a value."""
        yield from _head(self.name, self.told, "counter")
        with self._lock:
            values = sorted(self._values.items())
        for key, value in values:
            yield _line(self.name, self.labels, key, value)


class Histogram:
    """How often something took how long."""

    def __init__(self, name: str, told: str, labels: Labels) -> None:
        self.name, self.told, self.labels = name, told, labels
        self._buckets: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._lock = Lock()

    def observe(self, seconds: float, **labels: str) -> None:
        """Note one time."""
        key = tuple(labels[name] for name in self.labels)
        with self._lock:
            counts = self._buckets.setdefault(key, [0] * (len(SECONDS) + 1))
            counts[bisect_left(SECONDS, seconds)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + seconds

    def lines(self) -> Iterator[str]:
        """One line a bucket, then sum and count."""
        yield from _head(self.name, self.told, "histogram")
        with self._lock:
            found = [(key, tuple(counts), self._sums[key]) for key, counts in sorted(self._buckets.items())]
        names = (*self.labels, "le")
        for key, counts, total in found:
            below = 0
            for end, count in zip((*SECONDS, None), counts, strict=True):
                below += count
                told = "+Inf" if end is None else f"{end:g}"
                yield _line(f"{self.name}_bucket", names, (*key, told), below)
            yield _line(f"{self.name}_sum", self.labels, key, total)
            yield _line(f"{self.name}_count", self.labels, key, below)


class Gauge:
    """Numbers that are looked up when they are asked for."""

    def __init__(
        self, name: str, told: str, labels: Labels, values: Callable[[], Mapping[Labels, float]]
    ) -> None:
        self.name, self.told, self.labels, self.values = name, told, labels, values

    def lines(self) -> Iterator[str]:
        """One line a value."""
        yield from _head(self.name, self.told, "gauge")
        for key, value in sorted(self.values().items()):
            yield _line(self.name, self.labels, key, value)


class Metrics:
    """All that a server counts."""

    def __init__(self) -> None:
        self._parts: list[Counter | Histogram | Gauge] = []

    def counter(self, name: str, told: str, *labels: str) -> Counter:
        """A counter with these labels."""
        made = Counter(name, told, labels)
        self._parts.append(made)
        return made

    def histogram(self, name: str, told: str, *labels: str) -> Histogram:
        """A histogram of seconds with these labels."""
        made = Histogram(name, told, labels)
        self._parts.append(made)
        return made

    def gauge(
        self, name: str, told: str, values: Callable[[], Mapping[Labels, float]], *labels: str
    ) -> Gauge:
        """A gauge whose values `values` looks up."""
        made = Gauge(name, told, labels, values)
        self._parts.append(made)
        return made

    def text(self) -> str:
        """Everything, as Prometheus reads it."""
        return "".join(f"{line}\n" for part in self._parts for line in part.lines())


def _head(name: str, told: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"


def _line(name: str, labels: Labels, values: Labels, number: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True))
    shown = f"{int(number)}" if float(number).is_integer() else f"{number:.9g}"
    return f"{name}{{{pairs}}} {shown}" if pairs else f"{name} {shown}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
