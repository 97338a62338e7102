"""Commands about searching: `broker`, `search` and `new`."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import (
    PORT,
    Command,
    add,
    add_json,
    add_serving,
    add_settings,
    close,
    print_json,
    probability,
    say,
    whole,
)
from isthmus.errors import ConfigError, plain, several

if TYPE_CHECKING:
    from rich.text import Text

    from isthmus.service import Answer, Client, Evidence, Hit, SiloCount

URL_VARIABLE = "ISTHMUS_BROKER"
BAR, SURE = 10, 0.5
LANGUAGE = (
    'what to look for: words, "a phrase", -word, begin*, silo:NAME, type:pdf, after:2019, before:2024-06-30'
)
MEANT = {
    "phrase": "with the phrase",
    "without": "without",
    "prefix": "with words that begin with",
    "silo": "in the silo",
    "other_silo": "not in the silo",
    "type": "of type",
    "other_type": "not of type",
    "after": "dated from",
    "before": "dated before",
}
"""Labels of the constraints of a query."""
MOST_VALUES = 8
"""Maximum number of types, and of years, in a line."""
SCORERS = {
    "bm25": "BM25",
    "date": "date",
    "hybrid": "BM25 and encoder in equal shares",
    "learned": "what silos have learned",
    "engine": "the engine's own score",
}
"""Labels of the scorers that order hits."""


def _broker_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, "the broker's settings, TOML", example="port=8110, deadline_ms=500", required=True)
    add_serving(parser)
    add_json(parser, "{url, silos} once it serves")


def _broker(arguments: argparse.Namespace) -> int:
    from isthmus.service import begin, read_broker, run_broker, status_of

    settings = read_broker(arguments.config, arguments.changes)
    begin(arguments.config, settings, quiet=arguments.quiet, until_eof=arguments.until_eof)

    def started(url: str) -> None:
        if arguments.json:
            print_json({"url": url, "silos": list(settings.silos)})
            sys.stdout.flush()  # the calling program waits for this line

    return status_of(lambda: run_broker(settings, started=started))


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "query QUERY", LANGUAGE, nargs="+")
    add(parser, "--broker URL", f"the broker's address ({URL_VARIABLE}, else http://127.0.0.1:8100)")
    add(parser, "--threshold", "only hits at least this probable", type=probability, default=0.0)
    add(parser, "-k", "hits to show, up to 100 (%(default)s)", type=whole(1), default=10)
    add(parser, "--page", "the page of so many hits; pages end with the first 100", type=whole(1), default=1)
    add(parser, "--facets", "how many documents match, by silo, type and year, where silos allow it")
    add(parser, "--silos A,B", "only these silos")
    about = (
        "no hits: how many documents of each silo answer, with noise, at least as probable as --threshold"
        " (0.1, 0.2 to 0.9; 0.2 if none is given); a new question costs the silos' privacy budgets"
    )
    add(parser, "--count", about)
    add(parser, "--explain", "why each hit stands where it does")
    add(parser, "--deadline MS", "milliseconds to wait for silos", type=whole(10))
    add(parser, "--key FILE", "the file of an API key (or ISTHMUS_API_KEY)")
    add(parser, "--authority FILE", "the certificate the broker's comes from (or ISTHMUS_AUTHORITY)")
    add_json(
        parser,
        "{hits: [{document, silo, probability, score, title, snippet, explanation, also}], silos, below,"
        " understood, more, facets, suggestion, …}",
    )


def _search(arguments: argparse.Namespace) -> int:
    from isthmus.service import DEFAULT_URL, MOST_HITS, Client

    arguments.query = " ".join(arguments.query)
    if not arguments.query.strip():
        raise ConfigError("nothing to look for", expected='words: isthmus search "tidal power"')
    if arguments.k > MOST_HITS:
        raise ConfigError(f"{arguments.k:,} hits at once", key="-k", expected=f"at most {MOST_HITS}")
    if (arguments.page - 1) * arguments.k >= MOST_HITS:
        last = (MOST_HITS - 1) // arguments.k + 1
        raise ConfigError(f"pages end at {MOST_HITS} hits", key="--page", expected=f"at most {last}")
    url = arguments.broker or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    with Client(
        url, key=Path(arguments.key) if arguments.key else None, authority=arguments.authority
    ) as broker:
        silos = None if arguments.silos is None else [name.strip() for name in arguments.silos.split(",")]
        if arguments.count:
            return _count(arguments, broker, silos)
        answer = broker.search(
            arguments.query,
            k=arguments.k,
            threshold=arguments.threshold,
            silos=silos,
            explain=arguments.explain,
            deadline_ms=arguments.deadline,
            offset=(arguments.page - 1) * arguments.k,
            facets=arguments.facets,
            suggest=True,
        )
        if broker.key_expires:
            say(f"isthmus: your API key ends on {plain(broker.key_expires)}; ask your operator for a new one")
    if arguments.json:
        print_json(answer.model_dump())
    else:
        best = min(arguments.k * arguments.page, MOST_HITS)
        show(answer, page=arguments.page, facets=arguments.facets, best=best)
    return 0 if any(silo.status == "answered" for silo in answer.silos) else 1


def _count(arguments: argparse.Namespace, broker: Client, silos: list[str] | None) -> int:
    """Print how many documents match in every silo. Returns 0 if any silo counted, otherwise 1."""
    from isthmus.service import LEVELS, USUAL_LEVEL

    threshold = arguments.threshold or USUAL_LEVEL
    if threshold not in LEVELS:
        levels = ", ".join(map(str, LEVELS))
        raise ConfigError(f"no counts from {threshold:g}", key="--threshold", expected=levels)
    counted = broker.count(arguments.query, threshold=threshold, silos=silos)
    if arguments.json:
        print_json(counted.model_dump())
    else:
        for each in counted.silos:
            print(f"{plain(each.silo):<16} {_count_line(each, threshold)}")
    return 0 if any(each.answer is not None for each in counted.silos) else 1


def _count_line(silo: SiloCount, threshold: float) -> str:
    answer = silo.answer
    if answer is None:
        return f"{silo.status}: {plain(silo.detail)}"
    what = "with all words" if answer.by == "words" else f"at least {threshold:g} probable"
    if answer.unit != "document":
        what = f"{plain(answer.unit)}s, by documents {what}"
    cost = "asked before, nothing charged" if answer.repeated else f"ε = {answer.epsilon:g} charged"
    return f"{answer.count:>6,} ({answer.low:,} to {answer.high:,}) {what}; {cost}"


def show(answer: Answer, *, page: int = 1, facets: bool = False, best: int = 10) -> None:
    """Print an answer for a person; `best` is the number of hits that each silo was asked for."""
    from rich.console import Console

    width = shutil.get_terminal_size((100, 24)).columns
    console = Console(file=sys.stdout, width=width, highlight=False)
    scorers = {silo.scorer for silo in answer.silos if silo.scorer}
    with console.capture() as text:  # captured: if rich printed, a closed pipe would end the program
        for line in understood_lines(answer):
            console.print(f"  {line}", markup=False)
        if answer.hits:
            console.print(_table(answer))
        console.print(summary_of(answer, best))
        for line in further_lines(answer, page, facets=facets):
            console.print(f"  {line}", markup=False)
        for silo in answer.silos:
            if silo.detail:
                console.print(f"  {plain(silo.silo)}: {silo.status}, {plain(silo.detail)}", markup=False)
        rated = [hit.probability for hit in answer.hits if hit.probability is not None]
        if rated and max(rated) < SURE and page == 1:
            console.print(f"  nothing here is {SURE:.0%} likely: the best hit has {max(rated):.2f}")
        if answer.hits and answer.unlike:
            console.print("  no judged query is like this one: probabilities are rough, high ones lowered")
        if answer.overrated:
            console.print("  probabilities are too high: learned from all silos; learn again")
        if answer.hits and not answer.unlike and scorers != {"date"} and not rated:
            console.print("  no probabilities: judge hits or import judgements, then run isthmus learn")
    print(text.get(), end="")


def understood_lines(answer: Answer) -> list[str]:
    """How a query was understood, if it is more than words, and hints about it."""
    query = answer.understood
    if query is None:
        return []
    parts = [f"{MEANT.get(part.kind, part.kind)} {plain(part.value)}" for part in query.parts]
    words = [f"words {plain(query.words)}"] if query.words.strip() else []
    lines = ["understood: " + "; ".join(words + parts)] if parts else []
    return lines + [plain(hint) for hint in query.hints]


def further_lines(answer: Answer, page: int, *, facets: bool = False) -> list[str]:
    """Other spellings, numbers of matches, the silos that did not count them, and whether there is another
    page."""
    lines = []
    if answer.suggestion is not None:
        lines.append(f"did you mean: {plain(answer.suggestion.query)}")
    if answer.facets is not None:
        tables = {"silo": answer.facets.silos, "type": answer.facets.types, "year": answer.facets.years}
        for name, counts in tables.items():
            rows = [f"{plain(value)} {count:,}" for value, count in list(counts.items())[:MOST_VALUES]]
            lines += [f"matches by {name}: {', '.join(rows)}"] if rows else []
    uncounted = [each.silo for each in answer.silos if each.status == "answered" and each.matches is None]
    if facets and uncounted:
        lines.append(f"matches are not counted in {', '.join(map(plain, uncounted))}")
    if answer.more:
        lines.append(f"there is another page: --page {page + 1}")
    return lines


def summary_of(answer: Answer, best: int) -> str:
    """A line with the number of hits, the silos that answered and those that did not, and the time."""
    answered = [silo for silo in answer.silos if silo.status == "answered"]
    others = [f"{plain(silo.silo)} {silo.status}" for silo in answer.silos if silo.status != "answered"]
    line = several(len(answer.hits), "hit") if answer.hits else "nothing found" if answered else "no answer"
    if compared := answer.below - answer.without_probability:
        line += f"; of the best {best} of each silo, {compared} are less likely than {answer.threshold:g}"
    if answer.without_probability:
        line += (
            f", {answer.without_probability} left out that have no probability yet"
            " (search without --threshold; isthmus learn makes probabilities from judgements)"
        )
    line += f" · {len(answered)} of {several(len(answer.silos), 'silo')} answered"
    line += f" ({', '.join(others)})" if others else ""
    ways = sorted({SCORERS.get(silo.scorer, plain(silo.scorer)) for silo in answered if silo.scorer})
    return line + (f" · ranked by {' / '.join(ways)}" if ways else "") + f" · {_took(answer.took_ms)}"


def _took(milliseconds: float) -> str:
    if milliseconds < 1:
        return "under 1 ms"
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def _table(answer: Answer) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    by_date = {silo.silo for silo in answer.silos if silo.scorer == "date"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("probability", no_wrap=True)
    table.add_column("silo", no_wrap=True)
    table.add_column("hit", ratio=1)
    for hit in answer.hits:
        cell = Text(plain(hit.title) or plain(hit.document), style="bold")
        if hit.snippet:
            cell.append("\n" + plain(hit.snippet), style="not bold dim")
        copies = ((each.silo, each.document, each.link) for each in hit.also)
        for silo, document, link in ((hit.silo, hit.document, hit.link), *copies):
            cell.append(f"\n{plain(silo)}/{plain(document)}", style="not bold bright_black")
            if link:
                cell.append(f"\n{plain(link)}", style="not bold blue")
        for line in _why(hit):
            cell.append("\n" + line, style="not bold cyan")
        silos = [hit.silo, *(copy.silo for copy in hit.also)]
        bar = Text(plain(hit.date) or "no date") if hit.silo in by_date else _bar(hit)
        table.add_row(bar, Text("\n".join(map(plain, silos))), cell)
    return table


def _bar(hit: Hit) -> Text:
    from rich.text import Text

    if hit.probability is None:
        return Text(f"{'–':>4}  score {hit.score:.3g}", style="dim")
    full = round(hit.probability * BAR)
    bar = Text(f"{hit.probability:4.2f} ")
    bar.append("━" * full, style="green" if hit.probability >= 0.5 else "yellow")
    return bar.append("·" * (BAR - full), style="bright_black")  # distinguishable without colours, too


def _why(hit: Hit) -> list[str]:
    """The parts of a hit's explanation as lines, and their sum."""
    parts = hit.explanation or []
    if not parts:
        return []
    total = sum(part.contribution for part in parts)
    sure = "" if hit.probability is None else f", which is the probability {hit.probability:.3f}"
    unit = "score" if hit.probability is None else "log-odds"
    return [*map(_part, parts), f"together: {unit} {total:+.2f}{sure}"]


def _part(part: Evidence) -> str:
    """One part as `bm25: raw 7.1, probability 0.8, logit 1.39 × weight 0.5 = +0.69`; missing values are left
    out."""
    raw = "" if part.raw is None else f" raw {part.raw:.3g},"
    times = ""
    if part.weight and part.probability is not None:
        p = min(max(part.probability, 1e-15), 1 - 1e-15)
        logit = math.log(p) - math.log1p(-p)
        rest = part.contribution - logit * part.weight
        more = f" {rest:+.2f}" if abs(rest) >= 0.005 else ""  # extra weight if the document was not returned
        times = f" probability {part.probability:.3g}, logit {logit:.2f} × weight {part.weight:.2f}{more} ="
    elif part.weight:
        times = f" {part.contribution / part.weight:.2f} × weight {part.weight:.2f} ="
    return f"{plain(part.retriever)}:{raw}{times} {part.contribution:+.2f}"


def _new_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "folder DIR", "a new folder")
    add(parser, "--silos A,B", "the silos' names (%(default)s)", default="north,south")
    add(parser, "--port", "the broker's; silos have those after it (%(default)s)", type=PORT, default=8100)
    add_json(parser, "a list of the files to open")


def _new(arguments: argparse.Namespace) -> None:
    from isthmus.service import create_federation

    silos = [name.strip() for name in arguments.silos.split(",") if name.strip()]
    wrote = create_federation(Path(arguments.folder), silos, port=arguments.port)
    facts = {"silos": ", ".join(silos), "broker": f"http://127.0.0.1:{arguments.port}"}
    close(arguments, "a federation, ready to start", list(map(str, wrote)), wrote, facts)


COMMANDS = (
    Command(
        "broker",
        "serve one search over all silos",
        "isthmus broker --config broker.toml",
        _broker_arguments,
        _broker,
    ),
    Command(
        "search",
        "search all silos through a broker",
        """isthmus search "tidal power" --broker http://127.0.0.1:8100 --threshold 0.7
isthmus search "tidal power" --count --threshold 0.8""",
        _search_arguments,
        _search,
    ),
    Command(
        "new",
        "write the configuration of a first federation, with keys and an example document a silo",
        "isthmus new my-federation --silos north,south",
        _new_arguments,
        _new,
    ),
)
