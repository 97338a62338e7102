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
from itertools import zip_longest
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


LONG_WORD = 24
"""Letters from which a word, such as a path, is cut before other columns are narrowed to single words."""
ROWS, COLUMNS = 20, 12
"""Largest numbers of rows and columns of a table that a notebook shows."""


class Tabular:
    """Base of values that notebooks show as tables and other libraries read; subclasses define `to_arrow`."""

    def to_arrow(self) -> Any:
        """Return all rows as a pyarrow.Table."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return all rows as a pandas.DataFrame; MissingExtra without pandas, the extra `pandas`."""
        check_extra("pandas", "to_pandas()", "pandas")
        return self.to_arrow().to_pandas()

    def _repr_html_(self) -> str:
        return preview(self.to_arrow())


def preview(table: Any, *, title: str = "", rows: int | None = None) -> str:
    """Return the first rows and columns of a pyarrow.Table as escaped HTML, with the numbers of all.

    `rows` is the number of all rows if the table itself is only a part.
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
_NOTES = textwrap.TextWrapper(80, subsequent_indent="  ", break_on_hyphens=False)
_LATEX_SIGNS = re.compile("[" + re.escape("".join(_LATEX)) + "]")


@dataclass(frozen=True)
class Table(Tabular):
    """Rows of cells under a header, with notes below."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()
    digits: int = 4

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Cell]], *, title: str = "", digits: int = 4) -> Table:
        """Build a table of records; the columns are the keys in order of first appearance."""
        listed = list(records)
        header = tuple(dict.fromkeys(key for record in listed for key in record))
        rows = tuple(tuple(record.get(key) for key in header) for record in listed)
        return cls(header, rows, title, (), digits)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, bold: bool = False, width: int | None = None) -> str:
        """Return aligned columns for a terminal, cells wrapped to `width`; `bold` marks the best cells."""
        cells = [self.header, *(tuple(self.plain(cell) for cell in row) for row in self.rows)]
        widths, numeric = _column_widths(cells, width), self._numeric()
        styles = [
            [False] * len(widths),
            *([bold and getattr(cell, "best", False) for cell in row] for row in self.rows),
        ]
        lines = [_row(*each, widths, numeric) for each in zip(cells, styles, strict=True)]
        lines.insert(1, "  ".join("─" * width for width in widths))
        return "\n".join([*([self.title, ""] if self.title else ()), *lines, *self._wrapped_notes()])

    def markdown(self) -> str:
        """Return a GitHub table."""
        right = ["---:" if numeric else "---" for numeric in self._numeric()]
        rows = [[_pipes(name) for name in self.header], right]
        rows += [[_pipes(_starred(self.plain(cell), cell)) for cell in row] for row in self.rows]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        title = [f"**{self.title}**", ""] if self.title else []
        return "\n".join([*title, *lines, *(part for note in self.notes for part in ("", note))])

    def latex(self) -> str:
        """Return a `table` environment; it needs the package booktabs."""
        columns = "".join("r" if numeric else "l" for numeric in self._numeric())
        header = " & ".join(_tex(name) for name in self.header)
        body = [" & ".join(self._tex_cell(cell) for cell in row) + r" \\" for row in self.rows]
        caption = [rf"\caption{{{_tex(self.title)}}}"] if self.title else []
        notes = [rf"\par\footnotesize {_tex(note)}" for note in self.notes]
        lines = [r"\begin{table}", r"\centering", *caption, rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        lines += [header + r" \\", r"\midrule", *body, r"\bottomrule", r"\end{tabular}", *notes]
        return "\n".join([*lines, r"\end{table}"])

    def html(self) -> str:
        """Return an escaped `<table>` without style of its own."""
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
        """Return all rows as a pyarrow.Table; an interval has columns of its own, `… low` and `… high`."""
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
        """Return which columns hold numbers (and nothing but numbers)."""
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
        """Return a cell as text."""
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
        return [part for note in self.notes for part in _NOTES.wrap(note)]


def _column_widths(cells: Sequence[Sequence[str]], limit: int | None) -> list[int]:
    """Return the width of every column; if their sum is above the limit, the widest are wrapped first.

    An interval in brackets stays whole, as do words that are not long, unless there is no other way.
    """
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    over = 0 if limit is None else sum(widths) + 2 * len(widths) - 2 - limit
    for split, cut in ((_words, LONG_WORD), (str.split, LONG_WORD), (str.split, 6)):
        words = [[part for cell in column for part in split(cell)] for column in columns]
        least = [min(max(map(len, parts), default=0), cut) for parts in words]
        while over > 0 and (foldable := [at for at, width in enumerate(widths) if width > least[at]]):
            widths[max(foldable, key=widths.__getitem__)] -= 1
            over -= 1
    return [_tight(column, width) for column, width in zip(columns, widths, strict=True)]


def _tight(column: Sequence[str], width: int) -> int:
    """Return the least width that needs no more lines than this one, so that cells of a kind wrap alike."""
    most = max(len(_folded(cell, width)) for cell in column)
    least = max((len(word) for cell in column for word in cell.split()), default=1)
    while width > least and max(len(_folded(cell, width - 1)) for cell in column) == most > 1:
        width -= 1
    return max(len(line) for cell in column for line in _folded(cell, width))


def _words(cell: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]|\S+", cell)


def _folded(cell: str, width: int) -> list[str]:
    """Wrap the cell into lines of at most this width; brackets and words that are longer are cut."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    whole = _words(cell)
    for word in (part for each in whole for part in (each.split() if len(each) > width else [each])):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return [line[at : at + width] for line in lines for at in range(0, max(len(line), 1), width)]


def _row(cells: Sequence[str], bold: Sequence[bool], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    folded = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for parts in zip_longest(*folded, fillvalue=""):
        aligned = [
            part.rjust(width) if right else part.ljust(width)
            for part, width, right in zip(parts, widths, numeric, strict=True)
        ]
        styled = [
            text.replace(part, f"\x1b[1m{part}\x1b[0m") if best and part else text
            for text, part, best in zip(aligned, parts, bold, strict=True)
        ]
        lines.append("  ".join(styled).rstrip())
    return "\n".join(lines)


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
"""Renderers of a table, by name."""
