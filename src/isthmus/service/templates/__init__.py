"""Texts that the service writes or runs as they are: configuration, schemas of its databases, pages."""

from __future__ import annotations

from importlib.resources import files


def template(name: str) -> str:
    """The text of a file beside this one."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
