"""Posteriors of many data sets: as exact as fits of one, and those that need it are made on their own."""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddnf
from ddnf.posterior.ensemble import Ensemble
from ddnf.posterior.programs import Programs

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 2))


def regression(x, y, z):
    return -jnp.sum((y - x @ z) ** 2) / 2 - jnp.sum(z**2) / 2


def curved(y, z):
    """Counts with a rate exp(z), and a second parameter; two modes where the last entry of y is not zero."""
    apart = jnp.logaddexp(-((z[1] - y[-1]) ** 2) / 2, -((z[1] + y[-1]) ** 2) / 2)
    return jnp.sum(y[:-1] * z[0] - jnp.exp(z[0])) + apart


def targets_of(log_density, tables):
    return [ddnf.Target(partial(log_density, jnp.asarray(y)), 2) for y in tables]


def test_values_curvature_and_climbs_of_an_ensemble():
    tables = RNG.normal(size=(3, 12))
    ensemble = Ensemble([ddnf.Target(partial(regression, jnp.asarray(X), jnp.asarray(y)), 2) for y in tables])
    group, z = ensemble.group(np.array([2, 0])), RNG.normal(size=(2, 5, 2))
    for i, number in enumerate((2, 0)):
        single = Programs(partial(regression, jnp.asarray(X), jnp.asarray(tables[number])), 2)
        assert_allclose(ensemble.values(group, z)[i], single.values(z[i]))
        values, gradients, hessians = (part[i] for part in ensemble.curvature(group, z))
        assert_allclose(values, single.values(z[i]))
        assert_allclose(gradients, single.gradients(z[i])[1], atol=1e-9)
        assert_allclose(hessians[0], single.hessian(z[i, 0]), atol=1e-9)
    climbed = ensemble.climb(group, z)
    wanted = np.linalg.solve(X.T @ X + np.eye(2), X.T @ tables[2])
    assert climbed.is_mode.all()
    assert_allclose(climbed.z[0], np.tile(wanted, (5, 1)), atol=0.01)
    precision = np.linalg.inv(climbed.scale[0, 0] @ climbed.scale[0, 0].T)
    assert_allclose(precision, X.T @ X + np.eye(2))


def test_climbs_end_at_each_of_two_modes_and_nowhere_else():
    ensemble = Ensemble(targets_of(curved, [np.r_[np.ones(5), 4.0]]))
    starts = np.array([[[0.5, 3.0], [-2.0, -3.0], [0.0, 0.1], [0.0, 0.0], [1.0, np.nan]]])
    climbed = ensemble.climb(ensemble.group(np.array([0])), starts)
    assert climbed.is_mode[0].tolist() == [True, True, True, False, False]
    assert_allclose(climbed.z[0, :3], [[0.0, 4.0], [0.0, -4.0], [0.0, 4.0]], atol=0.02)


@pytest.mark.slow
def test_many_fits_agree_with_the_exact_posteriors():
    tables = RNG.normal(size=(5, 12))
    posteriors = ddnf.fit_posteriors(jr.key(0), targets_of(partial(regression, jnp.asarray(X)), tables), progress=False)
    covariance = np.linalg.inv(X.T @ X + np.eye(2))
    for posterior, y in zip(posteriors, tables, strict=True):
        z = np.asarray(posterior.sample(jr.key(1), 20_000))
        assert_allclose(z.mean(axis=0), covariance @ X.T @ y, atol=0.01)
        assert_allclose(np.cov(z.T), covariance, atol=0.01)
        assert posterior.stage == "base"
        assert not posterior.issues
        assert_allclose(posterior.log_evidence, _log_evidence(y), atol=0.01)


def _log_evidence(y):
    precision = X.T @ X + np.eye(2)
    mean = np.linalg.solve(precision, X.T @ y)
    top = -np.sum((y - X @ mean) ** 2) / 2 - np.sum(mean**2) / 2
    return top + np.log(2 * np.pi) - np.linalg.slogdet(precision)[1] / 2


@pytest.mark.slow
def test_many_fits_take_flows_and_fits_of_their_own_where_these_are_needed():
    tables = np.stack([np.r_[RNG.poisson(1.0, 4), apart] for apart in (0.0, 0.0, 5.0)]).astype(float)
    posteriors = ddnf.fit_posteriors(jr.key(0), targets_of(curved, tables), progress=False)
    grid = np.linspace(-12.0, 4.0, 20_001)
    for posterior, y in zip(posteriors, tables, strict=True):
        log_p = y[:-1].sum() * grid - 4 * np.exp(grid)
        weights = np.exp(log_p - log_p.max())
        mean = np.average(grid, weights=weights)
        deviation = np.sqrt(np.average((grid - mean) ** 2, weights=weights))
        z = np.asarray(posterior.sample(jr.key(1), 20_000))
        assert abs(z[:, 0].mean() - mean) < 0.05 * deviation
        assert abs(z[:, 0].std() / deviation - 1) < 0.05
        assert not posterior.issues
    assert [posterior.stage for posterior in posteriors[:2]] == ["flow 1", "flow 1"]
    assert abs(np.mean(np.asarray(posteriors[2].sample(jr.key(2), 4000))[:, 1] > 0) - 0.5) < 0.06


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([], "at least one"),
        ([ddnf.Target(lambda z: -jnp.sum(z**2), dim) for dim in (1, 2)], r"one dimension; got \[1, 2\]"),
        ([ddnf.Target(lambda z, y=y: -jnp.sum((z - y) ** 2), 1) for y in (1.0, 2.0)], "target 1 differs"),
        ([ddnf.Target(lambda z, n=n: -jnp.sum((z - jnp.ones(n)) ** 2), 1) for n in (1, 2)], "target 1 differs"),
    ],
)
def test_targets_of_other_forms_are_one_clear_error(targets, message, as_users_run_it):
    with pytest.raises(ValueError, match=message) as caught:
        ddnf.fit_posteriors(jax.random.key(0), targets, progress=False)
    assert "\n" not in str(caught.value)
