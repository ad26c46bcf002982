"""Mixtures of Student's t with full covariances: fitted by expectation maximization, then trained as a flow's base."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.linalg import solve_triangular
from scipy.special import gammaln

from ddnf.flow.random import normal_log_prob, normals

_RUNS, _FEW = 5, 8  # of k-means, for at most so many components
_AT_ONCE = 4096  # draws per block
NORMAL = 1e4  # degrees of freedom that are equivalent to a Gaussian


class Mixture(eqx.Module):
    """A mixture: in component k, P_k (z - m_k) - b_k is standard normal or Student's t, with P_k lower triangular.

    m_k stays fixed in training; weights, P_k, b_k (in units of the component) and degrees of freedom are trained.
    A row far from all components costs a Gaussian the square of its distance, and Student's t its logarithm.

    Args:
        weights: of the components.
        means: m_k.
        factors: P_k; the precision is P_k^T P_k.
        freedom: degrees of freedom; None for Gaussians.

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
    log_freedoms: Float[Array, " k"] | None  # of the degrees of freedom above one

    def __init__(
        self,
        weights: Float[np.ndarray, " k"],
        means: Float[np.ndarray, "k dim"],
        factors: Float[np.ndarray, "k dim dim"],
        freedom: float | None = None,
    ):
        real = jnp.result_type(float)
        self.logits = jnp.asarray(np.log(weights), real)
        self.centres = jnp.asarray(means, real)
        self.shifts = jnp.zeros(means.shape, real)
        self.log_diagonals = jnp.asarray(np.log(np.einsum("kii->ki", factors)), real)
        self.factors = jnp.asarray(np.tril(factors, -1), real)
        self.log_freedoms = None if freedom is None else jnp.full(len(weights), np.log(freedom - 1), real)

    @classmethod
    def template(cls, components: int, dim: int, *, freedom: float | None = None) -> "Mixture":
        """A mixture with shapes in place of arrays."""
        eyes = np.broadcast_to(np.eye(dim), (components, dim, dim))
        return eqx.filter_eval_shape(lambda: cls(np.ones(components), np.zeros((components, dim)), eyes, freedom))

    def log_prob(self, z: Float[Array, "n dim"]) -> Float[Array, " n"]:
        """The log density of rows."""
        factors = self._triangular()
        shift = jnp.einsum("kij,kj->ki", factors, lax.stop_gradient(self.centres)) + self.shifts
        k, dim = shift.shape
        # The rows of all components in one product.
        y = (z @ factors.reshape(k * dim, dim).T).reshape(-1, k, dim) - shift
        constant = jax.nn.log_softmax(self.logits) + jnp.sum(self.log_diagonals, axis=1)
        return jax.nn.logsumexp(constant + self._standard_log_prob(y), axis=1)

    def _standard_log_prob(self, y):
        if self.log_freedoms is None:
            return normal_log_prob(y)
        freedom, dim = 1 + jnp.exp(self.log_freedoms), y.shape[-1]
        distance = (freedom + dim) / 2 * jnp.log1p(jnp.sum(y**2, axis=-1) / freedom)
        return _log_gamma_ratio(freedom / 2, dim) - dim / 2 * np.log(2 * np.pi) - distance

    def sample(self, key: PRNGKeyArray, n: int) -> Float[Array, "n dim"]:
        """n draws."""
        choice_key, noise_key, width_key = jr.split(key, 3)
        chosen = jr.categorical(choice_key, self.logits, shape=(n,))
        noise = normals(noise_key, n, self.shifts.shape[1:])
        if self.log_freedoms is not None:
            freedom = 1 + jnp.exp(self.log_freedoms)[chosen]
            noise = noise / jnp.sqrt(2 * jr.gamma(width_key, freedom / 2) / freedom)[:, None]
        noise = noise + self.shifts[chosen]
        inverse = jnp.linalg.inv(self._triangular())
        # Some draws at a time: each takes a copy of a matrix.
        moved = lax.map(lambda draw: inverse[draw[0]] @ draw[1], (chosen, noise), batch_size=min(n, _AT_ONCE))
        return self.centres[chosen] + moved

    def _triangular(self):
        eye = jnp.eye(self.factors.shape[-1], dtype=self.factors.dtype)
        return jnp.tril(self.factors, -1) + jnp.exp(self.log_diagonals)[:, :, None] * eye


def _log_gamma_ratio(a: Float[Array, " k"], dim: int) -> Float[Array, " k"]:
    """log of Gamma(a + dim / 2) / (Gamma(a) a^(dim / 2)), without the difference of two large logarithms.

    By Gamma(a + 1) = a Gamma(a); for odd dimensions by the asymptotic series of log Gamma(b + 1/2) - log Gamma(b) too,
    at b = a + 8 (its error is below 1e-8).
    """
    steps = jnp.arange(dim // 2) + 0.5 * (dim % 2)
    whole = jnp.sum(jnp.log1p(steps / a[:, None]), axis=1)
    if dim % 2 == 0:
        return whole
    b, shifts = a + 8, jnp.arange(8)
    half = jnp.sum(jnp.log1p(-0.5 / (a[:, None] + shifts + 0.5)), axis=1)
    return whole + half + 0.5 * jnp.log1p(8 / a) - 1 / (8 * b) + 1 / (192 * b**3) - 1 / (640 * b**5)


class Components(NamedTuple):
    """The arguments of a `Mixture`, in NumPy: candidates are compared without compiling anything."""

    weights: Float[np.ndarray, " k"]
    means: Float[np.ndarray, "k dim"]
    factors: Float[np.ndarray, "k dim dim"]
    freedom: float = NORMAL
    prior: float = 1.0  # scale of the prior of the covariances

    def log_prob(self, rows: Float[np.ndarray, "n dim"]) -> Float[np.ndarray, " n"]:
        """The log density of rows."""
        return np.logaddexp.reduce(_log_joint(rows, self)[0], axis=1)


def fit_mixture(
    rng: np.random.Generator, rows: Float[np.ndarray, "n dim"], components: int, *, prior: float = 1.0
) -> Components:
    """A mixture by expectation maximization, from k-means.

    Covariances have an inverse Wishart prior around the pooled covariance, scaled down to the volume of a component and
    by `prior`, which is small if rows lie close to a lower-dimensional surface. Large tables are subsampled.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> rows = rng.normal(size=(300, 2)) + 8 * rng.integers(0, 2, size=(300, 1))
        >>> mixture = fit_mixture(rng, rows, 2)
        >>> sorted(round(float(mean)) for mean in mixture.means[:, 0])
        [0, 8]
    """
    rows = _some(rows)
    share = np.ones((len(rows), 1)) if components == 1 else _nearest(rows, _spread_out(rng, rows, components))
    initial = Components(np.ones(1), rows[:1], np.eye(rows.shape[1])[None], prior=prior)
    return _improved(_maximization(rows, share, _pooled(rows), initial), rows)


def with_freedom(mixture: Components, rows: Float[np.ndarray, "n dim"], freedom: float) -> Components:
    """The mixture with other degrees of freedom; expectation maximization continues from its components."""
    return _improved(mixture._replace(freedom=freedom), _some(rows))


def _some(rows):
    return rows[: int(np.clip(20_000_000 // rows.shape[1] ** 2, 2000, 10_000))]


def _pooled(rows):
    """The covariance, shrunk towards a multiple of the identity by the rule of Ledoit and Wolf (2004)."""
    (n, dim), centred = rows.shape, rows - rows.mean(axis=0)
    covariance, squares = centred.T @ centred / n, centred**2
    target = np.trace(covariance) / dim * np.eye(dim)
    noise = ((squares.T @ squares).sum() / n - (covariance**2).sum()) / n
    share = np.clip(noise / max(((covariance - target) ** 2).sum(), np.finfo(float).tiny), 1e-6, 1.0)
    return (1 - share) * covariance + share * target


def _improved(mixture: Components, rows) -> Components:
    """Rounds of expectation maximization, until they change little."""
    dim, pooled, last = rows.shape[1], _pooled(rows), -np.inf
    if len(mixture.weights) == 1 and mixture.freedom == NORMAL:
        return mixture
    for _ in range(25 if dim < 20 else 10):
        log_joint, squares = _log_joint(rows, mixture)
        log_prob = np.logaddexp.reduce(log_joint, axis=1)
        weights = (mixture.freedom + dim) / (mixture.freedom + squares)
        mixture = _maximization(rows, np.exp(log_joint - log_prob[:, None]), pooled, mixture, weights)
        if np.mean(log_prob) - last < 1e-3 * np.sqrt(dim):
            break
        last = np.mean(log_prob)
    return mixture


def _maximization(rows, share, pooled, last: Components, weights=1.0) -> Components:
    """Components from their share in each row, and from the weights that Student's t gives to rows far out."""
    (n, dim), k = rows.shape, share.shape[1]
    if k == 1 and last.freedom == NORMAL:
        return Components(np.ones(1), rows.mean(axis=0)[None], _factor(pooled)[None])
    total, strength = share.sum(axis=0), dim + 2
    weighted = share * weights
    means = (weighted.T @ rows + last.prior * rows.mean(axis=0)) / (weighted.sum(axis=0) + last.prior)[:, None]
    prior = last.prior * strength * pooled * k ** (-2 / dim)
    factors = []
    for j in range(k):
        used = share[:, j] > 1e-4
        centred = rows[used] - means[j]
        factors.append(_factor(((centred.T * weighted[used, j]) @ centred + prior) / (total[j] + strength)))
    return last._replace(weights=(total + 1) / (n + k), means=means, factors=np.stack(factors))


def _factor(covariance):
    return solve_triangular(np.linalg.cholesky(covariance), np.eye(len(covariance)), lower=True)


def _log_joint(rows, mixture: Components):
    """The log of the weight times the density of each component at each row, and squares of the distances."""
    (n, dim), freedom = rows.shape, mixture.freedom
    out, squares = np.empty((2, n, len(mixture.weights)))
    for k, (weight, mean, factor) in enumerate(zip(*mixture[:3], strict=True)):
        squares[:, k] = (((rows - mean) @ factor.T) ** 2).sum(axis=1)
        out[:, k] = np.log(weight) + np.log(np.diag(factor)).sum()
    constant = gammaln((freedom + dim) / 2) - gammaln(freedom / 2) - dim / 2 * np.log(freedom * np.pi)
    return out + constant - (freedom + dim) / 2 * np.log1p(squares / freedom), squares


def _spread_out(rng, rows, k):
    """Centres by k-means; for few centres the best of several runs, as a single run often ends in a poor optimum."""
    runs = [_k_means(rng, rows, k) for _ in range(_RUNS if k <= _FEW else 1)]
    return min(runs, key=lambda centres: _distances(rows, centres).min(axis=1).sum())


def _k_means(rng, rows, k):
    """Centres by k-means++ and a few rounds of k-means."""
    centres = rows[rng.integers(len(rows))][None]
    nearest = np.full(len(rows), np.inf)
    while len(centres) < k:
        nearest = np.minimum(nearest, ((rows - centres[-1]) ** 2).sum(axis=1))
        if not nearest.any():  # fewer distinct rows than centres
            break
        centres = np.vstack([centres, rows[rng.choice(len(rows), p=nearest / nearest.sum())]])
    for _ in range(5):
        share = _nearest(rows, centres)
        centres = (share.T @ rows + 1e-6 * centres) / (share.sum(axis=0) + 1e-6)[:, None]
    return centres


def _nearest(rows, centres):
    distance = _distances(rows, centres)
    return (distance == distance.min(axis=1, keepdims=True)).astype(float)


def _distances(rows, centres):
    """Squared distances, minus the squared norms of the rows."""
    return (centres**2).sum(axis=1) - 2 * rows @ centres.T
