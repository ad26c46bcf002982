"""Several modes: a mixture at the modes is the base, with the right weights, in files too."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Identity
from numpy.testing import assert_allclose

import ddnf
from ddnf.posterior.evaluate import draw
from ddnf.posterior.hmc import Kernel, Space, run
from ddnf.posterior.mixture import ModeMixture
from ddnf.posterior.modes import Search, gaussians, with_all_modes
from ddnf.posterior.objective import ReverseKL, whitening
from ddnf.training import Draw
from tests.models.cases import HARD


@pytest.fixture(scope="module")
def two():
    case = HARD["two modes"]
    return case, ddnf.fit_posterior(jr.key(0), ddnf.Target(case.log_density, 2), steps=500, progress=False)


def test_weights_of_modes_are_recovered(two):
    case, posterior = two
    assert posterior.base is not None and not posterior.issues
    z = np.asarray(posterior.sample(jr.key(1), 20_000))
    assert_allclose(np.mean(z[:, 0] < 0), 0.3, atol=0.02)
    assert_allclose(z.mean(axis=0), case.mean, atol=0.05 * 4)
    assert_allclose(posterior.log_evidence, 0.0, atol=0.02)


def test_density_and_files(two, tmp_path):
    _, posterior = two
    z, log_q = draw(posterior.flow, jr.key(0), 50, base=posterior.base)
    assert_allclose(posterior.log_prob(z), log_q, atol=1e-6)
    posterior.save(tmp_path / "p.ddnf")
    loaded = ddnf.load(tmp_path / "p.ddnf")
    assert isinstance(loaded, ddnf.Posterior)
    assert_allclose(loaded.sample(jr.key(0), 10), posterior.sample(jr.key(0), 10))
    assert str(loaded.log) == str(posterior.log) and loaded.stage == posterior.stage


def test_gradients_vanish_where_the_mixture_is_the_target():
    """The path gradient of each single draw is zero, as with a normal base."""
    base = ModeMixture(
        jnp.log(jnp.array([0.3, 0.7])), jnp.array([[-1.0, 0.0], [1.0, 0.0]]), jnp.eye(2) * jnp.ones((2, 1, 1))
    )
    whiten = whitening(np.zeros(2), np.eye(2), "full")
    loss = ReverseKL(base.log_prob, None, None, 8, "path", 0, jnp.asarray(1.0), base)
    value, slope = eqx.filter_jit(eqx.filter_value_and_grad(loss))(whiten.end(), Draw(jr.key(0), jnp.array(0), None))
    assert_allclose(value, 0.0, atol=1e-7)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(slope)) < 1e-6


def test_searches_go_on_until_no_mode_is_left():
    """Four random starts find two or three of the eight."""
    case = HARD["eight modes, 10 dimensions"]
    target = ddnf.Target(case.log_density, case.dim)
    search = Search(target)
    few = gaussians(jr.key(2), target, search, 4)
    found = with_all_modes(jr.key(2), search, few)
    assert 1 < len(few) < len(found) == 8


def test_swaps_of_components_keep_the_target():
    """Chains that only swap move between modes, and points that are draws of the target stay so, whatever the base."""
    lower = np.array([[[0.5, 0.0], [0.3, 1.0]], [[1.5, 0.0], [-0.5, 2.0]]])
    target = ModeMixture(np.log([0.3, 0.7]), np.array([[-3.0, 0.0], [3.0, 1.0]]), lower)
    base = ModeMixture(np.log([0.5, 0.3, 0.2]), np.array([[-3.0, 0.5], [2.5, 1.0], [4.0, 0.0]]), lower[[0, 1, 0]] * 0.8)
    space, n = Space(target.log_prob, Identity((2,)), base), 4000
    x, _ = target.draw(jr.key(0), n)
    only_swaps = Kernel(jnp.ones(2), jnp.zeros(()), jnp.array(0), jnp.zeros(()))
    _, after, trace = jax.jit(lambda x: run(space, jr.key(1), only_swaps, space.at(x), jnp.zeros(())))(x)
    assert np.mean((np.asarray(x)[:, 0] < 0) != (np.asarray(after.x)[:, 0] < 0)) > 0.2
    assert not np.asarray(trace.jumped).any()
    for moment in (lambda z: z[:, 0] < 0, lambda z: z[:, 0], lambda z: z[:, 1], lambda z: z[:, 0] * z[:, 1]):
        old, new = moment(np.asarray(x)), moment(np.asarray(after.x))
        assert abs(new.mean() - old.mean()) < 4 * np.std(old) * np.sqrt(2 / n)
