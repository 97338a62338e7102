"""Report pages: one HTML file that needs nothing else, light or dark by the reader's setting."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import MissingExtra
from isthmus.report.plots import Plot
from isthmus.report.tables import Table

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Section:
    """A heading with the paragraphs, tables and plots below it, in order."""

    heading: str
    parts: tuple[str | Table | Plot, ...]


@dataclass(frozen=True)
class Page:
    """A report: a title, a lead paragraph with the result, and sections."""

    title: str
    sections: tuple[Section, ...]
    lead: str = ""
    brief: bool = False
    """Whether the page is meant to be sent on: one page in print, plots beside the text."""

    def html(self) -> str:
        """Return the whole page as HTML. Texts are escaped; plots are drawn now."""
        from markupsafe import Markup

        def rendered(part: str | Table | Plot) -> tuple[str, object]:
            if isinstance(part, str):
                return "text", part
            if isinstance(part, Table):
                return "table", Markup(part.html())
            try:
                return "plot", (Markup(part.svg()), part.caption)
            except MissingExtra as missing:  # without the extra, the caption replaces the plot
                return "text", f"{part.caption} ({missing})"

        sections = [
            (section.heading, [rendered(part) for part in section.parts]) for section in self.sections
        ]
        return _template().render(title=self.title, lead=self.lead, brief=self.brief, sections=sections)

    def _repr_html_(self) -> str:
        page = escape(self.html())  # framed, so that its styles do not affect the notebook
        return f'<iframe srcdoc="{page}" sandbox style="width: 100%; height: 40em; border: 0"></iframe>'

    def markdown(self, picture: Callable[[Plot], str | None] = lambda plot: None) -> str:
        """Return the page as Markdown; a plot is its caption, below the file that `picture` puts it in."""
        lines = [f"# {self.title}", *([self.lead] if self.lead else [])]
        for section in self.sections:
            lines.append(f"## {section.heading}")
            for part in section.parts:
                if isinstance(part, Table):
                    lines.append(part.markdown())
                elif isinstance(part, str):
                    lines.append(part)
                else:
                    if (file := picture(part)) is not None:
                        lines.append(f"![{part.caption}]({file})")
                    lines += [f"*{part.caption}*"] if part.caption else []
        return "\n\n".join(lines) + "\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page atomically."""
        from isthmus.files import write_whole

        write_whole(path, self.html().encode())
        return Path(path)


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("isthmus.report", "")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(
        "page.html"
    )
