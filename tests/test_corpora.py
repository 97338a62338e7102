"""Collections by name and from their files: what is read, what is refused, and with which words."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.corpora import available, load, load_folds, load_letor
from isthmus.corpora.labels import pydocs_labels
from isthmus.errors import DataError
from isthmus.evaluation import evaluate
from isthmus.retrieval import BM25
from isthmus.tables import write_corpus_beir

CRAN = {
    "cran.all.1400": (
        ".I 1\n.T\nwing in a\nslipstream .\n.A\nbrenckman,m.\n.B\nj. ae. scs.\n.W\nwing lift\nin air .\n"
        ".I 2\n.T\n.A\n.B\n.W\n"
        ".I 3\n.T\nheat\n.A\n.B\n.W\nslabs .5 thick\n.W \nand more\n"
    ),
    "cran.qry": ".I 001\n.W\nwhat wings\n.I 004\n.W\nwhat heat\nis there\n",
    "cranqrel": "1 1 2 \n1 3 4 \n1 2 -1\n2 3 1\n2 1 3\n",
}
NPL = {
    "doc-text": "1\ncompact memories\nhave\n   /\n2\nan analogue computer\n   /\n3\nwaves\n   /",
    "query-text": "1\nMEMORIES\n/\n2\nWAVES OF 3\n/\n",
    "rlv-ass": "1\n    1     2\n    3\n   /\n2\n    3",
}
TIME = {
    "TIME.ALL": "*TEXT 017 01/04/63 PAGE 020\n\nTHE ALLIES\n\nMET .\n*TEXT 018 x\nTHE U.S .\n*STOP\n",
    "TIME.QUE": "*FIND      1\n\n ALLIES\n\n*FIND      2\n\n NOTHING\n*STOP\n",
    "TIME.REL": "1  1 2\n\n2\n",
}
MED = {
    "MED.ALL": ".I 1\n.W\nplasma levels\n.I 2\n.W\nlens\n",
    "MED.QRY": ".I 1\n.W\nlenses\n",
    "MED.REL": "1 0 2 1\n",
}
CISI = {
    "CISI.ALL": ".I 1\n.T\nDewey\n.A\nC.\n.W\nThe history.\n.X\n1\t5\t1\n",
    "CISI.QRY": ".I 1\n.W\nTitles?\n.I 2\n.T\nNetworks\n.A\nA.\n.W\nLibraries.\n.B\n(J)\n",
    "CISI.REL": "     1      1\t0\t0.000000\n",
}
ADI = {
    "ADI.ALL": ".I 1\n.T\na center\n.W\nprovides\n",
    "ADI.QRY": ".I 1\n.W\ncenters\n",
    "ADI.REL": "1   1   0   0.000000   \n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1")
    return folder


def test_cran(tmp_path: Path) -> None:
    corpus = load(write(tmp_path, CRAN))
    assert corpus.name == "cran"
    assert corpus.documents.ids == ("1", "2", "3")
    assert corpus.documents.titles == ("wing in a slipstream .", "", "heat")
    assert corpus.documents.bodies == ("wing lift\nin air .", "", "slabs .5 thick\nand more")
    assert corpus.queries.ids == ("1", "2")  # by position: the file calls them 001 and 004
    assert corpus.queries.texts == ("what wings", "what heat is there")
    assert corpus.qrels.to_dict() == {"1": {"1": 3, "3": 1}, "2": {"1": 2, "3": 4}}  # 5 − code, −1 left out
    assert set(corpus.queries.splits) == {"test"}


def test_npl(tmp_path: Path) -> None:
    corpus = load(str(write(tmp_path, NPL)))
    assert corpus.documents.bodies == ("compact memories\nhave", "an analogue computer", "waves")
    assert corpus.queries.texts == ("MEMORIES", "WAVES OF 3")
    assert corpus.qrels.to_dict() == {"1": {"1": 1, "2": 1, "3": 1}, "2": {"3": 1}}


def test_time(tmp_path: Path) -> None:
    corpus = load(write(tmp_path, TIME))
    assert corpus.documents.bodies == ("THE ALLIES\nMET .", "THE U.S .")
    assert corpus.queries.texts == ("ALLIES", "NOTHING")
    assert corpus.qrels.to_dict() == {"1": {"1": 1, "2": 1}}


def test_time_counts_the_two_documents_that_its_file_lost(tmp_path: Path) -> None:
    many = "".join(f"*TEXT {number} x\nw{number}\n" for number in range(373))
    corpus = load(write(tmp_path, TIME | {"TIME.ALL": many, "TIME.REL": "1 370 373\n"}))
    assert corpus.documents.ids[369:] == ("370", "373", "374", "375")
    assert corpus.documents.bodies[370] == "w370"


@pytest.mark.parametrize(
    ("files", "title", "query", "relevant"),
    [(MED, "", "lenses", "2"), (CISI, "Dewey", "Titles?", "1"), (ADI, "a center", "centers", "1")],
)
def test_the_other_collections(
    tmp_path: Path, files: dict[str, str], title: str, query: str, relevant: str
) -> None:
    corpus = load(write(tmp_path, files))
    assert corpus.documents.titles[0] == title
    assert corpus.queries.texts[0] == query
    assert corpus.qrels.to_dict() == {"1": {relevant: 1}}


def test_a_cisi_query_may_have_a_title(tmp_path: Path) -> None:
    assert load(write(tmp_path, CISI)).queries.texts[1] == "Networks Libraries."


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (CRAN | {"cranqrel": "1 1 2\n1 x 2\n"}, r"cranqrel:2: not a judgement: '1 x 2'"),
        (CRAN | {"cranqrel": "1 1\n"}, r"cranqrel:1: not a judgement"),
        (CRAN | {"cranqrel": "1 9 2\n"}, r"cranqrel:1: no document 9 in the collection"),
        (CRAN | {"cranqrel": "3 1 2\n"}, r"cranqrel:1: no query 3 in the collection"),
        (CRAN | {"cranqrel": "1 1 2\n1 1 3\n"}, r"cranqrel:2: document 1 is judged twice for query 1"),
        (CRAN | {"cranqrel": ""}, r"cranqrel: the file is empty"),
        (CRAN | {"cran.qry": "words first\n.I 1\n"}, r"cran.qry:1: text outside a section: 'words first'"),
        (CRAN | {"cran.all.1400": ".I 1\nwords\n"}, r"cran.all.1400:2: text outside a section"),
        (
            CRAN | {"cran.all.1400": ".I 1\n.W\na\n.I 1\n.W\nb\n"},
            r"cran.all.1400:4: document 1 is there twice",
        ),
        (CRAN | {"cranqrel": "1 1 2\n1 3 5\n"}, r"cranqrel:2: code 5 is none of 1 to 4 and -1: '1 3 5'"),
        (CRAN | {"cranqrel": "1 1 0\n"}, r"cranqrel:1: code 0 is none of"),
        (NPL | {"doc-text": "1\na\n/\n1\nb\n/\n"}, r"doc-text:4: document 1 is there twice, first on line 1"),
        (CRAN | {"cran.all.1400": ".I 1\n.W\nna\xefve\n"}, r"cran.all.1400:3: byte 0xef .* not UTF-8"),
        (NPL | {"rlv-ass": "1\n 2x\n/\n"}, r"rlv-ass:2: not a number: '2x'"),
        (NPL | {"doc-text": "compact\n/\n"}, r"doc-text:1: text before its number: 'compact'"),
        (TIME | {"TIME.REL": "1 1,2\n"}, r"TIME.REL:1: not a number: '1,2'"),
        (TIME | {"TIME.QUE": "ALLIES\n*FIND 1\n"}, r"TIME.QUE:1: text before the first item"),
    ],
)
def test_malformed_collections_name_file_and_line(tmp_path: Path, files: dict[str, str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        load(write(tmp_path, files))


def test_a_collection_without_its_queries(tmp_path: Path) -> None:
    write(tmp_path, {name: text for name, text in CRAN.items() if name != "cran.qry"})
    with pytest.raises(DataError, match=r"cran\.qry: cannot be read"):
        load(tmp_path)


def article(number: int, split: str, topics: str, text: str, marked: str = "YES") -> str:
    named = "".join(f"<D>{topic}</D>" for topic in topics.split())
    return (
        f'<REUTERS TOPICS="{marked}" LEWISSPLIT="{split}" CGISPLIT="X" OLDID="5" NEWID="{number}">\n'
        f"<DATE>26-FEB-1987</DATE>\n<TOPICS>{named}</TOPICS>\n<PLACES><D>usa</D></PLACES>\n"
        f"<TEXT>&#2;\n{text}\n&#3;</TEXT>\n</REUTERS>\n"
    )


COCOA = (
    "<TITLE>COCOA &lt;CCO></TITLE>\n<DATELINE>  RIO, Feb 26 - </DATELINE>"
    "<BODY>Showers &amp; sun\n    continued. Reuter\n&#3;</BODY>"
)
REUTERS = {
    "reut2-000.sgm": "<!DOCTYPE lewis>\n"
    + article(1, "TRAIN", "cocoa cocoa tea", COCOA)
    + article(2, "TRAIN", "tea", "caf\xfc")
    + article(3, "NOT-USED", "cocoa", "unused")
    + article(4, "TRAIN", "cocoa", "unmarked", marked="NO"),
    "reut2-001.sgm": article(5, "TEST", "cocoa", "cocoa again")
    + article(6, "TEST", "gold", "only in test")
    + article(7, "TEST", "", "no topic"),
}


def test_reuters(tmp_path: Path) -> None:
    corpus = load(write(tmp_path, REUTERS))
    assert corpus.name == "reuters"
    assert corpus.documents.ids == ("cocoa",)  # tea has no test article, gold no training article
    assert corpus.queries.ids == ("1", "5")
    assert corpus.queries.splits == ("train", "test")
    assert corpus.queries.texts[0] == "COCOA <CCO>\nShowers & sun\ncontinued. Reuter"
    assert corpus.qrels.to_dict() == {"1": {"cocoa": 1}, "5": {"cocoa": 1}}


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[:-30], r"reut2-000.sgm:29: an article that does not end: '<REUTERS TOPICS="),
        (lambda text: text.replace("</REUTERS>", "", 1), r"reut2-000.sgm:2: an article that does not end"),
        (lambda text: "</REUTERS>\n" + text, r"reut2-000.sgm:1: the end of no article"),
        (lambda text: text.replace("NEWID", "ID"), r"reut2-000.sgm:2: not an article"),
        (lambda text: text.replace("TOPICS>", "TOPIC>"), "not an article"),
        (lambda text: text.replace("cocoa", "tea"), "no topic with a training and a test article"),
    ],
)
def test_damaged_reuters_files(tmp_path: Path, damage: Callable[[str], str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        load(write(tmp_path, REUTERS | {"reut2-000.sgm": damage(REUTERS["reut2-000.sgm"])}))


def test_a_reuters_file_twice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="article 5 is there 2 times"):
        load(write(tmp_path, REUTERS | {"reut2-001-copy.sgm": REUTERS["reut2-001.sgm"]}))


FOLD = {
    "train": [0, 1, 2, 5],
    "val": [3],
    "test": [4],
    "label_descriptions": {"0": " About cats.", "1": "Dogs"},
}
LABELS = {
    "texts.txt": "a cat\nmy cat\nthe dog\n\ncats\x0bdogs\nbirds\n",
    "labels.txt": "0\n0\n1\n1\n0\n10\n",
    "folds/0.json": json.dumps(FOLD),
    "folds/1.json": json.dumps(FOLD | {"train": [4], "test": [0]}),
}


def test_label_sets(tmp_path: Path) -> None:
    corpus = load(write(tmp_path / "pets", LABELS))
    assert corpus.name == "pets"
    assert corpus.documents.ids == ("0", "1", "10")
    assert corpus.documents.titles == ("label 0", "label 1", "label 10")
    assert corpus.documents.bodies == ("About cats.", "Dogs", "")
    assert corpus.queries.ids == ("0", "1", "2", "3", "4", "5")
    assert corpus.queries.texts[3:5] == ("", "cats\x0bdogs")
    assert corpus.queries.splits == ("train", "train", "train", "validation", "test", "train")
    assert corpus.qrels.to_dict()["5"] == {"10": 1}


def test_label_folds(tmp_path: Path) -> None:
    folder = write(tmp_path, LABELS)
    assert load(folder, fold=1).queries.ids == ("0", "3", "4")  # what a fold leaves out is left out
    with pytest.raises(DataError, match=r"no fold 2 \(folds go from 0 to 1\)"):
        load(folder, fold=2)


def test_a_label_folder_without_folds_makes_its_own(tmp_path: Path) -> None:
    texts = [f"text {at % 40}" for at in range(50)]  # ten texts stand there twice
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "labels.txt").write_text("\n".join(str(at % 3) for at in range(50)) + "\n")
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for fold in range(10):
        corpus = load(tmp_path, fold=fold)
        assert len(corpus.queries) == 50
        homes: dict[str, set[str]] = {}
        for name, text, split in zip(
            corpus.queries.ids, corpus.queries.texts, corpus.queries.splits, strict=True
        ):
            parts[split].append(name)
            homes.setdefault(text, set()).add(split)
        assert all(len(splits) == 1 for splits in homes.values()), "equal texts stay together"
    assert sorted(map(int, parts["test"])) == sorted(map(int, parts["validation"])) == list(range(50))
    with pytest.raises(DataError, match=r"no fold 10.*folds go from 0 to 9"):
        load(tmp_path, fold=10)
    (tmp_path / "texts.txt").write_text("same\n" * 50)
    with pytest.raises(DataError, match="1 different texts cannot make"):
        load(tmp_path)


def test_the_known_label_sets_have_names(tmp_path: Path) -> None:
    corpus = load(write(tmp_path / "twitter", LABELS))
    assert corpus.documents.titles[:2] == ("arts & culture", "business & entrepreneurs")


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"labels.txt": "0\n"}, "6 texts but 1 labels"),
        ({"labels.txt": "0\n0\nabc\n1\n0\n10\n"}, r"labels\.txt:3: not a whole number: 'abc'"),
        ({"labels.txt": "0\n\n1\n1\n0\n10\n"}, r"labels\.txt:2: not a whole number: ''"),
        ({"labels.txt": "0\n0\n1\n1.5\n0\n10\n"}, r"labels\.txt:4: not a whole number"),
        ({"folds/0.json": "{"}, r"0\.json: not a fold"),
        ({"folds/0.json": "[]"}, r"0\.json: not a fold"),
        ({"folds/0.json": '{"train": [0], "val": [1]}'}, "not a fold: KeyError"),
        ({"folds/0.json": json.dumps(FOLD | {"test": [6]})}, "lines from 0 to 5"),
        ({"folds/0.json": json.dumps(FOLD | {"test": [-1]})}, "line -1"),
        ({"folds/0.json": json.dumps(FOLD | {"test": [0.5]})}, "not a fold"),
        ({"folds/0.json": json.dumps(FOLD | {"test": [3]})}, "line 3 stands twice"),
        ({"folds/0.json": json.dumps(FOLD | {"label_descriptions": 3})}, "not a fold"),
    ],
)
def test_malformed_label_sets(tmp_path: Path, files: dict[str, str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        load(write(tmp_path, LABELS | files))


def test_beir_folders(tmp_path: Path) -> None:
    corpus = load(write(tmp_path / "smart", CRAN))
    write_corpus_beir(corpus, tmp_path / "beir")
    again = load(tmp_path / "beir")
    assert again.name == "beir"
    assert again.documents.texts == corpus.documents.texts
    assert again.qrels == corpus.qrels


SAMPLES = [CRAN, NPL, TIME, MED, CISI, ADI, REUTERS, LABELS]


@given(
    st.sampled_from(SAMPLES),
    st.integers(0, 2),
    st.integers(0, 10_000),
    st.integers(0, 20),
    st.text(alphabet="\n./*<>019 ITW-\x00\xff", max_size=6),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
def test_any_damage_is_read_or_refused(
    tmp_path: Path, files: dict[str, str], which: int, at: int, gone: int, put: str
) -> None:
    name = sorted(files)[which % len(files)]
    at %= len(files[name]) + 1
    damaged = files[name][:at] + put + files[name][at + gone :]
    folder = tmp_path / str(SAMPLES.index(files))
    with suppress(DataError):
        corpus = load(write(folder, files | {name: damaged}))
        assert len(corpus.queries.ids) == len(corpus.queries.splits) == len(set(corpus.queries.ids))


class TestNames:
    def test_a_real_set_needs_to_be_told_where(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ISTHMUS_DATA", raising=False)
        with pytest.raises(DataError, match="set ISTHMUS_DATA to the folder that has collections/cran"):
            load("cran")

    def test_a_real_set_that_is_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path))
        with pytest.raises(DataError, match=r"'reuters' is not under ISTHMUS_DATA.*labels/reuters21578"):
            load("reuters")

    def test_a_name_is_found_under_the_data_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ISTHMUS_DATA", str(tmp_path))
        write(tmp_path / "collections" / "npl", NPL)
        assert load("npl").name == "npl"
        here = {name for name, there in available().items() if there}
        labels = {"pydocs-labels", "pydocs-modules", "pydocs-see-also"}
        assert here == {"npl", "pydocs", *labels, "synthetic", "synthetic-mslr"}

    def test_without_a_data_folder_the_built_in_sets_remain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ISTHMUS_DATA", raising=False)
        assert sum(available().values()) == 6
        assert len(available()) == 18

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("reuter", "did you mean 'reuters'"),
            ("pydoc", "did you mean 'pydocs'"),
            ("/nowhere/at/all", "give a path, or one of"),
            ("mq2008", "feature rows"),
            ("synthetic", "feature rows"),
        ],
    )
    def test_other_names_get_a_hint(self, name: str, told: str) -> None:
        with pytest.raises(DataError, match=told):
            load(name)

    def test_the_built_in_label_set_has_as_many_texts_of_every_label(self) -> None:
        labels = load("pydocs-labels")
        right = labels.qrels.to_dict()
        assert len(labels.queries) == 200 * len(labels.documents)
        counts = Counter(label for one in right.values() for label in one)
        assert set(counts.values()) == {200}
        assert counts.keys() == set(labels.documents.ids)
        assert all(name.startswith(next(iter(right[name]))) for name in labels.queries.ids)
        assert pydocs_labels(seed=1).queries.ids != labels.queries.ids
        with pytest.raises(DataError, match=r"0 sub-packages have 9,999 docstrings \(ask for fewer"):
            pydocs_labels(texts=9_999)

    @pytest.mark.parametrize(("name", "labels"), [("pydocs-modules", 400), ("pydocs-see-also", 1_000)])
    def test_label_sets_with_a_long_tail_do_not_tell_their_labels(self, name: str, labels: int) -> None:
        corpus = load(name)
        right = corpus.qrels.to_dict()
        counts = Counter(label for one in right.values() for label in one)
        assert counts.keys() == set(corpus.documents.ids)
        assert len(counts) >= labels
        assert min(counts.values()) == 2
        assert sorted(right) == sorted(corpus.queries.ids)
        assert sum(counts.values()) > 2 * len(right)  # several labels a text
        parts = {part.casefold() for label in counts for part in label.split(".")}
        hidden = (
            parts if name == "pydocs-modules" else {each.rpartition(".")[2].casefold() for each in counts}
        )
        words = {word for text in corpus.queries.texts for word in re.findall(r"\w+", text.casefold())}
        assert not hidden & words
        assert not re.search(r"(?i)see also\s*\n\s*---", "\n".join(corpus.queries.texts))
        if name == "pydocs-modules":
            assert all(query.startswith(f"{label}.") for query, own in right.items() for label in own)
        else:
            assert all(query not in own for query, own in right.items())
            assert all(corpus.documents.bodies)

    def test_a_folder_of_something_else(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="not a collection that Isthmus knows"):
            load(tmp_path)

    def test_only_label_sets_have_folds(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="only label sets have folds"):
            load("pydocs", fold=1)
        with pytest.raises(DataError, match="only label sets have folds"):
            load(write(tmp_path, CRAN), fold=1)


def rows(first_query: int, queries: int = 2, width: int = 3) -> str:
    """Two rows for each of so many queries; the first feature is the query's number."""
    return "".join(
        f"{grade} qid:{query} 1:{query} {width}:0.5 #docid = d{grade}\n"
        for query in range(first_query, first_query + queries)
        for grade in (0, 2)
    )


class TestFeatureRows:
    def test_a_file_is_the_whole_set_and_is_dealt_into_five_folds(self, tmp_path: Path) -> None:
        file = write(tmp_path, {"some.txt": rows(1, 12)}) / "some.txt"
        letor = load_letor(file)
        assert (len(letor), letor.rows, letor.width, letor.name) == (12, 24, 3, "some.txt")
        folds = load_folds(file)
        assert [fold.name for fold in folds] == ["Fold1", "Fold2", "Fold3", "Fold4", "Fold5"]
        tested = [query for fold in folds for query in fold.test.queries]
        assert sorted(tested) == sorted(letor.queries)
        for fold in folds:
            parts = [set(part.queries) for part in (fold.train, fold.validation, fold.test)]
            assert sum(map(len, parts)) == len(set.union(*parts)) == 12
        again, other = load_folds(file), load_folds(file, seed=1)
        assert [fold.test.queries for fold in again] == [fold.test.queries for fold in folds]
        assert [fold.test.queries for fold in other] != [fold.test.queries for fold in folds]

    def test_too_few_queries_for_folds(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="4 queries do not make 5 folds"):
            load_folds(write(tmp_path, {"f": rows(1, 4)}) / "f")

    def test_letor_4_parts_rotate(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {f"S{part}.txt": rows(10 * part) for part in range(1, 6)})
        assert load_letor(folder).queries == tuple(
            f"{part}{query}" for part in range(1, 6) for query in (0, 1)
        )
        fold = load_folds(folder)[3]
        assert fold.train.queries == ("40", "41", "50", "51", "10", "11")
        assert fold.validation.queries == ("20", "21")
        assert fold.test.queries == ("30", "31")
        assert load_letor(folder, split="test").queries == ("50", "51")

    def test_parts_may_be_compressed(self, tmp_path: Path) -> None:
        rotating, single, train = (tmp_path / name for name in ("rotating", "single", "train"))
        packed = {rotating / f"S{part}.txt.gz": rows(10 * part) for part in range(1, 6)}
        packed |= {single / f"{name}.txt.gz": rows(at) for at, name in enumerate(("train", "test"), 1)}
        packed[train / "train.txt.gz"] = rows(1, 6)
        for file, text in packed.items():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(gzip.compress(text.encode()))
        assert load_folds(rotating)[3].test.queries == ("30", "31")
        assert len(load_letor(rotating)) == 10
        (fold,) = load_folds(single)
        assert fold.test.queries == ("2", "3")
        assert len(load_letor(train)) == 6

    def test_folders_of_folds(self, tmp_path: Path) -> None:
        parts = {"train.txt": rows(1, 3), "vali.txt": rows(4), "test.txt": rows(6)}
        other = {"train.txt": rows(4), "vali.txt": rows(6), "test.txt": rows(1, 3)}
        folds = {
            f"Fold{at}/{name}": text for at, fold in ((1, parts), (2, other)) for name, text in fold.items()
        }
        folder = write(tmp_path, folds)
        assert [len(fold.test) for fold in load_folds(folder)] == [2, 3]
        assert len(load_letor(folder)) == 7
        (single,) = load_folds(folder / "Fold1")
        assert len(single.train) == 3
        assert load_letor(folder, split="validation").queries == ("4", "5")

    def test_lightgbm_parts_with_sidecars(self, tmp_path: Path) -> None:
        files = {
            "rank.train": "0 1:1\n1 2:1\n2 1:2\n",
            "rank.train.query": "2\n1\n",
            "rank.test": "1 1:3\n",
            "rank.test.query": "1\n",
        }
        folder = write(tmp_path, files)
        (fold,) = load_folds(folder)
        assert (len(fold.train), len(fold.validation), len(fold.test)) == (2, 0, 1)
        assert fold.test.width == fold.validation.width == 2
        assert load_letor(folder).queries == ("train/1", "train/2", "test/1")

    def test_a_training_file_alone(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"train.txt": rows(1, 6)})
        assert len(load_letor(folder)) == 6
        assert len(load_folds(folder)) == 5
        with pytest.raises(DataError, match=r"has no test part \(it has: train\)"):
            load_letor(folder, split="test")

    def test_a_folder_of_something_else(self, tmp_path: Path) -> None:
        for read in (load_letor, load_folds):
            with pytest.raises(DataError, match="no feature rows that Isthmus knows"):
                read(tmp_path)

    def test_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ISTHMUS_DATA", raising=False)
        for name, told in {
            "mq2008": "ISTHMUS_DATA",
            "mq2007": "did you mean 'mq2008'",
            "cran": "a collection of texts",
            "pydocs": "a collection of texts",
        }.items():
            with pytest.raises(DataError, match=told):
                load_letor(name)
        with pytest.raises(DataError, match="no split 'vali'"):
            load_letor("synthetic", split="vali")  # type: ignore[arg-type]

    def test_synthetic(self) -> None:
        (fold,) = load_folds("synthetic")
        assert (len(fold.train), len(fold.test), fold.train.width) == (1_000, 300, 136)
        assert fold.test.rows == 300 * 60
        assert load_letor("synthetic", split="test") == fold.test


@pytest.mark.realdata
class TestRealCollections:
    def test_mq2008(self, data_dir: Path) -> None:
        letor = load_letor("mq2008")
        assert (letor.rows, len(letor), letor.width) == (15_211, 784, 46)
        folds = load_folds("mq2008")
        assert len(folds) == 5
        fourth = [load_letor(data_dir / "letor" / "mq2008" / f"S{part}.txt") for part in (4, 5, 1, 2, 3)]
        assert folds[3].train.queries == sum((part.queries for part in fourth[:3]), ())
        assert folds[3].validation == fourth[3]
        assert folds[3].test == fourth[4]

    def test_the_other_feature_sets(self, data_dir: Path) -> None:
        sample = load_letor("mslr-sample")
        assert (sample.rows, len(sample), sample.width) == (5_000, 43, 136)
        (fold,) = load_folds("lightgbm-example")
        assert (fold.train.rows, fold.test.rows, fold.train.width) == (3_005, 768, 300)

    @pytest.mark.parametrize(
        ("name", "documents", "queries", "judged", "ndcg"),
        [
            ("cran", 1_400, 225, 1_612, 0.37),
            ("cisi", 1_460, 112, 3_114, 0.40),
            ("med", 1_033, 30, 696, 0.69),
            ("npl", 11_429, 93, 2_083, 0.43),
            ("time", 423, 83, 253, 0.71),
            ("adi", 82, 35, 170, 0.46),
        ],
    )
    def test_smart(
        self, data_dir: Path, name: str, documents: int, queries: int, judged: int, ndcg: float
    ) -> None:
        corpus = load(name)
        assert (len(corpus.documents), len(corpus.queries), corpus.qrels.rows) == (documents, queries, judged)
        run = BM25().index(corpus.documents).search(corpus.queries, 100)
        assert len(run) == queries
        assert evaluate(corpus.qrels, run, ["nDCG@10"])["nDCG@10"] == pytest.approx(ndcg, abs=0.03)

    def test_cran_has_two_empty_documents_and_four_grades(self, data_dir: Path) -> None:
        corpus = load("cran")
        assert [
            name for name, text in zip(corpus.documents.ids, corpus.documents.texts, strict=True) if not text
        ] == [
            "471",
            "995",
        ]
        assert Counter(corpus.qrels.grades.tolist()) == {1: 363, 2: 734, 3: 387, 4: 128}

    def test_reuters(self, data_dir: Path) -> None:
        corpus = load("reuters")
        assert (len(corpus.documents), len(corpus.queries), corpus.qrels.rows) == (90, 10_789, 13_329)
        assert Counter(corpus.queries.splits) == {"train": 7_770, "test": 3_019}
        assert not any("&lt;" in text or "\x03" in text for text in corpus.queries.texts)

    @pytest.mark.parametrize(("name", "texts"), [("twitter", 6_997), ("trec", 5_952)])
    def test_label_sets(self, data_dir: Path, name: str, texts: int) -> None:
        folds = [load(name, fold=fold) for fold in range(10)]
        assert {len(fold.queries) for fold in folds} == {texts}
        tested = np.concatenate([np.array(fold.split("test").queries.ids, dtype=int) for fold in folds])
        assert sorted(tested.tolist()) == list(range(texts))  # the test parts partition the texts
        assert all(folds[0].documents.bodies)
