"""Measures as values, what they say about runs and probabilities, and how sure that is."""

from isthmus.evaluation.comparison import Comparison, Testing, compare
from isthmus.evaluation.measures import FAMILIES, PROFILES, Measure
from isthmus.evaluation.probability import (
    Reliability,
    base_rate,
    brier,
    brier_skill,
    calibration,
    calibration_of,
    ece,
    log_loss,
    mce,
    outcomes_of,
    reliability,
    reliability_diagram,
    top_ece,
)
from isthmus.evaluation.propensity import Propensity
from isthmus.evaluation.results import Evaluation, evaluate, evaluate_rows
from isthmus.evaluation.statistics import Interval, bootstrap, holm, paired_t, randomisation
