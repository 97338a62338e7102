"""What a silo shows of its figures: exact ones, or private ones whose noise is drawn once and kept on disk.

A private release is charged to every document it is of, then kept, and only then shown. It is drawn anew when
enough has changed and the budget allows; else what was shown before is shown again, which costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from isthmus.errors import BudgetExhausted, Refused
from isthmus.private.cost import Covered
from isthmus.private.ledger import Ledger, fingerprint
from isthmus.private.sketch import HashFamily
from isthmus.service.figures import FIELD_TABLES, TEXT, Figures, costs
from isthmus.service.index import Index
from isthmus.service.settings import NodeSettings
from isthmus.service.snapshot import Part
from isthmus.service.statistics import etag
from isthmus.tables.files import replacing


class Releases:
    """The figures that leave one silo, whoever asks for them and how often."""

    def __init__(self, settings: NodeSettings, ledger: Ledger, index: Index, family: HashFamily) -> None:
        self.silo, self.settings = settings.silo, settings.statistics
        self.ledger, self.index, self.family = ledger, index, family
        self._file: Path = settings.folder / "released.statistics"
        self._lock = threading.Lock()
        self._told: set[tuple[str, str]] = set()
        self._charged: set[tuple[str, int]] = set()
        self._kept: Figures | None = None
        self._packed: tuple[object, bytes] | None = None

    def to(self, peer: str) -> bytes:
        """The figures in the form that the silo allows; Refused or BudgetExhausted if it does not."""
        with self._lock:
            if self.settings.form == "none":
                raise Refused("this silo does not share statistics")
            return self._exact(peer) if self.settings.form == "exact" else self._private(peer)

    @property
    def _tables(self) -> tuple[str, ...]:
        return (TEXT, *FIELD_TABLES) if self.settings.fields else (TEXT,)

    def _packed_as(self, source: object, figures: Callable[[], Figures]) -> bytes:
        """A broker asks again and again: what has not changed is packed once."""
        if self._packed is None or self._packed[0] is not source:
            self._packed = (source, figures().to_bytes())
        return self._packed[1]

    def _exact(self, peer: str) -> bytes:
        snapshot = self.index.snapshot
        packed = self._packed_as(snapshot.parts, lambda: snapshot.exact_figures(self.silo, self._tables))
        if (peer, etag(packed)) not in self._told:
            self.ledger.record("sums", peer, note="exact term statistics")
            self._told.add((peer, etag(packed)))
        return packed

    def _private(self, peer: str) -> bytes:
        kept = self._last()
        if kept is None or self._is_stale(kept):
            try:
                kept = self._drawn(0 if kept is None else int(kept.about["refresh"]) + 1, peer)
            except BudgetExhausted:
                if kept is None:
                    raise
        self._charge(kept, peer)
        shown = replace(kept, about={})
        return self._packed_as(kept, lambda: shown)

    def _last(self) -> Figures | None:
        if self._kept is None and self._file.exists():
            self._kept = Figures.from_bytes(self._file.read_bytes())
        return self._kept

    def _is_stale(self, kept: Figures) -> bool:
        if set(kept.tables) != set(self._tables) or kept.epsilon != self.settings.epsilon:
            return True
        since = self.index.snapshot.change - int(kept.about["change"])
        return since > self.settings.renew * max(1, kept.documents)

    def _drawn(self, refresh: int, peer: str) -> Figures:
        """Charge, draw, keep. Which documents the figures are of is in the file, and stays here."""
        snapshot = self.index.snapshot
        names = [id for part in snapshot.parts for id in _living(part)]
        texts = self.index.store.get(names)
        names = [name for name in names if name in texts]
        digests = [fingerprint(texts[name].title, texts[name].body) for name in names]
        covered = self.ledger.versions(names, digests)
        about = {
            "refresh": refresh,
            "change": snapshot.change,
            "documents": list(covered.documents),
            "versions": list(covered.versions),
        }
        exact = snapshot.exact_figures(self.silo, self._tables)
        drawn = replace(exact.noised(self.family, self.settings.epsilon), about=about)
        self._charge(drawn, peer)
        with replacing(self._file) as stream:
            stream.write(drawn.to_bytes())
        self._kept = drawn
        return drawn

    def _charge(self, figures: Figures, peer: str) -> None:
        """Charged again it costs nothing, but a peer that comes later has its own sums."""
        refresh = int(figures.about["refresh"])
        if (peer, refresh) not in self._charged:
            covered = Covered(tuple(figures.about["documents"]), tuple(figures.about["versions"]))
            charges = costs(figures.tables, figures.epsilon or 0.0, refresh)
            self.ledger.charge_all([(cost, covered, peer) for cost in charges], kind="sums")
            self._charged.add((peer, refresh))


def _living(part: Part) -> list[str]:
    return [id for id, keep in zip(part.segment.ids, part.kept.tolist(), strict=True) if keep]
