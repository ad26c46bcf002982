"""Evaluation of auto-encoders on held-out images: exact -ELBO, log p(x), active units and folds."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.folds import folded_share
from ddnf.system.checks import check_count, check_key
from ddnf.vae.model import VAE, as_real

_CHUNK = 500


class Judged(NamedTuple):
    """Evaluation of a model on held-out images, in nats, by the exact log-determinant.

    Attributes:
        negative_elbo: mean of -ELBO over images and draws.
        error: its standard error over the images.
        reconstruction: the part of it that is -log p(x|z).
        kl: the part that is KL(q(z|x) | p(z)).
        estimate: the same mean with the log-determinant used in training; not a bound unless this is exact.
        negative_log_prob: -log p(x) by importance weights, on an evenly spaced subset of the images.
        negative_elbo_there: -ELBO on this subset with the same draws.
        weighted: the number of these images.
        active: latent dimensions whose posterior mean varies by more than 0.01 over the images.
        folded: share of steps that fold; a model with any has no valid ELBO.
    """

    negative_elbo: float
    error: float
    reconstruction: float
    kl: float
    estimate: float
    negative_log_prob: float
    negative_elbo_there: float
    weighted: int
    active: int
    folded: float

    @property
    def gap(self) -> float:
        """The most that a better posterior could gain with this decoder."""
        return self.negative_elbo_there - self.negative_log_prob


def judge_vae(
    key: PRNGKeyArray,
    vae: VAE,
    x: np.ndarray | Array,
    *,
    draws: int = 10,
    importance_draws: int = 500,
    importance_images: int = 1000,
) -> Judged:
    """Evaluates a model on held-out images by the exact log-determinant, however it was trained.

    Example:
        >>> import jax.random as jr, numpy as np
        >>> from ddnf.vae import Decoder, Encoder
        >>> vae = VAE(Encoder(jr.key(0), 16, 2), Decoder(jr.key(1), 2, 16))
        >>> judged = judge_vae(jr.key(2), vae, np.ones((50, 16), np.float32))
        >>> judged.negative_log_prob < judged.negative_elbo_there, judged.folded
        (True, 0.0)
    """
    check_key(key)
    check_count(draws=draws, importance_draws=importance_draws, importance_images=importance_images)
    x, exact = jnp.asarray(x), vae.as_exact()
    elbo_key, importance_key, fold_key = jr.split(key, 3)
    z, log_likelihood, kl = (np.asarray(a, np.float64) for a in _evaluate(exact, elbo_key, x, draws))
    estimate = log_likelihood - kl
    if not eqx.tree_equal(vae, exact):
        _, other_likelihood, other_kl = _evaluate(vae, elbo_key, x, draws)
        estimate = np.asarray(other_likelihood - other_kl, np.float64)
    few = x[np.linspace(0, len(x) - 1, min(importance_images, len(x))).astype(int)]
    weights = np.asarray(_log_weights(exact, importance_key, few, importance_draws), np.float64)
    top = weights.max(axis=1, keepdims=True)
    log_prob = top[:, 0] + np.log(np.mean(np.exp(weights - top), axis=1))
    elbos = np.mean(log_likelihood - kl, axis=1)
    return Judged(
        negative_elbo=-float(elbos.mean()),
        error=float(elbos.std() / np.sqrt(len(elbos))),
        reconstruction=-float(log_likelihood.mean()),
        kl=float(kl.mean()),
        estimate=-float(estimate.mean()),
        negative_log_prob=-float(log_prob.mean()),
        negative_elbo_there=-float(weights.mean()),
        weighted=len(few),
        active=_active(z),
        folded=_folded(exact, fold_key, x),
    )


def _active(z: Float[np.ndarray, "images draws latent"]) -> int:
    """Latent dimensions whose posterior mean varies over the images, corrected for the noise of few draws."""
    noise = np.var(z, axis=1, ddof=1).mean(axis=0) / z.shape[1] if z.shape[1] > 1 else 0.0
    return int(np.sum(np.var(z.mean(axis=1), axis=0) - noise > 0.01))


@eqx.filter_jit
def _evaluate(vae: VAE, key, x, draws):
    def one(item):
        key, x = item
        code = vae.code(as_real(x))
        terms = jax.vmap(lambda key: vae._terms(key, as_real(x), code))(jr.split(key, draws))
        return terms.z, terms.log_likelihood, terms.kl

    return lax.map(one, (jr.split(key, len(x)), x), batch_size=min(_CHUNK, len(x)))


@eqx.filter_jit
def _log_weights(vae: VAE, key, x, draws):
    def one(item):
        key, x = item
        return vae.log_weights(key, as_real(x), draws)

    return lax.map(one, (jr.split(key, len(x)), x))


def _folded(vae: VAE, key, x) -> float:
    """The share of folded steps on one draw per image."""
    if vae.flow is None:
        return 0.0

    @eqx.filter_jit
    def base(vae, key, x):
        code = jax.vmap(lambda x: vae.code(as_real(x)))(x)
        return code.mean + jnp.exp(code.log_scale) * jr.normal(key, code.mean.shape), code.context

    z, context = base(vae, key, x)
    return folded_share(vae.flow, z, None if vae.flow.cond_shape is None else context)
