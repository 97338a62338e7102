from isthmus.corpora.catalogue import SYNTHETIC as SYNTHETIC
from isthmus.corpora.catalogue import available as available
from isthmus.corpora.catalogue import load as load
from isthmus.corpora.catalogue import load_folds as load_folds
from isthmus.corpora.catalogue import load_letor as load_letor
from isthmus.corpora.labels import fold_count as fold_count
from isthmus.corpora.synthetic import load_synthetic as load_synthetic
