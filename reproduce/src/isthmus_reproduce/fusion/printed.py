"""Printed values of the rank-fusion paper: Tables I-V and VII (×100 except calibration), VIII's choices.

Tables II and III: ECE, MCE, Brier on REUTERS head. Table VII's columns are labelled psP and psnDCG there but
hold P@1, an impossible psP@10, nDCG@1 and nDCG@10; only the three that can be read are included. The values
are in `printed.csv`.
"""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import Any

SIZES = {"reuters": (13_327, 90, 1.0), "acm": (24_897, 11, 1.0), "twitter": (6_997, 6, 1.0)}
"""Table I: texts, labels, labels a text."""
CALIBRATIONS = ("base", "Platt", "Isotonic", "QueryFeature")
ECE_REDUCTION = {"BM25": 85.0, "dense": 83.0}
"""Table VI: reduction of the ECE by QueryFeature, in per cent."""


def _tables() -> dict[str, dict[Any, str]]:
    tables: dict[str, dict[Any, str]] = {}
    with (files(__package__) / "printed.csv").open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            tables.setdefault(row["table"], {})[tuple(row["key"].split("|"))] = row["value"]
    return tables


def _numbers(table: str) -> dict[Any, float]:
    return {key: float(value) for key, value in _TABLES[table].items()}


_TABLES = _tables()
CALIBRATION_ERROR: dict[tuple[str, str, str], float] = _numbers("CALIBRATION_ERROR")
"""Error by (retriever, calibration, measure)."""
HEAD_TAIL: dict[tuple[str, str, str, str], float] = _numbers("HEAD_TAIL")
"""Value by (data, part, calibration, measure), for CombMNZ; nDCG@1 equals P@1 in every row."""
OVERALL: dict[tuple[str, str, str], float] = _numbers("OVERALL")
"""Value by (data, calibration, measure), for the configuration with the best psnDCG@1 on test."""
FUSIONS: dict[tuple[str, str, str, str], float] = _numbers("FUSIONS")
"""Value by (calibration, fusion, normalisation, measure), on REUTERS."""
CHOSEN: dict[tuple[str, str], tuple[str, ...]] = {
    key: tuple(value.split("|")) for key, value in _TABLES["CHOSEN"].items()
}
"""Table VIII: the best configuration by nDCG@10, chosen on test, by (data, calibration)."""
