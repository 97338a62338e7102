"""External engines that can be attached, by the URL scheme of their address."""

from __future__ import annotations

from importlib import import_module
from urllib.parse import urlsplit

from isthmus.engines.remote import Location, RemoteEngine
from isthmus.errors import ConfigError

SCHEMES = {
    "postgresql": ("postgres", "PostgresEngine"),
    "postgres": ("postgres", "PostgresEngine"),
    "qdrant": ("qdrant", "QdrantEngine"),
    "typesense": ("typesense", "TypesenseEngine"),
    "meilisearch": ("meilisearch", "MeilisearchEngine"),
    "https": ("opensearch", "OpenSearchEngine"),
    "http": ("opensearch", "OpenSearchEngine"),
}
"""The module and the class of the adapter for each scheme."""


def open_remote(location: Location) -> RemoteEngine:
    """The adapter for a location; no request is sent. Raises a ConfigError for an unknown scheme."""
    scheme = urlsplit(location.url).scheme or ("postgresql" if "=" in location.url else "")
    if scheme not in SCHEMES:
        raise ConfigError(
            f"no engine is known by {scheme}://" if scheme else "the address names no engine",
            key="engine.url",
            expected=", ".join(f"{each}://" for each in SCHEMES),
        )
    module, name = SCHEMES[scheme]
    adapter: RemoteEngine = getattr(import_module(f"isthmus.engines.{module}"), name)(location)
    return adapter
