"""Commands from scores to decisions: `calibrate` and `fuse`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import (
    Command,
    add,
    add_json,
    add_per_query,
    close,
    folded,
    output,
    probability,
    to_write,
    whole,
)
from isthmus.errors import ConfigError, DataError, check_extra, several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus.calibration import ThresholdCurve
    from isthmus.fusion import Fuser
    from isthmus.tables import Qrels, Run


def _shared(parser: argparse.ArgumentParser) -> None:
    add(parser, "--qrels FILE", "judgements to learn from")
    add(parser, "-o --out FILE", "the TREC run to write; - is stdout", type=output)
    add(parser, "--save FILE", "keep what was learned", type=to_write)
    add(parser, "--model FILE", "use what was kept with --save")
    add(parser, "--relevant GRADE", "relevant from this grade (1)", type=int, default=1)
    add(parser, "--unjudged", "documents nobody judged", choices=("irrelevant", "skip"), default="irrelevant")
    add(parser, "--folds", "folds of queries for cross-fitting (5)", type=whole(2), default=5)
    add(parser, "--precision P", "keep only what has this precision", type=probability)
    add(parser, "--figures DIR", "write reliability, scores and thresholds there")
    add_per_query(parser)


CALIBRATE_MORE = """
  isthmus calibrate validation.run --qrels validation.qrels --save bm25.calibrator
  isthmus calibrate test.run --model bm25.calibrator -o test-probabilities.run"""

FUSE_MORE = """
  isthmus fuse bm25.run dense.run --method rrf -o fused.run
  isthmus fuse bm25.run dense.run --method comb-mnz --norm z-score --top 100 -o fused.run
  isthmus fuse bm25.run dense.run --confidence bm25.prob --confidence dense.prob -m comb-mnz-conf -o fused.run
  isthmus fuse bm25.run dense.run --qrels validation.qrels --explain q7
  isthmus fuse bm25.run dense.run --qrels validation.qrels --save hybrid.fuser
  isthmus fuse bm25-test.run dense-test.run --model hybrid.fuser --precision 0.9 -o sure.run"""


CALIBRATE_METHODS = (
    "auto (the default): the least log-loss over the first ten of lists held out. Also platt, isotonic, "
    "isotonic-binned, temperature, gaussian, gamma, beta, beta-cdf, softmax, softmax-noise, "
    "list-logistic, list-logistic-score, query-feature, query-feature-unconstrained"
)
FUSE_METHODS = (
    "auto (the default): with judgements what does best on queries held out, else rrf (log-odds with "
    "probabilities). Also stacked, log-odds, weighted, convex, rrf, borda, isr, log-isr, rbc, comb-sum, "
    "-mnz, -gmnz, -anz, -min, -max, -med, -mnz-conf, -mult-conf, -mnz-variant, rl-sim, rlsim-eq15"
)


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + CALIBRATE_MORE
    add(parser, "ranking RUN", "a TREC run")
    _shared(parser)
    add(parser, "-m --method", CALIBRATE_METHODS, default="auto")
    add_json(parser, "one object {run, out, method, queries, rows, calibration, threshold, support}")


def _calibrate(arguments: argparse.Namespace) -> None:
    from isthmus.calibration import (
        ThresholdCurve,
        cross_fit,
        load_calibrator,
        probabilities_of,
        save_calibrator,
    )
    from isthmus.tables import read_qrels, read_run, write_run

    _needs(arguments.out or arguments.save or arguments.json, "-o FILE, --save FILE or --json")
    _check_stdout(arguments.out, arguments.json)
    _needs(arguments.qrels or arguments.model, "--qrels FILE to learn from, or --model FILE")
    _check_model(arguments, {"method": "auto"})
    run = read_run(arguments.ranking)
    qrels = read_qrels(arguments.qrels) if arguments.qrels else None
    if qrels is None or arguments.model:
        calibrator = load_calibrator(arguments.model)
        probabilities = probabilities_of(run, calibrator)
    else:
        calibrator, probabilities = cross_fit(
            run, qrels, arguments.method, judging=_judging(arguments), folds=arguments.folds
        )
    calibrated = run.with_probabilities(probabilities)
    curve = None
    if qrels is not None:
        relevant, known = _judging(arguments).of(run, qrels)
        curve = ThresholdCurve.of(probabilities[known], relevant[known], run.query_of_row[known])
    selected, threshold = _selected(arguments, calibrated, curve)
    plots = _write_figures(arguments, qrels, [run], calibrated, curve)
    if arguments.out:
        write_run(selected, arguments.out, probabilities=True)
    if arguments.save:
        save_calibrator(calibrator, arguments.save)
    _write_per_query(arguments, "calibrate", qrels, calibrated)
    result = _result(arguments, type(calibrator).__name__, selected, threshold)
    result["calibration"] = _quality(arguments, qrels, calibrated)
    wrote = [arguments.out, arguments.save, arguments.per_query, *plots]
    close(arguments, f"calibrated {run.name}", {"run": arguments.ranking, **result}, wrote, _facts(result))


def _fuse_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + FUSE_MORE
    add(parser, "runs RUN", "TREC runs, one per retriever", nargs="+")
    _shared(parser)
    add(parser, "-m --method", FUSE_METHODS, default="auto")
    add(parser, "--norm", "none, min-max, z-score, sum, max, rank, borda, softmax", default=None)
    add(parser, "--missing", "what an absent document gets: learned, lowest or a number", default="learned")
    add(parser, "--calibrated", "the scores are probabilities, as isthmus calibrate writes them")
    confidence = "probabilities of a RUN's rows, as calibrate -o writes them; one for each RUN, in order"
    add(parser, "--confidence FILE", confidence, action="append", default=[])
    add(parser, "--confidence-out FILE", "write the fused probabilities there, as --confidence reads them")
    add(parser, "--weights W,W…", "given weights, for weighted and convex")
    add(parser, "--set NAME=VALUE", "an option of the method, k=20", action="append", default=[])
    add(parser, "--explain QID", "print why the query's best stand where they do")
    add(parser, "--document ID", "with --explain: this document only")
    add(parser, "--top K", "write only the best K of every query", type=whole(1))
    add(parser, "--probabilities", "probabilities in the score column")
    add_json(
        parser, "one object {runs, out, method, queries, rows, calibration, threshold, support, explanations}"
    )


def _fuse(arguments: argparse.Namespace) -> None:
    from isthmus.tables import read_qrels, write_run

    _needs(
        arguments.out or arguments.save or arguments.explain or arguments.json,
        "-o FILE, --save FILE or --explain QID",
    )
    _needs(arguments.explain or not arguments.document, "--explain QID beside --document")
    _check_stdout(arguments.out, arguments.json or arguments.explain)
    _check_model(
        arguments, {"method": "auto", "norm": None, "missing": "learned", "weights": None, "set": []}
    )
    if arguments.calibrated and arguments.confidence:
        raise ConfigError("--calibrated and --confidence both say where probabilities are", key="confidence")
    _check_different([] if arguments.confidence else arguments.runs)
    runs = _told_apart(_read(arguments), arguments.runs)
    _check_queries(runs)
    qrels = read_qrels(arguments.qrels) if arguments.qrels else None
    model, fused = _fused(arguments, runs, qrels)
    curve = getattr(model, "curve_", None)
    selected, threshold = _selected(arguments, fused, curve)
    selected = selected if arguments.top is None else selected.top(arguments.top)
    plots = _write_figures(arguments, qrels, runs, fused, curve)
    if arguments.out:
        write_run(selected, arguments.out, probabilities=arguments.probabilities)
    if arguments.confidence_out:
        write_run(selected, arguments.confidence_out, probabilities=True)
    if arguments.save:
        _save(model, arguments.save)
    _write_per_query(arguments, "fuse", qrels, fused, runs, model)
    reasons = [] if arguments.explain is None else _explained(arguments, runs, model, fused.name)
    result = _result(arguments, fused.name, selected, threshold)
    result["calibration"] = _quality(arguments, qrels, fused)
    result["trials"] = [trial.record() for trial in getattr(model, "trials_", [])]
    if reasons and not arguments.json:
        print(folded("\n\n".join(map(str, reasons))))
    record = {"runs": arguments.runs, **result, "explanations": [each.to_dict() for each in reasons]}
    wrote = [arguments.out, arguments.confidence_out, arguments.save, arguments.per_query, *plots]
    close(arguments, f"fused {several(len(runs), 'run')}", record, wrote, _facts(result))


def _fused(arguments: argparse.Namespace, runs: list[Run], qrels: Qrels | None) -> tuple[Fuser | None, Run]:
    """The fitted or loaded model, if any, and the fused run. Plain formulae do not import scikit-learn."""
    from isthmus.fusion import choose, fuse, fuser

    if arguments.model:
        from isthmus.fusion import load_fuser

        model = load_fuser(arguments.model)
        return model, model.fuse(runs)
    method = choose(runs, arguments.method, qrels)
    options = _options(arguments)
    if (arguments.calibrated or arguments.confidence) and method in ("auto", "stacked", "log-odds"):
        options.setdefault("calibrator", "given")
    if qrels is None:
        return None, fuse(runs, method, **options)
    model = fuser(method, judging=_judging(arguments), folds=arguments.folds, **options)
    return model, model.fit_fuse(runs, qrels)


def _explained(arguments: argparse.Namespace, runs: list[Run], model: Fuser | None, method: str) -> list[Any]:
    from isthmus.fusion import fuser

    known = fuser(method, **_options(arguments)).unjudged(runs) if model is None else model
    return known.explain(runs, arguments.explain, arguments.document)


def _read(arguments: argparse.Namespace) -> list[Run]:
    """Read the runs, with probabilities if they are in separate files or in place of the scores."""
    from isthmus.fusion import with_confidences
    from isthmus.tables import read_run

    runs = [read_run(path) for path in arguments.runs]
    files = arguments.runs if arguments.calibrated else arguments.confidence
    if files and len(files) != len(runs):
        raise ConfigError(
            f"{len(files)} files of probabilities for {len(runs)} runs: one --confidence for each, in order",
            key="confidence",
        )
    for at, path in enumerate(files):
        try:
            runs[at] = with_confidences(runs[at], runs[at] if arguments.calibrated else read_run(path))
        except DataError as error:
            option = "--calibrated" if arguments.calibrated else "--confidence"
            cure = f"{error.cure}, or leave {option} out"
            raise DataError(error.problem, file=path, line=error.line, text=error.text, cure=cure) from None
    return runs


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"norm": arguments.norm, "missing": _number(arguments.missing)}
    if arguments.weights:
        options["weights"] = [_number(weight) for weight in arguments.weights.split(",")]
    for setting in arguments.set:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write NAME=VALUE", key=name)
        if hasattr(arguments, name) or name in ("judging", "runs"):
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
    """Name runs after their files, unless all their tags differ."""
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [run.named(Path(path).name) for run, path in zip(runs, paths, strict=True)]


def _check_different(paths: list[str]) -> None:
    """Raise a ConfigError for a file that is named twice."""
    names = [Path(path).resolve() for path in paths if not Path(path).is_fifo()]
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"{name} is named {count} times: it would be fused with itself",
                key="runs",
                expected="different runs, or --weights for more weight",
            )


def _check_queries(runs: list[Run]) -> None:
    """Raise a DataError if there are several runs and no two of them share a query."""
    answered = [run for run in runs if len(run)]
    queries = {query for run in answered for query in run.queries}
    if len(answered) > 1 and len(queries) == sum(len(run.queries) for run in answered):
        names = " and ".join(f"{run.name} ({', '.join(run.queries[:3])}, …)" for run in answered[:2])
        raise DataError(f"the runs have no query in common: {names}", cure="fuse runs of the same queries")


def _save(model: Fuser | None, path: str) -> None:
    from isthmus.fusion import save_fuser

    if model is None:
        raise ConfigError("--save keeps what was learned: give --qrels to learn from", key="save")
    save_fuser(model, path)


def _judging(arguments: argparse.Namespace) -> Any:
    from isthmus.calibration import Judging

    return Judging(arguments.relevant, arguments.unjudged)


def _selected(
    arguments: argparse.Namespace, run: Run, curve: ThresholdCurve | None
) -> tuple[Run, dict[str, Any]]:
    """The rows that reach the requested precision, and the threshold with its support."""
    if arguments.precision is None:
        return run, {"threshold": None}
    if curve is None:
        raise ConfigError("--precision needs --qrels to learn a threshold from", key="precision")
    from dataclasses import asdict

    from isthmus.calibration import abstain

    threshold = curve.threshold_for(arguments.precision)
    return abstain(run, threshold), {"threshold": threshold, "support": asdict(curve.support(threshold))}


def _outcomes(arguments: argparse.Namespace, qrels: Qrels, run: Run) -> Any:
    from isthmus.evaluation import outcomes_of

    dropped = "drop" if arguments.unjudged == "skip" else "zero"
    return outcomes_of(qrels, run, rel=arguments.relevant, unjudged=dropped)


def _quality(arguments: argparse.Namespace, qrels: Qrels | None, run: Run) -> dict[str, float] | None:
    """Calibration errors of the run's probabilities on the judgements; None if either is missing."""
    if qrels is None or run.probabilities is None:
        return None
    from isthmus.evaluation import calibration_of

    unjudged = "drop" if arguments.unjudged == "skip" else "zero"
    return calibration_of(qrels, run, rel=arguments.relevant, unjudged=unjudged)


def _write_figures(
    arguments: argparse.Namespace,
    qrels: Qrels | None,
    runs: list[Run],
    calibrated: Run,
    curve: ThresholdCurve | None,
) -> list[Path]:
    """Plot reliability, thresholds and every run's scores, each as SVG and PNG."""
    if arguments.figures is None:
        return []
    from isthmus.calibration import score_histogram, threshold_plot
    from isthmus.evaluation import reliability, reliability_diagram

    if qrels is None or curve is None:
        raise ConfigError("--figures compares probabilities with judgements: give --qrels", key="figures")
    plots = {
        "reliability": reliability_diagram(
            {calibrated.name or "run": reliability(*_outcomes(arguments, qrels, calibrated))}
        ),
        "thresholds": threshold_plot(curve),
    }
    for at, run in enumerate(runs, 1):
        relevant = run.grades(qrels) >= arguments.relevant
        plots[f"scores-{at}"] = score_histogram(run.scores, relevant, x=f"score of {run.name}")
    folder = Path(arguments.figures)
    folder.mkdir(parents=True, exist_ok=True)
    return [plot.save(folder / f"{name}.{form}") for name, plot in plots.items() for form in ("svg", "png")]


def _write_per_query(
    arguments: argparse.Namespace,
    experiment: str,
    qrels: Qrels | None,
    run: Run,
    inputs: Sequence[Run] = (),
    model: Fuser | None = None,
) -> None:
    """Write values of every query: those of the fused run, of its inputs, and of all methods held out, and
    the calibration errors of its probabilities."""
    if not arguments.per_query or qrels is None:
        return
    from isthmus.calibration import query_folds
    from isthmus.cli.data import MEASURES
    from isthmus.evaluation import calibration_by_query, evaluate, per_query_rows, write_per_query

    about = {"experiment": experiment, "data": Path(arguments.qrels).name, "seed": 0}
    rows: list[dict[str, Any]] = []
    for one in (run, *inputs) if inputs else ():
        rows += per_query_rows(evaluate(qrels, one, MEASURES), **about)
    for trial in getattr(model, "trials_", []):
        pairs = zip(getattr(model, "queries_", ()), trial.values.tolist(), strict=True)
        named = {**about, "method": f"held out: {trial.method}", "measure": getattr(model, "measure", "")}
        rows += [{**named, "query": query, "value": value} for query, value in pairs if value == value]
    if run.probabilities is not None:
        unjudged = "drop" if arguments.unjudged == "skip" else "zero"
        values = calibration_by_query(qrels, run, rel=arguments.relevant, unjudged=unjudged)
        for measure, by_query in values.items():
            named = {**about, "method": run.name, "measure": measure}
            rows += [{**named, "query": query, "value": value} for query, value in by_query.items()]
    if not arguments.model:
        judged = sum(query in qrels for query in run.queries)
        dealt = query_folds(run, qrels, min(arguments.folds, judged), judging=_judging(arguments))
        fold_of = dict(zip(run.queries, dealt.tolist(), strict=True))
        rows = [{**row, "fold": fold_of.get(row["query"])} for row in rows]
    write_per_query(rows, arguments.per_query)


def _result(
    arguments: argparse.Namespace, method: str, run: Run, threshold: dict[str, Any]
) -> dict[str, Any]:
    """The JSON object of `calibrate` and `fuse`; only queries with at least one row are counted."""
    answered = int((run.offsets[1:] > run.offsets[:-1]).sum())
    counts = {"queries": answered, "rows": run.rows}
    return {"out": arguments.out, "method": method, **counts, "calibration": None, **threshold}


def _facts(result: dict[str, Any]) -> dict[str, object]:
    """Titles and values of the closing summary."""
    facts: dict[str, object] = {"method": result["method"]}
    if result.get("trials"):
        facts["held out"] = ", ".join(f"{one['method']} {one['mean']:.4f}" for one in result["trials"])
    facts |= {"queries": f"{result['queries']:,}", "rows": f"{result['rows']:,}"}
    if (quality := result["calibration"]) is not None:
        facts["first ten"] = (
            f"ECE {quality['ECE@10']:.4f}; a perfect model: {quality['ECE@10 floor']:.4f}, "
            f"at most {quality['ECE@10 floor 95%']:.4f} in 95 % ({quality['n@10']:,.0f} hits)"
        )
        facts["all pairs"] = f"ECE {quality['ECE']:.4f}, log-loss {quality['log-loss']:.4f}"
    if result["threshold"] is not None:
        facts["kept from"] = f"probability {result['threshold']:.4f}"
        facts["precision"] = (
            "{precision:.3f} ({low:.3f} to {high:.3f}) on {rows:,} rows of {queries:,} queries".format(
                **result["support"]
            )
        )
    return facts


def _needs(there: object, what: str) -> None:
    if not there:
        raise ConfigError(f"nothing to do without {what}")


def _check_model(arguments: argparse.Namespace, usual: dict[str, object]) -> None:
    """Check options: raise a ConfigError if one contradicts a saved model, and an error if plots lack
    matplotlib."""
    for name, value in {**usual, "folds": 5}.items():
        if arguments.model and getattr(arguments, name) != value:
            raise ConfigError(f"--{name} is settled by the model {arguments.model}: leave it out", key=name)
    for name, value in {"relevant": 1, "unjudged": "irrelevant"}.items():
        if arguments.model and not arguments.qrels and getattr(arguments, name) != value:
            raise ConfigError(f"--{name} reads judgements: give --qrels too, or leave it out", key=name)
    if arguments.figures is not None:
        check_extra("plots", "--figures", "matplotlib")
    if arguments.per_query:
        from isthmus.evaluation import check_per_query

        check_per_query(arguments.per_query)
        _needs(arguments.qrels, "--qrels FILE: --per-query compares with judgements")


def _check_stdout(out: str | None, printing: object) -> None:
    if out == output("-") and printing:
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
        summary="fuse several runs into one, with probabilities if judged or calibrated",
        example="isthmus fuse bm25.run dense.run --qrels validation.qrels -o fused.run",
        add_arguments=_fuse_arguments,
        run=_fuse,
    ),
)
