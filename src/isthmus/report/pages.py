"""Report pages: one HTML file that needs nothing else, light or dark as the reader has it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import MissingExtra
from isthmus.report.plots import Plot
from isthmus.report.tables import Table

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it: paragraphs, tables and figures, in order."""

    heading: str
    parts: tuple[str | Table | Plot, ...]


@dataclass(frozen=True)
class Page:
    """A report: a title, a lead paragraph, and sections."""

    title: str
    sections: tuple[Section, ...]
    lead: str = ""

    def html(self) -> str:
        """The whole page. Texts are escaped; figures are drawn now."""
        from markupsafe import Markup

        def shown(part: str | Table | Plot) -> tuple[str, object]:
            if isinstance(part, str):
                return "text", part
            if isinstance(part, Table):
                return "table", Markup(part.html())
            try:
                return "plot", (Markup(part.svg()), part.caption)
            except MissingExtra as missing:  # what was measured is worth reading without its figures
                return "text", f"{part.caption} ({missing})"

        sections = [(section.heading, [shown(part) for part in section.parts]) for section in self.sections]
        return _template().render(title=self.title, lead=self.lead, sections=sections)

    def markdown(self) -> str:
        """The same for a repository; a figure is its caption."""
        lines = [f"# {self.title}", *([self.lead] if self.lead else [])]
        for section in self.sections:
            lines.append(f"## {section.heading}")
            for part in section.parts:
                if isinstance(part, Table):
                    lines.append(part.markdown())
                elif isinstance(part, str) or part.caption:
                    lines.append(part if isinstance(part, str) else f"*{part.caption}*")
        return "\n\n".join(lines) + "\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, whole or not at all."""
        from isthmus.tables.files import replacing

        target = Path(path)
        with replacing(target) as stream:
            stream.write(self.html().encode())
        return target


@cache
def _template() -> Template:
    from jinja2 import Environment

    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --ink: #1c2024; --paper: #fff; --faint: #5f6b76; --line: #d8dee4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #14171a; --faint: #9aa5b1; --line: #343b42; }
  figure svg { filter: invert(1) hue-rotate(180deg); }
}
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: left; }
th.number, td.number { text-align: right; }
.interval, .note, figcaption { color: var(--faint); font-size: .85rem; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if lead %}
<p>{{ lead }}</p>
{% endif %}
{% for heading, parts in sections %}
<section>
<h2>{{ heading }}</h2>
{% for kind, part in parts %}
{% if kind == "text" %}
<p>{{ part }}</p>
{% elif kind == "table" %}
<div class="scroll">{{ part }}</div>
{% else %}
<figure>{{ part[0] }}{% if part[1] %}<figcaption>{{ part[1] }}</figcaption>{% endif %}</figure>
{% endif %}
{% endfor %}
</section>
{% endfor %}
</body>
</html>
"""
