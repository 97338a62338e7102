"""What is shown: tables in four forms, figures, pages, progress."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from isthmus.errors import ConfigError
from isthmus.report import (
    FORMS,
    Estimate,
    Page,
    Plot,
    Progress,
    Section,
    Series,
    Table,
    box,
    line_plot,
    progress,
    summary,
)
from isthmus.report import progress as shown

TABLE = Table(
    ("run", "nDCG@10", "queries", "note"),
    (
        ("bm25_base", Estimate(0.4795, 0.41, 0.56), 43, None),
        ("a|b <dense>", Estimate(0.732, 0.68, 0.78, "a", True), 12345, "50 % & more"),
    ),
    title="Two runs",
    notes=("nDCG@10: Σ gain ≤ 1",),
)


class TestTable:
    def test_text(self) -> None:
        assert TABLE.text().splitlines() == [
            "Two runs",
            "",
            "run                        nDCG@10  queries  note",
            "───────────  ─────────────────────  ───────  ───────────",
            "bm25_base     0.4795 [0.410 0.560]       43  –",
            "a|b <dense>  0.7320ᵃ [0.680 0.780]   12,345  50 % & more",
            "nDCG@10: Σ gain ≤ 1",
        ]
        assert str(TABLE) == TABLE.text()

    def test_bold_changes_nothing_but_the_weight(self) -> None:
        bold = TABLE.text(bold=True)
        assert "\x1b[1m0.7320ᵃ [0.680 0.780]\x1b[0m" in bold
        assert re.sub(r"\x1b\[\d*m", "", bold) == TABLE.text()

    def test_markdown(self) -> None:
        lines = TABLE.markdown().splitlines()
        assert lines[2:4] == ["| run | nDCG@10 | queries | note |", "| --- | ---: | ---: | --- |"]
        assert lines[5] == r"| a\|b <dense> | **0.7320ᵃ [0.680 0.780]** | 12,345 | 50 % & more |"

    def test_latex(self) -> None:
        text = TABLE.latex()
        assert r"bm25\_base & 0.4795 [0.410 0.560] & 43 & -- \\" in text
        assert r"\textbf{0.7320}$^{a}$ [0.680 0.780] & 12,345 & 50 \% \& more \\" in text
        assert r"$\Sigma$ gain $\leq$ 1" in text
        assert text.count(r"\begin{") == text.count(r"\end{") == 2
        assert r"\begin{tabular}{lrrl}" in text

    def test_html_is_well_formed_and_escaped(self) -> None:
        text = TABLE.html()
        assert "a|b &lt;dense&gt;" in text
        assert "<b>0.7320</b><sup>a</sup>" in text
        assert balanced(text)

    def test_every_form_by_name(self) -> None:
        assert set(FORMS) == {"text", "markdown", "latex", "html"}
        assert FORMS["markdown"](TABLE) == TABLE.markdown()

    def test_of_records(self) -> None:
        table = Table.of([{"a": 1, "b": "x"}, {"a": 2, "c": 0.5}], digits=2)
        assert table.header == ("a", "b", "c")
        assert table.text().splitlines()[-1] == "2  –  0.50"

    def test_an_empty_table(self) -> None:
        empty = Table(("run", "value"), ())
        assert all(form(empty) for form in FORMS.values())


class TestPlots:
    PLOT = line_plot(
        {"a": Series([1, 2, 3], [1, 3, 2], [0, 2, 1], [2, 4, 3]), "b": Series([1, 2, 3], [2, 2, 2])},
        x="round",
        y="nDCG@10",
        caption="Two curves",
    )

    def test_the_same_bytes_every_time(self, tmp_path: Path) -> None:
        assert self.PLOT.svg() == self.PLOT.svg()
        assert self.PLOT.svg().startswith("<svg")
        one, two = self.PLOT.save(tmp_path / "one.png"), self.PLOT.save(tmp_path / "two.png")
        assert one.read_bytes() == two.read_bytes()
        assert one.read_bytes()[:4] == b"\x89PNG"

    def test_the_name_decides_the_form(self, tmp_path: Path) -> None:
        assert b"<svg" in self.PLOT.save(tmp_path / "curve.svg").read_bytes()
        with pytest.raises(ConfigError, match=r"\.svg or \.png"):
            self.PLOT.save(tmp_path / "curve.jpeg")
        assert [path.name for path in tmp_path.iterdir()] == ["curve.svg"]

    def test_drawing_leaves_no_style_behind(self) -> None:
        import matplotlib as mpl

        before = dict(mpl.rcParams)
        Plot(lambda axes: axes.plot([1, 2], [2, 1])).png()
        assert dict(mpl.rcParams) == before


class TestPage:
    PAGE = Page(
        "A <report>",
        (Section("Results", ("Text & more.", TABLE, TestPlots.PLOT)), Section("End", ())),
        "Lead.",
    )

    def test_needs_nothing_else(self) -> None:
        text = self.PAGE.html()
        assert balanced(text)
        assert "p { white-space: pre-wrap; }" in text, "the lines of an explanation stay lines"
        loads = re.findall(r"<(?:script|link|img|iframe)\b|@import|url\((?!#)", text)
        assert loads == []
        names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        assert set(re.findall(r"https?://[^\"' )<]+", text)) <= names

    def test_light_dark_and_escaped(self) -> None:
        text = self.PAGE.html()
        assert "prefers-color-scheme: dark" in text
        assert "<h1>A &lt;report&gt;</h1>" in text
        assert "<p>Text &amp; more.</p>" in text
        assert "<figcaption>Two curves</figcaption>" in text

    def test_is_written_whole(self, tmp_path: Path) -> None:
        path = self.PAGE.save(tmp_path / "report.html")
        assert path.read_text(encoding="utf-8") == self.PAGE.html()
        assert list(tmp_path.iterdir()) == [path]


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class TestProgress:
    def test_passes_items_on_and_is_quiet_off_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert list(progress(range(5), label="counting")) == [0, 1, 2, 3, 4]
        assert list(progress(iter("ab"), total=2, label="letters")) == ["a", "b"]
        assert capsys.readouterr() == ("", "")

    def test_is_quiet_when_the_work_is_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        before = threading.active_count()
        assert list(progress(range(100), label="short")) == list(range(100))
        assert terminal.getvalue() == ""
        deadline = time.monotonic() + 60
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() <= before

    def test_appears_on_long_work_with_notes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys.modules[Progress.__module__], "PATIENCE", 0.0)
        with Progress("training", 3) as outer:
            wait_for(lambda: "training" in terminal.getvalue())
            outer.advance(note="nDCG@10 0.41")
            for _ in progress(range(2), label="rounds"):
                wait_for(lambda: "rounds" in terminal.getvalue())
            wait_for(lambda: "nDCG@10 0.41" in terminal.getvalue())
        assert "1/3" in terminal.getvalue()
        with Progress("learning") as bar:
            bar.advance(0, note="fits")
            wait_for(lambda: "fits" in terminal.getvalue())
        assert "/?" not in terminal.getvalue(), "what has no steps is not counted"

    def test_long_work_says_on_lines_how_far_it_is_where_there_is_no_terminal(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys.modules[Progress.__module__], "PAUSE", 0.01)
        with Progress("folds", 3, lines=True) as bar:
            wait_for(lambda: "folds: 0 of 3 after 0:0" in stream.getvalue())
            bar.advance(note="fold 0")
            wait_for(lambda: re.search(r"folds: 1 of 3 after 0:0\d, about 0:0\d left", stream.getvalue()))
        assert ", fold 0" in stream.getvalue()
        with Progress("learning", lines=True) as bar:  # of what has no steps, no number
            bar.advance(0, note="fits")
            wait_for(lambda: "learning: after 0:00, fits" in stream.getvalue())
        assert "\r" not in stream.getvalue()

    def test_an_error_inside_closes_the_bar(self) -> None:
        def doomed() -> None:
            with Progress("doomed", 2) as bar:
                bar.advance()
                raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            doomed()

    def test_a_generator_left_early_is_closed(self) -> None:
        for item in shown(range(10), label="left"):
            if item == 3:
                break
        assert list(progress(range(2), label="next")) == [0, 1]


def test_summary_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    summary("done", {"nDCG@10": "0.413", "queries": 229}, wrote=["out/run.txt", Path("out/report.html")])
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "out/run.txt" in lines[3]
    assert "out/report.html" in lines[4]


def test_a_summary_fits_the_terminal_and_breaks_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    fact = "ECE 0.0259; a perfect model: 0.0198, at most 0.0281 in 95 % (2,350 hits)"
    summary("calibrated", {"first ten": fact, "none": ""}, wrote=["a.run"])
    lines = capsys.readouterr().err.splitlines()
    assert {len(line) for line in lines} <= set(range(81))
    words = " ".join(lines[1:-1]).replace("│", "").split()
    assert " ".join(words) == f"first ten {fact} none wrote a.run"
    assert lines[2].startswith("│            ")
    path = "/".join(["my folder"] * 12)
    summary("done", {}, wrote=[path])
    assert f"│ wrote  {path}  │" in capsys.readouterr().err.splitlines()


def test_box_without_lines() -> None:
    assert box("done", []).splitlines() == ["╭─ done ──╮", "╰─────────╯"]


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never appeared"
        time.sleep(0.02)


def balanced(text: str) -> bool:
    """Every tag that opens also closes, in order."""
    void = {
        "meta",
        "br",
        "use",
        "path",
        "rect",
        "circle",
        "clippath",
        "g",
        "defs",
        "style",
        "svg",
        "metadata",
    }

    class Reader(HTMLParser):
        stack: list[str] = []  # noqa: RUF012
        fine = True

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in void:
                self.stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in void and (not self.stack or self.stack.pop() != tag):
                self.fine = False

    reader = Reader()
    reader.stack = []
    reader.feed(text)
    return reader.fine and not reader.stack
