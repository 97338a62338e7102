"""The tables everything travels in: rankings, judgements, feature rows, corpora."""

from isthmus.tables.beir import read_corpus_beir, read_queries, write_corpus_beir
from isthmus.tables.corpus import SPLITS, Corpus, Documents, Queries
from isthmus.tables.ids import FloatArray, Ids, IntArray, frozen
from isthmus.tables.letor import Letor
from isthmus.tables.letor_files import (
    Fold,
    read_letor,
    read_letor_fold,
    read_letor_folds,
    rotated_folds,
    write_letor,
)
from isthmus.tables.rankings import UNJUDGED, Qrels, Run
from isthmus.tables.trec import read_qrels, read_run, write_qrels, write_run
