"""LambdaMART through LightGBM or XGBoost (extra `trees`): the reference with which networks are compared."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np

from isthmus.errors import ConfigError, DataError, MissingExtra
from isthmus.rankers.ranker import Ranker, Saved, Scores, check_width
from isthmus.rankers.training import TrainingRows
from isthmus.tables import Letor

Library = Literal["lightgbm", "xgboost"]
_SAVED = ("library", "trees", "learning_rate", "depth", "options")
_TEXTS = {"lightgbm": "model.txt", "xgboost": "model.json"}


class LambdaMART(Ranker):
    """Gradient-boosted trees on LambdaRank's gradients.

    >>> LambdaMART(library="xgboost").fit(train, validation=validation).rank(test)   # doctest: +SKIP

    `options` are passed to the library unchanged and take precedence over the settings here. With validation
    data, training stops `patience` trees after the best nDCG@10 and keeps the trees up to there. It uses one
    thread by default, so that the same data give the same trees.
    """

    kind: ClassVar[str] = "lambdamart"
    model_: Any
    """The library's own booster."""
    width_: int

    def __init__(
        self,
        *,
        library: Library = "lightgbm",
        trees: int = 300,
        learning_rate: float = 0.05,
        depth: int = 4,
        patience: int = 30,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if library not in _TEXTS:
            raise ConfigError(f"no tree library {library!r}", key=library, value=library, known=_TEXTS)
        self.library: Library = library
        self.trees = trees
        self.learning_rate = learning_rate
        self.depth = depth
        self.patience = patience
        self.options = dict(options)

    def fit(self, letor: Letor, *, validation: Letor | None = None) -> Self:
        """Train on judged lists; with `validation`, stop at its best nDCG@10."""
        check_trainable(letor)
        train = self._fit_lightgbm if self.library == "lightgbm" else self._fit_xgboost
        self.model_, self.width_ = train(letor, validation), letor.width
        return self

    def score(self, letor: Letor) -> Scores:
        """Return one score per row; larger is better."""
        if not hasattr(self, "model_"):
            raise DataError("this ranker has not been trained", cure="call fit, or load a saved one")
        check_width(letor, self.width_)
        if not letor.rows:
            return np.zeros(0)
        if self.library == "lightgbm":
            return np.asarray(self.model_.predict(letor.features, num_threads=1), np.float64)
        return np.asarray(self.model_.inplace_predict(letor.features), np.float64)

    def saved(self) -> Saved:
        """Return the library's own text, with a header."""
        text = self.model_.model_to_string() if self.library == "lightgbm" else _as_json(self.model_)
        about = {"library_version": tree_library(self.library).__version__, "width": self.width_}
        header = {"kind": self.kind, **{name: getattr(self, name) for name in _SAVED}, **about}
        return Saved(header, texts={_TEXTS[self.library]: text})

    @classmethod
    def from_saved(cls, saved: Saved) -> Self:
        """Restore the ranker from `saved`."""
        header = saved.header
        ranker = cls(**{name: header[name] for name in _SAVED})
        return ranker.with_model(saved.texts[_TEXTS[ranker.library]], int(header["width"]))

    def with_model(self, text: str, width: int) -> Self:
        """Return a ranker with these settings and the trees of the library's model text."""
        ranker = copy(self)
        library = tree_library(self.library)
        lightgbm = self.library == "lightgbm"
        failure = library.basic.LightGBMError if lightgbm else library.core.XGBoostError
        try:
            if lightgbm:
                ranker.model_ = library.Booster(model_str=text)
            else:
                ranker.model_ = library.Booster({"nthread": 1}, model_file=bytearray(text.encode()))
        except failure as error:
            raise DataError(f"the {self.library} model inside cannot be read", text=str(error)) from error
        ranker.width_ = width
        return ranker

    def xgboost_parameters(self) -> dict[str, Any]:
        """Return the parameters for `xgboost.train`, here and in every silo of a federation."""
        return {
            "objective": "rank:ndcg",
            "tree_method": "hist",
            "eval_metric": "ndcg@10",
            "max_depth": self.depth,
            "eta": self.learning_rate,
            "nthread": 1,
            "seed": 0,
            **self.options,
        }

    def _fit_xgboost(self, letor: Letor, validation: Letor | None) -> Any:
        library = tree_library("xgboost")
        watched = [] if validation is None else [(xgboost_matrix(validation), "validation")]
        model = library.train(
            self.xgboost_parameters(),
            xgboost_matrix(letor),
            num_boost_round=self.trees,
            evals=watched,
            early_stopping_rounds=self.patience if watched else None,
            verbose_eval=False,
        )
        return model[: model.best_iteration + 1] if watched else model

    def _fit_lightgbm(self, letor: Letor, validation: Letor | None) -> Any:
        library = tree_library("lightgbm")
        parameters = {
            "objective": "lambdarank",
            "metric": "ndcg",
            "eval_at": [10],
            "num_leaves": 2**self.depth - 1,
            "learning_rate": self.learning_rate,
            "min_data_in_leaf": 50,
            "num_threads": 1,
            "deterministic": True,
            "force_row_wise": True,
            "verbose": -1,
            "seed": 0,
            **self.options,
        }
        weights = letor.weights if isinstance(letor, TrainingRows) else None
        data = library.Dataset(
            letor.features, letor.grades, group=_group_sizes(letor), weight=weights, free_raw_data=True
        )
        watched, callbacks = [], []
        if validation is not None:
            sizes = _group_sizes(validation)
            watched = [data.create_valid(validation.features, validation.grades, group=sizes)]
            callbacks = [library.early_stopping(self.patience, verbose=False)]
        return library.train(parameters, data, self.trees, valid_sets=watched, callbacks=callbacks)


def tree_library(name: str) -> Any:
    """Import LightGBM or XGBoost; MissingExtra if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra("trees", f"LambdaMART through {name}") from error


def xgboost_matrix(letor: Letor) -> Any:
    """Convert the table, lists included, to XGBoost's training matrix.

    XGBoost has one weight per list: the mean of its rows' weights.
    """
    library, sizes, weights = tree_library("xgboost"), _group_sizes(letor), None
    if isinstance(letor, TrainingRows) and letor.weights is not None:
        sums = np.bincount(letor.query_of_row, letor.weights, len(letor))
        weights = sums[np.diff(letor.offsets) > 0] / sizes
    return library.DMatrix(letor.features, label=letor.grades, weight=weights, group=sizes, nthread=1)


def check_trainable(letor: Letor) -> None:
    """Raise DataError unless queries are whole, for LambdaMART, and grades 0..31, for both libraries."""
    if letor.torn:
        raise DataError(
            "LambdaMART compares the documents of a query, and these queries are torn between silos",
            cure="deal whole queries",
        )
    if letor.rows and not 0 <= letor.grades.min() <= letor.grades.max() <= 31:
        raise DataError(
            f"grades {letor.grades.min()}..{letor.grades.max()} where LambdaMART takes 0..31",
            cure="map negative grades to 0",
        )


def _group_sizes(letor: Letor) -> Any:
    sizes = np.diff(letor.offsets)
    return sizes[sizes > 0]


def _as_json(model: Any) -> str:
    return bytes(model.save_raw(raw_format="json")).decode()
