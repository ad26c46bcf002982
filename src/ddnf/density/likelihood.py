"""The likelihood of rows under a flow: rows to standardized space, integers with noise, and the training loss."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ddnf.density.columns import Column, to_real
from ddnf.density.holdout import part_numbers
from ddnf.flow import batch
from ddnf.flow.random import normal_log_prob, normals
from ddnf.training import loop as train

# Above so many dimensions, covariances are diagonal.
LARGEST_FULL = 128


class NegativeLogLikelihood(eqx.Module):
    """Minus the mean log-likelihood, in standardized space and without the constant of the standardization."""

    columns: tuple[Column, ...] = eqx.field(static=True)
    mean: Array
    scale: Array

    def prepare(self, rows, condition, spread):
        """Rows as the loss takes them: standardized already, unless integers need new noise in each step."""
        dtype = jnp.result_type(float)
        if not self._has_integers:
            rows = standardize(np.asarray(self.mean), np.asarray(self.scale), to_real(self.columns, rows)[0])
        condition = None if condition is None else jnp.asarray((condition - spread[0]) / spread[1], dtype)
        return jnp.asarray(rows, dtype), condition

    def __call__(self, flow, draw: train.Draw):
        rows, condition = draw.rows
        noise = jr.uniform(draw.key, rows.shape, rows.dtype) if self._has_integers else None
        rows, log_det = self.standardize(rows, noise)
        return -jnp.mean(log_prob(flow, rows, condition) + log_det)

    def validate(self, flow, data):
        """The mean over all held-out rows, which picks the parameters, and then the mean over each part of them."""
        rows, condition = data
        rows, log_det = self.standardize(rows, even_noise(self.columns, len(rows)))
        losses = -(log_prob(flow, rows, condition) + log_det)
        part = part_numbers(len(rows))
        means = jnp.stack([jnp.mean(losses[part == number]) for number in range(part.max() + 1)])
        return jnp.concatenate([jnp.mean(losses)[None], means])

    def standardize(self, rows, noise):
        """Prepared rows in standardized space, integers with noise; and the log-determinant of what was left to do."""
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


def moments(real):
    """Mean and Cholesky factor of the covariance, shrunk towards its diagonal where rows are few."""
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


@eqx.filter_jit
def log_prob(flow, u, condition):
    """The log density of rows u under a flow from a standard normal; -inf where the inverse failed."""
    z, log_det = batch.inverse_and_log_det(flow, u, condition)
    value = normal_log_prob(z) + log_det
    return jnp.where(jnp.isnan(value), -jnp.inf, value)


@eqx.filter_jit
def sample(flow, key, n, condition):
    """n draws of a flow from a standard normal, one for each condition."""
    return batch.transform_and_log_det(flow, normals(key, n, flow.shape), condition)[0]
