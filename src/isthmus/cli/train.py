"""Command for rankers: `train`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.command import (
    Command,
    add,
    add_json,
    add_per_query,
    add_settings,
    add_trackers,
    print_json,
    say,
    trackers_of,
    whole,
)
from isthmus.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.federation import Config, State

OPTIONS: tuple[tuple[str, str, str | None, int | None, str], ...] = (
    ("silos", "dealing.silos", None, 1, "silos the queries are dealt to (by their number: 1 to 100)"),
    ("dealing", "dealing.kind", "KIND", None, "how: query, size, dirichlet-query, site … (query)"),
    ("per_round", "rounds.silos", None, 1, "silos asked in a round (10, or all)"),
    ("rounds", "rounds.count", None, 1, "rounds (100)"),
    ("strategy", "strategy.name", "NAME", None, "fedrisk, fedavg, fedprox, scaffold … (fedrisk)"),
    ("server", "strategy.server", "STEP", None, "average, momentum, adam, convex …"),
    ("loss", "local.loss", "NAME", None, "lambdarank, softmax, ranknet … (lambdarank)"),
    ("epochs", "local.epochs", None, 1, "local epochs a round (1)"),
    ("probe", "probe", "N|FILE|none", None, "judged queries of the coordinator (those for validation)"),
    ("ledgers", "ledgers", "DIR", None, "where silos write down what leaves them (nowhere)"),
    ("patience", "rounds.patience", None, 1, "stop so many rounds after the best one (never)"),
    ("fold", "fold", None, 0, "fold of the data, from 0 (0)"),
    ("runtime", "runtime", "NAME", None, "in-process or ray (in-process)"),
    ("workers", "workers", None, 1, "silos at work at once (one a core)"),
    ("seed", "seed", None, 0, "of every random draw (0)"),
)
"""Command-line options: name, place in the configuration, metavar of the value or its minimum as a whole
number, and help."""
PAPER = (
    "dealing.kind=dirichlet-pair",
    "dealing.concentration=0.3",
    "dealing.least=1",
    "dealing.redraws=2000",
    "rounds.release=last",
    "strategy.risk.mode=paper",
    "strategy.risk.columns=batch",
    "local.loss=cross_entropy",
    "local.optimiser=sgd",
    "local.learning_rate=0.01",
    "local.weight_decay=0",
    "local.batch=64",
    "local.epochs=5",
    "model.hidden=[]",
    "model.scaling=zscore",
    "probe=none",
)
"""FedRisk as published: rows dealt by grade, cross-entropy, five epochs, batch errors, alpha = beta = 1."""
SETTINGS = {name: key for name, key, *_ in OPTIONS} | {"data": "data", "secure": "secure"}
"""The place of each option in the configuration."""


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "data DATA", "feature rows: a name, a file or a folder", nargs="?")
    for name, _, word, least, text in OPTIONS:
        kind = str if least is None else whole(least)
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=word, type=kind, help=text)
    add(
        parser,
        "--mode",
        "sound, or paper: FedRisk as printed, with its faults (sound)",
        choices=("sound", "paper"),
        default="sound",
    )
    add(
        parser,
        "--secure",
        "the coordinator sees the weighted sum of the models only",
        action="store_const",
        const="true",
    )
    add_settings(parser, "a TOML file with any of these and more", example="local.epochs=5", required=False)
    add(parser, "--out DIR", "the run's folder (runs/DATA-STRATEGY-SEED)")
    add(parser, "--resume DIR", "go on with the run in this folder")
    add_per_query(parser)
    add_trackers(parser)
    add_json(parser, "{out, rounds, final: {measure: value}, model_sha256}")


def _train(arguments: argparse.Namespace) -> None:
    from isthmus.config import to_mapping
    from isthmus.evaluation import check_per_query, per_query_rows, write_per_query
    from isthmus.federation import MODEL, RunFolder, train
    from isthmus.report import summary, tracking

    if arguments.per_query:
        check_per_query(arguments.per_query)
    if arguments.resume:
        _check_resuming(arguments)
        config, out = RunFolder(arguments.resume).config(), arguments.resume
    else:
        config = _configured(arguments)
        out = arguments.out or f"runs/{_short(config.data)}-{config.strategy.name}-{config.seed}"
        if (Path(out) / "checkpoint").exists():
            say(f"isthmus: {out} has the checkpoint of a run: isthmus train --resume {out} goes on with it")
    with tracking(trackers_of(arguments), Path(out).name, to_mapping(config)) as tracked:

        def watch(state: State) -> None:
            for record in state.history:
                if record.round > tracked.last:
                    tracked.record(record.round, record.measures())

        trained = train(config, out=out, resume=bool(arguments.resume), watch=watch)
        tracked.record(trained.rounds, {f"test/{name}": value for name, value in trained.final.items()})
        tracked.files += [Path(out) / name for name in (MODEL, "rounds.json", "config.toml")]
    if arguments.json:
        result = {"out": str(out), "rounds": trained.rounds, "final": dict(trained.final)}
        print_json({**result, "model_sha256": trained.model_sha256})
    else:
        for measure, value in trained.final.items():
            print(f"{measure}\t{value:.4f}")
    title = f"Training on {config.data}: {config.strategy.name}"
    trained.page(title).save(f"{out}/report.html")
    facts = {
        "rounds": trained.rounds,
        "privacy": trained.history[-1].privacy,
        "protection": trained.history[-1].protection,
    }
    if trained.stopped:
        facts["stopped"] = trained.stopped
    wrote = [f"{out}/{MODEL}", f"{out}/rounds.json", f"{out}/report.html"]
    if arguments.per_query and trained.evaluation is not None:
        about = {"experiment": "train", "data": _short(config.data), "fold": config.fold, "seed": config.seed}
        rows = per_query_rows(trained.evaluation, **about, method=config.strategy.name)
        wrote.append(str(write_per_query(rows, arguments.per_query)))
    if arguments.tensorboard:
        wrote.append(f"{arguments.tensorboard}/{Path(out).name}")
    summary("trained", facts, wrote=wrote)


def _check_resuming(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError for settings beside --resume: a run continues with the settings it began with."""
    named = [name for name in (*SETTINGS, "config", "out") if getattr(arguments, name) is not None]
    named += ["set"] * bool(arguments.changes) + ["mode"] * (arguments.mode != "sound")
    if named:
        beside = ", ".join("DATA" if name == "data" else f"--{name.replace('_', '-')}" for name in named)
        raise ConfigError(
            f"a run is resumed with the settings it was begun with, not with {beside}",
            expected="--resume DIR alone, or another --out to begin anew",
        )


def _configured(arguments: argparse.Namespace) -> Config:
    """The configuration: the file, overridden by the options, then by --set."""
    from isthmus.config import load
    from isthmus.federation import Config

    if arguments.data is None and arguments.config is None:
        raise ConfigError("nothing to train on", expected="DATA, --config FILE or --resume DIR")
    options = {key: value for key in SETTINGS if (value := getattr(arguments, key)) is not None}
    printed = PAPER if arguments.mode == "paper" else ()
    if (
        not printed
        and options.get("probe") == "none"
        and arguments.config is None
        and "strategy" not in options
    ):
        options = {"strategy": "fedavg", "server": "momentum", **options}
    overrides = [f"{SETTINGS[key]}={value}" for key, value in options.items()]
    return load(Config, arguments.config, [*printed, *overrides, *arguments.changes])


def _short(data: str) -> str:
    return data.rstrip("/").rpartition("/")[2] or "data"


COMMANDS = (
    Command(
        name="train",
        summary="train one ranker across silos that keep their rows",
        example="""isthmus train synthetic --silos 20 --per-round 5 --rounds 30 --out runs/first
isthmus train synthetic --rounds 30 --tensorboard tb""",
        add_arguments=_train_arguments,
        run=_train,
    ),
)
