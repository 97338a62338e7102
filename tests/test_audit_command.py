"""`isthmus audit`: what an auditor asks a log, and the forms in which it answers."""

from __future__ import annotations

import json
import re
from contextlib import closing

import pytest

from command_line import isthmus
from isthmus.private.ledger import Budget, Ledger
from isthmus.service.audit_log import AuditLog
from isthmus.service.extraction import NodeAudit
from isthmus.service.people import Person
from isthmus.service.security import local_secret, pseudonym
from isthmus.service.settings import AuditSettings, Policy
from isthmus.service.stores import Draft, SqliteStore

NOVEMBER = 1_795_000_000.0
SYSLOG = re.compile(
    r"<(\d+)>1 (\S+Z) (\S+) isthmus - (\S+) \[isthmus@32473((?: \w+=\"(?:[^\"\\\]]|\\.)*\")*)\]"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A node's folder with a log of two days, three people and an alarm."""
    folder = tmp_path_factory.mktemp("audited") / "north"
    folder.mkdir()
    now = [NOVEMBER]
    with closing(SqliteStore(folder / "documents.db")) as store:
        store.put([Draft("tides.md", "Tides", "turbine")], source="operator")
    with Ledger(folder / "ledger.db", Budget()) as ledger:
        log = NodeAudit(folder, AuditSettings(), ledger, documents=lambda: 10, clock=lambda: now[0])
        policy = Policy(search=True, open=True, alarm_seen=0.3)
        log.record_shown(Person("ada"), "broker", policy, ["tides.md", 'odd "] name'], "tidal power")
        log.record_shown(Person("ben"), "broker", policy, ["tides.md"], "tides")
        now[0] += 86_400
        log.record_opened(Person("ada"), "broker", policy, "tides.md")
        log.record_shown(Person("ada"), "broker", policy, ["a", "b", "c"], "letters")
        log.record("refused", peer="broker", what='POST "/v1/search"')
        log.close()
    return folder


def test_entries_are_found_by_person_document_action_and_time(folder, tmp_path):
    isthmus("audit", "export", folder, "-o", tmp_path / "all.jsonl")
    everything = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert not (tmp_path / "all.jsonl").stat().st_mode & 0o077
    numbers = [entry["number"] for entry in everything]
    assert numbers == list(range(1, len(numbers) + 1))

    def found(*options):
        out = tmp_path / "some.jsonl"
        isthmus("audit", "export", folder, "-o", out, *options)
        return [json.loads(line)["action"] for line in out.read_text().splitlines()]

    assert found("--document", "tides.md") == ["shown", "shown", "opened"]
    assert found("--person", "ada", "--document", "tides.md") == ["shown", "opened"]
    assert found("--person", everything[0]["actor"], "--action", "shown") == ["shown", "shown"]
    assert found("--action", "refused", "--action", "alarm") == ["alarm", "refused"]
    second = everything[-1]["at"][:10]
    assert "opened" not in found("--until", second)
    assert found("--since", second, "--document", "tides.md") == ["opened"]
    assert not found("--person", "nobody")


def test_entries_are_messages_of_rfc_5424(folder, tmp_path):
    out = tmp_path / "log"
    isthmus("audit", "export", folder, "--format", "syslog", "-o", out)
    lines = out.read_text().splitlines()
    parsed = [SYSLOG.fullmatch(line) for line in lines]
    assert all(parsed)
    severities = {match[4]: int(match[1]) % 8 for match in parsed}
    assert {int(match[1]) // 8 for match in parsed} == {13}
    assert (severities["shown"], severities["refused"], severities["alarm"]) == (6, 5, 4)
    assert r'what="POST \"/v1/search\""' in out.read_text()


def test_a_table_for_people_has_names_of_documents_where_they_are_asked_for(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = json.loads(isthmus("audit", "show", folder, "--action", "opened", "--names", "--json").stdout)
    assert [row["documents"] for row in rows] == [["tides.md"]]
    text = isthmus("audit", "show", folder, "--last", 3).stdout
    assert "refused" in text
    assert not re.search("[0-9a-f]{24}", text), "digests are cut to what tells them apart"
    assert max(map(len, text.splitlines())) <= 80
    assert "no entry" in isthmus("audit", "show", folder, "--person", "nobody").stderr


def test_who_has_seen_most_comes_first(folder):
    rows = json.loads(isthmus("audit", "seen", folder, "--json").stdout)
    assert [row["actor"] == "" for row in rows][:1] == [True], "all of the broker's people together"
    assert "broker" in isthmus("audit", "seen", folder).stdout


def test_verify_counts_what_it_has_checked(folder):
    record = json.loads(isthmus("audit", "verify", folder, "--json").stdout)
    assert record["entries"] == record["last"]
    assert record["anchors"] >= 1
    assert record["ledger_entries"] >= 2
    head = json.loads(isthmus("audit", "head", folder, "--json").stdout)
    assert (head["number"], head["hash"]) == (record["last"], record["hash"])


def test_a_configuration_names_the_log_as_well(folder):
    config = folder.parent / "silo.toml"
    config.write_text(f'silo = "north"\nfolder = "{folder.name}"\n')
    assert "nothing was changed" in isthmus("audit", "verify", config).stdout
    assert "nothing was changed" in isthmus("audit", "verify", config.parent).stdout, "as isthmus new has it"


def test_a_broker_tells_what_its_people_are_called_elsewhere(tmp_path):
    log = AuditLog(tmp_path / "broker", AuditSettings())
    log.record("signed-in", actor=log.pseudonym("", "ada"))
    log.close()
    own = isthmus("audit", "pseudonym", tmp_path / "broker", "ada").stdout.strip()
    assert own == log.pseudonym("", "ada")
    wrong = isthmus("audit", "pseudonym", tmp_path / "broker", "ada", "--silo", "north", check=False)
    assert "has named nobody" in wrong.stderr
    key = local_secret(tmp_path / "broker" / "persons.key")
    there = isthmus("audit", "pseudonym", tmp_path / "broker", "ada", "--silo", "north").stdout.strip()
    assert there == pseudonym(key, "north", "ada")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["verify", "no-such-folder"], "there is no such folder"),
        (["verify", "."], "there is no audit log's key (the TOML"),
        (["show", ".", "--since", "yesterday"], "expected a time such as 2026-11-18T09:30"),
        (["verify", ".", "--head", "12"], "expected NUMBER:HASH"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, words, problem):
    done = isthmus("audit", *words, folder=tmp_path, check=False)
    assert done.returncode in (1, 2)
    assert problem in done.stderr
