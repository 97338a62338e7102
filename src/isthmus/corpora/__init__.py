"""Collections and feature sets, by name or from their files."""

from isthmus.corpora.catalogue import available, load, load_folds, load_letor
from isthmus.corpora.labels import HeadTail, head_tail

__all__ = ["HeadTail", "available", "head_tail", "load", "load_folds", "load_letor"]
