"""How the OpenAPI description of an app tells of errors: as the problem details that they are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI

from isthmus.service import wire

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": wire.Problem, "description": told, "content": {wire.PROBLEM_TYPE: {}}}
    for status, told in (
        (400, "The request cannot be read, or nests too deep."),
        (401, "No API key, or one that is unknown, revoked or expired."),
        (403, "The key lacks the scope, or the silo refused."),
        (404, "No silo or document of that name."),
        (405, "Not a method of this path; Allow lists those."),
        (408, "The body came too slowly."),
        (413, "The body is too large."),
        (415, "The body is not application/json."),
        (421, "The Host header names another server."),
        (422, "The request is not of the documented form."),
        (429, "Too many requests; Retry-After says when."),
        (502, "The silo answered nonsense."),
        (503, "Too many requests at once, or the silo does not answer."),
    )
}
PROBLEMS[431] = {"description": "The head of the request is too large, or came too slowly."}
"""What any request may be answered with."""


def describe_problems(app: FastAPI, open_paths: Collection[str]) -> None:
    """Describe errors as they are: FastAPI would add its own form of a 422.

    The description is written when it is first read, since a server starts sooner without it.
    """
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _mend(plain(), open_paths)
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]


def _mend(described: dict[str, Any], open_paths: Collection[str]) -> None:
    for path, methods in described["paths"].items():
        for told in methods.values():
            if path in open_paths:
                told["security"] = []
            for status, answer in told["responses"].items():
                if wire.PROBLEM_TYPE in answer.get("content", {}):
                    shape = {"$ref": "#/components/schemas/Problem"}
                    answer["content"] = {wire.PROBLEM_TYPE: {"schema": shape}}
                if status == "429":
                    answer["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    for name in ("HTTPValidationError", "ValidationError"):
        described["components"]["schemas"].pop(name, None)
    described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    described["security"] = [{"key": []}]
