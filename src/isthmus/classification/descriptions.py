"""Descriptions of labels from the texts under them: by a language model, or without one by excerpts.

    extractive    the sentences of a label's texts whose words are most characteristic of it
    endpoint      an OpenAI-compatible `/v1/chat/completions` of the user's describes a label from five of its
                  texts and five of the labels nearest to it, as Franca et al. do ("RAG-labels"); texts are
                  sent there

Descriptions are stored in a file to be read and corrected; existing ones are used again and never
overwritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from isthmus.classification.sparse import Sparse, label_counts
from isthmus.classification.texts import LabelledTexts
from isthmus.encoders import Chat
from isthmus.errors import DataError
from isthmus.files import write_whole
from isthmus.report import progress
from isthmus.text import tokenise

FORMAT = 1
EXTRACTIVE = "extractive"
SENTENCES, CHARACTERS, SAMPLES = 3, 400, 5
_BREAK = re.compile(r"(?<=[.!?])\s+|\n+")
PROMPT = """Texts under the label "{label}":
{own}

Texts under other labels ({others}):
{contrast}

In at most three sentences, say what texts under the label "{label}" are about and what tells them from the
others. Write about the label in general, not about these texts."""


@dataclass(frozen=True)
class LabelDescription:
    """The description of one label: its text, its source, and whether a person has reviewed it."""

    text: str
    source: str = ""
    reviewed: bool = False


LabelDescriptions = Mapping[str, LabelDescription]


def described(data: LabelledTexts, descriptions: LabelDescriptions) -> LabelledTexts:
    """The same texts with these descriptions of their labels."""
    texts = tuple(descriptions[name].text if name in descriptions else "" for name in data.names)
    return replace(data, descriptions=texts)


def describe(
    data: LabelledTexts, known: LabelDescriptions | None = None, *, chat: Chat | None = None
) -> dict[str, LabelDescription]:
    """Return known descriptions unchanged, and new ones of all other labels. Raises DataError
    without texts."""
    if not data.texts:
        raise DataError("rows of features say nothing in words", cure="describe labels of texts")
    words = _OwnWords.of(data)
    make: Callable[[int], LabelDescription] = (
        (lambda label: LabelDescription(_excerpt(data, words, label), EXTRACTIVE))
        if chat is None
        else (lambda label: LabelDescription(chat.complete(_prompt(data, words, label)), chat.url))
    )
    result = dict(known or {})
    new = [at for at, name in enumerate(data.names) if name not in result]
    for at in progress(new, label="describing labels") if chat is not None else new:
        result[data.names[at]] = make(at)
    return {name: result[name] for name in data.names if name in result}


def write_descriptions(descriptions: LabelDescriptions, path: str | PathLike[str]) -> None:
    """Write a JSON file of descriptions, to be read, corrected and used again."""
    labels = {
        name: {"description": one.text, "source": one.source, "reviewed": one.reviewed}
        for name, one in descriptions.items()
    }
    whole = json.dumps({"format": FORMAT, "labels": labels}, ensure_ascii=False, indent=1)
    write_whole(Path(path), whole.encode())


def read_descriptions(path: str | PathLike[str]) -> dict[str, LabelDescription]:
    """Read descriptions from such a file, or from a plain JSON object of labels and texts."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        labels = content["labels"] if content.get("format") == FORMAT else content
        return {
            str(name): LabelDescription(str(one["description"]), str(one["source"]), bool(one["reviewed"]))
            if isinstance(one, dict)
            else LabelDescription(str(one), "", reviewed=True)
            for name, one in labels.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"no descriptions of labels: {error}", file=path, cure="write label: text") from None


@dataclass(frozen=True, eq=False)
class _OwnWords:
    """The words of every text, and how much more often a label's texts have a word than other texts."""

    words: Sequence[str]
    having: Sparse
    """Texts × words: 1 where the text has the word."""
    weights: Sparse
    """Labels × words: log-odds against other texts, times the root of the share of the label's texts with the
    word."""

    @classmethod
    def of(cls, data: LabelledTexts) -> _OwnWords:
        """Count words and compute weights; a word in no text of a label has no weight there."""
        tokens = tokenise(data.texts)
        having = (tokens.counts() > 0).astype(np.float64)
        weights = csr_array(data.labels.T.astype(np.float64) @ having)
        inside, label = weights.data, np.repeat(np.arange(len(data.names)), np.diff(weights.indptr))
        texts = label_counts(data.labels)[label].astype(np.float64)
        outside = np.asarray(having.sum(axis=0))[weights.indices] - inside
        rest = len(data) - texts
        odds = np.log((inside + 0.5) / (texts - inside + 0.5))
        odds -= np.log((outside + 0.5) / (rest - outside + 0.5))
        weights.data = odds * np.sqrt(inside / texts)
        return cls(tokens.terms.vocabulary, having, weights)

    def telling(self, data: LabelledTexts, label: int) -> list[int]:
        """Return the label's texts, those with the most characteristic words first."""
        own = data.labels[:, [label]].nonzero()[0]
        counts = self.having[own]
        scores = (counts @ self.weights[[label]].T).toarray().ravel()
        scores /= np.sqrt(1.0 + np.asarray(counts.sum(axis=1)).ravel())
        return list(own[np.argsort(-scores, kind="stable")])


def _excerpt(data: LabelledTexts, own_words: _OwnWords, label: int) -> str:
    """Return the most characteristic sentences, none with mostly the same words as another."""
    own = own_words.weights[[label]]
    weight = {own_words.words[at]: value for at, value in zip(own.indices, own.data.tolist(), strict=True)}
    texts = [data.texts[at] for at in own_words.telling(data, label)[:50]]
    sentences = list(
        dict.fromkeys(part.strip() for text in texts for part in _BREAK.split(text) if part.strip())
    )
    tokens = tokenise(sentences)
    sets = [set(tokens.words(at)) for at in range(len(sentences))]
    scores = [sum(weight.get(word, 0.0) for word in words) / (3 + len(words)) for words in sets]
    chosen: list[int] = []
    for at in np.argsort(-np.array(scores), kind="stable").tolist():
        if all(len(sets[at] & sets[other]) <= len(sets[at]) / 2 for other in chosen):
            chosen.append(at)
        if len(chosen) == SENTENCES:
            break
    return " ".join(sentences[at] for at in chosen)[:CHARACTERS]


def _prompt(data: LabelledTexts, own_words: _OwnWords, label: int) -> str:
    """Return the prompt: five texts of the label, and one of each of the five labels with the most similar
    words."""
    weights = own_words.weights
    lengths = np.sqrt(np.asarray(weights.power(2).sum(axis=1)).ravel())
    cosines = (weights @ weights[[label]].T).toarray().ravel() / np.maximum(lengths, 1e-12)
    nearest = [at for at in np.argsort(-cosines, kind="stable").tolist() if at != label][:SAMPLES]
    own = [data.texts[at] for at in own_words.telling(data, label)[:SAMPLES]]
    others = {data.names[at]: own_words.telling(data, at)[:1] for at in nearest}
    contrast = [f"- ({name}) {data.texts[at][:CHARACTERS]}" for name, rows in others.items() for at in rows]
    return PROMPT.format(
        label=data.names[label],
        own="\n".join(f"- {text[:CHARACTERS]}" for text in own),
        others=", ".join(others),
        contrast="\n".join(contrast),
    )
