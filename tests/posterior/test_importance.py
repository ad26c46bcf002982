"""Diagnostics: k-hat against ArviZ and against what theory says, calibration that can fail."""

import warnings

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf.posterior import calibrate, effective_share, psis


@pytest.mark.parametrize("slope", [0.1, 0.2, 0.3, 0.45])
@pytest.mark.parametrize("count", [100, 3600])  # ArviZ 1 rounds the size of other tails differently
def test_psis_agrees_with_arviz(slope, count):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from arviz import psislw  # pyright: ignore[reportAssignmentType]
        except ImportError:  # ArviZ 1 takes the negative log weights
            from arviz_stats.base import array_stats  # pyright: ignore[reportMissingImports]

            def psislw(values):
                return array_stats.psislw(-values)

    log_weights = slope * np.random.default_rng(0).normal(size=count) ** 2
    expected, khat = psislw(log_weights.copy())
    found = psis(log_weights)
    assert_allclose(found.khat, khat, atol=1e-6)
    assert_allclose(found.log_weights, expected, atol=1e-6)


@pytest.mark.parametrize("khat", [0.2, 0.5, 0.9])
def test_khat_of_pareto_weights(khat):
    """Weights U^-k have a tail of shape k."""
    uniform = np.random.default_rng(1).uniform(size=(20, 20_000))
    found = [psis(-khat * np.log(u)).khat for u in uniform]
    assert_allclose(np.mean(found), khat, atol=0.05)


def test_equal_weights():
    smoothed = psis(np.full(1000, -700.0))
    assert smoothed.khat == 0.0
    assert_allclose(np.exp(smoothed.log_weights), 1e-3)
    assert_allclose(effective_share(np.full(1000, -700.0)), 1.0)


def test_effective_share():
    assert_allclose(effective_share(np.log([1.0, 1e-300, 1e-300, 1e-300])), 0.25)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("bad", [np.zeros(5), np.zeros((50, 2)), np.full(50, np.nan), np.full(50, -np.inf)])
def test_psis_bad_input(bad):
    with pytest.raises(ValueError, match="Expected"):
        psis(bad)


def _simulate(key):
    theta, noise = jr.normal(key, (2, 2))
    return theta, theta + noise


@pytest.mark.parametrize(("scale", "is_right"), [(1.0, True), (0.5, False), (2.0, False)])
def test_calibration_tells_right_from_wrong(scale, is_right):
    def infer(key, y):
        return y / 2 + scale * jnp.sqrt(0.5) * jr.normal(key, (99, 2))

    result = calibrate(jr.key(0), _simulate, infer, simulations=300, progress=False)
    assert result.ranks.shape == (300, 2) and result.draws == 99
    assert (result.p_values > 0.001).all() if is_right else (result.p_values < 1e-6).all()


def test_calibration_wants_draws_of_the_parameters():
    with pytest.raises(ValueError, match="Expected draws"):
        calibrate(jr.key(0), _simulate, lambda key, y: jnp.zeros(3), simulations=2, progress=False)
