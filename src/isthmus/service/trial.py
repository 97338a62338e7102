"""A running federation, tried from outside as a browser and a program would: does it keep its promises?

What is promised and not found is a ServiceError that says so; what was seen is told promise by promise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import httpx

from isthmus.errors import Refused, ServiceError
from isthmus.service import wire
from isthmus.service.client import Client
from isthmus.service.local import Federation

PAGES = ("/", "/static/app.js", "/static/style.css", "/v1/openapi.json")
ALL_AT_ONCE = 3
"""Silos that one search must find something in."""
CLOSE = 1e-3


def examine(federation: Federation, queries: Sequence[str]) -> dict[str, str]:
    """What was seen of the page, of searches, and of what the four views show."""
    federation.check()
    with federation.client() as broker:
        return {
            "page": _pages(federation.url),
            "search": _searches(broker, queries),
            "silos": _silos(broker),
            "training": _training(broker),
            "calibration": _calibration(broker, list(federation.settings.silos)),
        }


def _pages(url: str) -> str:
    with httpx.Client(base_url=url, timeout=30.0) as browser:
        for path in PAGES:
            reply = browser.get(path)
            _promise(reply.status_code == 200, f"{path} is served")
            _promise("content-security-policy" in reply.headers, f"{path} has a Content-Security-Policy")
    try:
        with Client(url, key="isthmus_nobody_nothing") as stranger:
            stranger.search("anything")
    except Refused:
        return "served, and a stranger's key is refused"
    raise ServiceError("a key that nobody made may search")


def _searches(broker: Client, queries: Sequence[str]) -> str:
    """Every query is answered by all silos with probabilities and reasons; one finds something in three."""
    most, times = set[str](), []
    for query in queries:
        answer = broker.search(query, explain=True)
        _promise(all(silo.status == "answered" for silo in answer.silos), "all silos answer")
        _promise(bool(answer.hits), "a search finds something")
        chances = [hit.probability for hit in answer.hits]
        _promise(all(chance is not None for chance in chances), "every hit has a probability")
        _check_reasons(answer.hits)
        most = max(most, {hit.silo for hit in answer.hits}, key=len)
        times.append(answer.took_ms)
    _promise(len(most) >= ALL_AT_ONCE, f"a search finds something in {ALL_AT_ONCE} silos")
    return f"hits of {len(most)} silos in one list, each with a probability and reasons that add up"


def _check_reasons(hits: Sequence[wire.Hit]) -> None:
    """Contributions and a start that all hits of a silo have in common make up the log-odds."""
    starts: dict[str, list[float]] = {}
    for hit in hits:
        parts, chance = hit.explanation or [], hit.probability or 0.0
        _promise(bool(parts), "every hit has its reasons")
        if 0 < chance < 1:
            told = sum(part.contribution for part in parts)
            starts.setdefault(hit.silo, []).append(math.log(chance / (1 - chance)) - told)
    apart = max((max(each) - min(each) for each in starts.values()), default=0.0)
    _promise(apart < CLOSE, "reasons add up to the probability")


def _silos(broker: Client) -> str:
    told = broker.silos()
    for silo in told.silos:
        _promise(silo.ready is not None and silo.ready.ready, f"{silo.silo} is ready")
        _promise(silo.release is not None, f"{silo.silo} tells what it has released")
    held = sum(silo.ready.documents for silo in told.silos if silo.ready is not None)
    return f"{len(told.silos)} ready, {held:,} documents"


def _training(broker: Client) -> str:
    run = broker.training()
    _promise(run.finished and bool(run.rounds), "the training run is told")
    (name, value), *_ = run.final.items()
    return f"{len(run.rounds)} rounds, {name} {value:.3f} on queries kept from it"


def _calibration(broker: Client, silos: Sequence[str]) -> str:
    curves = [curve for curve in broker.calibration().curves if curve.retriever == "shown"]
    _promise({curve.silo for curve in curves} == set(silos), "every silo has a reliability curve")
    hits = sum(curve.count for curve in curves)
    gaps: dict[float, float] = {}
    for each in (each for curve in curves for each in curve.bins):
        gaps[each.low] = gaps.get(each.low, 0.0) + (each.predicted - each.observed) * each.count
    off = sum(map(abs, gaps.values())) / hits
    worst = max(curves, key=lambda curve: curve.ece)
    return (
        f"off by {off:.3f} on average over {hits:,} hits; by {worst.ece:.3f} in {worst.silo}"
        f" (a perfect model at its size: {worst.floor or 0.0:.3f})"
    )


def _promise(kept: bool, promise: str) -> None:
    if not kept:
        raise ServiceError(f"the federation does not do what it should: {promise}")
