"""Chains from random starts to the bulk of a target, which may be far from its modes.

Hierarchical models have modes at the end of a funnel, where the density grows without bound but has no mass. Chains
that start at random points of the model do not go there. They end in the bulk, and their moments give a better Gaussian
than any mode.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.random import generator
from ddnf.posterior.convergence import convergence
from ddnf.posterior.cost import affordable_gradients
from ddnf.posterior.hmc import CHUNK, Kernel, Position, Space, initial_kernel, place, run, shrunk_moments, with_moments
from ddnf.posterior.target import Target

_LEAST_CHUNKS, _MOST_CHUNKS = 8, 60
# Gradient evaluations at most, by the cost of the target within these limits.
_MOST_GRADIENTS = 100_000, 600_000
# Chunks between two convergence checks, after the first few.
_OFTEN = 4
# Draws of a chain by which it is judged whether they have met; the others are left out, evenly.
_JUDGED = 100
# R-hat of the later half of the draws below which the chains agree.
_MET = 1.1
# Leapfrog steps: enough to cross a few standard deviations.
_SHORTEST, _LONGEST, _CROSSED = 4, 32, 2.0
# A chain is lost if its log density is below the median by more than this per dimension.
_LOST = 5.0


class Warm(NamedTuple):
    """The chains after their warm-up, the moments of the later half of their draws, and diagnostics.

    Attributes:
        z: the last points of the chains.
        kernel: the settings of the chains.
        mean, scale: mean and triangular root of the covariance of the draws.
        rhat: largest R-hat of these draws.
        gradients: gradient evaluations.
    """

    z: Float[np.ndarray, "n dim"]
    kernel: Kernel
    mean: Float[np.ndarray, " dim"]
    scale: Float[np.ndarray, "dim dim"]
    rhat: float
    gradients: int


def warm_up(key: PRNGKeyArray, space: Space, starts: Float[Array, "n dim"]) -> Warm:
    """Runs chains from starts; momenta and step size follow the draws of all chains, chunk by chunk.

    Example:
        >>> from flowjax.bijections import Identity
        >>> space = Space(lambda z: -jnp.sum((z - 3) ** 2) / 2, Identity((2,)))
        >>> warm = warm_up(jr.key(0), space, jr.normal(jr.key(1), (32, 2)))
        >>> bool(abs(warm.mean - 3).max() < 0.3)
        True
    """
    n, dim = starts.shape
    most = np.clip(affordable_gradients(space.log_density, dim), *_MOST_GRADIENTS)
    position, parts, number, spent, ess, rhat = place(space, starts), [], 0, 0, 1.0, np.inf
    kernel = initial_kernel(dim, 0.0)._replace(length=jnp.asarray(_SHORTEST))
    while True:
        gain = jnp.asarray(1.0 if number < 3 else 0.5, position.x.dtype)
        kernel, position, trace = run(space, jr.fold_in(key, number), kernel, position, gain)
        position = _without_lost(jr.fold_in(key, 1000 + number), position)
        spent += CHUNK * n * int(kernel.length)
        number += 1
        parts.append(np.asarray(trace.x, float))
        later = np.swapaxes(np.concatenate(parts[number // 2 :]), 0, 1)
        if number < _LEAST_CHUNKS or number % _OFTEN == 0:
            # Sorting all draws would take longer than the chains.
            found = convergence(later[:, :: -(-later.shape[1] // _JUDGED)])
            ess, rhat = float(np.quantile(found.ess_bulk, 0.1)), float(found.rhat.max())
        if (number >= _LEAST_CHUNKS and rhat < _MET) or number == _MOST_CHUNKS or spent > most:
            mean, _, scale = shrunk_moments(later, ess)
            return Warm(np.asarray(position.z, float), kernel, mean, scale, rhat, spent)
        length = 2 ** np.round(np.log2(_CROSSED) - float(kernel.log_step) / np.log(2))
        length = jnp.asarray(int(np.clip(length, _SHORTEST, _LONGEST)))
        kernel = with_moments(kernel, later, ess)._replace(length=length)


def _without_lost(key: PRNGKeyArray, position: Position) -> Position:
    """Moves lost chains to the positions of other chains."""
    log_p = np.asarray(position.log_p, float)
    is_lost = ~(log_p > np.median(log_p) - _LOST * position.x.shape[1])
    if not is_lost.any() or is_lost.all():
        return position
    others = generator(key).choice(np.flatnonzero(~is_lost), len(log_p))
    source = np.where(is_lost, others, np.arange(len(log_p)))
    return jax.tree.map(lambda a: a[source], position)


def best_starts(key: PRNGKeyArray, target: Target, count: int) -> Float[Array, "n dim"]:
    """The random starts of highest density, of four times as many."""
    points = np.stack([target.start(jr.fold_in(key, number)) for number in range(4 * count)])
    values = np.nan_to_num(target.programs.values(points), nan=-np.inf)
    return jnp.asarray(points[np.argsort(-values)[:count]], jnp.result_type(float))
