"""The reference, made from the code while the site is built: no page can be older than what it describes.

mkdocs calls `on_files`; `page()` gives the text. A docstring's examples become code, and so does what it
indents; a dataclass shows its fields with the words that stand below them in the source.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

PAGE = "reference.md"
HEAD = """# Reference

Made from the code when this site is built. [`import isthmus`](api.md) has the names that most programs need;
everything else is imported from the module it is listed under. Names that begin with an underscore, and
modules that are not here, may change without notice.
"""
CONTENTS: dict[str, tuple[str, ...]] = {
    "isthmus.tables": (),
    "isthmus.corpora": (),
    "isthmus.evaluation": (),
    "isthmus.classification": (),
    "isthmus.retrieval": (),
    "isthmus.calibration": (),
    "isthmus.fusion": (),
    "isthmus.rankers": ("Ranker", "Linear", "MLP", "LambdaMART", "load_ranker", "LocalTraining"),
    "isthmus.features": ("Settings", "Pairs", "ExactCounts", "TermCounts", "compute", "bm25", "letor"),
    "isthmus.partition": ("Dealing", "Deal", "deal", "divide", "folds"),
    "isthmus.training": ("train", "rank"),
    "isthmus.federation.apps": ("Training", "train"),
    "isthmus.federation.settings": (
        "Config",
        "Rounds",
        "StrategyOptions",
        "FedRisk",
        "Model",
        "PrivateUpdates",
    ),
    "isthmus.private.counts": ("CountRelease", "Owner", "Desk", "Asker", "PrivateCounts"),
    "isthmus.private.mechanisms": ("OneShot", "Scalar", "PerCell", "SharedNoise", "mechanism"),
    "isthmus.private.ledger": ("Ledger", "Budget"),
    "isthmus.private.secure_sum": ("Member", "Summation", "sum_in_memory", "FixedPoint"),
    "isthmus.service.client": ("Client", "AsyncClient"),
    "isthmus.service.wire": ("Search", "Answer", "Hit", "Evidence", "SiloStatus", "SiloProgress"),
    "isthmus.service.settings": (
        "NodeSettings",
        "Source",
        "EncoderSettings",
        "Models",
        "SharedStatistics",
        "Policy",
        "SiloTraining",
        "CoordinatorSettings",
        "BrokerSettings",
        "BreakerSettings",
        "RequestLimits",
        "Tls",
        "TracingSettings",
    ),
    "isthmus.service.local": ("Federation", "run_federation"),
    "isthmus.integrations.passages": ("Passages", "Passage"),
    "isthmus.report.trackers": ("Tracker", "Tracked", "tracking", "TensorBoard", "MLflow"),
    "isthmus.randomness": ("Streams",),
    "isthmus.errors": (
        "IsthmusError",
        "DataError",
        "ConfigError",
        "MissingExtra",
        "PrivacyError",
        "BudgetExhausted",
        "ProtocolError",
        "FederationError",
        "RoundFailed",
        "IncompatibleUpdate",
        "ServiceError",
        "SiloUnavailable",
        "Refused",
    ),
}
"""Modules with the names to show; none means what a folder's `__init__` holds of it."""


def on_files(files: Any, config: Any) -> Any:
    """Put the page among the site's."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, wanted in CONTENTS.items():
        module = import_module(name)
        parts.append(f"## {name}\n\n{_told(module)}")
        for each in wanted or sorted(getattr(module, "__all__", vars(module))):
            thing = getattr(module, each)
            home = str(getattr(thing, "__module__", ""))
            if home.startswith(name) and (inspect.isclass(thing) or inspect.isroutine(thing)):
                parts.extend(_class(each, thing) if inspect.isclass(thing) else _function(each, thing))
    return "\n\n".join(parts) + "\n"


def _function(name: str, thing: Any, level: str = "###") -> Iterator[str]:
    yield f"{level} {name.rpartition('.')[2]}"
    yield f"```py\n{_signature(name, thing)}\n```"
    yield _told(thing)


def _class(name: str, thing: type) -> Iterator[str]:
    yield f"### {name}"
    if not issubclass(thing, BaseException):
        yield f"```py\n{_signature(name, thing)}\n```"
    yield _told(thing)
    described = [(field, kind, told) for field, kind, told in _fields(thing) if told]
    if described:
        rows = (
            f"| `{name}` | `{_cell(kind)}` | {_cell(html.escape(told, quote=False))} |"
            for name, kind, told in described
        )
        yield "| field | kind | |\n|---|---|---|\n" + "\n".join(rows)
    for each, member in vars(thing).items():
        function = getattr(member, "__func__", member.fget if isinstance(member, property) else member)
        if not each.startswith("_") and inspect.isfunction(function) and function.__doc__:
            shown = each if isinstance(member, property) else _signature(each, function, bound=True)
            yield f"`{' '.join(shown.split())}`"
            yield textwrap.indent(_told(function), "> ", lambda line: True)


def _signature(name: str, thing: Any, *, bound: bool = False) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    given = signature.parameters.values()
    kept = [_written(each) for each in given if not (bound and each.name in ("self", "cls"))]
    back: Any = signature.return_annotation
    back = signature.empty if back is signature.empty or inspect.isclass(thing) else _Written(back)
    shown = str(signature.replace(parameters=kept, return_annotation=back))
    if len(name) + len(shown) > 100 and not bound:
        inside = ",\n    ".join(_separated(kept))
        shown = f"(\n    {inside},\n)" + ("" if back is signature.empty else f" -> {back}")
    return name + shown


def _separated(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Parameters one by one, with the star before those that go by name only."""
    starred = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield str(each)


class _Written(str):
    """Text as it stands in the source, which Python would quote."""

    def __repr__(self) -> str:
        return str(self)


def _written(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter, annotation and default as they stand in the source; long defaults are left out."""
    kind, default = parameter.annotation, parameter.default
    if not (default is parameter.empty or isinstance(default, (int, float, str, bool, tuple, type(None)))):
        default = _Written("…")
    return parameter.replace(annotation=kind if kind is parameter.empty else _Written(kind), default=default)


def _told(thing: Any) -> str:
    """A docstring as Markdown."""
    text = inspect.getdoc(thing) or ""
    if isinstance(thing, ModuleType):
        text = text.partition("\n\n")[0]
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):
        return ""  # the standard library's own words for a dataclass without a docstring
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        if block.lstrip().startswith(">>>"):
            blocks.append(f"```pycon\n{textwrap.dedent(block)}\n```")
        elif block.startswith("    ") or block.lstrip().startswith("|"):
            blocks.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            blocks.append(html.escape(block, quote=False))
    return "\n\n".join(blocks)


def _fields(thing: type) -> list[tuple[str, str, str]]:
    """Fields of a dataclass or a message: name, kind, and the words below it in the source."""
    if not (dataclasses.is_dataclass(thing) or hasattr(thing, "model_fields")):
        return []
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(body, ast.ClassDef)
    found = []
    for at, line in enumerate(body.body):
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and not line.target.id.startswith("_")
        ):
            below = body.body[at + 1] if at + 1 < len(body.body) else None
            words = below.value if isinstance(below, ast.Expr) else None
            told = words.value if isinstance(words, ast.Constant) and isinstance(words.value, str) else ""
            found.append((line.target.id, ast.unparse(line.annotation), " ".join(told.split())))
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
