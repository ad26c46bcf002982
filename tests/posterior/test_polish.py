"""Markov chains through a flow: exact draws, whatever the flow is, and figures that say how far to trust them."""

import dataclasses
import warnings

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.testing import assert_allclose

import ddnf
from ddnf.posterior import to_arviz
from ddnf.posterior.bridge import bridge
from ddnf.posterior.convergence import convergence
from ddnf.posterior.diagnosis import Sample
from ddnf.posterior.hmc import Space
from ddnf.posterior.issues import chain_issues
from ddnf.posterior.polish import continue_chains, run_polish
from tests.models.cases import EASY, HARD

CORRELATED = EASY["correlated"]


def identity(dim):
    return ddnf.DDNF(jr.key(0), dim, blocks=1, steps=1, hidden=(2,), output_scale=1e-3)


@pytest.fixture(scope="module")
def chains():
    """Through a flow that knows neither the mean nor the correlation of its target."""
    return run_polish(jr.key(0), Space(CORRELATED.log_density, identity(2)), draws=4000, progress=False)


def test_chains_are_exact_through_a_wrong_flow(chains):
    z = chains.z.reshape(-1, 2)
    error = 4 / np.sqrt(chains.ess)
    assert chains.is_converged and chains.flow_acceptance < 0.5
    assert_allclose(z.mean(axis=0), [1.0, -2.0], atol=error)
    assert_allclose(np.cov(z.T), [[1.0, 0.95], [0.95, 1.0]], atol=2 * error)


def test_chains_through_a_flow_that_misses_part_of_the_target_jump_less(chains):
    space = Space(CORRELATED.log_density, identity(2))
    rare = run_polish(jr.key(0), space, draws=4000, progress=False, khat=0.9)
    assert float(rare.kernel.jumps) < float(chains.kernel.jumps) == 1
    assert rare.is_converged and abs(rare.flow_acceptance - chains.flow_acceptance) < 0.1
    assert rare.z.shape[1] * rare.thin >= 1500 or rare.gradients >= 500_000


def test_divergences_are_an_issue_where_the_flow_does_not_help(chains):
    assert not chain_issues(chains, 0.0)
    rough = dataclasses.replace(chains, narrow=0.05, flow_acceptance=0.5)
    assert not chain_issues(rough, 0.0)
    assert "diverged" in chain_issues(dataclasses.replace(rough, flow_acceptance=0.02), 0.0)[0]


def test_few_draws_can_be_kept():
    space = Space(CORRELATED.log_density, identity(2))
    few = run_polish(jr.key(0), space, draws=1, progress=False)
    assert few.z.shape[:2] == few.log_weights.shape == few.divergent.shape == (32, 4) and few.is_converged


def test_chains_can_be_continued(chains):
    more = continue_chains(jr.key(1), Space(CORRELATED.log_density, identity(2)), chains, 1000)
    assert more.shape == (1000, 2)
    assert_allclose(more.mean(axis=0), [1.0, -2.0], atol=0.3)


def test_evidence_by_bridge_sampling(chains):
    """Against the known integral of a Gaussian, where importance sampling alone has a large error."""
    x = np.random.default_rng(0).normal(size=(10_000, 2))
    log_q = -np.sum(x**2, axis=1) / 2 - np.log(2 * np.pi)
    log_p = np.array([float(CORRELATED.log_density(point)) for point in x[:500]])
    sample = Sample(x[:500], log_q[:500], log_p - log_q[:500])
    found = bridge(sample, chains)
    truth = float(np.log(2 * np.pi * np.sqrt(1 - 0.95**2)) + CORRELATED.log_density(CORRELATED.mean))
    assert found.error < 0.2
    assert abs(found.log_evidence - truth) < 4 * found.error


def test_evidence_without_overlap_has_no_error_bar(chains):
    """A fit and a target a deviation apart in each of 200 dimensions."""
    rng = np.random.default_rng(0)
    q, p = rng.normal(size=(2000, 200)), 1 + rng.normal(size=(32, 100, 200))
    log_weights = [np.sum(z**2 - (z - 1) ** 2, axis=-1) / 2 for z in (q, p)]
    apart = dataclasses.replace(
        chains, z=chains.z[:, :100], divergent=chains.divergent[:, :100], log_weights=log_weights[1]
    )
    assert bridge(Sample(q, np.zeros(len(q)), log_weights[0]), apart).error == np.inf


@pytest.mark.slow
def test_proposals_of_the_flow_move_chains_between_modes():
    case = HARD["two far modes"]
    target = ddnf.Target(case.log_density, 2)
    posterior = ddnf.fit_posterior(jr.key(0), target, exact="always", steps=200, rounds=1, progress=False)
    assert posterior.stage == "polish" and not posterior.issues
    assert posterior.chains is not None and posterior.chains.rhat < 1.01
    z = np.asarray(posterior.sample(jr.key(1), 5000))
    assert abs(np.mean(z[:, 0] > 0) - 0.5) < 0.05
    assert posterior.sample(jr.key(1), 12_000).shape == (12_000, 2)
    assert "Markov chains" in str(posterior) and "polish" in str(posterior.log)
    table = posterior.summary()
    assert table.rows["z[0]"]["rhat"] < 1.01 < table.rows["z[0]"]["ess_bulk"]


@pytest.mark.slow
def test_chains_that_do_not_converge_are_reported(monkeypatch):
    """Two modes, a flow that knows one of them, and no budget."""
    monkeypatch.setattr("ddnf.posterior.polish._RUNS", 2)
    wall = ddnf.Target(lambda z: -20 * jnp.sum((z**2 - 4) ** 2) - z[0] ** 2 / 2, 2)
    posterior = ddnf.Posterior(
        identity(2), wall, 0.0, 0.0, 0.0, 9.0, 0.0, issues=(), losses=np.zeros(0), seconds=np.zeros(0)
    )
    with pytest.warns(RuntimeWarning, match="Markov chains have not converged: R-hat"):
        polished = posterior.polish(jr.key(0), 1000, progress=False)
    assert polished.issues and polished.chains is not None and polished.chains.rhat > 1.01


def test_saved_chains_come_back(tmp_path, chains):
    target = ddnf.Target(CORRELATED.log_density, 2)
    figures = dict(elbo=0.0, elbo_error=0.0, log_evidence=0.0, khat=0.0, ess=1.0)
    posterior = ddnf.Posterior(
        identity(2), target, **figures, issues=(), losses=np.zeros(0), seconds=np.zeros(0), chains=chains
    )
    posterior.save(tmp_path / "chains.ddnf")
    loaded = ddnf.load(tmp_path / "chains.ddnf", target=target)
    assert isinstance(loaded, ddnf.Posterior) and loaded.chains is not None
    assert (loaded.chains.z == chains.z).all() and loaded.chains.rhat == chains.rhat
    assert_allclose(loaded.sample(jr.key(0), 50), posterior.sample(jr.key(0), 50))
    assert loaded.sample(jr.key(0), chains.z.shape[0] * chains.z.shape[1] + 10).shape[1] == 2
    broken = dataclasses.replace(chains, thin=0)
    dataclasses.replace(posterior, chains=broken).save(tmp_path / "broken.ddnf")
    with pytest.raises(ValueError, match="do not fit together"):
        ddnf.load(tmp_path / "broken.ddnf")


def test_arviz_gets_all_chains(chains):
    figures = dict(elbo=0.0, elbo_error=0.0, log_evidence=0.0, khat=0.0, ess=1.0)
    target = ddnf.Target(CORRELATED.log_density, 2)
    posterior = ddnf.Posterior(
        identity(2), target, **figures, issues=(), losses=np.zeros(0), seconds=np.zeros(0), chains=chains
    )
    data = to_arviz(posterior, jr.key(0))
    assert data.posterior["z"].shape == chains.z.shape
    assert data.sample_stats["lp"].shape == chains.z.shape[:2]


@pytest.mark.parametrize("seed", range(3))
def test_convergence_agrees_with_arviz(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arviz = pytest.importorskip("arviz")
    if int(arviz.__version__.split(".")[0]) > 0:
        pytest.skip("ArviZ 1 does not take arrays here")
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(4, 500, 2))
    draws = np.zeros_like(noise)
    for t in range(1, 500):
        draws[:, t] = [0.0, 0.9] * draws[:, t - 1] + noise[:, t]
    draws[0, :, 1] += 0.5
    found = convergence(draws)
    for number in range(2):
        column = draws[..., number]
        assert_allclose(found.rhat[number], float(arviz.rhat(column)), rtol=1e-3)
        assert_allclose(found.ess_bulk[number], float(arviz.ess(column)), rtol=0.05)
        assert_allclose(found.ess_tail[number], float(arviz.ess(column, method="tail")), rtol=0.05)
