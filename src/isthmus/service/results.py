"""Merge silos' answers into one list: sort hits, fold duplicates, sum matches, propose other spellings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from isthmus.languages import detect, tokeniser_of
from isthmus.service import wire
from isthmus.service.query_language import ParsedQuery
from isthmus.service.spelling import edits
from isthmus.text import STOP_WORDS

MOST_EDITS = 2
"""Most edits between a word and another spelling of it."""
_WORD = re.compile(r"[^\W_]+")
_Keyed = tuple[float, float, int, str, int, wire.Hit]


def in_order(
    lists: Iterable[Sequence[wire.Hit]], *, last: Container[str] = (), apart: Collection[str] = ()
) -> list[wire.Hit]:
    """Sort the hits of several silos, each list best first: by probability, ties by score, then by the order
    in their silo. The first hits are the same however long the lists are.

    A hit without a probability comes after all that have one, and last if its silo is in `last`. A silo in
    `apart` has scores of its own engine: its hits take turns with those of the others.
    """

    rated, plain, odd = list[_Keyed](), list[_Keyed](), list[_Keyed]()
    number = 0  # a running number, so that sorting never compares two hits
    for hits in lists:
        for place, hit in enumerate(hits):
            number += 1
            silo, probability = hit.silo, hit.probability
            group = rated if probability is not None else odd if silo in last else plain
            group.append((-(probability or 0.0), -hit.score, place, silo, number, hit))
    rest = [each[-1] for group in (plain, odd) for each in sorted(group)]
    return [each[-1] for each in sorted(rated)] + (_in_turns(rest, apart) if apart else rest)


def _in_turns(hits: list[wire.Hit], apart: Collection[str]) -> list[wire.Hit]:
    """Interleave hits: one of each silo in `apart` and one of all others in every turn."""
    lists = [[hit for hit in hits if hit.silo not in apart]]
    lists += [[hit for hit in hits if hit.silo == silo] for silo in sorted(apart)]
    return [hit for turn in zip_longest(*lists) for hit in turn if hit is not None]


def group_copies(hits: Iterable[wire.Hit]) -> list[list[wire.Hit]]:
    """Group hits of different silos that have the same text, best first, at the position of the best hit. No
    silo is trusted about what another silo has."""
    groups_in_order: list[list[wire.Hit]] = []
    groups: dict[str, list[list[wire.Hit]]] = {}
    for hit in hits:
        known = groups.setdefault(hit.digest, []) if hit.digest else []
        home = None
        if known:
            home = next((group for group in known if all(each.silo != hit.silo for each in group)), None)
        if home is None:
            home = []
            groups_in_order.append(home)
            known.append(home)
        home.append(hit)
    return groups_in_order


def folded(group: Sequence[wire.Hit]) -> wire.Hit:
    """Return the first hit of a group, with the others in `also`; digests are removed."""
    hit, *copies = group
    if not hit.digest and not hit.also:
        return hit
    also = [wire.HitCopy(**each.model_dump(include=set(wire.HitCopy.model_fields))) for each in copies]
    return hit.model_copy(update={"digest": "", "also": also})


def has_more(lists: Iterable[Sequence[wire.Hit]], depth: int, threshold: float) -> bool:
    """Whether a silo that was asked for `depth` hits may have more that pass the threshold."""
    full = [hits for hits in lists if len(hits) >= depth] if depth < wire.MOST_HITS else []
    return any((hits[-1].probability or 0.0) >= threshold for hits in full)


def facets_of(answers: Mapping[str, wire.NodeAnswer]) -> wire.Facets | None:
    """Sum the matches of all silos that report counts; None if none does."""
    counted = {silo: answer.matches for silo, answer in answers.items() if answer.matches is not None}
    if not counted:
        return None
    types: Counter[str] = Counter()
    years: Counter[str] = Counter()
    for each in counted.values():
        types.update(each.types)
        years.update({str(year): count for year, count in each.years.items()})
    silos = {silo: each.count for silo, each in counted.items()}
    return wire.Facets(
        matches=sum(silos.values()),
        silos=silos,
        types=dict(types.most_common(wire.MOST_FACETS)),
        years=dict(sorted(years.items(), key=lambda each: int(each[0]), reverse=True)[: wire.MOST_FACETS]),
    )


def suggestion_of(
    query: str, answers: Mapping[str, wire.NodeAnswer], misread: Sequence[range] = ()
) -> wire.Suggestion | None:
    """Propose another spelling of words that are rare in every silo that reports spellings, except in places
    where the query was misread.

    A silo that has the word vetoes it. Of several spellings the nearest is chosen, then the one that most
    silos propose. Proposals that are not a single word with similar spelling are ignored: a silo could use
    them to put its own words, or a filter, into a person's query.
    """
    proposals = {silo: answer.spellings for silo, answer in answers.items() if answer.spellings is not None}
    rare = [{each.word for each in spellings} for spellings in proposals.values()]
    instead: dict[str, str] = {}
    silos: dict[str, None] = {}
    there = {each.group().lower() for each in _WORD.finditer(query) if not _is_within(each, misread)}
    for word in sorted(there.intersection(*rare)) if rare else ():
        votes: Counter[str] = Counter()
        homes: dict[str, list[str]] = {}
        for silo, spellings in proposals.items():
            for spelling in (like for each in spellings if each.word == word for like in each.like):
                if not _WORD.fullmatch(spelling) or edits(word, spelling, MOST_EDITS) > MOST_EDITS:
                    continue
                votes[spelling] += 1
                homes.setdefault(spelling, []).append(silo)
        if votes:
            best = min(votes, key=lambda like: (edits(word, like, MOST_EDITS), -votes[like], like))
            instead[word] = best
            silos |= dict.fromkeys(homes[best])
    if not instead:
        return None
    return wire.Suggestion(query=_respelled(query, instead, misread), words=instead, silos=list(silos))


def _respelled(query: str, instead: Mapping[str, str], misread: Sequence[range]) -> str:
    """Replace words of the query and leave the rest as it is."""

    def respelled(match: re.Match[str]) -> str:
        word = match.group()
        return word if _is_within(match, misread) else instead.get(word.lower(), word)

    return _WORD.sub(respelled, query)


def _is_within(match: re.Match[str], places: Sequence[range]) -> bool:
    return any(match.start() in place for place in places)


def narrowing_of(query: ParsedQuery) -> dict[str, Any]:
    """Return the filters of a query as nodes receive them, without empty ones."""
    lists = {
        "phrases": query.phrases,
        "prefixes": query.of("prefix"),
        "without": query.without,
        "types": query.of("type"),
        "other_types": query.of("other_type"),
    }
    bounds = {"since": query.since, "until": query.until}
    return {
        **{name: list(values) for name, values in lists.items() if values},
        **{name: bound for name, bound in bounds.items() if bound is not None},
    }


def understood_query(query: ParsedQuery, hints: Collection[str] = ()) -> wire.Understood:
    """Describe how a query was understood, for people."""
    parts = [
        wire.QueryPart(kind=part.kind, value=part.value, start=part.start, end=part.end)
        for part in query.parts
    ]
    text = query.words
    stops = STOP_WORDS | tokeniser_of(detect([text])[0]).stop_words
    words = list(dict.fromkeys(_WORD.findall(text.lower())))
    content = [word for word in words if word not in stops] or words
    marked = [*content, *(prefix.lower() for prefix in query.of("prefix"))]
    return wire.Understood(words=text, parts=parts, hints=[*query.hints, *hints], marked=marked)
