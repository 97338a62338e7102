"""`isthmus calibrate-endpoint`: judge answers of a search interface; its scores become probabilities."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from isthmus.cli.command import Command, add, add_json, print_json, probability, say, whole
from isthmus.errors import ConfigError, DataError, ServiceError, plain, several

if TYPE_CHECKING:
    from isthmus.service import EndpointReport, JudgedAnswers, SearchEndpoint

_EXAMPLE = """isthmus calibrate-endpoint "http://127.0.0.1:8000/search?q={query}" --queries queries.txt
isthmus calibrate-endpoint https://search.example.org/papers/_search --key env:SEARCH_KEY --precision 0.8
isthmus calibrate-endpoint "http://127.0.0.1:8000/search?q={query}" --report
isthmus calibrate-endpoint "http://127.0.0.1:8000/search?q={query}" --serve --port 8200 --least 0.5"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "url URL", "the search interface, with {query} where the query goes")
    add(parser, "--queries FILE", "queries to judge answers of, one a line; more can be typed on the page")
    about = "where answers, judgements and the calibrator are kept (calibrated-HOST); go on there any time"
    add(parser, "--folder DIR", about)
    about = (
        "auto, opensearch (Elasticsearch too), typesense, meilisearch, qdrant (%(default)s: by the address)"
    )
    add(parser, "--preset NAME", about, default="auto")
    about = "where things stand in an answer: hits=PATH,id=PATH,score=PATH,title=PATH,snippet=PATH"
    add(parser, "--mapping PATHS", about, default="")
    add(parser, "--body JSON", 'what to POST: {"q": "{query}"}; a preset has its own', default="")
    add(parser, "--key PLACE", "the interface's key: env:NAME or file:PATH", default="")
    about = "the header that the key goes in (%(default)s, after Bearer)"
    add(parser, "--key-header NAME", about, default="authorization")
    add(parser, "--unencrypted", "send the key over http:// to another machine")
    add(parser, "--depth", "hits of an answer to judge (%(default)s)", type=whole(1), default=10)
    add(parser, "--precision", "wanted of hits at the threshold (%(default)s)", type=probability, default=0.9)
    about = "wanted width of the precision's interval (%(default)s)"
    add(parser, "--width", about, type=probability, default=0.1)
    add(
        parser,
        "--port",
        "where the page or the endpoint is served (any free one)",
        type=whole(0, 65_535),
        default=0,
    )
    what = parser.add_mutually_exclusive_group()
    add(what, "--report", "no page: what the judgements that there are say")
    add(what, "--serve", "an endpoint with the same answers, whose hits carry a probability")
    add(
        parser,
        "--least",
        "with --serve: leave out hits below this probability",
        type=probability,
        default=0.0,
    )
    add_json(parser, "{url} once it serves; with --report {judged, right, threshold, curve, …}")


def _run(arguments: argparse.Namespace) -> int:
    from isthmus.service import JudgedAnswers, SearchEndpoint

    endpoint = SearchEndpoint.of(
        arguments.url,
        preset=arguments.preset,
        body=arguments.body,
        mapping=arguments.mapping,
        key=arguments.key,
        key_header=arguments.key_header,
        unencrypted=arguments.unencrypted,
    )
    host = re.sub(r"[^A-Za-z0-9.-]", "-", urlsplit(endpoint.url).netloc)
    folder = Path(arguments.folder or f"calibrated-{host}")
    if arguments.serve:
        _serve(arguments, folder, endpoint)
        return 0
    if arguments.report and not folder.is_dir():
        raise DataError("there are no judgements yet", file=folder, cure="judge some without --report first")
    with JudgedAnswers(folder, endpoint, depth=arguments.depth) as answers:
        if arguments.report:
            return _report(arguments, answers)
        _ask_all(answers, _queries(arguments.queries))
        _judge(arguments, answers)
    return 0


def _queries(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DataError("is no text in UTF-8", file=file) from None
    # a line of a queries file is often an id, a tab and the text
    queries = [line.rpartition("\t")[2].strip() for line in lines]
    return [query for query in dict.fromkeys(queries) if query]


def _ask_all(answers: JudgedAnswers, queries: list[str]) -> None:
    """Get the answers to all queries. Failures are reported; raises the third (or last) one if nothing was
    answered."""
    from isthmus.report import Progress

    failures: list[str] = []
    with Progress("asking", len(queries)) as bar:
        for query in queries:
            try:
                answers.ask(query)
            except ServiceError as error:
                failures.append(str(error))
                if len(failures) == min(3, len(queries)) and not answers.lists:
                    raise
            bar.advance(1)
    if failures:
        say(f"isthmus: {several(len(failures), 'query', 'queries')} without an answer: {plain(failures[0])}")


def _judge(arguments: argparse.Namespace, answers: JudgedAnswers) -> None:
    from isthmus.service import calibrated, judging_app, run_local

    token = secrets.token_urlsafe(24)
    app = judging_app(answers, token, precision=arguments.precision, width=arguments.width)

    def started(url: str) -> None:
        link = f"{url}/#token={token}"
        say(f"isthmus: judge answers of {answers.endpoint.place} at {link}")
        say("  y right · n wrong · s skip · u undo; every judgement is kept at once, Ctrl-C ends")
        if arguments.json:
            print_json({"url": link, "folder": str(answers.folder)})
            sys.stdout.flush()  # the calling program waits for this line

    run_local(app, port=arguments.port, started=started)
    report = calibrated(answers, precision=arguments.precision, width=arguments.width)
    _show(report, say)


def _serve(arguments: argparse.Namespace, folder: Path, endpoint: SearchEndpoint) -> None:
    from isthmus.service import proxy_app, run_local

    if not folder.is_dir():
        raise ConfigError(f"{folder} is not there", key="--folder", expected="the folder that was judged in")
    token = secrets.token_urlsafe(24) if endpoint.key else ""
    app = proxy_app(folder, endpoint, least=arguments.least, token=token)

    def started(url: str) -> None:
        path = urlsplit(endpoint.url).path or "/"
        say(f"isthmus: {endpoint.place} with probabilities at {url}{path}")
        if token:
            say(f"  it lends its key to those who send the header x-api-key: {token}")
        if arguments.json:
            print_json({"url": f"{url}{path}", **({"token": token} if token else {})})
            sys.stdout.flush()

    run_local(app, port=arguments.port, started=started)


def _report(arguments: argparse.Namespace, answers: JudgedAnswers) -> int:
    from isthmus.service import calibrated

    report = calibrated(answers, precision=arguments.precision, width=arguments.width)
    if arguments.json:
        print_json(report.model_dump())
    else:
        _show(report, print)
    return 1 if report.problem else 0


def _show(report: EndpointReport, tell: Callable[[str], None]) -> None:
    tell(
        f"{several(report.judged, 'judgement')} of {several(report.queries, 'query', 'queries')},"
        f" {report.right:,} right, {report.skipped:,} skipped"
    )
    if report.problem:
        tell(report.problem)
        return
    if report.curve is not None:
        floor = "" if report.curve.floor is None else f", of a perfect model {report.curve.floor:.3f}"
        tell(f"calibrated by {report.method}; error {report.curve.ece:.3f}{floor}")
        for each in report.curve.bins:
            tell(f"  said {each.predicted:4.0%}  right {each.observed:4.0%}  of {each.count:,}")
    if report.threshold is None:
        tell(report.threshold_problem)
        return
    point = report.threshold
    tell(
        f"at least {point.threshold:.3f} probable: precision {point.precision:.2f}"
        f" ({point.low:.2f} to {point.high:.2f}, 95 %) on {several(point.rows, 'hit')}"
    )
    needed = report.judgements_needed
    if needed is None:
        tell(f"no number of judgements within reach narrows that to {report.wanted_width:g}")
    elif needed > report.judged:
        tell(f"some {needed:,} judgements in all would narrow that to {report.wanted_width:g}")
    else:
        tell(f"that is as narrow as {report.wanted_width:g}")


COMMANDS = (
    Command(
        "calibrate-endpoint",
        "make the scores of one search interface probabilities, by judging some of its answers",
        _EXAMPLE,
        _arguments,
        _run,
    ),
)
