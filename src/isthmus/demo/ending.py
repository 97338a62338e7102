"""The end of the demonstration: gain from learning, calibration of probabilities, and releases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from isthmus.demo.federation import ABOUT, SearchOutcome
from isthmus.errors import several
from isthmus.evaluation import (
    Floor,
    Interval,
    Reliability,
    bootstrap,
    reliability,
    reliability_diagram,
    sampling_floor,
)
from isthmus.learning import MUCH, Difference
from isthmus.report import Cell, Plot, Section, Table

KINDS = {
    ("sums", True): "how common words are",
    ("sums", False): "sums over judged queries",
    ("query text", False): "judged queries",
    ("feedback", False): "ids of judged documents",
}
"""Names, for readers, of a ledger's kinds of release, with an ε or without."""
MEASURE = "nDCG@10 (how good the first ten hits are, from 0 to 1)"
NEAR = (0.75, 0.85)
"""Range of probabilities that people would call 0.8."""


def sections(outcome: SearchOutcome) -> tuple[Section, ...]:
    """Return the sections at the end of the story, the result first."""
    return (_gained(outcome), _honest(outcome), _nobodys(outcome), _left(outcome))


def report_sections(outcome: SearchOutcome) -> tuple[Section, ...]:
    """Return the sections for a page to be sent on, with a description of the silos and two plots."""
    gained, honest, nobodys, left = sections(outcome)
    curve, _ = _measured(outcome.probabilities, outcome.right)
    promised = "Of hits shown with about this probability, how many were right; on the diagonal the two agree"
    honesty = replace(reliability_diagram({"all silos": curve}, caption=promised), size=(5.2, 3.6))
    return (
        _searched(outcome),
        Section(gained.heading, (_changes(outcome), gained.parts[-1])),
        Section("What that cost: what left each silo", left.parts),
        Section(honest.heading, (honesty, *honest.parts, f"{nobodys.heading}, {nobodys.parts[0]}")),
    )


def _searched(outcome: SearchOutcome) -> Section:
    silos = ", ".join(f"{silo} ({documents:,})" for silo, documents in outcome.documents.items())
    return Section(
        "What was searched",
        (
            f"{sum(outcome.documents.values()):,} documents in {len(outcome.documents)} silos that do not"
            f" share them: {silos}. Every silo has its own index and ledger; a broker asks all of them and"
            f" shows one list. {ABOUT} The deal into silos is ours, made for this demonstration.",
        ),
    )


def _changes(outcome: SearchOutcome) -> Plot:
    """Plot the change of every query, sorted."""
    changes = np.sort(np.array(outcome.after) - np.array(outcome.before))[::-1]
    places = np.arange(1, len(changes) + 1)

    def draw(axes: Any) -> None:
        for chosen, colour, name in (
            (changes > 0, "#21918c", "gained"),
            (changes < 0, "#c0392b", "got worse"),
        ):
            axes.bar(places[chosen], changes[chosen], 1.0, color=colour, label=f"{int(chosen.sum())} {name}")
        axes.axhline(0, color="0.4", lw=0.8)
        axes.set_xlabel("test queries, from most gained to most lost")
        axes.set_ylabel("change of nDCG@10")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False)

    return Plot(draw, "What learning together changed, query by query", (5.2, 2.6))


def figures(outcome: SearchOutcome) -> dict[str, Any]:
    """Return the results as a mapping, for programs."""
    probabilities, single = np.array(outcome.probabilities), np.array(outcome.single)
    record: dict[str, Any] = outcome.learned["record"]
    curve, floor = _measured(probabilities, outcome.right)
    of_one, floor_of_one = _measured(*single.T)
    return {
        "version": outcome.learned["version"],
        "model": record["kind"],
        "adopted": record["adopted"],
        "why": record["why"],
        "judgements": outcome.judgements,
        "before": float(np.mean(outcome.before)),
        "after": float(np.mean(outcome.after)),
        "difference": _difference(outcome).to_json(),
        "hits": len(probabilities),
        "ece": curve.ece,
        "floor": floor.high,
        "one silo": {"ece": of_one.ece, "floor": floor_of_one.high},
        "nobodys": outcome.nobodys,
        "departures": outcome.departures,
    }


def headline(outcome: SearchOutcome) -> str:
    """Summarise the effect of learning in one sentence."""
    gain = _difference(outcome)
    before, after = np.mean(outcome.before), np.mean(outcome.after)
    record: dict[str, Any] = outcome.learned["record"]
    if not record["adopted"]:
        return (
            f"Learning gained nothing yet, so nothing but probabilities changed: {MEASURE} {before:.3f}"
            f" before, {after:.3f} after, on {len(outcome.after)} queries that nobody judged."
        )
    sure = "raised" if gain.low > 0 else "lowered" if gain.high < 0 else "did not clearly change"
    return (
        f"What the silos learned together {sure} {MEASURE} on {len(outcome.after)} queries that nobody"
        f" judged: {before:.3f} before, {after:.3f} after,"
        f" {gain.mean:+.3f} (95 % interval {gain.low:+.3f} to {gain.high:+.3f}); {gain.helped} queries"
        f" gained, {gain.hurt} got worse, {gain.lost_much} of them by more than {MUCH:g}."
    )


def _difference(outcome: SearchOutcome) -> Difference:
    return Difference.of(np.array(outcome.after), np.array(outcome.before), np.array(outcome.groups))


def _gained(outcome: SearchOutcome) -> Section:
    record: dict[str, Any] = outcome.learned["record"]
    chosen = (
        f"Cross-validated in the federation, the model “{record['kind']}” was adopted: {record['why']}."
        if record["adopted"]
        else f"Cross-validated in the federation, the best model was “{record['best']}”, and was not adopted:"
        f" {record['why']}."
    )
    if record.get("queries_needed"):
        chosen += f" With {record['queries_needed']:,} judged queries it might be."
    return Section(
        "What learning gained",
        (
            headline(outcome),
            f"The silos learned from {outcome.judgements:,} judgements of {record['queries']:,} other"
            f" queries; no link joins these to the test queries. {chosen}",
        ),
    )


def _honest(outcome: SearchOutcome) -> Section:
    probabilities, right = np.array(outcome.probabilities), np.array(outcome.right, dtype=np.float64)
    near = (probabilities >= NEAR[0]) & (probabilities < NEAR[1])
    if near.any():
        share = bootstrap(right[near], groups=np.array(outcome.hit_groups)[near])
        promise = (
            f"Of {several(int(near.sum()), 'hit')} shown with a probability from {NEAR[0]} to {NEAR[1]} (mean"
            f" {probabilities[near].mean():.2f}), {100 * share.value:.0f} % were right (95 % interval"
            f" {100 * share.low:.0f} % to {100 * share.high:.0f} %)"
            f"{_against(share, float(probabilities[near].mean()))}."
        )
    else:
        promise = f"No hit was shown with a probability from {NEAR[0]} to {NEAR[1]}."
    single = np.array(outcome.single)
    return Section(
        "How honest 0.8 is",
        (
            promise,
            f"Over all {len(right):,} hits shown, {_off(probabilities, right)}",
            f"The same queries, each in one of the silos alone: of {len(single):,} hits {_off(*single.T)}",
        ),
    )


def _against(share: Interval, promised: float) -> str:
    """Compare the share of hits that were right with the mean of their probabilities, in whole percent."""
    low, mean, high = (round(100 * each) for each in (share.low, promised, share.high))
    if low <= mean <= high:
        return ", which agrees"
    return f": {'more' if low > mean else 'fewer'} than their probabilities say"


def _measured(probabilities: Any, right: Any) -> tuple[Reliability, Floor]:
    """Measure the calibration error over the tenths that the search page shows, and that of a perfect
    model."""
    from isthmus.service import BINS

    return reliability(probabilities, right, bins=BINS), sampling_floor(probabilities, bins=BINS)


def _off(probabilities: Any, right: Any) -> str:
    curve, floor = _measured(probabilities, right)
    verdict = "not told from perfect" if curve.ece <= floor.high else "worse than perfect"
    return (
        f"probabilities are off by {curve.ece:.3f} on average (ECE over tenths of the probability); a perfect"
        f" model with as many hits would be off by {floor.mean:.3f}, and in 95 of 100 cases by at most"
        f" {floor.high:.3f}: {verdict}."
    )


def _nobodys(outcome: SearchOutcome) -> Section:
    answer = outcome.nobodys
    base = float(np.mean(outcome.right))
    if not answer["hits"]:
        verdict = "nothing was found"
    else:
        best = f"a probability of {answer['probability']:.2f}"
        verdict = f"the best of {several(answer['hits'], 'hit')} has {best}"
    unlike = "; the answer says that no judged query is like this one" if answer["unlike"] else ""
    usual = f"Of all hits to the test queries {100 * base:.0f} % were right."
    return Section("A question that nobody can answer", (f"“{answer['query']}”: {verdict}{unlike}. {usual}",))


def _left(outcome: SearchOutcome) -> Section:
    silos = list(dict.fromkeys(row["silo"] for row in outcome.departures))
    items: dict[tuple[str, str], dict[str, int]] = {}
    for row in outcome.departures:
        is_private = row["guarantee"].startswith("ε")
        kind = KINDS.get((row["kind"], is_private), row["kind"])
        by_silo = items.setdefault((kind, row["guarantee"]), dict.fromkeys(silos, 0))
        by_silo[row["silo"]] += row["items"]
    ordered = sorted(items.items(), key=lambda item: (not item[0][1].startswith("ε"), item[0]))
    rows: tuple[tuple[Cell, ...], ...] = tuple((*names, *by_silo.values()) for names, by_silo in ordered)
    return Section(
        "What left each silo",
        (
            "Numbers of items from the silos' own ledgers, which record before anything leaves. How common"
            " words are is counted over so many documents, each text once, with noise: ε bounds what the"
            " counts tell of a document (differential privacy, DP). Sums over judged queries leave under"
            " masks: the broker can read only the total of the four silos.",
            Table(("what left", "guarantee", *silos), rows),
        ),
    )
