"""Commands about rankers: `train`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from isthmus.cli.command import Command, add_json, add_settings, print_json, whole
from isthmus.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.federation.settings import Config

PER_ROUND = 10
SETTINGS = {
    "data": "data",
    "fold": "fold",
    "silos": "dealing.silos",
    "dealing": "dealing.kind",
    "per_round": "rounds.silos",
    "rounds": "rounds.count",
    "strategy": "strategy.name",
    "server": "strategy.server",
    "loss": "local.loss",
    "epochs": "local.epochs",
    "probe": "probe",
    "patience": "rounds.patience",
    "secure": "secure",
    "ledgers": "ledgers",
    "engine": "engine",
    "workers": "workers",
    "seed": "seed",
}
"""Where in the configuration an option of the command line goes."""


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", nargs="?", help="feature rows: a name, a file or a folder")
    parser.add_argument("--silos", type=whole(1), help="silos the training queries are dealt to (100)")
    parser.add_argument("--dealing", metavar="KIND", help="how: query, size, dirichlet-query, site … (query)")
    parser.add_argument("--per-round", type=whole(1), help=f"silos asked in a round ({PER_ROUND})")
    parser.add_argument("--rounds", type=whole(1), help="rounds (100)")
    parser.add_argument("--strategy", metavar="NAME", help="fedrisk, fedavg, fedprox, scaffold … (fedrisk)")
    parser.add_argument("--server", metavar="STEP", help="average, momentum, adam, convex …")
    parser.add_argument("--loss", metavar="NAME", help="lambdarank, softmax, ranknet … (lambdarank)")
    parser.add_argument("--epochs", type=whole(1), help="local epochs a round (1)")
    parser.add_argument("--probe", metavar="N|FILE|none", help="the coordinator's judged queries (40)")
    parser.add_argument(
        "--secure",
        action="store_const",
        const="true",
        help="the coordinator sees the weighted sum of the models only",
    )
    parser.add_argument("--ledgers", metavar="DIR", help="where silos write down what leaves them (nowhere)")
    parser.add_argument("--patience", type=whole(1), help="stop so many rounds after the best one (never)")
    parser.add_argument("--fold", type=whole(0), help="fold of the data, from 0 (0)")
    parser.add_argument("--engine", metavar="NAME", help="in-process or ray (in-process)")
    parser.add_argument("--workers", type=whole(1), help="silos at work at once (one a core)")
    parser.add_argument("--seed", type=whole(0), help="of every random draw (0)")
    add_settings(parser, "a TOML file with any of these and more", example="local.epochs=5", required=False)
    parser.add_argument("--out", metavar="DIR", help="the run's folder (runs/DATA-STRATEGY-SEED)")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    add_json(parser, "{out, rounds, final: {measure: value}, model_sha256}")


def _train(asked: argparse.Namespace) -> None:
    from isthmus.federation.apps import train
    from isthmus.federation.checkpoints import RunFolder
    from isthmus.federation.pictures import run_page
    from isthmus.federation.settings import MODEL
    from isthmus.report import summary

    if asked.resume:
        config, out = RunFolder(asked.resume).config(), asked.resume
    else:
        config = _configured(asked)
        out = asked.out or f"runs/{_short(config.data)}-{config.strategy.name}-{config.seed}"
    trained = train(config, out=out, resume=bool(asked.resume))
    if asked.json:
        print_json(
            {
                "out": str(out),
                "rounds": trained.rounds,
                "final": dict(trained.final),
                "model_sha256": trained.model_sha256,
            }
        )
    else:
        for measure, value in trained.final.items():
            print(f"{measure}\t{value:.4f}")
    title = f"Training on {config.data}: {config.strategy.name}"
    page = run_page(trained.history, title, holdings=trained.holdings)
    page.save(f"{out}/report.html")
    facts = {
        "rounds": trained.rounds,
        "privacy": trained.history[-1].privacy,
        "protection": trained.history[-1].protection,
    }
    if trained.stopped:
        facts["stopped"] = trained.stopped
    summary("trained", facts, wrote=[f"{out}/{MODEL}", f"{out}/rounds.json", f"{out}/report.html"])


def _configured(asked: argparse.Namespace) -> Config:
    """The configuration: the file, then the options, then --set."""
    from isthmus.config import load
    from isthmus.federation.settings import Config

    if asked.data is None and asked.config is None:
        raise ConfigError("nothing to train on", expected="DATA, --config FILE or --resume DIR")
    given = {key: value for key in SETTINGS if (value := getattr(asked, key)) is not None}
    if "silos" in given and asked.config is None:
        given.setdefault("per_round", min(PER_ROUND, given["silos"]))
    if given.get("probe") == "none" and asked.config is None and "strategy" not in given:
        given = {"strategy": "fedavg", "server": "momentum", **given}
    overrides = [f"{SETTINGS[key]}={value}" for key, value in given.items()]
    return load(Config, asked.config, [*overrides, *asked.changes])


def _short(data: str) -> str:
    return data.rstrip("/").rpartition("/")[2] or "data"


COMMANDS = (
    Command(
        name="train",
        summary="train one ranker across silos that keep their rows",
        example="isthmus train synthetic --silos 20 --per-round 5 --rounds 30 --out runs/first",
        add_arguments=_train_arguments,
        run=_train,
    ),
)
