"""Measures as values, parsed from strings such as `nDCG@10(gain=linear)`, with every convention visible.

>>> measure = Measure.parse("nDCG@10(gain=linear)")
>>> measure == Measure.parse("nDCG(gain=linear)@10") == Measure.parse("ndcg_cut_10")
True
>>> str(measure), measure["gain"], measure["empty"]
('nDCG@10(gain=linear)', 'linear', 'zero')

A measure parses, prints a canonical form (a parameter at its default is not printed), hashes and compares by
meaning. trec_eval's own names are parsed as well. The parameters:

    gain      exp: 2^g − 1 (default), or linear: g
    rel       the smallest grade that counts as relevant (default 1)
    empty     a query without relevant documents counts as zero (default) or one, or is skipped
    missing   a query of the judgements that the run lacks counts as an empty list, hence zero (default,
              as trec_eval -c), or is skipped (as trec_eval without -c); a query of the run without
              judgements never counts
    unjudged  a document that nobody judged, or judged below 0, counts as not relevant (zero, default), or
              is dropped from the list
    ties      equal scores are ordered by document id, descending (trec, default); the same with scores
              rounded to single precision, as trec_eval 9 and pytrec_eval compare them (trec32); in the
              order of the input (input); at random (random, with seed); nDCG also by the mean gain of the
              tied documents (average), MAP also with each tied document at the last of their ranks (last)
    gmax      the top of the grade scale (ERR): the largest grade in the judgements (data), or a number
    norm      MAP@k divides by all relevant documents (all, default) or by at most k of them (cut)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from isthmus.errors import ConfigError, nearest

Value = str | int | float


@dataclass(frozen=True, slots=True)
class WordParameter:
    """A parameter whose value is one of several words; the first is the default."""

    words: tuple[str, ...]

    @property
    def default(self) -> str:
        return self.words[0]

    def read(self, text: Value) -> str:
        if text not in self.words:
            raise ValueError(f"one of {', '.join(self.words)}")
        return str(text)


@dataclass(frozen=True, slots=True)
class NumberParameter:
    """A numeric parameter; `word`, if set, is also allowed and stands for a number computed from the data."""

    default: Value
    least: float = float("-inf")
    most: float = float("inf")
    word: str | None = None
    whole: bool = True

    def read(self, text: Value) -> Value:
        if self.word is not None and text == self.word:
            return self.word
        kind = "whole number" if self.whole else "number"
        try:
            number = int(text) if self.whole else float(text)
        except ValueError:
            raise ValueError(f"a {kind}") from None
        if number != float(text) or not self.least <= number <= self.most:
            raise ValueError(f"a {kind} from {self.least:g} to {self.most:g}")
        return number


Parameters = dict[str, WordParameter | NumberParameter]

TIES = ("trec", "trec32", "input", "random")
_ALWAYS: Parameters = {
    "ties": WordParameter(TIES),
    "seed": NumberParameter(0, 0),
    "missing": WordParameter(("zero", "skip")),
    "unjudged": WordParameter(("zero", "drop")),
}
_EMPTY: Parameters = {"empty": WordParameter(("zero", "skip", "one"))}
_REL: Parameters = {"rel": NumberParameter(1, 1)}
_BINARY: Parameters = {**_REL, **_EMPTY}
_GAIN: Parameters = {"gain": WordParameter(("exp", "linear"))}
_TOP: Parameters = {"gmax": NumberParameter("data", 1, 1000, word="data")}


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of measure: its definition, cut-off, parameters, and how values of queries are aggregated."""

    about: str
    parameters: Parameters = field(default_factory=dict)
    cut: str = "none"  # none | optional | required | fraction
    aggregate: str = "mean"  # mean | sum | geometric
    ties: tuple[str, ...] = ()

    def parameter(self, name: str) -> WordParameter | NumberParameter | None:
        """Return the parameter's definition, or None if this kind of measure has no such parameter."""
        if name == "ties":
            return WordParameter((*TIES, *self.ties))
        return self.parameters.get(name) or _ALWAYS.get(name)

    @property
    def names(self) -> list[str]:
        """The names of the parameters of this kind of measure."""
        return [*self.parameters, *_ALWAYS]


FAMILIES: dict[str, Family] = {
    "nDCG": Family(
        "discounted cumulative gain over that of the ideal list, both to rank k, over all judged documents",
        {**_GAIN, **_EMPTY},
        "optional",
        ties=("average",),
    ),
    "DCG": Family("Σ gain / log2(rank + 1)", _GAIN, "optional", ties=("average",)),
    "nDCGrel": Family("nDCG averaged over the ranks of the relevant documents (linear gain)"),
    "RnDCG": Family("nDCG averaged over the ranks where the ideal gain falls (linear gain)", _REL),
    "MRR": Family("1 / rank of the first relevant document, 0 beyond rank k", _BINARY, "optional"),
    "ERR": Family("Σ 1/r · R_r · Π_{i<r} (1 − R_i), R = (2^g − 1) / 2^gmax", _TOP | _EMPTY, "optional"),
    "MAP": Family(
        "precision at every relevant document, averaged over the relevant documents",
        {**_BINARY, "norm": WordParameter(("all", "cut"))},
        "optional",
        ties=("last",),
    ),
    "GMAP": Family("the geometric mean of MAP's values, at least 0.00001", _BINARY, aggregate="geometric"),
    "P": Family("relevant documents to rank k, over k", _BINARY, "required"),
    "R": Family("relevant documents to rank k, over all relevant documents", _BINARY, "required"),
    "RelP": Family("relevant documents to rank k, over the most there can be", _BINARY, "required"),
    "Success": Family("1 if there is a relevant document to rank k", _BINARY, "required"),
    "Rprec": Family("precision at rank R, the number of relevant documents", _BINARY),
    "RprecMult": Family("precision at a multiple of R", _BINARY, "fraction"),
    "iprec": Family("the best precision at this recall or any higher one", _BINARY, "fraction"),
    "iprec11": Family("iprec averaged over recall 0, 0.1, …, 1", _BINARY),
    "bpref": Family("how seldom judged worthless documents stand above relevant ones", _BINARY),
    "Gbpref": Family("the geometric mean of bpref, at least 0.00001", _BINARY, aggregate="geometric"),
    "infAP": Family("average precision inferred from a sample of judgements", _BINARY),
    "G": Family("Σ gain / log2(2 + ideal cost − gain so far), over the sum of gains (linear gain)"),
    "binG": Family("Σ 1 / log2(2 + worthless documents above), over the relevant documents", _BINARY),
    "RBP": Family(
        "(1 − p) Σ p^(rank − 1) over relevant documents",
        {**_BINARY, "p": NumberParameter(0.8, 0, 1, whole=False)},
        "optional",
    ),
    "SetP": Family("relevant documents over documents in the list", _BINARY),
    "SetR": Family("relevant documents in the list over relevant documents", _BINARY),
    "SetF": Family(
        "(β + 1) P R / (R + β P) of the whole list", {**_BINARY, "beta": NumberParameter(1.0, 0, whole=False)}
    ),
    "SetAP": Family("SetP · SetR", _BINARY),
    "SetRelP": Family("relevant documents in the list over the most there can be", _BINARY),
    "Utility": Family(
        "hit · relevant + noise · others in the list + miss · relevant documents not in it",
        {
            **_REL,
            "hit": NumberParameter(1.0, whole=False),
            "noise": NumberParameter(-1.0, whole=False),
            "miss": NumberParameter(0.0, whole=False),
        },
    ),
    "Judged": Family("judged documents to rank k, over documents to rank k", {}, "optional"),
    "NumQ": Family("queries", aggregate="sum"),
    "NumRet": Family("documents in the list", aggregate="sum"),
    "NumRel": Family("relevant documents", _REL, aggregate="sum"),
    "NumRelRet": Family("relevant documents in the list", _REL, aggregate="sum"),
    "NumNonrelRet": Family("judged worthless ones in the list", _REL, aggregate="sum"),
    "psP": Family("P@k weighted by inverse propensity, over the ideal: a ratio of means", _REL, "required"),
    "psnDCG": Family(
        "nDCG@k weighted by inverse propensity, over the ideal: a ratio of means", _REL, "required"
    ),
    # The cross-silo paper's measures as printed and as coded, where they differ from those above.
    "map_printed": Family("as printed, not MAP: mean of (rank by grade / rank in the list); unbounded"),
    "map_code": Family("as coded, not MAP: Σ_i g_i · mean(g_1 … g_i) / n; grows with the grades"),
    "err_printed": Family(
        "as printed, without 1/r: over a whole list the same for every order", _TOP | _EMPTY, "optional"
    ),
    "err_code": Family("as coded: ERR with gmax taken from each list", _EMPTY, "optional"),
    "ndcg_printed": Family("as printed: DCG@k over the whole list's ideal DCG", _GAIN | _EMPTY, "required"),
}

_ALIASES = {
    "AP": "MAP", "RR": "MRR", "Hit": "Success", "HitRate": "Success", "Recall": "R", "Precision": "P",
}  # fmt: skip

_TREC_EVAL = {
    "map": "MAP", "map_cut": "MAP", "gm_map": "GMAP", "P": "P", "recall": "R", "relative_P": "RelP",
    "success": "Success", "ndcg": "nDCG", "ndcg_cut": "nDCG", "ndcg_rel": "nDCGrel", "Rndcg": "RnDCG",
    "recip_rank": "MRR", "Rprec_mult": "RprecMult", "iprec_at_recall": "iprec", "11pt_avg": "iprec11",
    "gm_bpref": "Gbpref", "set_P": "SetP", "set_recall": "SetR", "set_F": "SetF", "set_map": "SetAP",
    "set_relative_P": "SetRelP", "utility": "Utility", "num_q": "NumQ", "num_ret": "NumRet",
    "num_rel": "NumRel", "num_rel_ret": "NumRelRet", "num_nonrel_judged_ret": "NumNonrelRet",
}  # fmt: skip

PROFILES: dict[str, dict[str, tuple[str, ...]]] = {
    "trec_eval": {"gain": ("linear",), "ties": ("trec32",), "missing": ("skip",)},
    "lightgbm": {"gain": ("exp",), "empty": ("one",), "ties": ("input",), "norm": ("cut",)},
    "sklearn": {"gain": ("linear",), "ties": ("average", "last")},
}
"""Conventions of each tool where a measure states none; of several values, the first that it allows."""

_FORM = re.compile(r"(?P<name>\w+)(@(?P<cut>[\d.]+))?(\((?P<inside>[^()]*)\))?(@(?P<late>[\d.]+))?")
_TREC_FORM = re.compile(r"(?P<name>[A-Za-z]\w*?|11pt_avg)([._](?P<cut>\d+(\.\d+)?))?")


@dataclass(frozen=True)
class Measure:
    """One measure with its cut-off and the parameters that differ from their defaults, sorted by name."""

    name: str
    cutoff: int | float | None = None
    parameters: tuple[tuple[str, Value], ...] = ()
    explicit: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Names of the parameters that were written out, even at their default; a profile keeps these."""

    def __post_init__(self) -> None:
        if self.name not in FAMILIES:
            raise _unknown("measure", self.name, FAMILIES)
        object.__setattr__(self, "cutoff", _read_cutoff(self.name, self.cutoff))
        values = {name: self._read(name, value) for name, value in self.parameters}
        changed = ((name, value) for name, value in values.items() if value != self._default(name))
        object.__setattr__(self, "explicit", self.explicit | values.keys())
        object.__setattr__(self, "parameters", tuple(sorted(changed)))

    @classmethod
    def parse(cls, text: str) -> Measure:
        """Read a measure: `nDCG@10(gain=linear)`, `MRR(rel=2)@5`, or trec_eval's `ndcg_cut_10`."""
        compact = re.sub(r"\s+", "", text)
        trec = _TREC_FORM.fullmatch(compact)
        if trec and trec["name"] in _TREC_EVAL:
            name = _TREC_EVAL[trec["name"]]  # trec_eval's nDCG has linear gain
            return cls(name, _number(trec["cut"]), (("gain", "linear"),) if name == "nDCG" else ())
        form = _FORM.fullmatch(compact)
        if form is None or (form["cut"] and form["late"]):
            raise ConfigError(f"{text!r} is not a measure; one is written nDCG@10(gain=linear)", key=text)
        name = _ALIASES.get(form["name"], form["name"])
        if name not in FAMILIES:
            raise _unknown("measure", form["name"], [*FAMILIES, *_ALIASES, *_TREC_EVAL])
        return cls(name, _number(form["cut"] or form["late"]), tuple(_pairs(form["inside"] or "", text)))

    @property
    def family(self) -> Family:
        """The kind of measure this is."""
        return FAMILIES[self.name]

    def __getitem__(self, parameter: str) -> Value:
        return dict(self.parameters).get(parameter, self._default(parameter))

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, str) and self.family.parameter(parameter) is not None

    def __call__(self, **parameters: Value) -> Measure:
        """The same measure with other conventions: `nDCG(gain="linear")`."""
        values = {name: self[name] for name in self.explicit} | parameters
        return Measure(self.name, self.cutoff, tuple(values.items()))

    def __matmul__(self, cutoff: int | float) -> Measure:
        """The same measure with another cut-off: `nDCG @ 10`."""
        return Measure(self.name, cutoff, tuple((name, self[name]) for name in self.explicit))

    def under(self, profile: str) -> Measure:
        """Return the measure with the conventions of a tool, except for parameters that the measure states
        itself."""
        if profile not in PROFILES:
            raise _unknown("profile", profile, PROFILES)
        chosen: dict[str, Value] = {}
        for name, values in PROFILES[profile].items():
            parameter = self.family.parameter(name)
            known = parameter.words if isinstance(parameter, WordParameter) else ()
            possible = [value for value in values if value in known]
            if possible and name not in self.explicit:
                chosen[name] = possible[0]
        return self(**chosen)

    def __str__(self) -> str:
        cut = "" if self.cutoff is None else f"@{self.cutoff:g}"
        inside = ", ".join(f"{name}={_spell(value)}" for name, value in self.parameters)
        return f"{self.name}{cut}({inside})" if inside else f"{self.name}{cut}"

    def conventions(self) -> str:
        """Return the definition and the parameters in words, to print beside a value."""
        names = [name for name in self.family.names if name != "seed" or self["ties"] == "random"]
        settings = "; ".join(f"{name}={_spell(self[name])}" for name in names)
        return f"{self.family.about} ({settings})"

    def _default(self, name: str) -> Value:
        return self._parameter(name).default

    def _parameter(self, name: str) -> WordParameter | NumberParameter:
        parameter = self.family.parameter(name)
        if parameter is None:
            raise _unknown(f"parameter of {self.name}", name, self.family.names)
        return parameter

    def _read(self, name: str, value: Value) -> Value:
        parameter = self._parameter(name)
        try:
            return parameter.read(value)
        except ValueError as wanted:
            words = parameter.words if isinstance(parameter, WordParameter) else ()
            raise ConfigError(
                f"{name}={value} of {self.name}: must be {wanted}", key=str(value), value=value, known=words
            ) from None


def as_measures(measures: Iterable[str | Measure]) -> tuple[Measure, ...]:
    """Parse names into measures; measures stay as they are. Raises ConfigError for an unknown name."""
    if isinstance(measures, str):
        raise ConfigError(f"{measures!r} is one measure where a list of them is expected: [{measures!r}]")
    return tuple(item if isinstance(item, Measure) else Measure.parse(item) for item in measures)


def _read_cutoff(name: str, cutoff: int | float | None) -> int | float | None:
    cut = FAMILIES[name].cut
    if cut == "none" and cutoff is not None:
        raise ConfigError(f"{name} has no cut-off, so it is written {name}", key=name, value=cutoff)
    if cutoff is None:
        if cut in ("required", "fraction"):
            example = 0.1 if cut == "fraction" else 10
            raise ConfigError(f"{name} needs a cut-off, as in {name}@{example}", key=name)
        return None
    if cut == "fraction":
        if not cutoff >= 0 or (name == "iprec" and cutoff > 1):
            raise ConfigError(
                f"{name}@{cutoff:g}: the cut-off is a share from 0 to 1", key=name, value=cutoff
            )
        return float(cutoff)
    if cutoff != int(cutoff) or cutoff < 1:
        raise ConfigError(f"{name}@{cutoff:g}: the cut-off is a rank, from 1", key=name, value=cutoff)
    return int(cutoff)


def _pairs(inside: str, text: str) -> Iterable[tuple[str, Value]]:
    for part in filter(None, inside.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise ConfigError(
                f"{part!r} in {text!r} is not a parameter; one is written gain=linear", key=part
            )
        yield name, value


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a cut-off", key=text) from None


def _spell(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unknown(kind: str, word: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown word; it suggests one that differs only in case, or the nearest."""
    names = list(known)
    alike = [name for name in names if name.casefold() == word.casefold()]
    guess = alike[0] if alike else nearest(word, names)
    hint = "" if guess else f"; known are {', '.join(names)}"
    return ConfigError(f"unknown {kind} {word!r}{hint}", key=guess or word, known=[guess] if guess else ())
