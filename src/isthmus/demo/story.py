"""The main job, told as a story on the built-in collection.

A chapter is a function from a `Tale` to a `Tale`: it describes its step, adds its rankings, and passes on the
data for the next chapter. `CHAPTERS` is the story; a new part of Isthmus is one more chapter.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from isthmus.corpora import load
from isthmus.demo.ending import headline, report_sections
from isthmus.demo.federation import SearchOutcome
from isthmus.evaluation import (
    Comparison,
    Testing,
    bootstrap,
    compare,
    outcomes_of,
    reliability,
    reliability_diagram,
)
from isthmus.fusion import Candidates, Stacked
from isthmus.report import Page, Plot, Section, Table
from isthmus.retrieval import BM25
from isthmus.tables import Corpus, Run

MEASURES = ("nDCG@10", "MRR@10")
DEPTH = 100
RRF_CONSTANT = 60
HOME, RAW, RRF, CENTRAL = "home silo alone", "merged by raw score", "merged by RRF", "one central index"
FUSED = "fused by probability"
WITHOUT_OWN = (
    "A query's own page is left out of these lists; in the federation it is there, and counts as right,"
    " since who asks wants it."
)
NOTE = ("In brackets: 95 % intervals over queries. A letter: significantly better than that row.",)
TITLE = "Isthmus: four silos, one search box"
LEAD = "Four silos hold documents that they do not share. How well can they be searched from one box?"


@dataclass(frozen=True)
class Tale:
    """The state that one chapter passes to the next."""

    world: Corpus
    seed: int
    lists: Mapping[str, Run] = field(default_factory=dict)
    """Results of every silo's own index for all queries, by silo."""
    systems: Mapping[str, Run] = field(default_factory=dict)
    """The rankings to compare, by their names in the table."""
    sections: tuple[Section, ...] = ()

    def tell(self, heading: str, *parts: str | Table | Plot) -> Tale:
        """Add a section to the report; sentences and tables are printed at once, plots are not."""
        section = Section(heading, parts)
        say_section(section)
        return replace(self, sections=(*self.sections, section))

    def adding(self, systems: Mapping[str, Run]) -> Tale:
        """Return the tale with more rankings to compare."""
        return replace(self, systems={**self.systems, **systems})


Chapter = Callable[[Tale], Tale]


@dataclass(frozen=True)
class Story:
    """The comparison of all rankings, and the sections told before it."""

    comparison: Comparison
    sections: tuple[Section, ...]

    @property
    def result(self) -> str:
        """The result in words: the fused list compared with one central index and one silo alone."""
        runs = {each.run: each for each in self.comparison.evaluations}
        if not {HOME, CENTRAL, FUSED} <= runs.keys():
            return ""
        values = {name: np.array(list(run.per_query(MEASURES[0]).values())) for name, run in runs.items()}
        gains = values[FUSED] - values[CENTRAL]
        gain, lost = bootstrap(gains), int((gains < 0).sum())
        return (
            f"Searched together and fused by probability, silos that share no document come to {MEASURES[0]}"
            f" {values[FUSED].mean():.3f} on {len(gains):,} queries; a silo alone comes to"
            f" {values[HOME].mean():.3f}, and one central index, which nobody may build, to"
            f" {values[CENTRAL].mean():.3f}. Beside that index {gain.value:+.3f} [{gain.low:+.3f},"
            f" {gain.high:+.3f}]; {int((gains > 0).sum()):,} queries gained, {lost:,} got worse."
        )

    @property
    def table(self) -> Table:
        """The rankings side by side, without remarks on ties and the like."""
        return self.comparison.table(digits=3, remarks=False)


def tell(*, seed: int = 0) -> Story:
    """Tell the whole story on stderr and return it."""
    say(LEAD)
    tale = Tale(load("pydocs"), seed)
    for chapter in CHAPTERS:
        tale = chapter(tale)
    comparison = compare(tale.world.qrels, tale.systems, MEASURES, testing=Testing(seed=seed))
    return Story(comparison, tale.sections)


def save_report(file: Path, story: Story | None, outcome: SearchOutcome | None) -> list[Path]:
    """Save a page of the available results, the result first, to be sent on, and the chapters of the story
    beside it. Returns the paths of the files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    results = [] if outcome is None else [headline(outcome)]
    parts = [] if outcome is None else [*report_sections(outcome)]
    wrote = [file]
    if story is not None:
        results += [story.result] if outcome is None else []
        how = () if outcome is None else (story.result,)
        parts.append(Section("Without learning", (*how, WITHOUT_OWN, replace(story.table, notes=NOTE))))
        parts += [section for section in story.sections[:1] if outcome is None]
        chapters = Page("Isthmus: the story of four silos", story.sections, LEAD)
        wrote.append(chapters.save(file.with_name("story.html")))
    Page(TITLE, tuple(parts), " ".join(results), brief=True).save(file)
    return wrote


def open_page(address: str) -> None:
    """Open a page in the browser if there is a desktop."""
    if _has_desktop():
        webbrowser.open(address)


def the_world(tale: Tale) -> Tale:
    """Chapter: documents and queries by silo."""
    world = tale.world
    documents = np.bincount(world.documents.silos, minlength=len(world.silos)).tolist()
    queries = np.bincount(world.queries.silos, minlength=len(world.silos)).tolist()
    packages = "NumPy, SciPy and scikit-learn"
    return tale.tell(
        "The world",
        f"{len(world.documents):,} docstrings of {packages} lie in {len(world.silos)} silos.",
        Table(("silo", "documents", "queries"), tuple(zip(world.silos, documents, queries, strict=True))),
        f"The {len(world.queries):,} queries are first sentences of docstrings; what people linked under"
        f" See Also is relevant. {100 * _share_elsewhere(world):.0f} % of the relevant documents lie"
        " in another silo than their query.",
        "The deal into silos is ours, made for this demonstration; the texts and the links are not.",
    )


def alone(tale: Tale) -> Tale:
    """Chapter: every silo has its own index, and a query is answered by its own silo."""
    world = tale.world
    lists = {
        silo: BM25(name=silo).index(world.silo(silo).documents).search(world.queries, DEPTH)
        for silo in world.silos
    }
    home = [lists[silo][world.queries.silos == at] for at, silo in enumerate(world.silos)]
    updated = tale.tell(
        "Each silo alone", "Every silo indexes its own documents with BM25 and answers its own queries."
    )
    return replace(updated, lists=lists).adding({HOME: Run.concat(home, name=HOME)})


def merged(tale: Tale) -> Tale:
    """Chapter: all silos answer every query, and their lists are merged naively."""
    raw = Run.concat(list(tale.lists.values()), name=RAW)
    rrf = Run.concat([_by_rank(tale.world, at, run) for at, run in enumerate(tale.lists.values())], name=RRF)
    updated = tale.tell(
        "The lists merged naively",
        "All silos answer every query. Merged by raw score, the lists speak different languages: a word that"
        " is rare in one silo counts more there than where it is common. Merged by reciprocal rank (RRF),"
        " every silo's first hit is worth the same, good or bad; of equal ranks the query's own silo's comes"
        " first.",
    )
    return updated.adding({RAW: raw.top(DEPTH), RRF: rrf.top(DEPTH)})


def _by_rank(world: Corpus, silo: int, run: Run) -> Run:
    """Return the list with RRF's scores 1/(60 + rank); at home half a rank earlier, to break ties."""
    at_home = (world.queries.silos == silo)[run.query_of_row]
    return run.with_scores(1 / (RRF_CONSTANT + run.ranks - 0.5 * at_home))


def central(tale: Tale) -> Tale:
    """Chapter: all documents in one index, which no silo may build."""
    run = BM25(name=CENTRAL).index(tale.world.documents).search(tale.world.queries, DEPTH)
    updated = tale.tell(
        "One central index", "If all documents could lie in one index, its BM25 would be the mark to reach."
    )
    return updated.adding({CENTRAL: run})


def released(tale: Tale) -> Tale:
    """Chapter: the silos' releases that let each rank the others' documents, and their privacy cost."""
    from isthmus.demo import releases

    story = releases.tell(tale.world, seed=tale.seed)
    ndcg = {each.run: each["nDCG@10"] for each in story.comparison.evaluations}
    share = ndcg[releases.PRIVATE] / ndcg[releases.EXACT]
    return tale.tell(
        "What leaves a silo, and what it costs",
        "A silo can rank documents that it may not read, from word counts that their silo has noised once and"
        " for all; queries stay at home. How common words are, all silos add up without showing their parts.",
        story.released,
        f"A ledger booked all of this before it left. {story.meaning}",
        f"BM25 from what was released keeps {100 * share:.0f} % of the nDCG@10 of exact counts:",
        story.comparison.table(digits=3),
        story.plot,
    )


def fused(tale: Tale) -> Tale:
    """Chapter: two ways of searching, turned into probabilities and fused into one list."""
    world = tale.world
    runs = [tale.systems[RAW].named("whole text"), _summaries(world)]
    stacked = Stacked(calibrator="query-feature")
    run = stacked.fit_fuse(runs, world.qrels, name=FUSED)
    query = _telling_query(world, runs, run)
    top = run.top(10)
    scaled = runs[0].with_probabilities(Candidates.of(runs[:1], "min-max").scores[0]).top(10)
    before, after = (reliability(*outcomes_of(world.qrels, hits)) for hits in (scaled, top))
    updated = tale.tell(
        "Scores become probabilities, and two lists one",
        "Every silo also searches the first paragraphs of its documents alone. What a list's scores are worth"
        " is learned from judged queries, never from the query at hand; then their log-odds are weighed and"
        " added up.",
        f"Step by step, for the query “{world.queries.texts[world.queries.ids.index(query)]}”:",
        *(str(explained) for explained in stacked.explain(runs, query, depth=2)),
        f"Over the ten hits shown, a merged BM25 score scaled to 0..1 misses the share of relevant hits by"
        f" {before.ece:.2f} on average, the fused probability by {after.ece:.2f}.",
        reliability_diagram(
            {"before: merged scores, scaled": before, "after: fused probabilities": after},
            caption="What the ten hits shown promised and how many were relevant, with the hits in every bin",
        ),
    )
    return updated.adding({FUSED: run})


def _summaries(world: Corpus) -> Run:
    """Search an index of first paragraphs in all silos, merged by raw score."""
    runs = []
    for silo in world.silos:
        documents = world.silo(silo).documents
        leads = replace(documents, bodies=tuple(body.split("\n\n")[0] for body in documents.bodies))
        runs.append(BM25().index(leads).search(world.queries, DEPTH))
    return Run.concat(runs, name="first paragraph").top(DEPTH)


def _telling_query(world: Corpus, runs: Sequence[Run], fused: Run) -> str:
    """Return the first query whose best fused hit is relevant and was no list's first; else the first."""
    first = fused.top(1)
    before = [run.top(1) for run in runs]
    for query, hits, _ in first[first.grades(world.qrels) > 0].lists() if first.rows == len(first) else ():
        if all(hits != run[query].documents.tolist() for run in before):
            return query
    return fused.queries[0]


def cotrained(tale: Tale) -> Tale:
    """Chapter: the ways to train on pairs across silos that nobody judged."""
    from isthmus.demo import cotraining

    story = cotraining.tell(seed=tale.seed)
    return tale.tell(
        "Pairs across silos, which nobody judged",
        f"Judgements stay inside a silo, but {100 * story.share:.0f} % of the relevant documents lie"
        " elsewhere. A model may guess the grades of such pairs, or learn from judged pairs alone;"
        " others' documents are seen through what they release at ε = 8.",
        story.table,
        story.sentence,
    )


CHAPTERS: tuple[Chapter, ...] = (the_world, alone, merged, central, released, fused, cotrained)


def say_section(section: Section) -> None:
    """Print a section on stderr, without plots and without notes below tables, which the report has."""
    say(f"\n{section.heading}", bold=True)
    for part in section.parts:
        if isinstance(part, Table):
            print(replace(part, notes=()).text(width=80), file=sys.stderr)
        elif isinstance(part, str):
            say(part)


def say(text: str, *, bold: bool = False) -> None:
    """Print text on stderr, wrapped to the terminal's width; continuation lines have twice the indent."""
    width = max(40, shutil.get_terminal_size((80, 24)).columns)
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip())) * 2
        parts = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
        styled = bold and line and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        print("\n".join(f"\x1b[1m{part}\x1b[0m" if styled else part for part in parts), file=sys.stderr)


def _share_elsewhere(world: Corpus) -> float:
    """Return the share of relevant pairs whose document lies in another silo than the query."""
    silo_of_document = dict(zip(world.documents.ids, world.documents.silos.tolist(), strict=True))
    silo_of_query = dict(zip(world.queries.ids, world.queries.silos.tolist(), strict=True))
    pairs = zip(world.qrels.query_of_row.tolist(), world.qrels.documents.tolist(), strict=True)
    queries = world.qrels.queries
    apart = [silo_of_query[queries[query]] != silo_of_document[document] for query, document in pairs]
    return float(np.mean(np.array(apart)[world.qrels.grades > 0]))


def _has_desktop() -> bool:
    """Whether a browser window could open; a text browser would take the terminal over."""
    windows = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return windows and sys.stderr.isatty()
