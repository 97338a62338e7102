"""A table as a value, shown as terminal text, Markdown, LaTeX or HTML.

>>> print(Table(("run", "nDCG@10"), (("bm25", Estimate(0.4795, 0.42, 0.54)), ("dense", 0.732)), digits=3))
run              nDCG@10
─────  ─────────────────
bm25   0.479 [0.42 0.54]
dense              0.732
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from isthmus.errors import check_extra


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval, marks such as those of significance, and whether it is the best."""

    value: float
    low: float | None = None
    high: float | None = None
    marks: str = ""
    best: bool = False


ROWS, COLUMNS = 20, 12
"""How much of a table a notebook shows."""


class Tabular:
    """What a notebook shows as a table and other libraries read; a subclass says how with `to_arrow`."""

    def to_arrow(self) -> Any:
        """All rows as a pyarrow.Table."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """All rows as a pandas.DataFrame. MissingExtra where pandas, the extra `pandas`, is not installed."""
        check_extra("pandas", "to_pandas()", "pandas")
        return self.to_arrow().to_pandas()

    def _repr_html_(self) -> str:
        return preview(self.to_arrow())


def preview(table: Any, *, title: str = "", rows: int | None = None) -> str:
    """The first rows and columns of a pyarrow.Table as escaped HTML, and how many there are in all.

    `rows` is their number where the table itself is a part of what there is.
    """
    total = table.num_rows if rows is None else rows
    part = table.slice(0, ROWS).select(range(min(table.num_columns, COLUMNS)))
    cells = tuple(zip(*(column.to_pylist() for column in part.columns), strict=True))
    notes = [f"The first {part.num_rows:,} of {total:,} rows."] if total > part.num_rows else []
    if table.num_columns > COLUMNS:
        notes.append(f"The first {COLUMNS} of {table.num_columns:,} columns.")
    return Table(tuple(part.column_names), cells, title, tuple(notes)).html()


Cell = str | int | float | None | Estimate

_SUPERSCRIPT = str.maketrans("abcdefghijklmnoprstuvwxyz0123456789", "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ⁰¹²³⁴⁵⁶⁷⁸⁹")
_MATH = {
    "Σ": "Sigma", "Π": "Pi", "α": "alpha", "β": "beta", "ε": "varepsilon", "τ": "tau", "·": "cdot",
    "×": "times", "±": "pm", "≤": "leq", "≥": "geq", "√": "surd", "⌊": "lfloor", "⌋": "rfloor",
}  # fmt: skip
_LATEX = {
    **{sign: rf"$\{name}$" for sign, name in _MATH.items()},
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "…": r"\dots{}",
    "–": "--",
}
_LATEX_SIGNS = re.compile("[" + re.escape("".join(_LATEX)) + "]")


@dataclass(frozen=True)
class Table(Tabular):
    """Rows of cells under a header; notes stand below it."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()
    digits: int = 4

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Cell]], *, title: str = "", digits: int = 4) -> Table:
        """A table of records; the columns are the keys in order of first appearance."""
        listed = list(records)
        header = tuple(dict.fromkeys(key for record in listed for key in record))
        rows = tuple(tuple(record.get(key) for key in header) for record in listed)
        return cls(header, rows, title, (), digits)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, bold: bool = False) -> str:
        """Aligned columns for a terminal; `bold` shows the best cells so, with control codes."""
        cells = [self.header, *(tuple(self.plain(cell) for cell in row) for row in self.rows)]
        widths = [max(len(row[at]) for row in cells) for at in range(len(self.header))]
        numeric = self._numeric()
        lines = [_aligned(self.header, widths, numeric), "  ".join("─" * width for width in widths)]
        for row, texts in zip(self.rows, cells[1:], strict=True):
            line = _aligned(texts, widths, numeric)
            lines.append(_embolden(line, row, texts) if bold else line)
        return "\n".join([*([self.title, ""] if self.title else ()), *lines, *self._wrapped_notes()])

    def markdown(self) -> str:
        """A GitHub table."""
        right = ["---:" if numeric else "---" for numeric in self._numeric()]
        rows = [[_pipes(name) for name in self.header], right]
        rows += [[_pipes(_starred(self.plain(cell), cell)) for cell in row] for row in self.rows]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        title = [f"**{self.title}**", ""] if self.title else []
        return "\n".join([*title, *lines, *(part for note in self.notes for part in ("", note))])

    def latex(self) -> str:
        """A `table` environment; needs the package booktabs."""
        columns = "".join("r" if numeric else "l" for numeric in self._numeric())
        header = " & ".join(_tex(name) for name in self.header)
        body = [" & ".join(self._tex_cell(cell) for cell in row) + r" \\" for row in self.rows]
        caption = [rf"\caption{{{_tex(self.title)}}}"] if self.title else []
        notes = [rf"\par\footnotesize {_tex(note)}" for note in self.notes]
        lines = [r"\begin{table}", r"\centering", *caption, rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        lines += [header + r" \\", r"\midrule", *body, r"\bottomrule", r"\end{tabular}", *notes]
        return "\n".join([*lines, r"\end{table}"])

    def html(self) -> str:
        """A `<table>` without style of its own, escaped."""
        kinds = ["number" if numeric else "word" for numeric in self._numeric()]
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        head = "".join(
            f'<th scope="col" class="{kind}">{escape(name)}</th>'
            for name, kind in zip(self.header, kinds, strict=True)
        )
        body = "\n".join(
            "<tr>"
            + "".join(
                f'<td class="{kind}">{self._html_cell(cell)}</td>'
                for cell, kind in zip(row, kinds, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in self.notes)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>{notes}"

    def to_arrow(self) -> Any:
        """All rows as a pyarrow.Table; an interval has columns of its own, `… low` and `… high`."""
        import pyarrow as pa

        columns: dict[str, list[Any]] = {}
        for at, name in enumerate(self.header):
            cells = [row[at] for row in self.rows]
            columns[name] = [cell.value if isinstance(cell, Estimate) else cell for cell in cells]
            for bound in ("low", "high"):
                bounds = [getattr(cell, bound, None) for cell in cells]
                if any(value is not None for value in bounds):
                    columns[f"{name} {bound}"] = bounds
        return pa.table(columns)

    def _repr_html_(self) -> str:
        left_out = len(self.rows) - ROWS
        note = (f"The first {ROWS} of {len(self.rows):,} rows.",) if left_out > 0 else ()
        return replace(self, rows=self.rows[:ROWS], notes=(*note, *self.notes)).html()

    def _numeric(self) -> list[bool]:
        """Which columns hold numbers (and nothing but numbers)."""
        columns = [[row[at] for row in self.rows] for at in range(len(self.header))]
        return [
            any(cell is not None for cell in column) and not any(isinstance(cell, str) for cell in column)
            for column in columns
        ]

    def _number(self, value: float | int) -> str:
        return f"{value:,}" if isinstance(value, int) else f"{value:.{self.digits}f}"

    def _interval(self, cell: Estimate) -> str:
        if cell.low is None or cell.high is None:
            return ""
        digits = max(self.digits - 1, 1)
        return f" [{cell.low:.{digits}f} {cell.high:.{digits}f}]"

    def plain(self, cell: Cell) -> str:
        """A cell as text."""
        if cell is None:
            return "–"
        if isinstance(cell, Estimate):
            marks = cell.marks.translate(_SUPERSCRIPT)
            return f"{self._number(cell.value)}{marks}{self._interval(cell)}"
        return cell if isinstance(cell, str) else self._number(cell)

    def _tex_cell(self, cell: Cell) -> str:
        if not isinstance(cell, Estimate):
            return _tex(self.plain(cell))
        number = self._number(cell.value)
        number = rf"\textbf{{{number}}}" if cell.best else number
        marks = rf"$^{{{cell.marks}}}$" if cell.marks else ""
        return f"{number}{marks}{self._interval(cell)}"

    def _html_cell(self, cell: Cell) -> str:
        if not isinstance(cell, Estimate):
            return escape(self.plain(cell))
        number = self._number(cell.value)
        number = f"<b>{number}</b>" if cell.best else number
        marks = f"<sup>{escape(cell.marks)}</sup>" if cell.marks else ""
        interval = self._interval(cell).strip()
        return f"{number}{marks}" + (f' <span class="interval">{interval}</span>' if interval else "")

    def _wrapped_notes(self) -> list[str]:
        return [part for note in self.notes for part in textwrap.wrap(note, 80, subsequent_indent="  ")]


def _aligned(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    parts = [
        f"{cell:>{width}}" if right else f"{cell:<{width}}"
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return "  ".join(parts).rstrip()


def _embolden(line: str, row: Sequence[Cell], texts: Sequence[str]) -> str:
    at = 0
    for cell, text in zip(row, texts, strict=True):
        at = line.index(text, at)
        if isinstance(cell, Estimate) and cell.best:
            line = f"{line[:at]}\x1b[1m{text}\x1b[0m{line[at + len(text) :]}"
            at += 8
        at += len(text)
    return line


def _starred(text: str, cell: Cell) -> str:
    return f"**{text}**" if isinstance(cell, Estimate) and cell.best else text


def _pipes(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", r"\|").replace("\n", " ")


def _tex(text: str) -> str:
    return _LATEX_SIGNS.sub(lambda match: _LATEX[match[0]], text)


FORMS: dict[str, Callable[[Table], str]] = {
    "text": Table.text,
    "markdown": Table.markdown,
    "latex": Table.latex,
    "html": Table.html,
}
"""The ways to show a table, by name."""
