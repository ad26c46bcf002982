"""Mass that a fit misses, in regions without draws of the fit: estimated with Gaussians around these regions.

For a Gaussian g and a region R, E_g[1_R p / g] estimates the target's mass in R without the fit. The fit's weighted
draws estimate the same mass. Both are unbiased, so a fit that covers the target agrees with every g up to noise; where
the fit has less, it misses the difference.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ddnf.flow.random import generator
from ddnf.posterior.diagnosis import Sample
from ddnf.posterior.target import Target

_DRAWS = 500
# Standard errors by which the mass must be certain.
_CERTAIN = 3.0


class Missed(NamedTuple):
    """Mass that a fit misses.

    Attributes:
        share: estimated share of the target's mass.
        least: lower bound of this share, allowing for its error.
        log_known: log of the mass that the fit covers.
        normal: the Gaussian around the missed mass.
    """

    share: float
    least: float
    log_known: float
    normal: "Normal"


class Normal(NamedTuple):
    """A Gaussian by its mean and a triangular square root of its covariance."""

    mean: Float[np.ndarray, " dim"]
    scale: Float[np.ndarray, "dim dim"]


def missed_mass(key: PRNGKeyArray, target: Target, sample: Sample, gaussians: list[Normal]) -> tuple[Missed, ...]:
    """The mass that the fit misses around each Gaussian, the most certain first; skips Gaussians that show none.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> def two(z):
        ...     return jnp.logaddexp(-jnp.sum((z - 5) ** 2) / 2, -jnp.sum((z + 5) ** 2) / 2)
        >>> z = 5 + np.random.default_rng(0).normal(size=(1000, 2))  # one of the two modes
        >>> log_q = -np.sum((z - 5) ** 2, axis=1) / 2 - np.log(2 * np.pi)
        >>> sample = Sample(z, log_q, np.full(1000, np.log(2 * np.pi)))
        >>> other = Normal(np.full(2, -5.0), np.eye(2))
        >>> (missed,) = missed_mass(jr.key(0), ddnf.Target(two, 2), sample, [other])
        >>> round(missed.share, 2)
        0.5
    """
    noise = generator(key).normal(size=(_DRAWS, target.dim))
    log_normal = -np.sum(noise**2, axis=1) / 2 - target.dim / 2 * np.log(2 * np.pi)
    weights, log_known = _truncated(sample.log_weights)
    # In many dimensions, draws are closer to their own covariance than other draws. Half of them give the covariance,
    # and the others are tested.
    half = len(sample.z) // 2
    inside = _bulk(sample.z[:half], sample.z[half:])
    missed = []
    for gaussian in gaussians:
        points = gaussian.mean + noise @ gaussian.scale.T
        log_g = log_normal - np.sum(np.log(np.abs(np.diag(gaussian.scale))))
        log_ratio = target.programs.values(points) - log_g - log_known
        log_ratio = np.where(np.isnan(log_ratio), -np.inf, log_ratio)
        # The bulk of the Gaussian, and everything outside the bulk of the fit.
        own = bulk_radius(target.dim)
        standard = np.linalg.solve(gaussian.scale, (sample.z - gaussian.mean).T).T
        regions = (
            (np.sum(noise**2, axis=1) < own, weights * (np.sum(standard**2, axis=1) < own)),
            (~inside(points), (weights * ~inside(sample.z))[half:]),
        )
        found = [_compare(log_ratio, here, fits, log_known, gaussian) for here, fits in regions]
        missed.append(max(found, key=lambda one: one.least))
    return tuple(sorted((one for one in missed if one.least > 0), key=lambda one: -one.least))


def _truncated(log_weights) -> tuple[Float[np.ndarray, " n"], float]:
    """Weights with mean 1, none of them much above sqrt(n), and the log of their divisor.

    A single draw in a region that the fit misses has a weight that accounts for all of it, with an error as large.
    """
    log_n = np.log(len(log_weights))
    for _ in range(10):
        log_weights = np.minimum(log_weights, np.logaddexp.reduce(log_weights) - log_n / 2)
    log_mean = np.logaddexp.reduce(log_weights) - log_n
    return np.exp(log_weights - log_mean), float(log_mean)


def _compare(log_ratio, here, weights, log_known, normal) -> Missed:
    """Masses in units of the fit's estimate of the whole."""
    ratio = np.where(here, np.exp(np.minimum(log_ratio, 700.0)), 0.0)
    mass, error = ratio.mean(), ratio.std() / np.sqrt(len(ratio))
    least = max(mass - _CERTAIN * error, _jensen(log_ratio[here & np.isfinite(log_ratio)], len(here)))
    known = weights.mean() + _CERTAIN * weights.std() / np.sqrt(len(weights))
    excesses = max(mass, least) - weights.mean(), least - known
    share, least = (1 - 1 / (1 + max(excess, 0.0)) for excess in excesses)
    return Missed(float(share), float(least), log_known, normal)


def _jensen(log_ratio, n) -> float:
    """A bound on the mass that holds in many dimensions: P_g(R) exp(E_g[log p / g | R])."""
    if len(log_ratio) < n / 10:
        return 0.0
    bound = log_ratio.mean() - _CERTAIN * log_ratio.std() / np.sqrt(len(log_ratio))
    return float(len(log_ratio) / n * np.exp(min(bound, 700.0)))


def bulk_radius(dim: int) -> float:
    """Squared distance from the mean within which most of a standard normal lies."""
    return dim + 2 * np.sqrt(2 * dim)


def _bulk(z, others):
    """Whether points lie within the ellipsoid of draws of the fit that holds 99 % of others."""
    mean, deviation = z.mean(axis=0), np.maximum(z.std(axis=0), 1e-300)
    precision = np.linalg.pinv(np.atleast_2d(np.corrcoef(z.T)), hermitian=True)

    def distance(points):
        standard = (points - mean) / deviation
        return np.sum((standard @ precision) * standard, axis=1)

    limit = np.quantile(distance(others), 0.99)
    return lambda points: distance(points) <= limit
