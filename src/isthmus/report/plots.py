"""Plots: drawn by matplotlib on demand, with the same bytes every time, as SVG or PNG."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLE: Any = {
    "svg.hashsalt": "isthmus",  # the same ids in every run
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 10,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Plot:
    """A plot that is drawn later: `draw` receives the axes."""

    draw: Callable[[Axes], None]
    caption: str = ""
    size: tuple[float, float] = (6.4, 4.0)

    def svg(self) -> str:
        """Return the plot as an `<svg>` element for a page, with letters as paths."""
        text = self._render("svg").decode()
        return text[text.index("<svg") :]

    def _repr_svg_(self) -> str:
        return self.svg()

    def png(self) -> bytes:
        """Return the plot as a PNG."""
        return self._render("png")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plot in the format of the file's extension: .svg or .png."""
        from isthmus.files import write_whole

        target = Path(path)
        form = target.suffix[1:].lower()
        if form not in ("svg", "png"):
            raise ConfigError(
                f"{target.name}: a figure is saved as .svg or .png", key=form, value=target.name
            )
        write_whole(target, self._render(form))
        return target

    def _render(self, form: str) -> bytes:
        try:
            import matplotlib as mpl
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtra("plots", "drawing a figure") from error

        unsigned = {"Creator": None, "Date": None, "Format": None, "Type": None} if form == "svg" else {}
        with mpl.rc_context(_STYLE):
            figure = Figure(figsize=self.size)
            self.draw(figure.add_subplot())
            stream = io.BytesIO()
            figure.savefig(stream, format=form, metadata=unsigned, dpi=160, transparent=form == "svg")
        return stream.getvalue()


@dataclass(frozen=True)
class Series:
    """One curve: values over x, with a band from low to high if these are given."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def line_plot(lines: Mapping[str, Series], *, x: str, y: str, caption: str = "") -> Plot:
    """Plot curves, by name, over one pair of axes."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        for name, line in lines.items():
            (drawn,) = axes.plot(line.x, line.y, label=name)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=drawn.get_color(), alpha=0.2, lw=0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if all(float(value).is_integer() for line in lines.values() for value in line.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # no tick at round 2.5
        if len(lines) > 1:
            axes.legend(frameon=False)

    return Plot(draw, caption)
