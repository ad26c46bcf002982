"""Importance weights: Pareto smoothing, k-hat and effective sample size."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float


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
    fitted to them. Where all of them are within 5 % of the smallest, they stay as they are and k-hat is 0: the shape of
    such a tail does not matter.

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


def _normalized(log_weights):
    top = log_weights.max()
    return log_weights - top - np.log(np.sum(np.exp(log_weights - top)))


def _pareto(excess: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Shape and scale of a generalized Pareto distribution, from sorted excesses (Zhang and Stephens, 2009).

    Their estimate is a posterior mean over a grid of the ratio b = -shape / scale; PSIS then shrinks the shape
    slightly towards 1/2.
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
    with np.errstate(over="ignore"):  # a lost fit, which its k-hat shows
        return scale * np.expm1(-shape * np.log1p(-p)) / shape
