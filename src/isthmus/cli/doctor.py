"""`isthmus doctor`: what is installed or missing here; with --federation, problems of every silo."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus import __version__
from isthmus.cli.command import Command, add, add_json, folded, print_json, say
from isthmus.cli.judgements import add_broker, broker_client
from isthmus.errors import ConfigError, plain, several

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from isthmus.service import LearningView, SiloList

PURPOSES = {
    "train": "training across silos (Flower)",
    "plots": "figures",
    "ray": "training on a Ray cluster",
    "dense": "encoders of texts",
    "trees": "LambdaMART",
    "postgres": "PostgreSQL as store or source",
    "pdf": "PDF documents",
    "pandas": "tables as data frames",
    "mcp": "search for assistants",
    "langchain": "a retriever for LangChain",
    "llamaindex": "a retriever for LlamaIndex",
    "haystack": "a component for Haystack",
    "pyterrier": "a transformer for PyTerrier",
    "irds": "collections of ir_datasets by name",
    "fast": "a quicker event loop of servers",
    "tracing": "traces of searches (OpenTelemetry)",
}
"""The purpose of each extra; a node, a broker and ranking files need none."""


BETTER = (
    "isthmus encoder add bge-small: beside BM25, with equal shares, nDCG@10 of .418 instead of .372 on cran, "
    ".470 instead of .417 on cisi, .504 instead of .436 on npl (four silos; docs/search.md)"
)
"""The measured gain of a better encoder."""


def examine(config: str | None = None) -> dict[str, Any]:
    """Examine the installation, and a node if its settings are named. Returns a record ready for JSON."""
    needed, extras = _requirements()
    return {
        "isthmus": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": list(_installed(needed)),
        "extras": [_extra(name, lines) for name, lines in extras.items()],
        "cores": _cores(),
        "blas": _blas(),
        "encoders": _encoders(),
        "data": _data(),
        "cache": _cache(),
    } | ({} if config is None else {"node": _node(config)})


def _node(config: str) -> dict[str, Any]:
    """A node's encoder, and advice if it is missing or a better one exists; raises the errors of its
    settings."""
    from isthmus.encoders import installed_encoders
    from isthmus.service import read_node

    settings = read_node(config)
    wanted = settings.encoder
    name = wanted.name if wanted.path is None else str(wanted.path)
    advice = ""
    if wanted.kind in ("lsa", "none") and wanted.path is None:
        advice = BETTER + '; then [encoder] kind = "encoder", name = "bge-small" in every silo\'s settings'
    elif wanted.path is not None and not wanted.path.exists():
        advice = "it is not there: the node does not start without it"
    elif wanted.path is None and name not in {encoder.name for encoder in installed_encoders()}:
        advice = "" if "://" in name else f"it is not here: isthmus encoder add {name}"
    return {"silo": settings.silo, "kind": wanted.kind, "encoder": name, "advice": advice}


def _requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """The requirements stated by the distribution: always, and for each extra."""
    required = _requires("isthmus")
    extras = metadata.metadata("isthmus").get_all("Provides-Extra") or []
    core = [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    return core, {extra: [one for one in required if _only_for(one, [extra])] for extra in extras}


def _requires(distribution: str) -> list[Requirement]:
    from packaging.requirements import Requirement

    try:
        return [Requirement(line) for line in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return []


def _only_for(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether the requirement applies with one of the extras but not without an extra."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return False
    return any(marker.evaluate({"extra": extra}) for extra in extras)


def _installed(needed: Iterable[Requirement]) -> Iterator[dict[str, Any]]:
    """Each required package with its installed version (None if missing) and whether that version fits."""
    for requirement in _with_nested_extras(needed):
        version = _version(requirement.name)
        fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        yield {"name": requirement.name, "wanted": str(requirement.specifier), "found": version, "ok": fits}


def _with_nested_extras(needed: Iterable[Requirement]) -> Iterator[Requirement]:
    """The requirements, and those of the extras that they name (`flwr[simulation]` requires ray)."""
    for requirement in needed:
        yield requirement
        yield from (inner for inner in _requires(requirement.name) if _only_for(inner, requirement.extras))


def _extra(name: str, needed: list[Requirement]) -> dict[str, Any]:
    packages = list(_installed(needed))
    missing = [package["name"] for package in packages if not package["ok"]]
    cures = [f"pip install 'isthmus[{name}]'"] if missing else []
    versions = {package["name"]: package["found"] for package in packages if package["found"]}
    return {"name": name, "ok": not missing, "found": versions, "missing": missing, "cure": cures}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    """The cores that this process may use; in a container these are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _blas() -> list[dict[str, Any]]:
    """The linear-algebra libraries that NumPy loads, with their numbers of threads."""
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
    """The collections that can be loaded by name here, and those that are missing."""
    from isthmus.corpora import available

    names = available()
    present = [name for name, here in names.items() if here]
    missing = [name for name, here in names.items() if not here]
    return {"folder": os.environ.get("ISTHMUS_DATA"), "found": present, "missing": missing}


def _encoders() -> dict[str, Any]:
    """The encoders that were added here, and the presets that were not."""
    from isthmus.encoders import PRESETS, encoders_folder, installed_encoders

    added = [encoder.name for encoder in installed_encoders()]
    missing = [name for name in PRESETS if name not in added]
    return {"folder": str(encoders_folder()), "found": added, "missing": missing}


def _cache() -> dict[str, Any]:
    """The cache folder: its path, its size, and whether it is writable."""
    from isthmus.tables import cache_folder

    folder = cache_folder()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    return {"folder": str(folder), "bytes": size, "writable": _writable(folder)}


def _writable(folder: Path) -> bool:
    """Whether the folder, or its nearest existing parent, is writable."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _show(report: dict[str, Any]) -> str:
    def line(title: str, text: str) -> str:
        return f"{title:<10}{text}"

    lines = [f"isthmus {report['isthmus']}, Python {report['python']}, {report['platform']}"]
    lines += [line("packages", ", ".join(f"{p['name']} {p['found']}" for p in report["packages"] if p["ok"]))]
    for package in report["packages"]:
        if not package["ok"]:
            has = package["found"] or "nothing"
            lines.append(
                line("missing", f"{package['name']}{package['wanted']}, found {has}: pip install isthmus")
            )
    for extra in report["extras"]:
        have = ", ".join(f"{name} {version}" for name, version in extra["found"].items())
        status = (
            have if extra["ok"] else f"missing {', '.join(extra['missing'])}: {' && '.join(extra['cure'])}"
        )
        lines.append(
            line(
                "extra", f"{extra['name']}, for {PURPOSES.get(extra['name'], 'an earlier release')}: {status}"
            )
        )
    blas = ", ".join(f"{b['library']} {b['version']} with {b['threads']} threads" for b in report["blas"])
    lines.append(line("cores", f"{report['cores']}; BLAS: {blas or 'none'}"))
    lines.append(line("data", ", ".join(report["data"]["found"])))
    if missing := report["data"]["missing"]:
        where = report["data"]["folder"] or "set ISTHMUS_DATA to the folder that holds them"
        lines.append(line("", f"not here: {', '.join(missing)} ({where})"))
    encoders = report["encoders"]
    lines.append(line("encoders", ", ".join(encoders["found"]) or "only the built-in latent space (LSA)"))
    if "bge-small" in encoders["missing"]:
        lines.append(line("", BETTER))
    if node := report.get("node"):
        known = {"lsa": "its own latent space (LSA)", "none": "none: BM25 alone"}
        lines.append(line("node", f"{node['silo']}: encoder {node['encoder'] or known[node['kind']]}"))
        lines += [line("", node["advice"])] if node["advice"] else []
    cache = report["cache"]
    state = f"{cache['bytes'] / 1e6:.1f} MB" if cache["writable"] else "cannot be written: set ISTHMUS_CACHE"
    lines.append(line("cache", f"{cache['folder']} ({state})"))
    return "\n".join(lines)


def _examine_federation(arguments: argparse.Namespace) -> int:
    """Check all silos, through a broker or with its settings. Returns 1 if something needs attention."""
    from isthmus.errors import Refused
    from isthmus.service import check_federation, facts_of_silo

    if arguments.config is None:
        with broker_client(arguments) as broker:
            silos, learning = broker.silos(), broker.learning()
    else:
        import asyncio

        silos, learning = asyncio.run(_asked_here(_broker_file(arguments.config)))
    if silos.machine is None:
        raise Refused("the broker tells administrators alone: name an admin key with --key")
    findings = check_federation(silos, learning)
    parties = {silo.silo: facts_of_silo(silo) for silo in silos.silos}
    if arguments.json:
        print_json({"silos": parties, "findings": [asdict(finding) for finding in findings]})
    else:
        for name, facts in parties.items():
            print(
                folded(f"{plain(name)}: {', '.join(f'{key} {plain(text)}' for key, text in facts.items())}")
            )
        for finding in findings:
            head = f"! {finding.party}: {finding.check}: {finding.fact}"
            print(folded(f"{plain(head)}\n  → {plain(finding.cure)}"))
    say(
        f"isthmus: {several(len(findings), 'thing needs', 'things need')} attention"
        if findings
        else f"isthmus: nothing needs attention in {several(len(parties), 'silo')}"
    )
    return 1 if findings else 0


def _broker_file(config: str) -> str:
    """The broker's settings file: the given file, or the one in a folder that `isthmus new` wrote."""
    return str(Path(config) / "broker.toml") if Path(config).is_dir() else config


async def _asked_here(config: str) -> tuple[SiloList, LearningView]:
    """The silos' answers to a broker with these settings, whether or not one is running."""
    from isthmus.service import Broker, LearningRuns, read_broker

    broker = Broker(read_broker(config))
    try:
        return await broker.view_silos(), LearningRuns(broker).view()
    finally:
        await broker.stop()


def _arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--config FILE", "a node's settings: which encoder it has, and what a better one would bring")
    about = (
        "all silos instead: certificates, clocks, versions, encoders, models, statistics, budgets and disks, "
        "and what to do; through a running broker, or with --config its settings or the federation's folder"
    )
    add(parser, "--federation", about)
    add_broker(parser, "an administrator's API key")
    shape = "one object with packages, extras, cores, blas, encoders, data, cache and node"
    add_json(parser, f"{shape}; of a federation {{silos, findings: [{{party, check, fact, cure}}]}}")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.federation:
        return _examine_federation(arguments)
    if arguments.broker or arguments.key or arguments.authority:
        raise ConfigError("--broker, --key and --authority are for all silos", expected="--federation too")
    report = examine(arguments.config)
    if arguments.json:
        print_json(report)
    else:
        print(folded(_show(report), hang=10))
    wrong = [package["name"] for package in report["packages"] if not package["ok"]]
    if wrong:
        say(f"isthmus: needs attention: {', '.join(wrong)}")
    return 1 if wrong else 0


COMMANDS = (
    Command(
        "doctor",
        "say what is installed, what is missing and how to get it; or what is wrong in a federation",
        """isthmus doctor --json
isthmus doctor --federation --broker https://search.example.org --key admin.key
isthmus doctor --federation --config my-federation""",
        _arguments,
        _run,
    ),
)
