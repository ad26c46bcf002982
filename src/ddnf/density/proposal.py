"""Numbers given some of them: a broad Gaussian mixture, fitted to draws of a density, proposes the others."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from scipy.special import logsumexp

from ddnf.density import likelihood
from ddnf.density.mixture import fit_mixture

DRAWS = 4000
_BROADER = 1.5  # covariances of the proposal, relative to the covariances of the draws
_WIDE_SHARE, _WIDE = 0.1, 9.0  # weight and covariance of a component that covers all of it


class Proposal(NamedTuple):
    """A mixture of Gaussians in unbounded space, each coordinate shifted and scaled.

    Attributes:
        shift, scale: of the coordinates.
        log_weights, means, covariances: of the components.
    """

    shift: Float[np.ndarray, " dim"]
    scale: Float[np.ndarray, " dim"]
    log_weights: Float[np.ndarray, " k"]
    means: Float[np.ndarray, "k dim"]
    covariances: Float[np.ndarray, "k dim dim"]


def fit_proposal(rng: np.random.Generator, real: Float[np.ndarray, "n dim"]) -> Proposal:
    """A proposal from draws in unbounded space."""
    low, shift, high = np.quantile(real, [0.05, 0.5, 0.95], axis=0)
    scale = np.maximum(high - low, 1e-12) / 3.3
    v = np.clip((real - shift) / scale, -30, 30)
    mixture = fit_mixture(rng, v, int(np.clip(len(v) // (20 * v.shape[1]), 1, 16)))
    inverse = np.linalg.inv(mixture.factors)
    covariances = _BROADER * inverse @ np.swapaxes(inverse, 1, 2)
    weights = np.append((1 - _WIDE_SHARE) * mixture.weights / mixture.weights.sum(), _WIDE_SHARE)
    wide = _WIDE * (np.atleast_2d(np.cov(v.T)) + 1e-6 * np.eye(v.shape[1]))
    means = np.vstack([mixture.means, v.mean(axis=0)])
    return Proposal(shift, scale, np.log(weights), means, np.concatenate([covariances, wide[None]]))


class Conditional(NamedTuple):
    """The mixture of the other coordinates, given some: weights (n, k), means (n, k, rest), factors (k, rest, rest)."""

    log_weights: Float[np.ndarray, "n k"]
    means: Float[np.ndarray, "n k rest"]
    factors: Float[np.ndarray, "k rest rest"]

    def sample(self, rng: np.random.Generator) -> Float[np.ndarray, "n rest"]:
        """One draw for each row."""
        n, k = self.log_weights.shape
        chosen = np.argmax(self.log_weights + rng.gumbel(size=(n, k)), axis=1)
        noise = rng.normal(size=(n, self.means.shape[2]))
        return self.means[np.arange(n), chosen] + np.einsum("nij,nj->ni", self.factors[chosen], noise)

    def log_prob(self, v: Float[np.ndarray, "n rest"]) -> Float[np.ndarray, " n"]:
        """The log density at one point for each row."""
        y = np.einsum("kij,nkj->nki", np.linalg.inv(self.factors), v[:, None] - self.means)
        constant = -np.log(np.einsum("kii->ki", self.factors)).sum(axis=1) - v.shape[1] / 2 * np.log(2 * np.pi)
        return logsumexp(self.log_weights + constant - (y**2).sum(axis=2) / 2, axis=1)

    def nodes(self, order: int) -> tuple[Float[np.ndarray, "m rest"], Float[np.ndarray, " m"], "Conditional"]:
        """Points for the mean of a function under the mixture of the first row, with logarithms of their weights.

        Gauss-Hermite points of each component, in all directions; and the mixture for each of the points.
        """
        points, weights = np.polynomial.hermite_e.hermegauss(order)
        log_weights = np.log(weights / weights.sum())
        dim = self.means.shape[2]
        grid = np.stack(np.meshgrid(*[points] * dim, indexing="ij"), axis=-1).reshape(-1, dim)
        mesh = np.stack(np.meshgrid(*[log_weights] * dim, indexing="ij"), axis=-1).reshape(-1, dim).sum(axis=1)
        found = self.means[0][:, None] + np.einsum("kij,mj->kmi", self.factors, grid)
        m = found.shape[0] * found.shape[1]
        log_shares, means = (np.broadcast_to(a[0], (m, *a.shape[1:])) for a in (self.log_weights, self.means))
        return (
            found.reshape(m, dim),
            (self.log_weights[0][:, None] + mesh).ravel(),
            Conditional(log_shares, means, self.factors),
        )


def condition_on(proposal: Proposal, places: list[int], v: Float[np.ndarray, "n known"]) -> Conditional:
    """The proposal of the other coordinates, given those at `places`, shifted and scaled."""
    dim = len(proposal.shift)
    rest = [i for i in range(dim) if i not in places]
    log_weights, means, factors = [], [], []
    for weight, mean, covariance in zip(*proposal[2:], strict=True):
        known = covariance[np.ix_(places, places)]
        gain = np.linalg.solve(known, covariance[np.ix_(places, rest)]).T if places else np.zeros((len(rest), 0))
        away = v - mean[places]
        left = covariance[np.ix_(rest, rest)] - gain @ covariance[np.ix_(places, rest)]
        factors.append(np.linalg.cholesky((left + left.T) / 2 + 1e-12 * np.eye(len(rest))))
        means.append(mean[rest] + away @ gain.T)
        distance = np.einsum("ni,ni->n", away, np.linalg.solve(known, away.T).T) if places else np.zeros(len(v))
        log_weights.append(weight - 0.5 * (np.linalg.slogdet(known)[1] + distance))
    logits = np.stack(log_weights, axis=1)
    return Conditional(logits - logsumexp(logits, axis=1, keepdims=True), np.stack(means, axis=1), np.stack(factors))


def scaled_log_prob(density: Any, proposal: Proposal, v: Float[np.ndarray, "n dim"], given: Any) -> np.ndarray:
    """The log density of the numbers in the space of the proposal, given all conditions as numbers."""
    real = proposal.shift + proposal.scale * v
    u = likelihood.standardize(density.mean, density.scale, real)
    model = likelihood.Model(density.flow, density.base)
    known = None if given is None else density.standardized(given)
    value = likelihood.log_probs(model, jnp.asarray(u, jnp.result_type(float)), known)
    constant = np.log(proposal.scale).sum() - np.log(np.diag(density.scale)).sum()
    return np.asarray(value, float) + constant


def draw_real(density: Any, key: Any, given: Any, n: int) -> Float[np.ndarray, "n dim"]:
    """Draws of the numbers in unbounded space."""
    known = None if given is None else density.standardized(given)
    u = likelihood.sample(likelihood.Model(density.flow, density.base), key, n, known)
    return density.mean + np.asarray(u, float) @ density.scale.T


def chosen_rows(rng: np.random.Generator, log_weights: Float[np.ndarray, " m"], n: int) -> Int[np.ndarray, " n"]:
    """n rows, drawn with these weights."""
    weights = np.exp(log_weights - log_weights.max())
    return rng.choice(len(weights), n, p=weights / weights.sum())
