"""Held-out rows: how many, and what they say of a choice that they made."""

import numpy as np
import pytest

from ddnf.density.holdout import MOST_HELD_OUT, held_out_count, optimism, part_numbers

RNG = np.random.default_rng(0)


def test_how_many():
    assert held_out_count(0.1, 61) == 7
    assert held_out_count(0.1, 10**7) == MOST_HELD_OUT
    assert held_out_count(50_000, 10**6) == 50_000


def test_the_best_of_many_equal_choices_is_no_better_than_they_are():
    """40 choices with the same true loss: the smallest mean is too small by 2 standard errors without correction."""
    corrected, naive = [], []
    for _ in range(300):
        losses = RNG.normal(size=(40, 50))
        part = part_numbers(50)
        values = np.stack([losses[:, part == i].mean(axis=1) for i in range(5)], axis=1)
        best = losses.mean(axis=1).min()
        naive.append(best)
        corrected.append(best + optimism(values, np.full(5, 10.0)))
    assert np.mean(naive) < -0.25
    assert abs(np.mean(corrected)) < 4 * np.std(corrected) / np.sqrt(300)


def test_a_clear_choice_needs_no_correction():
    values = np.array([1.0, 0.0, 2.0])[:, None] + 0.01 * RNG.normal(size=(3, 5))
    assert optimism(values, np.ones(5)) == pytest.approx(0.0, abs=1e-12)


def test_failed_choices_are_passed_over():
    values = np.array([[np.nan, np.nan], [1.0, 2.0], [np.inf, 1.0]])
    assert optimism(values, np.ones(2)) == pytest.approx(0.0)
    assert np.isnan(optimism(values[:, :1], np.ones(1)))
