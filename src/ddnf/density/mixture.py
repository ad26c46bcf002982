"""Gaussian mixtures with full covariances: fitted by expectation maximization, then trained as the base of a flow."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.linalg import solve_triangular

from ddnf.flow.random import normal_log_prob, normals


class Mixture(eqx.Module):
    """A mixture of Gaussians: in component k, P_k (z - m_k) - b_k is standard normal, with P_k lower triangular.

    m_k stays fixed in training; weights, P_k and b_k are trained, the latter in units of the component.

    Args:
        weights: of the components.
        means: m_k.
        factors: P_k; the precision is P_k^T P_k.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> mixture = Mixture(np.ones(1), np.zeros((1, 2)), np.eye(2)[None])
        >>> [round(float(value), 4) for value in mixture.log_prob(jnp.zeros((1, 2)))]
        [-1.8379]
        >>> mixture.sample(jr.key(0), 5).shape
        (5, 2)
    """

    logits: Float[Array, " k"]
    centres: Float[Array, "k dim"]
    shifts: Float[Array, "k dim"]
    log_diagonals: Float[Array, "k dim"]
    factors: Float[Array, "k dim dim"]

    def __init__(
        self,
        weights: Float[np.ndarray, " k"],
        means: Float[np.ndarray, "k dim"],
        factors: Float[np.ndarray, "k dim dim"],
    ):
        real = jnp.result_type(float)
        self.logits = jnp.asarray(np.log(weights), real)
        self.centres = jnp.asarray(means, real)
        self.shifts = jnp.zeros(means.shape, real)
        self.log_diagonals = jnp.asarray(np.log(np.einsum("kii->ki", factors)), real)
        self.factors = jnp.asarray(np.tril(factors, -1), real)

    @classmethod
    def template(cls, components: int, dim: int) -> "Mixture":
        """A mixture with shapes in place of arrays."""
        eyes = np.broadcast_to(np.eye(dim), (components, dim, dim))
        return eqx.filter_eval_shape(lambda: cls(np.ones(components), np.zeros((components, dim)), eyes))

    def log_prob(self, z: Float[Array, "n dim"]) -> Float[Array, " n"]:
        """The log density of rows."""
        factors = self._triangular()
        shift = jnp.einsum("kij,kj->ki", factors, lax.stop_gradient(self.centres)) + self.shifts
        k, dim = shift.shape
        # The rows of all components in one product.
        y = (z @ factors.reshape(k * dim, dim).T).reshape(-1, k, dim) - shift
        constant = jax.nn.log_softmax(self.logits) + jnp.sum(self.log_diagonals, axis=1)
        return jax.nn.logsumexp(constant + normal_log_prob(y), axis=1)

    def sample(self, key: PRNGKeyArray, n: int) -> Float[Array, "n dim"]:
        """n draws."""
        choice_key, noise_key = jr.split(key)
        chosen = jr.categorical(choice_key, self.logits, shape=(n,))
        noise = normals(noise_key, n, self.shifts.shape[1:]) + self.shifts[chosen]
        return self.centres[chosen] + jnp.einsum("nij,nj->ni", jnp.linalg.inv(self._triangular())[chosen], noise)

    def _triangular(self):
        eye = jnp.eye(self.factors.shape[-1], dtype=self.factors.dtype)
        return jnp.tril(self.factors, -1) + jnp.exp(self.log_diagonals)[:, :, None] * eye


class Gaussians(NamedTuple):
    """The arguments of a `Mixture`, in NumPy: candidates are compared without compiling anything."""

    weights: Float[np.ndarray, " k"]
    means: Float[np.ndarray, "k dim"]
    factors: Float[np.ndarray, "k dim dim"]

    def log_prob(self, rows: Float[np.ndarray, "n dim"]) -> Float[np.ndarray, " n"]:
        """The log density of rows."""
        return np.logaddexp.reduce(_log_joint(rows, *self), axis=1)


def fit_mixture(rng: np.random.Generator, rows: Float[np.ndarray, "n dim"], components: int) -> Gaussians:
    """A mixture of Gaussians by expectation maximization, from k-means.

    Covariances are those of an inverse Wishart prior around the pooled covariance, scaled down to the volume of a
    component. Of a large table, some rows are used.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> rows = rng.normal(size=(300, 2)) + 8 * rng.integers(0, 2, size=(300, 1))
        >>> mixture = fit_mixture(rng, rows, 2)
        >>> sorted(round(float(mean)) for mean in mixture.means[:, 0])
        [0, 8]
    """
    dim = rows.shape[1]
    rows = rows[: int(np.clip(20_000_000 // dim**2, 2000, 20_000))]
    return Gaussians(*_expectation_maximization(rng, rows, components, rounds=25 if dim < 20 else 10))


def _expectation_maximization(rng, rows, k, *, rounds):
    dim = rows.shape[1]
    pooled = np.atleast_2d(np.cov(rows.T))
    pooled = pooled + 1e-6 * np.trace(pooled) / dim * np.eye(dim)
    if k == 1:
        return np.ones(1), rows.mean(axis=0)[None], _factor(pooled)[None]
    share = _nearest(rows, _spread_out(rng, rows, k))
    found = _maximization(rows, share, pooled)
    last = -np.inf
    for _ in range(rounds):
        log_joint = _log_joint(rows, *found)
        log_prob = np.logaddexp.reduce(log_joint, axis=1)
        found = _maximization(rows, np.exp(log_joint - log_prob[:, None]), pooled)
        if np.mean(log_prob) - last < 1e-3 * np.sqrt(dim):
            break
        last = np.mean(log_prob)
    return found


def _maximization(rows, share, pooled):
    """Weights, means and factors from the share of each component in each row."""
    (n, dim), k = rows.shape, share.shape[1]
    total, strength = share.sum(axis=0), dim + 2
    means = (share.T @ rows + rows.mean(axis=0)) / (total + 1)[:, None]
    prior = strength * pooled * k ** (-2 / dim)
    factors = []
    for j in range(k):
        used = share[:, j] > 1e-4
        centred = rows[used] - means[j]
        factors.append(_factor(((centred.T * share[used, j]) @ centred + prior) / (total[j] + strength)))
    return (total + 1) / (n + k), means, np.stack(factors)


def _factor(covariance):
    return solve_triangular(np.linalg.cholesky(covariance), np.eye(len(covariance)), lower=True)


def _log_joint(rows, weights, means, factors):
    """log w_k + log N(row; m_k, (P_k^T P_k)^-1) for rows and components."""
    out = np.empty((len(rows), len(weights)))
    for k, (weight, mean, factor) in enumerate(zip(weights, means, factors, strict=True)):
        y = (rows - mean) @ factor.T
        out[:, k] = np.log(weight) + np.log(np.diag(factor)).sum() - (y**2).sum(axis=1) / 2
    return out - rows.shape[1] / 2 * np.log(2 * np.pi)


def _spread_out(rng, rows, k):
    """Centres by k-means++ and a few rounds of k-means."""
    centres = rows[rng.integers(len(rows))][None]
    nearest = np.full(len(rows), np.inf)
    while len(centres) < k:
        nearest = np.minimum(nearest, ((rows - centres[-1]) ** 2).sum(axis=1))
        centres = np.vstack([centres, rows[rng.choice(len(rows), p=nearest / nearest.sum())]])
    for _ in range(5 if k > 1 else 0):
        share = _nearest(rows, centres)
        centres = (share.T @ rows + 1e-6 * centres) / (share.sum(axis=0) + 1e-6)[:, None]
    return centres


def _nearest(rows, centres):
    distance = (centres**2).sum(axis=1) - 2 * rows @ centres.T
    return (distance == distance.min(axis=1, keepdims=True)).astype(float)
