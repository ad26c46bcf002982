"""NumPyro: its models become targets, and the guide goes wherever NumPyro's own guides go."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flowjax.bijections import Affine
from numpy.testing import assert_allclose
from numpyro.distributions import constraints
from numpyro.distributions.transforms import OrderedTransform
from numpyro.infer import SVI, Predictive, RenyiELBO, Trace_ELBO, TraceGraph_ELBO
from numpyro.infer.reparam import NeuTraReparam
from scipy.stats import norm

import ddnf
from ddnf.bridges.numpyro import AutoDDNF, from_numpyro

Y = np.array([0.3, -0.5, 1.1])


def bounded():
    numpyro.sample("positive", dist.Gamma(2.0, 1.0))
    numpyro.sample("interval", dist.Uniform(-1.0, 3.0))
    numpyro.sample("above", dist.TruncatedNormal(0.0, 1.0, low=1.0))
    numpyro.sample("simplex", dist.Dirichlet(jnp.ones(4)))
    ordered = dist.TransformedDistribution(dist.Normal(0.0, 1.0).expand([3]).to_event(1), OrderedTransform())
    numpyro.sample("ordered", ordered)
    numpyro.sample("cholesky", dist.LKJCholesky(3, 2.0))


def arrays():
    numpyro.sample("vector", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    numpyro.sample("matrix", dist.MatrixNormal(jnp.zeros((2, 3)), jnp.eye(2), jnp.eye(3)))
    with numpyro.plate("columns", 2, dim=-1), numpyro.plate("rows", 3, dim=-2):
        plated = numpyro.sample("plated", dist.Gamma(2.0, 1.0))
        numpyro.sample("plated simplex", dist.Dirichlet(jnp.ones(3)))
    numpyro.deterministic("total", jnp.sum(plated))


def dynamic():
    low = numpyro.sample("low", dist.Uniform(0.0, 1.0))
    high = numpyro.sample("high", dist.Uniform(low, 2.0))
    numpyro.deterministic("gap", jnp.subtract(high, low))


def with_parameter(y):
    scale = numpyro.param("scale", 2.0, constraint=constraints.positive)
    mean = numpyro.sample("mean", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def discrete(y):
    """Each observation belongs to one of two groups."""
    weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
    mean = jnp.asarray(numpyro.sample("mean", dist.Normal(jnp.array([-2.0, 2.0]), 1.0).to_event(1)))
    with numpyro.plate("rows", len(y)):
        group = numpyro.sample("group", dist.Bernoulli(weight))
        numpyro.sample("y", dist.Normal(mean[group], 1.0), obs=y)


def counts():
    numpyro.sample("k", dist.Poisson(1.0))


def subsampled(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y), subsample_size=2):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=numpyro.subsample(y, 0))


def without_parameters(y):
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


@pytest.mark.parametrize(("model", "dim"), [(bounded, 12), (arrays, 27), (dynamic, 2)])
def test_draws_lie_in_the_supports(model, dim):
    target = from_numpyro(model)
    assert target.dim == dim
    expected = {}

    @jax.jit
    def look(z):
        sites = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace()
        expected.update({name: site["value"].shape for name, site in sites.items() if site["type"] != "plate"})
        draws = jax.vmap(target.constrain)(z)
        fixed = set(draws) - {"high", "gap", "total"}
        inside = {name: sites[name]["fn"].support(draws[name]).all() for name in fixed}
        return jax.vmap(jax.grad(target.log_density))(z), draws, inside

    gradient, draws, inside = look(jr.normal(jr.key(0), (20, dim)))
    assert np.isfinite(gradient).all()
    assert {name: values.shape[1:] for name, values in draws.items()} == expected
    assert all(inside.values()), inside
    if model is dynamic:
        low, high, gap = (np.asarray(draws[name]) for name in ("low", "high", "gap"))
        assert ((low < high) & (high < 2)).all()
        assert_allclose(gap, high - low)


def test_density_has_the_jacobians():
    """With s = exp(z), log p(s) + z; the second scale's bound depends on the first."""

    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(2.0))
        width = numpyro.sample("width", dist.Uniform(0.0, scale))
        numpyro.sample("y", dist.Normal(width, scale), obs=y)

    def by_hand(z):
        scale, share = jnp.exp(z[0]), jax.nn.sigmoid(z[1])
        prior = dist.HalfNormal(2.0).log_prob(scale) - jnp.log(scale)
        jacobian = z[0] + jnp.log(scale * share * (1 - share))
        return prior + jacobian + dist.Normal(scale * share, scale).log_prob(Y).sum()

    z = jr.normal(jr.key(0), (10, 2))
    target = from_numpyro(model, Y)
    assert_allclose(jax.jit(jax.vmap(target.log_density))(z), jax.jit(jax.vmap(by_hand))(z))


def test_parameters_of_the_model_stay():
    target = from_numpyro(with_parameter, y=Y)
    assert target.constrain is not None
    assert list(target.constrain(jnp.zeros(1))) == ["mean"]
    expected = dist.Normal(0.0, 2.0).log_prob(0.5) + dist.Normal(0.5, 1.0).log_prob(Y).sum()
    assert_allclose(target.log_density(jnp.array([0.5])), expected)


# NumPyro warns that it enumerates, and so does funsor about its own use of JAX.
@pytest.mark.filterwarnings("ignore")
def test_discrete_sites_are_summed_out():
    target = from_numpyro(discrete, Y)
    z = jnp.array([-1.0, 1.0, 0.3])  # in the order of names: mean, weight
    weight = 1 / (1 + jnp.exp(-0.3))
    parts = [jnp.log(w) + dist.Normal(m, 1.0).log_prob(Y) for w, m in ((1 - weight, -1.0), (weight, 1.0))]
    expected = dist.Beta(2.0, 2.0).log_prob(weight) + jnp.log(weight * (1 - weight)) + jnp.logaddexp(*parts).sum()
    expected += dist.Normal(jnp.array([-2.0, 2.0]), 1.0).log_prob(z[:2]).sum()
    assert target.dim == 3 and target.constrain is not None
    assert_allclose(target.log_density(z), expected)
    assert set(target.constrain(z)) == {"mean", "weight"}


def test_arviz_gets_axes_likelihoods_data_and_predictions():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(y)):
            effect = numpyro.sample("effect", dist.Normal(mean, 1.0))
            numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    target = from_numpyro(model, Y)
    flow = Affine(jnp.zeros(target.dim))
    figures = dict(elbo=0.0, elbo_error=0.0, log_evidence=0.0, khat=0.0, ess=1.0)
    posterior = ddnf.Posterior(flow, target, **figures, issues=(), losses=np.zeros(0), seconds=np.zeros(0))
    data = posterior.to_arviz(jr.key(0), 20, predictive=True)
    assert data.posterior["effect"].dims == ("chain", "draw", "rows")
    assert data.observed_data["y"].dims == ("rows",)
    assert data.posterior_predictive["y"].shape == (1, 20, len(Y))
    effect = data.posterior["effect"].values
    assert_allclose(data.log_likelihood["y"], dist.Normal(effect, 1.0).log_prob(Y), rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (counts, (), "continuous parameters.*got discrete k, which cannot be enumerated: sum it out"),
        (without_parameters, (Y,), "got no parameters"),
        (with_parameter, (), "it raised TypeError: .* missing 1 required"),
    ],
)
def test_bad_models_are_one_clear_error(model, args, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_numpyro(model, *args)
    assert "\n" not in str(caught.value)


def regression(X, y=None):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("loads", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    shift = numpyro.param("shift", 0.1)
    numpyro.deterministic("sum", jnp.sum(beta))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ beta + shift, scale), obs=y)


X = np.random.default_rng(0).normal(size=(5, 2))
SHAPES = {"beta": (2,), "loads": (2, 3), "share": (3,), "scale": (), "sum": ()}


@pytest.fixture(scope="module")
def trained():
    guide = AutoDDNF(regression, blocks=2)
    svi = SVI(regression, guide, numpyro.optim.Adam(1e-2), Trace_ELBO(num_particles=2))
    # Compiled, and with a key of the old kind, since NumPyro's users do both.
    start = jax.jit(lambda key: svi.init(key, X, X[:, 0]))(jr.PRNGKey(0))
    result = svi.run(jr.PRNGKey(0), 20, X, X[:, 0], progress_bar=False, stable_update=True, init_state=start)
    assert jnp.isfinite(result.losses).all()
    assert result.losses[-5:].mean() < result.losses[:5].mean()
    return guide, result.params


def test_guide_samples(trained):
    guide, params = trained
    draws = guide.sample_posterior(jr.key(1), params, sample_shape=(3, 4))
    assert {name: values.shape for name, values in draws.items()} == {k: (3, 4, *s) for k, s in SHAPES.items()}
    assert_allclose(draws["share"].sum(-1), 1.0)
    assert (draws["scale"] > 0).all()
    one = guide.sample_posterior(jr.PRNGKey(1), params)
    assert {name: values.shape for name, values in one.items()} == SHAPES


def test_guide_predicts(trained):
    guide, params = trained
    latent = Predictive(guide, params=params, num_samples=5)(jr.key(1), X)
    assert latent["loads"].shape == (5, 2, 3)
    predicted = Predictive(regression, guide=guide, params=params, num_samples=5)(jr.key(1), X)
    assert predicted["y"].shape == (5, 5)


def test_guide_density_agrees_with_its_own_draws(trained):
    """What SVI sees, the density of a draw from the way to it, is the density at that point."""
    guide, params = trained

    @jax.jit
    def densities(key):
        posterior, transform = guide.get_posterior(params), guide.get_transform(params)
        z, way = posterior.sample_with_intermediates(key, (6,))
        x = transform.inv(z)
        by_hand = guide.get_base_dist().log_prob(x) - transform.log_abs_det_jacobian(x, z)
        return posterior.log_prob(z, way), posterior.log_prob(z), by_hand

    seen, there, by_hand = densities(jr.key(2))
    assert_allclose(seen, there)
    assert_allclose(seen, by_hand)


def test_guide_parameters_can_be_pickled(trained):
    guide, params = trained
    again = pickle.loads(pickle.dumps(params))
    assert_allclose(guide.sample_posterior(jr.key(1), again)["beta"], guide.sample_posterior(jr.key(1), params)["beta"])


def test_guide_straightens_models_for_mcmc(trained):
    guide, params = trained
    neutra = NeuTraReparam(guide, params)
    site = numpyro.handlers.trace(numpyro.handlers.seed(neutra.reparam(regression), 0)).get_trace(X)
    latent = site["auto_shared_latent"]["value"]
    assert neutra.transform_sample(latent)["loads"].shape == (2, 3)


def test_guide_has_no_quantiles(trained):
    guide, params = trained
    with pytest.raises(NotImplementedError, match="draws"):
        guide.median(params)
    with pytest.raises(NotImplementedError, match="draws"):
        guide.quantiles(params, [0.1, 0.9])


def conjugate(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def _fit(model, guide, *args, steps=300, elbo=None):
    adam = optax.adam(optax.cosine_decay_schedule(2e-2, steps))
    svi = SVI(model, guide, adam, elbo or Trace_ELBO(num_particles=16))
    return svi.run(jr.key(0), steps, *args, progress_bar=False).params


@pytest.mark.slow
def test_guide_finds_a_conjugate_posterior():
    guide = AutoDDNF(conjugate, blocks=1, init_scale=0.5)
    draws = guide.sample_posterior(jr.key(1), _fit(conjugate, guide, Y), sample_shape=(4000,))["mean"]
    precision = len(Y) + 1 / 4
    assert_allclose(draws.mean(), Y.sum() / precision, atol=0.05)
    assert_allclose(draws.std(), precision**-0.5, rtol=0.05)


@pytest.mark.parametrize("elbo", [TraceGraph_ELBO(), RenyiELBO(num_particles=2)])
def test_guide_takes_other_objectives(elbo):
    guide = AutoDDNF(conjugate, blocks=1, steps=1, hidden=(2,), activation="tanh")
    params = _fit(conjugate, guide, Y, steps=3, elbo=elbo)
    assert jnp.isfinite(guide.sample_posterior(jr.key(1), params)["mean"])


@pytest.mark.parametrize(("dim", "parameters"), [(3, 9 + 3), (130, 130 + 130)])
def test_guide_starts_where_it_is_told(dim, parameters):
    """And the affine end is triangular in few dimensions, diagonal in many."""

    def model():
        numpyro.sample("z", dist.Normal(0.0, 1.0).expand([dim]).to_event(1))

    flow = ddnf.DDNF(jr.key(0), dim, blocks=1, steps=1, hidden=(2,), output_scale=0.0)
    place = numpyro.infer.init_to_value(values={"z": jnp.arange(1.0, dim + 1)})
    guide = AutoDDNF(model, flow=flow, prefix="mine", init_loc_fn=place, init_scale=0.01)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(jr.key(0)))
    assert list(params) == ["mine_flow"]
    flow_parameters = sum(leaf.size for leaf in jax.tree.leaves(flow))
    assert sum(jnp.size(leaf) for leaf in jax.tree.leaves(params)) == flow_parameters + parameters
    draws = guide.sample_posterior(jr.key(1), params, sample_shape=(100,))["z"]
    assert_allclose(draws.mean(0), jnp.arange(1.0, dim + 1), atol=0.01)
    assert_allclose(draws.std(0), 0.01, rtol=0.5)


def test_guide_checks_its_arguments():
    with pytest.raises(ValueError, match="Expected a positive init_scale; got 0"):
        AutoDDNF(conjugate, init_scale=0.0)
    with pytest.raises(ValueError, match=r"Expected a flow of shape \(1,\) without condition; got \(2,\)"):
        _fit(conjugate, AutoDDNF(conjugate, flow=ddnf.DDNF(jr.key(0), 2)), Y)
    with pytest.raises(ValueError, match="Expected blocks to be an integer of at least 1; got 0"):
        _fit(conjugate, AutoDDNF(conjugate, blocks=0), Y)


# Posteriors in files, and named draws.


def posterior_of(target):
    flow = Affine(jnp.zeros(target.dim), jnp.full(target.dim, 0.5))
    return ddnf.Posterior(flow, target, 0.0, 0.0, 0.0, 0.0, 1.0, (), np.zeros(1), np.zeros(1))


def test_a_saved_posterior_keeps_its_names_without_the_model(tmp_path):
    posterior = posterior_of(from_numpyro(bounded))
    posterior.save(tmp_path / "p.ddnf")
    loaded = ddnf.load(tmp_path / "p.ddnf")
    assert isinstance(loaded, ddnf.Posterior)
    draws, expected = loaded.sample(jr.key(0), 20), posterior.sample(jr.key(0), 20)
    assert set(draws) == set(expected)
    for name in expected:
        assert_allclose(draws[name], expected[name], atol=1e-6)


@pytest.mark.parametrize(("model", "missing"), [(arrays, "total"), (dynamic, "high, gap")])
def test_what_a_file_cannot_hold_is_said(model, missing, tmp_path):
    posterior_of(from_numpyro(model)).save(tmp_path / "p.ddnf")
    with pytest.warns(UserWarning, match=f"will not include {missing}, because.*target="):
        loaded = ddnf.load(tmp_path / "p.ddnf")
    assert isinstance(loaded, ddnf.Posterior)
    named = jax.eval_shape(from_numpyro(model).constrain, jnp.zeros(loaded.dim))
    assert set(loaded.sample(jr.key(0), 5)) == set(named) - set(missing.split(", "))


@pytest.mark.parametrize("model", [bounded, arrays, dynamic])
def test_log_prob_takes_named_draws(model):
    posterior = posterior_of(from_numpyro(model))
    expected = posterior.log_prob(posterior.sample_unconstrained(jr.key(0), 10))
    assert_allclose(posterior.log_prob(posterior.sample(jr.key(0), 10)), expected, rtol=1e-5)


def test_models_are_traced_in_several_threads():
    def model(y):
        for site in range(20):
            numpyro.sample(f"x{site}", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    def trace(number):
        target = from_numpyro(model, Y + number)
        return [float(jax.jit(lambda z, k=k: target.log_density(z + k))(jnp.zeros(20))) for k in range(3)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(trace, range(8)))
    expected = [[20 * norm.logpdf(k) + norm.logpdf(Y + number).sum() for k in range(3)] for number in range(8)]
    assert_allclose(found, expected)


def logistic(x, y, size=None):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("pseudo", dist.Normal(scale, 1.0), obs=0.3)
    numpyro.deterministic("twice", 2 * scale)
    with numpyro.plate("rows", len(y), subsample_size=size):
        rows, seen = numpyro.subsample(x, 1), numpyro.subsample(y, 0)
        logits = numpyro.deterministic("logits", jnp.dot(rows, beta) * scale)
        with numpyro.handlers.scale(scale=0.5):
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=seen)


def cut(x, y):
    """A plate of fixed size, whose members are cut out of the arguments."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", 50):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def local(y):
    with numpyro.plate("rows", len(y), subsample_size=2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=numpyro.subsample(y, 0))


def unobserved(y):
    numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(0.0, 1.0).expand(y.shape).to_event(1), obs=y)
    with numpyro.plate("rows", len(y), subsample_size=2):
        pass


def coupled(y):
    """Rows that are not independent: each sees the mean of all."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean + y.mean(), 1.0), obs=y)


BINARY = np.random.default_rng(0).normal(size=(50, 2)), np.random.default_rng(1).integers(0, 2, 50)


@pytest.mark.parametrize(("size", "batch"), [(7, None), (None, 7), (None, {"rows": 7})])
def test_a_plate_of_rows_has_the_density_of_the_model(size, batch):
    whole = from_numpyro(logistic, *BINARY)
    tall = from_numpyro(logistic, *map(jnp.asarray, BINARY), size, batch=batch)
    assert whole.rows is None and tall.rows is not None and tall.rows.count == 50 and tall.rows.least == 7
    z = np.random.default_rng(2).normal(size=(3, 3))
    assert_allclose(tall.programs.values(z), whole.programs.values(z))
    assert_allclose(tall.programs.gradients(z)[1], whole.programs.gradients(z)[1], atol=1e-10)
    assert tall.constrain and tall.unconstrain
    named = tall.constrain(jnp.asarray(z[0]))
    assert sorted(named) == ["beta", "logits", "scale", "twice"]
    assert_allclose(tall.unconstrain(named), z[0])
    assert whole.constrain and whole.details and tall.details
    assert_allclose(named["logits"], whole.constrain(jnp.asarray(z[0]))["logits"])
    known, wanted = tall.details(), whole.details()
    assert known.dims == wanted.dims
    assert_allclose(known.observed["y"], BINARY[1])
    found, expected = (details.log_likelihood(jnp.asarray(z[0]))["y"] for details in (known, wanted))
    assert_allclose(found, expected)
    draws = {name: np.asarray(values)[None] for name, values in named.items()}
    assert known.predict(jax.random.key(0), draws)["y"].shape == (1, 50)


def test_a_plate_of_very_many_members_has_none_of_them_in_draws(monkeypatch):
    monkeypatch.setattr("ddnf.bridges.numpyro._MEMBERS", 49)
    tall = from_numpyro(logistic, *map(jnp.asarray, BINARY), batch=7)
    assert tall.constrain and tall.details is None
    assert sorted(tall.constrain(jnp.zeros(3))) == ["beta", "scale", "twice"]


def test_arguments_are_cut_for_a_plate_of_fixed_size():
    whole, tall = from_numpyro(cut, *BINARY), from_numpyro(cut, *BINARY, batch=5)
    z = np.random.default_rng(2).normal(size=(3, 2))
    assert_allclose(tall.programs.values(z), whole.programs.values(z))


def test_large_plates_are_rows_unless_they_are_coupled():
    y = np.random.default_rng(0).normal(size=20_000)

    def plain(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    assert from_numpyro(plain, y).rows is not None
    assert from_numpyro(plain, y[:19_999]).rows is None
    assert from_numpyro(coupled, y).rows is None

    def centred(y):
        """Its prior needs all rows; in single precision, two of them in 20,000 make little of a difference."""
        mean = numpyro.sample("mean", dist.Normal(jnp.mean(y), 1.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    assert from_numpyro(centred, y).rows is None
    with jax.enable_x64(False):
        assert from_numpyro(centred, y.astype(np.float32)).rows is None


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (local, None, "outside the subsampled plate 'rows'; got 'mean' inside"),
        (unobserved, None, "observed sites in the subsampled plate 'rows'; got a plate without one"),
        (subsampled, {"columns": 3}, "'columns'; got no plate of that name"),
        (coupled, 2, "independent rows of the arguments; got a different density"),
        (coupled, 4, "a batch from 1 to 3"),
        (with_parameter, 2, "a plate around observed sites for batch; got none"),
    ],
)
def test_bad_subsamples_are_one_clear_error(model, batch, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_numpyro(model, Y, batch=batch)
    assert "\n" not in str(caught.value)
