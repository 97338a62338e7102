"""What the rank-fusion paper prints: Tables I-V and VII (×100 except calibration), and Table VIII's choices.

Tables II and III: ECE, MCE, Brier on REUTERS head. Table VII's columns are labelled psP and psnDCG there but
hold P@1, an impossible psP@10, nDCG@1 and nDCG@10; only the three that can be read are kept.
"""

from __future__ import annotations

SIZES = {"reuters": (13_327, 90, 1.0), "acm": (24_897, 11, 1.0), "twitter": (6_997, 6, 1.0)}
"""Table I: texts, labels, labels a text."""

CALIBRATIONS = ("base", "Platt", "Isotonic", "QueryFeature")

_II = {
    "BM25": ((0.342, 0.512, 0.187), (0.089, 0.156, 0.142), (0.076, 0.143, 0.138), (0.052, 0.098, 0.125)),
    "dense": ((0.289, 0.478, 0.165), (0.078, 0.142, 0.128), (0.065, 0.128, 0.122), (0.048, 0.092, 0.118)),
}
CALIBRATION_ERROR: dict[tuple[str, str, str], float] = {
    (retriever, calibration, measure): value
    for retriever, rows in _II.items()
    for calibration, row in zip(CALIBRATIONS, rows, strict=True)
    for measure, value in zip(("ECE", "MCE", "Brier"), row, strict=True)
}
"""(retriever, calibration, measure)."""

ECE_REDUCTION = {"BM25": 85.0, "dense": 83.0}
"""Table VI: by how many per cent QueryFeature reduces the ECE."""

FOUR_MEASURES = ("P@1", "P@5", "nDCG@5", "nDCG@10")
_IV = {
    ("reuters", "head"): (
        (93.7, 19.9, 97.2, 97.3),
        (92.7, 19.9, 96.9, 97.0),
        (93.1, 20.0, 97.0, 97.1),
        (92.9, 19.9, 96.9, 97.0),
    ),
    ("reuters", "tail"): (
        (86.3, 19.5, 92.6, 93.2),
        (84.8, 19.5, 92.0, 92.4),
        (84.9, 19.5, 92.1, 92.5),
        (84.5, 19.4, 91.3, 91.9),
    ),
    ("twitter", "head"): (
        (91.0, 20.0, 96.7, 96.7),
        (98.6, 20.0, 99.5, 99.5),
        (98.8, 20.0, 99.5, 99.5),
        (97.1, 20.0, 98.9, 98.9),
    ),
    ("twitter", "tail"): (
        (86.0, 20.0, 94.0, 94.0),
        (89.2, 20.0, 95.3, 95.3),
        (90.3, 20.0, 95.9, 95.9),
        (85.8, 20.0, 94.1, 94.1),
    ),
    ("acm", "head"): (
        (89.4, 20.0, 95.8, 95.8),
        (89.6, 20.0, 95.9, 95.9),
        (89.7, 20.0, 95.9, 95.9),
        (90.4, 20.0, 96.2, 96.2),
    ),
    ("acm", "tail"): (
        (83.8, 19.6, 91.8, 92.6),
        (82.2, 19.8, 91.8, 92.2),
        (82.2, 19.8, 91.8, 92.1),
        (83.6, 19.8, 92.4, 92.7),
    ),
}
HEAD_TAIL: dict[tuple[str, str, str, str], float] = {
    (data, part, calibration, measure): value
    for (data, part), rows in _IV.items()
    for calibration, row in zip(CALIBRATIONS, rows, strict=True)
    for measure, value in zip(FOUR_MEASURES, row, strict=True)
} | {
    (data, part, calibration, "P@10"): 9.9 if (data, part) == ("reuters", "tail") else 10.0
    for data, part in _IV
    for calibration in CALIBRATIONS
}
"""(data, part, calibration, measure), for CombMNZ; nDCG@1 equals P@1 in every row."""

OVERALL_MEASURES = ("P@1", "P@5", "psP@1", "psP@5", "psP@10", "nDCG@5", "nDCG@10", "psnDCG@5", "psnDCG@10")
_V = {
    "reuters": (
        (92.6, 19.9, 90.1, 98.6, 99.5, 96.5, 96.6, 95.0, 95.3),
        (92.3, 19.9, 89.8, 98.8, 99.8, 96.5, 96.6, 95.0, 95.3),
        (92.2, 19.9, 89.7, 98.8, 99.7, 96.4, 96.6, 95.0, 95.3),
        (92.8, 19.9, 90.3, 99.0, 99.7, 96.7, 96.8, 95.3, 95.5),
    ),
    "acm": (
        (87.5, 19.8, 87.0, 99.0, 100.0, 94.3, 94.6, 94.1, 94.4),
        (86.8, 19.9, 86.3, 99.5, 100.0, 94.3, 94.5, 94.1, 94.3),
        (86.9, 19.9, 86.4, 99.6, 100.0, 94.3, 94.5, 94.1, 94.2),
        (88.0, 19.9, 87.4, 99.5, 100.0, 94.8, 94.9, 94.5, 94.6),
    ),
    "twitter": (
        (91.8, 20.0, 90.8, 100.0, 100.0, 96.7, 96.7, 96.3, 96.3),
        (96.2, 20.0, 95.7, 100.0, 100.0, 98.4, 98.4, 98.2, 98.2),
        (96.6, 20.0, 96.0, 100.0, 100.0, 98.6, 98.6, 98.3, 98.3),
        (94.4, 20.0, 93.6, 100.0, 100.0, 97.8, 97.8, 97.4, 97.4),
    ),
}
OVERALL: dict[tuple[str, str, str], float] = {
    (data, calibration, measure): value
    for data, rows in _V.items()
    for calibration, row in zip(CALIBRATIONS, rows, strict=True)
    for measure, value in zip(OVERALL_MEASURES, row, strict=True)
} | {(data, calibration, "P@10"): 10.0 for data in _V for calibration in CALIBRATIONS}
"""(data, calibration, measure), for the configuration with the best psnDCG@1 on test."""

_VII = {
    ("base", "CombMNZ", "none"): (92.6, 96.6),
    ("base", "UDLF-RLSIM", "none"): (92.3, 96.5),
    ("base", "CombMNZ-Conf", "none"): (92.4, 96.5),
    ("base", "CombMULT-Conf", "none"): (92.3, 96.5),
    ("Platt", "CombMNZ-Variant", "zmuv"): (92.3, 96.6),
    ("Platt", "CombMULT-Conf", "zmuv"): (92.2, 96.6),
    ("Platt", "CombMNZ-Conf", "zmuv"): (92.3, 96.6),
    ("Platt", "CombMNZ", "zmuv"): (92.3, 96.6),
    ("Platt", "UDLF-RLSIM", "zmuv"): (92.2, 96.5),
    ("Platt", "CombMNZ", "minmax"): (91.8, 96.4),
    ("Isotonic", "CombMULT-Conf", "zmuv"): (92.2, 96.6),
    ("Isotonic", "CombMNZ-Conf", "zmuv"): (92.2, 96.6),
    ("Isotonic", "CombMNZ-Variant", "zmuv"): (92.2, 96.6),
    ("Isotonic", "CombMNZ", "zmuv"): (92.2, 96.6),
    ("Isotonic", "UDLF-RLSIM", "zmuv"): (92.2, 96.5),
    ("Isotonic", "CombMNZ", "minmax"): (91.9, 96.4),
    ("QueryFeature", "CombMULT-Conf", "zmuv"): (92.8, 96.8),
    ("QueryFeature", "CombMNZ-Variant", "zmuv"): (92.7, 96.8),
    ("QueryFeature", "CombMNZ-Conf", "zmuv"): (92.8, 96.8),
    ("QueryFeature", "CombMNZ", "zmuv"): (92.8, 96.8),
    ("QueryFeature", "UDLF-RLSIM", "zmuv"): (92.7, 96.7),
    ("QueryFeature", "CombMNZ", "minmax"): (92.5, 96.6),
}
FUSIONS: dict[tuple[str, str, str, str], float] = {
    (*key, measure): value
    for key, row in _VII.items()
    for measure, value in zip(("P@1", "nDCG@10"), row, strict=True)
}
"""(calibration, fusion, normalisation, measure), on REUTERS."""

CHOSEN: dict[tuple[str, str], tuple[str, str]] = {
    ("reuters", "base"): ("CombMNZ", "none"),
    ("reuters", "Platt"): ("CombMNZ-Variant", "zmuv"),
    ("reuters", "Isotonic"): ("CombMULT-Conf", "zmuv"),
    ("reuters", "QueryFeature"): ("CombMULT-Conf", "zmuv"),
    ("acm", "base"): ("CombMNZ", "none"),
    ("acm", "Platt"): ("CombMNZ", "none"),
    ("acm", "Isotonic"): ("CombMNZ", "none"),
    ("acm", "QueryFeature"): ("CombMNZ-Variant", "none"),
    ("twitter", "base"): ("CombMNZ-Conf", "none"),
    ("twitter", "Platt"): ("CombMNZ-Conf", "none"),
    ("twitter", "Isotonic"): ("CombMNZ", "none"),
    ("twitter", "QueryFeature"): ("CombMNZ-Variant", "none"),
}
"""Table VIII: the best by nDCG@10, chosen on test."""
