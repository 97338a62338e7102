"""Looking up many places of a sparse table."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csc_array

from isthmus.tables.grouped import CountColumns


@pytest.mark.parametrize("wanted", [5, 4000])
@pytest.mark.parametrize("shape", [(1, 1), (7, 30), (400, 50)])
def test_values_are_those_of_the_table(wanted: int, shape: tuple[int, int]) -> None:
    """However many are wanted: few places are searched for, many are taken from whole columns."""
    rng = np.random.default_rng(0)
    table = rng.integers(-2, 3, size=shape) * (rng.random(shape) < 0.4)
    counts = CountColumns(csc_array(table.astype(np.int32)))
    rows, columns = rng.integers(shape[0], size=wanted), rng.integers(shape[1], size=wanted)
    assert np.array_equal(counts.at(rows, columns), table[rows, columns])
    assert np.array_equal(counts._searched(rows, columns), table[rows, columns])
    assert np.array_equal(counts.columns(columns), table.T[columns])


def test_a_table_without_entries_is_all_zero() -> None:
    counts = CountColumns(csc_array((3, 4), dtype=np.int32))
    some = np.array([0, 2]), np.array([3, 1])
    assert counts.at(*some).tolist() == [0, 0]
    assert counts._searched(*some).tolist() == [0, 0]
