"""The web page, mounted into the broker's app."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import RedirectResponse


def mount(app: FastAPI) -> tuple[str, ...]:
    """Add the page's routes; returns the paths that need no key."""

    @app.get("/", include_in_schema=False)
    async def front() -> RedirectResponse:
        """The page."""
        return RedirectResponse("/v1/docs")

    return ("/",)
