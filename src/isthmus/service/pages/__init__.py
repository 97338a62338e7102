"""Web pages: plain files that the broker serves, and nothing from anywhere else.

`static/index.html` is the frame, `app.js` shows one of six views in it (`search.js`, `silos.js`,
`training.js`, `calibration.js`, `documents.js`, `admin.js`), `counts.js` asks for noised counts, `dom.js`
builds elements, `charts.js` draws, `api.js` asks the broker. All text reaches the page as text nodes, so
nothing a document says can become markup. `endpoint.html` and `endpoint.js` are the page on which one person
judges the answers of a search interface.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


ENDPOINT = ("endpoint.html", "endpoint.js")
_SHARED = ("charts.js", "dom.js", "icon.svg", "style.css", "theme.js")


def mount(app: FastAPI, *, endpoint: bool = False) -> tuple[str, ...]:
    """Add the routes of the broker's page, or of that of an endpoint; returns the paths that need no key."""
    paths = []
    for file in sorted(files(__name__).joinpath("static").iterdir(), key=lambda file: file.name):
        if file.name not in (*ENDPOINT, *_SHARED) if endpoint else file.name in ENDPOINT:
            continue
        path = "/" if file.name.endswith(".html") else f"/static/{file.name}"
        _serve(app, path, file.read_bytes(), _TYPES["." + file.name.rpartition(".")[2]])
        paths.append(path)
    return tuple(paths)


def _serve(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    """One file, from memory; a browser that has it already is told so."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}

    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    app.add_api_route(path, file, include_in_schema=False, methods=["GET", "HEAD"], name=f"page {path}")
