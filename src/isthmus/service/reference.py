"""The API's reference as one page: made from its OpenAPI description, without scripts or outside requests."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --link: light-dark(#0b57a4, #8cc1ff); }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { border-top: 1px solid var(--line); padding-top: 1rem; margin-top: 2rem; }
code { font-family: ui-monospace, monospace; background: var(--soft); padding: 0 .25em; border-radius: 3px; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; }
a { color: var(--link); }
"""


def reference(described: Mapping[str, Any]) -> str:
    """The page."""
    about = described["info"]
    paths = "".join(
        _operation(path, method, told)
        for path, methods in described["paths"].items()
        for method, told in methods.items()
    )
    models = described.get("components", {}).get("schemas", {})
    shapes = "".join(_model(name, model) for name, model in sorted(models.items()))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(about["title"])}</title><link rel="stylesheet" href="/v1/docs.css"></head><body>'
        f"<h1>{escape(about['title'])}</h1><p>{escape(about.get('description', ''))}</p>"
        '<p>For programs: <a href="/v1/openapi.json">openapi.json</a>.</p>'
        f"{paths}<h1>Shapes</h1>{shapes}</body></html>"
    )


def _operation(path: str, method: str, told: Mapping[str, Any]) -> str:
    body = told.get("requestBody", {}).get("content", {})
    takes = "".join(
        f"<p>Takes {_shape(part['schema'])} as <code>{escape(kind)}</code>.</p>"
        for kind, part in body.items()
    )
    answers = "".join(_answer(status, answer) for status, answer in sorted(told.get("responses", {}).items()))
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
        f"<p>{escape(told.get('description', ''))}</p>{takes}"
        "<table><thead><tr><th>status</th><th>meaning</th><th>body</th></tr></thead>"
        f"<tbody>{answers}</tbody></table>"
    )


def _answer(status: str, answer: Mapping[str, Any]) -> str:
    shapes = ", ".join(_shape(part.get("schema", {})) for part in answer.get("content", {}).values())
    told = escape(answer.get("description", ""))
    return f"<tr><td><code>{escape(status)}</code></td><td>{told}</td><td>{shapes}</td></tr>"


def _model(name: str, model: Mapping[str, Any]) -> str:
    required = set(model.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(key)}</code></td><td>{_shape(shape)}</td>"
        f"<td>{'always' if key in required else 'may be left out'}</td></tr>"
        for key, shape in model.get("properties", {}).items()
    )
    told = escape(model.get("description", "")).replace("\n\n", "</p><p>")
    return f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{told}</p><table><tbody>{rows}</tbody></table>'


def _shape(shape: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in shape:
        name = escape(str(shape["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in shape:
        return " or ".join(_shape(choice) for choice in shape["anyOf"])
    if "enum" in shape or "const" in shape:
        return " | ".join(
            f"<code>{escape(str(value))}</code>" for value in shape.get("enum", [shape.get("const")])
        )
    kind = shape.get("type", "any")
    if kind == "array":
        return f"list of {_shape(shape.get('items', {}))}"
    if kind == "object" and isinstance(shape.get("additionalProperties"), Mapping):
        return f"name → {_shape(shape['additionalProperties'])}"
    names = {"minimum": "≥", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤"}
    bounds = [f"{sign} {shape[name]}" for name, sign in names.items() if name in shape]
    return escape(" ".join([{"null": "nothing"}.get(kind, kind), *bounds]))
