"""Rankers: linear and MLP in NumPy, their losses' training, feature scaling, and gradient-boosted trees."""

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

__all__ = [
    "SCALINGS",
    "Descent",
    "LocalTraining",
    "Parameters",
    "Scaling",
    "ScalingStats",
    "Trained",
    "initial_parameters",
    "network_scores",
    "one_blas_thread",
    "train_epochs",
]
