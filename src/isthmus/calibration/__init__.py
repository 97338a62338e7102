"""From scores to probabilities: calibrators, their federated fitting, and `calibrate(run, …) -> Run`."""

from isthmus.calibration.curves import (
    Beta,
    BetaCDF,
    BinnedIsotonic,
    Gamma,
    Gaussian,
    Isotonic,
    Platt,
    SumCalibrator,
    Temperature,
)
from isthmus.calibration.decisions import ThresholdCurve, abstain, expected_relevant, threshold_for
from isthmus.calibration.estimator import Calibrator
from isthmus.calibration.figures import score_histogram, threshold_plot
from isthmus.calibration.parts import PerPart
from isthmus.calibration.query_feature import FEATURES, QueryFeature, list_features
from isthmus.calibration.runs import (
    CALIBRATORS,
    Judging,
    calibrate,
    calibrator_named,
    cross_fit,
    fit_calibrator,
    probabilities_of,
    query_folds,
)
from isthmus.calibration.saving import load_calibrator, save_calibrator
from isthmus.calibration.softmax import Softmax
from isthmus.calibration.sums import Ask, Pairs, Question
