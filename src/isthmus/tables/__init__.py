"""The tables everything travels in: rankings, judgements, feature rows, corpora."""

from isthmus.tables.corpus import SPLITS, Corpus, Documents, Queries
from isthmus.tables.letor import Letor
from isthmus.tables.rankings import UNJUDGED, Qrels, Run
from isthmus.tables.trec import read_qrels, read_run, write_qrels, write_run

__all__ = [
    "SPLITS",
    "UNJUDGED",
    "Corpus",
    "Documents",
    "Letor",
    "Qrels",
    "Queries",
    "Run",
    "read_qrels",
    "read_run",
    "write_qrels",
    "write_run",
]
