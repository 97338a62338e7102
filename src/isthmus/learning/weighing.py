"""Weights of the silos' judgements, if silos let each other's models be examined.

Every silo fits a model to its own judgements. Every other silo ranks its own judged queries with it and
reports the mean error, fold by fold. The library's FedRisk rule turns these errors into weights: that of a
silo falls to 0 if its model is of no use to any other silo.
"""

from __future__ import annotations

import numpy as np

from isthmus.asking import Silos
from isthmus.federation import FedRisk, Size, StrategyOptions, Weighed, weigh
from isthmus.learning.columns import COLUMNS
from isthmus.learning.questions import CrossExamination, OwnModel, collected

RULE = StrategyOptions(risk=FedRisk(errors="ndcg", formula="georisk", by_size=False, past=0.0, memory=False))


def cross_examined(silos: Silos, fit: OwnModel, folds: int) -> Weighed:
    """Return the silos' weights, 1 for the median one and at most 1, and their risks."""
    models = collected(silos, fit, len(COLUMNS), shows="the weights of a model of its own judgements")
    names = sorted(models)
    question = CrossExamination(fit.centre, fit.scale, np.stack([models[name] for name in names]))
    size = (len(names) + 1) * folds
    reports = collected(silos, question, size, shows="mean errors of silos' models on its judged queries")
    columns = []
    for judge, report in reports.items():
        sums = report.reshape(len(names) + 1, folds)
        errors = np.clip(sums[:-1, sums[-1] > 0] / sums[-1, sums[-1] > 0], 0.0, 1.0)
        own = names.index(judge)
        others = np.delete(errors, own, axis=0)
        errors[own] = others.mean(axis=0)  # a silo does not judge its own model: it gets the others' mean
        columns.append(errors)
    table = np.concatenate(columns, axis=1)
    weighed = weigh(dict(zip(names, table, strict=True)), dict.fromkeys(names, Size(1.0)), RULE)
    typical = float(np.median(list(weighed.weights.values())))
    weights = {name: min(1.0, weight / typical) for name, weight in weighed.weights.items()}
    return Weighed(weights, weighed.risks)
