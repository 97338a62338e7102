"""Collections and feature sets, by name or from their files."""

from isthmus.corpora.catalogue import available, load, load_folds, load_letor
