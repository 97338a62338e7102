"""From scores to decisions: `calibrate` and `fuse`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import Command, add_json, output, print_json, whole

if TYPE_CHECKING:
    from isthmus.calibration import ThresholdCurve
    from isthmus.fusion import Fuser
    from isthmus.tables import Qrels, Run


def _shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--qrels", metavar="FILE", help="judgements to learn from")
    parser.add_argument("-o", "--out", type=output, metavar="FILE", help="the TREC run to write; - is stdout")
    parser.add_argument("--save", metavar="FILE", help="keep what was learned")
    parser.add_argument("--model", metavar="FILE", help="use what was kept with --save")
    parser.add_argument(
        "--relevant", type=int, default=1, metavar="GRADE", help="relevant from this grade (1)"
    )
    parser.add_argument(
        "--unjudged", choices=("irrelevant", "skip"), default="irrelevant", help="documents nobody judged"
    )
    parser.add_argument("--folds", type=whole(2), default=5, help="folds of queries for cross-fitting (5)")
    parser.add_argument("--precision", type=float, metavar="P", help="keep only what has this precision")
    parser.add_argument("--figures", metavar="DIR", help="write reliability, scores and thresholds there")


CALIBRATE_MORE = """
  isthmus calibrate validation.run --qrels validation.qrels --save bm25.calibrator
  isthmus calibrate test.run --model bm25.calibrator -o test-probabilities.run"""

FUSE_MORE = """
  isthmus fuse bm25.run dense.run --method rrf -o fused.run
  isthmus fuse bm25.run dense.run --method comb-mnz --norm z-score --top 100 -o fused.run
  isthmus fuse bm25.run dense.run --qrels validation.qrels --explain q7
  isthmus fuse bm25.run dense.run --qrels validation.qrels --save hybrid.fuser
  isthmus fuse bm25-test.run dense-test.run --model hybrid.fuser --precision 0.9 -o sure.run"""


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + CALIBRATE_MORE
    parser.add_argument("ranking", metavar="RUN", help="a TREC run")
    _shared(parser)
    parser.add_argument(
        "-m",
        "--method",
        default="auto",
        help="auto, platt, isotonic, isotonic-binned, temperature, gaussian, gamma, beta, beta-cdf, softmax, "
        "query-feature, query-feature-unconstrained (auto)",
    )
    add_json(parser, "one object {run, out, method, queries, rows, calibration, threshold}")


def _calibrate(asked: argparse.Namespace) -> int | None:
    from isthmus.calibration import (
        ThresholdCurve,
        abstain,
        cross_fit,
        load_calibrator,
        probabilities_of,
        save_calibrator,
    )
    from isthmus.report import summary
    from isthmus.tables import read_qrels, read_run, write_run

    _needs(asked.out or asked.save or asked.json, "-o FILE, --save FILE or --json")
    _check_stdout(asked.out, asked.json)
    _needs(asked.qrels or asked.model, "--qrels FILE to learn from, or --model FILE")
    _check_model(asked, {"method": "auto"})
    _check_figures(asked)
    run = read_run(asked.ranking)
    qrels = read_qrels(asked.qrels) if asked.qrels else None
    if asked.model:
        calibrator = load_calibrator(asked.model)
        chances = probabilities_of(run, calibrator)
    else:
        calibrator, chances = cross_fit(
            run, read_qrels(asked.qrels), asked.method, judging=_judging(asked), folds=asked.folds
        )
    told = run.with_probabilities(chances)
    curve = None if qrels is None else ThresholdCurve.of(*_outcomes(asked, qrels, told))
    threshold = _threshold(asked, curve)
    kept = told if threshold is None else abstain(told, threshold)
    wrote = _write_figures(asked, qrels, [run], told, curve)
    if asked.out:
        write_run(kept, asked.out, probabilities=True)
    if asked.save:
        save_calibrator(calibrator, asked.save)
    done = {
        "run": asked.ranking,
        "out": asked.out,
        "method": type(calibrator).__name__,
        "queries": _answered(kept),
        "rows": kept.rows,
        "calibration": _quality(asked, qrels, told),
        "threshold": threshold,
    }
    if asked.json:
        print_json(done)
    summary(f"calibrated {run.name}", _facts(done), wrote=[*filter(None, (asked.out, asked.save)), *wrote])
    return None


def _fuse_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + FUSE_MORE
    parser.add_argument("runs", metavar="RUN", nargs="+", help="TREC runs, one per retriever")
    _shared(parser)
    parser.add_argument(
        "-m",
        "--method",
        default="auto",
        help="auto: stacked with judgements, else rrf (log-odds with --calibrated). Also weighted, convex, "
        "borda, isr, log-isr, rbc, comb-sum, -mnz, -gmnz, -anz, -min, -max, -med, -mnz-conf, -mult-conf, "
        "-mnz-variant, rl-sim, rlsim-eq15",
    )
    parser.add_argument("--norm", help="none, min-max, z-score, sum, max, rank, borda, softmax")
    parser.add_argument(
        "--missing", default="learned", help="what an absent document gets: learned, lowest or a number"
    )
    parser.add_argument(
        "--calibrated",
        action="store_true",
        help="the scores are probabilities, as isthmus calibrate writes them",
    )
    parser.add_argument("--weights", metavar="W,W…", help="given weights, for weighted and convex")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="an option of the method, k=20"
    )
    parser.add_argument("--explain", metavar="QID", help="print why the query's best stand where they do")
    parser.add_argument("--document", metavar="ID", help="with --explain: this document only")
    parser.add_argument("--top", type=whole(1), metavar="K", help="write only the best K of every query")
    parser.add_argument("--probabilities", action="store_true", help="probabilities in the score column")
    add_json(parser, "one object {runs, out, method, queries, rows, calibration, threshold, explanations}")


def _fuse(asked: argparse.Namespace) -> int | None:
    from isthmus.report import summary
    from isthmus.tables import read_qrels, write_run

    _needs(asked.out or asked.save or asked.explain or asked.json, "-o FILE, --save FILE or --explain QID")
    _needs(asked.explain or not asked.document, "--explain QID beside --document")
    _check_stdout(asked.out, asked.json or asked.explain)
    _check_model(asked, {"method": "auto", "norm": None, "missing": "learned", "weights": None, "set": []})
    _check_figures(asked)
    runs = _told_apart([_read(asked, path) for path in asked.runs], asked.runs)
    qrels = read_qrels(asked.qrels) if asked.qrels else None
    model, fused = _fused(asked, runs, qrels)
    curve = getattr(model, "curve_", None)
    threshold = _threshold(asked, curve)
    kept = fused if threshold is None else _abstained(fused, threshold)
    kept = kept if asked.top is None else kept.top(asked.top)
    wrote = _write_figures(asked, qrels, runs, fused, curve)
    if asked.out:
        write_run(kept, asked.out, probabilities=asked.probabilities)
    if asked.save:
        from isthmus.fusion import save_fuser

        save_fuser(_learned(model), asked.save)
    told = [] if asked.explain is None else _explained(asked, runs, model, fused.name)
    done = {
        "runs": asked.runs,
        "out": asked.out,
        "method": fused.name,
        "queries": _answered(kept),
        "rows": kept.rows,
        "calibration": _quality(asked, qrels, fused),
        "threshold": threshold,
        "explanations": [each.to_dict() for each in told],
    }
    if asked.json:
        print_json(done)
    elif told:
        print("\n\n".join(map(str, told)))
    summary(f"fused {len(runs)} runs", _facts(done), wrote=[*filter(None, (asked.out, asked.save)), *wrote])
    return None


def _fused(asked: argparse.Namespace, runs: list[Run], qrels: Qrels | None) -> tuple[Fuser | None, Run]:
    """The model, where there is one, and the fused run; plain formulae start without scikit-learn."""
    from isthmus.fusion import choose, fuse, fuser

    if asked.model:
        from isthmus.fusion import load_fuser

        model = load_fuser(asked.model)
        return model, model.fuse(runs)
    method = choose(runs, asked.method, qrels)
    options = _options(asked)
    if asked.calibrated and method in ("stacked", "log-odds"):
        options.setdefault("calibrator", "given")
    if qrels is None:
        return None, fuse(runs, method, **options)
    model = fuser(method, judging=_judging(asked), folds=asked.folds, **options)
    return model, model.fit_fuse(runs, qrels, name=method)


def _explained(asked: argparse.Namespace, runs: list[Run], model: Fuser | None, method: str) -> list[Any]:
    from isthmus.fusion import fuser

    known = fuser(method, **_options(asked)).unjudged(runs) if model is None else model
    return known.explain(runs, asked.explain, asked.document)


def _read(asked: argparse.Namespace, path: str) -> Run:
    """A run, its scores being probabilities if so told."""
    from isthmus.errors import DataError
    from isthmus.tables import read_run

    run = read_run(path)
    if not asked.calibrated:
        return run
    strange = run.scores[(run.scores < 0) | (run.scores > 1)]
    if len(strange):
        raise DataError(
            f"a score of {strange[0]:g} is no probability",
            file=path,
            cure="write it with isthmus calibrate, or leave --calibrated out",
        )
    return run.with_probabilities(run.scores)


def _options(asked: argparse.Namespace) -> dict[str, Any]:
    from isthmus.errors import ConfigError

    options: dict[str, Any] = {"norm": asked.norm, "missing": _number(asked.missing)}
    if asked.weights:
        options["weights"] = [_number(weight) for weight in asked.weights.split(",")]
    for setting in asked.set:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write NAME=VALUE", key=name)
        if hasattr(asked, name) or name in ("judging", "runs"):
            raise ConfigError(f"--set {setting}: {name} is an option of the command, --{name}", key=name)
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _told_apart(runs: list[Run], paths: list[str]) -> list[Run]:
    """Runs whose tags are all different keep them; else they are called after their files."""
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [run.named(Path(path).name) for run, path in zip(runs, paths, strict=True)]


def _learned(model: Fuser | None) -> Fuser:
    from isthmus.errors import ConfigError

    if model is None:
        raise ConfigError("--save keeps what was learned: give --qrels to learn from", key="save")
    return model


def _judging(asked: argparse.Namespace) -> Any:
    from isthmus.calibration import Judging

    return Judging(asked.relevant, asked.unjudged)


def _threshold(asked: argparse.Namespace, curve: ThresholdCurve | None) -> float | None:
    from isthmus.errors import ConfigError

    if asked.precision is None:
        return None
    if curve is None:
        raise ConfigError("--precision needs --qrels to learn a threshold from", key="precision")
    return curve.threshold_for(asked.precision)


def _abstained(run: Run, threshold: float) -> Run:
    from isthmus.calibration import abstain

    return abstain(run, threshold)


def _outcomes(asked: argparse.Namespace, qrels: Qrels, run: Run) -> Any:
    from isthmus.evaluation import outcomes_of

    dropped = "drop" if asked.unjudged == "skip" else "zero"
    return outcomes_of(qrels, run, rel=asked.relevant, unjudged=dropped)


def _quality(asked: argparse.Namespace, qrels: Qrels | None, run: Run) -> dict[str, float] | None:
    """How honest the probabilities are on the judgements given."""
    if qrels is None or run.probabilities is None:
        return None
    from isthmus.evaluation import calibration

    return calibration(*_outcomes(asked, qrels, run))


def _write_figures(
    asked: argparse.Namespace, qrels: Qrels | None, runs: list[Run], told: Run, curve: ThresholdCurve | None
) -> list[Path]:
    """Reliability, thresholds and every run's scores, each as SVG and PNG."""
    if asked.figures is None:
        return []
    from isthmus.calibration import score_histogram, threshold_plot
    from isthmus.errors import ConfigError
    from isthmus.evaluation import reliability, reliability_diagram

    if qrels is None or curve is None:
        raise ConfigError("--figures compares probabilities with judgements: give --qrels", key="figures")
    plots = {
        "reliability": reliability_diagram({told.name or "run": reliability(*_outcomes(asked, qrels, told))}),
        "thresholds": threshold_plot(curve),
    }
    for at, run in enumerate(runs, 1):
        relevant = run.grades(qrels) >= asked.relevant
        plots[f"scores-{at}"] = score_histogram(run.scores, relevant, x=f"score of {run.name}")
    folder = Path(asked.figures)
    folder.mkdir(parents=True, exist_ok=True)
    return [plot.save(folder / f"{name}.{form}") for name, plot in plots.items() for form in ("svg", "png")]


def _answered(run: Run) -> int:
    """How many queries have a line in the file."""
    return int((run.offsets[1:] > run.offsets[:-1]).sum())


def _facts(done: dict[str, Any]) -> dict[str, object]:
    """What the closing summary says."""
    facts = {"method": done["method"], "queries": f"{done['queries']:,}", "rows": f"{done['rows']:,}"}
    if done["calibration"] is not None:
        found = done["calibration"]
        facts["honesty"] = f"ECE {found['ECE']:.4f}, log-loss {found['log-loss']:.4f} on the judgements given"
    if done["threshold"] is not None:
        facts["kept from"] = f"probability {done['threshold']:.4f}"
    return facts


def _needs(there: object, what: str) -> None:
    from isthmus.errors import ConfigError

    if not there:
        raise ConfigError(f"nothing to do without {what}")


def _check_model(asked: argparse.Namespace, usual: dict[str, object]) -> None:
    """What a saved model has settled cannot be asked for beside it."""
    from isthmus.errors import ConfigError

    for name, value in usual.items():
        if asked.model and getattr(asked, name) != value:
            raise ConfigError(f"--{name} is settled by the model {asked.model}: leave it out", key=name)


def _check_figures(asked: argparse.Namespace) -> None:
    from isthmus.errors import check_extra

    if asked.figures is not None:
        check_extra("plots", "--figures", "matplotlib")


def _check_stdout(out: str | None, told: object) -> None:
    from isthmus.errors import ConfigError

    if out == output("-") and told:
        raise ConfigError("-o - and --json or --explain both write to stdout: name a file", key="out")


COMMANDS = (
    Command(
        name="calibrate",
        summary="turn a run's scores into probabilities of relevance",
        example="isthmus calibrate bm25.run --qrels bm25.qrels --method query-feature -o calibrated.run",
        add_arguments=_calibrate_arguments,
        run=_calibrate,
    ),
    Command(
        name="fuse",
        summary="fuse several runs into one, with a probability for every hit",
        example="isthmus fuse bm25.run dense.run --method stacked --qrels validation.qrels -o fused.run",
        add_arguments=_fuse_arguments,
        run=_fuse,
    ),
)
