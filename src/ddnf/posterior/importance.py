"""Numbers that say how good a fit is, and whether to trust it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class QuadratureKL(NamedTuple):
    """KL(q|p) by quadrature, with the mass of q that the quadrature saw (close to 1 if it can be trusted)."""

    kl: float
    mass: float


def plane_grid(bound: float, resolution: int) -> tuple[Float[Array, "n n 2"], float]:
    """Midpoints of a regular grid over [-bound, bound]^2, and the area of a cell.

    Example:
        >>> grid, area = plane_grid(1.0, 4)
        >>> grid.shape, area
        ((4, 4, 2), 0.25)
    """
    side = 2 * bound / resolution
    axis = -bound + side * (jnp.arange(resolution) + 0.5)
    return jnp.stack(jnp.meshgrid(axis, axis, indexing="xy"), axis=-1), side * side


def kl_by_quadrature(
    log_q: Callable[[Array], Array], log_p: Callable[[Array], Array], *, bound: float, resolution: int = 400
) -> QuadratureKL:
    """KL(q|p), the integral of q (log q - log p), over the square [-bound, bound]^2.

    Args:
        log_q, log_p: normalized log densities of one point of the plane.
        bound: half the side of the square, which must hold (nearly) all of q.
        resolution: number of grid points along each side.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.scipy.stats import norm
        >>> kl, mass = kl_by_quadrature(
        ...     lambda z: norm.logpdf(z).sum(), lambda z: norm.logpdf(z, 1.0).sum(), bound=8.0
        ... )
        >>> round(float(kl), 4), round(float(mass), 4)
        (1.0, 1.0)
    """
    grid, area = plane_grid(bound, resolution)
    points = grid.reshape(-1, 2)
    q_values, p_values = (jax.jit(jax.vmap(f))(points) for f in (log_q, log_p))
    q = jnp.exp(q_values)
    # Where q vanishes in floating point, q log q does too.
    integrand = jnp.where(q > 0, q * (q_values - p_values), 0.0)
    return QuadratureKL(float(jnp.sum(integrand) * area), float(jnp.sum(q) * area))


class Smoothed(NamedTuple):
    """Importance weights after Pareto smoothing.

    Attributes:
        log_weights: normalized to a sum of 1.
        khat: shape of the generalized Pareto distribution of the largest weights. Below 0.7 importance weighting
            works; above, it cannot be trusted, and neither can the proposal.
    """

    log_weights: Float[np.ndarray, " n"]
    khat: float


def psis(log_weights: Float[Array | np.ndarray, " n"]) -> Smoothed:
    """Pareto-smoothed importance sampling (Vehtari, Simpson, Gelman, Yao and Gabry, 2024).

    The largest min(n / 5, 3 sqrt(n)) weights are replaced by the quantiles of the generalized Pareto distribution
    fitted to them. Where all of them are within 5 % of the smallest, they stay, and k-hat is 0: the shape of such a
    tail says nothing of importance sampling, which is as good as it can be.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=4000)
        >>> bool(psis(-0.1 * x**2).khat < 0.5 < psis(0.4 * x**2).khat)
        True
    """
    log_w = np.asarray(log_weights, float)
    if log_w.ndim != 1 or len(log_w) < 25:
        raise ValueError(f"Expected a vector of at least 25 log weights; got shape {log_w.shape}.")
    if np.isnan(log_w).any() or not np.isfinite(log_w.max()):
        raise ValueError("Expected log weights without NaN, and a finite largest one.")
    log_w = log_w - log_w.max()
    order = np.argsort(log_w)
    count = int(np.ceil(min(len(log_w) / 5, 3 * np.sqrt(len(log_w)))))
    tail, cutoff = order[-count:], log_w[order[-count - 1]]
    excess = np.exp(log_w[tail]) - np.exp(cutoff)
    # A tail within 5 % of the other weights has a shape, but one that can't matter.
    if excess[-1] <= 0.05 * np.exp(cutoff):
        return Smoothed(_normalized(log_w), 0.0)
    shape, scale = _pareto(np.maximum(excess, 1e-300))
    quantiles = _pareto_quantile((np.arange(count) + 0.5) / count, shape, scale)
    log_w[tail] = np.minimum(np.log(np.exp(cutoff) + quantiles), 0.0)
    return Smoothed(_normalized(log_w), float(shape))


def effective_share(log_weights: Float[Array | np.ndarray, " n"]) -> float:
    """The effective sample size of importance weights, (sum w)^2 / sum w^2, as a share of their number.

    Example:
        >>> import numpy as np
        >>> effective_share(np.log([1.0, 1.0, 1.0, 1.0]))
        1.0
    """
    weights = np.exp(_normalized(np.asarray(log_weights, float)))
    return float(1 / np.sum(weights**2) / len(weights))


class Calibration(NamedTuple):
    """Simulation-based calibration of an inference method.

    Attributes:
        ranks: rank of the true parameter among the draws, for each simulation and parameter.
        draws: number of draws it was ranked among.
        p_values: for each parameter, of the hypothesis that its ranks are uniform, as they are if all is right.
    """

    ranks: Float[np.ndarray, "simulations dim"]
    draws: int
    p_values: Float[np.ndarray, " dim"]


def calibrate(
    key: Array,
    simulate: Callable[[Array], tuple[Array, Any]],
    infer: Callable[[Array, Any], Array],
    *,
    simulations: int = 100,
    bins: int = 10,
    progress: bool = True,
) -> Calibration:
    """Simulation-based calibration (Talts et al., 2018): are true parameters ranked uniformly among posterior draws?

    Args:
        simulate: from a key to parameters (dim,) drawn from the prior, and data drawn given them.
        infer: from a key and data to posterior draws (n, dim).
        simulations: how many times to simulate and infer.
        bins: of the chi-squared test of uniform ranks.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> def simulate(key):
        ...     theta, noise = jr.normal(key, (2, 1))
        ...     return theta, theta + noise
        >>> def infer(key, y):  # the exact posterior
        ...     return y / 2 + jnp.sqrt(0.5) * jr.normal(key, (99, 1))
        >>> calibration = calibrate(jr.key(0), simulate, infer, progress=False)
        >>> bool(calibration.p_values[0] > 0.001)
        True
    """
    from scipy.stats import chisquare
    from tqdm.auto import tqdm

    ranks, count = [], 0
    for k in tqdm(jax.random.split(key, simulations), desc="calibrate", disable=not progress):
        first, second = jax.random.split(k)
        truth, data = simulate(first)
        draws = np.asarray(infer(second, data))
        if draws.ndim != 2 or draws.shape[1:] != np.shape(truth):
            raise ValueError(f"Expected draws of shape (n, {np.size(truth)}); got {draws.shape}.")
        ranks.append(np.sum(draws < np.asarray(truth), axis=0))
        count = len(draws)
    table = np.asarray(ranks, float)
    counted = [np.histogram(column, bins, (-0.5, count + 0.5))[0] for column in table.T]
    edges = np.linspace(-0.5, count + 0.5, bins + 1)
    expected = np.histogram(np.arange(count + 1), edges)[0] * simulations / (count + 1)
    return Calibration(table, count, np.array([chisquare(c, expected).pvalue for c in counted]))


def _normalized(log_weights):
    top = log_weights.max()
    return log_weights - top - np.log(np.sum(np.exp(log_weights - top)))


def _pareto(excess: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Shape and scale of a generalized Pareto distribution, from sorted excesses (Zhang and Stephens, 2009).

    Their estimate is a posterior mean over a grid of the ratio b = -shape / scale; the shape is then drawn a little
    towards 1/2, as in PSIS.
    """
    n = len(excess)
    grid = 1 - np.sqrt((30 + int(np.sqrt(n))) / (np.arange(1, 31 + int(np.sqrt(n))) - 0.5))
    b = 1 / excess[-1] + grid / (3 * excess[int(n / 4 + 0.5) - 1])
    shapes = np.mean(np.log1p(-b[:, None] * excess), axis=1)
    log_likelihood = n * (np.log(-b / shapes) - shapes - 1)
    weights = np.exp(_normalized(log_likelihood))
    mean_b = np.sum(weights * b)
    shape = np.mean(np.log1p(-mean_b * excess))
    return float((n * shape + 5) / (n + 10)), float(-shape / mean_b)


def _pareto_quantile(p, shape, scale):
    if abs(shape) < 1e-12:
        return -scale * np.log1p(-p)
    with np.errstate(over="ignore"):  # of a lost fit: its k-hat says so
        return scale * np.expm1(-shape * np.log1p(-p)) / shape
