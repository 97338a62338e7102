"""Printed values of the FedRisk paper: Table 1 (×100, mean and half-width of the 95 % interval, five folds).

MSLR-WEB10K dealt non-IID to 100 clients, ten a round, 100 rounds. The paper does not say which grade counts
as relevant for MRR; its values stand beside ours at grade 1.
"""

from __future__ import annotations

MEASURES = ("nDCG@1", "nDCG@5", "nDCG@10", "MRR@1", "MRR@5", "MRR@10")

_TABLE_1 = {
    "FedRisk": ((27.0, 0.8), (31.8, 1.0), (37.3, 1.2), (48.0, 1.5), (63.9, 1.3), (64.9, 1.3)),
    "FedAvgM": ((27.4, 11.3), (29.8, 10.0), (34.2, 8.5), (46.4, 16.2), (61.6, 14.0), (62.8, 13.2)),
    "FedProx": ((24.1, 6.0), (27.5, 4.1), (32.8, 3.6), (41.8, 8.2), (58.2, 7.5), (59.5, 7.1)),
    "FedOpt": ((24.1, 9.5), (27.5, 7.4), (32.7, 7.0), (42.6, 14.3), (58.5, 11.6), (59.9, 11.0)),
    "FedTrimmedAvg": ((20.8, 5.3), (26.2, 5.1), (32.5, 4.6), (37.3, 9.4), (54.9, 8.4), (56.4, 7.9)),
    "FedAvg": ((23.0, 8.1), (26.2, 7.0), (31.6, 6.7), (39.8, 11.7), (56.0, 11.2), (57.5, 10.5)),
    "FedAdam": ((17.8, 3.3), (22.8, 3.5), (28.8, 3.5), (32.9, 5.5), (50.5, 5.9), (52.3, 5.4)),
    "FedMedian": ((17.9, 3.0), (22.6, 3.4), (28.3, 3.8), (33.1, 4.9), (50.3, 5.6), (52.0, 5.2)),
    "FedYogi": ((17.0, 1.1), (21.3, 1.2), (27.1, 1.2), (31.0, 1.7), (47.8, 2.0), (49.8, 1.9)),
    "FedAdagrad": ((16.7, 2.0), (20.9, 1.4), (26.7, 1.6), (30.8, 2.7), (47.3, 2.6), (49.3, 2.5)),
    "Centralised": ((32.4, 3.9), (35.0, 3.2), (35.9, 2.2), (58.5, 5.7), (73.2, 4.1), (73.7, 4.0)),
}
ROWS = tuple(_TABLE_1)
"""The eleven rows, in the paper's order."""

TABLE_1: dict[tuple[str, str], tuple[float, float]] = {
    (row, measure): cell
    for row, cells in _TABLE_1.items()
    for measure, cell in zip(MEASURES, cells, strict=True)
}
"""Mean and half-width by (row, measure)."""
