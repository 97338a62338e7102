"""A silo that answers just often enough to be waited for must not hold everybody to the deadline."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import contextmanager
from itertools import cycle

import pytest

from isthmus.service.breaker import MOST_DEBT, TIMELY, Breaker
from isthmus.service.broker import Broker
from isthmus.service.settings import BreakerSettings, BrokerSettings, SiloAddress
from isthmus.service.wire import Search
from silo_stand_in import Loop, StandIn

DEADLINE = 0.6
HOSTILE = "west"


class Moody(StandIn):
    """A silo whose searches take as long as its next mood says."""

    def __init__(self, name, moods):
        super().__init__(name)
        self.moods = cycle(moods)

    def pause(self):
        return next(self.moods)


@contextmanager
def federation(folder, hostile):
    """A broker, two silos that answer, and one with moods."""
    loop = Loop()
    silos = [StandIn("east"), StandIn("north"), hostile]
    try:
        urls = {silo.name: SiloAddress(f"http://127.0.0.1:{loop.serve(silo).port}") for silo in silos}
        settings = BrokerSettings(
            folder=folder, silos=urls, deadline_ms=int(1000 * DEADLINE), share_statistics=False
        )

        async def start():
            return Broker(settings)

        broker = loop.run(start())
        yield loop, broker
        loop.run(broker.stop())
    finally:
        loop.close()


async def timed(broker, searches, people):
    """The seconds and the hostile silo's status of every search, by people who search one after another."""
    seen = []

    async def person():
        for _ in range(searches // people):
            began = time.monotonic()
            answer = await broker.search(Search(query="tides"))
            state = {each.silo: each for each in answer.silos}
            assert state["east"].status == state["north"].status == "answered"
            seen.append((time.monotonic() - began, state[HOSTILE]))
            await asyncio.sleep(0.02)

    await asyncio.gather(*(person() for _ in range(people)))
    return seen


@pytest.mark.soak
@pytest.mark.parametrize(
    ("people", "moods"), [(1, (0.0, 5.0)), (8, (0.0, 0.0, 0.0, 5.0))], ids=["every other", "every fourth"]
)
def test_who_alternates_good_and_late_answers_holds_nobody_up(tmp_path, soak_count, people, moods):
    with federation(tmp_path, Moody(HOSTILE, moods)) as (loop, broker):
        loop.run(timed(broker, 12 * people, people), 120)  # the broker gets to know it
        seen = loop.run(timed(broker, soak_count(80, 2000), people), 600)
        times = sorted(seconds for seconds, _ in seen)
        assert statistics.median(times) < DEADLINE / 4
        assert times[int(0.95 * len(times))] < DEADLINE / 2
        left = [state.detail for _, state in seen if state.status == "late"]
        assert left
        assert all("slow or failing lately, not waited for" in detail for detail in left)
        assert any(state.status == "answered" for _, state in seen)  # what comes in time is used


def test_trust_comes_back_with_answers_in_time(tmp_path):
    """Also for a silo that is always slower than the others: what counts is the deadline."""
    silo = Moody(HOSTILE, (0.0, 5.0))
    with federation(tmp_path, silo) as (loop, broker):
        loop.run(timed(broker, 24, 1), 60)
        assert broker.silos[HOSTILE].breaker.on_trial
        silo.moods = cycle([DEADLINE / 3])
        [(_, first)] = loop.run(timed(broker, 1, 1))
        assert "slow or failing lately" in first.detail
        for _ in range(MOST_DEBT):
            loop.run(timed(broker, 4, 4))
            if not broker.silos[HOSTILE].breaker.on_trial:
                break
        [(_, last)] = loop.run(timed(broker, 1, 1))
        assert last.status == "answered"


def test_a_search_that_tries_a_failing_silo_again_does_not_wait_for_it(tmp_path):
    """It failed at once, and then hangs."""
    silo = Moody(HOSTILE, [0.0])
    silo.behave = (500, b"text/plain", b"")
    with federation(tmp_path, silo) as (loop, broker):
        loop.run(timed(broker, 3, 1))
        silo.moods = cycle([5.0])
        until = time.monotonic() + 120
        while broker.silos[HOSTILE].breaker.state != "half open" and time.monotonic() < until:
            time.sleep(0.02)
        [(seconds, state)] = loop.run(timed(broker, 1, 1))
        assert state.status == "late"
        assert seconds < DEADLINE / 2


def test_the_only_silo_that_is_asked_is_waited_for(tmp_path):
    with federation(tmp_path, Moody(HOSTILE, [DEADLINE / 3])) as (loop, broker):
        for _ in range(3):
            broker.silos[HOSTILE].breaker.delayed()
        answer = loop.run(broker.search(Search(query="tides", silos=[HOSTILE])))
        assert [each.status for each in answer.silos] == ["answered"]


class TestWhoIsToBlame:
    """Sent at 0, given up at 2; what else the silo answered meanwhile says whether it had a queue."""

    @pytest.mark.parametrize(
        ("answers", "own"),
        [
            ([], True),
            ([(-1.0, 0.5), (0.0, 1.2), (0.1, 1.9)], False),  # one after another, about in the order they came
            ([(1.5, 1.6)], True),  # one that came much later was answered first
        ],
        ids=["silence", "a queue", "overtaken"],
    )
    def test_lateness(self, answers, own):
        now = [0.0]
        breaker = Breaker(BreakerSettings(failures=100), clock=lambda: now[0])
        for _ in range(3):
            for sent, now[0] in answers:
                breaker.responded(sent)
            now[0] = 2.0
            breaker.held_up(0.0)
        assert breaker.on_trial == own

    def test_one_delay_in_many_answers_is_forgiven(self):
        breaker = Breaker(BreakerSettings())
        for _ in range(50):
            breaker.delayed()
            assert not breaker.on_trial
            for _ in range(TIMELY):
                breaker.succeeded()
