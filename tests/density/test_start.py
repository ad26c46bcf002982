"""Mixtures and the start of a default fit: densities, expectation maximization, and which start is taken."""

import dataclasses

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Identity
from numpy.testing import assert_allclose
from scipy.stats import multivariate_normal

import ddnf
from ddnf import Density, fit_density
from ddnf.density.likelihood import log_prob
from ddnf.density.mixture import Mixture, fit_mixture
from ddnf.density.start import start

RNG = np.random.default_rng(0)


def mixture():
    factors = np.tril(RNG.normal(size=(3, 2, 2)), -1) + np.eye(2) * RNG.uniform(0.5, 2, size=(3, 1, 2))
    return Mixture(np.array([0.2, 0.5, 0.3]), 3 * RNG.normal(size=(3, 2)), factors)


def test_mixture_is_that_of_scipy():
    ours, z = mixture(), RNG.normal(size=(20, 2))
    expected = 0.0
    for weight, centre, factor in zip(jnp.exp(ours.logits), ours.centres, ours._triangular(), strict=True):
        covariance = np.linalg.inv(np.asarray(factor.T @ factor))
        expected = expected + weight * multivariate_normal.pdf(z, np.asarray(centre), covariance)
    assert_allclose(ours.log_prob(jnp.asarray(z)), np.log(expected), rtol=1e-9)


def test_draws_of_a_mixture():
    ours = mixture()
    draws = np.asarray(ours.sample(jr.key(0), 40_000))
    mean = np.exp(ours.logits) @ ours.centres
    assert np.max(np.abs(draws.mean(axis=0) - mean) / draws.std(axis=0)) * 200 < 4
    side = np.linspace(-15, 15, 301)
    grid = jnp.asarray(np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2))
    assert_allclose(jnp.sum(jnp.exp(ours.log_prob(grid))) * 0.01, 1.0, atol=1e-3)


def test_expectation_maximization_finds_clusters():
    centres = np.array([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0], [6.0, 6.0]])
    rows = centres[RNG.integers(4, size=800)] + 0.5 * RNG.normal(size=(800, 2))
    truth = 0.0
    for centre in centres:
        truth = truth + 0.25 * multivariate_normal.pdf(rows, centre, 0.25)
    found = np.mean(fit_mixture(RNG, rows, 4).log_prob(rows))
    assert found > np.mean(np.log(truth)) - 0.02


CASES = {
    "normal": (RNG.normal(size=(600, 2)) @ [[1.0, 0.7], [0.0, 0.5]], 1),
    "clusters": (8.0 * RNG.integers(0, 2, size=(600, 2)) + RNG.normal(size=(600, 2)), 4),
}


@pytest.mark.parametrize("case", CASES)
def test_start_is_the_best_candidate(case):
    rows, components = CASES[case]
    begin = start(RNG, Identity((2,)), rows[:500], rows[500:])
    value = np.asarray(log_prob(begin.model, jnp.asarray(rows[500:]), None))
    assert_allclose(value.mean(), begin.log_prob.mean(axis=1).max(), rtol=1e-6)
    assert begin.model.base is not None and len(begin.model.base.logits) == components


def test_default_fit_is_no_worse_than_a_gaussian(tmp_path):
    """Normal rows; mixture and splines survive a file."""
    x = CASES["normal"][0][:200]
    density = fit_density(jr.key(0), x, steps=100, learning_rate=0.5, progress=False)
    gaussian = multivariate_normal.logpdf(x, x.mean(axis=0), np.cov(x.T)).mean()
    assert np.mean(density.log_prob(x)) > gaussian - 0.05
    density = dataclasses.replace(density, is_trained=False)
    assert "no flow improved" in str(density)
    density.save(tmp_path / "model.ddnf")
    loaded = ddnf.load(tmp_path / "model.ddnf")
    assert isinstance(loaded, Density) and str(loaded) == str(density)
    assert np.array_equal(loaded.log_prob(x), density.log_prob(x))
    assert np.array_equal(loaded.sample(jr.key(0), 5), density.sample(jr.key(0), 5))


def test_default_fit_of_a_table_with_an_extreme_value():
    x = RNG.normal(size=(200, 2))
    x[7, 1] = 1e30
    with pytest.warns(RuntimeWarning, match="the farthest is 1e"):
        density = fit_density(jr.key(0), x, steps=100, progress=False)
    draws = density.sample(jr.key(1), 1000)
    assert np.all(np.abs(draws.std(axis=0) - 1) < 0.3)
    assert np.isfinite(density.log_prob([0.0, 1e30]))
