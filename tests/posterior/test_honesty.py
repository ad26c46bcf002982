"""A part of benchmarks/honesty.py: no wrong fit is silent, and easy targets raise no alarm."""

import warnings

import jax
import jax.random as jr
import numpy as np
import pytest

import ddnf
from tests.models.cases import EASY, HARD

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fully_optimized():
    """These fits run for long enough to pay for the compiler's optimizations."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def fit(case, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = ddnf.fit_posterior(jr.key(0), ddnf.Target(case.log_density, case.dim), progress=False, **options)
    draws = np.asarray(posterior.sample(jr.key(1), 50_000))
    mean = np.max(np.abs(draws.mean(axis=0) - case.mean) / case.deviation)
    return posterior, max(mean, np.max(np.abs(draws.std(axis=0) / case.deviation - 1)))


def test_a_target_without_density_on_one_side_is_refused():
    with pytest.raises(ValueError, match="Expected a log_density that is finite and smooth around its modes"):
        fit(HARD["NaN below"], steps=1000, rounds=1)


@pytest.mark.parametrize("name", ["step", "narrow in broad", "two far modes", "small funnel"])
def test_a_wrong_fit_is_not_silent(name):
    posterior, error = fit(HARD[name], steps=1000, rounds=1)
    assert error < 0.1 or posterior.issues


@pytest.mark.parametrize("name", ["scales from 1e-3 to 1e3", "strong banana", "log gamma", "student with 10 degrees"])
def test_an_easy_target_raises_no_alarm(name):
    posterior, error = fit(EASY[name])
    assert error < 0.05 and not posterior.issues
