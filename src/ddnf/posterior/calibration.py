"""Simulation-based calibration of an inference method."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float


class Calibration(NamedTuple):
    """The result of `calibrate`.

    Attributes:
        ranks: rank of the true parameter among the draws, by simulation and parameter.
        draws: number of draws that it was ranked among.
        p_values: of the hypothesis that the ranks of a parameter are uniform, as for exact inference.
    """

    ranks: Float[np.ndarray, "simulations dim"]
    draws: int
    p_values: Float[np.ndarray, " dim"]


def calibrate(
    key: Array,
    simulate: Callable[[Array], tuple[Array, Any]],
    infer: Callable[[Array, Any], Array | np.ndarray],
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
