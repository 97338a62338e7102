"""Retention: what is older than the sources' rules say is erased, and a clock that jumps empties nothing."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from isthmus.cli import main
from isthmus.service.node import Node
from isthmus.service.retention import DAY, apply_retention
from isthmus.service.settings import EncoderSettings, NodeSettings, Source
from isthmus.service.stores import Judgement

NOW = 1_800_000_000.0


@pytest.fixture
def settings(tmp_path):
    """Twenty letters, one every thirty days up to now; the ledger and the index as always."""
    rows = [
        f"letter{at:02},text number{at} of a letter about tides,{int(NOW - 30 * DAY * at)}"
        for at in range(20)
    ]
    (tmp_path / "letters.csv").write_text("\n".join(["id,text,date", *rows]))
    source = Source("table", tmp_path / "letters.csv", keep_days=365, keep_judgements_days=90, name="letters")
    return NodeSettings(
        silo="north",
        folder=tmp_path / "north",
        sources=(source,),
        encoder=EncoderSettings("none"),
    )


def opened(node):
    node.read_sources()
    node.index.catch_up()
    return node


def applied(node, now=NOW, **how):
    return apply_retention(node, clock=lambda: now, **how)


def names(node):
    return [each.id for each in node.store.living()]


def test_what_is_older_is_erased_and_does_not_come_back(settings):
    with Node(settings).offline() as node:
        opened(node)
        node.store.judge(Judgement("tides", "letter01", True, "broker", NOW - 91 * DAY, person="p"))
        node.store.judge(Judgement("letter", "letter01", True, "broker", NOW - 1 * DAY, person="p"))
        node.store.judge(Judgement("number", "letter02", True, "broker", NOW - 1 * DAY, person="p"))
        told = applied(node, dry_run=True)
        assert (told.done, told.sources[0].documents, told.sources[0].judgements) == (False, 7, 1)
        assert told.ids == [f"letter{at}" for at in range(13, 20)]
        assert len(names(node)) == 20
        done = applied(node)
        assert done.done
        assert sorted(names(node)) == [f"letter{at:02}" for at in range(13)]
        assert sorted(each.query for each in node.store.judgements()) == ["letter", "number"]
        assert [each.id for each in done.receipt.documents] == told.ids
        assert done.receipt.why == "retention"
        node.read_sources()
        assert len(names(node)) == 13
        assert applied(node).sources[0].documents == 0
        (receipt,) = (settings.folder / "receipts").iterdir()
        assert json.loads(receipt.read_bytes())["why"] == "retention"
        assert not any(b"letter19" in path.read_bytes() for path in settings.folder.glob("documents.db*"))


def test_a_clock_that_jumps_ahead_empties_nothing_until_it_is_confirmed(settings, caplog):
    with Node(settings).offline() as node:
        opened(node)
        with caplog.at_level(logging.ERROR):
            waiting = applied(node, now=NOW + 5 * 365 * DAY)
        assert "20 documents of 20 would go, more than half" in waiting.waits
        assert "--confirm" in caplog.text
        assert not waiting.done
        assert len(names(node)) == 20
        assert not len(node.store.blocked())
        assert applied(node, now=NOW + 5 * 365 * DAY, confirmed=True).done
        assert names(node) == []


def test_a_clock_that_jumps_back_waits_as_well(settings):
    with Node(settings).offline() as node:
        opened(node)
        assert applied(node).done
        assert "the clock is behind" in applied(node, now=NOW - 2 * DAY).waits


def test_without_a_date_or_where_it_is_said_the_arrival_counts(settings):
    by_arrival = replace(settings, sources=(replace(settings.sources[0], keep_by="arrival"),))
    with Node(by_arrival).offline() as node:
        opened(node)
        assert applied(node, dry_run=True, now=NOW + 3650 * DAY).sources[0].documents == 20
        ((first,),) = [
            node.store._rows(node.store._db(), "SELECT min(arrived) FROM document WHERE removed = 0")
        ]
        assert applied(node, dry_run=True, now=first[0] + 364 * DAY).sources[0].documents == 0
        assert applied(node, dry_run=True, now=first[0] + 366 * DAY).sources[0].documents == 20
        node.store._db().execute("UPDATE document SET arrived = NULL")
        assert applied(node, now=first[0] + 800 * DAY).done, "those of an older release have arrived now"
        assert len(names(node)) == 20


def test_a_node_applies_its_rules_when_it_starts_and_no_source_without_rules_loses_anything(settings):
    with Node(replace(settings, sources=(replace(settings.sources[0], keep_days=None),))).offline() as node:
        opened(node)
        assert applied(node, dry_run=True, now=NOW + 3650 * DAY).sources[0].documents == 0
    with Node(settings).offline() as node:
        opened(node)
        node.chores.append(lambda: applied(node))
        node._do_chores()
        assert len(names(node)) == 13
        node.chores.append(lambda: pytest.fail("once a day"))
        node._do_chores()


def test_by_command(settings, tmp_path, capsys):
    config = tmp_path / "silo.toml"
    source = 'kind = "table", path = "letters.csv", name = "letters", keep_days = 36500'
    config.write_text(
        f'silo = "north"\nfolder = "north"\nsources = [{{{source}}}]\n[encoder]\nkind = "none"\n'
    )
    with Node(settings).offline() as node:
        opened(node)
    assert main(["documents", "retention", "--dry-run", "--config", str(config)]) == 0
    assert "letters: 0 documents (keep_days 36500)" in capsys.readouterr().out
    config.write_text(config.read_text().replace("36500", "1"))
    assert main(["documents", "retention", "--config", str(config), "--json"]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert report["done"] == (report["waits"] == "")
    config.write_text(config.read_text().replace("keep_days = 1", "keep_days = 0"))
    assert main(["documents", "retention", "--config", str(config)]) == 1
    assert "keep_days = 0 must lie in" in capsys.readouterr().err
