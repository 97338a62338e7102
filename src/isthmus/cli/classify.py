"""`isthmus classify`: assign labels to texts, with probabilities and a threshold for abstaining."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import (
    Command,
    add,
    add_json,
    close,
    fitted,
    folded,
    output,
    probability,
    show,
    whole,
)
from isthmus.errors import ConfigError, DataError

if TYPE_CHECKING:
    from isthmus.classification import ClassificationReport, LabelledTexts, TextClassifier
    from isthmus.tables import Run


def _reading(parser: argparse.ArgumentParser) -> None:
    add(parser, "--text COLUMN", "the column of the texts (recognised by its name)")
    add(parser, "--label COLUMN", "the column of the labels (recognised by its name)")
    add(parser, "--descriptions FILE", "what labels mean: of classify describe, or a JSON object")
    add(parser, "--label-names FILE", "a line per label, of data in the XMC repository's sparse format")


def _learning(parser: argparse.ArgumentParser) -> None:
    add(parser, "--encoder NAME", "an encoder that was added, or lsa, made of the texts (lsa)", default="lsa")
    add(
        parser, "--folds", "parts for held-out answers, where the data have no column fold (5)", type=whole(2)
    )
    add(parser, "--seed", "of the folds (0)", type=whole(0), default=0)
    add(parser, "--multi", "any number of labels a text, out of very many (where a text has several)")
    linked = (
        "with --multi: labels are pages that texts link to; a text whose id is a label never has that label"
    )
    add(parser, "--links", linked)
    presets = "with --multi: default, or xcoretriev, the rank-fusion paper's two retrievers"
    add(parser, "--preset NAME", presets, choices=("default", "xcoretriev"), default="default")
    _deciding(parser)


def _deciding(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "--precision P",
        "the precision that is wanted of answers (0.9)",
        type=probability,
        default=0.9,
    )


def _model_folder(text: str) -> str:
    """Argument type: a folder to write a classifier to; refused before any work if it cannot be a folder."""
    there = next(path for path in (Path(text).absolute(), *Path(text).absolute().parents) if path.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder to write, but {there} is a file")
    return text


def _fit_arguments(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "data DATA",
        "CSV, TSV, JSON lines, XMC sparse rows, a folder with one per label, or a set's name",
    )
    written = "the folder to write; it holds the training texts, or with --multi what was made of them"
    add(parser, "-o --out MODEL", written, type=_model_folder, required=True)
    _reading(parser)
    _learning(parser)
    add_json(
        parser, "one object {model, measures, labels, confusion, decision}; with --multi bands for labels"
    )


def _fit(arguments: argparse.Namespace) -> None:
    data = _data(arguments)
    data = data.split("train") if "train" in data.splits else data
    if _multi(arguments, data):
        from isthmus.cli import classify_multi

        classify_multi.fit(arguments, data)
        return
    classifier = _classifier(arguments).fit(data)
    wrote = classifier.save(arguments.out)
    report = _held_out(classifier)
    result = {"model": arguments.out, **_result(report, arguments.precision)}
    show(arguments, result, _described(report, arguments.precision))
    if not arguments.json:
        close(arguments, "learned", result, wrote, _facts(report))


def _predict_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "model MODEL", "the folder that fit wrote")
    add(parser, "texts TEXTS", "CSV, TSV, JSON lines, one text a line, or XMC sparse rows")
    add(parser, "-o --out FILE", "CSV, or JSON lines if it ends so; - is stdout (-)", type=output)
    add(parser, "--top", "so many labels a text at most (1; 5 where a text may have several)", type=whole(1))
    add(parser, "--text COLUMN", "the column of the texts (recognised by its name)")
    add(parser, "--precision P", "abstain where answers were right less often", type=probability)
    add_json(
        parser, "a list of {id, label, probability}, label null where it abstains; {id, labels, expected}"
    )


def _predict(arguments: argparse.Namespace) -> None:
    from isthmus.classification import is_multilabel, load_classifier, read_texts

    if is_multilabel(arguments.model):
        from isthmus.cli import classify_multi

        classify_multi.predict(arguments)
        return
    classifier = load_classifier(arguments.model)
    ids, texts = read_texts(arguments.texts, text=arguments.text)
    threshold = classifier.threshold_for(arguments.precision) if arguments.precision else 0.0
    answers = list(_answers(classifier.predict(texts, ids), arguments.top or 1, threshold))
    if not arguments.json:
        _write(answers, arguments.out or "/dev/stdout")
    abstained = len({answer["id"] for answer in answers if answer["label"] is None})
    facts = {"texts": f"{len(texts):,}", "abstained from": f"{abstained:,}", "threshold": f"{threshold:.3f}"}
    wrote = [arguments.out] if arguments.out and arguments.out != "/dev/stdout" else []
    close(arguments, "classified", answers, wrote, facts)


def _answers(run: Run, top: int, threshold: float) -> Any:
    """The first labels of every text, or label None if the first one is below the threshold."""
    probabilities = run.required_probabilities
    for at, query in enumerate(run.queries):
        start, end = run.offsets[at], run.offsets[at + 1]
        if start == end or probabilities[start] < threshold:
            best = float(probabilities[start]) if end > start else 0.0
            yield {"id": query, "label": None, "probability": best}
            continue
        for row in range(start, min(start + top, end)):
            yield {"id": query, "label": run.documents.word(row), "probability": float(probabilities[row])}


def _write(answers: list[dict[str, Any]], path: str) -> None:
    stream = sys.stdout if path == "/dev/stdout" else open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115
    try:
        if path.endswith((".jsonl", ".ndjson")):
            stream.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
            return
        writer = csv.writer(stream)
        writer.writerow(("id", "label", "probability"))
        writer.writerows((one["id"], one["label"] or "", f"{one['probability']:.4f}") for one in answers)
    finally:
        if stream is not sys.stdout:
            stream.close()


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "data DATA", "labelled texts, as for fit; with a column split, train and test are kept apart")
    add(parser, "--model MODEL", "judge this classifier on them, instead of learning from them")
    _reading(parser)
    _learning(parser)
    add_json(parser, "one object {measures, labels, confusion, decision}; with --multi bands")


def _evaluate(arguments: argparse.Namespace) -> None:
    from isthmus.classification import is_multilabel, load_classifier, report_of

    data = _data(arguments)
    if is_multilabel(arguments.model) if arguments.model else _multi(arguments, data):
        from isthmus.cli import classify_multi

        classify_multi.evaluate(arguments, data)
        return
    if arguments.model or "test" in data.splits:
        if arguments.model:
            classifier = load_classifier(arguments.model)
            test = data.split("test") if "test" in data.splits else data
        else:
            classifier, test = _classifier(arguments).fit(data.split("train")), data.split("test")
        strange = set(test.names) - set(classifier.data_.names)
        if strange:
            raise DataError(f"the classifier does not know the label {min(strange)!r}", cure="fit it anew")
        report = report_of(classifier.predict(test.texts, test.ids), test.qrels, classifier.data_.names)
    else:
        report = _held_out(_classifier(arguments).fit(data))
    result = _result(report, arguments.precision)
    show(arguments, result, _described(report, arguments.precision))
    if not arguments.json:
        close(arguments, "evaluated", result, (), _facts(report))


def _data(arguments: argparse.Namespace) -> LabelledTexts:
    from isthmus.classification import described, read_descriptions, read_labelled

    names = arguments.label_names
    data = read_labelled(arguments.data, text=arguments.text, label=arguments.label, label_names=names)
    return described(data, read_descriptions(arguments.descriptions)) if arguments.descriptions else data


def _multi(arguments: argparse.Namespace, data: LabelledTexts) -> bool:
    """Whether to learn any number of labels per text, by option or because the data have several."""
    if not 0 < arguments.precision <= 1:
        raise ConfigError("a precision of 0 asks for nothing", key="precision", value=arguments.precision)
    if arguments.multi or data.features is not None:
        return True
    if data.take(data.labelled).single:
        if arguments.preset != "default" or arguments.links:
            unused = "links" if arguments.links else "preset"
            problem = f"every text has one label: add --multi to use --{unused}"
            raise ConfigError(problem, key=unused, value=getattr(arguments, unused))
        return False
    from isthmus.cli.classify_multi import announce

    announce(data)
    return True


def _describe_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "data DATA", "labelled texts, as for fit")
    add(parser, "-o --out FILE", "the descriptions; those that are there already stay", required=True)
    add(parser, "--text COLUMN", "the column of the texts (recognised by its name)")
    add(parser, "--label COLUMN", "the column of the labels (recognised by its name)")
    model = "a language model, https://host/v1#model, that is sent some texts of every label (none: excerpts)"
    add(parser, "--endpoint URL", model)
    add(parser, "--key PLACE", "where its key is: env:NAME or file:PATH (none)", default="")
    add_json(parser, "an object of labels, each {description, source, reviewed}")


def _describe(arguments: argparse.Namespace) -> None:
    from isthmus.classification import describe, read_descriptions, read_labelled, write_descriptions
    from isthmus.encoders import Chat

    data = read_labelled(arguments.data, text=arguments.text, label=arguments.label)
    data = data.split("train") if "train" in data.splits else data
    known = read_descriptions(arguments.out) if Path(arguments.out).exists() else {}
    chat = Chat(arguments.endpoint, arguments.key) if arguments.endpoint else None
    descriptions = describe(data, known, chat=chat)
    write_descriptions(descriptions, arguments.out)
    result = {
        name: {"description": one.text, "source": one.source, "reviewed": one.reviewed}
        for name, one in descriptions.items()
    }
    show(arguments, result, "\n\n".join(f"{name}: {one.text}" for name, one in descriptions.items()))
    if not arguments.json:
        facts = {"labels": str(len(descriptions)), "there before": str(len(known))}
        close(arguments, "described; read and correct them", result, [arguments.out], facts)


def _classifier(arguments: argparse.Namespace) -> TextClassifier:
    from isthmus.classification import TextClassifier

    return TextClassifier(encoder=arguments.encoder, folds=arguments.folds or 5, seed=arguments.seed)


def _held_out(classifier: TextClassifier) -> ClassificationReport:
    from isthmus.classification import report_of

    data = classifier.data_
    return report_of(classifier.held_out_, data.qrels, data.names)


def _result(report: ClassificationReport, precision: float) -> dict[str, Any]:
    try:
        decision: dict[str, Any] = {"wanted": precision, **report.decision(precision)}
    except DataError as error:
        decision = {"wanted": precision, "threshold": None, "why": str(error)}
    return {**report.record(), "decision": decision}


def _described(report: ClassificationReport, precision: float) -> str:
    from isthmus.report import Table

    measures = report.measures
    parts = [fitted(report.table())]
    if mistakes := report.confusions():
        parts.append(fitted(Table.of(mistakes, title="Taken for another, commonest first")))
    texts = [
        f"P@1 {measures['P@1']:.3f}, macro F1 {measures['macro F1']:.3f} on {measures['texts']:,.0f} texts "
        f"held out.\nTop-1 ECE {measures['ECE@1']:.3f}; a perfectly calibrated model would show "
        f"{measures['ECE@1 floor']:.3f}, and {measures['ECE@1 floor 95%']:.3f} one time in twenty."
    ]
    try:
        decision = report.decision(precision)
        texts.append(
            f"For a precision of {precision:g}: answer where the probability is at least "
            f"{decision['threshold']:.3f}, and abstain from the other {100 * decision['abstained']:.1f} % "
            f"of texts. {100 * decision['precision']:.1f} % of these answers were right "
            f"(95 % interval: {100 * decision['low']:.1f} % to {100 * decision['high']:.1f} %)."
        )
    except DataError as error:
        texts.append(str(error))
    return "\n\n".join((*parts, *map(folded, texts)))


def _facts(report: ClassificationReport) -> dict[str, str]:
    names = ("P@1", "ECE@1", "ECE@1 floor")
    facts = {"texts": f"{report.measures['texts']:,.0f}", "labels": str(len(report.names))}
    return facts | {name: f"{report.measures[name]:.3f}" for name in names}


COMMANDS = (
    Command(
        name="classify",
        summary="put texts under labels, with probabilities that hold and abstention where they are low",
        example="isthmus classify fit tickets.csv -o tickets.classifier",
        verbs=(
            Command(
                name="fit",
                summary="learn from labelled texts; what it is worth is measured on texts held out",
                example="isthmus classify fit tickets.csv -o tickets.classifier\n"
                "isthmus classify fit pydocs-see-also --links -o pages.classifier",
                add_arguments=_fit_arguments,
                run=_fit,
            ),
            Command(
                name="describe",
                summary="say in words what labels mean, from their texts, for fit and evaluate",
                example="isthmus classify describe tickets.csv -o labels.json",
                add_arguments=_describe_arguments,
                run=_describe,
            ),
            Command(
                name="predict",
                summary="label new texts, or abstain",
                example="isthmus classify predict tickets.classifier new.csv --precision 0.95 -o labels.csv\n"
                "isthmus classify predict pages.classifier new.jsonl --top 3 -o labels.jsonl",
                add_arguments=_predict_arguments,
                run=_predict,
            ),
            Command(
                name="evaluate",
                summary="measure on texts held out, or a fitted classifier on other texts",
                example="isthmus classify evaluate tickets.csv --precision 0.95",
                add_arguments=_evaluate_arguments,
                run=_evaluate,
            ),
        ),
    ),
)
