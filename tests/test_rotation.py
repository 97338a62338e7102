"""Other keys in the place of those in use: the cost is said first, and holds."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from cryptography import x509

from isthmus.cli import main
from isthmus.errors import DataError, ProtocolError
from isthmus.private import Keyring, SiloFolder, read_card, read_released, write_released
from isthmus.private.ledger import Budget
from isthmus.service import certificates
from isthmus.service.broker import Broker
from isthmus.service.certificates import Authority
from isthmus.service.node import Node
from isthmus.service.security import ApiKeys, HitTokens, LiveSecret
from isthmus.service.settings import read_broker, read_node
from isthmus.tables import Documents

KINDS = {
    "hits": "north/silo.toml",
    "persons": "broker.toml",
    "hash": "north/silo.toml",
    "group": "counts",
    "noise": "counts",
    "decoys": "counts",
    "identity": "north/keys",
}


def documents_of(*rows):
    ids, titles, bodies = zip(*rows, strict=True)
    return Documents(ids, titles, bodies, np.zeros(len(ids), dtype=np.int64))


def secrets_of(folder):
    names = ("*.key", "silo.toml", "*.card")
    return {path: path.read_bytes() for name in names for path in sorted(folder.rglob(name))}


@pytest.fixture
def folder(tmp_path):
    """A federation of two silos, as `isthmus new` writes it, and a folder of private counts."""
    root = tmp_path / "federation"
    assert main(["new", str(root), "--silos", "north,south"]) == 0
    counts = SiloFolder.at(root / "counts", create=True)
    counts.keys.begin("counts")
    counts.keys.decoys()
    documents = documents_of(("d1", "tide", "tidal power of the sea"), ("d2", "mill", "water and a mill"))
    counts.build(documents, budget=Budget(5.0))
    HitTokens("north", LiveSecret(read_node(root / "north" / "silo.toml").folder / "feedback.key"))
    LiveSecret(read_broker(root / "broker.toml").folder / "persons.key")
    return root


def rotate(folder, kind, *more, where=()):
    return main(["keys", "rotate", kind, *(str(folder / place) for place in where or [KINDS[kind]]), *more])


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_is_said_and_nothing_changes_without_consent(folder, kind, capsys):
    before = secrets_of(folder)
    assert rotate(folder, kind, "--json") == 1
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["costs"]
    assert not record["done"]
    assert all(cost in printed.err for cost in record["costs"])
    assert secrets_of(folder) == before
    assert rotate(folder, kind, "--yes") == 0
    after = secrets_of(folder)
    assert after.keys() == before.keys()
    changed = {path.name for path in after if after[path] != before[path]}
    files = {"hits": "feedback.key", "hash": "silo.toml"}
    assert changed - {"north.card"} == {files.get(kind, f"{kind}.key")}
    assert all(path.stat().st_mode & 0o077 == 0 for path in after if path.suffix != ".card")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rotation_that_is_killed_leaves_the_key_before(folder, kind, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*arguments):
        raise Killed

    before = secrets_of(folder)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            rotate(folder, kind, "--yes")
    assert secrets_of(folder) == before
    assert rotate(folder, kind, "--yes") == 0


def test_a_new_key_of_hits_opens_none_that_was_shown(folder):
    """In a node that runs, from the next request on."""
    tokens = HitTokens("north", LiveSecret(read_node(folder / "north" / "silo.toml").folder / "feedback.key"))
    shown, name = tokens.seal("d1", query="tide", peer="broker"), tokens.name("d1", peer="broker")
    assert tokens.open(shown, query="tide", peer="broker") == "d1"
    assert rotate(folder, "hits", "--yes") == 0
    assert tokens.open(shown, query="tide", peer="broker") is None
    assert tokens.name("d1", peer="broker") != name
    again = tokens.seal("d1", query="tide", peer="broker")
    assert tokens.open(again, query="tide", peer="broker") == "d1"


def test_a_new_key_of_persons_is_a_new_name_for_everybody(folder):
    broker = Broker(read_broker(folder / "broker.toml"))
    before = broker._pseudonym("north", "ada")
    assert broker._pseudonym("north", "ada") == before
    assert rotate(folder, "persons", "--yes") == 0
    assert broker._pseudonym("north", "ada") not in (before, broker._pseudonym("south", "ada"))


def released_to(config):
    """What a node's ledger has left, after its statistics have left."""
    with Node(read_node(config, ["encoder.kind=none"])).offline() as node:
        node.read_sources()
        node.index.catch_up()
        packed = node.releases.to("broker")
        assert node.releases.to("broker") == packed
        return node.ledger.summary()["least_left"], packed, node.digest_key


def test_a_new_hash_key_costs_what_it_says(folder, capsys, tmp_path):
    """The statistics are released anew, for their ε once more; all silos of a machine get the same key."""
    north, south = (folder / name / "silo.toml" for name in ("north", "south"))
    text = north.read_text()
    (folder / "north" / "index" / "feedback.key").unlink()  # which a node makes after its ledger
    assert rotate(folder, "hits", "--yes") == 1
    left, statistics, digests = released_to(north)
    places = [str(north), str(south)]
    assert main(["keys", "rotate", "hash", *places, "-o", str(tmp_path / "new"), "--yes"]) == 0
    said = capsys.readouterr().err
    assert f"ε = 1 for every document; the document that has spent most has {left:g} left" in said
    assert read_node(north).statistics.hash_key == read_node(south).statistics.hash_key
    assert north.read_text().replace(read_node(north).statistics.hash_key, "") in {
        text.replace(line.split('"')[1], "") for line in text.splitlines() if line.startswith("hash_key")
    }
    anew, others, key = released_to(north)
    assert anew == pytest.approx(left - 1)
    assert (others != statistics, key != digests) == (True, True)
    # a silo on another machine takes the file
    assert rotate(folder, "hash", "--yes", where=["south/silo.toml"]) == 0
    assert read_node(north).statistics.hash_key != read_node(south).statistics.hash_key
    taking = ["--take", str(tmp_path / "new"), "--yes"]
    assert rotate(folder, "hash", *taking, where=["south/silo.toml"]) == 0
    assert read_node(north).statistics.hash_key == read_node(south).statistics.hash_key


def test_a_hash_key_in_the_environment_stays_there(folder, capsys):
    config = folder / "north" / "silo.toml"
    key = read_node(config).statistics.hash_key
    config.write_text(config.read_text().replace(key, "env:HASH_KEY"))
    assert rotate(folder, "hash", "--yes") == 1
    assert "env:HASH_KEY" in capsys.readouterr().err


def test_new_noise_is_paid_for_again(folder, tmp_path):
    counts = SiloFolder.at(folder / "counts")

    def published(name):
        with counts.ledger() as ledger:
            write_released(counts.desk(1.0, ledger), counts.keys.group_key(), "south", tmp_path / name)
            return ledger.left("d1"), (tmp_path / name).read_bytes()

    left, first = published("first")
    assert published("same") == (left, first)  # the same cells, the same noise, nothing charged
    assert rotate(folder, "noise", "--yes") == 0
    again, second = published("second")
    assert second != first
    assert again == pytest.approx(2 * left - 5.0)  # the same ε once more


def test_a_new_group_key_is_shared_and_sketches_are_built_anew(folder, tmp_path):
    counts, other = SiloFolder.at(folder / "counts"), Keyring.at(tmp_path / "other", create=True)
    card = other.begin("other").card
    counts.keys.trust(card)
    other.trust(counts.keys.identity().card)
    other.join(counts.keys.group_key())
    with counts.ledger() as ledger:
        write_released(counts.desk(1.0, ledger), counts.keys.group_key(), "other", tmp_path / "old")
    assert read_released(tmp_path / "old", other.group_key())
    assert rotate(folder, "group", "--yes") == 0
    with counts.ledger() as ledger, pytest.raises(DataError, match="another group key"):
        counts.desk(1.0, ledger)
    boxes = tmp_path / "boxes"
    assert main(["keys", "wrap", str(counts.path), "-o", str(boxes)]) == 0
    assert main(["keys", "unwrap", str(other.path), str(boxes / "other.box")]) == 0
    assert other.group_key() == counts.keys.group_key()
    assert other.group_key().epoch == 1
    with pytest.raises(DataError, match="another group key"):
        read_released(tmp_path / "old", other.group_key())
    counts.build(documents_of(("d1", "tide", "tidal power of the sea")))
    with counts.ledger() as ledger:
        counts.desk(1.0, ledger)


def test_a_new_identity_is_believed_once_its_card_is(folder, capsys):
    from isthmus.private.keys import GroupKey, unwrap, wrap

    north, south = (Keyring.at(folder / name / "keys") for name in ("north", "south"))
    old = wrap(GroupKey.fresh(epoch=1), south.identity(), [north.identity().card])["north"]
    assert rotate(folder, "identity", "--yes") == 0
    card = folder / "north" / "keys" / "north.card"
    assert read_card(card) == north.identity().card
    with pytest.raises(ProtocolError):
        unwrap(old, north.identity(), north.trusted())
    assert main(["keys", "trust", str(south.path), str(card)]) == 1
    assert "--replace" in capsys.readouterr().err
    assert main(["keys", "trust", str(south.path), str(card), "--replace"]) == 0
    assert south.trusted()["north"] == north.identity().card


def test_certificates_that_end_soon_are_renewed_for_the_same_names(tmp_path, capsys):
    authority = Authority.at(tmp_path)
    authority.issue("north", clients=False, hosts=["silo.example.org"], days=5)
    authority.issue("broker", clients=True)
    before = {name: authority.present(name) for name in ("north", "broker")}
    assert main(["keys", "renew", str(tmp_path), "--within", "7", "--days", "14", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["north"]
    assert authority.present("broker") == before["broker"]
    renewed = authority.present("north")
    assert renewed.public_key() != before["north"].public_key()
    for kind in (x509.SubjectAlternativeName, x509.ExtendedKeyUsage):
        values = [each.extensions.get_extension_for_class(kind).value for each in (renewed, before["north"])]
        assert values[0] == values[1]
    tls = certificates.files(tmp_path / "north")
    assert certificates.ending(tls) == {(): renewed.not_valid_after_utc.timestamp()}
    assert certificates.ending(None) == {}
    assert main(["keys", "renew", str(tmp_path), "--within", "7"]) == 0
    assert "no certificate ends" in capsys.readouterr().err
    assert main(["keys", "revoke", str(tmp_path), "nobody"]) == 1
    assert main(["keys", "renew", str(tmp_path / "elsewhere")]) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_an_api_key_is_rotated_with_an_overlap(tmp_path, capsys):
    now = 1000.0
    keys = ApiKeys(tmp_path / "keys.json", clock=lambda: now)
    old = keys.add("ada", scopes=["search"], groups=["ward 3"])
    new = keys.rotate(old.split("_")[1], overlap=0.5)
    assert keys.find(new) == keys.find(old)  # name, scopes
    assert keys.find(new).person == keys.find(old).person
    now += 0.5 * 86_400 + 1
    assert keys.find(old) is None
    assert keys.find(new).name == "ada"
    file = tmp_path / "others.json"
    token = ApiKeys(file).add("bob", scopes=["search"])
    command = ["keys", "api", "rotate", str(file), token.split("_")[1], "--overlap", "0", "--json"]
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert ApiKeys(file).find(token) is None
    assert ApiKeys(file).find(record["key"]).name == "bob"
    assert main([*command[:4], "nobody"]) == 1
