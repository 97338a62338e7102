"""Measures as values, and what they say about a run."""

from isthmus.evaluation.measures import FAMILIES, PROFILES, Measure
from isthmus.evaluation.propensity import Propensity
from isthmus.evaluation.results import Evaluation, evaluate, evaluate_rows

__all__ = ["FAMILIES", "PROFILES", "Evaluation", "Measure", "Propensity", "evaluate", "evaluate_rows"]
