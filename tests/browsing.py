"""A page in a real browser, for tests: it must not complain, must ask nobody but its own server, must cut
nothing off and must be usable by everybody, as far as a program can tell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_servers.packages import NotToBeHad, program

CUT = """() => {
  const cut = [...document.querySelectorAll("main *, header *, footer *")].filter((each) => {
    if (each.closest(".unseen, svg, thead, .track, article.text") || !each.checkVisibility()) return false;
    const box = each.getBoundingClientRect();
    const hides = getComputedStyle(each).overflowX !== "visible" && each.tagName !== "INPUT";
    return box.right > innerWidth + 1 || box.left < -1 || (hides && each.scrollWidth > each.clientWidth + 1);
  });
  const wide = document.documentElement.scrollWidth > innerWidth ? ["the page itself"] : [];
  return wide.concat(cut.map((each) => `${each.tagName}.${each.className} ${each.textContent.slice(0, 60)}`));
}"""
"""Names what reaches beyond the window, or has more text than it shows."""
UNUSABLE = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .filter((each) => ["serious", "critical"].includes(each.impact))
  .map((each) => each.id + each.nodes.map((node) => `${node.target.join(" ")}: ${node.failureSummary}`))"""


WIDTHS = (1280, 390)
DARK = "matchMedia('(prefers-color-scheme: dark)').matches"


def look_over(page: Any, state: str, widths: tuple[int, ...] = WIDTHS) -> None:
    """Fails where something is cut off at any of these widths, or axe finds anything serious or critical.

    With ISTHMUS_STATES, a folder, a picture of the whole page is saved there for every state and width.
    """
    before, missing = page.viewport_size, ""
    try:
        rules = program("axe").read_text(encoding="utf-8")
    except NotToBeHad as reason:
        rules, missing = "window.axe = { run: () => ({ violations: [] }) }", str(reason)
    if not page.evaluate("'axe' in window"):  # by the developers' tools: the page's policy allows no script
        page.evaluate(rules)
    for width in widths:
        page.set_viewport_size({"width": width, "height": 850})
        if folder := os.environ.get("ISTHMUS_STATES"):
            name = f"{state}-{'dark' if page.evaluate(DARK) else 'light'}-{width}.png".replace(" ", "_")
            page.screenshot(path=Path(folder) / name, full_page=True)
        assert page.evaluate(CUT) == [], (state, width)
        assert page.evaluate(UNUSABLE) == [], (state, width)
    page.set_viewport_size(before)
    if missing:
        pytest.skip(f"no axe-core: {missing}")


@contextmanager
def opened(
    browser: Any, address: str, *, patience: float, others: tuple[str, ...] = (), **context: Any
) -> Iterator[Any]:
    """The page at this address; fails when the browser complained or asked anybody but `others`."""
    home = address.partition("/#")[0]
    complaints: list[str] = []
    window = browser.new_context(**context)
    page = window.new_page()
    page.set_default_timeout(patience * 1000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda told: complaints.append(told.text) if "Security Policy" in told.text else None)
    page.on(
        "request",
        lambda sent: None if sent.url.startswith((home, "data:", *others)) else complaints.append(sent.url),
    )
    page.goto(address)
    try:
        yield page
        assert complaints == []
    finally:
        window.close()


def focused(page: Any) -> str:
    """What has the focus, by the name that people hear or see."""
    name: str = page.evaluate("(e => e.ariaLabel || e.textContent.trim() || e.id)(document.activeElement)")
    return name


def tab_to(page: Any, name: str | tuple[str, ...], key: str = "Tab") -> None:
    """Press Tab until this has the focus, which is seen."""
    for _ in range(80):
        page.keyboard.press(key)
        if focused(page).startswith(name):
            outline = page.evaluate(
                "(e => getComputedStyle(e.closest('.pick') ?? e).outlineStyle)(document.activeElement)"
            )
            assert outline != "none", name
            return
    pytest.fail(f"no way to {name} by {key}")


def press(page: Any, name: str | tuple[str, ...], key: str = "Tab") -> None:
    """Press a button or follow a link by keyboard alone."""
    tab_to(page, name, key)
    page.keyboard.press("Enter")
