"""The web page: plain files that the broker serves, and nothing from anywhere else.

`static/index.html` is the frame, `app.js` shows one of four views in it (`search.js`, `silos.js`,
`training.js`, `calibration.js`), `dom.js` builds elements, `charts.js` draws, `api.js` asks the broker. All
text reaches the page as text nodes, so nothing a document says can become markup.
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


def mount(app: FastAPI) -> tuple[str, ...]:
    """Add the page's routes; returns the paths that need no key."""
    paths = []
    for file in sorted(files(__name__).joinpath("static").iterdir(), key=lambda file: file.name):
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
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
