"""`isthmus sketch` and `isthmus keys`: two silos, keys handed over, counts released, asked about and paid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isthmus.arrays import Ids
from isthmus.cli import main
from isthmus.features import ExactCounts, Pairs, compute
from isthmus.private.counts import Desk, in_memory
from isthmus.private.ledger import Budget, Ledger
from isthmus.private.messages import CountsQuestion, kind_of
from isthmus.private.sketch import CountMin
from isthmus.private.store import SiloFolder, read_released, write_released
from isthmus.private.views import Seeker
from isthmus.retrieval import Statistics
from isthmus.tables import read_letor, write_corpus_beir
from isthmus.text import ENGLISH, tokenise
from isthmus_reproduce import synthetic_text

CORPUS = synthetic_text.text(80, 12, 2, seed=3, words=60)
NORTH, SOUTH = CORPUS.silos


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a collection in it, where everything else is put too."""
    write_corpus_beir(CORPUS, tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def do(*arguments: object, status: int = 0) -> None:
    assert main([str(argument) for argument in arguments]) == status


def build(name: str, silo: str, *more: object) -> None:
    do("sketch", "build", "corpus", name, "--silo", silo, *more)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> object:
    capsys.readouterr()
    do(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    do(*arguments, status=1)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def query() -> str:
    """The rarest words of the first southern document, which live noise does not hide."""
    texts = [set(body.split()) for body in CORPUS.documents.bodies]
    words = set(CORPUS.silo(SOUTH).documents.bodies[0].split())
    return " ".join(sorted(words, key=lambda word: (sum(word in text for text in texts), word))[:12])


def test_two_silos_from_keys_to_features(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("north", "south"):
        do("keys", "new", name, name)
    do("keys", "trust", "north", "south/south.card")
    do("keys", "trust", "south", "north/north.card")
    do("keys", "wrap", "north", "-o", "boxes")
    do("keys", "unwrap", "south", "boxes/south.box", "--from", "north")
    assert SiloFolder.at("north").keys.group_key() == SiloFolder.at("south").keys.group_key()

    built = told(capsys, "sketch", "build", "corpus", "south", "--silo", SOUTH)
    assert {part["field"] for part in built["fields"]} == {"title", "body"}
    build("north", NORTH)
    done = told(capsys, "sketch", "publish", "south", "north", "-o", "south.released")
    assert done["bytes"] == os.path.getsize("south.released")
    assert (done["epsilon"], done["documents"]) == (8.0, built["documents"])
    assert "98.2 %" in done["meaning"]

    hits = told(capsys, "sketch", "ask", "north", "south.released", query(), "-k", 5)
    assert CORPUS.silo(SOUTH).documents.ids[0] in [hit["document"] for hit in hits]
    assert all(0 <= error < 10 for _, error in hits[0]["words"].values())
    asked = told(capsys, "sketch", "ask", "north", "south", query(), "-k", 5)
    assert CORPUS.silo(SOUTH).documents.ids[0] in [hit["document"] for hit in asked]

    Path("q.tsv").write_text(f"q1\t{query()}\nq2\t{CORPUS.queries.texts[0]}\n")
    wrote = told(capsys, "sketch", "ask", "north", "south.released", "--queries", "q.tsv", "-o", "x.txt")
    rows = read_letor("x.txt")
    assert (wrote["rows"], rows.width, len(rows)) == (rows.rows, 16, 2)
    with Ledger("south/silo.ledger") as ledger:
        assert ledger.spent(CORPUS.silo(SOUTH).documents.ids[0]) == 8.0
        assert {row["peer"] for row in ledger.departures()} == {"north"}
        assert {row["kind"] for row in ledger.departures()} == {"catalogue", "counts"}
        ledger.audit()
    with Ledger("north/silo.ledger") as ledger:
        assert [(row["kind"], row["epsilon"]) for row in ledger.departures()] == [("query text", None)]


def test_features_without_noise_are_the_features(world: Path) -> None:
    """At a huge ε and width, what `ask` computes is what one would who may read the documents."""
    build("north", NORTH, "--budget", "1e6", "--width", 1 << 16)
    build("south", SOUTH, "--budget", "1e6", "--width", 1 << 16, "--group", "north")
    own, other = SiloFolder.at("north"), SiloFolder.at("south")
    queries = tokenise([query()])
    seeker = Seeker(own.keys.group_key(), {"body": own.words("body")}, own.keys.decoys())
    with other.ledger() as ledger:
        carrier = in_memory(Desk(other.owner("body", 1e5, ledger.charge_all)), "north")
        words = Ids.of(queries.terms.words)
        found = seeker.read(seeker.ask(carrier, ["body"], words), words)
    mine, theirs = (tokenise(CORPUS.silo(name).documents.bodies) for name in (NORTH, SOUTH))
    exact = ExactCounts.of(theirs, Statistics.of(mine) + Statistics.of(theirs))
    pairs = Pairs.all(1, len(theirs))
    truth = compute(queries, pairs, title=exact, body=exact)
    private = compute(queries, pairs, title=exact, body=found.counts["body"])
    same = np.isclose(private[:, 7:11], truth[:, 7:11], rtol=0.05, atol=1e-6)
    assert same.mean() > 0.9  # now and then two words share a cell


def test_words_come_back_as_they_were_counted(world: Path) -> None:
    build("south", SOUTH)
    kept, truth = SiloFolder.at("south").words("body"), tokenise(CORPUS.silo(SOUTH).documents.bodies)
    assert kept.terms.words == truth.terms.words
    assert (kept.counts() != truth.counts()).nnz == 0


def test_what_is_built_again_is_paid_once_and_what_changed_anew(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build("south", SOUTH, "--budget", "9")
    do("sketch", "publish", "south", "north", "-o", "one.released")
    build("south", SOUTH)
    do("sketch", "publish", "south", "west", "-o", "two.released")
    assert Path("one.released").read_bytes() == Path("two.released").read_bytes()
    document = CORPUS.silo(SOUTH).documents.ids[0]
    records = [json.loads(line) for line in Path("corpus/corpus.jsonl").read_text().splitlines()]
    for record in records:
        record["text"] += " revised" if record["_id"] == document else ""
    Path("corpus/corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    build("south", SOUTH)
    assert "only 1 is left" in refused(capsys, "sketch", "publish", "south", "north", "-o", "three.released")
    assert not Path("three.released").exists()


def test_the_same_text_counted_in_another_way_has_other_noise_and_is_paid_anew(world: Path) -> None:
    folder, documents = SiloFolder.at("south", create=True), CORPUS.silo(SOUTH).documents
    key, released = folder.keys.group_key(create=True), []
    exact = CountMin.of(tokenise(documents.bodies), key.family("body", width=1 << 10)).dense()
    for tokeniser in (ENGLISH, replace(ENGLISH, stop_words=ENGLISH.stop_words | {"nowhere"}), ENGLISH):
        folder.build(documents, width=1 << 10, budget=Budget(16.0), tokeniser=tokeniser)
        with folder.ledger() as ledger:
            write_released(folder.desk(8.0, ledger, ["body"]), key, "north", "it")
            spent = ledger.spent(documents.ids[0])
        released.append((read_released("it", key)["body"][1].dense() - exact, spent))
    (first, paid), (other, twice), (again, still) = released
    assert np.array_equal(first, again)
    assert (paid, twice, still) == (8.0, 16.0, 16.0)
    assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.05


def test_a_word_hides_among_the_same_decoys_in_every_field(world: Path) -> None:
    """What stands in the questions about title and body alike is word and decoys, not the word alone."""
    build("north", NORTH)
    build("south", SOUTH, "--group", "north")
    own, asked = SiloFolder.at("north"), {}
    key = own.keys.group_key()
    words = {name: own.words(name) for name in own.fields()}
    with SiloFolder.at("south").ledger() as ledger:
        desk = SiloFolder.at("south").desk(8.0, ledger)

        def overhearing(message: bytes) -> bytes:
            if kind_of(message) == CountsQuestion.kind:
                question = CountsQuestion.decode(message)
                asked[question.terms.field] = question.terms.width, {*question.columns.ravel().tolist()}
            return desk.serve(message, "north")

        word = Ids.of(words["body"].terms.words[5:6])
        Seeker(key, words, own.keys.decoys()).ask(overhearing, own.fields(), word, decoys=3)
    known = Ids.of(sorted({*words["title"].terms.words, *words["body"].terms.words}))
    fitting = [
        np.isin(key.family(name, width=width).of_vocabulary(known).cells[0], list(columns))
        for name, (width, columns) in asked.items()
    ]
    assert np.logical_and(*fitting).sum() >= 4


def test_fields_are_paid_together_or_not_at_all(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("south", SOUTH, "--budget", "9")
    do("sketch", "publish", "south", "north", "-o", "body.released", "--field", "body")
    publish = ("sketch", "publish", "south", "north", "-o", "both.released", "--epsilon", "4")
    assert "only 1 is left" in refused(capsys, *publish)
    with Ledger("south/silo.ledger") as ledger:
        assert ledger.spent(CORPUS.silo(SOUTH).documents.ids[0], field="title") == 0.0


def test_what_cannot_be_is_one_line(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("south", SOUTH)
    build("stranger", NORTH)
    do("sketch", "publish", "south", "north", "-o", "s.released")
    ask = ("sketch", "ask", "stranger")
    assert "another group key" in refused(capsys, *ask, "s.released", "wing")
    assert "different group keys" in refused(capsys, *ask, "south", "wing")
    assert "no silo's folder" in refused(capsys, "sketch", "ask", "nowhere", "s.released", "wing")
    assert "no word to look for" in refused(capsys, "sketch", "ask", "south", "s.released", "the")
    assert "one QUERY" in refused(capsys, "sketch", "ask", "south", "s.released")
    assert "-o FILE" in refused(capsys, "sketch", "ask", "south", "s.released", "--queries", "q.tsv")
    assert "only 1 is left" in refused(
        capsys, "sketch", "publish", "south", "west", "-o", "t", "--epsilon", "4"
    )
    assert not Path("t").exists()
    whole = Path("s.released").read_bytes()
    for at, wrong in enumerate((b"", whole[:-3], b"x" + whole, whole[:16], whole[:40] + b"\0" + whole[41:])):
        Path(f"{at}.released").write_bytes(wrong)
        assert f"{at}.released" in refused(capsys, "sketch", "ask", "south", f"{at}.released", "wing")
    assert "budget of" in refused(
        capsys, "sketch", "build", "corpus", "south", "--silo", SOUTH, "--budget", "3"
    )


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_secrets_are_their_owners_alone(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("south", SOUTH)
    do("keys", "new", "south", "south")
    for path in Path("south").iterdir():
        assert path.stat().st_mode & 0o077 == 0 or path.suffix == ".card"
    assert Path("south").stat().st_mode & 0o077 == 0
    os.chmod("south/noise.key", 0o644)
    told = refused(capsys, "sketch", "publish", "south", "north", "-o", "s.released")
    assert "can be read by others" in told
    assert "chmod 600" in told
    os.chmod("south/noise.key", 0o600)
    Path("south/noise.key").write_text("{}")
    assert "is not an isthmus noise.key" in refused(
        capsys, "sketch", "publish", "south", "north", "-o", "s.released"
    )


def test_keys_are_not_mixed_up(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("north", "south", "relay"):
        do("keys", "new", name, name)
    do("keys", "trust", "north", "south/south.card", "north/north.card")
    assert list(SiloFolder.at("north").keys.trusted()) == ["south"]
    do("keys", "wrap", "north", "-o", "boxes")
    assert "no trusted silo" in refused(capsys, "keys", "unwrap", "south", "boxes/south.box")
    do("keys", "trust", "south", "north/north.card")
    assert "no trusted silo" in refused(
        capsys, "keys", "unwrap", "south", "boxes/south.box", "--from", "west"
    )
    do("keys", "unwrap", "south", "boxes/south.box")
    assert "belongs to north" in refused(capsys, "keys", "new", "north", "other")
    assert "cannot name a silo" in refused(capsys, "keys", "new", "x", "../x")
    forged = json.loads(Path("relay/relay.card").read_text()) | {"name": "north"}
    Path("north.card").write_text(json.dumps(forged))
    assert "other keys" in refused(capsys, "keys", "trust", "south", "north.card")
    SiloFolder.at("relay").keys.group_key(create=True)
    do("keys", "trust", "relay", "south/south.card")
    do("keys", "wrap", "relay", "-o", "fakes")
    assert "no trusted silo" in refused(capsys, "keys", "unwrap", "south", "fakes/south.box")
    Path("cut.box").write_bytes(Path("boxes/south.box").read_bytes()[:-1])
    assert "was cut" in refused(capsys, "keys", "unwrap", "south", "cut.box")


def test_a_publisher_killed_at_any_moment_leaves_a_whole_file_or_none(world: Path) -> None:
    build("south", SOUTH)
    code = "import sys; from isthmus.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "sketch", "publish", "south", "north", "-o", "s.released"]
    for wait in (0.4, 0.9, 1.4):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if Path("s.released").exists():
            read_released("s.released", SiloFolder.at("south").keys.group_key())
    do("sketch", "publish", "south", "north", "-o", "s.released")
    with Ledger("south/silo.ledger") as ledger:
        assert ledger.spent(CORPUS.silo(SOUTH).documents.ids[0]) == 8.0
