"""Saved rankers: a JSON header with arrays, or a tree library's own text."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.tables.bundles import Bundle


@dataclass(frozen=True)
class Saved(Bundle):
    """What a ranker's file holds; the header says its kind."""

    noun = "ranker"
