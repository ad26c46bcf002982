"""A part of benchmarks/honesty.py: no wrong fit is silent, and easy targets raise no alarm."""

import warnings
from functools import partial

import jax.random as jr
import numpy as np
import pytest

import ddnf
from tests.models.cases import EASY, HARD, judge

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fully_optimized")]


def fit(case, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = ddnf.fit_posterior(jr.key(0), ddnf.Target(case.log_density, case.dim), progress=False, **options)
    draws = np.asarray(posterior.sample(jr.key(1), 10_000), float)
    ess = len(draws) if posterior.chains is None else posterior.chains.ess
    return posterior, partial(judge, draws, case.mean, case.deviation, ess=ess, kurtosis=case.kurtosis)


def test_a_target_without_density_on_one_side_is_refused():
    with pytest.raises(ValueError, match="Expected a log_density that is finite and smooth around its modes"):
        fit(HARD["NaN below"], steps=1000, rounds=1)


@pytest.mark.parametrize("name", ["step", "narrow in broad", "two far modes", "small funnel"])
def test_a_wrong_fit_is_not_silent(name):
    posterior, judged = fit(HARD[name], steps=1000, rounds=1)
    assert judged(tolerance=0.1).is_right or posterior.issues


@pytest.mark.parametrize("name", ["scales from 1e-3 to 1e3", "strong banana", "log gamma", "student with 10 degrees"])
def test_an_easy_target_raises_no_alarm(name):
    posterior, judged = fit(EASY[name])
    assert judged(tolerance=0.05).is_right and not posterior.issues
