"""A node with documents in several languages: stored, indexed, searched, shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from isthmus.errors import ConfigError
from isthmus.retrieval import Statistics
from isthmus.service.node import Node
from isthmus.service.settings import EncoderSettings, NodeSettings, SharedStatistics, Source
from isthmus.service.sources import in_languages
from isthmus.service.stores import Draft, SqliteStore
from isthmus.service.wire import Search

TEXTS = {
    "de": [
        ("Krankenhäuser", "In den Krankenhäusern der Stadt werden die Kranken von den Ärzten behandelt."),
        ("Brücken", "Die Brücken über den Fluss sind von den Ingenieuren aus Stahl gebaut worden."),
        ("Straßen", "Auf den Straßen der Stadt fahren die Wagen, und die Leute gehen zu Fuß."),
    ],
    "pt": [
        ("Hospitais", "Os médicos dos hospitais da cidade tratam os doentes, e não só os que podem pagar."),
        ("Pontes", "As pontes sobre o rio foram construídas pelos engenheiros com muito aço."),
        ("Educação", "As reformas da educação foram discutidas pelos professores das escolas."),
    ],
    "zh": [
        ("医院", "城市的医院里，医生治疗病人。医院每天开放，病人可以预约。"),
        ("大桥", "工程师用钢铁建造了跨越长江的大桥，每天有很多汽车经过。"),
        ("Python 编程", "使用 Python 编写程序时，可以调用 transforms 函数处理数据。"),
    ],
    "en": [
        ("Hospitals", "The doctors of the hospitals in the city treat all of the patients who come to them."),
        ("Bridges", "The bridges over the river were built by the engineers, and they are made of steel."),
        ("Hamlet", "To be, or not to be, that is the question that the prince of Denmark asks himself."),
    ],
}


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [
        {"_id": f"{code}{at}", "title": title, "text": text}
        for code, texts in TEXTS.items()
        for at, (title, text) in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return NodeSettings(
        silo="north",
        folder=tmp_path / "north",
        sources=(Source("beir", path),),
        encoder=EncoderSettings("none"),
        statistics=SharedStatistics(form="exact"),
    )


def indexed(settings):
    """A node that has read its sources, without its threads."""
    node = Node(settings)
    node.read_sources()
    node.index.catch_up()
    return node


@pytest.fixture
def node(settings):
    made = indexed(settings)
    yield made
    made.__exit__(None, None, None)


def hits(node, query):
    return node.searcher.search(Search(query=query), snippets=True).hits


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("Krankenhaus", "de0"),
        ("Arzt im Krankenhaus", "de0"),
        ("Brücke", "de1"),
        ("strasse", "de2"),
        ("hospital dos doentes", "pt0"),
        ("ponte construída", "pt1"),
        ("educações", "pt2"),
        ("医院", "zh0"),
        ("长江大桥", "zh1"),
        ("transform 函数", "zh2"),
        ("茶", None),
        ("江", "zh1"),
        ("doctors treat patients", "en0"),
        ("bridge engineer", "en1"),
        ("to be or not to be", "en2"),
    ],
)
def test_a_query_finds_documents_in_its_language(node, query, first):
    assert node.store.languages() == {"de": 3, "en": 3, "pt": 3, "zh": 3}
    documents = [hit.document for hit in hits(node, query)]
    assert (documents[0] if documents else None) == first


@pytest.mark.parametrize(
    ("query", "text", "within"),
    [
        (
            "Krankenhaus",
            "Zuerst viel anderes davon. " * 40 + "Alle Krankenhäuser sind offen. " + "Mehr. " * 80,
            "Krankenhäuser",
        ),
        (
            "Strasse",
            "Es ist noch nicht so weit. " * 40 + "Die Straße ist frei. " + "Und mehr. " * 80,
            "Straße",
        ),
        (
            "educação",
            "Não é isso que se diz aqui. " * 40 + "A EDUCAÇÃO mudou. " + "E mais. " * 80,
            "EDUCAÇÃO",
        ),
        (
            "to be or not",
            "Nothing stands here yet. " * 40 + "To be or not is asked. " + "More words. " * 80,
            "To be or not",
        ),
        (
            "长江大桥",
            "这里没有什么可以看的东西。" * 60 + "长江上有一座大桥。" + "还有别的事情要说。" * 60,
            "长江上有一座大桥",
        ),
    ],
)
def test_a_snippet_shows_the_words_in_any_language(node, query, text, within):
    node.store.put(in_languages([Draft("long", "", text)]))
    node.index.catch_up()
    snippet = next(hit.snippet for hit in hits(node, query) if hit.document == "long")
    assert within in snippet
    assert len(snippet) <= 242


def test_a_source_may_name_its_language(settings):
    (source,) = settings.sources
    node = indexed(replace(settings, sources=(replace(source, language="German"),)))
    assert node.store.languages() == {"de": 12}
    assert node.index.snapshot.languages == {"de"}
    node.__exit__(None, None, None)
    with pytest.raises(ConfigError, match="did you mean 'german'"):
        replace(source, language="Germann")


def test_english_alone_is_read_as_english(settings):
    (source,) = settings.sources
    source.path.write_text('{"_id": "one", "title": "", "text": "the waves of the sea"}\n')
    node = indexed(settings)
    assert node.index.snapshot.languages == frozenset()
    assert hits(node, "wave")[0].document == "one"
    node.__exit__(None, None, None)


def test_what_does_not_tell_is_in_the_language_of_most():
    texts = [text for _, text in TEXTS["pt"]] + [TEXTS["de"][0][1], "Quicksort"]
    drafts = [Draft(str(at), "", text) for at, text in enumerate(texts)]
    assert [draft.language for draft in in_languages(drafts)] == ["pt", "pt", "pt", "de", "pt"]
    assert [draft.language for draft in in_languages(drafts[-1:])] == ["en"]
    assert [draft.language for draft in in_languages(drafts[:1], "nl")] == ["nl"]


def test_another_language_is_a_change_and_english_is_none(tmp_path):
    store = SqliteStore(tmp_path / "store.db")
    draft = Draft("a", "title", "text")
    assert store.put([draft]).added == 1
    assert store.put([replace(draft, language="en")]) == store.put([draft]), "as the release before wrote it"
    assert store.put([replace(draft, language="de")]).changed == 1
    assert store.changes(0, 10)[0].language == "de"
    assert store.get(["a"])["a"].language == "de"
    store.close()


def test_statistics_name_the_analysis(node):
    statistics = Statistics.from_bytes(node.statistics("broker"))
    other = replace(statistics, silos=("south",), analysis="another")
    assert statistics.kind != other.kind
    assert Statistics.from_bytes(other.to_bytes()).analysis == "another"


def test_an_index_of_another_analysis_is_built_anew(settings, monkeypatch):
    indexed(settings).__exit__(None, None, None)
    again = Node(settings)
    assert len(again.index.snapshot) == 12
    again.__exit__(None, None, None)
    monkeypatch.setattr("isthmus.engines.embedded.analysis_name", lambda: "another")
    opened = Node(settings)
    assert len(opened.index.snapshot) == 0
    opened.index.catch_up()
    assert hits(opened, "Krankenhaus")[0].document == "de0"
    opened.__exit__(None, None, None)
