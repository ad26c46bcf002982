"""The likelihood of rows under a flow: rows to standardized space, integers with noise, and the training loss."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection, Chain
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array

from ddnf.density.columns import Column, to_real
from ddnf.density.holdout import part_means
from ddnf.density.mixture import Mixture
from ddnf.flow import batch
from ddnf.flow.random import normal_log_prob, normals
from ddnf.training import loop as train
from ddnf.training.chunk import MeanLoss
from ddnf.training.devices import map_shared, shared_rows

# Above this many dimensions, covariances are diagonal.
LARGEST_FULL = 128
_CHUNK = 512


class Model(eqx.Module):
    """The trained model: a flow, and the mixture that it starts from; None for a standard normal."""

    flow: AbstractBijection
    base: Mixture | None = None


class NegativeLogLikelihood(MeanLoss):
    """Minus the mean log-likelihood, in standardized space and without the constant of the standardization.

    With a `penalty`, training also minimizes the penalty times half the sum of squares of the parameters of the first
    part of the flow, which `start` puts before whitening and splines. Without it, flows overfit small tables.
    """

    columns: tuple[Column, ...] = eqx.field(static=True)
    mean: Array
    scale: Array
    penalty: float = 0.0

    def prepare(self, rows, condition, spread):
        """Rows in the form that the loss takes: standardized, unless integers need new noise in each step."""
        dtype = jnp.result_type(float)
        if not self._has_integers:
            rows = standardize(np.asarray(self.mean), np.asarray(self.scale), to_real(self.columns, rows)[0])
        condition = None if condition is None else jnp.asarray((condition - spread[0]) / spread[1], dtype)
        return jnp.asarray(rows, dtype), condition

    def randomize(self, draw: train.Draw):
        rows, condition = draw.rows
        return rows, condition, jr.uniform(draw.key, rows.shape, rows.dtype) if self._has_integers else None

    def of_rows(self, parameters: Model, step: Array, rows):
        model, (rows, condition, noise) = parameters, rows
        rows, log_det = self.standardize(rows, noise)
        return self._regularization(model) - jnp.mean(log_prob(model, rows, condition) + log_det)

    def _regularization(self, model: Model):
        if not self.penalty or not isinstance(model.flow, Chain):
            return 0.0
        weights = jax.tree.leaves(eqx.filter(model.flow.bijections[0], eqx.is_inexact_array))
        return self.penalty / 2 * sum(jnp.sum(weight**2) for weight in weights)

    def validate(self, model: Model, data):
        """The mean over all held-out rows, which picks the parameters, and then the mean over each part of them."""
        rows, condition = data
        rows, log_det = self.standardize(rows, even_noise(self.columns, len(rows)))
        losses = -(_log_prob_in_chunks(model, rows, condition) + log_det)
        return jnp.concatenate([jnp.mean(losses)[None], part_means(losses)])

    def standardize(self, rows, noise):
        """Prepared rows in standardized space, integers with noise, and the log-determinant of the remaining map."""
        if not self._has_integers:
            return rows, 0.0
        integer = np.array([column.integer for column in self.columns])
        real, log_det = to_real(self.columns, rows + jnp.asarray(noise * integer, rows.dtype))
        return standardize(self.mean, self.scale, real), log_det

    @property
    def _has_integers(self):
        return any(column.integer for column in self.columns)


def standardize(mean, scale, real):
    """scale^-1 (real - mean), for rows; NumPy in, NumPy out; otherwise JAX."""
    if isinstance(real, np.ndarray):
        from scipy.linalg import solve_triangular

        return solve_triangular(np.asarray(scale), (real - np.asarray(mean)).T, lower=True).T
    return jax.scipy.linalg.solve_triangular(jnp.asarray(scale, real.dtype), (real - mean).T, lower=True).T


def robust_moments(real):
    """Median and scale of each column, from its quartiles if they differ; the scale as a diagonal matrix."""
    low, median, high = np.quantile(real, [0.25, 0.5, 0.75], axis=0)
    clipped = np.clip(real, *np.quantile(real, [0.01, 0.99], axis=0)).std(axis=0)
    scale = np.maximum((high - low) / 1.349, 0.1 * clipped)
    return median, np.diag(np.where(scale > 0, scale, real.std(axis=0)))


def moments(real):
    """Mean and Cholesky factor of the covariance, shrunk towards its diagonal if rows are few."""
    n, dim = real.shape
    covariance = np.atleast_2d(np.cov(real.T))
    share = 1.0 if dim > LARGEST_FULL else min(1.0, 1e-6 + dim / (n + dim) * (n < 10 * dim))
    covariance = (1 - share) * covariance + share * np.diag(np.diag(covariance))
    return real.mean(axis=0), np.linalg.cholesky(covariance)


def even_noise(columns, count):
    """Points in [0, 1) for each integer column, evenly spread in all of them together; 0 for the others."""
    roots = np.sqrt([2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0, 23.0, 29.0])
    steps = np.array([roots[i % 10] * (1 + i // 10) for i in range(len(columns))])
    return ((np.arange(1, count + 1)[:, None] * steps + 0.5) % 1.0) * np.array([c.integer for c in columns])


def log_probs(model: Model, u, condition, mesh: Mesh | None = None):
    """The log density of standardized rows u, in chunks of one size: one program serves any number of rows."""
    if isinstance(u, Tracer) or not len(u):
        return log_prob(model, u, condition)
    parts, size = [], _CHUNK if mesh is None else _CHUNK * mesh.size
    for first in range(0, len(u), size):
        rows = _padded(u[first : first + size], size)
        given = None if condition is None else _padded(condition[first : first + size], size)
        value = partial(log_prob, model)
        parts.append(value(rows, given) if mesh is None else map_shared(value, mesh, rows, given))
    return jnp.concatenate(parts)[: len(u)]


def _log_prob_in_chunks(model: Model, u, condition):
    """The same inside a compiled program: 20,000 rows at once would need 500 MB."""
    if len(u) <= 2 * _CHUNK:
        return log_prob(model, u, condition)
    count = -(-len(u) // _CHUNK)

    def split(rows):
        rows = jnp.pad(rows, ((0, count * _CHUNK - len(rows)), (0, 0)), mode="edge")
        return rows.reshape(count, _CHUNK, -1)

    parts = lax.map(lambda part: log_prob(model, *part), (split(u), None if condition is None else split(condition)))
    return parts.reshape(-1)[: len(u)]


def _padded(rows, size):
    return jnp.pad(rows, ((0, size - len(rows)), (0, 0)), mode="edge")


@eqx.filter_jit
def log_prob(model: Model, u, condition):
    """The log density of standardized rows u; -inf where the inverse failed."""
    z, log_det = batch.inverse_and_log_det(model.flow, u, condition)
    value = (normal_log_prob(z) if model.base is None else model.base.log_prob(z)) + log_det
    return jnp.where(jnp.isnan(value), -jnp.inf, value)


@eqx.filter_jit
def sample(model: Model, key, n, condition, mesh: Mesh | None = None):
    """n standardized rows, one for each condition."""
    z = normals(key, n, model.flow.shape) if model.base is None else model.base.sample(key, n)
    return batch.transform_and_log_det(model.flow, shared_rows(mesh, z), condition)[0]
