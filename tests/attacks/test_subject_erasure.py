"""A subject that withdraws is found nowhere: the whole folder is searched, also after a kill half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from isthmus.cli import main
from isthmus.errors import DataError, Refused
from isthmus.service import wire
from isthmus.service.erasure import carry_on, erase, note_export
from isthmus.service.export import export_rows
from isthmus.service.node import Node
from isthmus.service.settings import (
    EncoderSettings,
    Learning,
    NodeSettings,
    Policy,
    SharedStatistics,
    Source,
)
from isthmus.service.stores import Draft, Judgement, StoredRequest

PATIENT = "patient-zanzibar-4711"
LETTERS = {
    f"letter-of-zanzibar-{at}.md": f"kumquatarian pelicans resigned number{at} on thursdayish mornings"
    for at in range(4)
}
PIECES = [
    PATIENT.encode(),
    *(id.encode() for id in LETTERS),
    *{text[at : at + 12].encode() for text in LETTERS.values() for at in range(len(text) - 11)},
]


def left_in(folder):
    """The files below a folder in which something of the subject stands."""
    files = (path for path in folder.rglob("*") if path.is_file())
    contents = {path.relative_to(folder).as_posix(): path.read_bytes().lower() for path in files}
    return {
        name: sorted({p for p in PIECES if p in data})[:3]
        for name, data in contents.items()
        if any(p in data for p in PIECES)
    }


@pytest.fixture
def settings(tmp_path):
    papers = tmp_path / "papers"
    papers.mkdir()
    for at in range(30):
        (papers / f"paper{at:02}.md").write_text(f"# Paper {at}\n\ntides and turbines number{at} wave lamp")
    for name, text in LETTERS.items():
        (papers / name).write_text(f"---\nsubject: {PATIENT}\n---\n# Letter\n\n{text}")
    return NodeSettings(
        silo="north",
        folder=tmp_path / "north",
        sources=(Source("folder", papers, subject_noun="patient"),),
        peers={"broker": Policy(search=True, snippets=True, counts=True, feedback=True)},
        encoder=EncoderSettings("lsa", dimensions=8),
        statistics=SharedStatistics(width=1 << 10),
        learning=Learning(least_queries=2),
    )


def filled(node, exports, *, learn=False):
    """Index, search, judge, ask for, learn from, release and export documents, as a silo does over years."""
    node.read_sources()
    node.index.catch_up()
    node._read.set()
    node.searcher.search(wire.Search(query="kumquatarian pelicans"), snippets=True)
    for at in range(24):
        node.store.judge(
            Judgement(f"turbines number{at}", f"paper{at % 30:02}.md", True, "broker", 1.0, person="p")
        )
        node.store.judge(
            Judgement(f"lamp number{at}", f"paper{at % 30:02}.md", False, "other", 1.0, person="q")
        )
    for id in LETTERS:
        node.store.judge(Judgement("pelicans", id, True, "broker", 1.0, person="p"))
    node.store.judge(Judgement(f"files of {PATIENT}", "paper01.md", False, "broker", 1.0, person="p"))
    node.store.ask(StoredRequest("a" * 32, next(iter(LETTERS)), "broker", "p", "", "pelicans", "why", 1.0))
    node.store.ask(StoredRequest("b" * 32, "paper02.md", "broker", "p", "", "wave", f"for {PATIENT}", 1.0))
    node.statistics("broker")
    assert node.learner.judged.refresh().grades["pelicans"]
    if learn:
        node.calibrate_alone()
    export_rows(node.searcher, exports)
    note_export(node.settings, exports)


def check_gone(node, exports):
    assert not left_in(node.settings.folder)
    assert not left_in(exports)
    assert "paper01.md" in (exports / "qrels.txt").read_text()
    assert not node.searcher.search(wire.Search(query="kumquatarian"), snippets=True).hits
    assert node.searcher.search(wire.Search(query="turbines number3"), snippets=True).hits
    assert node.store.count() == 30
    node.ledger.audit()


def test_a_withdrawn_subject_is_found_nowhere_in_the_nodes_folder(settings, tmp_path):
    exports = tmp_path / "exports"
    with Node(settings).offline() as node:
        filled(node, exports, learn=True)
        before = left_in(settings.folder).keys() | left_in(exports).keys()
        assert {"documents.db", "judged.json", "qrels.txt", "rows.txt"} <= before | {"documents.db"}
        assert node.ledger.subject(PATIENT).spent == 3.0
        receipt = erase(node, subject=PATIENT)
        check_gone(node, exports)
        assert (receipt.subject, {each.id for each in receipt.documents}) == (PATIENT, set(LETTERS))
        assert (receipt.judgements, receipt.requests) == (5, 2)
        assert all(each.removed for each in receipt.documents)
        assert sum(bool(each.released) for each in receipt.documents) == 3, "a release counts three of them"
        assert len(receipt.exports) >= 3
        assert any("own judgements: learned anew" in line for line in receipt.relearn)
        assert any("noise" in line for line in receipt.not_undone)
        json.dumps(receipt.model_dump())
        (stored,) = (settings.folder / "receipts").iterdir()
        assert len(json.loads(stored.read_bytes())["documents"]) == 4
        assert node.ledger.subject(PATIENT).spent == 3.0, "what it has spent stays, by a digest"
        again = erase(node, subject=PATIENT)
        assert again.documents == []
    assert not left_in(settings.folder)


def test_no_source_brings_a_withdrawn_subject_back_nor_new_documents_of_it(settings, tmp_path):
    papers = tmp_path / "papers"
    with Node(settings).offline() as node:
        filled(node, tmp_path / "exports")
        erase(node, subject=PATIENT)
        new = f"---\nsubject: {PATIENT}\n---\n# New\n\nkumquatarian pelicans once more"
        (papers / "letter-that-is-new.md").write_text(new)
        (papers / "renamed-zanzibar.md").write_text(new)
        node.read_sources()
        node.index.catch_up()
        assert node.store.count() == 30
        assert node.source_reports[0].erased == 6
        assert not left_in(settings.folder)
        with pytest.raises(DataError, match="subject that was erased"):
            node.put([Draft("x", "t", "text", subject=PATIENT)])
        assert node.store.readmit_subject("somebody else") == 0
        assert node.store.readmit_subject(PATIENT) == 5
        node.read_sources()
        assert node.store.count() == 36


def test_documents_that_were_removed_before_are_erased_with_their_subject(settings, tmp_path):
    with Node(settings).offline() as node:
        filled(node, tmp_path / "exports")
        (tmp_path / "papers" / "letter-of-zanzibar-0.md").unlink()
        node.read_sources()
        assert any(
            b"letter-of-zanzibar-0" in piece for found in left_in(settings.folder).values() for piece in found
        )
        erase(node, subject=PATIENT)
        assert not left_in(settings.folder)


def test_a_short_subject_that_is_erased_twice_leaves_the_exports_of_others(settings, tmp_path):
    rows = tmp_path / "qrels.txt"
    rows.write_text("turbines 0 paper01.md 1\n")
    (tmp_path / "papers" / "short.md").write_text("---\nsubject: 4711\n---\nwave lamp")
    with Node(settings).offline() as node:
        node.read_sources()
        node.index.catch_up()
        note_export(node.settings, rows)
        for _ in range(2):
            assert not erase(node, subject="4711").exports
            assert rows.read_text() == "turbines 0 paper01.md 1\n"


def test_a_subject_that_nobody_knows_is_an_error_and_nothing_is_done(settings, tmp_path):
    with Node(settings).offline() as node:
        filled(node, tmp_path / "exports")
        with pytest.raises(DataError, match="no document of this silo is about this subject"):
            erase(node, subject="patient-unknown-1")
        assert not len(node.store.blocked())
        assert node.store.count() == 34


STEPS = ("index.compact", "learner.forget", "ledger.erase")


@pytest.mark.parametrize("step", STEPS)
def test_an_erasure_that_is_killed_is_done_at_the_next_start(settings, tmp_path, step):
    """kill -9 before a step: what is left is carried on, and found nowhere then."""
    exports = tmp_path / "exports"
    with Node(settings).offline() as node:
        filled(node, exports)
    part, _, method = step.partition(".")
    child = textwrap.dedent(f"""
        import os, pickle, signal, sys
        from isthmus.service.erasure import erase
        from isthmus.service.node import Node
        with Node(pickle.load(sys.stdin.buffer)).offline() as node:
            setattr(node.{part}, {method!r}, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            erase(node, subject={PATIENT!r})
    """)
    import pickle

    done = subprocess.run(
        [sys.executable, "-c", child], input=pickle.dumps(settings), env=os.environ, check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    with Node(settings).offline() as node:
        carry_on(node)
        check_gone(node, exports)
        carry_on(node)
        assert erase(node, subject=PATIENT).documents == []


def test_a_model_learned_with_it_is_marked_until_another_comes_or_withdrawn_at_once(settings, tmp_path):
    from test_noised_counts import model

    first, second = model(), replace(model(), about={"version": "v2"})
    for rule in ("relearn", "withdraw"):
        own = replace(settings, folder=tmp_path / rule, erased_models=rule)
        with Node(own).offline() as node:
            filled(node, tmp_path / f"exports {rule}")
            node.adopt(first.to_bytes(), "broker")
            assert not node.release().outdated_model
            receipt = erase(node, subject=PATIENT)
            assert any("v1, learned with other silos" in line for line in receipt.relearn)
            assert (node.model_version == "v1") == (rule == "relearn")
            if rule == "relearn":
                assert node.release().outdated_model
                node.adopt(first.to_bytes(), "broker")
                assert node.release().outdated_model, "the same model again is no other"
            else:
                with pytest.raises(Refused, match="learn again"):
                    node.adopt(first.to_bytes(), "broker")
            node.adopt(second.to_bytes(), "broker")
            assert node.model_version == "v2"
            assert not node.release().outdated_model


def test_by_command_and_over_http(settings, tmp_path, capsys):
    from starlette.testclient import TestClient

    from isthmus.service.limits import message_header
    from isthmus.service.node_api import node_app

    config = tmp_path / "silo.toml"
    config.write_text(
        'silo = "north"\nfolder = "north"\n'
        'sources = [{kind = "folder", path = "papers", subject_noun = "patient"}]\n'
        '[encoder]\nkind = "lsa"\ndimensions = 8\n'
    )
    with Node(settings).offline() as node:
        filled(node, tmp_path / "exports")
        allowed = replace(settings, peers={"anonymous": Policy(operate=True)})
        for own, status in (
            (settings, 401),
            (replace(allowed, peers={"anonymous": Policy(search=True, manage=True)}), 403),
            (allowed, 404),
        ):
            node.settings = own
            with TestClient(node_app(node), base_url="http://127.0.0.1") as client:
                told = client.post(
                    "/v1/documents/erase", json={"subject": "nobody-1"}, headers=message_header()
                )
                assert told.status_code == status
    assert main(["documents", "erase", "--config", str(config)]) == 1
    assert "--subject ID" in capsys.readouterr().err
    receipt = tmp_path / "receipt.json"
    arguments = [
        "documents",
        "erase",
        "--subject",
        PATIENT,
        "--config",
        str(config),
        "--receipt",
        str(receipt),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "erased  letter-of-zanzibar-0.md" in printed
    assert "not undone: statistics and sketches that have left" in " ".join(printed.split())
    assert json.loads(receipt.read_text())["subject"] == PATIENT
    assert not left_in(settings.folder)
    assert main(["documents", "readmit", "--subject", PATIENT, "--config", str(config)]) == 0
