"""Training of auto-encoders: the data stay on the device, and an epoch is one compiled call."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from os import PathLike
from typing import Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.system.checks import check_count, check_key
from ddnf.training import loop as train
from ddnf.training.chunk import MeanLoss
from ddnf.vae.model import VAE, as_real

Pixels = Literal["dynamic", "grey", "given"]
_CHUNK = 500


class Trained(NamedTuple):
    """Result of `fit_vae`.

    Attributes:
        vae: the model of the epoch with the lowest -ELBO on the validation images.
        train: mean training loss of each epoch.
        valid: -ELBO on the validation images after each epoch, one draw per image, by the model's own log-determinant.
        test: the same for test images; NaN without any.
        seconds: wall time of each epoch; the first includes compilation.
        skipped: steps whose gradient was not finite; they were not applied.
    """

    vae: VAE
    train: Float[np.ndarray, " epochs"]
    valid: Float[np.ndarray, " epochs"]
    test: Float[np.ndarray, " epochs"]
    seconds: Float[np.ndarray, " epochs"]
    skipped: int

    @property
    def epoch(self) -> int:
        """The epoch that validation picked, counted from 1."""
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
    devices: train.Devices = None,
    progress: bool = True,
    description: str = "vae",
) -> Trained:
    """Trains an auto-encoder.

    Args:
        key: random key.
        vae: the model.
        images: rows to train on.
        valid: rows that pick the epoch, already in the form that the model takes.
        test: rows whose -ELBO is recorded after each epoch; they do not affect training.
        pixels: how rows are preprocessed in training: "given" (not at all), "grey" (bytes divided by 255), or
            "dynamic" (bytes, re-binarised every epoch: 1 with the probability of the grey value).
        optimizer: any optax optimizer; by default Adam with the paper's rate of 0.001, and clipped gradients.
        average: decay of a moving average of the parameters, which is validated and returned. None for the parameters
            themselves.
        warm_up: epochs over which the weight of the KL term rises to 1.
        checkpoint: folder for checkpoints; an interrupted run resumes from there.
        devices: the devices that share the rows of each step: "all", a number, or a mesh with one axis. None for JAX's
            default device. The result agrees with that of one device up to rounding.

    Example:
        >>> import jax.random as jr, numpy as np
        >>> x = np.random.default_rng(0).integers(0, 2, (200, 16)).astype(np.float32)
        >>> from ddnf.vae import Decoder, Encoder
        >>> vae = VAE(Encoder(jr.key(0), 16, 2), Decoder(jr.key(1), 2, 16))
        >>> trained = fit_vae(jr.key(2), vae, x[:100], x[100:], epochs=3, batch=50, progress=False)
        >>> trained.valid.shape
        (3,)
    """
    check_key(key)
    check_count(epochs=epochs, batch=batch)
    check_count(0, warm_up=warm_up)
    _check(images, valid, test, pixels)
    batch = min(batch, len(images))
    steps = len(images) // batch
    held_out = tuple(jnp.asarray(x) for x in (valid, test) if x is not None)
    found = train.fit(
        key,
        vae,
        _Loss(pixels, warm_up * steps),
        steps=epochs * steps,
        optimizer=_adam() if optimizer is None else optimizer,
        data=jnp.asarray(images),
        batch=batch,
        validate=_validate,
        held_out=held_out,
        chunk=steps,
        average=average,
        checkpoint=checkpoint,
        devices=devices,
        progress=progress,
        description=description,
    )
    valid_curve = found.values[:, 0]
    test_curve = np.full_like(valid_curve, np.nan) if test is None else found.values[:, 1]
    return Trained(found.parameters, found.losses, valid_curve, test_curve, found.seconds, found.skipped)


def _validate(vae: VAE, held_out: Sequence[Array]) -> Float[Array, " n"]:
    """-ELBO of each set, one draw per image, with the same noise each time."""

    def mean(x):
        items = jr.split(jr.key(0), len(x)), x
        return -jnp.mean(lax.map(weight, items, batch_size=min(_CHUNK, len(x))))

    def weight(item):
        key, x = item
        return vae.terms(key, as_real(x)).log_weight

    return jnp.stack([mean(x) for x in held_out])


class _Loss(MeanLoss):
    """-ELBO of one draw per image, with the KL term's weight."""

    pixels: Pixels = eqx.field(static=True)
    warm_up_steps: int = eqx.field(static=True)

    def randomize(self, draw: train.Draw):
        pixel_key, key = jr.split(draw.key)
        return _PREPARE[self.pixels](pixel_key, draw.rows), jr.split(key, len(draw.rows))

    def of_rows(self, parameters: VAE, step: Array, rows):
        x, keys = rows
        terms = parameters.terms_of_rows(keys, x)
        weight = jnp.minimum(1.0, (step + 1) / self.warm_up_steps) if self.warm_up_steps else 1.0
        return jnp.mean(weight * terms.kl - terms.log_likelihood)


@lru_cache
def _adam() -> optax.GradientTransformation:
    return optax.flatten(optax.chain(optax.clip_by_global_norm(200.0), optax.adam(1e-3)))


def _dynamic(key, rows):
    # A random byte per pixel. Levels above 127 are raised by one, so that 0 never gives 1 and 255 always does.
    noise = jr.bits(key, rows.shape, jnp.uint8).astype(jnp.int16)
    grey = rows.astype(jnp.int16)
    return (noise < grey + (grey > 127)).astype(jnp.result_type(float))


_PREPARE: dict[Pixels, Callable] = {
    "dynamic": _dynamic,
    "grey": lambda key, rows: rows.astype(jnp.result_type(float)) / 255,
    "given": lambda key, rows: as_real(rows),
}


def _check(images, valid, test, pixels):
    if pixels not in _PREPARE:
        raise ValueError(f"Expected pixels of {', '.join(_PREPARE)}; got {pixels!r}.")
    shapes = {np.shape(x)[1:] for x in (images, valid, test) if x is not None}
    if len(shapes) > 1 or np.ndim(images) < 2 or not len(images) or not len(valid):
        raise ValueError(f"Expected rows of one shape to train on and to validate; got {sorted(shapes)}.")
    if pixels != "given" and np.asarray(images).dtype != np.uint8:
        raise ValueError(f"Expected bytes (uint8) for pixels {pixels!r}; got {np.asarray(images).dtype}.")
