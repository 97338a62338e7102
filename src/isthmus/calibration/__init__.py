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
from isthmus.calibration.decisions import (
    ThresholdCurve,
    abstain,
    expected_relevant,
    score_histogram,
    threshold_for,
    threshold_plot,
)
from isthmus.calibration.estimator import Calibrator
from isthmus.calibration.query_feature import FEATURES, QueryFeature, list_features
from isthmus.calibration.runs import (
    CALIBRATORS,
    Judging,
    PerPart,
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
