"""Check the rules of this code: print one line per rule, and every breach below it.

    python tools/house.py              the rules; exit status 1 where one is broken
    python tools/house.py --figures    code lines of every folder beside its limit

A code line is one that is not blank, a comment or a docstring; ruff formats all at 110 characters. Every
Python file of the repository counts, except those of tests.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "isthmus": ROOT / "src" / "isthmus",
    "isthmus_reproduce": ROOT / "reproduce/src/isthmus_reproduce",
}
MANIFESTS = {"isthmus": ROOT / "pyproject.toml", "isthmus_reproduce": ROOT / "reproduce/pyproject.toml"}
ASIDE = ("tests", "out", "build", "dist", "site", "runs")
"""Folders whose files are not counted."""
LONGEST = 60
"""Most code lines of a function, without its docstring."""

LIMITS: Mapping[str, int] = {
    "src/isthmus": 53_500,  # assistants, pipelines, operators; access rules; attached engines; labels
    "benchmarks": 2_690,  # a node compared with peers at two sizes, its growth; stand-ins; the audit log
    "docs": 347,  # the reference's folders, trackers too; how a node grows, as a plot beside tantivy
    "reproduce": 7_008,  # verdicts; a tuned encoder; hypotheses; CS-F-LTR as printed; small data sets
    "src/isthmus/__init__.py": 3,
    "src/isthmus/__main__.py": 3,
    "src/isthmus/asking.py": 131,  # sums under masks agreed for a session
    "src/isthmus/arrays.py": 74,
    "src/isthmus/calibration": 1_239,  # a contest of all; support of thresholds; high grades; noisy labels
    "src/isthmus/classification": 2_388,  # millions of labels; DiSMEC; checks of foreign folders; names
    "src/isthmus/cli": 4_909,  # attach, calibrate-endpoint, encoder tune, learn; labels; audit; wrong usage
    "src/isthmus/config.py": 271,  # single values as TOML; bytes; keys of a table in its errors
    "src/isthmus/corpora": 1_273,  # label sets, by name too, with a long tail; XMC sparse format; ir_datasets
    "src/isthmus/demo": 784,  # the federation it sets up and measures, all silos and one; a verdict on 0.8
    "src/isthmus/encoders": 1_720,  # presets by hash, the graph of a BERT; endpoints; a transformer tuned
    "src/isthmus/engines": 3_779,  # five attached engines: tally, filters, facets; access rules
    "src/isthmus/errors.py": 100,  # one error for unreadable files
    "src/isthmus/evaluation": 1_766,  # risks and differences, of GMAP too; values of queries, remarks
    "src/isthmus/facade.py": 21,
    "src/isthmus/features.py": 320,
    "src/isthmus/federation": 4_390,  # CS-F-LTR as printed, whole; a run beside the best feature; trackers
    "src/isthmus/files.py": 69,  # was in tables/files.py; the service starts without NumPy
    "src/isthmus/fusion": 1_499,  # RL-Sim by lists, judgements, calibrated edges; curves and weights at once
    "src/isthmus/integrations": 208,  # retrievers for four libraries over the two clients; invisible letters
    "src/isthmus/languages.py": 108,  # stop words and stemmers by language; detection of the language
    "src/isthmus/learning": 1_389,  # the one learner; lists of all silos and of one, in groups of three silos
    "src/isthmus/logistic.py": 75,  # bounds, and several fits in one question
    "src/isthmus/losses.py": 191,  # weights of queries below a baseline
    "src/isthmus/partition.py": 241,  # the number of silos
    "src/isthmus/private": 5_116,  # masks; a ledger with chained entries; budgets of subjects; public words
    "src/isthmus/randomness.py": 24,
    "src/isthmus/rankers": 807,  # losses against a baseline; weights of lists
    "src/isthmus/report": 599,  # tables in notebooks; time left; trackers, TensorBoard
    "src/isthmus/retrieval": 474,  # collection statistics in one place; cells of queries remembered
    "src/isthmus/service": 17_358,  # access rules; engines; learning; assistants; what a release costs
    "src/isthmus/tables": 1_932,
    "src/isthmus/text.py": 183,  # short texts without the pattern of 31 marks; texts cut in blocks
    "src/isthmus/training.py": 43,  # training in memory, in one call
    "src/isthmus/workers.py": 17,
    "tools": 890,  # proof by mutation; releases, built twice, listed and audited
}
"""Most code lines per folder; a limit is raised only with a reason beside it."""

RETIRED = frozenset(
    {"asked", "chances", "found", "given", "heard", "held", "kept", "made", "said", "shown", "taken", "told"}
)
"""Participles that do not say what a thing is; leading and trailing underscores are ignored."""
RETIRED_AT_MOST = 40
"""Most identifiers in `src/isthmus` that may be such a word, counting every use. It is only ever lowered.

`RoundRecord.asked` and `ThresholdCurve.kept` are keys in files.
"""
SAME_NAME: frozenset[str] = frozenset({"IsthmusRetriever"})  # the name that users of each library look for
"""Public classes of `src/isthmus` whose name is used in two modules. This list only shrinks."""

CYCLES: frozenset[frozenset[str]] = frozenset()
"""Known import cycles that remain. This list only shrinks."""

DISTRIBUTIONS = {
    "Stemmer": "PyStemmer",
    "google": "protobuf",
    "haystack": "haystack-ai",
    "llama_index": "llama-index-core",
    "pyterrier": "python-terrier",
    "grpc": "grpcio",
    "jwt": "PyJWT",
    "mpl_toolkits": "matplotlib",
    "opentelemetry": "opentelemetry-sdk",
    "ray": "flwr[simulation]",
    "sklearn": "scikit-learn",
}
"""Distribution names of modules whose import name differs."""


ELSEWHERE = frozenset({"isthmus.encoders.torch_tuning"})
"""Programs for an interpreter of another environment; their imports need not be declared here."""


@dataclass(frozen=True)
class Import:
    """One imported name with its line: `lazy` inside a function, `typing` inside `if TYPE_CHECKING`."""

    name: str
    line: int
    lazy: bool
    typing: bool


class Module:
    """A Python file with its dotted name."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.is_package = path.name == "__init__.py"
        self.source = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.source)

    @property
    def where(self) -> str:
        """Path in the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def folder(self) -> str:
        """Dotted name of the containing folder; a package's `__init__` belongs to the package itself."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def code(self) -> frozenset[int]:
        """Line numbers of the code lines."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        blank = {at for at, line in enumerate(self.source.splitlines(), 1) if not line.strip()}
        return frozenset(lines - blank - {at for node in ast.walk(self.tree) for at in _docstrings(node)})

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """All imports, inside functions too."""
        return tuple(self._imports(self.tree, lazy=False, typing=False))

    def _imports(self, node: ast.AST, *, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, lazy, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                source = self._absolute(child)
                yield from (
                    Import(f"{source}.{alias.name}", child.lineno, lazy, typing) for alias in child.names
                )
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from self._imports(child, lazy=lazy, typing=True)
            else:
                inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _guards(child)
                yield from self._imports(child, lazy=inside, typing=typing)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        above = self.folder.split(".")[: len(self.folder.split(".")) - node.level + 1]
        return ".".join((*above, *([node.module] if node.module else [])))


def _guards(node: ast.AST) -> bool:
    """Whether a node is a `try` that reports a failed import as a missing extra."""
    return isinstance(node, ast.Try) and any("MissingExtra" in ast.unparse(one) for one in node.handlers)


_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def _docstrings(node: ast.AST) -> Iterator[int]:
    """Yield the lines of the docstrings in a node's body, those of attributes too."""
    body = getattr(node, "body", None)
    for statement in body if isinstance(body, list) else ():
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield from range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


class House:
    """All files that count, and the import graph of the packages' modules."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        for package, folder in PACKAGES.items():
            for path in sorted(folder.rglob("*.py")):
                parts = (package, *path.relative_to(folder).with_suffix("").parts)
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                self.modules[name] = Module(name, path)
        self.others = [Module(path.stem, path) for path in sorted(ROOT.rglob("*.py")) if self._counts(path)]

    @staticmethod
    def _counts(path: Path) -> bool:
        parts = path.relative_to(ROOT).parts
        inside = any(path.is_relative_to(folder) for folder in PACKAGES.values())
        hidden = any(part.startswith(".") or part in ASIDE for part in parts)
        return not inside and not hidden

    def lines(self) -> Counter[str]:
        """Count code lines by folder: the parts of `src/isthmus`, and each other top-level folder."""
        counted: Counter[str] = Counter()
        for module in (*self.modules.values(), *self.others):
            parts = module.path.relative_to(ROOT).parts
            depth = 3 if parts[0] == "src" else 1
            counted["/".join(parts[:depth])] += len(module.code)
        return counted

    def resolved(self, name: str) -> str | None:
        """Return the module of this repository that defines an imported name, or None."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name or None

    @cached_property
    def homes(self) -> dict[str, str]:
        """The modules that define the names of facades, from the stubs beside them."""
        return {
            f"{package}.{alias.name}": str(statement.module)
            for package, module in self.modules.items()
            if (stub := module.path.with_suffix(".pyi")).exists()
            for statement in ast.parse(stub.read_text(encoding="utf-8")).body
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
        }

    @cached_property
    def graph(self) -> dict[str, set[str]]:
        """Imported modules by importing module, without imports for types."""
        edges: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, module in self.modules.items():
            for one in module.imports:
                target = None if one.typing else self.homes.get(one.name) or self.resolved(one.name)
                if target is not None and target != name:
                    edges[name].add(target)
        return edges


def check_lines(house: House) -> tuple[str, list[str]]:
    """Check code lines against the table of limits."""
    counted = house.lines()
    breaches = [
        f"{folder}: {lines:,} code lines, at most {LIMITS.get(folder, 0):,}"
        for folder, lines in sorted(counted.items())
        if lines > LIMITS.get(folder, 0)
    ]
    product = sum(lines for folder, lines in counted.items() if folder.startswith("src/"))
    if product > LIMITS["src/isthmus"]:
        breaches.append(f"src/isthmus: {product:,} code lines, at most {LIMITS['src/isthmus']:,}")
    summary = f"{product:,} code lines in src/isthmus, {counted['reproduce']:,} in reproduce"
    return summary, breaches


def check_cycles(house: House) -> tuple[str, list[str]]:
    """Check that no cycle exists between modules, nor between the folders and modules of one folder."""
    loops = {frozenset(loop) for loop in _loops(house.graph)}
    for folder in {module.folder for module in house.modules.values() if module.is_package}:
        loops |= {frozenset(loop) for loop in _loops(_inside(house.graph, folder))}
    breaches = [f"a cycle: {', '.join(sorted(loop))}" for loop in sorted(loops - CYCLES, key=sorted)]
    breaches += [f"no cycle any more: {', '.join(sorted(loop))}; strike it off" for loop in CYCLES - loops]
    return f"{len(loops)} cycles of imports, {len(CYCLES)} of them known", breaches


def _inside(graph: Mapping[str, Iterable[str]], folder: str) -> dict[str, set[str]]:
    """Return the graph between a folder's direct members: its modules, and its folders as one node each."""
    depth = folder.count(".") + 2

    def node(name: str) -> str | None:
        return ".".join(name.split(".")[:depth]) if name.startswith(f"{folder}.") else None

    edges: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        here = node(name)
        if here is not None:
            edges[here] |= {there for target in targets if (there := node(target)) and there != here}
    return edges


def _loops(graph: Mapping[str, Iterable[str]]) -> Iterator[set[str]]:
    """Return strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    loops: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph.get(name, ()):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            loops.append(set(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in index:
            visit(name)
    return (loop for loop in loops if len(loop) > 1)


def check_facades(house: House) -> tuple[str, list[str]]:
    """Check that modules outside a folder import from the folder itself, not from its modules."""
    past = sorted(
        f"{name}: imports {target} past its facade"
        for name, each in house.modules.items()
        for target in {house.resolved(one.name) for one in each.imports}
        if target and _is_past(house, name, target)
    )
    folders = sum(each.is_package for each in house.modules.values())
    return f"{len(past)} imports past the facades of {folders} folders", past


def _is_past(house: House, importer: str, target: str) -> bool:
    """Whether an import from outside a folder bypasses its facade."""
    if house.modules[target].is_package:
        return False
    folder = house.modules[target].folder
    inside = importer == folder or importer.startswith(f"{folder}.")
    return not inside and folder in house.modules and folder not in PACKAGES


def check_declared(house: House) -> tuple[str, list[str]]:
    """Check that third-party imports are declared, and that those of extras are lazy."""
    breaches, seen = set(), set()
    for package, manifest in MANIFESTS.items():
        project = tomllib.loads(manifest.read_text(encoding="utf-8"))["project"]
        core = {_distribution(line) for line in project["dependencies"]}
        extras = {
            _distribution(line)
            for lines in project.get("optional-dependencies", {}).values()
            for line in lines
        }
        for module in (one for name, one in house.modules.items() if name.split(".")[0] == package):
            for one in module.imports if module.name not in ELSEWHERE else ():
                top = one.name.split(".")[0]
                if top in sys.stdlib_module_names or top == package or top == "__future__":
                    continue
                needed = _distribution(DISTRIBUTIONS.get(top, top))
                seen.add(needed)
                if needed not in core | extras:
                    breaches.add(f"{module.where}:{one.line}: {package} does not declare {needed}")
                elif needed not in core and not (one.lazy or one.typing):
                    breaches.add(f"{module.where}:{one.line}: the extra {needed} is not imported lazily")
    return f"{len(seen)} third-party distributions imported, all declared", sorted(breaches)


def _distribution(line: str) -> str:
    """Return a requirement's distribution name in normalised form."""
    name = re.match(r"[A-Za-z0-9._-]+", line)
    return re.sub(r"[-_.]+", "-", name.group().lower()) if name else line


def check_functions(house: House) -> tuple[str, list[str]]:
    """Check that no function has more than `LONGEST` code lines."""
    lengths = {
        f"{module.where}:{node.lineno} {node.name}": _length(module, node)
        for module in (*house.modules.values(), *house.others)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    breaches = [
        f"{name}: {length} lines, at most {LONGEST}" for name, length in lengths.items() if length > LONGEST
    ]
    return f"{len(lengths):,} functions, the longest of {max(lengths.values())} lines", breaches


def _length(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len(module.code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def check_words(house: House) -> tuple[str, list[str]]:
    """Check that names are the nouns of the field, not participles."""
    counted = Counter(
        f"{module.where}: {word}" for module in _product(house) for word in _identifiers(module.tree)
    )
    uses = counted.total()
    breaches = [f"{uses:,} identifiers are a retired word, at most {RETIRED_AT_MOST:,}; by file:"]
    breaches += [f"{place}, {times} times" for place, times in counted.most_common(20)]
    summary = f"{uses:,} identifiers are one of {len(RETIRED)} retired words"
    return summary, breaches if uses > RETIRED_AT_MOST else []


def check_documented(house: House) -> tuple[str, list[str]]:
    """Check that public functions and classes of modules have docstrings."""
    public = [
        (f"{module.where}:{node.lineno}: {node.name}", ast.get_docstring(node))
        for module in _product(house)
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]
    missing = [f"{place} has no docstring" for place, docstring in public if not docstring]
    return f"{len(public):,} public functions and classes", missing


def _identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the identifiers of a module that are a retired word."""
    for node in ast.walk(tree):
        for attribute in ("id", "attr", "arg", "name"):
            name = getattr(node, attribute, None)
            if isinstance(name, str) and name.strip("_") in RETIRED:
                yield name


def check_classes(house: House) -> tuple[str, list[str]]:
    """Check that the names of public classes are unique."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in _product(house):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{module.where}:{node.lineno}")
    several = {name for name, where in places.items() if len(where) > 1}
    breaches = [f"two classes {name}: {', '.join(places[name])}" for name in sorted(several - SAME_NAME)]
    breaches += [f"one class {name} only: strike it off" for name in sorted(SAME_NAME - several)]
    return f"{len(places)} names of public classes, {len(several)} of them twice", breaches


def _product(house: House) -> Iterator[Module]:
    """Return the modules of `src/isthmus`."""
    return (module for name, module in house.modules.items() if name.split(".")[0] == "isthmus")


RULES = {
    "lines": check_lines,
    "cycles": check_cycles,
    "facades": check_facades,
    "declared": check_declared,
    "functions": check_functions,
    "words": check_words,
    "classes": check_classes,
    "documented": check_documented,
}


def main() -> int:
    """Check every rule. Returns 1 if one is broken."""
    house = House()
    if "--figures" in sys.argv[1:]:
        for folder, lines in sorted(house.lines().items()):
            print(f"{folder:<32}{lines:>8,}{LIMITS.get(folder, 0):>8,}")
    broken = False
    for name, rule in RULES.items():
        summary, breaches = rule(house)
        print(
            f"  {name}: {summary}" if not breaches else f"  {name}: broken {len(breaches)} times ({summary})"
        )
        for breach in breaches:
            print(f"    {breach}")
        broken = broken or bool(breaches)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
