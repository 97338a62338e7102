"""Cutting, stopping, stemming, counting."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import ConfigError
from isthmus.text import ENGLISH, STOP_WORDS, Tokeniser, tokenise

PLAIN = Tokeniser(stemmer=None, stop_words=frozenset())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Fast FOURIER transforms", ["fast", "fourier", "transforms"]),
        ("sparse.csr_matrix(x2)", ["sparse", "csr", "matrix", "x2"]),
        ("don't re-use", ["don", "t", "re", "use"]),
        ("ÉCOLE naïve Übung", ["école", "naïve", "übung"]),
        ("e\u0301cole", ["école"]),
        ("ﬁne ＡＢＣ x²", ["fine", "abc", "x2"]),
        ("«цена» – €5…", ["цена", "5"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("α−β", ["α", "β"]),
        ("a\ud800b", ["a", "b"]),
        ("\x00nul\tand\nlines\r\n", ["nul", "and", "lines"]),
        ("  ...  ", []),
        ("", []),
    ],
)
def test_words_are_runs_of_letters_and_digits(text: str, words: list[str]) -> None:
    assert PLAIN([text]).words(0) == words


def test_texts_that_touch_stay_apart() -> None:
    tokens = PLAIN(["ab", "cd", "", " ef", "gh "])
    assert [tokens.words(text) for text in range(len(tokens))] == [["ab"], ["cd"], [], ["ef"], ["gh"]]
    assert tokens.lengths.tolist() == [1, 1, 0, 1, 1]


def test_stop_words_go_before_stems_are_made() -> None:
    tokens = tokenise(["The transforms of waves", "it's used for transforming"])
    assert tokens.words(0) == ["transform", "wave"]
    assert tokens.words(1) == ["transform"]


def test_stop_words_stay_in_their_places_as_they_are() -> None:
    tokens = ENGLISH.in_place(["The transforms of waves", "", "having waves, does this"])
    assert tokens.words(0) == ["the", "transform", "of", "wave"]
    assert tokens.words(2) == ["having", "wave", "does", "this"]
    assert tokens.stopped is not None
    assert tokens.stopped.tolist() == [True, False] * 3 + [True, True]
    assert tokenise(["waves"]).stopped is None


@given(st.lists(st.text(alphabet="thewo fi' sé中\n", max_size=30), max_size=5))
def test_without_stop_words_in_place_is_a_call(texts: list[str]) -> None:
    every, content = ENGLISH.in_place(texts), ENGLISH(texts)
    assert every.stopped is not None
    in_order = [
        [word for at, word in enumerate(every.words(text), every.offsets[text]) if not every.stopped[at]]
        for text in range(len(texts))
    ]
    assert in_order == [content.words(text) for text in range(len(texts))]


@pytest.mark.parametrize(
    ("text", "words", "stopped"),
    [
        ("the waves of a transform", ["wave", "transform"], None),
        ("To be or not to be", ["to", "be", "or", "not", "to", "be"], [True] * 6),
        ("The Who", ["the", "who"], [True, True]),
        ("…", [], []),
    ],
)
def test_a_query_of_stop_words_alone_is_searched_as_it_is(
    text: str, words: list[str], stopped: list[bool] | None
) -> None:
    tokens = ENGLISH.query(text)
    assert tokens.words(0) == words
    assert (None if tokens.stopped is None else tokens.stopped.tolist()) == stopped


def test_a_text_reads_the_same_in_any_company() -> None:
    alone = tokenise(["Sparse naïve methods"]).words(0)
    assert tokenise(["plain ascii", "Sparse naïve methods", "«»"]).words(1) == alone


def test_counts_are_those_of_a_counter() -> None:
    texts = ["wave wave transform", "", "the", "sine wave"]
    tokens = tokenise(texts)
    table = tokens.counts().toarray()
    vocabulary = tokens.terms.words
    assert vocabulary == sorted(vocabulary)
    for text in range(len(texts)):
        told = {word: int(count) for word, count in zip(vocabulary, table[text], strict=True) if count}
        assert told == Counter(tokens.words(text))


def test_counting_leaves_the_tokens_alone() -> None:
    tokens = tokenise(["b a b a", "a"])
    before = tokens.terms.codes.copy()
    tokens.counts()
    assert np.array_equal(tokens.terms.codes, before)
    with pytest.raises(ValueError, match="read-only"):
        tokens.terms.codes[0] = 5


@pytest.mark.parametrize("texts", [[], [""], ["", ""], ["the"]])
def test_nothing_to_read_is_no_error(texts: list[str]) -> None:
    tokens = tokenise(texts)
    assert len(tokens) == len(texts)
    assert tokens.counts().shape == (len(texts), 0)


def test_any_iterable_of_texts_will_do() -> None:
    assert tokenise(text for text in ("one wave", "two")).words(0) == ["wave"]


def test_another_language() -> None:
    assert Tokeniser("german", frozenset({"und"}))(["Häuser und Haus"]).words(0) == ["haus", "haus"]
    with pytest.raises(ConfigError, match="did you mean 'german'"):
        Tokeniser("germann")


def test_stop_words_are_words() -> None:
    assert all(PLAIN([word]).words(0) == [word] for word in STOP_WORDS)


SCRIPTS = "aZ0éßñЖя9אبकि_-'’. \n\t€½²"


@given(st.lists(st.text(alphabet=SCRIPTS, max_size=12), max_size=6))
def test_cutting_bytes_equals_cutting_characters(texts: list[str]) -> None:
    tokens = PLAIN(texts)

    def by_character(text: str) -> list[str]:
        kept = (
            char if unicodedata.category(char)[0] in "LNM" else " "
            for char in unicodedata.normalize("NFKC", text)
        )
        return re.split(r" +", "".join(kept).strip(" ").lower()) if text.strip() else []

    expected = [[word for word in by_character(text) if word] for text in texts]
    assert [tokens.words(text) for text in range(len(texts))] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("北京大学", ["北京", "京大", "大学"]),
        ("使用transforms函数", ["使用", "transform", "函数"]),
        ("東京タワー", ["東京", "京タ", "タワ", "ワー"]),
        ("한국어 문서", ["한국", "국어", "문서"]),
        ("葛\U000e0100城市", ["葛城", "城市"]),
        ("ﾊﾟﾝ", ["パン"]),
        ("水。", []),
    ],
)
def test_chinese_japanese_and_korean_are_cut_into_pairs(text: str, words: list[str]) -> None:
    assert tokenise([text]).words(0) == words


def test_a_single_character_is_searched_where_there_is_nothing_longer() -> None:
    tokens = ENGLISH.in_place(["绿茶"])
    assert tokens.words(0) == ["绿", "绿茶", "茶"]
    assert tokens.stopped is not None
    assert tokens.stopped.tolist() == [True, False, True]
    assert ENGLISH.query("茶").words(0) == ["茶"]
    assert ENGLISH.query("茶 水壶").words(0) == ["水壶"]


@given(st.text(alphabet="中文字かー가a1 。", max_size=20))
def test_pairs_are_those_of_neighbours(text: str) -> None:
    runs = re.findall(r"[中文字かー가]+|[a1]+", text)
    expected = [
        part
        for run in runs
        for part in ([run] if run[0] in "a1" else [run[at : at + 2] for at in range(len(run) - 1)])
    ]
    assert PLAIN([text]).words(0) == expected


@given(st.lists(st.text(max_size=20), max_size=5))
def test_any_text_reads_the_same_alone_and_among_others(texts: list[str]) -> None:
    for read in (ENGLISH, ENGLISH.in_place):
        together = read(texts)
        assert [read([text]).words(0) for text in texts] == [
            together.words(text) for text in range(len(texts))
        ]


@given(
    st.text(st.characters(codec="ascii"), max_size=60)
    | st.lists(st.sampled_from(["the", "The-Cats", "of", "x2", "running!"])).map(" ".join)
)
def test_a_query_has_the_terms_of_its_text(text):
    query, whole = ENGLISH.query(text), ENGLISH([text])
    if len(whole.terms):
        assert query.stopped is None
    else:
        whole = ENGLISH.in_place([text])
        np.testing.assert_array_equal(query.stopped, whole.stopped)
    assert query.words(0) == whole.words(0)
    assert query.terms.words == whole.terms.words
    np.testing.assert_array_equal(query.terms.codes, whole.terms.codes)


def test_a_letter_has_thirty_marks_at_most() -> None:
    """From the fewest bytes that 31 marks take, alone or among longer texts."""
    mark = "\u0301"
    for letter in ("", "q"):
        one, more, long = (ENGLISH([letter + mark * count]).words(0) for count in (30, 31, 200))
        assert one == more == long
    assert ENGLISH([mark * 31, "é" * 40]).words(0) == ENGLISH([mark * 30]).words(0)
    assert ENGLISH([mark * 29]).words(0) != ENGLISH([mark * 30]).words(0)
