"""Convergence of Markov chains: rank-normalized split R-hat, bulk and tail effective sample sizes."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri
from scipy.stats import rankdata


class Convergence(NamedTuple):
    """Figures of each scalar parameter.

    Attributes:
        rhat: rank-normalized split R-hat, the larger of those of location and scale.
        ess_bulk: effective number of draws for means and medians.
        ess_tail: the same for the 5 % and 95 % quantiles.
    """

    rhat: Float[np.ndarray, " dim"]
    ess_bulk: Float[np.ndarray, " dim"]
    ess_tail: Float[np.ndarray, " dim"]


def convergence(draws: Float[np.ndarray, "chains draws dim"]) -> Convergence:
    """R-hat and effective sample sizes (Vehtari, Gelman, Simpson, Carpenter and Buerkner, 2021).

    Example:
        >>> rng = np.random.default_rng(0)
        >>> mixed = convergence(rng.normal(size=(4, 1000, 1)))
        >>> bool(mixed.rhat[0] < 1.01 and mixed.ess_bulk[0] > 3000)
        True
        >>> apart = convergence(rng.normal(size=(4, 1000, 1)) + np.arange(4.0)[:, None, None])
        >>> bool(apart.rhat[0] > 1.5)
        True
    """
    draws = np.asarray(draws, float)
    if draws.ndim != 3 or draws.shape[1] < 4:
        raise ValueError(f"Expected draws of shape (chains, at least 4, dim); got {draws.shape}.")
    halves = _split(draws)
    ranked = _normal_scores(halves)
    folded = _normal_scores(np.abs(halves - np.median(halves, axis=(0, 1))))
    rhat = np.maximum(_rhat(ranked), _rhat(folded))
    tails = [_ess((halves <= np.quantile(halves, q, axis=(0, 1))).astype(float)) for q in (0.05, 0.95)]
    return Convergence(rhat, _ess(ranked), np.minimum(*tails))


def _split(draws):
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, -half:]])


def _normal_scores(draws):
    ranks = rankdata(draws.reshape(-1, draws.shape[-1]), axis=0).reshape(draws.shape)
    return ndtri((ranks - 0.375) / (draws.shape[0] * draws.shape[1] + 0.25))


def _rhat(draws):
    """sqrt(var+ / W) with var+ = (n - 1) / n W + B / n."""
    n = draws.shape[1]
    within, between = _within_and_between(draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(within > 0, np.sqrt((n - 1) / n + between / within), np.inf)


def _within_and_between(draws):
    return draws.var(axis=1, ddof=1).mean(axis=0), draws.mean(axis=1).var(axis=0, ddof=1)


def _ess(draws):
    """Effective number of draws by Geyer's initial monotone sequence of paired autocorrelations."""
    chains, n, dim = draws.shape
    within, between = _within_and_between(draws)
    total = (n - 1) / n * within + between
    is_constant = ~(within > 0)
    correlation = 1 - (within - _autocovariance(draws) * n / (n - 1)) / np.where(is_constant, 1.0, total)
    correlation[0] = 1.0
    pairs = correlation[: n // 2 * 2].reshape(-1, 2, dim).sum(axis=1)
    positive = np.logical_and.accumulate(pairs > 0, axis=0)
    pairs = np.minimum.accumulate(np.where(positive, pairs, 0.0), axis=0)
    count = chains * n
    time = np.maximum(2 * pairs.sum(axis=0) - 1, 1 / np.log10(count))
    return np.where(is_constant, 1.0, count / time)


def _autocovariance(draws):
    """Of all lags, mean over chains."""
    n = draws.shape[1]
    centred = draws - draws.mean(axis=1, keepdims=True)
    spectrum = np.abs(np.fft.rfft(centred, 2 * n, axis=1)) ** 2
    return np.fft.irfft(spectrum.mean(axis=0), axis=0)[:n] / n
