"""What the threat model says is not stopped while silos learn, done: whoever stops it turns this around."""

from __future__ import annotations

import numpy as np

from isthmus.asking import Silos
from isthmus.learning import GainsOf, learn
from isthmus.learning.columns import DISCOUNTS, HITS
from isthmus.learning.model import standardised
from learning_rows import FOLDS, dealt, made_rows

QUERIES = 60
PLACES = {
    round(float(DISCOUNTS[list(places)].sum()), 7): set(places)
    for places in ([at for at in range(HITS) if bits >> at & 1] for bits in range(1 << HITS))
}
"""Which places are relevant, by the DCG@10 that they make up: no two sets make up the same."""


def fits(lists, right):
    """Whether no hit is relevant in one list of a query and not in another."""
    relevant = {hits[place] for hits, places in zip(lists, right, strict=True) for place in places}
    return not any(
        hits[place] in relevant
        for hits, places in zip(lists, right, strict=True)
        for place in set(range(HITS)) - places
    )


def test_gains_of_unnamed_queries_fit_the_lists_of_one():
    """A broker asks nothing but what learning asks. It has totals of gains in an order it does not know, and
    the lists of every query by its own searches: for most gains one query is left that they can be of."""
    table, relevant, query = made_rows(3, queries=QUERIES)
    rankings, totals = {}, {}

    def overheard(rows):
        def answer(question):
            told = rows.answer(question)
            if isinstance(question, GainsOf):
                rankings[id(question)] = question
                totals[id(question)] = totals.get(id(question), 0.0) + told
            return told

        return answer

    silos = dealt((table, relevant, query), 3)
    names = [f"query {at}" for at in range(QUERIES)]
    learn(Silos.in_memory({name: overheard(rows) for name, rows in silos.items()}), names, folds=FOLDS)
    fold, lists = np.arange(QUERIES) % FOLDS, []
    for question in rankings.values():
        weights = np.broadcast_to(question.weights, (FOLDS, table.shape[1]))
        margins = (standardised(table, question.centre, question.scale) * weights[fold[query]]).sum(axis=1)
        order = np.lexsort((-margins, query)).reshape(QUERIES, -1)
        lists.append(order[:, :HITS].tolist())
    recognised = 0
    for outcome in np.random.default_rng(0).permutation(QUERIES).tolist():
        right = [PLACES[round(float(total[outcome]), 7)] for total in totals.values()]
        same_fold = np.flatnonzero(fold == fold[outcome]).tolist()
        possible = [at for at in same_fold if fits([each[at] for each in lists], right)]
        recognised += possible == [outcome]
    assert recognised > QUERIES / 2
