__version__: str

from isthmus.calibration import calibrate as calibrate
from isthmus.corpora import load as load
from isthmus.corpora import load_folds as load_folds
from isthmus.corpora import load_letor as load_letor
from isthmus.errors import ConfigError as ConfigError
from isthmus.errors import DataError as DataError
from isthmus.errors import IsthmusError as IsthmusError
from isthmus.evaluation import Measure as Measure
from isthmus.evaluation import compare as compare
from isthmus.evaluation import evaluate as evaluate
from isthmus.fusion import fuse as fuse
from isthmus.randomness import Streams as Streams
from isthmus.retrieval import BM25 as BM25
from isthmus.tables import Corpus as Corpus
from isthmus.tables import Letor as Letor
from isthmus.tables import Qrels as Qrels
from isthmus.tables import Run as Run
from isthmus.tables import read_letor as read_letor
from isthmus.tables import read_qrels as read_qrels
from isthmus.tables import read_queries as read_queries
from isthmus.tables import read_run as read_run
from isthmus.tables import write_qrels as write_qrels
from isthmus.tables import write_run as write_run
