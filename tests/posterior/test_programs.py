"""Compiled programs of a target: data are arguments, and programs of the same form are shared."""

import pickle
from copy import deepcopy

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import paramax
import pytest
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose

import ddnf
from ddnf.posterior import programs
from ddnf.posterior.defaults import untrained_flow
from ddnf.posterior.objective import ReverseKL, best_gradient, chain, whitening
from ddnf.posterior.programs import Programs
from ddnf.posterior.stages import _oracle
from ddnf.training import loop


def regression(rows, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, 3)), rng.integers(0, 2, rows)
    return lambda z: jnp.sum(y * (x @ z) - jax.nn.softplus(x @ z)) - z @ z / 2


@pytest.fixture
def compilations(monkeypatch):
    """Names of the programs that were compiled for targets."""
    found, compiled = [], jax.stages.Lowered.compile

    def counted(self, *args, **kwargs):
        found.append(self)
        return compiled(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    monkeypatch.setattr(programs, "_PROGRAMS", type(programs._PROGRAMS)())
    return found


def use(made: Programs):
    z = np.random.default_rng(1).normal(size=(70, 3))
    return made.values(z), *made.gradients(z), made.gradient(z[0])[1], made.hessian(z[0])


def test_values_and_derivatives():
    density = regression(20)
    values, more_values, gradients, gradient, hessian = use(Programs(density, 3))
    z = jnp.asarray(np.random.default_rng(1).normal(size=(70, 3)))
    assert_allclose(values, jax.vmap(density)(z))
    assert_allclose(more_values, values)
    assert_allclose(gradients, jax.vmap(jax.grad(density))(z), atol=1e-12)
    assert_allclose(gradient, gradients[0], atol=1e-12)
    assert_allclose(hessian, jax.hessian(density)(z[0]), atol=1e-12)


def test_new_data_of_the_same_shape_compile_nothing(compilations):
    first = use(Programs(regression(20), 3))
    count = len(compilations)
    second = use(Programs(regression(20, seed=1), 3))
    assert count > 0 and len(compilations) == count
    assert np.abs(first[0] - second[0]).max() > 0.1
    use(Programs(regression(21), 3))
    assert len(compilations) == 2 * count


def test_programs_with_other_constants_differ(compilations):
    """Numbers in the text of a model, down to the last digit."""
    for scale in (1.0, 1.0 + 1e-15):
        assert Programs(lambda z, scale=scale: -scale * jnp.sum(z**2), 1).values(np.ones((1, 1)))[0] == -scale
    assert len(compilations) == 2


def test_data_are_not_constants_of_the_program(compilations):
    for rows in (10, 10_000):
        Programs(regression(rows), 3).gradients(np.zeros((1, 3)))
    small, large = (len(lowered.as_text()) for lowered in compilations)
    assert large < 1.2 * small


def test_a_hessian_that_would_take_long_is_estimated_on_its_diagonal(monkeypatch):
    scale, z = np.geomspace(0.1, 10, 40), np.ones(40)
    found = [Programs(lambda z: -jnp.sum(z**2 / scale) - z[0] * z[1], 40).hessian(z)]
    monkeypatch.setattr(programs, "_MOST_OPERATIONS", 0.0)
    found.append(Programs(lambda z: -jnp.sum(z**2 / scale) - z[0] * z[1], 40).hessian(z))
    assert_allclose(np.diag(found[0]), -2 / scale)
    assert found[0][0, 1] == -1 and found[1][0, 1] == 0
    assert_allclose(np.diag(found[1]), -2 / scale, atol=0.5)


def test_matrices_inside_of_a_model_limit_how_many_points_are_computed_at_once(monkeypatch):
    """By the memory that the compiled programs need."""

    def process(z):
        distance = (z[:, None] - z) ** 2
        return -jnp.sum(jnp.linalg.cholesky(jnp.exp(-distance) + jnp.eye(len(z))) @ z)

    monkeypatch.setattr(programs, "LARGEST", 2**14)
    z = np.linspace(0, 5, 64)
    made = Programs(process, 64)
    assert_allclose(made.values(z + np.zeros((20, 1))), process(z))
    assert_allclose(made.hessian(z), jax.hessian(process)(jnp.asarray(z)), atol=1e-8)


def test_many_rows_are_computed_in_parts(monkeypatch):
    z = np.random.default_rng(0).normal(size=(50, 3))
    whole = Programs(regression(1000), 3).gradients(z)
    monkeypatch.setattr(programs, "LARGEST", 10_000)
    for a, b in zip(Programs(regression(1000), 3).gradients(z), whole, strict=True):
        assert_allclose(a, b, rtol=1e-10)


def bowl(z):
    return -jnp.sum(z**2) / 2


def test_a_used_target_can_be_copied_and_passed_to_jit():
    target = ddnf.Target(bowl, 2)
    target.programs.values(np.ones((1, 2)))
    for copy in (target, pickle.loads(pickle.dumps(target)), deepcopy(target)):
        assert eqx.filter_jit(lambda target, z: target.log_density(z))(copy, jnp.ones(2)) == -1.0
        assert copy.programs.values(np.ones((1, 2)))[0] == -1.0


def test_training_beside_the_target_is_that_of_one_program():
    """The same draws, losses and parameters, whether the target is in the program or answers from outside."""
    target, whiten = ddnf.Target(regression(20), 3), whitening(np.zeros(3), np.eye(3), "full")
    loss = ReverseKL(target.log_density, whiten, None, 8, "path", 10, jnp.asarray(1.5))
    options = dict(steps=25, chunk=10, optimizer=loop.adam(1e-2, 25), progress=False)
    inside = loop.fit(jr.key(0), whiten.end(), loss, **options)
    outside = loop.fit(jr.key(0), whiten.end(), loss.path, oracle=_oracle(loss.path, target), **options)
    assert_allclose(outside.losses, inside.losses, rtol=1e-7)
    a, b = (ravel_pytree(eqx.filter(fit.parameters, eqx.is_array))[0] for fit in (inside, outside))
    assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def line(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(slope * x, scale), obs=y)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_second_fit_of_a_model_compiles_nothing(compilations):
    """New data of the same shape, in the same process: no program is compiled again, those of the flow included."""
    rng, seen = np.random.default_rng(0), 0
    flow = ddnf.DDNF(jr.key(0), 2, blocks=1, steps=2, hidden=(4,))
    for number in range(3):
        x = rng.normal(size=10)
        target = ddnf.from_numpyro(line, x, x + rng.normal(size=10))
        seen = len(compilations)
        posterior = ddnf.fit_posterior(
            jr.key(number), target, flow=flow, steps=20, rounds=1, exact="never", progress=False
        )
        posterior.sample(jr.key(0), 10)
    # The third fit: branches that the first did not take may compile in the second.
    assert 0 < seen == len(compilations)


def test_an_untrained_flow_compiles_nothing(compilations):
    """Each operation of JAX outside of a program would be compiled."""
    key = jr.key(0)
    compilations.clear()
    whiten = whitening(np.zeros(7), np.eye(7), "full")
    flow = chain([untrained_flow(key, 7), whiten.end()])
    assert best_gradient(flow) == "path"
    assert not compilations


@pytest.mark.parametrize("end", ["full", "diagonal"])
def test_the_affine_end_begins_as_the_identity(end):
    flow = whitening(np.ones(3), np.eye(3), end).end()
    point = jnp.arange(3.0)
    moved, log_det = paramax.unwrap(flow).transform_and_log_det(point)
    assert_allclose(moved, point, atol=1e-12)
    assert_allclose(log_det, 0.0, atol=1e-12)


def test_large_matrices_are_seen_where_they_are_computed():
    def process(z):
        return -jnp.sum(jnp.linalg.cholesky(jnp.exp(z[0]) * jnp.eye(300)))

    inside = jax.jit(process)
    found = [Programs(function, 1).has_large_matrices for function in (process, inside, lambda z: -jnp.sum(z**2))]
    assert found == [True, True, False]
