"""Whoever makes a silo draw its noise again: by losing files, by restoring them, by editing one document."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import BudgetExhausted
from isthmus.private.totals import family_of
from isthmus.retrieval import TEXT, Statistics
from isthmus.service.settings import NodeSettings
from isthmus.service.stores import Draft
from private_node import BUDGET, PEER, WORDS, node, private_settings, released, texts


@pytest.fixture
def settings(tmp_path: Path) -> NodeSettings:
    return private_settings(tmp_path / "north")


def attack(settings: NodeSettings, times: int, lose) -> tuple[list[np.ndarray], np.ndarray]:
    """Every release that leaves while `lose` goes at the node's folder between two of them."""
    with node(settings, *texts()) as opened:
        exact = opened.index.snapshot.exact_statistics("north", (TEXT,)).counts(TEXT, WORDS)
    shown, family = [], family_of(settings.statistics.hash_key, settings.statistics.width)
    for _ in range(times):
        with node(settings) as opened:
            with suppress(BudgetExhausted):
                shown.append(released(opened).counts(TEXT, WORDS, family))
            spent = opened.ledger.spent("d1")
        assert spent <= BUDGET
        lose(settings.folder)
    return shown, exact


def test_a_lost_release_is_charged_again_or_does_not_leave(settings: NodeSettings, soak_count) -> None:
    times = soak_count(14, 40)
    shown, exact = attack(settings, times, lambda folder: (folder / "released.statistics").unlink(True))
    with node(settings) as opened:
        assert opened.ledger.spent("d1") == len(shown) == BUDGET, "ε = 1 a draw, until nothing is left"
        draws = {row["release"] for row in opened.ledger.charges("d1")}
        assert len(draws) == len(shown), "each draw has a name of its own"
        opened.ledger.audit()
    assert len({each.tobytes() for each in shown}) == len(shown)
    assert (np.rint(np.mean(shown, axis=0)) == exact).mean() < 0.6, "nine draws at ε = 1 are no 40"


def test_a_release_restored_from_a_backup_is_the_same_and_free(
    settings: NodeSettings, tmp_path: Path, soak_count
) -> None:
    """An older release file beside the newest ledger, over and over: nothing new is to be had from it."""
    with node(settings, *texts()) as opened:
        first = opened.statistics(PEER)
    backup = tmp_path / "released.statistics"
    shutil.copy(settings.folder / "released.statistics", backup)
    with node(settings, *(Draft(f"new{at}", "", f"word{at} again") for at in range(40))) as opened:
        assert opened.statistics(PEER) != first
        assert opened.ledger.spent("d1") == 2
    for _ in range(soak_count(3, 40)):
        shutil.copy(backup, settings.folder / "released.statistics")
        with node(replace(settings, statistics=replace(settings.statistics, renew=1.0))) as opened:
            assert opened.statistics(PEER) == first
            assert opened.ledger.spent("d1") == 2


def test_a_damaged_release_is_a_lost_one(settings: NodeSettings) -> None:
    with node(settings, *texts()) as opened:
        opened.statistics(PEER)
    (settings.folder / "released.statistics").write_bytes(b"half a fi")
    with node(settings) as opened:
        opened.statistics(PEER)
        assert opened.ledger.spent("d1") == 2


def test_a_release_of_an_older_isthmus_is_shown_again_for_nothing(settings: NodeSettings) -> None:
    """Its noise was named by the number of the refresh; under that name it is paid."""
    from isthmus.private.cost import Covered
    from isthmus.private.totals import release_costs as costs

    with node(settings, *texts()) as opened:
        first = opened.statistics(PEER)
        file = settings.folder / "released.statistics"
        kept = Statistics.from_bytes(file.read_bytes())
        about = {name: kept.about[name] for name in ("change", "documents", "versions")} | {"refresh": 0}
        file.write_bytes(replace(kept, about=about).to_bytes())
        covered = Covered(tuple(about["documents"]), tuple(about["versions"]))
        charges = costs(kept.tables, 1.0, "refresh 0")
        opened.ledger.charge_all([(cost, covered, PEER) for cost in charges], kind="sums")
        before = opened.ledger.spent("d1")
    with node(settings) as opened:
        assert opened.statistics(PEER) == first
        assert opened.ledger.spent("d1") == before


def test_another_hash_key_or_width_is_another_draw(settings: NodeSettings) -> None:
    with node(settings, *texts()) as opened:
        opened.statistics(PEER)
    other = replace(settings, statistics=replace(settings.statistics, width=2048))
    with node(other) as opened:
        assert len(released(opened).tables[TEXT]) == 2048, "not cells that nobody can read any more"
        assert opened.ledger.spent("d1") == 2


def test_editing_one_document_spends_nobodys_budget(settings: NodeSettings, soak_count) -> None:
    with node(settings, *texts()) as opened:
        first = opened.statistics(PEER)
    for edit in range(soak_count(30, 104)):
        with node(settings, Draft("d0", "", f"word1 word2 edition{edit}")) as opened:
            assert opened.statistics(PEER) == first
    with node(settings) as opened:
        assert opened.ledger.spent("d1") == 1
    with node(settings, *(Draft(f"d{at}", "", f"another text {at}") for at in range(25))) as opened:
        assert opened.statistics(PEER) != first, "a quarter of the documents is another matter"
        assert opened.ledger.spent("d1") == 2


def test_one_document_alone_is_no_reason_in_a_small_silo_either(settings: NodeSettings) -> None:
    with node(settings, *texts(3)) as opened:
        first = opened.statistics(PEER)
    for edit in range(12):
        with node(settings, Draft("d0", "", f"word1 word2 edition{edit}")) as opened:
            assert opened.statistics(PEER) == first
            assert opened.ledger.spent("d1") == 1
