"""The sentences of a report: macros of a template, filled with the results of one run."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


class Prose:
    """The macros of one file in `templates/`, each a paragraph; `prose("lead", seeds=3)` renders one."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __call__(self, paragraph: str, **facts: Any) -> str:
        """Render one paragraph on one line; a missing value raises an error instead of leaving a gap."""
        macro = getattr(_environment().get_template(self.file).module, paragraph)
        return " ".join(str(macro(**facts)).split())


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("isthmus_reproduce"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
    )
    environment.filters["fixed"] = lambda value, digits: f"{value:.{digits}f}"
    environment.filters["signed"] = lambda value, digits: f"{value:+.{digits}f}"
    environment.filters["short"] = lambda value, digits=6: f"{value:.{digits}g}"
    environment.filters["percent"] = lambda value: f"{value:.0%}"
    environment.filters["thousands"] = lambda value: f"{value:,.0f}"
    return environment
