"""Targets with known moments: 30 that a fit may get wrong, and 20 that it must get right without a warning."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm, t

Density = Callable[[jax.Array], jax.Array]


class Case(NamedTuple):
    """A log density with its marginal means and deviations; None where it has no integral.

    `kurtosis` is given where draws underestimate it, and with it the Monte Carlo error of their deviations.
    """

    log_density: Density
    mean: np.ndarray | None
    deviation: np.ndarray | None
    dim: int
    kurtosis: np.ndarray | None = None


class Judged(NamedTuple):
    """The largest errors of means (in deviations) and of deviations (as a share), and whether both are tolerable."""

    mean: float
    deviation: float
    is_right: bool


def judge(
    draws: np.ndarray,
    mean: np.ndarray,
    deviation: np.ndarray,
    *,
    ess: float,
    tolerance: float,
    kurtosis: np.ndarray | None = None,
) -> Judged:
    """Compares draws (n, dim) with known moments, up to a tolerance and three Monte Carlo errors of `ess` draws."""
    shift = np.abs(draws.mean(axis=0) - mean) / deviation
    stretch = np.abs(draws.std(axis=0) / deviation - 1)
    standard = (draws - draws.mean(axis=0)) / np.maximum(draws.std(axis=0), 1e-300)
    # The variance of a deviation depends on the kurtosis, which is large for funnels and heavy tails.
    fourth = np.mean(standard**4, axis=0) if kurtosis is None else kurtosis
    noise = np.sqrt(np.maximum(fourth - 1, 0) / (4 * ess))
    is_right = (shift < tolerance + 3 / np.sqrt(ess)).all() and (stretch < tolerance + 3 * noise).all()
    return Judged(float(shift.max()), float(stretch.max()), bool(is_right))


def case(log_density: Density, mean, deviation) -> Case:
    mean, deviation = np.asarray(mean, float), np.asarray(deviation, float)
    return Case(log_density, mean, np.broadcast_to(deviation, mean.shape), len(mean))


def improper(log_density: Density, dim: int) -> Case:
    return Case(log_density, None, None, dim)


def by_quadrature(log_marginal: Callable, low: float, high: float, n: int = 200_001) -> tuple[float, float]:
    """Mean and deviation of a density on the line, by the midpoint rule."""
    x = low + (high - low) * (np.arange(n) + 0.5) / n
    with np.errstate(all="ignore"):
        values = np.nan_to_num(np.asarray(log_marginal(x), float), nan=-np.inf)
    p = np.exp(values - values.max())
    mean = np.sum(p * x) / np.sum(p)
    return float(mean), float(np.sqrt(np.sum(p * (x - mean) ** 2) / np.sum(p)))


def beside_normals(log_first: Callable, low: float, high: float, dim: int) -> Case:
    """A density of z[0] by quadrature, beside standard normals."""
    mean, deviation = by_quadrature(jax.vmap(log_first), low, high)
    return case(
        lambda z: log_first(z[0]) - jnp.sum(z[1:] ** 2) / 2,
        [mean, *np.zeros(dim - 1)],
        [deviation, *np.ones(dim - 1)],
    )


def mixture(weights, means, deviations) -> Case:
    """Isotropic Gaussians, with the moments of the mixture."""
    w, m = np.asarray(weights, float), np.asarray(means, float)
    s = np.broadcast_to(np.asarray(deviations, float), w.shape)
    mean = w @ m
    variance = w @ (s[:, None] ** 2 + (m - mean) ** 2)

    def log_density(z):
        parts = jnp.log(w) + jnp.sum(norm.logpdf(z, m, s[:, None]), axis=1)
        return jax.nn.logsumexp(parts)

    return case(log_density, mean, np.sqrt(variance))


def wrong_gradient(log_density: Density, change: Callable) -> Density:
    """The same values, with a gradient changed by a faulty rule."""

    @jax.custom_jvp
    def density(z):
        return log_density(z)

    @density.defjvp
    def rule(primals, tangents):
        (z,), (dz,) = primals, tangents
        return log_density(z), jnp.sum(change(jax.grad(log_density)(z), z) * dz)

    return density


def normal(z):
    return -jnp.sum(z**2) / 2


def step(height: float, dim: int) -> Case:
    return beside_normals(lambda x: -(x**2) / 2 + height * (x > 0), -8, 8, dim)


def funnel(dim: int, scale: float) -> Case:
    """v ~ N(0, scale^2), the others N(0, e^v)."""

    def log_density(z):
        return norm.logpdf(z[0], 0, scale) + jnp.sum(norm.logpdf(z[1:], 0, jnp.exp(z[0] / 2)))

    found = case(log_density, np.zeros(dim), [scale, *np.full(dim - 1, np.exp(scale**2 / 4))])
    return found._replace(kurtosis=np.array([3.0, *np.full(dim - 1, 3 * np.exp(scale**2))]))


def rosenbrock(pairs: int, width: float) -> Case:
    """a ~ N(1, 1), b ~ N(a^2, width^2), for each pair."""

    def log_density(z):
        a, b = z[:pairs], z[pairs:]
        return jnp.sum(norm.logpdf(a, 1, 1) + norm.logpdf(b, a**2, width))

    ones = np.ones(pairs)
    return case(log_density, [*ones, *(2 * ones)], [*ones, *(np.sqrt(6 + width**2) * ones)])


def student(dim: int, degrees: float) -> Case:
    """A multivariate t with correlations of 0.5."""
    covariance = 0.5 * np.eye(dim) + 0.5
    precision = np.linalg.inv(covariance)

    def log_density(z):
        return -(degrees + dim) / 2 * jnp.log1p(z @ precision @ z / degrees)

    deviation = np.sqrt(degrees / (degrees - 2)) if degrees > 2 else np.inf
    return case(log_density, np.zeros(dim), deviation)


def separable(z):
    """Logistic regression with flat priors, on data that a line separates."""
    x = jnp.array([[1.0, -2.0], [1.0, -1.0], [1.0, 1.0], [1.0, 2.0]])
    return jnp.sum(jax.nn.log_sigmoid(jnp.array([-1.0, -1.0, 1.0, 1.0]) * (x @ z)))


def _ring(n, radius):
    angle = 2 * np.pi * np.arange(n) / n
    return radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)


_EIGHT = np.random.default_rng(0).uniform(-6, 6, (8, 10))
_NARROW = 0.5 * np.ones((1, 2)), np.array([0.2, 2.0])

HARD: dict[str, Case] = {
    "step": step(3.0, 2),
    "step in 5 dimensions": step(2.0, 5),
    "stairs": beside_normals(lambda x: -(x**2) / 8 + jnp.floor(x) / 2, -20, 20, 2),
    "hole": beside_normals(lambda x: -(x**2) / 2 - 4.0 * (jnp.abs(x - 0.5) < 0.7), -8, 8, 3),
    "narrow in broad": mixture([0.5, 0.5], [np.full(5, 1.2), np.zeros(5)], [0.2, 2.0]),
    "narrow in broad, concentric": mixture([0.5, 0.5], np.zeros((2, 5)), [0.2, 2.0]),
    "needle": mixture([0.4, 0.6], [[1.0, 1.0], [0.0, 0.0]], [0.02, 2.0]),
    "narrow in broad, 10 dimensions": mixture([0.3, 0.7], [np.full(10, 0.5), np.zeros(10)], [0.3, 1.5]),
    "two modes": mixture([0.3, 0.7], [[-4.0, -4.0], [4.0, 4.0]], 1.0),
    "two modes, 10 dimensions": mixture([0.35, 0.65], [np.full(10, -2.5), np.full(10, 2.5)], 1.0),
    "two far modes": mixture([0.5, 0.5], [[-20.0, 0.0], [20.0, 0.0]], 1.0),
    "ring of eight": mixture(np.full(8, 1 / 8), _ring(8, 6.0), 0.5),
    "eight modes, 10 dimensions": mixture(np.full(8, 1 / 8), _EIGHT, 0.7),
    "three modes of unequal width": mixture([0.2, 0.3, 0.5], [[-6.0, 0.0], [0.0, 6.0], [6.0, 0.0]], [0.3, 1.0, 2.0]),
    "small far mode": mixture([0.85, 0.15], [np.zeros(3), np.full(3, 7.0)], 1.0),
    "two modes of one parameter": mixture([0.5, 0.5], np.array([[-4.0], [4.0]]) * np.eye(5)[0], 1.0),
    "funnel": funnel(10, 3.0),
    "small funnel": funnel(3, 3.0),
    "rosenbrock": rosenbrock(1, 0.05),
    "rosenbrock, five pairs": rosenbrock(5, 0.1),
    "student with 2.5 degrees": student(2, 2.5),
    "student in 10 dimensions": student(10, 3.0),
    "cauchy": student(2, 1.0),
    "upward parabola": improper(lambda z: jnp.sum(z**2) / 2, 2),
    "flat": improper(lambda z: 0.0 * jnp.sum(z), 2),
    "flat in one parameter": improper(lambda z: -jnp.sum(z[:2] ** 2) / 2, 3),
    "separable data": improper(separable, 2),
    "half the gradient": case(wrong_gradient(normal, lambda g, z: g / 2), np.zeros(3), 1.0),
    "gradient of another mean": case(wrong_gradient(normal, lambda g, z: g + 0.7), np.zeros(3), 1.0),
    "gradient without one parameter": case(
        wrong_gradient(lambda z: normal(z - jnp.array([3.0, 0.0])), lambda g, z: g * jnp.array([0.0, 1.0])),
        [3.0, 0.0],
        1.0,
    ),
    "NaN below": beside_normals(lambda x: jnp.where(x > -1, -(x**2) / 2, jnp.nan), -1, 8, 2),
    "NaN square root": beside_normals(lambda x: 0.5 * jnp.log(jnp.sqrt(x)) - x, 0, 60, 2),
}


def _gamma(x):  # of shape 2, on the log scale
    return 2 * x - jnp.exp(x)


def _beta(x):  # Beta(3, 5) on the logit scale
    return 3 * jax.nn.log_sigmoid(x) + 5 * jax.nn.log_sigmoid(-x)


def gaussian(mean, covariance) -> Case:
    mean, covariance = np.asarray(mean, float), np.asarray(covariance, float)
    precision = np.linalg.inv(covariance)
    return case(lambda z: -(z - mean) @ precision @ (z - mean) / 2, mean, np.sqrt(np.diag(covariance)))


def independent(log_marginal: Callable, low: float, high: float, dim: int) -> Case:
    mean, deviation = by_quadrature(jax.vmap(log_marginal), low, high)
    return case(lambda z: jnp.sum(jax.vmap(log_marginal)(z)), np.full(dim, mean), deviation)


def banana(curvature: float) -> Case:
    """z0 ~ N(0, 1), z1 ~ N(curvature z0^2, 0.5)."""

    def log_density(z):
        return -(z[0] ** 2) / 2 - (z[1] - curvature * z[0] ** 2) ** 2

    return case(log_density, [0.0, curvature], [1.0, np.sqrt(0.5 + 2 * curvature**2)])


def regression(n: int = 30) -> Case:
    """A linear regression with known noise: Gaussian."""
    rng = np.random.default_rng(1)
    x = np.stack([np.ones(n), rng.normal(size=n), 100 + 10 * rng.normal(size=n)], axis=1)
    y = x @ np.array([1.0, 2.0, 0.03]) + rng.normal(size=n)
    covariance = np.linalg.inv(x.T @ x + np.eye(3) / 100)
    return gaussian(covariance @ x.T @ y, covariance)


def _rotated(dim, condition):
    basis = np.linalg.qr(np.random.default_rng(dim).normal(size=(dim, dim)))[0]
    return basis @ np.diag(np.geomspace(1, condition, dim)) @ basis.T


EASY: dict[str, Case] = {
    "normal": gaussian(np.zeros(2), np.eye(2)),
    "normal in 1 dimension": gaussian([3.0], [[4.0]]),
    "correlated": gaussian([1.0, -2.0], [[1.0, 0.95], [0.95, 1.0]]),
    "scales from 1e-3 to 1e3": gaussian([1e-3, 1.0, 1e3], np.diag([1e-6, 1.0, 1e6])),
    "condition 1e3, 10 dimensions": gaussian(np.ones(10), _rotated(10, 1e3)),
    "normal in 40 dimensions": gaussian(np.zeros(40), _rotated(40, 30.0)),
    "regression": regression(),
    "banana": banana(0.5),
    "strong banana": banana(1.0),
    "log gamma": independent(_gamma, -30, 6, 4),
    "logit beta": independent(_beta, -30, 30, 4),
    "logistic": independent(lambda x: -2 * jnp.logaddexp(x / 2, -x / 2), -60, 60, 3),
    "quartic": independent(lambda x: -(x**4) / 4, -6, 6, 3),
    "cosh": independent(lambda x: -jnp.cosh(x), -6, 6, 5),
    "student with 10 degrees": independent(lambda x: t.logpdf(x, 10.0), -400, 400, 2),
    "skewed": independent(lambda x: norm.logpdf(x) + norm.logcdf(2 * x), -10, 10, 4),
    "gumbel": independent(lambda x: -x - jnp.exp(-x), -6, 60, 3),
    "near mixture": mixture([0.5, 0.5], [[-0.8, 0.0], [0.8, 0.0]], 1.0),
    "mild funnel": funnel(3, 0.7),
    "bumps": independent(lambda x: -(x**2) / 2 + 0.2 * jnp.sin(3 * x), -10, 10, 2),
}
