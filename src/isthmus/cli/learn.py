"""`isthmus learn`: train across silos on their judgements; list versions and roll back."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from isthmus.cli.broker import URL_VARIABLE
from isthmus.cli.command import (
    Command,
    add,
    add_json,
    add_settings,
    add_trackers,
    close,
    folded,
    plain,
    print_json,
    say,
    trackers_of,
)
from isthmus.cli.judgements import broker_client
from isthmus.errors import several

if TYPE_CHECKING:
    from isthmus.service import Client, LearnedVersion, LearningView

_EXAMPLE = """isthmus learn --config broker.toml
isthmus learn --broker https://search.example.org --key admin.key --mode fedrisk
isthmus learn --config broker.toml --list
isthmus learn --config broker.toml --rollback
isthmus learn --config broker.toml --tensorboard tb"""

NONE_MEANS = "; a silo that has calibrated by itself keeps that"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(
        parser,
        "the broker's settings, TOML: learn from this machine, while the nodes serve",
        example="deadline_ms=500",
        required=False,
    )
    about = f"have a running broker do it, by its address ({URL_VARIABLE}, else http://127.0.0.1:8100)"
    add(parser, "--broker --url URL", about)
    add(parser, "--key FILE", "the file of an administrator's API key (or ISTHMUS_API_KEY)")
    add(parser, "--authority FILE", "the certificate the broker's comes from (or ISTHMUS_AUTHORITY)")
    about = (
        "masked: the broker sees totals of three silos or more; fedrisk: it weighs silos by what each reports"
    )
    add(parser, "--mode MODE", about, choices=("masked", "fedrisk"), default="masked")
    what = parser.add_mutually_exclusive_group()
    add(what, "--list", "the versions there are, and which is in use")
    about = "search with a version again: the one before the current one, VERSION, or none"
    add(what, "--rollback VERSION", about, nargs="?", const="")
    add_trackers(parser)
    add_json(parser, "{version, learned, mode, by, current, usable, problem, record}; with --list a list")


def _learn(arguments: argparse.Namespace) -> None:
    if arguments.config is None:
        _over(arguments)
    elif arguments.list:
        from isthmus.service import ModelVersions, read_broker

        settings = read_broker(arguments.config, arguments.changes)
        _list(arguments, ModelVersions(settings.folder / "learned").history())
    else:
        import asyncio

        asyncio.run(_here(arguments))


async def _here(arguments: argparse.Namespace) -> None:
    """Learn or roll back on this machine, whether or not a broker is running."""
    from getpass import getuser

    from isthmus.service import Broker, LearningRuns, read_broker

    broker = Broker(read_broker(arguments.config, arguments.changes))
    runs = LearningRuns(broker)
    try:
        if arguments.rollback is None:
            with tracked_runs(arguments, runs.versions.history):
                version = await runs.once(arguments.mode, by=getuser(), tell=_stage)
            _end(arguments, version)
        else:
            await runs.use(arguments.rollback)
            _rolled_back(arguments, runs.view())
    finally:
        await broker.stop()


def _over(arguments: argparse.Namespace) -> None:
    """Learn, list or roll back through a running broker."""
    with broker_client(arguments) as broker:
        if arguments.list:
            _list(arguments, broker.learning().versions)
        elif arguments.rollback is not None:
            _rolled_back(arguments, broker.rollback(arguments.rollback))
        else:
            with tracked_runs(arguments, lambda: broker.learning().versions):
                version = _followed(broker, arguments.mode)
            _end(arguments, version)


def _followed(broker: Client, mode: str) -> LearnedVersion:
    """Start a run in a broker and wait for its end, reporting each stage once. An interruption ends the
    waiting, not the run."""
    last = [""]

    def tell(stage: str) -> None:
        if stage not in ("", last[0]):
            _stage(stage)
            last[0] = stage

    try:
        return broker.learn_to_end(mode, progress=tell)
    except KeyboardInterrupt:
        say(
            "isthmus: the broker goes on learning: the Training view of its page shows how far it is,"
            f"\n  isthmus learn --broker {plain(broker.url)} --list      the version, once it is there"
            f"\n  isthmus learn --broker {plain(broker.url)} --rollback  takes it back"
        )
        raise


@contextmanager
def tracked_runs(
    arguments: argparse.Namespace, history: Callable[[], list[LearnedVersion]]
) -> Iterator[None]:
    """Record a run and all earlier ones in the trackers; a run's step is its number."""
    from isthmus.report import tracking

    trackers = trackers_of(arguments)
    if not trackers:
        yield
        return
    with tracking(trackers, "learn", {"mode": arguments.mode}) as tracked:
        yield
        for step, version in enumerate(reversed(history()), 1):
            tracked.record(step, measures_of(version))


def measures_of(version: LearnedVersion) -> dict[str, float | None]:
    """The measures of a run by name, for trackers; empty if nothing was learned jointly."""
    record = version.record or {}
    if "kind" not in record:
        return {}
    models = record["models"].items()
    honest = record["calibration"]
    by_silo = {"weight": record["weights"], "risk": record["risks"]}
    return {
        **{f"nDCG@10/{name}": model.get("nDCG@10") for name, model in models},
        **{f"gain/{name}": model["difference"]["mean"] for name, model in models if model.get("difference")},
        **{f"calibration error/{when}": honest[when]["ece"] for when in honest},
        "calibration error/perfect": honest["after"]["floor"],
        "judged/queries": record["queries"],
        "judged/relevant": record["relevant"],
        "round/seconds": record["seconds"],
        **{f"{name}/{silo}": value for name, table in by_silo.items() for silo, value in table.items()},
    }


def _stage(stage: str) -> None:
    say(f"  {plain(stage)}")


def _end(arguments: argparse.Namespace, version: LearnedVersion) -> None:
    """Print the result of a run."""
    title = "not learned together" if version.problem else "learned"
    close(arguments, title, version.model_dump(), facts=facts_of(version))


def facts_of(version: LearnedVersion) -> dict[str, object]:
    """The facts of a run for its summary."""
    record = version.record or {}
    facts: dict[str, object] = {"version": version.version}
    if version.problem:
        facts["problem"] = plain(version.problem)
    if "kind" in record:
        facts["model"] = plain(str(record["kind"])) + ("" if record["adopted"] else " (nothing adopted)")
        facts["why"] = plain(str(record["why"]))
        facts["judged queries"] = f"{record['queries']:,} of {several(len(record['silos']), 'silo')}"
        if record.get("queries_needed"):
            facts["might gain with"] = f"{record['queries_needed']:,} judged queries"
        for when, name in (("after", "calibration error"), ("one silo", "where one silo is searched")):
            if honest := record["calibration"].get(when):
                facts[name] = f"{honest['ece']:.3f}, of a perfect model {honest['floor']:.3f}"
    for silo, reason in record.get("left_out", {}).items():
        facts[f"without {plain(silo)}"] = plain(reason)
    return facts


def _list(arguments: argparse.Namespace, versions: list[LearnedVersion]) -> None:
    if arguments.json:
        print_json([version.model_dump() for version in versions])
        return
    if not versions:
        say("nothing was learned yet: isthmus learn --config broker.toml")
    for version in versions:
        print(folded(_line(version), hang=4))


def _line(version: LearnedVersion) -> str:
    """A version in one line: whether it is in use, its number, mode and model, and its gain."""
    record, mark = version.record or {}, "*" if version.current else " "
    if not version.usable:
        return f"{mark} {version.version}  nothing learned together: {plain(version.problem)}"
    gain = record.get("models", {}).get(record.get("kind"), {}).get("difference")
    spread = "" if gain is None else f"  {gain['mean']:+.4f} ({gain['low']:+.4f} to {gain['high']:+.4f})"
    kind = plain(str(record.get("kind", "")))
    return f"{mark} {version.version}  {version.mode}  {kind}{spread}  {record.get('queries', 0):,} queries"


def _rolled_back(arguments: argparse.Namespace, view: LearningView) -> None:
    result = {"current": view.current, "silos": view.silos}
    used = view.current + (NONE_MEANS if view.current == "none" else "")
    close(arguments, "rolled back", result, facts={"searches use": used})


COMMANDS = (
    Command(
        "learn",
        "let silos learn together from what was judged, and search with it",
        _EXAMPLE,
        _arguments,
        _learn,
    ),
)
