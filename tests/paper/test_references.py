"""ADVI and NUTS on a Gaussian, whose moments are known."""

import arviz
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf_paper.references import _convergence, advi, nuts

MEAN = np.array([3.0, -1.0])
COVARIANCE = np.array([[1.0, 0.6], [0.6, 0.5]])


def log_density(z):
    difference = z - MEAN
    return -difference @ jnp.asarray(np.linalg.inv(COVARIANCE)) @ difference / 2


def moments(flow):
    """Mean and covariance of a standard normal through an affine map."""
    matrix = jax.jacobian(flow.transform)(jnp.zeros(2))
    return flow.transform(jnp.zeros(2)), matrix @ matrix.T


def test_full_rank_advi_finds_the_gaussian():
    fit = advi(jr.key(0), log_density, 2, full_rank=True, steps=2000, learning_rate=0.1)
    mean, covariance = moments(fit.flow)
    assert_allclose(mean, MEAN, atol=0.05)
    assert_allclose(covariance, COVARIANCE, atol=0.05)
    assert fit.losses.shape == (2000,) and fit.losses[-100:].mean() < fit.losses[:100].mean()


def test_mean_field_advi_has_the_conditional_variances():
    """The diagonal Gaussian closest in KL(q|p) has the precisions' diagonal."""
    mean, covariance = moments(advi(jr.key(0), log_density, 2, steps=2000, learning_rate=0.1).flow)
    assert_allclose(mean, MEAN, atol=0.05)
    assert_allclose(covariance, np.diag(1 / np.diag(np.linalg.inv(COVARIANCE))), atol=0.02)


def test_nuts_draws_from_the_gaussian():
    run = nuts(jr.key(0), log_density, 2, warmup=300, samples=500)
    assert run.draws.shape == (2000, 2)
    assert (run.r_hat < 1.02).all() and (run.ess > 300).all() and run.divergences == 0
    error = np.sqrt(np.diag(COVARIANCE) / run.ess)
    assert (np.abs(run.draws.mean(0) - MEAN) < 4 * error).all()
    assert_allclose(np.cov(run.draws.T), COVARIANCE, atol=0.15)


def test_one_chain():
    assert nuts(jr.key(0), log_density, 2, chains=1, warmup=50, samples=40).draws.shape == (40, 2)


def test_convergence_figures_are_arviz_s():
    """Bulk effective sample size and rank-normalized R-hat, of chains that agree and of chains that don't."""
    rng = np.random.default_rng(0)
    draws = np.cumsum(rng.normal(size=(4, 400, 3)), axis=1)
    draws[..., 1:] = rng.normal(size=(4, 400, 2))
    draws[..., 2] += np.arange(4)[:, None] / 5
    r_hat, ess = _convergence(draws)
    for i in range(3):
        assert_allclose(r_hat[i], arviz.rhat(draws[..., i], method="z_scale"), rtol=1e-6)
        assert_allclose(ess[i], arviz.ess(draws[..., i], method="bulk"), rtol=0.05)


@pytest.mark.parametrize(
    ("method", "option"), [(advi, "steps"), (advi, "particles"), (nuts, "chains"), (nuts, "samples")]
)
def test_bad_input(method, option):
    with pytest.raises(ValueError, match=f"Expected {option} of at least 1; got 0"):
        method(jr.key(0), log_density, 2, **{option: 0})
