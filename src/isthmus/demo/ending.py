"""What the federation came to: what learning gained, how honest probabilities are, and what left."""

from __future__ import annotations

from typing import Any

import numpy as np

from isthmus.demo.federation import SearchOutcome
from isthmus.errors import several
from isthmus.evaluation import bootstrap, reliability, sampling_floor
from isthmus.learning import MUCH, Difference
from isthmus.report import Cell, Section, Table

KINDS = {
    ("sums", True): "how common words are",
    ("sums", False): "sums over judged queries",
    ("query text", False): "judged queries",
    ("feedback", False): "judged documents it has",
}
"""What a ledger's kinds are here, with an ε or without."""
NEAR = (0.75, 0.85)
"""Probabilities that people would call 0.8."""


def sections(outcome: SearchOutcome) -> tuple[Section, ...]:
    """The end of the story, the result first."""
    return (_gained(outcome), _honest(outcome), _nobodys(outcome), _left(outcome))


def figures(outcome: SearchOutcome) -> dict[str, Any]:
    """The same for programs."""
    probabilities = np.array(outcome.probabilities)
    record: dict[str, Any] = outcome.learned["record"]
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
        "ece": reliability(probabilities, outcome.right).ece,
        "floor": sampling_floor(probabilities).high,
        "nobodys": outcome.nobodys,
        "departures": outcome.departures,
    }


def headline(outcome: SearchOutcome) -> str:
    """Learning in one sentence."""
    gain = _difference(outcome)
    before, after = np.mean(outcome.before), np.mean(outcome.after)
    record: dict[str, Any] = outcome.learned["record"]
    if not record["adopted"]:
        return (
            f"Learning gained nothing yet, so nothing but probabilities changed: nDCG@10 {before:.3f} before,"
            f" {after:.3f} after, on {len(outcome.after)} queries that nobody judged."
        )
    sure = "raised" if gain.low > 0 else "lowered" if gain.high < 0 else "did not clearly change"
    return (
        f"What the silos learned together {sure} nDCG@10 on {len(outcome.after)} queries that nobody judged:"
        f" {before:.3f} before, {after:.3f} after, {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}];"
        f" {gain.helped} queries gained, {gain.hurt} lost, {gain.lost_much} of them more than {MUCH:g}."
    )


def _difference(outcome: SearchOutcome) -> Difference:
    return Difference.of(np.array(outcome.after), np.array(outcome.before), np.array(outcome.groups))


def _gained(outcome: SearchOutcome) -> Section:
    record: dict[str, Any] = outcome.learned["record"]
    chosen = (
        f"Cross-validated in the federation, {record['kind']} was adopted: {record['why']}."
        if record["adopted"]
        else f"Cross-validated in the federation, the best was {record['best']}, and was not adopted:"
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
            f" {probabilities[near].mean():.2f}), {share.value:.0%} were right [{share.low:.0%},"
            f" {share.high:.0%}]."
        )
    else:
        promise = f"No hit was shown with a probability from {NEAR[0]} to {NEAR[1]}."
    curve, floor = reliability(probabilities, right), sampling_floor(probabilities)
    verdict = "not told from a perfect one" if curve.ece <= floor.high else "worse than a perfect one"
    return Section(
        "How honest 0.8 is",
        (
            promise,
            f"Over all {len(right):,} hits shown, probabilities are off by {curve.ece:.3f} on average; a"
            f" perfect model with as many hits would be off by {floor.mean:.3f}, and in 95 of 100 cases by at"
            f" most {floor.high:.3f}: {verdict}.",
        ),
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
    return Section(
        "A question that nobody can answer",
        (f"“{answer['query']}”: {verdict}{unlike}. Of all hits shown above {base:.0%} were right.",),
    )


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
            "By the silos' own ledgers, which book before anything leaves: so many scores, snippets and so"
            " on; of how common words are, so many documents. Sums over judged queries leave under masks:"
            " the broker reads the total of the four silos.",
            Table(("what left", "guarantee", *silos), rows),
        ),
    )
