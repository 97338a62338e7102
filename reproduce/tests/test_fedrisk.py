"""The FedRisk reproduction, on data of a minute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isthmus.errors import ConfigError
from isthmus.evaluation import read_per_query
from isthmus.partition import deal
from isthmus.randomness import Streams
from isthmus.tables import Fold, Letor, write_letor
from isthmus_reproduce.faults import afflicted
from isthmus_reproduce.fedrisk import experiment as fedrisk
from isthmus_reproduce.fedrisk import printed as printed_fedrisk
from isthmus_reproduce.fedrisk import runs as fedrisk_runs
from isthmus_reproduce.fedrisk.cells import (
    Outcome,
    Row,
    RunUnit,
    bad_weight,
    figure_2,
    figure_4,
    restlessness,
    stacked,
)
from isthmus_reproduce.fedrisk.claims import claims
from isthmus_reproduce.fedrisk.experiment import Config, reproduce
from isthmus_reproduce.fedrisk.plans import ATTACK, MEASURES, Protocol, RunName, plans, protocol_for

SMALL = Protocol(silos=6, per_round=3, rounds=3, folds=2, seeds=1, growth=4, concentration=1.0, least=1)
KEYS = ["table", "row", "part", "variant", "mode", "data", "measure", "value", "low", "high", "n", "paper"]


def table(queries: int, seed: int) -> Letor:
    """Lists of six documents whose grades follow two of five features."""
    rng = np.random.default_rng(seed)
    rows = 6 * queries
    features = rng.random((rows, 5)).astype(np.float32)
    grades = np.digitize(features[:, 0] + features[:, 1] + rng.normal(0, 0.2, rows), [1.0, 1.4])
    names = [f"{seed}{query:03}" for query in range(queries) for _ in range(6)]
    return Letor.of(names, features, grades.astype(np.int32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folds of 90 training queries."""
    where = tmp_path_factory.mktemp("letor") / "tiny"
    for at in (1, 2):
        fold = where / f"Fold{at}"
        fold.mkdir(parents=True)
        for part, queries, seed in (("train", 90, at), ("vali", 15, at + 4), ("test", 15, at + 6)):
            write_letor(table(queries, seed), fold / f"{part}.txt")
    return where


@pytest.fixture(scope="module", autouse=True)
def light() -> Iterator[None]:
    """A protocol of three rounds, and trees that take no time."""

    def small(fold: Fold, scale: str, *, folds: int) -> Protocol:
        return SMALL

    def quick(*, data: str, protocol: Protocol, fold: int) -> dict[str, object]:
        test = fedrisk_runs.fold_of(data, fold).test
        scored = fedrisk_runs.by_query(test, test.features[:, 0].astype(np.float64))
        rows = dict.fromkeys(fedrisk.TREE_ROWS, scored)
        return {**rows, "seconds": 0.0, "processor": 0.0}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fedrisk, "protocol_for", small)
        patched.setattr(fedrisk_runs, "trees", quick)
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, folder: Path, light: None) -> Path:
    """The folder of a finished reproduction."""
    where = tmp_path_factory.mktemp("run")
    reproduce(Config(data=str(folder), scale="smoke"), where, workers=1, values=where / "values.parquet")
    return where


def cells(out: Path) -> list[dict[str, object]]:
    """What the run wrote down."""
    told: list[dict[str, object]] = json.loads((out / "cells.json").read_text())
    return told


def test_table_1_has_all_rows_in_both_modes_and_every_measure(out: Path) -> None:
    found = {(cell["mode"], cell["row"], cell["measure"]) for cell in cells(out) if cell["table"] == "1"}
    for measure in MEASURES:
        for mode in ("paper", "sound"):
            assert {(mode, row, measure) for row in printed_fedrisk.ROWS} <= found
        ours = ("default", "SCAFFOLD", "FedNova", "mean probe error", "random", "best single feature")
        assert {("sound", row, measure) for row in (*ours, *fedrisk.TREE_ROWS)} <= found
    assert ("sound", "default", "nDCG@10 gap") in found
    assert ("paper", "FedRisk", "nDCG@10 p against FedAvg") in found


def test_cells_have_the_agreed_form(out: Path) -> None:
    told = cells(out)
    assert all(list(cell) == KEYS for cell in told)
    tables = {cell["table"] for cell in told}
    assert tables >= {"1", "fig2", "fig3", "fig4", "fig5", "A3", "attack", "overrun"}
    keys = [tuple(cell[key] for key in ("table", "row", "variant", "mode", "measure")) for cell in told]
    assert len(set(keys)) == len(keys), "no figure stands twice"
    printed = [cell for cell in told if cell["paper"] is not None]
    assert len(printed) == 2 * len(printed_fedrisk.TABLE_1)
    risk = next(cell for cell in printed if cell["row"] == "FedRisk" and cell["measure"] == "nDCG@10")
    assert risk["paper"] == 37.3
    assert risk["n"] == 2


def test_plans_are_the_rows_and_curves_in_print(folder: Path) -> None:
    wide = replace(SMALL, silos=20, per_round=10)
    runs = plans(wide)
    rows = {run.row for run in runs if (run.table, run.mode) == ("1", "paper")}
    assert rows == set(printed_fedrisk.ROWS) - {"Centralised"}
    alike, not_alike = (runs[run].config.dealing for run in figure_2("paper").values())
    assert alike.concentration > 50 * not_alike.concentration
    assert set(figure_4("paper")) == {"FedProx", "FedRisk"}
    assert runs[figure_4("paper")["FedProx"]].config.strategy.proximal == 0.9
    mixes = {
        (risk.alpha_mix, risk.beta_mix)
        for run, plan in runs.items()
        if (run.table, run.mode, run.row) == ("fig5", "paper", "FedRisk")
        for risk in [plan.config.strategy.risk]
    }
    assert mixes == {(0.9, 0.1), (0.1, 0.9), (0.5, 0.5), (1.0, 0.0), (1.0, 1.0)}
    assert {plan.config.rounds.silos for run, plan in runs.items() if run.table == "fig5"} == {5}


def test_both_scorings_stand_wherever_one_does(out: Path) -> None:
    told = cells(out)
    rows = {
        (cell["row"], cell["variant"]) for cell in told if (cell["table"], cell["mode"]) == ("1", "paper")
    }
    for row in printed_fedrisk.ROWS:
        assert {(row, ""), (row, "argmax")} <= rows
    for figure in ("fig4", "fig5"):
        ends = {
            (cell["row"], cell["variant"])
            for cell in told
            if (cell["table"], cell["mode"]) == (figure, "paper")
        }
        assert {
            (row, f"{variant}, argmax" if variant else "argmax")
            for row, variant in ends
            if "argmax" not in str(variant)
        } <= ends
    measures = {cell["measure"] for cell in told if (cell["table"], cell["row"]) == ("fig4", "FedRisk")}
    assert {"nDCG@1", "nDCG@5", "nDCG@10"} <= measures, "all the curves of Figure 4"


def test_a_claim_is_judged_from_the_rows_of_the_run() -> None:
    rng = np.random.default_rng(0)
    folds = [rng.random(50) for _ in range(3)]

    outcome = Outcome({}, SMALL, 0)
    rows = (("FedRisk", 0.5), ("FedProx", 0.4), ("FedAvg", 0.6), ("FedAdagrad", 0.5), ("Centralised", 0.5))
    for name, gain in rows:
        runs = tuple((dict.fromkeys(MEASURES, fold * gain),) for fold in folds)
        outcome._add(RunName("1", "paper", name), "1", runs)
    verdicts = {claim.text: (claim.value, claim.verdict) for claim in claims(outcome)}
    assert verdicts["+15.6 % over FedProx in nDCG@5"] == ("+25.0 %", "holds")
    assert verdicts["+18.0 % over FedAvg in nDCG@10"][1] == "does not hold"
    assert verdicts["+39.7 % over FedAdagrad in nDCG@10"] == ("+0.0 %", "cannot be told")
    assert verdicts["equal to centralised in nDCG@10"][1] == "holds"
    assert verdicts["a narrower interval than FedProx in nDCG@10"][1] == "does not hold"
    assert verdicts["converged before round 20"] == ("0 rounds", "cannot be told")


def test_silos_alike_are_a_dirichlet_draw_as_printed(folder: Path) -> None:
    deals = [
        plans(SMALL)[RunName(*name)].config.dealing
        for name in (("fig2", "paper", "FedAvg", "IID"), ("1", "paper", "FedAvg"))
    ]
    assert [each.kind for each in deals] == ["dirichlet-pair"] * 2
    assert deals[0].concentration == 100 > deals[1].concentration


def test_flowers_three_names_of_one_algorithm_agree(out: Path) -> None:
    found = {
        (cell["mode"], cell["row"]): cell["value"]
        for cell in cells(out)
        if cell["table"] == "1" and cell["measure"] == "nDCG@10" and not cell["variant"]
    }
    for mode in ("paper", "sound"):
        assert found[mode, "FedAvg"] == found[mode, "FedOpt"] == found[mode, "FedAvgM"]
    assert found["sound", "Centralised"] > found["sound", "random"]


def test_the_report_names_the_data_and_explains(out: Path) -> None:
    page, plain = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert page.count("<svg") == 2 + 4 + 4 + 2 + 1 + 3 + 1
    for words in (
        "The paper's claims",
        "+15.6 % over FedProx in nDCG@5",
        "cannot be told",
        "GeoRisk formula itself",
        "One weight layer freezes",
        "Figure 5",
        "honest silos only",
    ):
        assert words in plain
    titles = [line for line in plain.split("\n") if line.startswith("**") and line.endswith("**")]
    assert len(titles) > 12
    assert all("tiny" in title for title in titles)


def rows_of(values: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str, str], Row]:
    """The rows of all tables, by (table, mode, row, variant), from the values of single queries."""
    groups: dict[tuple[str, str], dict[tuple[int, int], dict[str, list[float]]]] = {}
    for one in values:
        runs = groups.setdefault((one["experiment"], one["method"]), {})
        measures = runs.setdefault((one["fold"], one["seed"]), {})
        measures.setdefault(one["measure"], []).append(np.nan if one["value"] is None else one["value"])
    rows: dict[tuple[str, str, str, str], Row] = {}
    for (experiment, method), runs in groups.items():
        _, table, mode = experiment.split("/")
        row, _, variant = method.partition("/")
        folds: dict[int, list[Mapping[str, np.ndarray]]] = {}
        for (fold, _), measures in sorted(runs.items()):
            folds.setdefault(fold, []).append({name: np.array(each) for name, each in measures.items()})
        by_fold = tuple(tuple(seeds) for seeds in folds.values())
        rows[table, mode, row, variant] = Row(
            table, row, variant, "paper" if mode == "paper" else "sound", by_fold
        )
    return rows


def test_tables_are_made_again_from_the_values_of_single_queries(out: Path) -> None:
    values = read_per_query(out / "values.parquet")
    assert {row["seed"] for row in values} == {0}
    assert {row["fold"] for row in values} == {0, 1}
    again = rows_of(values)
    compared = 0
    for cell in cells(out):
        key = tuple(str(cell[name]) for name in ("table", "mode", "row", "variant"))
        if cell["table"] in ("1", "attack") and cell["measure"] in MEASURES:
            remade = again[key].cell(str(cell["measure"]), "tiny")
            assert (remade.value, remade.n) == (pytest.approx(cell["value"]), cell["n"])
            assert (remade.low, remade.high) == (pytest.approx(cell["low"]), pytest.approx(cell["high"]))
            compared += 1
    assert compared > 200


def test_a_killed_run_repeats_only_what_is_missing(
    folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (out / "cells.json").read_bytes()
    run = RunName("attack", "sound", "default")
    lost = next((out / "results").glob("attack_sound_default_1_*.json"))
    lost.unlink()
    computed: list[object] = []
    real = fedrisk_runs.federated

    def counted(**arguments: object) -> dict[str, object]:
        computed.append((arguments["run"], arguments["fold"]))
        return real(**arguments)

    monkeypatch.setattr(fedrisk_runs, "federated", counted)
    reproduce(Config(data=str(folder), scale="smoke"), out, workers=1)
    assert computed == [(run, 1)]
    assert (out / "cells.json").read_bytes() == before
    page = (out / "report.html").read_bytes()
    reproduce(Config(data=str(folder), scale="smoke"), out, workers=1)
    assert (out / "report.html").read_bytes() == page


def test_one_row_alone_uses_units_of_the_whole(
    folder: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(out, tmp_path / "copied")
    monkeypatch.delattr(fedrisk_runs, "train")  # nothing is trained again
    config = Config(data=str(folder), scale="smoke", only=("FedRisk",))
    found = reproduce(config, copied, workers=1)
    assert {cell.row for cell in found.cells} == {"FedRisk"}
    assert {cell.mode for cell in found.cells} == {"paper", "sound"}
    headings = [section.heading for section in found.page.sections]
    assert headings[:2] == ["What it says", "Table 1"]
    assert headings[-1] == "Time"


def test_a_row_that_is_not_there_names_the_nearest(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FedRisk"):
        reproduce(Config(data=str(folder), only=("FedRsik",)), tmp_path / "run")


def test_units_have_names_of_their_own() -> None:
    from isthmus_reproduce.notebook import _file

    names = [RunUnit(run, 0) for run in plans(SMALL)]
    assert len({_file(name) for name in names}) == len(names)


def test_honest_silos_keep_what_they_held(folder: Path) -> None:
    config = replace(plans(SMALL)[RunName("attack", "sound", "FedAvg, honest silos only")].config, seed=3)
    fold = fedrisk_runs.fold_of(str(folder), 0)
    kept, told = fedrisk_runs.honest_only(fold, config)
    honest = np.flatnonzero(~afflicted(ATTACK, 0, 3, SMALL.silos))
    assert told.dealing.silos == len(honest) == 4
    before = deal(fold.train, config.dealing, Streams(3))
    after = deal(kept.train, told.dealing, Streams(3))
    for place, silo in enumerate(honest.tolist()):
        mine = {query.partition("/")[2] for query in after.part(kept.train, place).queries}
        assert mine == set(before.part(fold.train, silo).queries)


def test_the_paper_s_protocol_where_the_data_allow_it(folder: Path) -> None:
    fold = fedrisk_runs.fold_of(str(folder), 0)
    few = protocol_for(fold, "full", folds=5)
    assert (few.silos, few.per_round, few.rounds, few.seeds) == (20, 10, 60, 3)
    many = protocol_for(replace(fold, train=table(900, 9)), "full", folds=5)
    assert (many.silos, many.per_round, many.rounds, many.seeds) == (100, 10, 100, 1)
    look = protocol_for(replace(fold, train=table(900, 9)), "smoke", folds=5)
    assert (look.folds, look.seeds, look.queries) == (2, 1, 300)
    assert "300 training queries" in look.description
    tiny = protocol_for(replace(fold, train=table(23, 9)), "smoke", folds=5)
    assert (tiny.silos, tiny.per_round) == (5, 5), "as isthmus train deals them"


def test_intervals_are_over_folds_and_tests_over_queries() -> None:
    def run(*values: float) -> dict[str, np.ndarray]:
        return {"nDCG@10": np.array(values)}

    row = Row("1", "x", "", "sound", ((run(0.2, np.nan), run(0.4, np.nan)), (run(0.5), run(0.7))))
    np.testing.assert_allclose(row.by_fold("nDCG@10"), [30, 60])
    np.testing.assert_allclose(row.by_query("nDCG@10"), [0.3, np.nan, 0.6])
    cell = row.cell("nDCG@10", "data")
    assert (cell.n, cell.value) == (4, pytest.approx(45))
    assert cell.low is None, "two folds have no interval, however many seeds"
    three = replace(row, runs=(*row.runs, (run(0.9),))).cell("nDCG@10", "data")
    assert three.low is not None
    assert three.low < 30 < 90 < (three.high or 0)
    assert row.worst("nDCG@10") == pytest.approx(20)


def test_curves_that_stopped_are_shorter() -> None:
    curves = stacked([[[0.1, 0.2, 0.3]], [[0.1, 0.2, None]]])
    assert np.isnan(curves[1, 2])
    assert restlessness(np.tile([0.5, 0.4], (2, 15))) == pytest.approx(100 * np.std([-0.1, 0.1] * 9 + [-0.1]))


def test_a_row_that_gives_bad_silos_no_weight_counts_in_the_mean_share():
    units = [[{"bad weight": 0.0}, {"bad weight": 0.5}], [{}]]
    outcome = SimpleNamespace(units=lambda run, seeds: units, protocol=SimpleNamespace(seeds=2))
    assert bad_weight(outcome, SimpleNamespace(row="default")) == 0.25
