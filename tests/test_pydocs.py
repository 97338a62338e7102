"""The built-in world: what it holds, that it is the same every time, and that it is worth searching."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from isthmus.corpora import load, pydocs
from isthmus.errors import DataError
from isthmus.evaluation import Measure, evaluate
from isthmus.retrieval import BM25
from isthmus.tables import Corpus, Run
from isthmus.text import tokenise


@pytest.fixture(scope="module")
def world() -> pydocs.PydocsWorld:
    return pydocs.build()


@pytest.fixture(scope="module")
def corpus(world: pydocs.PydocsWorld) -> Corpus:
    return world.corpus()


def digest(world: pydocs.PydocsWorld) -> str:
    return hashlib.sha256(json.dumps(asdict(world)).encode()).hexdigest()


def test_the_size_of_the_world(corpus: Corpus) -> None:
    """4,561 documents, 1,172 queries, 5,053 pairs with NumPy 2.4, SciPy 1.17 and scikit-learn 1.9."""
    assert 4_000 < len(corpus.documents) < 6_000
    assert 1_000 < len(corpus.queries) < 1_600
    assert 4_000 < corpus.qrels.rows < 7_000
    assert len(set(corpus.documents.ids)) == len(corpus.documents)
    assert len(set(corpus.documents.bodies)) == len(corpus.documents)
    assert len({text.lower() for text in corpus.queries.texts}) == len(corpus.queries)


@pytest.mark.parametrize("name", ["numpy.add", "numpy.arctan", "scipy.stats.ttest_ind", "sklearn.svm.SVC"])
def test_objects_go_by_the_name_they_give_themselves(corpus: Corpus, name: str) -> None:
    assert name in corpus.row_of_document


def test_bodies_say_what_the_object_does_and_nothing_that_changes(corpus: Corpus) -> None:
    for body in corpus.documents.bodies:
        assert " at 0x" not in body
        assert "\nSee Also\n---" not in body
        assert "\nExamples\n---" not in body
        assert "\nReferences\n---" not in body
    where = corpus.row_of_document["numpy.add"]
    assert "Parameters\n----------" in corpus.documents.bodies[where]


def test_queries_hide_their_source(corpus: Corpus) -> None:
    texts = dict(zip(corpus.queries.ids, corpus.queries.texts, strict=True))
    assert texts["scipy.signal.convolve"] == "two N-dimensional arrays"
    assert corpus.queries.own == corpus.queries.ids
    for name, text in texts.items():
        assert name.rpartition(".")[2].lower() not in text.lower().split()
        assert not text.lower().startswith("refer to")
        assert "`" not in text
    assert (tokenise(corpus.queries.texts).lengths >= 3).all()


def test_judgements_are_the_links(world: pydocs.PydocsWorld, corpus: Corpus) -> None:
    links = set(world.links)
    judged = corpus.qrels.to_dict()
    assert set(judged) == set(corpus.queries.ids)
    for query, grades in judged.items():
        assert len(grades) >= 2
        assert query not in grades
        for document, grade in grades.items():
            assert grade == ((query, document) in links) + ((document, query) in links)
    assert judged["numpy.cumsum"]["numpy.sum"] == 2


def test_no_link_crosses_splits(world: pydocs.PydocsWorld, corpus: Corpus) -> None:
    split = dict(zip(corpus.queries.ids, corpus.queries.splits, strict=True))
    assert {split[a] == split[b] for a, b in world.links if a in split and b in split} == {True}
    sizes = [list(split.values()).count(name) / len(split) for name in ("train", "validation", "test")]
    assert sizes == pytest.approx(pydocs.SPLIT_SHARES, abs=0.02)


def test_silos_are_whole_sub_packages_until_documents_move(world: pydocs.PydocsWorld) -> None:
    topical = world.corpus(share=0)
    homes = dict(zip(world.sites, topical.documents.silos.tolist(), strict=True))
    assert [homes[site] for site in world.sites] == topical.documents.silos.tolist()
    assert homes["numpy"] != homes["scipy.stats"]
    sizes = np.bincount(topical.documents.silos)
    assert len(sizes) == len(topical.silos) == len(set(topical.silos)) == 4
    assert sizes.max() < 1.3 * sizes.min()
    assert set(topical.silos) >= {"arrays", "statistics"}


def elsewhere(corpus: Corpus) -> float:
    """The share of relevant pairs whose document is in another silo than the query."""
    homes = corpus.queries.silos[[corpus.queries.ids.index(query) for query in corpus.qrels.queries]]
    rows = [corpus.row_of_document[document] for document in corpus.qrels.documents.tolist()]
    return float((corpus.documents.silos[rows] != homes[corpus.qrels.query_of_row]).mean())


def test_the_dial_goes_from_topical_to_random(world: pydocs.PydocsWorld) -> None:
    shares = [elsewhere(world.corpus(share=share)) for share in (0.0, 0.25, 0.5, 1.0)]
    assert shares == sorted(shares)
    assert shares[0] < 0.2
    assert 0.5 < shares[2] < 0.65
    assert shares[3] == pytest.approx(0.75, abs=0.02)
    with pytest.raises(DataError, match="share"):
        world.corpus(share=1.5)


def test_queries_live_with_their_document(corpus: Corpus) -> None:
    rows = [corpus.row_of_document[query] for query in corpus.queries.ids]
    assert np.array_equal(corpus.documents.silos[rows], corpus.queries.silos)


def test_merging_naively_loses_what_a_central_index_finds(corpus: Corpus) -> None:
    """nDCG@10 by hand: home silo 0.256, raw-score merge 0.388, central 0.413."""
    central = BM25().index(corpus.documents).search(corpus.queries, 100)
    runs = [BM25().index(corpus.silo(name).documents).search(corpus.queries, 100) for name in corpus.silos]
    home = Run.concat([run[corpus.queries.silos == silo] for silo, run in enumerate(runs)])
    raw = Run.concat(runs)
    measure = Measure.parse("nDCG@10")
    found = [evaluate(corpus.qrels, run, [measure])[measure] for run in (home, raw, central)]
    assert found == pytest.approx([0.25, 0.41, 0.43], abs=0.03)
    assert found == sorted(found)


def test_the_same_world_whatever_was_imported_before(world: pydocs.PydocsWorld) -> None:
    import sklearn.experimental.enable_halving_search_cv
    import sklearn.experimental.enable_iterative_imputer  # noqa: F401

    assert digest(pydocs.build()) == digest(world)
    assert not [name for name in world.names if "Halving" in name or "IterativeImputer" in name]


def told_elsewhere(world: str, seed: str = "1234") -> tuple[str, str]:
    """What another process prints as the digest of a world, and what it complains of."""
    script = (
        "import hashlib, json; from dataclasses import asdict; from isthmus.corpora import pydocs;"
        f"print(hashlib.sha256(json.dumps(asdict({world})).encode()).hexdigest())"
    )
    environment = {"PYTHONHASHSEED": seed, "PYTHONWARNINGS": "default", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=400
    )
    return done.stdout, done.stderr


def test_the_same_world_in_another_process_without_a_word(world: pydocs.PydocsWorld) -> None:
    """Sets order their members anew in every process; warnings and prints would be noise in a pipe."""
    assert told_elsewhere("pydocs.build()") == (digest(world) + "\n", "")


def test_distractors_add_documents_and_nothing_else(world: pydocs.PydocsWorld, corpus: Corpus) -> None:
    """1,500 or so, dealt among themselves: no other document and no query changes its silo."""
    larger = world.with_distractors().corpus()
    known = len(corpus.documents)
    assert 800 < len(larger.documents) - known < 3_000
    assert larger.documents.ids[:known] == corpus.documents.ids
    assert np.array_equal(larger.documents.silos[:known], corpus.documents.silos)
    assert len(set(larger.documents.ids)) == len(set(larger.documents.bodies)) == len(larger.documents)
    assert {"json.dumps", "shutil.copytree"} < set(larger.documents.ids[known:])
    sizes = np.bincount(larger.documents.silos[known:], minlength=4)
    assert sizes.max() < 1.3 * sizes.min()
    assert (larger.queries.ids, larger.queries.texts) == (corpus.queries.ids, corpus.queries.texts)
    assert larger.queries.splits == corpus.queries.splits
    assert np.array_equal(larger.queries.silos, corpus.queries.silos)
    assert larger.qrels == corpus.qrels
    assert larger.silos == corpus.silos


def test_the_same_distractors_in_another_process() -> None:
    """Not in this one, where tests may have loaded what changes the standard library."""
    alone = "pydocs.PydocsWorld([], [], [], [], {}, []).with_distractors()"
    told = told_elsewhere(alone)
    assert told == told_elsewhere(alone, seed="1")
    assert not told[1]


def test_a_package_that_does_not_import_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_sklearn(name: str) -> ModuleType:
        if name.startswith(("sklearn", "scipy.sparse.")):
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(pydocs.importlib, "import_module", without_sklearn)
    smaller = pydocs.build()
    assert {name.partition(".")[0] for name in smaller.names} == {"numpy", "scipy"}
    assert len(smaller.corpus().silos) == 4


def test_without_docstrings_there_is_no_world() -> None:
    script = "from isthmus.corpora import pydocs; pydocs.build()"
    done = subprocess.run([sys.executable, "-OO", "-c", script], capture_output=True, text=True, timeout=240)
    assert "run Python without -OO" in done.stderr


class TestCache:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: pydocs.PydocsWorld) -> None:
        self.folder = tmp_path / "new" / "cache"
        self.built = 0
        monkeypatch.setenv("ISTHMUS_CACHE", str(self.folder))

        def build() -> pydocs.PydocsWorld:
            self.built += 1
            return world

        monkeypatch.setattr(pydocs, "build", build)

    def kept(self) -> Path:
        (found,) = self.folder.iterdir()
        return found

    def test_the_second_load_reads_what_the_first_kept(self) -> None:
        first, second = load("pydocs"), load("pydocs")
        assert self.built == 1
        assert second.qrels == first.qrels
        assert second.documents.bodies == first.documents.bodies
        assert second.queries.splits == first.queries.splits
        assert np.array_equal(second.documents.silos, first.documents.silos)

    @pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"links": 3}', b"\xff"])
    def test_a_damaged_file_is_built_again(self, damage: bytes) -> None:
        pydocs.load()
        whole = self.kept().read_bytes()
        self.kept().write_bytes(damage)
        pydocs.load()
        assert self.built == 2
        assert self.kept().read_bytes() == whole

    def test_other_versions_have_another_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pydocs.load()
        monkeypatch.setattr(pydocs, "version", lambda package: "0")
        pydocs.load()
        assert self.built == 2
        assert len(list(self.folder.iterdir())) == 2

    def test_another_stemmer_or_other_stop_words_have_another_file(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = pydocs.version
        pydocs.load()
        with monkeypatch.context() as patch:
            patch.setattr(pydocs, "version", lambda name: "0" if name == "PyStemmer" else real(name))
            pydocs.load()
        monkeypatch.setattr(pydocs, "STOP_WORDS", frozenset({"the"}))
        pydocs.load()
        assert self.built == 3
        assert len(list(self.folder.iterdir())) == 3

    def test_a_folder_that_cannot_be_written_does_not_matter(self) -> None:
        self.folder.parent.mkdir()
        self.folder.write_text("a file")
        assert len(pydocs.load().documents) > 4_000

    def test_distractors_only_when_asked_for(self) -> None:
        assert len(pydocs.load(distractors=True).documents) > len(pydocs.load().documents)
        assert self.built == 1

    def test_nor_does_a_missing_home_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(pydocs, "cache_folder", homeless)
        assert len(pydocs.load().documents) > 4_000


def test_sections_and_links_of_a_docstring() -> None:
    body, links = pydocs._read(
        """Find it.

        Parameters
        ----------
        how : {'b', 'a'}, default {None, True, 3}
            As <function f at 0x7f0012ab>, see {x : y}.

        See Also
        --------
        other : The other one.
        :func:`~pkg.third`, `fourth` :
            Indented: text.
        np.fifth()

        Notes
        -----
        Kept.

        Examples
        --------
        >>> 1
        """
    )
    assert "{'a', 'b'}" in body
    assert "{3, None, True}" in body
    assert "<function f>" in body
    assert "{x : y}" in body
    assert body.endswith("Notes\n-----\nKept.")
    assert list(pydocs._targets(links)) == ["other", "pkg.third", "fourth", "np.fifth"]


@pytest.mark.parametrize(
    ("name", "body", "query"),
    [
        ("p.add", "add(x, y)\n\nAdd arrays. More text.", "arrays"),
        ("p.f", ".. deprecated:: 1\n\nThe :class:`~p.q.Thing` of `x`, e.g. ``y``.", "The Thing of x e g y"),
        ("p.LinearSVC", "Linear Support Vector Classification", "Support Vector Classification"),
        ("p.to_csv", "Writes to\nCSV files, i.e. tables (Tables). Then", "Writes files i e tables Tables"),
        ("p.f", "Refer to `g`.", ""),
        ("p.f", "f(a)", ""),
    ],
)
def test_the_query_of_a_docstring(name: str, body: str, query: str) -> None:
    assert pydocs._query(name, body) == query
