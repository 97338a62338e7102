"""Processes that write a silo's keys at the same time: nobody's work is undone, and no reader finds a gap."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Event

import pytest

from isthmus.errors import DataError
from isthmus.private.keys import GroupKey, Identity, Keyring

AT_ONCE = 8


def together(works: Iterable[Callable[[], object]]) -> list[Future[object]]:
    """Run all at the same moment. Locks are of open files, so threads stand for processes."""
    works = list(works)
    barrier = Barrier(len(works))

    def started(work: Callable[[], object]) -> object:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [pool.submit(started, work) for work in works]


@pytest.mark.soak
def test_the_latest_group_key_stays(tmp_path: Path, soak_count: Callable[[int, int], int]) -> None:
    for trial in range(soak_count(25, 500)):
        keys = Keyring.at(tmp_path / str(trial), create=True)
        keys.join(GroupKey.fresh(epoch=1))
        later = [GroupKey.fresh(epoch=epoch) for epoch in range(2, 2 + AT_ONCE)]
        done = together([partial(Keyring(keys.path).join, key) for key in later])
        errors = [future.exception() for future in done if future.exception() is not None]
        assert all(isinstance(error, DataError) and "another key" in str(error) for error in errors), errors
        assert keys.group_key() == later[-1]


@pytest.mark.soak
def test_a_reader_never_misses_the_key(tmp_path: Path, soak_count: Callable[[int, int], int]) -> None:
    """The old one or the new one, while the one takes the other's place."""
    keys = Keyring.at(tmp_path / "silo", create=True)
    keys.join(GroupKey.fresh(epoch=0))
    over = Event()

    def read() -> int:
        count = 0
        while not over.is_set() or not count:
            Keyring(keys.path).group_key()
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            for epoch in range(1, soak_count(100, 2_000)):
                keys.join(GroupKey.fresh(epoch=epoch))
        finally:
            over.set()
        assert reading.result() > 0


@pytest.mark.soak
def test_of_two_cards_under_one_name_one_is_refused(
    tmp_path: Path, soak_count: Callable[[int, int], int]
) -> None:
    for trial in range(soak_count(25, 500)):
        keys = Keyring.at(tmp_path / str(trial), create=True)
        cards = [Identity.fresh("south").card for _ in range(AT_ONCE)]
        done = together([partial(Keyring(keys.path).trust, card) for card in cards])
        assert sum(future.exception() is None for future in done) == 1
        assert keys.trusted()["south"] in cards


def test_secrets_that_are_drawn_at_once_are_one(tmp_path: Path) -> None:
    keys = Keyring.at(tmp_path / "silo", create=True)
    draws = [
        lambda: keys.decoys(),
        lambda: keys.group_key(create=True).secret,
        lambda: keys.begin("silo").card,
    ]
    for draw in draws:
        assert len({future.result() for future in together([draw] * AT_ONCE)}) == 1
