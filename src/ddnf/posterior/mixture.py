"""A mixture of Gaussians at the modes of a target: the base of the flow if there are several modes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.random import normal_log_prob, normals
from ddnf.posterior.evaluate import Base
from ddnf.posterior.importance import effective_share, psis
from ddnf.posterior.modes import Gaussian
from ddnf.posterior.objective import Whitening
from ddnf.posterior.target import Target

_DRAWS = 10_000
_ROUNDS = 8
# Weight of the old covariance beside the new one: a component with few draws keeps its shape.
_PRIOR = 0.02
_LEAST_WEIGHT = 1e-4


class ModeMixture(Base):
    """sum_k w_k N(m_k, S_k S_k^T), with lower triangular S_k.

    Example:
        >>> mixture = ModeMixture(jnp.log(jnp.array([0.5, 0.5])), jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1, 1)))
        >>> round(float(mixture.log_prob(jnp.zeros(1))), 4)
        -1.4189
    """

    shape: tuple[int, ...]
    log_weights: Float[Array, " k"]
    means: Float[Array, "k dim"]
    scales: Float[Array, "k dim dim"]
    cond_shape: tuple[int, ...] | None

    def __init__(self, log_weights, means, scales):
        dtype = jnp.result_type(float)
        self.log_weights, self.means, self.scales = (jnp.asarray(a, dtype) for a in (log_weights, means, scales))
        self.shape, self.cond_shape = (self.means.shape[1],), None

    def _log_prob(self, x, condition=None):
        return jax.nn.logsumexp(self.log_weights + self.component_log_probs(x))

    def _sample(self, key, condition=None):
        return self.draw(key, 1)[0][0]

    def component_log_probs(self, x: Float[Array, " dim"]) -> Float[Array, " k"]:
        """log N(x | m_k, S_k S_k^T) of each component."""
        # Inverses are computed once per batch, so that each point only needs a product.
        identity = jnp.eye(self.shape[0], dtype=self.scales.dtype)
        inverses = jax.vmap(lambda scale: solve_triangular(scale, identity, lower=True))(self.scales)
        log_dets = jnp.sum(jnp.log(jnp.diagonal(self.scales, axis1=1, axis2=2)), axis=1)
        return normal_log_prob(jnp.einsum("kij,kj->ki", inverses, x - self.means)) - log_dets

    def draw(self, key: PRNGKeyArray, n: int) -> tuple[Float[Array, "n dim"], Float[Array, " n"]]:
        """n draws, and their log density."""
        which_key, noise_key = jr.split(key)
        which = jr.categorical(which_key, self.log_weights, shape=(n,))
        noise = normals(noise_key, n, self.shape)
        # Multiplies each draw by the triangles of all components; one triangle per draw would take far more memory.
        scaled = jnp.einsum("kij,nj->nki", self.scales, noise)[jnp.arange(n), which]
        x = self.means[which] + scaled
        return x, jax.vmap(self._log_prob)(x)

    def swap(self, key: PRNGKeyArray, x: Float[Array, "n dim"]) -> tuple[Float[Array, "n dim"], Float[Array, " n"]]:
        """x' = m_k + S_k S_j^-1 (x - m_j), for j by the responsibilities r(x) and another k by the weights.

        The way there has the density r_j(x) w_k / (1 - w_j), and the way back r_k(x') w_j / (1 - w_k) |S_k| / |S_j|.
        """
        from_key, to_key = jr.split(key)
        every, count = jnp.arange(len(x)), len(self.log_weights)
        shares = jax.vmap(self._log_shares)
        others = jnp.where(jnp.eye(count, dtype=bool), -jnp.inf, self.log_weights)
        known = shares(x)
        j = jr.categorical(from_key, known)
        k = jr.categorical(to_key, others[j])
        inner = jax.vmap(lambda scale, y: solve_triangular(scale, y, lower=True))(self.scales[j], x - self.means[j])
        there = self.means[k] + jnp.einsum("nij,nj->ni", self.scales[k], inner)
        log_dets = jnp.sum(jnp.log(jnp.diagonal(self.scales, axis1=1, axis2=2)), axis=1)
        # What depends on one component alone, of k less of j.
        own = log_dets - self.log_weights - jax.nn.logsumexp(others, axis=1)
        return there, own[k] - own[j] + shares(there)[every, k] - known[every, j]

    def _log_shares(self, x: Float[Array, " dim"]) -> Float[Array, " k"]:
        return jax.nn.log_softmax(self.log_weights + self.component_log_probs(x))


def mixture_at_modes(key: PRNGKeyArray, target: Target, modes: tuple[Gaussian, ...], whiten: Whitening) -> ModeMixture:
    """The mixture of the Gaussians at the modes in coordinates of the whitening, adapted to the target.

    Weights start from the evidence of the components. Population Monte Carlo (Cappe et al., 2008) then corrects
    weights, means and covariances by importance weights; the state with the highest effective sample size is returned.
    """
    scale = np.asarray(whiten.scale, float)
    scale = scale if scale.ndim == 2 else np.diag(scale)
    inverse = np.linalg.inv(scale)
    means = np.stack([inverse @ (g.mean - np.asarray(whiten.mean, float)) for g in modes])
    scales = np.stack([np.tril(inverse @ g.scale) for g in modes])
    best = current = ModeMixture(_normalized(np.array([g.elbo for g in modes])), means, scales)
    best_share = 0.0
    for number in range(_ROUNDS):
        x, log_weights = _weigh(jr.fold_in(key, number), target, whiten, current)
        if not np.isfinite(log_weights).any():
            break
        share = effective_share(log_weights)
        if share > best_share:
            best, best_share = current, share
        elif number > 2 and share < 0.9 * best_share:
            break
        current = _updated(current, x, np.exp(psis(log_weights).log_weights))
    return best


@eqx.filter_jit
def _draw(mixture: ModeMixture, key):
    return mixture.draw(key, _DRAWS)


@eqx.filter_jit
def _component_log_probs(mixture: ModeMixture, x):
    return jax.vmap(mixture.component_log_probs)(x)


def _weigh(key, target, whiten, mixture):
    x, log_q = _draw(mixture, key)
    log_p = target.programs.values(jax.vmap(whiten)(x)) + float(whiten.log_det)
    log_weights = log_p - np.asarray(log_q, float)
    return x, np.where(np.isfinite(log_weights), log_weights, -np.inf)


def _updated(mixture: ModeMixture, x, weights) -> ModeMixture:
    """Weights, and for components with enough effective draws also means and covariances, by weighted moments."""
    log_joint = np.asarray(_component_log_probs(mixture, x), float) + np.asarray(mixture.log_weights, float)
    shares = weights[:, None] * np.exp(log_joint - np.logaddexp.reduce(log_joint, axis=1, keepdims=True))
    points = np.asarray(x, float)
    total = shares.sum(axis=0)
    means, scales = np.array(mixture.means, float), np.array(mixture.scales, float)
    for k, share in enumerate(shares.T):
        effective = share.sum() ** 2 / max(np.sum(share**2), 1e-300)
        if effective < 20 * points.shape[1]:
            continue
        mean = share @ points / share.sum()
        centred = points - mean
        covariance = (centred * (share / share.sum())[:, None]).T @ centred
        covariance = (1 - _PRIOR) * covariance + _PRIOR * scales[k] @ scales[k].T
        means[k], scales[k] = mean, np.linalg.cholesky(covariance)
    return ModeMixture(_normalized(np.log(np.maximum(total / total.sum(), _LEAST_WEIGHT))), means, scales)


def _normalized(log_weights):
    return log_weights - np.logaddexp.reduce(log_weights)
