"""Threads that keep processors busy: results, failures, turns that are given up, and who works next."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from isthmus.service.processors import Processors


def test_results_and_failures_come_back():
    async def trial():
        processors = Processors(2, "test")
        assert await asyncio.gather(*(processors.run(lambda at=at: at * at) for at in range(20))) == [
            at * at for at in range(20)
        ]
        with pytest.raises(ZeroDivisionError):
            await processors.run(lambda: 1 // 0)
        assert await processors.run(lambda: "goes on") == "goes on"

    asyncio.run(trial())


def test_no_more_threads_than_it_may_have_and_the_last_one_works_next():
    async def trial():
        processors, seen, release = Processors(2, "test"), [], threading.Event()

        def work():
            seen.append(threading.current_thread().name)
            release.wait(10)

        tasks = [asyncio.create_task(processors.run(work)) for _ in range(6)]
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(seen) == 2, "the others wait for their turn"
        release.set()
        await asyncio.gather(*tasks)
        assert len(seen) == 6
        assert len(set(seen)) == 2
        await asyncio.sleep(0.05)  # both are idle
        names = {await processors.run(lambda: threading.current_thread().name) for _ in range(10)}
        assert len(names) == 1

    asyncio.run(trial())


def test_a_turn_that_nobody_waits_for_is_given_up():
    async def trial():
        processors, release, done = Processors(1, "test"), threading.Event(), []
        first = asyncio.create_task(processors.run(lambda: release.wait(10)))
        second = asyncio.create_task(processors.run(lambda: done.append("second")))
        third = asyncio.create_task(processors.run(lambda: done.append("third")))
        await asyncio.sleep(0.05)
        second.cancel()
        first.cancel()  # its thread goes on, and what it has is dropped
        await asyncio.sleep(0.01)
        release.set()
        await third
        assert done == ["third"]
        assert first.cancelled()
        assert second.cancelled()

    asyncio.run(trial())


def test_what_a_job_was_about_is_not_kept():
    class Body:
        pass

    async def trial():
        processors, body = Processors(1, "test"), Body()
        known = weakref.ref(body)
        await processors.run(lambda body=body: None)
        del body
        await asyncio.sleep(0.05)
        gc.collect()
        assert known() is None

    asyncio.run(trial())
