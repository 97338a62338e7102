"""Rounds of a real coordinator over silos that answer what a test hands them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from isthmus.federation.flower import give_identity
from isthmus.federation.messages import answer
from isthmus.federation.rounds import Coordinator, HeldOut, State
from isthmus.federation.settings import Config, Model, Rounds
from isthmus.partition import Dealing
from isthmus.rankers import LocalTraining, Scaling

SGD = LocalTraining(loss="cross_entropy", optimiser="sgd", learning_rate=0.1, batch=4)
SCALING = Scaling("none", 3)


class HandMade:
    """A grid whose silos answer with these models, examples, steps and, if they must, reports."""

    def __init__(self):
        give_identity()
        self.answers, self.orders = (), ()

    def send_and_receive(self, messages, *, timeout=None):
        self.orders = list(messages)
        models, examples, steps, *reports = self.answers
        replies = []
        for silo, message in enumerate(self.orders):
            report = {"report": {"errors": reports[0][silo]}} if reports else {}
            numbers = {"num-examples": examples[silo], "steps": steps[silo], "loss": 0.0}
            replies.append(answer(message, numbers, arrays=models[silo], **report))
        return replies


def coordinator(strategy, grid, *, probe=None, silos=4):
    """A coordinator that has met silos 0, 1, … and lets everything pass but what it cannot use."""
    config = Config(
        strategy=strategy,
        local=SGD,
        model=Model(scaling="none"),
        dealing=Dealing(silos=silos),
        rounds=Rounds(silos=silos, norm_limit=1e9, count_limit=1e9),
    )
    known = Coordinator(config, HeldOut(), grid)
    many = SimpleNamespace(rows=10**6, queries=10**6, highest=4)
    known.registration.silos.update({f"silo-{at}": many for at in range(silos)})
    known.probe = probe
    return known


def play(strategy, rounds, start, *, probe=None, after=None, silos=4):
    """The states after rounds of (models, examples, steps[, reports])."""
    grid = HandMade()
    known = coordinator(strategy, grid, probe=probe, silos=silos)
    state, states = after or State(0, start, SCALING), []
    for answers in rounds:
        grid.answers = answers
        silos_asked = {100 + silo: f"silo-{silo}" for silo in range(len(answers[0]))}
        known._sample = lambda number, attempt, silos_asked=silos_asked: silos_asked
        state = known._round(state)
        states.append(state)
    return states


class Probe:
    """What a coordinator asks its probe, answered by a function of the parameters."""

    def __init__(self, errors):
        self.errors = self.disorder = errors

    def counted(self, parameters, errors):
        return self.errors(parameters)

    def __len__(self):
        return 8


def same(first, second):
    return all(np.array_equal(first[key], second[key]) for key in first)
