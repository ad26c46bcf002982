"""Auto-encoders: densities against quadrature and closed forms, training, and honesty about folds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from flowjax.bijections import Affine, Invert
from numpy.testing import assert_allclose
from scipy.stats import norm

from ddnf import DDNF, Exact, Taylor, flows
from ddnf.vae import VAE, Decoder, Encoder, Gaussian, bernoulli, fit_vae, judge_vae
from ddnf_paper.targets import images


def small(flow=None, *, context=None, latent=2, pixels=16):
    return VAE(Encoder(jr.key(0), pixels, latent, context=context), Decoder(jr.key(1), latent, pixels), flow)


FLOWS = {
    "none": lambda context: None,
    "ddnf": lambda context: DDNF(jr.key(2), 2, blocks=2, steps=2, hidden=(4,), condition_dim=context, output_scale=1.0),
    "planar": lambda context: flows.make("planar", jr.key(2), 2, layers=2, condition_dim=context),
    "naf": lambda context: flows.make("naf", jr.key(2), 2, layers=1, condition_dim=context),
    "inverted": lambda context: Invert(Affine(jnp.ones(2), jnp.full(2, 2.0))),
}


@pytest.mark.parametrize("context", [None, 8])
@pytest.mark.parametrize("name", FLOWS)
def test_posterior_density_is_that_of_the_draw(name, context):
    """log q(z|x) against the change of variables by an autodiff Jacobian."""
    vae = small(FLOWS[name](context), context=context)
    x = (jr.uniform(jr.key(5), (16,)) < 0.5).astype(float)
    noise = jr.normal(jr.split(jr.key(6))[0], (2,))

    @jax.jit
    def run(x, noise):
        code = vae.code(x)
        jacobian = jax.jacfwd(lambda e: vae.apply_flow(code.mean + jnp.exp(code.log_scale) * e, code)[0])(noise)
        terms = vae.terms(jr.key(6), x)
        return terms, terms.log_weight, jacobian

    terms, log_weight, jacobian = run(x, noise)
    expected = np.sum(norm.logpdf(noise)) - np.linalg.slogdet(jacobian)[1]
    assert_allclose(terms.log_posterior, expected, rtol=1e-4)
    assert_allclose(terms.log_prior, np.sum(norm.logpdf(terms.z)), rtol=1e-5)
    assert_allclose(log_weight, terms.log_likelihood + terms.log_prior - terms.log_posterior, rtol=1e-5)


@pytest.mark.parametrize("context", [None, 8])
def test_importance_weights_give_the_evidence(context):
    """log p(x) against quadrature over the latent plane, for any posterior; the ELBO is below it."""
    vae = small(FLOWS["ddnf"](context), context=context)
    x = (jr.uniform(jr.key(5), (16,)) < 0.5).astype(float)
    side = np.linspace(-7, 7, 201)
    grid = jnp.asarray(np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2))
    log_joint = jax.vmap(lambda z: bernoulli(x, vae.decoder(z)) + jnp.sum(jax.scipy.stats.norm.logpdf(z)))(grid)
    truth = jax.scipy.special.logsumexp(log_joint) + 2 * np.log(side[1] - side[0])
    judged = judge_vae(jr.key(7), vae, np.asarray(x)[None], draws=1000, importance_draws=20_000)
    assert_allclose(-judged.negative_log_prob, truth, atol=0.01)
    assert judged.negative_elbo > -truth - 0.01
    assert_allclose(judged.negative_elbo, judged.reconstruction + judged.kl, rtol=1e-6)
    assert judged.weighted == 1 and judged.folded == 0


def test_likelihoods():
    x, logits = jnp.array([1.0, 0.0, 0.3]), jnp.array([0.4, -2.0, 1.0])
    p = jax.nn.sigmoid(logits)
    assert_allclose(bernoulli(x, logits), jnp.sum(x * jnp.log(p) + (1 - x) * jnp.log(1 - p)), rtol=1e-5)
    assert_allclose(Gaussian(0.5)(x, logits), jnp.sum(jax.scipy.stats.norm.logpdf(x, p, 0.5)), rtol=1e-5)


@pytest.mark.slow
def test_training_learns_the_digits():
    data = images.load("digits")
    valid = data.valid.lit
    mean = data.train.mean(axis=0) / 255
    flow = DDNF(jr.key(2), 4, blocks=2, steps=1, hidden=(4,), condition_dim=8, output_scale=0.3, lipschitz=0.9)
    vae = VAE(Encoder(jr.key(0), 64, 4, context=8, context_width=32), Decoder(jr.key(1), 4, 64, mean=mean), flow)
    trained = fit_vae(
        jr.key(3),
        vae,
        data.train,
        valid,
        test=valid,
        epochs=40,
        pixels="dynamic",
        optimizer=optax.adam(5e-3),
        average=0.98,
        progress=False,
    )
    independent = -jnp.mean(
        jax.vmap(bernoulli, (0, None))(jnp.asarray(valid * 1.0), jnp.log(mean + 1e-3) - jnp.log(1.001 - mean))
    )
    judged = judge_vae(jr.key(4), trained.vae, valid, importance_draws=100)
    assert judged.negative_elbo < independent - 3
    assert judged.folded == 0 and judged.active > 0 and judged.gap > 0
    assert_allclose(trained.valid, trained.test)
    assert_allclose(judged.negative_elbo, trained.valid.min(), atol=0.5)
    assert trained.epoch == np.argmin(trained.valid) + 1 and trained.skipped == 0


def test_frey_faces_as_real_values():
    try:
        data = images.load("frey")
    except ValueError as error:
        pytest.skip(str(error))
    mean = data.train.mean(axis=0) / 255
    vae = VAE(Encoder(jr.key(0), 560, 2), Decoder(jr.key(1), 2, 560, mean=mean), likelihood=Gaussian())
    valid = data.valid.grey / np.float32(255)
    trained = fit_vae(jr.key(3), vae, data.train, valid, epochs=20, pixels="grey", average=None, progress=False)
    # Against the mean image with one deviation for all pixels.
    fixed = 560 * np.log(np.std(data.train / 255 - mean) * np.sqrt(2 * np.pi * np.e))
    assert trained.valid[-1] < fixed


def test_estimate_beside_the_exact_value():
    """A rule that is not exact has trained it: the estimate differs, the value does not."""
    flow = DDNF(jr.key(2), 2, blocks=2, steps=1, hidden=(4,), output_scale=2.0, log_det=Taylor(1, probes=1))
    exact = small(flow.with_log_det(Exact()))
    x = (np.asarray(jr.uniform(jr.key(5), (20, 16))) < 0.5).astype(np.float32)
    first = judge_vae(jr.key(7), small(flow), x, draws=5, importance_draws=10)
    second = judge_vae(jr.key(7), exact, x, draws=5, importance_draws=10)
    assert_allclose(first.negative_elbo, second.negative_elbo, rtol=1e-6)
    assert abs(first.estimate - first.negative_elbo) > 0.01
    assert_allclose(second.estimate, second.negative_elbo, rtol=1e-12)


def test_deprecated_names():
    vae = small(FLOWS["ddnf"](None))
    with pytest.warns(DeprecationWarning, match="use VAE.as_exact"):
        assert eqx.tree_equal(vae.exactly(), vae.as_exact())
    with pytest.warns(DeprecationWarning, match="use VAE.apply_flow"):
        vae.carried(jnp.zeros(2), vae.code(jnp.zeros(16)))


def test_active_units():
    """A decoder's dimension that the encoder ignores is not active, however few the draws."""
    vae = small()
    assert isinstance(vae.encoder, Encoder)
    base = jnp.zeros_like(vae.encoder.base.weight).at[0].set(1.0)
    vae = eqx.tree_at(lambda v: v.encoder.base.weight, vae, base)
    x = (np.asarray(jr.uniform(jr.key(5), (400, 16))) < 0.5).astype(np.float32)
    assert judge_vae(jr.key(7), vae, x, draws=5, importance_draws=2).active == 1


def test_folds_are_seen():
    flow = DDNF(jr.key(2), 2, blocks=1, steps=1, hidden=(2,))
    flow = eqx.tree_at(lambda f: f.fields.weights, flow, (100.0 * jnp.eye(2)[None], -jnp.eye(2)[None]))
    x = np.ones((50, 16), np.float32)
    assert judge_vae(jr.key(7), small(flow), x, draws=2, importance_draws=2).folded > 0


def test_a_run_is_resumed(tmp_path):
    x = (np.random.default_rng(0).random((60, 16)) < 0.5).astype(np.float32)
    fit = eqx.Partial(fit_vae, jr.key(3), small(), x[:40], x[40:], epochs=3, batch=20, progress=False)
    first, again = fit(checkpoint=tmp_path / "run"), fit(checkpoint=tmp_path / "run")
    assert_allclose(again.valid, first.valid)
    assert np.isnan(again.seconds).all()
    for a, b in zip(*(jax.tree.leaves(eqx.filter(t.vae, eqx.is_array)) for t in (first, again)), strict=True):
        assert_allclose(a, b)
    with pytest.raises(ValueError, match="of this run"):
        fit(checkpoint=tmp_path / "run", warm_up=2)


def test_own_networks():
    """Any Equinox modules around a flow; they are trained."""
    split = eqx.nn.Lambda(lambda a: (a[:2], a[2:4], a[4:]))
    encoder = eqx.nn.Sequential([eqx.nn.MLP(16, 12, 8, 1, key=jr.key(0)), split])
    vae = VAE(encoder, eqx.nn.MLP(2, 16, 8, 1, key=jr.key(1)), FLOWS["ddnf"](8))
    x = (np.random.default_rng(0).random((60, 16)) < 0.5).astype(np.float32)
    trained = fit_vae(jr.key(3), vae, x[:40], x[40:], epochs=2, batch=20, progress=False)
    assert np.isfinite(trained.valid).all()
    for before, after in zip(*(jax.tree.leaves(eqx.filter(v, eqx.is_array)) for v in (vae, trained.vae)), strict=True):
        assert not np.array_equal(before, after)
    assert trained.vae.sample(jr.key(0), 3).shape == (3, 16)
    assert trained.vae.reconstruct(jr.key(0), jnp.asarray(x[:4])).shape == (4, 16)


def test_a_function_that_hides_parameters_is_refused():
    encoder = eqx.nn.MLP(16, 4, 8, 1, key=jr.key(0))
    with pytest.raises(ValueError, match="Expected encoder to be an Equinox module with parameters"):
        VAE(lambda x: jnp.split(encoder(x), 2), Decoder(jr.key(1), 2, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(pixels="colour"), "Expected pixels of"),
        (dict(epochs=1.5), "Expected epochs to be an integer of at least 1; got 1.5"),
        (dict(epochs=0), "Expected epochs to be an integer of at least 1"),
        (dict(pixels="dynamic"), "Expected bytes"),
        (dict(key=0), "Expected a random key"),
        (dict(test=np.ones((3, 5))), "Expected rows of one shape"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_arguments(change, message):
    x = np.ones((10, 16), np.float32)
    with pytest.raises(ValueError, match=message):
        fit_vae(change.pop("key", jr.key(0)), small(), x, x, **change)
