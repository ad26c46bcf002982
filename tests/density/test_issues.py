"""Faults of tables: found where they are, and not where they are not."""

import numpy as np
import pytest

from ddnf.density.columns import columns_from
from ddnf.density.issues import find_issues

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(500, 3))


def issues(*columns, support=None, names=None):
    rows = np.stack(columns, axis=1)
    return find_issues(rows, columns_from(support, rows.shape[1]), names)


@pytest.mark.parametrize(
    "column",
    [ROWS[:, 0], RNG.standard_t(3.0, 500), RNG.exponential(size=500), RNG.normal(size=500).astype(np.float32)],
    ids=["normal", "student", "exponential", "single precision"],
)
def test_nothing_to_say(column):
    assert issues(column, ROWS[:, 1]) == ()
    assert issues(np.round(column * 3), ROWS[:, 1], support={0: "integer"}) == ()


def test_nearly_collinear_columns_are_fine():
    assert issues(ROWS[:, 0], ROWS[:, 0] + 1e-3 * ROWS[:, 1]) == ()


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (RNG.poisson(3.0, 500), "support={0: 'count'}"),
        (RNG.poisson(3.0, 500) - 3, "support={0: 'integer'}"),
        (np.round(ROWS[:, 0], 2), "the smallest gap is 0.01"),
        (np.maximum(ROWS[:, 0], 0.1), "the value 0.1 in 5"),
        (np.where(np.arange(500) == 7, 0.5, 0.25), "the value 0.25 in 100%"),
    ],
    ids=["counts", "integers", "rounded", "censored", "constant but for one row"],
)
def test_ties(column, words):
    (found,) = issues(column.astype(float), ROWS[:, 1])
    assert words in found and found.startswith("Column 0 has")


def test_a_sum_of_columns():
    (found,) = issues(*ROWS.T, ROWS[:, 0] - ROWS[:, 2] + 4.0, names=["a", "b", "c", "d"])
    assert found.startswith("Column 'd' is an exact linear function of column 'a', column 'c':")


def test_dependence_is_that_of_unbounded_space():
    positive = np.exp(0.3 * ROWS[:, 0])
    assert issues(positive, positive**2) == ()
    assert "linear function" in issues(positive, positive**2, support="positive")[0]


def test_extreme_values():
    far = ROWS[:, 0].copy()
    far[[3, 9]] = -1e5, 1e8
    (found,) = issues(far, ROWS[:, 1])
    assert "2 values" in found and "1e+08" in found and "positive" not in found
    assert "support='positive'" in issues(np.exp(5 * ROWS[:, 0]), ROWS[:, 1])[0]
    assert issues(np.exp(5 * ROWS[:, 0]), ROWS[:, 1], support={0: "positive"}) == ()


def test_large_tables_are_checked_on_some_rows():
    assert "support={0: 'count'}" in issues(np.arange(300_000.0) % 7, RNG.normal(size=300_000))[0]
