"""Variational auto-encoders with a flow in the posterior: encoder, decoder, likelihoods and the model."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow import batch
from ddnf.flow.log_det import has_probes, with_key
from ddnf.flow.parts import as_exact
from ddnf.flow.random import normal_log_prob, normals


class Code(NamedTuple):
    """Output of an encoder for one image: the base Gaussian of the posterior, and a context for the flow."""

    mean: Float[Array, "*images latent"]
    log_scale: Float[Array, "*images latent"]
    context: Float[Array, "*images context"] | None = None


class Terms(NamedTuple):
    """A draw z of an image's posterior (or many), and its log densities in nats."""

    z: Float[Array, "*draws latent"]
    log_likelihood: Float[Array, "*draws"]
    log_prior: Float[Array, "*draws"]
    log_posterior: Float[Array, "*draws"]

    @property
    def kl(self) -> Float[Array, "*draws"]:
        """log q(z|x) - log p(z)."""
        return self.log_posterior - self.log_prior

    @property
    def log_weight(self) -> Float[Array, "*draws"]:
        """log p(x, z) - log q(z|x): the ELBO is its mean, log p(x) the logarithm of the mean of its exponential."""
        return self.log_likelihood - self.kl


def bernoulli(x: Float[Array, " pixels"], logits: Float[Array, " pixels"]) -> Float[Array, ""]:
    """log p(x) of binary pixels, or of grey values in [0, 1] used as probabilities.

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(bernoulli(jnp.array([1.0, 0.0]), jnp.zeros(2))), 4)
        -1.3863
    """
    return jnp.sum(x * logits - jax.nn.softplus(logits))


class Gaussian(eqx.Module):
    """log p(x) of real values: normal around the sigmoid of the decoder's output, with one trained deviation.

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(Gaussian(deviation=1.0)(jnp.array([0.5]), jnp.zeros(1))), 4)
        -0.9189
    """

    log_deviation: Float[Array, ""]

    def __init__(self, deviation: float = 0.1):
        self.log_deviation = jnp.log(jnp.array(deviation))

    def __call__(self, x: Float[Array, " pixels"], logits: Float[Array, " pixels"]) -> Float[Array, ""]:
        return jnp.sum(jax.scipy.stats.norm.logpdf(x, jax.nn.sigmoid(logits), jnp.exp(self.log_deviation)))


class Encoder(eqx.Module):
    """The paper's encoder: one hidden tanh layer, and from it the base Gaussian.

    Args:
        context: dimension of the context; None for no context. An additional wide layer computes it from the hidden
            units, and also adds a term to the base Gaussian.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> code = Encoder(jr.key(0), 784, 40, context=64)(jnp.zeros(784))
        >>> code.mean.shape, code.context.shape
        ((40,), (64,))
    """

    hidden: eqx.nn.Linear
    base: eqx.nn.Linear
    wide: eqx.nn.Linear | None
    more: eqx.nn.Linear | None

    def __init__(
        self,
        key: PRNGKeyArray,
        pixels: int,
        latent: int,
        *,
        width: int = 128,
        context: int | None = None,
        context_width: int = 512,
    ):
        keys = jr.split(key, 4)
        self.hidden = eqx.nn.Linear(pixels, width, key=keys[0])
        # Small weights: the initial posterior is close to the prior.
        self.base = _scaled(eqx.nn.Linear(width, 2 * latent, key=keys[1]), 0.1, slice(None))
        if context is None:
            self.wide = self.more = None
        else:
            self.wide = eqx.nn.Linear(width, context_width, key=keys[2])
            more = eqx.nn.Linear(context_width, 2 * latent + context, key=keys[3])
            self.more = _scaled(more, 0.1, slice(2 * latent))

    def __call__(self, x: Float[Array, " pixels"]) -> Code:
        hidden = jnp.tanh(self.hidden(x))
        base, context = self.base(hidden), None
        if self.wide is not None and self.more is not None:
            more = self.more(jax.nn.gelu(self.wide(hidden)))
            base, context = base + more[: len(base)], jnp.tanh(more[len(base) :])
        mean, log_scale = jnp.split(base, 2)
        return Code(mean, log_scale, context)


def _scaled(layer: eqx.nn.Linear, factor: float, rows: slice) -> eqx.nn.Linear:
    """A layer with some of its rows scaled by a factor."""
    return jax.tree.map(lambda a: a.at[rows].multiply(factor), layer)


class Decoder(eqx.Module):
    """The paper's decoder: one hidden tanh layer, and a logit for each pixel.

    Args:
        mean: the mean image, with values in [0, 1], as the initial output of the decoder. This saves some epochs.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> Decoder(jr.key(0), 40, 784)(jnp.zeros(40)).shape
        (784,)
    """

    hidden: eqx.nn.Linear
    logits: eqx.nn.Linear

    def __init__(
        self,
        key: PRNGKeyArray,
        latent: int,
        pixels: int,
        *,
        width: int = 128,
        mean: Float[np.ndarray | Array, " pixels"] | None = None,
    ):
        first, second = jr.split(key)
        self.hidden = eqx.nn.Linear(latent, width, key=first)
        logits = eqx.nn.Linear(width, pixels, key=second)
        if mean is not None:
            middle = jnp.clip(jnp.asarray(mean), 1e-3, 1 - 1e-3)
            logits = eqx.tree_at(lambda layer: layer.bias, logits, jnp.log(middle) - jnp.log1p(-middle))
        self.logits = logits

    @property
    def in_size(self) -> int:
        """The dimension of z."""
        return self.hidden.weight.shape[1]

    def __call__(self, z: Float[Array, " latent"]) -> Float[Array, " pixels"]:
        return self.logits(jnp.tanh(self.hidden(z)))


class VAE(eqx.Module):
    """An auto-encoder: x -> encoder -> base Gaussian -> flow (conditioned on the context) -> z -> decoder -> p(x|z).

    Args:
        encoder: any module from one x to (mean, log_scale) or (mean, log_scale, context).
        decoder: any module from one z to the parameters of the likelihood.
        flow: any FlowJAX bijection of shape (latent,); with a `cond_shape`, conditioned on the context.
            None: no flow.
        likelihood: log p(x|z) from x and the decoder's output: `bernoulli`, `Gaussian()`, or your own.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> from ddnf import DDNF
        >>> flow = DDNF(jr.key(2), 2, condition_dim=16)
        >>> vae = VAE(Encoder(jr.key(0), 64, 2, context=16), Decoder(jr.key(1), 2, 64), flow)
        >>> vae.terms(jr.key(3), jnp.ones(64)).z.shape
        (2,)
        >>> vae.sample(jr.key(4), 5).shape
        (5, 64)
    """

    encoder: Callable
    decoder: Callable
    flow: AbstractBijection | None = None
    likelihood: Callable = bernoulli

    def __check_init__(self):
        for name in ("encoder", "decoder"):
            if not jax.tree.leaves(eqx.filter(getattr(self, name), eqx.is_inexact_array)):
                raise ValueError(
                    f"Expected {name} to be an Equinox module with parameters; got {getattr(self, name)!r}. "
                    "A function around a module hides them: use eqx.nn.Sequential([module, eqx.nn.Lambda(function)])."
                )

    def code(self, x: Float[Array, " pixels"]) -> Code:
        """The encoder's output for one image."""
        return Code(*self.encoder(x))

    def terms(self, key: PRNGKeyArray, x: Float[Array, " pixels"]) -> Terms:
        """One draw of an image's posterior, with its log densities by the flow's own log-determinant."""
        return self._terms(key, x, self.code(x))

    def batch_terms(self, key: PRNGKeyArray, x: Float[Array, "n pixels"]) -> Terms:
        """`terms` of every row, as by `jax.vmap` with split keys; the whole batch goes through the flow at once."""
        return self.terms_of_rows(jr.split(key, len(x)), x)

    def terms_of_rows(self, keys: Array, x: Float[Array, "n pixels"]) -> Terms:
        """`batch_terms` with a key for each row."""
        if self.flow is None or has_probes(self.flow):
            return jax.vmap(self.terms)(keys, x)
        code = jax.vmap(self.code)(x)
        noise = jax.vmap(lambda key: jr.normal(jr.split(key)[0], code.mean.shape[1:]))(keys)
        start = code.mean + jnp.exp(code.log_scale) * noise
        z, log_det = batch.transform_and_log_det(self.flow, start, code.context)
        log_posterior = normal_log_prob(noise) - jnp.sum(code.log_scale, axis=-1) - log_det
        return Terms(z, jax.vmap(self.likelihood)(x, jax.vmap(self.decoder)(z)), normal_log_prob(z), log_posterior)

    def log_weights(self, key: PRNGKeyArray, x: Float[Array, " pixels"], draws: int) -> Float[Array, " draws"]:
        """Log importance weights of many draws for one image: their mean is the ELBO."""
        code = self.code(x)
        return jax.vmap(lambda key: self._terms(key, x, code).log_weight)(jr.split(key, draws))

    def sample(self, key: PRNGKeyArray, n: int) -> Float[Array, "n pixels"]:
        """Means of n images from the prior: probabilities for `bernoulli`, values for `Gaussian`."""
        z = normals(key, n, (self.latent,))
        return jax.nn.sigmoid(jax.vmap(self.decoder)(z))

    def reconstruct(self, key: PRNGKeyArray, x: Float[Array, "n pixels"]) -> Float[Array, "n pixels"]:
        """The mean image for one draw of each image's posterior."""
        z = jax.vmap(self.terms)(jr.split(key, len(x)), x).z
        return jax.nn.sigmoid(jax.vmap(self.decoder)(z))

    def as_exact(self) -> "VAE":
        """The same model with the exact log-determinant and inverse, whatever it was trained with."""
        return as_exact(self)

    def exactly(self) -> "VAE":
        """Deprecated name of `as_exact`."""
        warnings.warn("VAE.exactly is deprecated: use VAE.as_exact.", DeprecationWarning, stacklevel=2)
        return as_exact(self)

    def apply_flow(self, z: Float[Array, " latent"], code: Code) -> tuple[Float[Array, " latent"], Float[Array, ""]]:
        """The image of a point of the base Gaussian under the flow, and the log-determinant there."""
        if self.flow is None:
            return z, jnp.zeros(())
        return self.flow.transform_and_log_det(z, None if self.flow.cond_shape is None else code.context)

    def carried(self, z: Float[Array, " latent"], code: Code) -> tuple[Float[Array, " latent"], Float[Array, ""]]:
        """Deprecated name of `apply_flow`."""
        warnings.warn("VAE.carried is deprecated: use VAE.apply_flow.", DeprecationWarning, stacklevel=2)
        return self.apply_flow(z, code)

    def _terms(self, key, x, code):
        noise_key, probe_key = jr.split(key)
        noise = jr.normal(noise_key, code.mean.shape)
        z, log_det = with_key(self, probe_key).apply_flow(code.mean + jnp.exp(code.log_scale) * noise, code)
        log_posterior = normal_log_prob(noise) - jnp.sum(code.log_scale) - log_det
        return Terms(z, self.likelihood(x, self.decoder(z)), normal_log_prob(z), log_posterior)

    @property
    def latent(self) -> int:
        """The dimension of z: that of the flow, or the decoder's `in_size`, which modules of `eqx.nn` have."""
        size = getattr(self.decoder, "in_size", None) if self.flow is None else self.flow.shape[0]
        if not isinstance(size, int):
            raise ValueError("Expected a flow, or a decoder whose in_size is the dimension of z; got neither.")
        return size


def as_real(x: Array) -> Array:
    """Integers and booleans as floating-point numbers."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))
