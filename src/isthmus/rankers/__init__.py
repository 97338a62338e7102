"""Rankers: linear and MLP in NumPy, their losses' training, feature scaling, and gradient-boosted trees."""

from isthmus.rankers.lessons import Lesson
from isthmus.rankers.networks import CENTRAL, MLP, Linear, Scoring, scores_of
from isthmus.rankers.ranker import Ranker, Saved, load_ranker
from isthmus.rankers.scaling import SCALINGS, Scaling, ScalingStats
from isthmus.rankers.training import (
    Descent,
    LocalTraining,
    Parameters,
    Trained,
    initial_parameters,
    network_scores,
    one_blas_thread,
    train_epochs,
)
from isthmus.rankers.trees import LambdaMART
