"""`isthmus classify` for texts with any number of labels, which are processed in batches."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.cli.command import close, fitted, folded, print_json, say, show

if TYPE_CHECKING:
    from isthmus.classification import LabelledTexts, LabelReport, MultiLabelClassifier

DEFAULT_TOP = 5
PAGES = 20
"""Minimum number of texts with a label's name as id for which that is not taken as an accident."""


def fit(arguments: argparse.Namespace, data: LabelledTexts) -> None:
    """Train the classifier, stage by stage, into the output folder."""
    if not arguments.links:
        suggest_links(data)
    classifier = _classifier(arguments).fit(data, arguments.out)
    report = classifier.report()
    decision = classifier.held_out_.decision(arguments.precision)
    result = {"model": arguments.out, **report.record(), "decision": decision}
    show(arguments, result, _described(report, decision))
    if not arguments.json:
        close(arguments, "learned", result, [arguments.out], _facts(report, classifier))


def evaluate(arguments: argparse.Namespace, data: LabelledTexts) -> None:
    """Evaluate on held-out texts, on a split, or a fitted classifier on other texts."""
    from isthmus.classification import load_multilabel

    if arguments.model or "test" in data.splits:
        test = data.split("test") if "test" in data.splits else data
        test = test.take(test.labelled)
        classifier = (
            load_multilabel(arguments.model)
            if arguments.model
            else _classifier(arguments).fit(data.split("train"))
        )
        labels = classifier.matched(test)
        predicted = classifier.predict(test.texts if test.features is None else test.features, test.ids)
        report = classifier.report(predicted, labels)
        decision = classifier.decision(predicted, labels, arguments.precision)
    else:
        classifier = _classifier(arguments).fit(data)
        report = classifier.report()
        decision = classifier.held_out_.decision(arguments.precision)
    result = {**report.record(), "decision": decision}
    show(arguments, result, _described(report, decision))
    if not arguments.json:
        close(arguments, "evaluated", result, (), _facts(report, classifier))


def predict(arguments: argparse.Namespace) -> None:
    """Read, label and write texts in batches."""
    from isthmus.classification import load_multilabel
    from isthmus.files import replacing

    classifier = load_multilabel(arguments.model)
    answers = _answers(arguments, classifier)
    path = arguments.out or "/dev/stdout"
    counts = {"texts": 0, "labels": 0, "abstained from": 0}
    if arguments.json:
        everything = [answer for answer in answers if _counted(answer, counts)]
        print_json(everything)
    else:
        with nullcontext() if path == "/dev/stdout" else replacing(path) as stream:
            for text, answer in _written(answers, path):
                sys.stdout.write(text) if stream is None else stream.write(text.encode())
                _counted(answer, counts)
    facts = {name: f"{count:,}" for name, count in counts.items()}
    arguments.json = False  # the answers are already printed
    close(arguments, "classified", None, [path] if path != "/dev/stdout" else [], facts)


def _answers(arguments: argparse.Namespace, classifier: MultiLabelClassifier) -> Iterator[dict[str, Any]]:
    """The likeliest labels of every text, none if too improbable, and the expected number of labels."""
    from isthmus.classification import stream_texts

    top = arguments.top or DEFAULT_TOP
    for ids, texts in stream_texts(arguments.texts, text=arguments.text):
        everything = classifier.predict(texts, ids)
        expected = classifier.expected_labels(everything)
        chosen = classifier.decided(everything, arguments.precision) if arguments.precision else everything
        ends = chosen.indptr
        for row, name in enumerate(ids):
            part = slice(ends[row], ends[row + 1])
            values, labels = chosen.data[part], chosen.indices[part]
            order = np.lexsort((labels, -values))[:top]
            yield {
                "id": name,
                "labels": [
                    {"label": classifier.names_[labels[at]], "probability": round(float(values[at]), 4)}
                    for at in order.tolist()
                ],
                "expected": round(float(expected[row]), 2),
            }


def _counted(answer: dict[str, Any], counts: dict[str, int]) -> bool:
    counts["texts"] += 1
    counts["labels"] += len(answer["labels"])
    counts["abstained from"] += not answer["labels"]
    return True


def _written(answers: Iterator[dict[str, Any]], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every answer with its output text: a line of JSON, or CSV with a line for each label."""
    if path.endswith((".jsonl", ".ndjson")):
        yield from ((json.dumps(answer, ensure_ascii=False) + "\n", answer) for answer in answers)
        return
    lines = io.StringIO(newline="")
    writer = csv.writer(lines)
    writer.writerow(("id", "label", "probability", "expected"))
    for answer in answers:
        for one in answer["labels"] or [{"label": "", "probability": ""}]:
            writer.writerow((answer["id"], one["label"], one["probability"], answer["expected"]))
        yield lines.getvalue(), answer
        lines.seek(0)
        lines.truncate()


def announce(data: LabelledTexts) -> None:
    """Report that texts have several labels, and the consequence."""
    several = int((np.diff(data.labels.indptr) > 1).sum())
    say(f"{several:,} of {len(data):,} texts have several labels: any number of labels is learned (--multi)")


def suggest_links(data: LabelledTexts) -> None:
    """Suggest --links if labels look like pages: texts have a label's name as id, and none of them has that
    label."""
    place = {name: at for at, name in enumerate(data.names) if not name.isdigit()}
    own = np.array([place.get(name, -1) for name in data.ids])
    pages = np.flatnonzero(own >= 0)
    if len(pages) >= PAGES and not np.asarray(data.labels[pages, own[pages]]).any():
        say(f"{len(pages):,} texts have a label's name for their id, and none has that label: try --links")


def _classifier(arguments: argparse.Namespace) -> MultiLabelClassifier:
    from isthmus.classification import MultiLabelClassifier

    return MultiLabelClassifier(
        preset=arguments.preset,
        encoder="latent" if arguments.encoder == "lsa" else arguments.encoder,
        folds=arguments.folds or 5,
        seed=arguments.seed,
        links=arguments.links,
    )


def _described(report: LabelReport, decision: dict[str, Any]) -> str:
    from isthmus.report import Table

    measures = report.measures
    texts = [
        f"P@1 {measures['P@1']:.3f}, P@5 {measures['P@5']:.3f}, psP@5 {measures['psP@5']:.3f}, psnDCG@5 "
        f"{measures['psnDCG@5']:.3f} on {measures['texts']:,.0f} texts held out; of their right labels "
        f"{100 * measures['listed']:.1f} % are listed at all.",
        f"ECE of the first five {measures['ECE']:.3f}; a perfectly calibrated model would show "
        f"{measures['ECE floor']:.3f}, and {measures['ECE floor 95%']:.3f} one time in twenty.",
        f"Labels a text: {measures['expected labels']:.2f} expected, {measures['labels a text']:.2f} there.",
    ]
    rows = [
        {name: "–" if value is None else value for name, value in row.items()} for row in decision["bands"]
    ]
    title = f"For a precision of {decision['wanted']:g}: say a label from this probability on"
    if decision["precision"] is not None:
        texts.append(
            f"At these thresholds {decision['precision']:.3f} of labels were right, "
            f"{100 * decision['recall']:.1f} % of the right ones were said, and "
            f"{100 * decision['abstained']:.1f} % of texts had none."
        )
    tables = [fitted(report.table()), fitted(Table.of(rows, title=title, digits=3))]
    return "\n\n".join((*tables, *map(folded, texts)))


def _facts(report: LabelReport, classifier: MultiLabelClassifier) -> dict[str, str]:
    facts = {"texts": f"{classifier.texts_:,}", "labels": f"{len(classifier.names_):,}"}
    return facts | {name: f"{report.measures[name]:.3f}" for name in ("P@1", "psP@5", "ECE", "ECE floor")}
