"""What is wrong in a federation, and what to do about it: `isthmus doctor --federation`.

    findings = check_federation(client.silos(), client.learning())

All facts come from what silos report to their broker; nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from isthmus.errors import several
from isthmus.service import wire
from isthmus.service.encoding import another_encoder
from isthmus.service.versions import NONE

DAY = 86_400.0
SOON = 14.0
"""Days before the end of a certificate from which it is reported."""
MOST_SKEW = 5.0
"""Seconds by which clocks may differ. If they differ by more than 60, messages are refused as replays."""
REFUSED_SKEW = 60.0
LEAST_LEFT = 0.1
"""Share of a budget that is left, below which it is reported."""
LEAST_DISK, LEAST_DISK_BYTES = 0.05, 1 << 30
"""Free share and free bytes of a disk; below both it is reported."""
CURES: dict[wire.Status, str] = {
    "down": "does its process run? isthmus node --config silo.toml there; the end of its log says why",
    "late": "is the machine overloaded or the way there slow? see isthmus_silo_seconds, or raise deadline_ms",
    "refused": "its owner lets this broker in by [peers.NAME] in silo.toml; compare certificate and key",
    "broken": "is url in broker.toml that of the silo? isthmus keys renew KEYS {silo} for its certificate",
}


@dataclass(frozen=True)
class Finding:
    """Something that needs attention: the party, what was checked, the fact, and the cure."""

    party: str
    check: str
    fact: str
    cure: str


def check_federation(
    silos: wire.SiloList, learning: wire.LearningView, *, now: float | None = None
) -> list[Finding]:
    """Return all findings by party, the broker's own first."""
    now = time.time() if now is None else now
    findings = list(_of_machine("broker", silos.machine, silos.machine, now))
    for silo in silos.silos:
        if silo.status != "answered":
            cure = CURES[silo.status].format(silo=silo.silo)
            if "certificate" in silo.detail:
                cure = f"isthmus keys renew KEYS {silo.silo}, unless it was revoked on purpose"
                if "self-signed" in silo.detail or "issuer" in silo.detail:
                    cure = (
                        "another authority signed it: is the address in broker.toml that of this silo's node?"
                    )
            findings.append(Finding(silo.silo, "reached", f"{silo.status}: {silo.detail}", cure))
            continue
        findings += _of_silo(silo, silos, learning, now)
    if learning.problem:
        findings.append(Finding("broker", "model", learning.problem, "isthmus learn, once that is mended"))
    return findings


def _of_silo(
    silo: wire.SiloState, silos: wire.SiloList, learning: wire.LearningView, now: float
) -> Iterator[Finding]:
    ready, name = silo.ready, silo.silo
    if ready is None:
        return
    if not ready.ready:
        yield Finding(name, "ready", ready.detail or "not ready", "wait until it is; its log says how far")
    yield from _of_clock(silo)
    yield from _of_machine(name, ready.machine, silos.machine, now)
    if ready.search_level < wire.SEARCH_LEVEL:
        fact = f"speaks level {ready.search_level} of the protocol, the broker {wire.SEARCH_LEVEL}"
        yield Finding(name, "version", fact, "upgrade the nodes, then the broker")
    if not ready.engine and another_encoder(ready.encoder, silos.encoder):
        fact = f"encoder {ready.encoder_name or ready.encoder or 'none'}, most silos have another"
        yield Finding(name, "encoder", fact, "give it theirs: [encoder] in its silo.toml, then restart")
    if ready.level != "scores" and learning.current not in ("", NONE, ready.model):
        fact = f"searches with {ready.model or 'no model'}, not with {learning.current}"
        cure = "it is being sent it: check again; if that stays, learning = true in its [peers.NAME]"
        yield Finding(name, "model", fact, cure)
    if ready.level != "scores":
        yield from _of_statistics(silo, silos)
    if ready.unread:
        fact = f"{several(ready.unread, 'file or row', 'files or rows')} of its sources could not be read"
        yield Finding(name, "sources", fact, "isthmus node reload --config silo.toml there names them")
    yield from _of_release(silo)


def _of_clock(silo: wire.SiloState) -> Iterator[Finding]:
    skew = silo.skew
    if skew is None or abs(skew) <= MOST_SKEW:
        return
    way = "ahead of" if skew > 0 else "behind"
    fact = f"its clock is {abs(skew):,.0f} s {way} the broker's"
    if abs(skew) > REFUSED_SKEW:
        fact += ": it takes every message for a replay"
    yield Finding(silo.silo, "clock", fact, "synchronise both clocks: timedatectl set-ntp true, or chrony")


def _of_machine(
    party: str, machine: wire.Machine | None, broker: wire.Machine | None, now: float
) -> Iterator[Finding]:
    if machine is None:
        return
    if machine.certificate_ends is not None:
        days = (machine.certificate_ends - now) / DAY
        if days < SOON:
            fact = f"ends in {days:.0f} days, {_day(machine.certificate_ends)}"
            if days < 1:
                fact = f"{'has ended' if days < 0 else 'ends'} at {wire.moment(machine.certificate_ends)}"
            cure = f"isthmus keys renew KEYS {party}, and copy tls.key, then tls.crt there"
            yield Finding(party, "certificate", fact, cure)
    if broker is not None and broker.revocations is not None:
        own = machine.revocations
        if own is None or own < broker.revocations:
            fact = "no list of revoked certificates" if own is None else f"its list is of {_day(own)}"
            fact += f", the broker's of {_day(broker.revocations)}"
            yield Finding(party, "revocations", fact, "copy ca.crl from the authority beside its ca.crt")
    if broker is not None and machine.version != broker.version:
        fact = f"isthmus {machine.version}, the broker has {broker.version}"
        yield Finding(party, "version", fact, "upgrade the nodes one by one, then the broker")
    free, size = machine.disk_free, machine.disk_free_bytes
    if free is not None and size is not None and free < LEAST_DISK and size < LEAST_DISK_BYTES:
        fact = f"{100 * free:.0f} % free, {size / 1e6:,.0f} MB"
        yield Finding(party, "disk", fact, "make room: without it neither ledger nor index can be written")


def _of_statistics(silo: wire.SiloState, silos: wire.SiloList) -> Iterator[Finding]:
    own = {each.silo: each.ready.statistics for each in silos.silos if each.ready is not None}
    versions = [version for version in own.values() if version]
    agreed = silos.statistics or max(versions, key=versions.count, default="")
    shares = silo.release is not None and any(peer.counts for peer in silo.release.peers)
    if "statistics" in silo.detail:
        cure = "one form, hash key and analysis in all silo.toml ([statistics], [encoder])"
        yield Finding(silo.silo, "statistics", silo.detail, cure)
    elif agreed and shares and own[silo.silo] != agreed:
        version = own[silo.silo]
        fact = "scores with other statistics than the rest" if version else "has no shared statistics yet"
        yield Finding(silo.silo, "statistics", fact, "it is sent them: check again in a minute")


def _of_release(silo: wire.SiloState) -> Iterator[Finding]:
    release = silo.release
    if release is None:
        return
    if release.outdated_model:
        fact = "its model was learned with judgements of documents that were erased since"
        yield Finding(silo.silo, "model", fact, "isthmus learn")
    for peer in release.peers:
        if peer.left is None or peer.budget is None or not (peer.counts or peer.noised_counts):
            continue
        if peer.left <= 0 or peer.left < LEAST_LEFT * peer.budget:
            spent = "spent" if peer.left <= 0 else f"{peer.left:.3g} of {peer.budget:g} left"
            fact = f"ε towards {peer.peer}: {spent}"
            cure = (
                "statistics stay as they are and counts are refused; the owner may raise budget in silo.toml"
            )
            yield Finding(silo.silo, "budget", fact, cure)


def facts_of_silo(silo: wire.SiloState) -> dict[str, str]:
    """Return the state of a silo as texts by label, for a person."""
    ready, release = silo.ready, silo.release
    facts: dict[str, str] = {"state": silo.status if ready is None or ready.ready else "not ready"}
    if ready is None:
        return facts
    machine = ready.machine or wire.Machine()
    facts["isthmus"] = machine.version or "unknown"
    if machine.certificate_ends is not None:
        facts["certificate"] = f"to {_day(machine.certificate_ends)}"
    if silo.skew is not None:
        facts["clock"] = f"{silo.skew:+.1f} s"
    facts["documents"] = f"{ready.documents:,}"
    facts["encoder"] = ready.encoder_name or "none"
    facts["model"] = ready.model or "none"
    if release is not None:
        # exact statistics cannot be shown: their row also sums up what was learned and judged
        noised = [each for each in release.departures if each.mechanism == "totals"]
        if noised:
            last = max(noised, key=lambda each: each.last)
            facts["statistics"] = f"of {last.last} ({last.guarantee})"
        if release.least_left is not None:
            facts["budget"] = f"{release.least_left:.3g} ε left"
    if machine.disk_free is not None:
        facts["disk"] = f"{100 * machine.disk_free:.0f} % free"
    return facts


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
