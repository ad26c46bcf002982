"""Variational auto-encoders whose posterior is carried by a flow, trained in compiled epochs and judged exactly."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from os import PathLike
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from flowjax.bijections import AbstractBijection
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.folds import folded_share
from ddnf.flow.log_det import with_key
from ddnf.flow.parts import as_exact
from ddnf.flow.random import normals
from ddnf.training import loop as train

Pixels = Literal["dynamic", "grey", "given"]
_CHUNK = 500


class Code(NamedTuple):
    """What an encoder says of an image: the base Gaussian of its posterior, and a context for the flow."""

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
    """log p(x) of pixels that are lit or not, or of grey values in [0, 1] taken as probabilities.

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(bernoulli(jnp.array([1.0, 0.0]), jnp.zeros(2))), 4)
        -1.3863
    """
    return jnp.sum(x * logits - jax.nn.softplus(logits))


class Gaussian(eqx.Module):
    """log p(x) of real values around the sigmoid of the decoder's output, with one trained deviation.

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
        context: dimension of the context; None for no context. It comes from the hidden units by way of one more, wide
            layer, which adds its share to the base Gaussian too.

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
        # A posterior close to the prior at the start.
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
    """A layer with some of its rows made smaller."""
    return jax.tree.map(lambda a: a.at[rows].multiply(factor), layer)


class Decoder(eqx.Module):
    """The paper's decoder: one hidden tanh layer, and a logit for each pixel.

    Args:
        mean: the mean image, values in [0, 1]: what the decoder gives at the start. Spares some epochs.

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
    """An auto-encoder: x -> encoder -> base Gaussian -> flow (given the context) -> z -> decoder -> p(x|z).

    Args:
        encoder: any module from one x to (mean, log_scale) or (mean, log_scale, context).
        decoder: any module from one z to what the likelihood takes.
        flow: any FlowJAX bijection of shape (latent,); with a `cond_shape`, it is given the context. None: no flow.
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
        """What the encoder says of one image."""
        return Code(*self.encoder(x))

    def terms(self, key: PRNGKeyArray, x: Float[Array, " pixels"]) -> Terms:
        """One draw of an image's posterior, with its log densities by the flow's own log-determinant."""
        return self._terms(key, x, self.code(x))

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

    def exactly(self) -> "VAE":
        """The same model with the exact log-determinant, whatever has trained it."""
        return as_exact(self)

    def carried(self, z: Float[Array, " latent"], code: Code) -> tuple[Float[Array, " latent"], Float[Array, ""]]:
        """Where the flow takes a point of the base Gaussian, and its log-determinant there."""
        if self.flow is None:
            return z, jnp.zeros(())
        return self.flow.transform_and_log_det(z, None if self.flow.cond_shape is None else code.context)

    def _terms(self, key, x, code):
        noise_key, probe_key = jr.split(key)
        noise = jr.normal(noise_key, code.mean.shape)
        z, log_det = with_key(self, probe_key).carried(code.mean + jnp.exp(code.log_scale) * noise, code)
        log_posterior = _log_normal(noise) - jnp.sum(code.log_scale) - log_det
        return Terms(z, self.likelihood(x, self.decoder(z)), _log_normal(z), log_posterior)

    @property
    def latent(self) -> int:
        """The dimension of z: that of the flow, or what the decoder says by `in_size`, as those of `eqx.nn` do."""
        size = getattr(self.decoder, "in_size", None) if self.flow is None else self.flow.shape[0]
        if not isinstance(size, int):
            raise ValueError("Expected a flow, or a decoder whose in_size is the dimension of z; got neither.")
        return size


class Trained(NamedTuple):
    """What came out of `fit_vae`.

    Attributes:
        vae: the model of the epoch with the lowest -ELBO on the validation images.
        train: mean training loss of each epoch.
        valid: -ELBO on the validation images after each epoch, one draw for each, by the model's own log-determinant.
        test: the same for test images; NaN without any.
        seconds: of each epoch; the first compiles.
        skipped: steps whose gradient was not finite; they changed nothing.
    """

    vae: VAE
    train: Float[np.ndarray, " epochs"]
    valid: Float[np.ndarray, " epochs"]
    test: Float[np.ndarray, " epochs"]
    seconds: Float[np.ndarray, " epochs"]
    skipped: int

    @property
    def epoch(self) -> int:
        """The epoch that validation has picked, from 1."""
        return int(np.nanargmin(self.valid)) + 1


def fit_vae(
    key: PRNGKeyArray,
    vae: VAE,
    images: np.ndarray | Array,
    valid: np.ndarray | Array,
    *,
    test: np.ndarray | Array | None = None,
    epochs: int = 100,
    batch: int = 100,
    pixels: Pixels = "given",
    optimizer: optax.GradientTransformation | None = None,
    average: float | None = 0.9997,
    warm_up: int = 0,
    checkpoint: str | PathLike | None = None,
    progress: bool = True,
    description: str = "vae",
) -> Trained:
    """Trains an auto-encoder: the data stay on the device, and an epoch is one compiled call.

    Args:
        key: random key.
        vae: the model.
        images: rows to train on.
        valid: rows that pick the epoch, as the model is to see them.
        test: rows whose -ELBO is noted after each epoch, and nothing else.
        pixels: what training makes of a row: "given" (nothing), "grey" (bytes over 255), or "dynamic" (bytes, each
            lit with the probability of its grey value, anew each time).
        optimizer: any of optax; by default Adam with the paper's rate of 0.001, and clipped gradients.
        average: how much of a moving average of the parameters is kept in a step; the average is what is validated and
            returned. None for the parameters themselves.
        warm_up: epochs over which the weight of the KL term rises to 1.
        checkpoint: folder for checkpoints; a run found there is resumed.

    Example:
        >>> import jax.random as jr, numpy as np
        >>> x = np.random.default_rng(0).integers(0, 2, (200, 16)).astype(np.float32)
        >>> vae = VAE(Encoder(jr.key(0), 16, 2), Decoder(jr.key(1), 2, 16))
        >>> trained = fit_vae(jr.key(2), vae, x[:100], x[100:], epochs=3, batch=50, progress=False)
        >>> trained.valid.shape
        (3,)
    """
    _check(images, valid, test, epochs, pixels, warm_up)
    batch = min(batch, len(images))
    steps = len(images) // batch
    held_out = tuple(jnp.asarray(x) for x in (valid, test) if x is not None)
    found = train.fit(
        key,
        vae,
        _loss(pixels, warm_up * steps),
        steps=epochs * steps,
        optimizer=_adam() if optimizer is None else optimizer,
        data=jnp.asarray(images),
        batch=batch,
        validate=_validate,
        held_out=held_out,
        chunk=steps,
        average=average,
        checkpoint=checkpoint,
        progress=progress,
        description=description,
    )
    valid_curve = found.values[:, 0]
    test_curve = np.full_like(valid_curve, np.nan) if test is None else found.values[:, 1]
    return Trained(found.parameters, found.losses, valid_curve, test_curve, found.seconds, found.skipped)


class Judged(NamedTuple):
    """What a model is worth on held-out images, in nats, by the exact log-determinant.

    Attributes:
        negative_elbo: mean of -ELBO over images and draws.
        error: its standard error over the images.
        reconstruction: the part of it that is -log p(x|z).
        kl: the part that is KL(q(z|x) | p(z)).
        estimate: the same mean by the log-determinant that trained the model; no bound unless that is exact.
        negative_log_prob: -log p(x) by importance weights, on some of the images, evenly spread.
        negative_elbo_there: -ELBO on the same images with the same draws.
        weighted: the number of these images.
        active: latent dimensions whose posterior mean varies by more than 0.01 over the images.
        folded: share of cells that fold; a model with any has no ELBO.
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
        """How much a better posterior could still gain for this decoder."""
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
    """Judges a model on held-out images, whatever has trained it: exact log-determinant, folds, log p(x).

    Example:
        >>> import jax.random as jr, numpy as np
        >>> vae = VAE(Encoder(jr.key(0), 16, 2), Decoder(jr.key(1), 2, 16))
        >>> judged = judge_vae(jr.key(2), vae, np.ones((50, 16), np.float32))
        >>> judged.negative_log_prob < judged.negative_elbo_there, judged.folded
        (True, 0.0)
    """
    x, exact = jnp.asarray(x), vae.exactly()
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
    """Latent dimensions whose posterior mean varies over the images, less what the noise of few draws adds to it."""
    noise = np.var(z, axis=1, ddof=1).mean(axis=0) / z.shape[1] if z.shape[1] > 1 else 0.0
    return int(np.sum(np.var(z.mean(axis=1), axis=0) - noise > 0.01))


@eqx.filter_jit
def _evaluate(vae: VAE, key, x, draws):
    def one(item):
        key, x = item
        code = vae.code(_real(x))
        terms = jax.vmap(lambda key: vae._terms(key, _real(x), code))(jr.split(key, draws))
        return terms.z, terms.log_likelihood, terms.kl

    return lax.map(one, (jr.split(key, len(x)), x), batch_size=min(_CHUNK, len(x)))


@eqx.filter_jit
def _log_weights(vae: VAE, key, x, draws):
    def one(item):
        key, x = item
        return vae.log_weights(key, _real(x), draws)

    return lax.map(one, (jr.split(key, len(x)), x))


def _folded(vae: VAE, key, x) -> float:
    """The share of folded cells on one draw for each image."""
    if vae.flow is None:
        return 0.0

    @eqx.filter_jit
    def base(vae, key, x):
        code = jax.vmap(lambda x: vae.code(_real(x)))(x)
        return code.mean + jnp.exp(code.log_scale) * jr.normal(key, code.mean.shape), code.context

    z, context = base(vae, key, x)
    return folded_share(vae.flow, z, None if vae.flow.cond_shape is None else context)


def _validate(vae: VAE, held_out: Sequence[Array]) -> Float[Array, " n"]:
    """-ELBO of each set, one draw for each image, the same noise each time."""

    def mean(x):
        items = jr.split(jr.key(0), len(x)), x
        return -jnp.mean(lax.map(weight, items, batch_size=min(_CHUNK, len(x))))

    def weight(item):
        key, x = item
        return vae.terms(key, _real(x)).log_weight

    return jnp.stack([mean(x) for x in held_out])


@lru_cache
def _loss(pixels: Pixels, warm_up_steps: int) -> Callable:
    """The loss of a step; the same arguments give the same function, which is compiled once."""

    def loss(vae: VAE, draw: train.Draw) -> Array:
        pixel_key, key = jr.split(draw.key)
        x = _PREPARE[pixels](pixel_key, draw.rows)
        terms = jax.vmap(vae.terms)(jr.split(key, len(x)), x)
        weight = jnp.minimum(1.0, (draw.step + 1) / warm_up_steps) if warm_up_steps else 1.0
        return jnp.mean(weight * terms.kl - terms.log_likelihood)

    return loss


@lru_cache
def _adam() -> optax.GradientTransformation:
    return optax.flatten(optax.chain(optax.clip_by_global_norm(200.0), optax.adam(1e-3)))


def _dynamic(key, rows):
    # A random byte for each pixel. Levels above 127 count for one more, so that 0 is never lit and 255 always.
    noise = jr.bits(key, rows.shape, jnp.uint8).astype(jnp.int16)
    grey = rows.astype(jnp.int16)
    return (noise < grey + (grey > 127)).astype(jnp.result_type(float))


_PREPARE: dict[Pixels, Callable] = {
    "dynamic": _dynamic,
    "grey": lambda key, rows: rows.astype(jnp.result_type(float)) / 255,
    "given": lambda key, rows: _real(rows),
}


def _real(x: Array) -> Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.result_type(float))


def _log_normal(z: Float[Array, " n"]) -> Float[Array, ""]:
    return -jnp.sum(z**2) / 2 - z.shape[0] / 2 * jnp.log(2 * jnp.pi)


def _check(images, valid, test, epochs, pixels, warm_up):
    if pixels not in _PREPARE:
        raise ValueError(f"Expected pixels of {', '.join(_PREPARE)}; got {pixels!r}.")
    if epochs < 1 or warm_up < 0:
        raise ValueError(f"Expected epochs of at least 1 and warm_up of at least 0; got {epochs} and {warm_up}.")
    shapes = {np.shape(x)[1:] for x in (images, valid, test) if x is not None}
    if len(shapes) > 1 or np.ndim(images) < 2 or not len(images) or not len(valid):
        raise ValueError(f"Expected rows of one shape to train on and to validate; got {sorted(shapes)}.")
    if pixels != "given" and np.asarray(images).dtype != np.uint8:
        raise ValueError(f"Expected bytes (uint8) for pixels {pixels!r}; got {np.asarray(images).dtype}.")
