"""Chains from random starts to the bulk of a target, where modes are far from it."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Identity
from numpy.testing import assert_allclose

import ddnf
from ddnf.posterior import convergence, warmup
from ddnf.posterior.cost import operations
from ddnf.posterior.hmc import Space, initial_kernel, shrunk_moments
from ddnf.posterior.polish import run_polish
from ddnf.posterior.warmup import best_starts, warm_up
from tests.models.cases import gaussian, judge

SCALES = np.geomspace(0.01, 100.0, 5)


def test_chains_find_the_bulk_from_far_away_whatever_the_scales():
    case = gaussian(SCALES, np.diag(SCALES**2))
    starts = jr.uniform(jr.key(0), (32, 5), minval=-2.0, maxval=2.0)
    warm = warm_up(jr.key(1), Space(case.log_density, Identity((5,))), starts)
    assert warm.rhat < 1.3 and warm.gradients < 700_000
    assert_allclose(np.sqrt(np.sum(warm.scale**2, axis=1)), SCALES, rtol=0.5)
    assert (np.abs(warm.mean - SCALES) < SCALES).all()


def test_a_chain_that_is_lost_goes_on_elsewhere():
    """One starts on a plateau that it cannot leave."""

    def density(z):
        return jnp.where(z[0] > 50, -1e4, -jnp.sum(z**2) / 2)

    starts = jr.normal(jr.key(0), (32, 3)).at[7, 0].set(1e6)
    warm = warm_up(jr.key(1), Space(density, Identity((3,))), starts)
    assert np.abs(warm.z).max() < 10 and warm.rhat < 1.1
    assert_allclose(warm.mean, 0.0, atol=0.3)


def test_long_chains_are_judged_by_some_of_their_draws(monkeypatch):
    """Sorting takes longer than the chains otherwise."""
    judged = []
    monkeypatch.setattr(warmup, "convergence", lambda draws: judged.append(draws.shape[1]) or convergence(draws))
    starts = jr.normal(jr.key(0), (32, 3)) + 50 * (-1.0) ** jnp.arange(32)[:, None]
    # Two modes, so that the chains never meet.
    warmup.warm_up(jr.key(1), Space(lambda z: -jnp.sum((jnp.abs(z) - 50) ** 2) / 2, Identity((3,))), starts)
    assert len(judged) > 10 and 50 < max(judged) <= 100


def test_starts_are_those_of_highest_density():
    target = ddnf.Target(lambda z: jnp.where(z[0] > 1.5, jnp.nan, -jnp.sum((z + 1) ** 2)), 2)
    best = np.asarray(best_starts(jr.key(0), target, 32))
    every = np.stack([target.start(jr.fold_in(jr.key(0), number)) for number in range(128)])
    assert best.shape == (32, 2) and (best[:, 0] <= 1.5).all()
    assert np.sum((best + 1) ** 2, axis=1).max() <= np.quantile(np.sum((every + 1) ** 2, axis=1), 0.3)


def test_moments_of_few_draws_have_small_correlations():
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4, 500, 2)) @ np.array([[1.0, 0.9], [0.0, 0.4]])
    for ess, shrunk in ((1e9, 1.0), (2.0, 0.5)):
        mean, deviation, scale = shrunk_moments(draws, ess)
        assert_allclose(mean, 0.0, atol=0.1)
        assert_allclose(np.sqrt(np.sum(scale**2, axis=1)), deviation)
        covariance = np.cov(draws.reshape(-1, 2).T)
        assert_allclose((scale @ scale.T)[0, 1], shrunk * covariance[0, 1], rtol=1e-2)


def test_steps_get_smaller_where_trajectories_diverge():
    """A ridge that is a hundred times narrower at one end."""

    def density(z):
        width = jnp.exp(jnp.clip(z[0], -3.0, 3.0) * 1.5)
        return -(z[0] ** 2) / 8 - jnp.sum((z[1:] / width) ** 2) / 2 - 5 * jnp.log(width)

    chains = run_polish(jr.key(0), Space(density, Identity((6,))), draws=1000, progress=False)
    assert chains.kernel.target > initial_kernel(6, 1.0).target


def test_the_cost_of_a_log_density():
    matrix = np.ones((200, 50))

    def loop(z):
        return jax.lax.scan(lambda carry, _: (carry * 0.9 + z[0], None), 0.0, length=100)[0]

    product, plain = operations(lambda z: jnp.sum(matrix @ z), 50), operations(jnp.sum, 50)
    assert plain < 1000 and product - plain == pytest.approx(2 * 200 * 50 + 200, rel=0.1)
    assert operations(loop, 1) > 100 * plain
    assert operations(lambda z: jax.lax.while_loop(lambda x: x < z[0], lambda x: x + 1, 0.0), 1) > 1e5


@pytest.mark.slow
def test_a_hierarchy_whose_mode_is_a_funnel_needs_no_flow():
    """Normal means in 60 groups, centred, which hardly differ: the density grows as their deviation goes to zero."""
    rng = np.random.default_rng(0)
    y = 0.2 * rng.normal(size=(60, 1)) + 0.5 * rng.normal(size=(60, 4))

    def density(z):
        mu, log_tau, theta = z[0], z[1], z[2:]
        prior = -(mu**2) / 50 - jnp.exp(2 * log_tau) / 8 + log_tau
        return (
            prior
            - jnp.sum((theta - mu) ** 2) / 2 * jnp.exp(-2 * log_tau)
            - 60 * log_tau
            - 2 * jnp.sum((y.T - theta) ** 2)
        )

    posterior = ddnf.fit_posterior(jr.key(0), ddnf.Target(density, 62), progress=False)
    assert [row.stage for row in posterior.log][2:] == ["warm up", "chains", "check"] and not posterior.issues
    # The means of the groups, integrated out: y_j ~ N(mu, tau^2 + 0.5^2 / 4).
    log_tau = np.linspace(-12, 2, 4000)
    tau = np.exp(log_tau)
    variance, means = tau**2 + 0.25 / 4, y.mean(axis=1)
    precision = 60 / variance + 1 / 25
    mean = means.sum() / variance / precision
    log_p = log_tau - 30 * np.log(variance) - np.log(precision) / 2 - tau**2 / 8
    log_p = log_p - np.sum(means**2) / variance / 2 + mean**2 * precision / 2
    p = np.exp(log_p - log_p.max())
    first, second = (np.sum(p * log_tau**power) / p.sum() for power in (1, 2))
    draws = np.asarray(posterior.sample(jr.key(1), 10_000), float)[:, 1:2]
    deviation = np.sqrt(second - first**2)
    # The neck of the funnel is a long tail: it makes deviations of draws vary.
    kurtosis = np.array([np.sum(p * (log_tau - first) ** 4) / p.sum() / deviation**4])
    assert posterior.chains is not None and kurtosis[0] > 15
    truth = np.array([first]), np.array([deviation])
    assert judge(draws, *truth, ess=posterior.chains.ess, tolerance=0.05, kurtosis=kurtosis).is_right
