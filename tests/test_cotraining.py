"""Co-training by the apps of real nodes: private features exchanged, labels made in the silos."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MessageType

from exchanges import exchange_in_memory
from isthmus.config import load
from isthmus.errors import ConfigError, DataError
from isthmus.federation.deployment import Cooperation, client, cooperate, cross_rows
from isthmus.federation.messages import unpack
from isthmus.federation.runtimes import LocalGrid
from isthmus.federation.semisupervised.labelling import Labelling, SiloRows, guess
from isthmus.federation.semisupervised.training import Anchor, CoTraining, cotrain
from isthmus.private.exchange import ExchangeRelay, Party
from isthmus.private.keys import GroupKey
from isthmus.private.ledger import Budget
from isthmus.private.store import SiloFolder
from isthmus.randomness import Streams
from isthmus.rankers import load_ranker
from isthmus.tables import Letor, read_letor, write_letor
from isthmus_reproduce import synthetic_text

NAMES = ("east", "north", "south", "west")
CORPUS = synthetic_text.text(60, 16, 4, seed=5, words=40)
TRAINING = CoTraining(Labelling("soft", calibrated=True, rounds=2), rounds=4, epochs=1, local_epochs=4)


def judged(name: str, queries: tuple[str, ...]) -> Letor:
    """Rows of a silo's own queries, as many in every silo."""
    table = Streams(3)("rows", name).normal(size=(48, 16))
    return Letor.of([queries[at % len(queries)] for at in range(48)], table, (table[:, 3] > 0.5).astype(int))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four silos with judged rows, who have exchanged private features under keys that are injected."""
    path = tmp_path_factory.mktemp("site")
    key = GroupKey.fresh(epoch=1, entropy=Streams(0)("group").bytes)
    folders = {name: SiloFolder.at(path / name, create=True) for name in NAMES}
    cards = [folder.keys.begin(name).card for name, folder in folders.items()]
    parties = {}
    for (name, folder), silo in zip(folders.items(), CORPUS.silos, strict=True):
        folder.keys.join(key)
        for card in cards:
            if card.name != name:
                folder.keys.trust(card)
        own = CORPUS.silo(silo)
        folder.build(own.documents, budget=Budget(10.0), width=1 << 10)
        entropy = Streams(1)("entropy", name).bytes
        parties[name] = Party(folder, own.queries, epsilon=1.0, k=5, entropy=entropy)  # with much noise
        write_letor(judged(name, own.queries.ids), path / f"{name}.txt")
    exchange_in_memory(parties, ExchangeRelay(4, 1 << 12))
    return path


def rows(site: Path, name: str) -> SiloRows:
    labelled = read_letor(site / f"{name}.txt")
    return SiloRows(labelled, *cross_rows(labelled, str(site / name)))


def grid(site: Path, names: tuple[str, ...], kind: type[LocalGrid] = LocalGrid) -> LocalGrid:
    """Nodes that are told where their own files lie, as silos are."""
    made = kind(client, len(names), workers=1)
    for context, name in zip(made._contexts.values(), names, strict=True):
        told = {"silo": name, "data": site / f"{name}.txt", "folder": site / name}
        context.node_config.update({key: str(value) for key, value in told.items()})
        context.node_config["ledger"] = str(site / name / "silo.ledger")
    return made


@pytest.mark.parametrize("anchor", [None, Anchor(queries=20)])
def test_deployed_silos_get_what_the_same_rows_get_in_one_process(
    site: Path, tmp_path: Path, anchor: Anchor | None
) -> None:
    training = replace(TRAINING, anchor=anchor)
    run = Cooperation(tmp_path / "run", silos=4, grades=2, training=training)
    made = cooperate(run, grid(site, NAMES))
    expected = cotrain([rows(site, name) for name in NAMES], training, grades=2, names=NAMES)
    for name, array in expected.parameters.items():
        np.testing.assert_allclose(made.ranker.parameters_[name], array, atol=1e-6)
    assert load_ranker(tmp_path / "run" / "model").score(rows(site, "east").labelled).shape == (
        rows(site, "east").labelled.rows,
    )
    assert all(set(record.asked) == set(NAMES) for record in made.history)


def test_a_finished_run_is_taken_up_where_it_ended(site: Path, tmp_path: Path) -> None:
    short = replace(TRAINING, labelling=None)
    run = Cooperation(tmp_path / "run", silos=4, grades=2, training=short)
    first = cooperate(run, grid(site, NAMES))
    again = cooperate(run, grid(site, NAMES))
    assert first.model_sha256 == again.model_sha256
    for other in ({"anchor": Anchor()}, {"labelling": Labelling("zero")}):
        changed = replace(run, training=replace(short, **other))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="another configuration"):
            cooperate(changed, grid(site, NAMES))


def test_models_may_be_added_up_under_masks(site: Path, tmp_path: Path) -> None:
    open_sum = replace(TRAINING, labelling=None, strategy=replace(TRAINING.strategy, name="fedavg"))
    masked = replace(open_sum, secure=True)
    plain, secret = (
        cooperate(Cooperation(tmp_path / name, silos=4, grades=2, training=training), grid(site, NAMES))
        for name, training in (("open", open_sum), ("masked", masked))
    )
    for name, array in plain.ranker.parameters_.items():
        np.testing.assert_allclose(secret.ranker.parameters_[name], array, atol=1e-3)


def test_who_leaves_takes_only_its_own_pairs(site: Path, tmp_path: Path) -> None:
    before = rows(site, "east").cross
    gone = CORPUS.silo(CORPUS.silos[NAMES.index("south")]).documents.ids
    file = site / "east" / "features" / "south.txt"
    kept = file.rename(tmp_path / "south.txt")
    try:
        after = rows(site, "east").cross
    finally:
        kept.rename(file)
    still = before.keep(~np.isin(np.array(before.ids.tolist()), np.array(gone)))
    assert still == after
    assert 0 < after.rows < before.rows


class Changing(LocalGrid):
    """South is away while rounds three and four are asked for; before the first, silos train alone."""

    away = range(3, 5)
    asked = 0

    def get_node_ids(self) -> list[int]:
        nodes = list(super().get_node_ids())
        return [node for node in nodes if not (self._is_south(node) and self.asked in self.away)]

    def send_and_receive(self, messages: Iterable[Message], **options: Any) -> Iterable[Message]:
        told = list(messages)
        self.asked += any(message.metadata.message_type == MessageType.TRAIN for message in told)
        return super().send_and_receive(told, **options)

    def _is_south(self, node: int) -> bool:
        return self._contexts[node].node_config.get("silo") == "south"


def test_a_silo_leaves_midway_and_comes_back_later(site: Path, tmp_path: Path) -> None:
    """The others go on with everything they have; south's pairs are labelled again when it is there."""
    training = replace(TRAINING, rounds=6, labelling=Labelling("soft", rounds=3))
    run = Cooperation(tmp_path / "run", silos=4, grades=2, training=training)
    made = cooperate(run, grid(site, NAMES, Changing))
    others = set(NAMES) - {"south"}
    assert [set(record.asked) for record in made.history] == [set(NAMES)] * 2 + [others] * 2 + [
        set(NAMES)
    ] * 2
    stayed = cotrain([rows(site, name) for name in NAMES], training, grades=2, names=NAMES)
    assert not np.allclose(made.ranker.parameters_["weight0"], stayed.parameters["weight0"], atol=1e-5)
    held = Letor.concat([rows(site, name).labelled for name in NAMES])
    scores = made.ranker.score(held), stayed.ranker.score(held)
    assert np.corrcoef(*scores)[0, 1] > 0.95, "a silo's absence is no catastrophe"


def test_training_goes_on_without_a_silo_and_with_a_new_one(site: Path, tmp_path: Path) -> None:
    """Who joins brings its own pairs; the models of the first round differ by nothing else."""
    short = replace(TRAINING, rounds=2)
    for count in (3, 4):
        names = NAMES[:count]
        run = Cooperation(tmp_path / str(count), silos=count, grades=2, training=short)
        made = cooperate(run, grid(site, names))
        assert {name for record in made.history for name in record.asked} == set(names)
        expected = cotrain([rows(site, name) for name in names], short, grades=2, names=names)
        np.testing.assert_allclose(
            made.ranker.parameters_["weight0"], expected.parameters["weight0"], atol=1e-6
        )


def test_a_cooperation_is_read_from_toml(tmp_path: Path) -> None:
    """As it is, without a labeller; and with the one that is there to be switched on."""
    file = Path(__file__).parent.parent / "deploy" / "cotraining.toml"
    found = load(Cooperation, file)
    assert found.silos == 4
    assert found.training.anchor == Anchor()
    assert found.training.labelling is None
    told = file.read_text(encoding="utf-8")
    head, labelling = told.split("# [training.labelling]")
    switched = labelling.replace("\n# ", "\n")
    (tmp_path / "on.toml").write_text(f"{head}[training.labelling]{switched}", encoding="utf-8")
    assert load(Cooperation, tmp_path / "on.toml").training.labelling == Labelling("soft", calibrated=True)


def test_exchanged_pairs_are_weighed_by_their_noise(site: Path, tmp_path: Path) -> None:
    """The error bars of counts come through the exchange: real silos train as one process does with them."""
    training = replace(TRAINING, labelling=Labelling("zero", beta=1.0, by_noise=True))
    silos = [rows(site, name) for name in NAMES]
    assert all((silo.errors > 0).all() and len(silo.errors) == silo.cross.rows for silo in silos)
    nodes = grid(site, NAMES)
    made = cooperate(Cooperation(tmp_path / "run", silos=4, grades=2, training=training), nodes)
    expected = cotrain(silos, training, grades=2, names=NAMES)
    for name, array in expected.parameters.items():
        np.testing.assert_allclose(made.ranker.parameters_[name], array, atol=1e-6)
    for context, silo in zip(nodes._contexts.values(), silos, strict=True):
        weights = unpack(context.state.array_records["guesses"])["weights"]
        np.testing.assert_allclose(weights, 1 / (1 + silo.errors**2), rtol=1e-6)
        assert weights.max() > 1.02 * weights.min()  # the noise is drawn anew in every run


def test_rows_of_an_older_exchange_have_no_error_bars(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They train as ever; weighed by noise, they are left out, and the silo says why."""
    copied = tmp_path / "east"
    shutil.copytree(site / "east", copied)
    (copied / "error-bars" / "south.txt").unlink()
    labelled = read_letor(site / "east.txt")
    silo = SiloRows(labelled, *cross_rows(labelled, str(copied)))
    unknown = np.isnan(silo.errors)
    assert 0 < unknown.sum() < silo.cross.rows
    model = {"weight0": np.zeros((16, 2), np.float32), "bias0": np.zeros(2, np.float32)}
    assert (guess(model, silo, Labelling("soft"), 2).weights == 1).all()
    weights = guess(model, silo, Labelling("soft", by_noise=True), 2).weights
    np.testing.assert_array_equal(weights == 0, unknown)
    assert "exchange again" in caplog.text


def test_error_bars_of_other_rows_are_refused(site: Path, tmp_path: Path) -> None:
    copied = tmp_path / "east"
    shutil.copytree(site / "east", copied)
    (copied / "error-bars" / "south.txt").write_text("0.5\n")
    with pytest.raises(DataError, match="1 error bars for"):
        cross_rows(read_letor(site / "east.txt"), str(copied))
