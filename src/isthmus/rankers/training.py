"""Networks and their training in NumPy: weighted rows, forward and backward passes, optimisers, mini-batches.

`TrainingRows` is a table of training rows with weights, and with grades that may be estimates: some were
judged, others were predicted by a model. A row's weight multiplies its part of the gradient. A row of
`targets` has a probability for every grade and replaces the grade in a pointwise loss: the expected grade for
`squared_error`, the whole distribution for `cross_entropy`. Losses over lists read the grades.

A network is its parameters: `weight0, bias0, weight1, …` as named float32 arrays, with ReLU between the
layers; without a hidden layer it is the linear ranker. During training all parameters lie in one flat vector,
so that an optimiser's step is a handful of vector operations, and buffers are allocated once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import Ids, frozen
from isthmus.errors import ConfigError, DataError
from isthmus.losses import Loss, loss_named, risk_weights
from isthmus.rankers.ranker import check_width
from isthmus.tables import Letor, group, offsets_of, rows_of

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class TrainingRows(Letor):
    """Feature rows with grades; optionally with `weights` of shape (rows,) and `targets` (rows, grades)."""

    weights: Floats | None = None
    targets: Floats | None = None

    @classmethod
    def of_letor(
        cls, letor: Letor, *, weights: NDArray[Any] | None = None, targets: NDArray[Any] | None = None
    ) -> TrainingRows:
        """Return the table with these weights and targets."""
        for name, column in (("weights", weights), ("targets", targets)):
            if column is not None and len(column) != letor.rows:
                raise DataError(f"{len(column)} {name} for {letor.rows} rows")
        plain = {known.name: getattr(letor, known.name) for known in fields(Letor)}
        return cls(**plain, weights=_column(weights), targets=_column(targets))

    @classmethod
    def joined(cls, parts: Sequence[TrainingRows]) -> TrainingRows:
        """Join the rows of all parts; rows of one query are in the order of the parts. The table is torn if a
        part is."""
        names = Ids.concat([part._query_column for part in parts])
        queries, groups, _ = group(names)
        order = np.argsort(groups, kind="stable")
        several = np.concatenate
        weights = [np.ones(part.rows) if part.weights is None else part.weights for part in parts]
        guessed = [part.targets for part in parts if part.targets is not None]
        targets = several(guessed)[order] if len(guessed) == len(parts) else None
        return cls(
            queries,
            offsets_of(groups, len(queries)),
            frozen(several([part.features for part in parts])[order]),
            frozen(several([part.grades for part in parts])[order]),
            Ids.concat([part.ids for part in parts])[order],
            torn=any(part.torn for part in parts),
            weights=_column(several(weights)[order]),
            targets=_column(targets),
        )

    def labels(self, rows: NDArray[np.int64], *, graded: bool) -> NDArray[Any]:
        """Return the values with which a pointwise loss compares the scores of some rows."""
        if self.targets is None:
            return self.grades[rows]
        probabilities: NDArray[Any] = self.targets[rows]
        return (
            probabilities if graded else probabilities @ np.arange(probabilities.shape[1], dtype=np.float32)
        )

    def _take(self, rows: NDArray[Any]) -> TrainingRows:
        weights, targets = (
            None if column is None else frozen(column[rows]) for column in (self.weights, self.targets)
        )
        return replace(cast(TrainingRows, super()._take(rows)), weights=weights, targets=targets)


def _column(values: NDArray[Any] | None) -> Floats | None:
    return None if values is None else frozen(np.asarray(values, dtype=np.float32))


Array = NDArray[np.float32]
Parameters = dict[str, Array]
Observer = Callable[[Array, NDArray[np.int32]], None]

OPTIMISERS = ("sgd", "momentum", "adam")
_CHUNK = 1024  # rows scored together: the activations stay in cache


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """Options of training on the data of one party; the same for a silo's round and for a central fit."""

    loss: str = "lambdarank"
    optimiser: str = "adam"
    learning_rate: float = 1e-3
    epochs: int = 1
    batch: int | None = None
    """Number of rows in a mini-batch for a pointwise loss (None: 256), of queries for others (None: 16)."""
    momentum: float = 0.9
    """Momentum of the optimiser `momentum`; Adam's first decay rate is 0.9."""
    weight_decay: float = 0.0
    """Decoupled weight decay: every step first shrinks the parameters by learning_rate × weight_decay."""
    proximal: float = 0.0
    """FedProx's μ: adds μ (θ − θ_start) to the gradient."""
    sigma: float | None = None
    truncation: int | None = None
    baseline: int | None = None
    """For a `risk-` loss, the feature (from 1) by which the baseline ranks; negative: smaller is better."""
    alpha: float = 1.0
    """For a `risk-` loss: a query below the baseline counts 1 + alpha times."""

    def __post_init__(self) -> None:
        if self.optimiser not in OPTIMISERS:
            raise ConfigError(f"no optimiser {self.optimiser!r}", key=self.optimiser, known=OPTIMISERS)
        for key in ("learning_rate", "epochs", "batch"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ConfigError(f"{key} = {value} must be above 0", key=key, value=value)
        if self.resolved_loss().at_risk != bool(self.baseline) or not self.alpha >= 0:
            risky = "a feature's number beside a risk- loss, none beside another, and alpha from 0"
            raise ConfigError(
                f"loss = {self.loss!r} with baseline = {self.baseline}, alpha = {self.alpha:g}",
                key="baseline",
                value=self.baseline,
                expected=risky,
            )

    def resolved_loss(self) -> Loss:
        """Return the loss with this configuration's options."""
        options = {"sigma": self.sigma, "truncation": self.truncation}
        return loss_named(self.loss, **{key: value for key, value in options.items() if value is not None})

    def batch_size(self) -> int:
        """Return the number of rows or queries in a mini-batch."""
        return self.batch or (16 if self.resolved_loss().whole_queries else 256)


class Trained(NamedTuple):
    """The result of local training."""

    parameters: Parameters
    steps: int
    loss: float
    """Mean over the last epoch, each batch measured before its step; not finite if training diverged."""


def initial_parameters(
    inputs: int, hidden: Sequence[int], outputs: int, rng: np.random.Generator
) -> Parameters:
    """Draw He-normal weights for the hidden layers and small ones for the last; biases are zero."""
    sizes = [inputs, *hidden, outputs]
    parameters: Parameters = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        spread = np.sqrt((2 if layer < len(hidden) else 0.01) / fan_in)
        parameters[f"weight{layer}"] = rng.normal(0, spread, (fan_in, fan_out)).astype(np.float32)
        parameters[f"bias{layer}"] = np.zeros(fan_out, np.float32)
    return parameters


def train_epochs(
    parameters: Mapping[str, Array],
    data: Letor,
    config: LocalTraining,
    rng: np.random.Generator,
    *,
    correction: Mapping[str, Array] | None = None,
    observe: Observer | None = None,
) -> Trained:
    """Train from these parameters on (already scaled) data; the given arrays are unchanged.

    `correction` is added to every gradient (SCAFFOLD's c − c_k); `observe(scores, grades)` is called for
    every mini-batch before its step. The optimiser starts without state.
    """
    descent = Descent(parameters, config, correction=correction, observe=observe)
    loss = 0.0
    for _ in range(config.epochs):
        loss = descent.epoch(data, rng)
    return Trained(descent.parameters(), descent.steps, loss)


def network_scores(parameters: Mapping[str, Array], features: Array) -> Array:
    """Return the network's outputs for (already scaled) rows, one column per output."""
    network = _Network(parameters, min(_CHUNK, len(features)))
    scores = np.empty((len(features), network.outputs), np.float32)
    with one_blas_thread():
        for start in range(0, len(features), _CHUNK):
            scores[start : start + _CHUNK] = network.forward(features[start : start + _CHUNK])
    return scores


class Descent:
    """Gradient descent on one network; the optimiser's state persists from epoch to epoch."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        config: LocalTraining,
        *,
        correction: Mapping[str, Array] | None = None,
        observe: Observer | None = None,
    ) -> None:
        self._network = _Network(parameters)
        self._config = config
        self._loss = config.resolved_loss()
        self._optimiser = _Optimiser(self._network.flat, config)
        self._start = self._network.flat.copy() if config.proximal else None
        self._correction = None if correction is None else _flatten(correction, parameters)
        self._observe = observe
        self.steps = 0

    def parameters(self) -> Parameters:
        """Return a copy of the current parameters."""
        return self._network.parameters()

    def epoch(self, data: Letor, rng: np.random.Generator) -> float:
        """Pass over the data once in random order, and return the mean loss."""
        _check_fits(self._network, self._loss, data)
        total, weight = 0.0, 0
        # A diverging run shows in its loss and parameters; a warning per operation would not help.
        with one_blas_thread(), np.errstate(over="ignore", invalid="ignore"):
            for rows, offsets in self._batches(data, rng):
                value = self._step(data, rows, offsets)
                size = len(offsets) - 1 if self._loss.whole_queries else len(rows)
                total, weight = total + value * size, weight + size
        return total / max(1, weight)

    def _batches(
        self, data: Letor, rng: np.random.Generator
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        size = self._config.batch_size()
        if not self._loss.whole_queries:
            order = rng.permutation(data.rows)
            nothing = np.zeros(1, np.int64)
            for start in range(0, len(order), size):
                yield order[start : start + size], nothing
            return
        order = rng.permutation(len(data))
        rows = rows_of(data.offsets, order)
        bounds = np.concatenate(([0], np.cumsum(np.diff(data.offsets)[order])))
        for start in range(0, len(order), size):
            offsets = bounds[start : start + size + 1]
            if offsets[-1] > offsets[0]:
                yield rows[offsets[0] : offsets[-1]], offsets - offsets[0]

    def _step(self, data: Letor, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> float:
        network = self._network
        batch = network.gather(data.features, rows)
        outputs = network.forward(batch)
        scores = outputs if self._loss.graded else outputs[:, 0]
        if self._observe is not None:
            self._observe(scores, data.grades[rows])
        value, slope = self._loss.function(scores, self._labels(data, rows), offsets)
        if self._loss.at_risk:
            slope *= np.repeat(self._risk_weights(data, rows, scores, offsets), np.diff(offsets))
        if isinstance(data, TrainingRows) and data.weights is not None:
            slope *= data.weights[rows].reshape(-1, *[1] * (slope.ndim - 1))
        network.backward(batch, slope.reshape(outputs.shape, order="A"))
        if self._start is not None:
            network.gradient += self._config.proximal * (network.flat - self._start)
        if self._correction is not None:
            network.gradient += self._correction
        self._optimiser.step(network.gradient)
        self.steps += 1
        return value

    def _risk_weights(
        self, data: Letor, rows: NDArray[np.int64], scores: Array, offsets: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Return the weight of every query of the batch, by comparison with the baseline's feature."""
        feature = self._config.baseline or 0
        if abs(feature) > data.width:
            raise DataError(
                f"feature {abs(feature)} cannot be the baseline of rows with {data.width}",
                cure=f"local.baseline from 1 to {data.width}",
            )
        baseline = np.sign(feature) * data.features[rows, abs(feature) - 1]
        return risk_weights(scores, data.grades[rows], offsets, baseline, alpha=self._config.alpha)

    def _labels(self, data: Letor, rows: NDArray[np.int64]) -> NDArray[Any]:
        if isinstance(data, TrainingRows) and not self._loss.whole_queries:
            return data.labels(rows, graded=self._loss.graded)
        return data.grades[rows]


class _Network:
    """Parameters in one flat vector, their gradient in another, and the buffers between them."""

    def __init__(self, parameters: Mapping[str, Array], rows: int = 0) -> None:
        self._shapes = {name: value.shape for name, value in parameters.items()}
        self.flat = _flatten(parameters, parameters)
        self.gradient = np.empty_like(self.flat)
        layers = range(len(parameters) // 2)
        values, slopes = self._views(self.flat), self._views(self.gradient)
        self._weights = [values[f"weight{layer}"] for layer in layers]
        self._biases = [values[f"bias{layer}"] for layer in layers]
        self._weight_slopes = [slopes[f"weight{layer}"] for layer in layers]
        self._bias_slopes = [slopes[f"bias{layer}"] for layer in layers]
        self.inputs, self.outputs = self._weights[0].shape[0], self._weights[-1].shape[1]
        self._reserve(rows)

    def parameters(self) -> Parameters:
        """Return a copy of the parameters, by name."""
        return {name: view.copy() for name, view in self._views(self.flat).items()}

    def gather(self, features: Array, rows: NDArray[np.int64]) -> Array:
        """Return the chosen rows, in a buffer that the next call overwrites."""
        self._reserve(len(rows))
        batch = self._batch[: len(rows)]
        return np.take(features, rows, axis=0, out=batch, mode="clip")  # "clip" spares a second buffer

    def forward(self, features: Array) -> Array:
        """Return one column per output, stored column by column; the next call overwrites them."""
        rows, below = len(features), features
        self._reserve(rows)
        for weight, bias, buffer in zip(self._weights[:-1], self._biases[:-1], self._hidden, strict=True):
            below = np.matmul(below, weight, out=buffer[:rows])
            below += bias
            np.maximum(below, 0, out=below)
        outputs = np.matmul(self._weights[-1].T, below.T, out=self._outputs[:, :rows])
        outputs += self._biases[-1][:, None]
        return outputs.T

    def backward(self, features: Array, slope: Array) -> None:
        """Fill `gradient` from the derivative of the loss by the outputs of the last forward pass."""
        rows = len(features)
        for layer in reversed(range(len(self._weights))):
            below = self._hidden[layer - 1][:rows] if layer else features
            np.matmul(below.T, slope, out=self._weight_slopes[layer])
            np.matmul(self._ones[:rows], slope, out=self._bias_slopes[layer])
            if layer:
                slope = np.matmul(slope, self._weights[layer].T, out=self._slopes[layer - 1][:rows])
                slope *= np.greater(below, 0, out=self._active[layer - 1][:rows])

    def _reserve(self, rows: int) -> None:
        if rows <= getattr(self, "_room", 0):
            return
        self._room = rows
        self._batch = np.empty((rows, self.inputs), np.float32)
        self._ones = np.ones(rows, np.float32)
        sizes = [weight.shape[1] for weight in self._weights[:-1]]
        self._hidden = [np.empty((rows, size), np.float32) for size in sizes]
        self._slopes = [np.empty((rows, size), np.float32) for size in sizes]
        self._active = [np.empty((rows, size), np.bool_) for size in sizes]
        self._outputs = np.empty((self.outputs, rows), np.float32)

    def _views(self, flat: Array) -> Parameters:
        views, start = {}, 0
        for name, shape in self._shapes.items():
            size = math.prod(shape)
            views[name] = flat[start : start + size].reshape(shape)
            start += size
        return views


class _Optimiser:
    """SGD, momentum or Adam (Kingma & Ba 2015, Algorithm 1) on a flat vector, in place."""

    def __init__(self, flat: Array, config: LocalTraining) -> None:
        self._flat, self._config = flat, config
        self._velocity = np.zeros_like(flat)
        self._squares = np.zeros_like(flat)
        self._scratch = np.empty_like(flat)
        self._steps = 0

    def step(self, gradient: Array) -> None:
        """Move the parameters; overwrites the gradient."""
        rate, kind = self._config.learning_rate, self._config.optimiser
        self._steps += 1
        if self._config.weight_decay:
            self._flat *= np.float32(1 - rate * self._config.weight_decay)
        if kind == "adam":
            self._adam(gradient, rate)
            return
        if kind == "momentum":
            self._velocity *= np.float32(self._config.momentum)
            self._velocity += gradient
            np.multiply(self._velocity, np.float32(rate), out=gradient)
        else:
            gradient *= np.float32(rate)
        self._flat -= gradient

    def _adam(self, gradient: Array, rate: float, first: float = 0.9, second: float = 0.999) -> None:
        scratch = self._scratch
        self._velocity *= np.float32(first)
        self._velocity += np.multiply(gradient, np.float32(1 - first), out=scratch)
        self._squares *= np.float32(second)
        gradient *= gradient
        gradient *= np.float32(1 - second)
        self._squares += gradient
        # The two bias corrections, folded into the rate and into epsilon.
        correction = float(np.sqrt(1 - second**self._steps))
        np.sqrt(self._squares, out=scratch)
        scratch += np.float32(1e-8 * correction)
        np.divide(self._velocity, scratch, out=scratch)
        scratch *= np.float32(rate * correction / (1 - first**self._steps))
        self._flat -= scratch


def _flatten(parameters: Mapping[str, Array], names: Iterable[str]) -> Array:
    return np.concatenate([np.asarray(parameters[name], np.float32).ravel() for name in names])


def _check_fits(network: _Network, loss: Loss, data: Letor) -> None:
    check_width(data, network.inputs)
    if loss.whole_queries and data.torn:
        raise DataError(
            f"{loss.name} compares the documents of a query, and these queries are torn between silos",
            cure="deal whole queries, or choose a pointwise loss: squared_error, cross_entropy",
        )
    if loss.graded and data.rows and not 0 <= data.grades.min() <= data.grades.max() < network.outputs:
        grades, known = f"{data.grades.min()}..{data.grades.max()}", f"0..{network.outputs - 1}"
        raise DataError(
            f"grades {grades} where the ranker has outputs for {known}",
            cure="give the number of grades of the whole federation, counted from 0",
        )
    if not loss.graded and network.outputs != 1:
        raise ConfigError(f"the loss {loss.name} needs one output and the ranker has {network.outputs}")


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


class _Users:
    """Number of threads that need BLAS limited to one thread, which is a setting of the whole process."""

    def __init__(self) -> None:
        self.lock, self.count = Lock(), 0
        self.limit: Any = None


_USERS = _Users()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread: matrices this small lose with two, and results stay the same on any machine.

    The limit applies to the whole process, so the first to enter sets it and the last to leave restores it.
    """
    with _USERS.lock:
        _USERS.count += 1
        if _USERS.count == 1:
            _USERS.limit = _blas().limit(limits=1)
    try:
        yield
    finally:
        with _USERS.lock:
            _USERS.count -= 1
            if not _USERS.count:
                _USERS.limit.restore_original_limits()
