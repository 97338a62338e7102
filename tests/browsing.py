"""A page in a real browser, for tests: it must not complain, and must ask nobody but its own server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
