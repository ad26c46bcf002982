"""PyMC: the density is PyMC's own to the last digits, draws come back as the model names them, JAX stays as it was."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flowjax.bijections import Affine
from numpy.testing import assert_allclose

import ddnf
from ddnf.bridges.pymc import _undisturbed, from_pymc

pytestmark = pytest.mark.filterwarnings("ignore:PyTensor could not link to a BLAS:UserWarning")

Y = np.array([0.3, -0.5, 1.1])


@pytest.fixture(scope="module")
def pm():
    with _undisturbed():
        return pytest.importorskip("pymc")


def bounded(pm):
    pm.HalfNormal("positive", 1.0, shape=2)
    pm.Uniform("interval", -1.0, 3.0)
    pm.TruncatedNormal("above", 0.0, 1.0, lower=1.0)
    pm.Dirichlet("simplex", np.ones(4))
    ordered = pm.distributions.transforms.ordered
    pm.Normal("ordered", 0.0, 1.0, shape=3, transform=ordered, initval=[-1.0, 0.0, 1.0])
    pm.LKJCholeskyCov("scales", n=3, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0))


def regression(pm):
    X = pm.Data("X", np.arange(6.0).reshape(3, 2))
    beta = pm.Normal("beta", 0.0, 1.0, shape=(2, 2))
    low = pm.Uniform("low", 0.0, 1.0)
    high = pm.Uniform("high", low, 2.0)
    mean = pm.Deterministic("mean", (X @ beta).sum(axis=1))
    pm.Potential("penalty", -(beta**2).sum())
    pm.StudentT("y", nu=4.0, mu=mean, sigma=high, observed=Y)


def missing(pm):
    mean = pm.Normal("mean", 0.0, 1.0)
    pm.Normal("y", mean, 1.0, observed=np.ma.masked_invalid([1.0, np.nan, 2.0]))


def built(pm, build):
    with pm.Model() as model:
        build(pm)
    return model


@pytest.mark.parametrize("build", [bounded, regression])
def test_density_is_that_of_pymc(pm, build):
    model = built(pm, build)
    target = from_pymc(model)
    start = model.initial_point()
    sizes = {v.name: np.size(start[v.name]) for v in model.value_vars}
    assert target.dim == sum(sizes.values())
    z = np.random.default_rng(0).normal(size=(5, target.dim))
    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(target.log_density)))(z)
    assert np.isfinite(gradients).all()
    theirs = model.compile_logp()
    for point, value in zip(z, values, strict=True):
        pieces = np.split(point, np.cumsum(list(sizes.values()))[:-1])
        named = {name: piece.reshape(np.shape(start[name])) for name, piece in zip(sizes, pieces, strict=True)}
        assert_allclose(value, theirs(named), rtol=1e-8, atol=1e-8)


def test_draws_lie_in_the_supports(pm):
    target = from_pymc(built(pm, bounded))
    draws = jax.jit(jax.vmap(target.constrain))(jr.normal(jr.key(0), (20, target.dim)))
    draws = {name: np.asarray(values) for name, values in draws.items()}
    assert set(draws) == {"positive", "interval", "above", "simplex", "ordered", "scales", "scales_corr", "scales_stds"}
    assert (draws["positive"] > 0).all()
    assert (np.abs(draws["interval"] - 1) < 2).all()
    assert (draws["above"] > 1).all()
    assert_allclose(draws["simplex"].sum(axis=1), 1.0)
    assert (np.diff(draws["ordered"]) > 0).all()
    assert (np.linalg.eigvalsh(draws["scales_corr"]) > 0).all()


def test_draws_have_the_deterministics(pm):
    target = from_pymc(built(pm, regression))
    assert target.constrain is not None
    draw = target.constrain(jnp.zeros(target.dim).at[:4].set(jnp.arange(4.0)))
    assert list(draw) == ["beta", "low", "high", "mean"]
    assert_allclose(draw["mean"], (np.arange(6.0).reshape(3, 2) @ np.arange(4.0).reshape(2, 2)).sum(axis=1))
    assert draw["low"] < draw["high"] < 2


def test_missing_data_are_parameters(pm):
    with pytest.warns(pm.exceptions.ImputationWarning):
        model = built(pm, missing)
    target = from_pymc(model)
    assert target.dim == 2
    assert target.constrain is not None
    assert set(target.constrain(jnp.zeros(2))) == {"mean", "y", "y_unobserved"}


def test_searches_start_around_the_initial_point(pm):
    with pm.Model() as model:
        pm.Normal("far", 0.0, 100.0, shape=2, initval=[50.0, -50.0])
    target = from_pymc(model)
    starts = np.stack([target.start(jr.key(seed)) for seed in range(20)])
    assert (np.abs(starts - [50.0, -50.0]) <= 1).all()
    assert (starts.std(axis=0) > 0.3).all()


# A short fit: its moments are looked at here, not what it says of its tails.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:k-hat is:RuntimeWarning")
def test_fit_finds_a_conjugate_posterior(pm):
    """Gamma(3, 1) and three counts, 9 in all, give Gamma(12, 4)."""
    with pm.Model() as model:
        rate = pm.Gamma("rate", 3.0, 1.0)
        pm.Poisson("y", rate, observed=[2, 4, 3])
    posterior = ddnf.fit_posterior(jr.key(0), from_pymc(model), steps=200, rounds=1, exact="never", progress=False)
    draws = np.asarray(posterior.sample(jr.key(1), 4000)["rate"])
    assert_allclose(draws.mean(), 12 / 4, rtol=0.02)
    assert_allclose(draws.std(), 12**0.5 / 4, rtol=0.05)


def test_bad_models_are_one_clear_error(pm):
    with pytest.raises(ValueError, match="Expected a PyMC model; got function"):
        from_pymc(bounded)
    with pm.Model() as model:
        pm.Poisson("k", 1.0)
        pm.Normal("mean", 0.0, 1.0)
    with pytest.raises(ValueError, match="continuous free variables; got discrete k: sum them out"):
        from_pymc(model)
    with pm.Model() as model:
        pm.Normal("y", 0.0, 1.0, observed=Y)
    with pytest.raises(ValueError, match="with free variables; got none"):
        from_pymc(model)


SINGLE = """
import os, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "PyTensor could not link to a BLAS")
import jax, jax.numpy as jnp, numpy as np
from ddnf.bridges.pymc import _undisturbed, from_pymc
with _undisturbed():
    import pymc as pm
with pm.Model() as model:
    share = pm.Dirichlet("share", np.ones(3))
    y = pm.Normal("y", share[np.array([0, 2])], 1.0, observed=[0.3, -0.5])
target = from_pymc(model)
value, gradient = jax.jit(jax.value_and_grad(target.log_density))(jnp.array([0.3, -0.2]))
assert value.dtype == gradient.dtype == target.constrain(jnp.zeros(2))["share"].dtype == jnp.float32
assert jax.device_count() == 1 and not jax.config.jax_enable_x64 and "XLA_FLAGS" not in os.environ
theirs = model.compile_logp()({"share_simplex__": np.array([0.3, -0.2])})
assert abs(value - theirs) < 1e-5, (value, theirs)
"""


@pytest.mark.slow
def test_single_precision_and_settings_stay():
    """Importing PyMC's JAX backend would turn x64 on and ask for 100 devices."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    done = subprocess.run([sys.executable, "-c", SINGLE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_named_draws_in_files_and_in_log_prob(pm, tmp_path):
    with pm.Model() as model:
        bounded(pm)
    target = from_pymc(model)
    flow = Affine(jnp.zeros(target.dim), jnp.full(target.dim, 0.5))
    posterior = ddnf.Posterior(flow, target, 0.0, 0.0, 0.0, 0.0, 1.0, (), np.zeros(1), np.zeros(1))
    draws = posterior.sample(jr.key(0), 10)
    assert_allclose(posterior.log_prob(draws), posterior.log_prob(posterior.sample_unconstrained(jr.key(0), 10)))
    posterior.save(tmp_path / "p.ddnf")
    with pytest.warns(UserWarning, match="will not include scales, .*, because"):
        loaded = ddnf.load(tmp_path / "p.ddnf")
    assert isinstance(loaded, ddnf.Posterior)
    found = loaded.sample(jr.key(0), 10)
    assert set(found) == {"positive", "interval", "above", "simplex", "ordered"}
    for name, values in found.items():
        assert_allclose(values, draws[name], atol=1e-6)


def test_arviz_gets_coords_likelihoods_data_and_predictions(pm):
    with pm.Model(coords={"school": ["a", "b", "c"]}) as model:
        mean = pm.Normal("mean", 0.0, 1.0)
        effect = pm.Normal("effect", mean, 1.0, dims="school")
        pm.Normal("y", effect, 1.0, observed=Y, dims="school")
    target = from_pymc(model)
    figures = dict(elbo=0.0, elbo_error=0.0, log_evidence=0.0, khat=0.0, ess=1.0)
    flow = Affine(jnp.zeros(target.dim))
    posterior = ddnf.Posterior(flow, target, **figures, issues=(), losses=np.zeros(0), seconds=np.zeros(0))
    data = posterior.to_arviz(jr.key(0), 20, predictive=True)
    assert data.posterior["effect"].dims == ("chain", "draw", "school")
    assert data.posterior["school"].values.tolist() == ["a", "b", "c"]
    assert data.observed_data["y"].values.tolist() == Y.tolist()
    assert data.posterior_predictive["y"].shape == (1, 20, 3)
    effect = data.posterior["effect"].values
    assert_allclose(data.log_likelihood["y"], -((Y - effect) ** 2) / 2 - np.log(2 * np.pi) / 2, rtol=1e-5)


def logistic(pm, batch_size, total_size=50):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 2)), rng.integers(0, 2, 50).astype(np.int32)
    if batch_size is not None:
        x, y = pm.Minibatch(x, y, batch_size=batch_size)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.0, shape=2)
        scale = pm.HalfNormal("scale", 1.0)
        pm.Normal("pseudo", scale, 1.0, observed=0.3)
        pm.Bernoulli("y", logit_p=x @ beta * scale, observed=y, total_size=None if batch_size is None else total_size)
    return model


def test_minibatches_are_rows(pm):
    whole, tall = from_pymc(logistic(pm, None)), from_pymc(logistic(pm, 7))
    assert whole.rows is None and tall.rows is not None and tall.rows.count == 50
    z = np.random.default_rng(2).normal(size=(3, 3))
    assert_allclose(tall.programs.values(z), whole.programs.values(z))
    assert_allclose(tall.programs.gradients(z)[1], whole.programs.gradients(z)[1], atol=1e-10)


@pytest.mark.filterwarnings("ignore:total_size not provided:UserWarning")
def test_minibatches_of_another_size_are_one_clear_error(pm):
    with pytest.raises(ValueError, match="one number of rows; got minibatches of \\[50\\] rows, total sizes \\[60\\]"):
        from_pymc(logistic(pm, 7, 60))
    with pytest.warns(UserWarning, match="total_size not provided"):
        model = logistic(pm, 7, None)
    with pytest.raises(ValueError, match="Expected total_size for every observed variable with a Minibatch"):
        from_pymc(model)
