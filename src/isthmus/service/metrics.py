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

import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends of the buckets for times."""

_ENDS = (*(("_bucket", f"{end:g}") for end in SECONDS), ("_bucket", "+Inf"))
_HISTOGRAM = (*_ENDS, ("_sum", ""), ("_count", ""))

Labels = tuple[str, ...]
INFO = ("isthmus_info", "1, with the version of Isthmus.")
DISK = ("isthmus_disk_free_bytes", "Free on the disk with the server's folder.")
"""Names and meanings of metrics that nodes and broker have."""


def disk_free(folder: Path) -> dict[Labels, float]:
    """Return the free bytes on the disk with a folder, as a metric; nothing before the folder exists."""
    try:
        return {(): float(shutil.disk_usage(folder).free)}
    except OSError:
        return {}


@dataclass(eq=False)
class Metric:
    """A metric: its name, its meaning, and its values for every combination of its labels.

    A counter has one value, `""`; a histogram one a bucket, then `_sum` and `_count`; a gauge calls
    `values`.
    """

    name: str
    meaning: str
    kind: str
    labels: Labels
    values: Callable[[], Mapping[Labels, float]] | None = None
    _samples: dict[Labels, dict[tuple[str, str], float]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._sample(labels, [("", "")])["", ""] += amount

    def observe(self, seconds: float, **labels: str) -> None:
        """Add a time in seconds to a histogram."""
        bucket = _ENDS[bisect_left(SECONDS, seconds)]
        with self._lock:
            sample = self._sample(labels, _HISTOGRAM)
            sample[bucket] += 1
            sample["_sum", ""] += seconds
            sample["_count", ""] += 1

    def _sample(
        self, labels: Mapping[str, str], parts: Iterable[tuple[str, str]]
    ) -> dict[tuple[str, str], float]:
        key = tuple(map(labels.__getitem__, self.labels))
        sample = self._samples.get(key)
        if sample is None:
            sample = self._samples[key] = dict.fromkeys(parts, 0)
        return sample

    def lines(self) -> Iterator[str]:
        """Yield the lines of Prometheus' text format."""
        yield f"# HELP {self.name} {self.meaning}"
        yield f"# TYPE {self.name} {self.kind}"
        with self._lock:
            samples = {key: dict(parts) for key, parts in self._samples.items()}
        if self.values is not None:
            samples = {key: {("", ""): value} for key, value in self.values().items()}
        for key, parts in sorted(samples.items()):
            below = 0.0
            for (suffix, end), value in parts.items():
                if end:  # a bucket: all observations up to `end`
                    value = below = below + value
                labels = dict(zip(self.labels, key, strict=True)) | ({"le": end} if end else {})
                yield _line(self.name + suffix, labels, value)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self._all: list[Metric] = []

    def counter(self, name: str, meaning: str, *labels: str) -> Metric:
        """Add a counter, a number that only grows, with these labels."""
        return self._added(Metric(name, meaning, "counter", labels))

    def histogram(self, name: str, meaning: str, *labels: str) -> Metric:
        """Add a histogram of times in seconds, with these labels."""
        return self._added(Metric(name, meaning, "histogram", labels))

    def gauge(
        self, name: str, meaning: str, values: Callable[[], Mapping[Labels, float]], *labels: str
    ) -> Metric:
        """Add a gauge: numbers by labels that `values()` returns whenever the metrics are read."""
        return self._added(Metric(name, meaning, "gauge", labels, values))

    def _added(self, metric: Metric) -> Metric:
        self._all.append(metric)
        return metric

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return "".join(f"{line}\n" for metric in self._all for line in metric.lines())


def _line(name: str, labels: Mapping[str, str], number: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
    text = f"{int(number)}" if float(number).is_integer() else f"{number:.9g}"
    return f"{name}{{{pairs}}} {text}" if pairs else f"{name} {text}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
