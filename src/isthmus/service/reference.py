"""The API's reference as one page: made from its OpenAPI description, without scripts or outside requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.service.templates import template

BOUNDS = {"minimum": "≥", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤"}


def reference(described: Mapping[str, Any]) -> str:
    """The page."""
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True).from_string(template("reference.html"))
    return page.render(**described, bounds=BOUNDS)
