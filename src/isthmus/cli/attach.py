"""`isthmus attach`: a silo over a search engine that runs already."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import PORT, Command, add, add_json, close, say
from isthmus.errors import ConfigError, ServiceError, several

if TYPE_CHECKING:
    from isthmus.service import EngineSettings, Inspected

LEVELS = {"full": "full", "scores": "scores only"}


def _arguments(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "url URL",
        "postgresql://, qdrant://, typesense://, meilisearch://, https:// of OpenSearch; or env:NAME",
    )
    add(parser, "--out DIR", "a new folder, or that of a federation, which gets one more silo", required=True)
    add(parser, "--silo NAME", "the silo's name (that of the table, collection or index)")
    add(parser, "--source NAME", "the table, collection or index (the largest)")
    for name in ("id", "title", "body"):
        add(parser, f"--{name} FIELD", f"the field that is the {name} (by kind and name)")
    for name in ("type", "date"):
        add(
            parser, f"--{name} FIELD", f"the field that is a document's {name}, to filter and count by (none)"
        )
    add(parser, "--allow-field FIELD", "the field that says who may see a document (none)", default="")
    add(parser, "--allow WHO", "who may see documents that do not say so, as group:doctors (all)", default="")
    add(parser, "--link URL", "where people see a document, with {id} in it (nowhere)", default="")
    add(parser, "--search-by NAME", "a tsvector, or the name of a vector (the first there is)")
    add(parser, "--filter TEXT", "which documents the silo has, in the engine's own language (all)")
    add(parser, "--key env:NAME", "the engine's API key", default="")
    add(
        parser,
        "--encoder NAME",
        "the encoder that made the engine's vectors (isthmus encoder list)",
        default="",
    )
    add(parser, "--level", "scores: leave terms uncounted, whatever could be", choices=("full", "scores"))
    add(parser, "--seconds", "that the server has to answer (%(default)s)", type=float, default=5.0)
    add(parser, "--port", "of a new federation's broker (%(default)s)", type=PORT, default=8100)
    add_json(parser, "{silo, engine, source, documents, level, reasons, query, hits, files}")


def _wanted(arguments: argparse.Namespace) -> EngineSettings:
    from isthmus.engines import principals_of
    from isthmus.service import EngineSettings

    return EngineSettings(
        url=arguments.url,
        source=arguments.source or "",
        id=arguments.id or "",
        title=arguments.title or "",
        body=arguments.body or "",
        type=arguments.type or "",
        date=arguments.date or "",
        link=arguments.link,
        allow=principals_of(arguments.allow),
        allow_field=arguments.allow_field,
        search_by=arguments.search_by or "",
        filter=arguments.filter or "",
        key=arguments.key,
        seconds=arguments.seconds,
    )


def _run(arguments: argparse.Namespace) -> None:
    from isthmus.service import (
        Attachment,
        add_silo,
        create_federation,
        encoder_settings,
        inspect_engine,
        literal_secrets,
    )

    with _as_options():
        inspected = inspect_engine(_wanted(arguments), arguments.level or "", arguments.encoder)
    folder, settings = Path(arguments.out), inspected.settings
    name = arguments.silo or _name(settings.source)
    encoder = encoder_settings(arguments.encoder) if arguments.encoder else None
    attachment = Attachment(settings, encoder)
    if (folder / "broker.toml").exists():
        wrote = add_silo(folder, name, attachment)
    else:
        wrote = create_federation(folder, [name], port=arguments.port, engines={name: attachment})
    if literal_secrets(settings):
        say("isthmus: the file has a secret, and only you can read it; env:NAME in its place keeps it out")
    result = _result(name, inspected) | {"files": list(map(str, wrote))}
    for reason in inspected.reasons:
        say(f"isthmus: {reason}")
    close(arguments, f"{name} is a silo over {inspected.noun}", result, wrote, _facts(inspected))
    say(f"isthmus: now run   isthmus node --config {folder / name / 'silo.toml'}")
    say(f"isthmus: and then  isthmus broker --config {folder / 'broker.toml'}")


@contextmanager
def _as_options() -> Iterator[None]:
    """Make errors name options instead of settings, since there is no settings file yet."""
    try:
        yield
    except (ConfigError, ServiceError) as error:
        text = re.sub(
            r"engine\.(\w+)", lambda name: "the URL" if name[1] == "url" else f"--{name[1]}", str(error)
        )
        kind = ConfigError if isinstance(error, ConfigError) else ServiceError
        raise kind(text.replace("--search_by", "--search-by")) from None


def _name(source: str) -> str:
    """A silo's name derived from the name of a table."""
    plain = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in source.rpartition(".")[2])
    return plain.strip("-")[:64] or "silo"


def _result(name: str, inspected: Inspected) -> dict[str, Any]:
    settings = inspected.settings
    return {
        "silo": name,
        "engine": inspected.noun,
        "source": settings.source,
        "documents": inspected.documents,
        "level": settings.level,
        "reasons": list(inspected.reasons),
        "query": inspected.query,
        "hits": list(inspected.hits),
    }


def _facts(inspected: Inspected) -> dict[str, object]:
    settings = inspected.settings
    fields = ", ".join(
        f"{label} {name}"
        for label in ("id", "title", "body", "type", "date")
        if (name := getattr(settings, label))
    )
    facts: dict[str, object] = {
        "source": f"{settings.source}, {several(inspected.documents, 'document')}",
        "fields": fields,
        "level": LEVELS[settings.level],
    }
    if inspected.query:
        first = inspected.hits[0] if inspected.hits else "nothing found"
        facts["tried"] = f"{inspected.query!r}: {first} ({inspected.milliseconds:.0f} ms)"
    if inspected.others:
        facts["also there"] = ", ".join(inspected.others[:10])
    return facts


COMMANDS = (
    Command(
        name="attach",
        summary="write a silo over an engine that runs already: read-only, nothing copied or indexed twice",
        example="""isthmus attach postgresql://reader@db.example.org/papers --out world --silo papers
isthmus attach qdrant://notes.example.org:6333 --key env:NOTES --encoder bge-small --out world""",
        add_arguments=_arguments,
        run=_run,
    ),
)
