"""Analysis of texts by language: the stemmer and stop words of each language, and detection of a text's
language.

    en de es fr it nl pt    stop words and a Snowball stemmer
    zh ja ko                pairs of characters, with English words among them as in English

All silos analyse texts alike, so that their counts of terms add up: the language of a text determines its
analysis, and `analysis_name` identifies the analyses of all languages. A query is analysed in every language
that a silo has documents in.

>>> tokeniser_of("de")(["Die Häuser am Fluss"]).words(0)
['haus', 'fluss']
>>> query("Häuser", ["en", "de"]).words(0)
['häuser', 'haus']
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import Ids
from isthmus.errors import ConfigError
from isthmus.text import ENGLISH, STOP_WORDS_FOLDER, Cut, Tokeniser, Tokens

NAMES = {
    "en": "English",
    "de": "German",
    "es": "Spanish",
    "fr": "French",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "nl": "Dutch",
    "pt": "Portuguese",
    "zh": "Chinese",
}
"""The names of languages by their codes (ISO 639-1)."""
AUTO = "auto"
DEFAULT = "en"
_STEMMED = ("en", "de", "es", "fr", "it", "nl", "pt")
_SCRIPTS = {"ja": ("ぁ", "ヿ", 1.0), "ko": ("가", "힣", 1.0), "zh": ("㐀", "鿿", 0.4)}
"""First and last character of a script, and the evidence of one: Japanese is written in Chinese characters
too."""
_READ = 4_000
"""Number of characters of a text that are read to detect its language."""
_EVIDENCE, _AHEAD, _SHARE = 2.0, 1.5, 0.05
"""What a detected language needs: least evidence, least ratio to the next language, least evidence per
distinct word."""


def code_of(language: str) -> str:
    """The code of a language, from its code or its English name in any case; `auto` stays `auto`.

    Raises ConfigError, with the nearest name, for any other word.
    """
    wanted = language.strip().lower()
    for code, name in NAMES.items():
        if wanted in (code, name.lower()):
            return code
    if wanted == AUTO:
        return AUTO
    known = [AUTO, *NAMES, *(name.lower() for name in NAMES.values())]
    raise ConfigError(f"no analysis for the language {language!r}", key=wanted, value=wanted, known=known)


@cache
def tokeniser_of(language: str) -> Tokeniser:
    """The tokeniser of a language by its code; that of English for "" and for languages without a stemmer."""
    if language not in _STEMMED[1:]:
        return ENGLISH
    words = (STOP_WORDS_FOLDER / f"{language}.txt").read_text(encoding="utf-8").split()
    return Tokeniser(NAMES[language].lower(), frozenset(words))


@cache
def analysis_name() -> str:
    """A digest of the analyses of all languages: only counts of terms under the same name add up."""
    names = ["pairs of characters", *(tokeniser_of(code).name for code in _STEMMED)]
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


def detect(texts: Iterable[str], among: Collection[str] = tuple(NAMES)) -> list[str]:
    """The language of every text, detected by stop words and script; "" for a text that is too short to tell,
    or in no language of `among`."""
    codes = tuple(code for code in NAMES if code in among)
    return [_detected(text[:_READ], codes) for text in texts]


def _detected(text: str, codes: tuple[str, ...]) -> str:
    words, shares = set(text.lower().split()), _stop_words(codes)
    evidence = dict.fromkeys(codes, 0.0)
    for word in shares.keys() & words:  # every word counts once: sin(x), sin(y) is not Spanish
        for code in shares[word]:
            evidence[code] += 1 / len(shares[word])
    if not text.isascii():
        signs = set(text)
        for code, (first, last, weight) in _SCRIPTS.items():
            if code in evidence:
                evidence[code] += weight * sum(first <= sign <= last for sign in signs)
    second, best = sorted([0.0, 0.0, *evidence.values()])[-2:]
    sure = best >= max(_EVIDENCE, _SHARE * len(words)) and best >= _AHEAD * second
    return max(evidence, key=evidence.__getitem__) if sure else ""


@cache
def _stop_words(codes: tuple[str, ...]) -> dict[str, list[str]]:
    """Stop words, with the languages of each; single letters (x, y, n) are left out, since they are often
    names."""
    shares: dict[str, list[str]] = {}
    for code in codes:
        for word in tokeniser_of(code).stop_words if code in _STEMMED else ():
            if len(word) > 1:
                shares.setdefault(word, []).append(code)
    return shares


def usual(codes: Sequence[str]) -> str:
    """The most frequent of the detected languages; English if none was detected."""
    return max(filter(None, codes), key=codes.count, default=DEFAULT)


def by_tokeniser(
    cut: Cut, languages: Sequence[str]
) -> tuple[list[tuple[Tokeniser, list[str]]], NDArray[np.integer]]:
    """Group the words of texts by the tokeniser of their language; `languages` has the code of every text.

    Returns every tokeniser with its distinct words, and for every word of the texts its position among all
    these words, one group after the other.
    """
    tokenisers = {code: tokeniser_of(code) for code in dict.fromkeys(languages)}
    distinct = list(dict.fromkeys(tokenisers.values())) or [ENGLISH]
    if len(distinct) == 1:
        return [(distinct[0], cut.words)], cut.places
    number = {code: distinct.index(each) for code, each in tokenisers.items()}
    of_word = np.repeat([number[code] for code in languages], np.diff(cut.offsets))
    used, places = np.unique(of_word * len(cut.words) + cut.places, return_inverse=True)
    groups: list[tuple[Tokeniser, list[str]]] = [(each, []) for each in distinct]
    for at in used.tolist():
        group, word = divmod(at, len(cut.words))
        groups[group][1].append(cut.words[word])
    return groups, places


def beyond_english(languages: Iterable[str]) -> frozenset[str]:
    """All the languages if any of them is analysed differently from English, else none."""
    codes = frozenset(code or DEFAULT for code in languages)
    return codes if any(tokeniser_of(code) != ENGLISH for code in codes) else frozenset()


def query(text: str, languages: Collection[str]) -> Tokens:
    """The terms of a query in every language that some documents are in: those of English first, then the
    additional ones of the others.

    Stop words of English, and of the query's own language if it is detected, are left out in the other
    languages too. A query without content words keeps all its words unchanged, marked in `stopped`.
    """
    codes = [code for code in NAMES if code in languages]
    tokenisers = sorted(dict.fromkeys(map(tokeniser_of, codes)), key=lambda each: each != ENGLISH) or [
        ENGLISH
    ]
    if len(tokenisers) == 1:
        return tokenisers[0].query(text)
    stops = tokeniser_of(detect([text], codes)[0]).stop_words
    stops |= ENGLISH.stop_words if ENGLISH in tokenisers else frozenset()
    terms: list[str] = []
    for each in tokenisers:
        known = set(terms)
        words = Tokeniser(each.stemmer, each.stop_words | stops)([text]).words(0)
        terms += [word for word in words if word not in known]
    if not terms:
        return Tokeniser(None, stops.union(*(each.stop_words for each in tokenisers))).in_place([text])
    return Tokens(Ids.of(terms), np.array([0, len(terms)]))
