"""What `isthmus doctor --federation` finds in what silos say of themselves, fault by fault."""

from __future__ import annotations

import pytest

from isthmus.service.checkup import DAY, check_federation, facts_of_silo
from isthmus.service.wire import (
    SEARCH_LEVEL,
    Departure,
    LearningView,
    Machine,
    PeerBudget,
    Ready,
    SiloList,
    SiloRelease,
    SiloState,
)

NOW = 1_800_000_000.0
MACHINE = Machine(version="1.0", time=NOW, certificate_ends=NOW + 90 * DAY, revocations=NOW - DAY)
READY = Ready(
    ready=True,
    documents=7,
    statistics="s1",
    encoder="e1",
    encoder_name="bge",
    model="m1",
    search_level=SEARCH_LEVEL,
    machine=MACHINE,
)
PEER = PeerBudget(peer="broker", search=True, snippets=True, counts=True, budget=8.0, left=7.0)
RELEASE = SiloRelease(silo="south", documents=7, unit="document", peers=[PEER], departures=[])
LEARNED = LearningView(current="m1")


def changed(original, /, **changes):
    return original.model_copy(update=changes)


def found(*, ready=READY, release=RELEASE, detail="", skew=0.2, learning=LEARNED):
    """What is found of `south`, beside a `north` in order."""
    north = SiloState(silo="north", url="", status="answered", ready=READY, release=RELEASE, skew=0.0)
    south = changed(north, silo="south", ready=ready, release=release, detail=detail, skew=skew)
    silos = SiloList(silos=[north, south], statistics="s1", encoder="e1", machine=MACHINE)
    findings = check_federation(silos, learning, now=NOW)
    assert all(each.party == "south" for each in findings)
    return {each.check: (each.fact, each.cure) for each in findings}


def test_nothing_is_found_where_all_is_in_order():
    assert found() == {}


@pytest.mark.parametrize(
    ("check", "fact", "cure", "fault"),
    [
        ("ready", "indexing", "wait", {"ready": {"ready": False, "detail": "indexing"}}),
        ("version", "isthmus 0.9, the broker has 1.0", "upgrade", {"machine": {"version": "0.9"}}),
        ("version", "speaks level 0 of the protocol", "upgrade", {"ready": {"search_level": 0}}),
        ("certificate", "ends in 5 days", "keys renew", {"machine": {"certificate_ends": NOW + 5 * DAY}}),
        ("certificate", "has ended at", "keys renew", {"machine": {"certificate_ends": NOW - 1}}),
        ("revocations", "no list", "copy ca.crl", {"machine": {"revocations": None}}),
        ("revocations", "its list is of", "copy ca.crl", {"machine": {"revocations": NOW - 9 * DAY}}),
        ("disk", "1 % free, 500 MB", "room", {"machine": {"disk_free": 0.01, "disk_free_bytes": 5 * 10**8}}),
        (
            "encoder",
            "encoder minilm",
            "give it theirs",
            {"ready": {"encoder": "e2", "encoder_name": "minilm"}},
        ),
        ("model", "searches with m0, not with m1", "learning = true", {"ready": {"model": "m0"}}),
        ("model", "erased since", "isthmus learn", {"release": {"outdated_model": True}}),
        ("statistics", "scores with other statistics", "a minute", {"ready": {"statistics": "s2"}}),
        ("statistics", "no shared statistics yet", "a minute", {"ready": {"statistics": ""}}),
        ("statistics", "statistics of another form", "one form", {"detail": "statistics of another form"}),
        ("clock", "30 s behind the broker's", "synchronise", {"skew": -30.0}),
        ("clock", "takes every message for a replay", "synchronise", {"skew": 90.0}),
        ("budget", "0.5 of 8 left", "raise budget", {"peer": {"left": 0.5}}),
        ("budget", "spent", "raise budget", {"peer": {"left": 0.0}}),
        ("sources", "2 files or rows", "node reload", {"ready": {"unread": 2}}),
    ],
)
def test_one_fault_is_one_finding_with_its_cure(check, fact, cure, fault):
    machine = changed(MACHINE, **fault.get("machine", {}))
    peers = [changed(PEER, **fault.get("peer", {}))]
    others = {name: fault[name] for name in ("detail", "skew") if name in fault}
    findings = found(
        ready=changed(READY, machine=machine, **fault.get("ready", {})),
        release=changed(RELEASE, peers=peers, **fault.get("release", {})),
        **others,
    )
    assert findings.keys() == {check}
    assert fact in findings[check][0]
    assert cure in findings[check][1]


def test_before_anything_is_learned_no_model_is_missed():
    assert found(ready=changed(READY, model=""), learning=LearningView()) == {}
    (finding,) = check_federation(SiloList(silos=[]), LearningView(problem="too few judgements"), now=NOW)
    assert (finding.party, finding.check, finding.fact) == ("broker", "model", "too few judgements")


@pytest.mark.parametrize(
    ("detail", "cure"),
    [
        ("self-signed certificate in certificate chain", "another authority signed it"),
        ("certificate revoked", "isthmus keys renew KEYS north, unless it was revoked on purpose"),
    ],
)
def test_a_certificate_of_another_authority_is_not_to_be_renewed(detail, cure):
    told = f"its certificate is not the one expected: {detail}"
    silo = SiloState(silo="north", url="", status="broken", detail=told)
    (finding,) = check_federation(SiloList(silos=[silo]), LearningView())
    assert finding.cure.startswith(cure)


def test_sums_that_were_learned_from_are_not_taken_for_word_statistics():
    sums = Departure(kind="sums", peer="broker", guarantee="no DP guarantee", times=1, items=9, last="12:00")
    noised = changed(sums, guarantee="ε = 1", mechanism="totals", last="10:00")
    for departures, statistics in (([noised, sums], "of 10:00 (ε = 1)"), ([sums], None)):
        release = changed(RELEASE, departures=departures)
        state = SiloState(silo="north", url="", status="answered", ready=READY, release=release)
        assert facts_of_silo(state).get("statistics") == statistics
