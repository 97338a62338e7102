"""The audit log changed, cut, replaced or read by those it is not for; a silo read by searching it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3

import httpx
import pytest

from command_line import isthmus
from isthmus.errors import Refused
from isthmus.private.ledger import Budget, Ledger
from isthmus.service import audit_log
from isthmus.service.audit_log import FOLDER, AuditKey, audit_lines
from isthmus.service.erasure import erase
from isthmus.service.extraction import DistinctCount, NodeAudit, SeenDocuments, SeenEnough
from isthmus.service.people import Person
from isthmus.service.security import ApiKeys
from isthmus.service.settings import AuditSettings, Policy
from one_silo import QUERY, a_node, a_peer, federation

ENTRIES = 8


@pytest.fixture
def silo(tmp_path):
    """The folder of a node that has shown documents, ended, and was changed by nobody yet."""
    with Ledger(tmp_path / "ledger.db", Budget()) as ledger:
        audit = NodeAudit(tmp_path, AuditSettings(), ledger, documents=lambda: 100)
        with audit._syncing:  # so that it is anchored once, at the end, however fast the disk is
            for at in range(ENTRIES):
                audit.record_shown(Person(f"p{at % 3}"), "broker", Policy(), [f"d{at}"], f"query {at}")
        audit.close()
    assert [line.content["action"] for line in audit_lines(tmp_path)] == ["shown"] * ENTRIES + ["anchored"]
    assert isthmus("audit", "verify", tmp_path).stdout.startswith("nothing was changed")
    return tmp_path


def log_of(folder):
    (file,) = (folder / FOLDER).glob("*.jsonl")
    return file


def replaced(line, **fields):
    """An entry with other fields and the hash that belongs to them, by somebody without the key."""
    entry = json.loads(line) | fields
    seal = entry.pop("seal")
    del entry["hash"]
    content = json.dumps(entry, separators=(",", ":"))[:-1]
    hash = hashlib.sha256(content.encode()).hexdigest()
    return f'{content},"hash":"{hash}","seal":"{seal}"}}\n'


def rebuilt(lines, at, **fields):
    """The log with one entry changed and every later one hashed again."""
    changed = [*lines[:at], replaced(lines[at], **fields)]
    for line in lines[at + 1 :]:
        changed.append(replaced(line, previous=json.loads(changed[-1])["hash"]))
    return changed


TAMPERINGS = {
    "a word is changed": (
        lambda lines: [lines[0], lines[1].replace("shown", "begun"), *lines[2:]],
        "entry 2 was changed",
        2,
    ),
    "an entry is taken out": (lambda lines: [*lines[:3], *lines[4:]], "entry 4 is missing", 4),
    "the first is taken out": (lambda lines: lines[1:], "entries 1 to 1 are missing", None),
    "two change places": (
        lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
        "entry 3 is missing",
        3,
    ),
    "one stands twice": (lambda lines: [*lines[:3], lines[2], *lines[3:]], "entry 3 comes after entry 3", 4),
    "hashed again": (
        lambda lines: [*lines[:4], replaced(lines[4], actor="x"), *lines[5:]],
        "entry 5 was not written",
        5,
    ),
    "all hashed again": (
        lambda lines: rebuilt(lines, 4, actor="x"),
        "entry 5 was not written by this node",
        5,
    ),
    "rubbish": (lambda lines: [*lines[:5], "rubbish\n", *lines[5:]], "is no entry of an audit log", 6),
    "the end is cut off": (lambda lines: lines[:6], "what came after it was cut off", 6),
    "all but the first cut off": (lambda lines: lines[:1], "what came after it was cut off", 1),
    "emptied": (lambda lines: [], "what came after it was cut off", None),
}


@pytest.mark.parametrize("how", TAMPERINGS)
def test_the_first_broken_entry_is_named_with_its_file_and_line(silo, how):
    change, named, line = TAMPERINGS[how]
    file = log_of(silo)
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))
    done = isthmus("audit", "verify", silo, check=False)
    assert done.returncode == 1
    assert named in done.stderr
    assert str(file.parent) in done.stderr
    if line is not None:
        assert f"{file.name}:{line}:" in done.stderr


def test_an_end_that_is_cut_off_with_its_head_is_noticed_by_the_ledger(silo):
    """Who puts back the whole folder of the log as it was is noticed too."""
    file, head = log_of(silo), silo / FOLDER / "head"
    key = AuditKey(silo, AuditSettings())
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]))
    fifth = list(audit_lines(silo))[-1]
    head.write_text(f"5 {fifth.hash} {key.seal(f'head 5 {fifth.hash}')}\n")  # as it once was
    done = isthmus("audit", "verify", silo, check=False)
    assert done.returncode == 1
    assert "the log ends with entry 5" in done.stderr
    shutil.rmtree(silo / FOLDER)
    assert "what came after it was cut off" in isthmus("audit", "verify", silo, check=False).stderr


def test_a_head_that_is_gone_or_forged_is_noticed(silo):
    head = silo / FOLDER / "head"
    text = head.read_text()
    head.write_text(text[:-5] + "0000\n")
    assert isthmus("audit", "verify", silo, check=False).returncode == 1
    head.unlink()
    assert "is missing, or not of this node" in isthmus("audit", "verify", silo, check=False).stderr
    head.write_text(text)
    assert isthmus("audit", "verify", silo).returncode == 0


def test_a_log_of_another_key_is_not_this_nodes(silo):
    (silo / "audit.key").write_text("ab" * 64 + "\n")
    done = isthmus("audit", "verify", silo, check=False)
    assert "entry 1 was not written by this node" in done.stderr


def test_a_head_kept_elsewhere_tells_of_a_log_that_was_written_anew_with_the_key(silo):
    """Who has the machine has the key: what is kept elsewhere is what they cannot change."""
    head = isthmus("audit", "head", silo).stdout.strip()
    assert isthmus("audit", "verify", silo, "--head", head).returncode == 0
    for name in ("ledger.db", "ledger.db.tally", "seen.db"):
        (silo / name).unlink()
    shutil.rmtree(silo / FOLDER)
    with Ledger(silo / "ledger.db", Budget()) as ledger:
        audit = NodeAudit(silo, AuditSettings(), ledger, documents=lambda: 100)
        for at in range(ENTRIES + 3):
            audit.record_shown(None, "broker", Policy(), [f"e{at}"], "harmless")
        audit.close()
    assert isthmus("audit", "verify", silo).returncode == 0
    done = isthmus("audit", "verify", silo, "--head", head, check=False)
    assert re.search(r"entry \d+ is another than the one that was anchored", done.stderr)


def test_a_tampered_ledger_is_named_by_the_same_command(silo):
    with sqlite3.connect(silo / "ledger.db") as db:
        db.execute("UPDATE link SET event = replace(event, 'audit', 'other') WHERE number = 2")
    done = isthmus("audit", "verify", silo, check=False)
    assert done.returncode == 1
    assert "entry 2 of the ledger was changed" in done.stderr


def test_hits_are_in_the_log_before_they_leave_or_do_not_leave(tmp_path, monkeypatch):
    with a_peer(tmp_path, open=True) as peer:
        hits = peer.post("/search", json={"query": QUERY}).json()["hits"]
        peer.get(f"/documents/{hits[0]['document']}", params={"ticket": hits[0]["ticket"]})
        audit = peer.node.audit
        entries = [line.content for line in audit_lines(tmp_path / "north")]
        hit, opened = (
            next(each for each in entries if each["action"] == name) for name in ("shown", "opened")
        )
        assert hit["documents"] == [audit.document(each["document"]) for each in hits]
        assert opened["documents"] == hit["documents"][:1]
        assert hit["query"] == audit.query(QUERY)

        def full(*arguments, **named):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(audit_log.os, "write", full)
        assert peer.post("/search", json={"query": QUERY}).status_code == 503
        reply = peer.get(f"/documents/{hits[0]['document']}", params={"ticket": hits[0]["ticket"]})
        assert reply.status_code == 503


def test_what_is_erased_stands_nowhere_in_the_log_and_that_it_was_erased_does(tmp_path):
    with a_peer(tmp_path, open=True, feedback=True) as peer:
        hits = peer.post("/search", json={"query": QUERY}).json()["hits"]
        id = hits[0]["document"]
        assert erase(peer.node, [id]).documents[0].removed
        digest = peer.node.audit.document(id)
        actions = [
            line.content["action"]
            for line in audit_lines(tmp_path / "north")
            if digest in line.content.get("documents", ())
        ]
        assert actions == ["shown", "erased"]
        text = b"".join(path.read_bytes() for path in (tmp_path / "north" / FOLDER).iterdir())
        assert id.encode() not in text
        assert b"turbine" not in text


def test_the_log_is_read_with_a_scope_of_its_own_that_administrators_have_not(tmp_path):
    keys = ApiKeys(tmp_path / "north-keys.json")
    tokens = {name: keys.add(name, scopes=[name]) for name in ("admin", "search", "audit")}
    with a_node(tmp_path) as (node, loop, _):
        from dataclasses import replace

        from isthmus.service.node_api import node_app

        node.settings = replace(node.settings, keys=keys.path)
        address = f"http://127.0.0.1:{loop.serve(node_app(node)).port}/v1"
        replies = {}
        for name, token in tokens.items():
            headers = {"authorization": f"Bearer {token}"}
            replies[name] = httpx.get(f"{address}/audit", headers=headers)
        assert {name: reply.status_code for name, reply in replies.items()} == {
            "admin": 403,
            "search": 403,
            "audit": 200,
        }
        assert "scope audit" in replies["admin"].json()["detail"]
        entries = [json.loads(line) for line in replies["audit"].text.splitlines()]
        assert {"refused", "read"} <= {entry["action"] for entry in entries}, "reading it is an entry, too"


def test_what_people_and_administrators_do_at_the_broker_is_in_its_log(tmp_path):
    scopes = {"ada": ["search"], "root": ["admin"], "eve": ["audit"]}
    with federation(tmp_path, scopes) as (_, people):
        keys = {
            name: client._calls._transport.http.headers["authorization"].split()[1]
            for name, client in people.items()
        }
        with httpx.Client(base_url=people["ada"].url) as browser:
            assert browser.post("/v1/session", json={"key": keys["ada"]}).status_code == 204
            assert browser.post("/v1/learning/rollback", json={"version": "1"}).status_code == 403
            admin = {"authorization": f"Bearer {keys['root']}"}
            browser.get("/v1/requests", params={"all": True}, headers=admin)
            browser.cookies.clear()
            assert browser.get("/v1/audit", headers=admin).status_code == 403
            reply = browser.get("/v1/audit", headers={"authorization": f"Bearer {keys['eve']}"})
        entries = [json.loads(line) for line in reply.text.splitlines()]
        actions = [(entry["action"], entry.get("what", "")) for entry in entries]
        assert actions[0][0] == "started"
        assert ("signed-in", "") in actions
        assert ("refused", "POST /v1/learning/rollback") in actions
        assert ("administration", "GET /v1/requests") in actions
        names = {word for line in reply.text.splitlines() for word in re.findall(r"\w+", line)}
        assert names.isdisjoint(people), "those of keys and of whoever was refused are pseudonyms, too"
        found = isthmus("audit", "show", tmp_path / "broker", "--person", "ada", "--json")
        assert [entry["action"] for entry in json.loads(found.stdout)] == ["signed-in", "refused"]


def test_statistics_that_leave_are_an_entry_and_those_that_a_peer_has_are_none(tmp_path):
    with a_peer(tmp_path, counts=True) as peer:
        tag = peer.get("/statistics").headers["etag"]
        assert peer.get("/statistics", headers={"if-none-match": tag}).status_code == 304
        entries = [line.content for line in audit_lines(tmp_path / "north")]
    assert [entry["what"] for entry in entries if entry["action"] == "exported"] == ["GET /v1/statistics"]


# a silo read by searching it

WORDS = [f"word{at}" for at in range(60)]
ROWS = [f"p{at},paper {at},{WORDS[at % 60]} {WORDS[(7 * at + 3) % 60]} text{at}" for at in range(300)]


def sweep(peer, k=50):
    """Ask for every word of the vocabulary with as many hits as allowed: what was seen, and who refused."""
    seen, statuses = set(), []
    for word in [*WORDS, *(f"text{at}" for at in range(0, 300, 5))]:
        reply = peer.post("/search", json={"query": word, "k": k})
        statuses.append(reply.status_code)
        if reply.status_code == 200:
            seen |= {hit["document"] for hit in reply.json()["hits"]}
    return seen, statuses


def fixed_key(folder):
    """Estimates depend on the key."""
    (folder / "north").mkdir(mode=0o700)
    (folder / "north" / "audit.key").write_text("17" * 64 + "\n")
    (folder / "north" / "audit.key").chmod(0o600)


def test_a_sweep_of_the_vocabulary_sees_what_the_policy_shows_and_no_more(tmp_path):
    (tmp_path / "free").mkdir()
    with a_peer(tmp_path / "free", ROWS) as peer:
        seen, statuses = sweep(peer)
        assert len(seen) > 290, "without a limit a sweep has it all"
        assert set(statuses) == {200}
    (tmp_path / "limited").mkdir()
    fixed_key(tmp_path / "limited")
    with a_peer(tmp_path / "limited", ROWS, most_seen=0.2) as peer:
        seen, statuses = sweep(peer)
        assert 45 <= len(seen) <= 61
        assert statuses[-1] == 429
        reply = peer.post("/search", json={"query": "text295"})
        assert reply.json()["type"] == "urn:isthmus:seen"
        assert "its operator may raise most_seen" in reply.json()["detail"]
        again = peer.post("/search", json={"query": WORDS[0], "k": 1})
        assert again.status_code == 200, "what was seen may be seen again"
        entries = [line.content for line in audit_lines(tmp_path / "limited" / "north")]
        assert [e["what"] for e in entries if e["action"] == "alarm"] == [
            "has seen 10.0% of the silo's documents"
        ]
        assert {e["what"] for e in entries if e["action"] == "refused"} == {"most_seen"}
        metrics = httpx.get(str(peer.base_url).replace("/v1/", "/metrics")).text
        assert 'isthmus_extraction_total{peer="anonymous",outcome="alarm"} 1' in metrics
        assert re.search(r'isthmus_seen_share\{peer="anonymous"\} 0\.[12]', metrics)
        release = peer.get("/release").json()["peers"][0]
        assert 0.1 < release["seen"] <= 0.21


@pytest.fixture
def counted(tmp_path):
    """Opens a silo's audit of 1,000 documents again and again, as a node that is restarted does."""
    (tmp_path / "audit.key").write_text("17" * 64 + "\n")
    (tmp_path / "audit.key").chmod(0o600)
    now = [1_795_000_000.0]
    with Ledger(tmp_path / "ledger.db", Budget()) as ledger:
        opened = []

        def again(documents=1_000, days=0.0):
            while opened:
                opened.pop().close()
            now[0] += 86_400 * days
            opened.append(
                NodeAudit(
                    tmp_path, AuditSettings(), ledger, documents=lambda: documents, clock=lambda: now[0]
                )
            )
            return opened[-1]

        yield again
        while opened:
            opened.pop().close()


def seen_until_refused(audit, person, policy, ids, step=10):
    """How many of the documents are shown to somebody before they are refused."""
    for at in range(0, len(ids), step):
        try:
            audit.record_shown(person, "broker", policy, ids[at : at + step], "q")
        except SeenEnough:
            return at
    return len(ids)


IDS = [f"d{at}" for at in range(1_000)]


def test_many_pseudonyms_through_one_broker_share_its_limit(counted):
    policy = Policy(search=True, most_seen=0.05, most_seen_by_peer=0.2)
    audit = counted()
    shares = [seen_until_refused(audit, Person(f"p{at}"), policy, IDS[50 * at :]) for at in range(20)]
    assert shares[0] == pytest.approx(50, abs=10), "each has a share of its own"
    assert sum(shares) == pytest.approx(200, abs=15), "and all together that of the broker"
    assert shares[-1] == 0


def test_who_has_seen_very_many_gets_no_others_one_by_one():
    """A sketch of thousands takes most new documents for known ones."""
    digests = [hashlib.sha256(str(at).encode()).hexdigest() for at in range(24_000)]
    seen, shown = DistinctCount(), 0
    for digest in digests:
        if not seen.would_pass(20_000, [digest]):
            seen.add([digest])
            shown += 1
    assert 18_500 < shown < 21_000
    few = DistinctCount()
    few.add(digests[:50])
    assert not few.would_pass(50, digests[:10]), "what was seen may be seen again"
    assert few.would_pass(50, digests[100:120])


def test_a_restart_a_lost_file_and_a_month_give_nobody_a_new_share(counted, tmp_path):
    policy = Policy(search=True, most_seen=0.05)
    total = seen_until_refused(counted(), Person("ada"), policy, IDS)
    assert total == pytest.approx(50, abs=10)
    assert seen_until_refused(counted(), Person("ada"), policy, IDS[500:]) == 0
    audit = counted(days=40)
    assert seen_until_refused(audit, Person("ada"), policy, IDS[500:]) == 0
    audit.close()
    (tmp_path / "seen.db").unlink()
    assert seen_until_refused(counted(), Person("ada"), policy, IDS[500:]) == 0
    assert seen_until_refused(counted(), Person("ben"), policy, IDS[500:]) > 0


def test_documents_that_go_and_come_back_count_once_and_new_names_count_anew(counted):
    policy = Policy(search=True, most_seen=0.05)
    audit = counted()
    seen_until_refused(audit, None, policy, IDS[:40])
    audit = counted(documents=960)
    assert seen_until_refused(audit, None, policy, IDS[:40]) == 40, "the same again"
    renamed = [f"{id} once more" for id in IDS[:40]]
    assert seen_until_refused(audit, None, policy, renamed) <= 10


def test_limits_of_a_day_begin_anew_tomorrow_and_openings_are_counted(counted):
    policy = Policy(search=True, open=True, most_seen_a_day=0.03, most_opened_a_day=3)
    audit = counted()
    assert seen_until_refused(audit, Person("ada"), policy, IDS) == pytest.approx(30, abs=10)
    for at in range(3):
        audit.record_opened(Person("ada"), "broker", policy, IDS[at])
    with pytest.raises(SeenEnough) as refused:
        audit.record_opened(Person("ada"), "broker", policy, IDS[0])
    assert refused.value.status == 429
    assert 0 < int(refused.value.headers["Retry-After"]) <= 86_400
    audit = counted()
    with pytest.raises(SeenEnough):
        audit.record_opened(Person("ada"), "broker", policy, IDS[0])
    audit = counted(days=1)
    audit.record_opened(Person("ada"), "broker", policy, IDS[0])
    assert seen_until_refused(audit, Person("ada"), policy, IDS[500:]) == pytest.approx(30, abs=10)


def test_what_the_owner_allowed_is_opened_beyond_the_limit(counted):
    policy = Policy(search=True, open=True, most_opened_a_day=0)
    audit = counted()
    with pytest.raises(SeenEnough):
        audit.record_opened(Person("ada"), "broker", policy, "d1")
    audit.record_opened(Person("ada"), "broker", policy, "d1", request="ab" * 16)


def test_people_are_told_why_a_silo_shows_no_more(tmp_path):
    with federation(tmp_path, {"ada": ["search", "documents"]}, open=True, most_opened_a_day=0) as (
        _,
        people,
    ):
        hit = people["ada"].search(QUERY).hits[0]
        with pytest.raises(Refused, match="as much of this silo as its policy allows"):
            people["ada"].open(hit)


def test_what_was_seen_is_saved_again_after_a_save_that_failed(tmp_path):
    seen = SeenDocuments(tmp_path / "seen.db")
    seen._db.execute("CREATE TRIGGER full BEFORE INSERT ON reached BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(sqlite3.IntegrityError, match="full"):
        seen.save(1, "2026-11-18T00:00:00Z")
    seen._db.execute("DROP TRIGGER full")
    seen.save(2, "2026-11-18T00:00:01Z")
    assert seen.reached == 2
    seen.close()
