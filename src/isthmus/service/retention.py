"""How long a silo stores documents and judgements: rules of its sources, applied at the start and every day.

    sources = [{kind = "folder", path = "letters", keep_days = 365, keep_judgements_days = 90}]

Older documents are erased like withdrawn ones, with a receipt, and their source does not bring them back. A
clock that jumps must not empty a silo: if more than half of its documents or judgements would go at once,
nothing is erased until the operator confirms it. The same holds while the clock is behind the last time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from isthmus.errors import several
from isthmus.files import write_private
from isthmus.service import wire
from isthmus.service.erasure import erase
from isthmus.service.node import Node

DAY = 86_400.0
MOST = 0.5
"""Largest share of documents, or of judgements, that may be erased without confirmation."""
STATE = "retention.json"
"""File in the node's folder with the time at which rules were applied last."""

_log = logging.getLogger("isthmus.service")


def apply_retention(
    node: Node, *, dry_run: bool = False, confirmed: bool = False, clock: Callable[[], float] = time.time
) -> wire.RetentionReport:
    """Erase what is older than the sources' rules allow; with `dry_run`, only report what would be erased."""
    now, store = clock(), node.store
    rules = [each for each in node.settings.sources if each.keep_days or each.keep_judgements_days]
    if not rules:
        return wire.RetentionReport(silo=node.settings.silo, at=wire.moment(now))
    if not dry_run:
        store.settle_arrivals(now)
    due, states = list[str](), list[wire.SourceRetention]()
    for source in rules:
        days, judged_days = source.keep_days, source.keep_judgements_days
        ids = (
            store.expired(source.label, before=now - days * DAY, arrival=source.keep_by == "arrival")
            if days
            else []
        )
        old = store.expired_judgements(source.label, before=now - judged_days * DAY) if judged_days else 0
        due += ids
        states.append(
            wire.SourceRetention(
                source=source.label,
                keep_days=days,
                keep_judgements_days=judged_days,
                documents=len(ids),
                judgements=old,
            )
        )
    report = wire.RetentionReport(
        silo=node.settings.silo,
        at=wire.moment(now),
        sources=states,
        ids=due[: wire.MOST_ROWS],
        waits="" if confirmed else _doubt(node, len(due), sum(each.judgements for each in states), now),
    )
    if dry_run or report.waits:
        if report.waits and not dry_run:
            _log.error("retention: %s; nothing was erased", report.waits)
        return report
    return _applied(node, report, due, now)


def _doubt(node: Node, documents: int, judgements: int, now: float) -> str:
    """Return why erasing needs confirmation; "" if it does not."""
    cure = "isthmus documents retention --confirm, if that is meant"
    file = node.settings.folder / STATE
    last = json.loads(file.read_bytes())["at"] if file.exists() else 0.0
    if now < last:
        return f"the clock is behind {wire.moment(last)}, when rules were applied last: set it, or {cure}"
    for count, total, noun in (
        (documents, node.store.count(), "document"),
        (judgements, node.store.count_judgements(), "judgement"),
    ):
        if count > MOST * total:
            return f"{several(count, noun)} of {total:,} would go, more than half: check the clock; {cure}"
    return ""


def _applied(node: Node, report: wire.RetentionReport, due: list[str], now: float) -> wire.RetentionReport:
    for source in report.sources:
        if source.keep_judgements_days and source.judgements:
            before = now - source.keep_judgements_days * DAY
            node.store.expired_judgements(source.source, before=before, forget=True)
    receipt = erase(node, due, why="retention") if due else None
    write_private(node.settings.folder / STATE, json.dumps({"at": now}).encode())
    judgements = sum(each.judgements for each in report.sources)
    if due or judgements:
        _log.info(
            "retention: %s and %s erased", several(len(due), "document"), several(judgements, "judgement")
        )
    return report.model_copy(update={"done": True, "receipt": receipt})
