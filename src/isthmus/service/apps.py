"""Construction of the service's two apps, broker and node: their errors are problem details, in OpenAPI too.

The OpenAPI document is generated when it is first read, so that a server starts sooner.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from isthmus import __version__
from isthmus.errors import ServiceError
from isthmus.service import wire
from isthmus.service.limits import problem_of
from isthmus.service.templates import template

Answers = dict[int | str, dict[str, Any]]
BOUNDS = {"minimum": "≥", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤"}


def problems(described: Mapping[int, str]) -> Answers:
    """Return OpenAPI responses with problem details, by status."""
    return {
        status: {"model": wire.Problem, "description": meaning, "content": {wire.PROBLEM_TYPE: {}}}
        for status, meaning in described.items()
    }


PROBLEMS = problems(
    {
        400: "The request cannot be read, or nests too deep.",
        401: "No API key, or one that is unknown, revoked or expired.",
        403: "The key lacks the scope, or the silo refused.",
        404: "No silo or document of that name.",
        405: "Not a method of this path; Allow lists those.",
        408: "The body came too slowly.",
        413: "The body is too large.",
        415: "The body is not application/json.",
        421: "The Host header names another server.",
        422: "The request is not of the documented form.",
        429: "Too many requests; Retry-After says when.",
        502: "The silo answered nonsense.",
        503: "Too many requests at once, or the silo does not answer.",
    }
) | {431: {"description": "The head of the request is too large, or came too slowly."}}
"""Error responses that any request may get."""
METRICS: Mapping[str, Any] = {
    "response_class": Response,
    "responses": PROBLEMS | {200: {"content": {"text/plain": {}}}},
}
"""Route options of a path with metrics for Prometheus."""


def new_app(title: str, open_paths: Collection[str], **options: Any) -> FastAPI:
    """Return an app without routes; `open_paths` need no key."""
    app = FastAPI(
        title=title,
        version=__version__,
        openapi_url=f"{wire.PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # behind a TLS proxy, redirects would lead to http: with query and key
        **options,
    )

    async def answer(request: Request, error: Exception) -> Response:
        return problem_of(error).response()

    for kind in (HTTPException, RequestValidationError, ServiceError, Exception):
        app.add_exception_handler(kind, answer)
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _mend(plain(), open_paths)
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]
    return app


@dataclass(frozen=True)
class ShortWay:
    """An app with one POST path that bypasses FastAPI's routing and dependencies. All other requests, and
    those that are not valid, go to the app."""

    app: FastAPI
    path: str
    model: type[BaseModel]
    handler: Callable[[Any, Request], Awaitable[Response]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose body must come in one message."""
        if scope.get("path") != self.path or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        message = await receive()

        async def again() -> Message:
            nonlocal message
            first, message = message, {}
            return first or await receive()

        try:
            if dict(scope["headers"]).get(b"content-type") != b"application/json":
                return await self.app(scope, again, send)
            body = self.model.model_validate_json(message["body"])
        except ValidationError:
            return await self.app(scope, again, send)
        scope["app"], scope["route"] = self.app, self
        response = await self.handler(body, Request(scope, receive, send))
        return await response(scope, receive, send)


def _mend(described: dict[str, Any], open_paths: Collection[str]) -> None:
    """Replace FastAPI's schema of a 422 by problem details in the OpenAPI document."""
    for path, methods in described["paths"].items():
        for operation in methods.values():
            if path in open_paths:
                operation["security"] = []
            for status, answer in operation["responses"].items():
                if wire.PROBLEM_TYPE in answer.get("content", {}):
                    shape = {"$ref": "#/components/schemas/Problem"}
                    answer["content"] = {wire.PROBLEM_TYPE: {"schema": shape}}
                if status == "429":
                    answer["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    for name in ("HTTPValidationError", "ValidationError"):
        described["components"]["schemas"].pop(name, None)
    described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    described["security"] = [{"key": []}]


def reference(app: FastAPI) -> str:
    """Render the app's OpenAPI document as one page, without scripts or external requests."""
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True).from_string(template("reference.html"))
    return page.render(**app.openapi(), bounds=BOUNDS)
