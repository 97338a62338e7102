"""`pydocs`, the built-in collection: real text that every installation already has.

Documents are the docstrings of public functions, classes and methods of NumPy, SciPy and scikit-learn (of
those that can be imported). The query of a document is its first sentence without its own name. Documents
linked under *See Also* are relevant: grade 2 if both link each other, 1 if one links the other. A query's
own document is no candidate for it. Queries are split by connected component of the link graph, so no link
crosses from training to test. The result is deterministic for given package versions: memory addresses are
removed, and set literals, whose order changes from process to process, are sorted.

The division into silos is not the libraries': whole sub-packages are balanced greedily, and then a share of
the documents moves by a hash of its name. The share ranges from topical (0) to random (1) silos.

On request the standard library's docstrings are added as distractors: it has no *See Also*, so they bring
documents but neither queries nor judgements.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
import sys
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from isthmus.arrays import IntArray, frozen
from isthmus.errors import DataError
from isthmus.partition import by_site, divide, move_share
from isthmus.randomness import Streams
from isthmus.tables import SPLITS, Corpus, Documents, Qrels, Queries, cache_folder, write_whole
from isthmus.text import STOP_WORDS, tokenise

FORMAT = 1
"""Version of the data, raised whenever the same packages would give another world."""

_NAMED = tomllib.loads(files("isthmus.corpora").joinpath("pydocs.toml").read_text(encoding="utf-8"))
MODULES: Mapping[str, str] = {package: _NAMED[package] for package in ("numpy", "scipy", "sklearn")}
"""The public modules of each package."""

STANDARD_LIBRARY: str = _NAMED["python"]
"""The modules whose docstrings may serve as distractors."""

EXPERIMENTAL = {"HalvingGridSearchCV", "HalvingRandomSearchCV", "IterativeImputer"}
"""Classes that appear only once some code in the process has enabled them; they are left out, so that the
world does not depend on it."""

THEMES = {"numpy": "arrays", "scipy.stats": "statistics", "scipy.special": "functions"}
"""Names of silos by their largest sub-package; other silos are named by the last part of its name."""

SILOS = 4
SHARE = 0.5
SPLIT_SHARES = (0.6, 0.2, 0.2)

_STRIPPED = {"examples", "example", "references", "see also"}
_HEADING = re.compile(r"^[ ]*(\S[^\n]*)\n[ ]*[-=~]{3,}[ ]*$", re.MULTILINE)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SCALAR = r"(?:'[^'\n]*'|\"[^\"\n]*\"|[\w.+-]+)"
_SET = re.compile(rf"\{{({_SCALAR}(?:,\s+{_SCALAR})+)\}}")
_SIGNATURE = re.compile(r"[\w., ]*=?\s*[\w.]+\(.*\)(\s*->.*)?", re.DOTALL)
_ROLE = re.compile(r":[a-z:]+:`~?([^`<]*?)(?:\s*<[^>]*>)?`")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z(])")
_WORD = re.compile(r"[^\W_]+(?:[-'][^\W_]+)*")
_NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_TARGET = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class PydocsWorld:
    """The documents, links and queries before they are dealt into silos: slow to collect, the same for every
    deal."""

    names: list[str]
    bodies: list[str]
    sites: list[str]
    links: list[tuple[str, str]]
    queries: dict[str, str]
    splits: list[str]
    distractors: int = 0
    """The number of documents, the last ones, that are relevant to no query."""

    def corpus(self, *, share: float = SHARE, silos: int = SILOS) -> Corpus:
        """Deal the world into silos; `share` is the part of the documents that leaves its sub-package's
        silo.

        Distractors are dealt by the same rule but separately, so that no other document changes its silo.
        """
        judged = len(self.names) - self.distractors
        topical = by_site(self.sites[:judged], silos).holders
        silo_names = _silo_names(self.sites[:judged], topical, silos)
        if self.distractors:
            topical = np.concatenate((topical, by_site(self.sites[judged:], silos).holders))
        homes = move_share(self.names, topical, share, silos)
        row_of = {name: row for row, name in enumerate(self.names)}
        ids = tuple(self.queries)
        queries = Queries(
            ids,
            tuple(self.queries.values()),
            frozen(homes[[row_of[query] for query in ids]]),
            tuple(self.splits),
            ids,
        )
        names = tuple(self.names)
        documents = Documents(names, names, tuple(self.bodies), frozen(homes))
        qrels = Qrels.from_dict(_judgements(self.links, ids))
        return Corpus("pydocs", documents, queries, qrels, silo_names)

    def with_distractors(self) -> PydocsWorld:
        """Return the world with the standard library's docstrings as further documents, except copies."""
        packages = {module: module.partition(".")[0] for module in STANDARD_LIBRARY.split()}
        documented = _merged(_collect((module, package, package) for module, package in packages.items()))
        known = set(self.bodies)
        added = [documented[name] for name in sorted(documented) if documented[name].body not in known]
        return replace(
            self,
            names=self.names + [entry.name for entry in added],
            bodies=self.bodies + [entry.body for entry in added],
            sites=self.sites + [entry.site for entry in added],
            distractors=self.distractors + len(added),
        )


def load(*, share: float = SHARE, silos: int = SILOS, distractors: bool = False) -> Corpus:
    """Return the world dealt into silos; it is collected once for given package versions and then cached.

    With `distractors` there are about a third more documents, and the same queries and judgements.
    """
    world = load_world()
    if distractors:
        world = world.with_distractors()
    return world.corpus(share=share, silos=silos)


def load_world() -> PydocsWorld:
    """Return the world before it is dealt, from the cache folder if it is there."""
    try:
        cached = cache_folder() / f"pydocs-{_fingerprint()}.json"
    except RuntimeError:  # no home folder, so no cache
        return build()
    world = _reopened(cached)
    if world is None:
        world = build()
        _keep(world, cached)
    return world


def _fingerprint() -> str:
    """Return a digest of everything on which the world depends."""
    versions = [sys.version.partition(" ")[0], str(FORMAT), " ".join(sorted(STOP_WORDS))]
    for package in (*MODULES, "scikit-learn", "PyStemmer"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return hashlib.blake2b("\n".join(versions).encode(), digest_size=8).hexdigest()


def _reopened(path: Path) -> PydocsWorld | None:
    """The world read from a cache file; None if the file is missing or damaged."""
    try:
        fields = json.loads(path.read_bytes())
        return PydocsWorld(**fields | {"links": [(a, b) for a, b in fields["links"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(world: PydocsWorld, path: Path) -> None:
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(world), separators=(",", ":")).encode())


def build() -> PydocsWorld:
    """Collect the world from the installed packages (about three seconds)."""
    if sys.flags.optimize >= 2:
        raise DataError("docstrings are missing under python -OO", cure="run Python without -OO")
    entries = _merged(_collect(_places()))
    alias = _aliases(entries)
    links = sorted({(a, b) for a, entry in entries.items() for b in _linked(entry, alias) if a != b})
    degree = Counter(name for pair in {frozenset(pair) for pair in links} for name in pair)
    queries = _queries({name: entry.body for name, entry in entries.items() if degree[name] >= 2})
    names = sorted(entries)
    return PydocsWorld(
        names,
        [entries[name].body for name in names],
        [entries[name].site for name in names],
        links,
        queries,
        _split(names, links, list(queries)),
    )


@dataclass
class _Entry:
    """A document while it is collected: its text and, of all objects with that text, their names and
    links."""

    name: str
    site: str
    body: str
    names: list[str] = field(default_factory=list)
    see_also: list[tuple[str, str]] = field(default_factory=list)


def _places() -> Iterator[tuple[str, str, str]]:
    """Yield every public module with its package and its sub-package."""
    for package, listed in MODULES.items():
        for module_name in ["", *listed.split()]:
            site = f"{package}.{module_name.partition('.')[0]}".rstrip(".")
            yield f"{package}.{module_name}".rstrip("."), package, site


def _collect(places: Iterable[tuple[str, str, str]]) -> list[tuple[Any, list[tuple[str, str]]]]:
    """Return every public object of the modules once, with all its (qualified name, sub-package) pairs."""
    things: dict[int, tuple[Any, list[tuple[str, str]]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module_name, package, site in places:
            for name, thing in _members(module_name, package):
                things.setdefault(id(thing), (thing, []))[1].append((name, site))
    return list(things.values())


def _members(module_name: str, package: str) -> Iterator[tuple[str, Any]]:
    """Yield the documented functions, classes and methods of one module, if it can be imported."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return
    for name in _public(getattr(module, "__all__", None) or dir(module)):
        thing = _attribute(module, name)
        if _home(thing, package) == package and _documented(thing):
            yield f"{module_name}.{name}", thing
            if inspect.isclass(thing):
                yield from _methods(thing, f"{module_name}.{name}", package)


def _methods(cls: type, class_name: str, package: str) -> Iterator[tuple[str, Any]]:
    for name in _public(dir(cls)):
        attribute = inspect.getattr_static(cls, name)
        function = attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute
        if not inspect.isclass(function) and _home(function, package) == package and _documented(function):
            yield f"{class_name}.{name}", function


def _public(names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if not name.startswith("_")})


def _attribute(module: ModuleType, name: str) -> Any:
    """Return an attribute; None for names that raise when accessed: experimental classes, removed
    functions."""
    if name in EXPERIMENTAL:
        return None
    try:
        return getattr(module, name)
    except (ImportError, AttributeError):
        return None


def _documented(thing: Any) -> bool:
    callable_kind = inspect.isclass(thing) or inspect.isroutine(thing) or isinstance(thing, np.ufunc)
    text = thing.__doc__ if callable_kind else None
    return isinstance(text, str) and bool(text.strip())


def _home(thing: Any, package: str) -> str:
    """Return the package of an object; one without this information, as many built-in ones, counts as the
    module's own."""
    owner = getattr(thing, "__module__", None) or getattr(
        getattr(thing, "__objclass__", None), "__module__", None
    )
    return str(owner or package).partition(".")[0]


def _merged(objects: Iterable[tuple[Any, list[tuple[str, str]]]]) -> dict[str, _Entry]:
    """Return documents by name; objects with equal texts are one document under the plainest of
    their names."""
    by_text: dict[str, _Entry] = {}
    for thing, names in sorted(objects, key=lambda pair: _plainest(*pair)):
        name, site = _plainest(thing, names)[-2:]
        body, see_also = _read(thing.__doc__)
        if not body:
            continue
        entry = by_text.setdefault(body, _Entry(name, site, body))
        entry.names += [other for other, _ in names]
        entry.see_also.append((name, see_also))
    return {entry.name: entry for entry in by_text.values()}


def _plainest(thing: Any, names: list[tuple[str, str]]) -> tuple[bool, int, int, str, str]:
    """Return the sort key of an object's plainest name: the name that it has itself, then few dots, short,
    alphabetical."""
    own = "." + str(getattr(thing, "__qualname__", None) or getattr(thing, "__name__", ""))
    return min((not name.endswith(own), name.count("."), len(name), name, site) for name, site in names)


def _read(docstring: str) -> tuple[str, str]:
    """Return a docstring's text without examples, references and links, and the links."""
    text = inspect.cleandoc(docstring)
    headings = list(_HEADING.finditer(text))
    ends = [*(heading.start() for heading in headings), len(text)]
    parts, links = [text[: ends[0]]], []
    for heading, end in zip(headings, ends[1:], strict=True):
        title = heading[1].strip().lower()
        if title == "see also":
            links.append(text[heading.end() : end])
        if title not in _STRIPPED:
            parts.append(text[heading.start() : end])
    body = "\n\n".join(part.strip() for part in parts)
    return _SET.sub(_sorted_set, _ADDRESS.sub("", body)).strip(), "\n".join(links)


def _sorted_set(match: re.Match[str]) -> str:
    return "{" + ", ".join(sorted(re.split(r",\s+", match[1]))) + "}"


def _aliases(entries: Mapping[str, _Entry]) -> dict[str, str]:
    """Return documents by all their names: full names and, per package, endings that only one
    document has."""
    alias = {name: entry.name for entry in entries.values() for name in entry.names}
    endings: dict[str, set[str]] = defaultdict(set)
    for name, target in alias.items():
        package, *rest = name.split(".")
        for length in (1, 2):
            endings[f"{package}:{'.'.join(rest[-length:])}"].add(target)
    return {ending: min(targets) for ending, targets in endings.items() if len(targets) == 1} | alias


def _linked(entry: _Entry, alias: Mapping[str, str]) -> Iterator[str]:
    """Yield the documents that an entry's *See Also* sections name."""
    for name, section in entry.see_also:
        for target in _targets(section):
            for spelling in _spellings(target, [name, *entry.names]):
                if spelling in alias:
                    yield alias[spelling]
                    break


def _targets(section: str) -> Iterator[str]:
    """Yield the names before the colon of every unindented line: `name, other : what they do`."""
    lines = inspect.cleandoc("\n" + section).splitlines()
    for line in lines:
        if line[:1].strip():
            head = re.split(r"\s*:(?:\s|$)", _ROLE.sub(r"\1", line).replace("`", ""), maxsplit=1)[0]
            for target in head.split(","):
                named = target.strip().strip(".").removesuffix("()")
                if _TARGET.fullmatch(named):
                    yield named


def _spellings(target: str, names: Iterable[str]) -> Iterator[str]:
    """Yield full names that a target may mean, relative to the modules of the given names."""
    target = "numpy" + target[2:] if target.startswith("np.") else target
    yield target
    package = ""
    for name in names:
        package = package or name.partition(".")[0]
        prefix = name
        while prefix := prefix.rpartition(".")[0]:
            yield f"{prefix}.{target}"
    for other in (package, *MODULES):
        yield f"{other}:{target}"


def _queries(bodies: Mapping[str, str]) -> dict[str, str]:
    """Return the queries of documents that have a good one: three content words, and equal to no
    other query."""
    texts = {name: _query(name, bodies[name]) for name in sorted(bodies)}
    enough = tokenise(texts.values()).lengths >= 3
    shared = Counter(text.lower() for text in texts.values())
    return {
        name: text
        for (name, text), long in zip(texts.items(), enough.tolist(), strict=True)
        if long and shared[text.lower()] == 1
    }


def _query(name: str, body: str) -> str:
    """Return the first sentence without markup and without the words of the object's own name."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", body))
    prose = (part for part in paragraphs if not _SIGNATURE.fullmatch(part) and not part.startswith(".. "))
    sentence = _SENTENCE_END.split(next(prose, ""), maxsplit=1)[0]
    sentence = _ROLE.sub(lambda role: role[1].rpartition(".")[2], sentence)
    if sentence.lower().startswith("refer to"):
        return ""
    words = _WORD.findall(re.sub(r"`+([^`]*)`+_*", r"\1", sentence))
    own = _stems(_own_words(name))
    return " ".join(word for word in words if not _stems([word]) & own)


def _own_words(name: str) -> list[str]:
    last = name.rpartition(".")[2]
    return [last, *last.split("_"), *_NAME_PART.findall(last)]


def _stems(words: Iterable[str]) -> set[str]:
    from Stemmer import Stemmer

    stemmer = Stemmer("english")
    lower = [word.lower() for word in words]
    return {*lower, *stemmer.stemWords(lower)}


def _judgements(links: Iterable[tuple[str, str]], queries: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return judgements of the queries' documents: grade 2 if both documents link each other, 1 if
    one does."""
    grades: dict[str, dict[str, int]] = {query: {} for query in queries}
    for a, b in links:
        for source, target in ((a, b), (b, a)):
            if source in grades:
                grades[source][target] = grades[source].get(target, 0) + 1
    return grades


def _split(names: list[str], links: list[tuple[str, str]], queries: list[str]) -> list[str]:
    """Return the split of every query; queries whose documents are linked, however distantly, stay
    together."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    row_of = {name: row for row, name in enumerate(names)}
    rows = np.array([[row_of[a], row_of[b]] for a, b in links], dtype=np.int64).reshape(-1, 2)
    graph = coo_array((np.ones(len(rows)), rows.T), shape=(len(names), len(names)))
    component = connected_components(graph, directed=False)[1][[row_of[query] for query in queries]]
    groups = np.unique(component, return_inverse=True)[1].astype(np.int64)
    parts = divide(len(queries), SPLIT_SHARES, Streams(0)("pydocs", "split"), groups=groups)
    return [SPLITS[part] for part in parts.tolist()]


def _silo_names(sites: list[str], homes: IntArray, silos: int) -> tuple[str, ...]:
    """Return the name of every silo, after the theme of its largest sub-package."""
    names = []
    for silo in range(silos):
        sizes = Counter(site for site, home in zip(sites, homes.tolist(), strict=True) if home == silo)
        largest = min(sizes, key=lambda site: (-sizes[site], site))
        names.append(THEMES.get(largest, largest.rpartition(".")[2]))
    return tuple(names)
