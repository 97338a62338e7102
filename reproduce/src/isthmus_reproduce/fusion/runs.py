"""One fold of text classification by retrieval: the paper's two retrievers and the default stack.

Each function is a unit of work whose result is JSON. Results are measured on the test part; measures by which
a configuration is chosen come from the validation part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray
from isthmus.calibration import calibrate, fit_calibrator, probabilities_of
from isthmus.classification import Encoded, Panel, as_run, out_of_fold, same_text
from isthmus.errors import DataError
from isthmus.evaluation import Propensity, evaluate, log_loss, per_query_rows, reliability
from isthmus.fusion import FUSERS, Candidates, Formula, Stacked, fuse
from isthmus.partition import folds
from isthmus.randomness import Streams
from isthmus.retrieval import shaped
from isthmus.tables import Qrels, Run
from isthmus_reproduce.fusion.folds import LabelFold, Part, label_fold
from isthmus_reproduce.fusion.hypotheses import calibrated_edges, hypotheses
from isthmus_reproduce.fusion.panels import (
    DENSE,
    LINEAR,
    OTHER_DENSE,
    PRINTED_SPARSE,
    SPARSE,
    default_panel,
    encoder,
    paper_panel,
)
from isthmus_reproduce.fusion.tuned import WITHOUT_TUNED, fold_folder, weigh

MEASURES = tuple(f"{name}@{depth}" for name in ("P", "nDCG", "psP", "psnDCG") for depth in (1, 5, 10))
PER_QUERY = ("P@1", "nDCG@10")
"""Measures stored for single texts, for the default and the linear model."""
NORMS = {"none": "none", "minmax": "min-max", "zmuv": "z-score"}
FUSIONS = {
    "CombMNZ": "comb-mnz",
    "CombMNZ-Conf": "comb-mnz-conf",
    "CombMULT-Conf": "comb-mult-conf",
    "CombMNZ-Variant": "comb-mnz-variant",
}
POSITIONS = {"UDLF-RLSIM": "rl-sim", "eq. (15)": "rlsim-eq15"}
"""Fusions that use positions only: RL-Sim, and the formula that the paper prints for it."""
READINGS = {
    SPARSE: "BM25 of training texts (code)",
    PRINTED_SPARSE: "BM25 of label texts (print)",
    "cosine": "dense, inner product (print)",
    "inverse_distance": "dense, 1/d² (code)",
}
CALIBRATORS = {
    "paper": {"Platt": "platt", "Isotonic": "isotonic-binned", "QueryFeature": "query-feature-unconstrained"},
    "sound": {"Platt": "platt", "Isotonic": "isotonic-binned", "QueryFeature": "query-feature"},
}
PAPER_BINS, BINS = 10, 15
OUT_OF_FOLD, OUT_OF_FOLD_MANY = 5, 3
"""Parts for out-of-fold predictions; fewer with many labels, each with a classifier of its own."""
PARTS = ("all", "head", "tail")
DEPTH = 32
"""Labels per list and partition, as in the paper's code."""


class Way(NamedTuple):
    """A configuration: calibration, fusion and normalisation of scores."""

    calibration: str
    fusion: str
    norm: str


@dataclass(frozen=True, eq=False)
class LabelLists:
    """Lists of every retriever, with their judgements."""

    runs: tuple[Run, ...]
    qrels: Qrels

    def __bool__(self) -> bool:
        return bool(len(self.qrels))


def two_retrievers(data: str, fold: int, mode: str, seed: int = 0, most: int | None = None) -> dict[str, Any]:
    """Run the paper's pipeline on one fold: a record for every calibration, fusion and normalisation.

    `mode="paper"`: a text is ranked only against the labels of the partition (head, tail) that its true label
    is in, one copy of a text per label, a calibrator per partition. `mode="sound"`: all labels compete, one
    pooled calibrator per retriever; head and tail are separated by the true label afterwards.
    """
    chosen = label_fold(data, fold, copies=mode == "paper", seed=seed, most=most)
    if chosen.head.sum() < 2 or (~chosen.head).sum() < 2:
        raise DataError(
            f"{chosen.data} has {len(chosen.documents)} labels, so that head or tail is a single one",
            cure="the paper's protocol needs at least five labels",
        )
    scores = _scores(chosen, mode)
    result: dict[str, Any] = {"metrics": [], "calibration": [], "encoder": scores.pop("encoder")}
    result["sizes"] = _sizes(chosen)
    propensity = Propensity.of_qrels(chosen.train.qrels(chosen.documents))
    fused: dict[Way, dict[str, list[Run]]] = {}
    single: dict[str, list[Run]] = {}
    sure: dict[str, tuple[Run, ...]] = {}
    lists = {
        split: label_lists(chosen, split, scores[split], oracle_partition=mode == "paper")
        for split in ("validation", "test")
    }
    for part, validation in lists["validation"].items():
        test = lists["test"][part]
        if not validation or not test:
            continue
        for name, run in _readings(test.runs, mode):
            single.setdefault(name, []).append(run)
        validation, test = (replace(each, runs=_main(each.runs)) for each in (validation, test))
        positions = _by_position(validation, test) if mode == "sound" else {}
        for name, (on_validation, on_test) in _calibrated(validation, test, mode):
            result["calibration"] += _errors(name, part, on_test, test.qrels)
            sure |= {name: on_test} if mode == "sound" and name != "base" else {}
            for split, runs in (("validation", on_validation), ("test", on_test)):
                if runs:
                    ways = {**dict(_fused(name, runs, shift=mode == "sound"))}
                    ways |= {
                        (fusion, "none" if name == "base" else "zmuv"): positions.get((fusion, split))
                        or fuse([_as_scores(run) for run in runs], formula)
                        for fusion, formula in POSITIONS.items()
                    }
                    for (fusion, norm), run in ways.items():
                        fused.setdefault(Way(name, fusion, norm), {}).setdefault(split, []).append(run)
    judged = {(split, part): _judged(chosen, split, part) for split in lists for part in PARTS}
    for way, splits in fused.items():
        for split, parts in splits.items():
            run = Run.concat(parts)
            for part in PARTS:
                if qrels := judged[split, part]:
                    means = dict(evaluate(qrels, run, MEASURES, propensity=propensity).means)
                    record = {**way._asdict(), "split": split, "part": part, "means": means}
                    result["metrics"].append(record)
    result["hypotheses"] = {
        name: hypotheses(runs, *_plain_and_weighed(fused, name), judged["test", "all"])
        | calibrated_edges(runs, judged["test", "all"])
        for name, runs in sure.items()
    }
    result["readings"] = {
        name: dict(evaluate(judged["test", "all"], Run.concat(parts), ["P@1", "nDCG@10"]).means)
        for name, parts in single.items()
    }
    return result


def _plain_and_weighed(fused: dict[Way, dict[str, list[Run]]], calibration: str) -> tuple[Run, Run]:
    """Return the test part fused without and with confidences."""
    plain, weighed = Way("base", "CombMNZ", "zmuv"), Way(calibration, "CombMNZ-Conf", "zmuv")
    return fused[plain]["test"][0], fused[weighed]["test"][0]


def _sizes(fold: LabelFold) -> list[float]:
    """Return Table I: texts, labels, labels a text."""
    parts = (fold.train, fold.validation, fold.test)
    texts = sum(map(len, parts))
    return [texts, len(fold.documents), sum(int(part.labels.sum()) for part in parts) / texts]


def _main(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Return the runs of the two retrievers in the tables."""
    return tuple(run for run in runs if run.name in (SPARSE, DENSE))


def _readings(runs: tuple[Run, ...], mode: str) -> Iterator[tuple[str, Run]]:
    """Yield each reading of each retriever alone, and every pair of a sparse and a dense one by CombMNZ."""
    by_name = {run.name: run for run in runs}
    dense, other = (by_name.pop(name) for name in (DENSE, OTHER_DENSE))
    codes = (dense, other) if mode == "paper" else (other, dense)
    by_name |= dict(zip(("inverse_distance", "cosine"), codes, strict=True))
    for name, run in by_name.items():
        yield READINGS[name], run
    for sparse in (SPARSE, PRINTED_SPARSE):
        for score in ("cosine", "inverse_distance"):
            pair = [by_name[sparse], by_name[score]]
            yield f"{READINGS[sparse]} + {READINGS[score]}", fuse(pair, "comb-mnz", norm="z-score")


def _judged(fold: LabelFold, split: str, part: str) -> Qrels:
    """Return the right labels of a split's texts among those of a partition."""
    texts: Part = getattr(fold, split)
    return texts.qrels(fold.documents, fold.partition(part))


def _scores(fold: LabelFold, mode: str) -> dict[str, Any]:
    """Return both retrievers' scores of the validation and the test part."""
    model, name = encoder(fold.texts)
    panel = Panel(paper_panel(Encoded(model)))
    fitted = panel.fit(fold.train.texts, fold.train.labels, fold.documents)
    scores = {split: fitted.scores(getattr(fold, split).texts) for split in ("validation", "test")}
    if mode == "paper":  # the paper's test index includes the validation texts
        both = fold.train + fold.validation
        sparse = Panel({SPARSE: panel.rankers[SPARSE]}).fit(both.texts, both.labels, fold.documents)
        scores["test"] |= sparse.scores(fold.test.texts)
    for each in scores.values():
        shapes = each[DENSE], shaped(each[DENSE], "inverse_distance")
        each[OTHER_DENSE], each[DENSE] = shapes if mode == "paper" else shapes[::-1]
    return {**scores, "encoder": name}


def label_lists(
    fold: LabelFold, split: str, scores: dict[str, FloatArray], *, oracle_partition: bool = False
) -> dict[str, LabelLists]:
    """Return every retriever's lists of labels for the texts of a split; all labels compete.

    `oracle_partition=True` is the paper's leak: a text is ranked only against the labels of the partition,
    head or tail, that holds its true label, which is unknown beforehand. Its results are not comparable with
    those of lists over all labels.
    """
    parts = ("head", "tail") if oracle_partition else ("all",)
    return {part: _lists(fold, part, split, scores) for part in parts}


def _lists(fold: LabelFold, part: str, split: str, scores: dict[str, FloatArray]) -> LabelLists:
    """Build lists over the labels of one partition, for the texts that belong to it."""
    texts: Part = getattr(fold, split)
    among = fold.partition(part)
    mine: NDArray[np.bool_] = np.any(texts.labels & among, axis=1)
    labels = tuple(label for label, is_among in zip(fold.documents.ids, among, strict=True) if is_among)
    ids = texts.take(mine).ids
    runs = tuple(as_run(ids, labels, matrix[mine][:, among], DEPTH, name) for name, matrix in scores.items())
    return LabelLists(runs, texts.qrels(fold.documents, among))


def _calibrated(
    validation: LabelLists, test: LabelLists, mode: str
) -> Iterator[tuple[str, tuple[tuple[Run, ...], tuple[Run, ...]]]]:
    """Yield per calibration cross-fitted validation runs, and test runs by calibrators fitted on validation.

    In paper mode nothing is chosen on validation, so its runs are left empty.
    """
    sound = mode == "sound"
    yield "base", (validation.runs if sound else (), test.runs)
    for name, method in CALIBRATORS[mode].items():
        on_validation = tuple(
            calibrate(run, method, qrels=validation.qrels) for run in validation.runs if sound
        )
        fitted = [fit_calibrator(run, validation.qrels, method) for run in validation.runs]
        pairs = zip(test.runs, fitted, strict=True)
        yield (
            name,
            (on_validation, tuple(run.with_probabilities(probabilities_of(run, one)) for run, one in pairs)),
        )


def _fused(calibration: str, runs: tuple[Run, ...], *, shift: bool) -> Iterator[tuple[tuple[str, str], Run]]:
    """Yield every fusion and normalisation; fusions without confidences use probabilities as scores.

    Without `shift`, products are of unshifted scores, negative ones too, as the paper prints them.
    """
    replaced = calibration != "base"
    for label, norm in NORMS.items():
        raw = Candidates.of(runs, norm)
        plain = Candidates.of(raw.union, norm, probabilities=True) if replaced else raw
        for fusion, formula in FUSIONS.items():
            candidates = raw if formula.endswith(("conf", "variant")) else plain
            yield (fusion, label), candidates.union.ranked(FUSERS[formula](candidates, shift=shift))


def _by_position(validation: LabelLists, test: LabelLists) -> dict[tuple[str, str], Run]:
    """Return fusions by position, by name and split; they do not depend on calibration and normalisation.

    K, rounds and weights of RL-Sim are chosen on the validation part, whose own lists are cross-fitted.
    """
    runs = {}
    for name, formula in POSITIONS.items():
        chosen = Formula(formula)
        runs[name, "validation"] = chosen.fit_fuse(validation.runs, validation.qrels)
        runs[name, "test"] = chosen.fuse(test.runs)
    return runs


def _as_scores(run: Run) -> Run:
    """Order a run by its probabilities if it has some: the paper's calibrators may change the order."""
    return run if run.probabilities is None else run.with_scores(run.probabilities)


def _errors(name: str, part: str, runs: tuple[Run, ...], qrels: Qrels) -> list[dict[str, Any]]:
    """Return calibration sums of each retriever; the baseline's probability is its min-max score."""
    records = []
    for run in runs:
        probabilities = (
            Candidates.of([run], "min-max").scores[0] if run.probabilities is None else run.probabilities
        )
        right = run.grades(qrels) > 0
        about = {"retriever": run.name, "calibration": name, "part": part}
        records.append({**about, "sums": _honesty(probabilities, right)})
    return records


def _honesty(probabilities: FloatArray, right: NDArray[np.bool_]) -> dict[str, Any]:
    """Return sums that add over folds: reliability bins, squared errors, log-losses."""
    outcome = right.astype(np.float64)
    sums: dict[str, Any] = {"n": len(probabilities), "right": float(outcome.sum())}
    for bins in (PAPER_BINS, BINS):
        bins_of = reliability(probabilities, outcome, bins=bins)
        sums[f"bins{bins}"] = [bins_of.count.tolist(), bins_of.promised.tolist(), bins_of.came_true.tolist()]
    sums["squares"] = float(((probabilities - outcome) ** 2).sum())
    sums["losses"] = log_loss(probabilities, outcome) * len(probabilities)
    return sums


def default_stack(
    data: str, fold: int, seed: int = 0, most: int | None = None, tuned: str | None = None
) -> dict[str, Any]:
    """Run the product's default on one fold: a panel of label rankers, stacked on out-of-fold predictions.

    `tuned` is a folder with an encoder tuned for every fold. The default includes it if the validation part
    favours it, and the default with and without it is reported besides.
    """
    chosen = label_fold(data, fold, seed=seed, most=most)
    seen = chosen.train + chosen.validation
    model, name = encoder(chosen.texts)
    panel = Panel(default_panel(Encoded(model), chosen.texts, single=chosen.single))
    scores = _out_of_fold(panel, seen, chosen, seed)
    fitted = panel.fit(seen.texts, seen.labels, chosen.documents)
    test_scores = fitted.scores(chosen.test.texts)
    qrels = seen.qrels(chosen.documents)
    labels, depth = chosen.documents.ids, len(chosen.documents)
    stacked = Stacked(calibrator="softmax" if chosen.single else "platt", single_label=chosen.single)
    lists = [as_run(seen.ids, labels, scores[one], depth, one) for one in panel.rankers]
    held_out = stacked.fit_fuse(lists, qrels, name="default")
    test = [as_run(chosen.test.ids, labels, test_scores[one], depth, one) for one in panel.rankers]
    fused = stacked.fuse(test, name="default")
    propensity = Propensity.of_qrels(qrels)
    result: dict[str, Any] = {
        "encoder": name,
        "metrics": [],
        "honesty": {},
        "per query": [],
        "retrievers": list(panel.rankers),
    }
    beside: tuple[Run, ...] = ()
    if tuned is not None:
        folder = fold_folder(Path(tuned), data, fold)
        weighed = weigh(chosen, folder, held_out[chosen.validation.ids], fused)
        result["tuned"] = {**weighed.record, "included": weighed.included}
        beside = (*weighed.runs, replace(fused, name=WITHOUT_TUNED))
        fused = replace(weighed.runs[1], name="default") if weighed.included else fused
    by_part = {run.name for run in (fused, *beside)} | {LINEAR}
    for run in (fused, *test, *beside):
        for part in PARTS if run.name in by_part else PARTS[:1]:
            evaluation = evaluate(_judged(chosen, "test", part), run, MEASURES, propensity=propensity)
            result["metrics"].append({"run": run.name, "part": part, "means": dict(evaluation.means)})
            if part == "all" and (run is fused or run.name == LINEAR):
                rows = per_query_rows(evaluation)
                result["per query"] += [row for row in rows if row["measure"] in PER_QUERY]
    result["honesty"]["default"] = _honesty_of(fused, 0.0, chosen)
    for run, one in zip(test, lists, strict=True):
        calibrated, absent = _default_calibration(one, run, qrels, chosen.single)
        result["honesty"][run.name] = _honesty_of(calibrated, absent, chosen)
    return result


def _out_of_fold(panel: Panel, seen: Part, fold: LabelFold, seed: int) -> dict[str, FloatArray]:
    """Return the scores of every training text by rankers fitted without it and its copies."""
    parts = OUT_OF_FOLD if fold.single else OUT_OF_FOLD_MANY
    dealt = folds(len(seen), parts, Streams(seed)("out of fold", fold.data), groups=same_text(seen.texts))
    return out_of_fold(panel, seen.texts, seen.labels, fold.documents, dealt)


def _default_calibration(lists: Run, test: Run, qrels: Qrels, single: bool) -> tuple[Run, float]:
    """Calibrate a single retriever: by a softmax if its lists are complete, otherwise by QueryFeature.

    Returns the test run with probabilities, and the probability of a label that is not in a list.
    """
    longest = int(np.diff(lists.offsets).max())
    complete = lists.rows == len(lists) * longest
    method = "softmax" if single and complete else "query-feature"
    probabilities = probabilities_of(test, fit_calibrator(lists, qrels, method))
    relevant = lists.grades(qrels) > 0
    missed, absent = qrels.rows - int(relevant.sum()), len(lists) * longest - lists.rows
    return test.with_probabilities(probabilities), missed / absent if absent > 0 else 0.0


def _honesty_of(run: Run, absent: float, fold: LabelFold) -> dict[str, Any]:
    """Return calibration sums over all pairs of test text and label, and over each text's likeliest label."""
    probabilities = np.full(fold.test.labels.shape, absent)
    row = {name: at for at, name in enumerate(fold.test.ids)}
    column = {name: at for at, name in enumerate(fold.documents.ids)}
    places = np.array([column[word] for word in run.documents.words])[run.documents.codes]
    homes = np.array([row[query] for query in run.queries])[run.query_of_row]
    probabilities[homes, places] = run.probabilities
    first = probabilities.argmax(axis=1)
    rows = np.arange(len(probabilities))
    return {
        "all": _honesty(probabilities.ravel(), fold.test.labels.ravel()),
        "top1": _honesty(probabilities[rows, first], fold.test.labels[rows, first]),
    }
