"""`isthmus coordinate`: training over silos on other machines."""

from __future__ import annotations

import argparse

from isthmus.cli.command import Command, add, add_json, add_settings, close, say


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(
        parser, "where to listen, and which silos may call, TOML", example="port=9093", required=True
    )
    what = parser.add_mutually_exclusive_group(required=True)
    add(what, "--train FILE", "train one ranker over the silos; the run, TOML")
    add(what, "--exchange FILE", "pass private features between them; the exchange, TOML")
    add(what, "--cotrain FILE", "train on pairs across silos too, after an exchange; the run, TOML")
    add_json(parser, "{kind, out, silos}")


def _run(arguments: argparse.Namespace) -> None:
    from isthmus.federation import read_run
    from isthmus.service import coordinating, log_to_stderr, read_coordinator

    settings = read_coordinator(arguments.config, arguments.changes)
    kind = next(name for name in ("train", "exchange", "cotrain") if getattr(arguments, name))
    run = read_run(kind, getattr(arguments, kind))
    log_to_stderr(access=False)
    with coordinating(
        settings, started=lambda where: say(f"isthmus: silos reach the coordinator at {where}")
    ) as grid:
        run.over(grid)
    result = {"kind": kind, "out": str(run.out), "silos": list(settings.silos)}
    close(arguments, "coordinated", result, [run.out], {"run": kind, "silos": len(settings.silos)})


COMMANDS = (
    Command(
        name="coordinate",
        summary="train over silos on other machines, which keep their rows and call in over mutual TLS",
        example="isthmus coordinate --config coordinator.toml --train federation.toml",
        add_arguments=_arguments,
        run=_run,
    ),
)
