"""The command `isthmus reproduce`, which computes a paper's tables and figures; an entry point of Isthmus."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from isthmus.cli import Command, add_json, add_per_query, print_json, whole
from isthmus.errors import ConfigError

EXPERIMENTS = {
    "calibrated-fusion": "isthmus_reproduce.fusion.experiment",
    "csfltr": "isthmus_reproduce.csfltr.experiment",
    "fedrisk": "isthmus_reproduce.fedrisk.experiment",
    "fusion-defaults": "isthmus_reproduce.fusion.defaults",
    "private-features": "isthmus_reproduce.private.experiment",
    "search": "isthmus_reproduce.search.experiment",
    "search-choices": "isthmus_reproduce.search.choices",
    "training-defaults": "isthmus_reproduce.fedrisk.defaults",
}
"""The module of each experiment, with its `Config` and its `reproduce`."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(EXPERIMENTS)
    parser.add_argument("paper", metavar="PAPER", choices=tuple(EXPERIMENTS), help=f"one of {names}")
    parser.add_argument(
        "--data", metavar="DATA", help="a name or a path (every set the paper uses and is here)"
    )
    parser.add_argument(
        "--scale",
        choices=("smoke", "full"),
        default="full",
        help="smoke: all rows, fewer folds and seeds, and of data that are not named the small ones (full)",
    )
    parser.add_argument(
        "--only",
        metavar="ROW",
        action="append",
        default=[],
        help="fedrisk, training-defaults: this row alone",
    )
    parser.add_argument(
        "--encoder",
        metavar="NAME",
        default="",
        help="search, search-choices: with an encoder that was added, which all silos have agreed on, or lsa",
    )
    parser.add_argument(
        "--encoder-tuned",
        metavar="DIR",
        default="",
        help="calibrated-fusion: with an encoder fine-tuned a fold, tuned there where missing (torch)",
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of every random draw (0)")
    parser.add_argument("--workers", type=whole(1), help="processes at once (one a core)")
    parser.add_argument("--out", metavar="DIR", help="the run's folder; the same folder again resumes")
    add_per_query(parser)
    add_json(parser, "a list of {table, row, part, variant, mode, data, measure, value, low, high, n, paper}")


def _run(options: argparse.Namespace) -> None:
    from importlib import import_module
    from inspect import signature
    from pathlib import Path

    from isthmus.evaluation import check_per_query
    from isthmus.report import summary

    experiment = import_module(EXPERIMENTS[options.paper])
    chosen = {"data": options.data, "only": tuple(options.only), "encoder": options.encoder}
    if options.encoder_tuned and options.paper != "calibrated-fusion":
        expected = "no --encoder-tuned"
        raise ConfigError(f"{options.paper} tunes no encoder", key="--encoder-tuned", expected=expected)
    if options.encoder and not options.paper.startswith("search"):
        raise ConfigError(f"{options.paper} has its own encoders", key="--encoder", expected="no --encoder")
    if options.only and options.paper not in ("fedrisk", "training-defaults"):
        raise ConfigError(f"{options.paper} is computed whole", key="--only", expected="no --only")
    more = {"values": options.per_query} if options.per_query else {}
    if more and "values" not in signature(experiment.reproduce).parameters:
        raise ConfigError(
            f"{options.paper} has no values by query",
            key="--per-query",
            expected="fedrisk, calibrated-fusion, fusion-defaults or training-defaults",
        )
    if more:
        check_per_query(options.per_query)
    more |= {"tuned": options.encoder_tuned} if options.encoder_tuned else {}
    cells, wrote = [], []
    for data in _sets(experiment, options.data, options.scale):
        chosen["data"] = data
        config = experiment.Config(
            scale=options.scale, seed=options.seed, **{key: value for key, value in chosen.items() if value}
        )
        name = f"{options.paper}-{options.encoder}" if options.encoder else options.paper
        name += "-tuned" if options.encoder_tuned else ""
        folder = f"{name}-{Path(config.data).name}-{config.scale}-{config.seed}"
        out = Path(options.out or "runs") / (folder if data != options.data or not options.out else "")
        result = experiment.reproduce(config, out, workers=options.workers, **more)
        cells += result.cells
        wrote += result.wrote
        if not options.json:
            print(result.page.markdown())
    if options.json:
        print_json([cell.record() for cell in cells])
    summary(f"reproduced {options.paper}", {"cells": len(cells)}, wrote=wrote)


def _sets(experiment: Any, data: str | None, scale: str) -> Sequence[str | None]:
    """Return the data sets to compute: the named one, or those of the experiment that are available."""
    from isthmus.corpora import available

    known: Sequence[str] = getattr(experiment, "DATA", ())
    if scale == "smoke":
        known = getattr(experiment, "SMOKE", known)
    if data is not None or not known or experiment.Config.data == "all":
        return (data,)
    there = available()
    return tuple(name for name in known if there.get(name)) or (None,)


COMMANDS = (
    Command(
        name="reproduce",
        summary="compute a paper's tables and figures: printed, paper mode and sound mode side by side",
        example="\n".join(
            (
                "isthmus reproduce fedrisk --data mq2008 --scale smoke",
                "isthmus reproduce calibrated-fusion --data twitter --scale smoke",
                "isthmus reproduce private-features --data cran --scale smoke",
                "isthmus reproduce csfltr --data pydocs --scale smoke --out runs/csfltr",
                "isthmus reproduce search --data cran --encoder bge-small",
            )
        ),
        add_arguments=_arguments,
        run=_run,
    ),
)
