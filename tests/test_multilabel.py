"""Labels by the million, on few: sparse rows give what arrays would, and probabilities hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from isthmus.classification import Bands, best_per_row, from_lists, label_counts
from isthmus.classification.sparse import read_arrays, sparse_arrays, sparse_of, write_arrays
from isthmus.errors import DataError


def test_the_best_of_every_row_are_kept_with_zeros_and_ties_to_the_lower_column() -> None:
    scores = csr_array(
        (np.array([3.0, 0.0, 3.0, 1.0, -1.0]), np.array([2, 0, 1, 3, 2]), np.array([0, 4, 4, 5])),
        shape=(3, 4),
    )
    best = best_per_row(scores, 2)
    assert best.dtype == np.float32
    assert best[[0]].indices.tolist() == [2, 1]
    assert best_per_row(scores, 1)[[0]].indices.tolist() == [1]
    assert best_per_row(scores, 3).nnz == 4
    assert np.diff(best_per_row(scores, 9).indptr).tolist() == [4, 0, 1], "a label with score 0 is listed"


def test_labels_from_lists_and_their_bands() -> None:
    labels = from_lists([[0, 2, 2], [], [2]], 4)
    assert labels.toarray().tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert label_counts(labels).tolist() == [1, 0, 2, 0]
    bands = Bands((1, 4, 16))
    assert bands.names == ("0", "1–3", "4–15", "16+")
    assert bands.of([0, 1, 3, 4, 15, 16, 999]).tolist() == [0, 1, 1, 2, 2, 3, 3]
    counts = np.array([9, 1, 5, 3, 2, 1, 1, 1, 1, 1])
    assert Bands.head_and_tail(counts).edges == (3,), "three of ten"


def test_sparse_arrays_come_back_from_disk(tmp_path: Path) -> None:
    labels = from_lists([[1], [0, 2]], 3)
    write_arrays(tmp_path / "a.npz", **sparse_arrays("labels", labels))
    again = sparse_of("labels", read_arrays(tmp_path / "a.npz"))
    assert again.dtype == bool
    assert (again.toarray() == labels.toarray()).all()
    (tmp_path / "a.npz").write_bytes(b"half")
    with pytest.raises(DataError, match="no arrays"):
        read_arrays(tmp_path / "a.npz")
