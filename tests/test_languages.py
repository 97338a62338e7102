"""Texts in their languages: detection, analysis, queries."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.corpora import load
from isthmus.errors import ConfigError
from isthmus.languages import NAMES, analysis_name, by_tokeniser, code_of, detect, query, tokeniser_of
from isthmus.private import CountMin, HashFamily
from isthmus.text import ENGLISH, Cut, Tokeniser

SENTENCES = {
    "en": "The museum is open on every day of the week, but not before ten in the morning.",
    "de": "Das Museum ist an jedem Tag der Woche geöffnet, aber nicht vor zehn Uhr am Morgen.",
    "es": "El museo está abierto todos los días de la semana, pero no antes de las diez de la mañana.",
    "fr": "Le musée est ouvert tous les jours de la semaine, mais pas avant dix heures du matin.",
    "it": "Il museo è aperto tutti i giorni della settimana, ma non prima delle dieci del mattino.",
    "ja": "博物館は毎日開いていますが、午前十時より前には入れません。",
    "ko": "박물관은 매일 열려 있지만 오전 열 시 이전에는 들어갈 수 없습니다.",
    "nl": "Het museum is op elke dag van de week open, maar niet voor tien uur in de ochtend.",
    "pt": "O museu está aberto todos os dias da semana, mas não antes das dez horas da manhã.",
    "zh": "博物馆每天开放，但是上午十点以前不能进入。",
}


def test_a_sentence_tells_its_language() -> None:
    assert detect(SENTENCES.values()) == list(SENTENCES)
    assert set(SENTENCES) == set(NAMES)


@pytest.mark.parametrize("text", ["", "Quicksort", "sin sin sin, see numpy.sin", "x y n t", "12 34", "«»"])
def test_what_does_not_tell_is_left_open(text: str) -> None:
    assert detect([text]) == [""]


def test_only_what_is_asked_for_is_detected() -> None:
    assert detect([SENTENCES["de"]], ["es", "fr"]) == [""]
    assert detect([SENTENCES["de"]], []) == [""]


@pytest.mark.parametrize("collection", ["pydocs"])
def test_no_english_document_is_taken_for_another(collection: str) -> None:
    documents = load(collection).documents
    assert set(detect(documents.texts)) <= {"en", ""}


@pytest.mark.parametrize(
    ("spelled", "code"), [("de", "de"), ("German", "de"), (" PORTUGUESE ", "pt"), ("auto", "auto")]
)
def test_a_language_by_code_or_name(spelled: str, code: str) -> None:
    assert code_of(spelled) == code


def test_a_language_that_is_none_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'german'"):
        code_of("germann")


@pytest.mark.parametrize(
    ("code", "forms"),
    [
        ("de", "Haus Häuser Hauses"),
        ("pt", "educação educações"),
        ("fr", "national nationale nationales"),
        ("es", "investigación investigaciones"),
        ("it", "ricerca ricerche"),
        ("nl", "lichaam lichamen"),
    ],
)
def test_forms_of_a_word_are_one_term(code: str, forms: str) -> None:
    tokens = tokeniser_of(code)(forms.split())
    assert len(tokens.terms.vocabulary) == 1


@pytest.mark.parametrize("code", [code for code in NAMES if code not in ("ja", "ko", "zh")])
def test_stop_words_are_words_of_their_language(code: str) -> None:
    words = sorted(tokeniser_of(code).stop_words)
    assert Tokeniser(None, frozenset())(words).terms.tolist() == words
    assert not len(tokeniser_of(code)(words).terms)


def read_alone(texts: list[str], codes: list[str]) -> list[list[str]]:
    """The words of every text in its language, where the texts are read together."""
    cut = Cut.of(texts)
    groups, places = by_tokeniser(cut, codes)
    terms = [term for tokeniser, words in groups for term in tokeniser.stems(words)]
    every = [terms[place] for place in places.tolist()]
    return [every[start:end] for start, end in pairwise(cut.offsets.tolist())]


def test_every_text_is_analysed_in_its_language() -> None:
    texts = ["Die Häuser", "the houses", "", "as casas", "Häuser"]
    alone = [["die", "haus"], ["the", "hous"], [], ["as", "cas"], ["häuser"]]
    assert read_alone(texts, ["de", "en", "fr", "pt", ""]) == alone


@given(st.lists(st.tuples(st.text(max_size=15), st.sampled_from([*NAMES, ""])), max_size=6))
def test_any_texts_in_any_languages(pairs: list[tuple[str, str]]) -> None:
    texts, codes = [text for text, _ in pairs], [code for _, code in pairs]
    alone = [tokeniser_of(code).in_place([text]).words(0) for text, code in pairs]
    assert read_alone(texts, codes) == alone
    assert len(detect(texts)) == len(texts)
    for text in texts:
        query(text, set(codes))


def test_english_alone_is_as_before() -> None:
    texts = list(SENTENCES.values())
    alone = [ENGLISH.in_place([text]).words(0) for text in texts]
    assert read_alone(texts, ["en", "", "zh", "ja", "ko", *["en"] * 5]) == alone
    assert query("the waves of the sea", ["en", "zh"]).words(0) == ENGLISH(["waves sea"]).words(0)
    assert query("the waves of the sea", []).words(0) == ENGLISH(["waves sea"]).words(0)


@pytest.mark.parametrize(
    ("text", "languages", "terms"),
    [
        ("Häuser", ["de", "en"], ["häuser", "haus"]),
        ("the houses of Berlin", ["de", "en"], ["hous", "berlin"]),
        ("was ist die Ursache der Krankheit", ["de", "en"], ["ursach", "krankheit"]),
        ("second world war", ["de", "en"], ["second", "world", "war"]),
        ("Häuser Häuser", ["de", "en"], ["häuser", "häuser", "haus", "haus"]),
        ("北京 library", ["de", "zh"], ["北京", "librari", "library"]),
    ],
)
def test_a_query_is_read_in_every_language(text: str, languages: list[str], terms: list[str]) -> None:
    tokens = query(text, languages)
    assert tokens.words(0) == terms
    assert tokens.stopped is None


def test_stop_words_alone_are_searched_as_they_are() -> None:
    tokens = query("sein oder nicht sein", ["de", "en"])
    assert tokens.words(0)
    tokens = query("the who", ["de", "en"])
    assert tokens.words(0) == ["the", "who"]
    assert tokens.stopped is not None
    assert tokens.stopped.all()


def test_the_analysis_has_a_name() -> None:
    assert analysis_name() == analysis_name()
    assert Tokeniser("german").name != ENGLISH.name


def test_sketches_of_silos_agree_in_every_language() -> None:
    family = HashFamily(b"key of the group" * 2, rows=3, width=256)
    for code, text in SENTENCES.items():
        both = CountMin.of(tokeniser_of(code)([text, f"{text} {text}"]), family).dense()
        assert np.array_equal(CountMin.of(tokeniser_of(code)([text]), family).dense()[0], both[0])
