"""The second diagnosis of a fit: short MCMC chains from its draws, which must not move its moments.

If q = p, a chain that starts from a draw of q and leaves p invariant ends with the distribution it started with. A
drift of means, deviations or the mean log density shows that q is not p, whatever the importance weights say. The
chains need the target alone, not the flow: Hamiltonian Monte Carlo in coordinates that standardize the fit's draws. A
quarter of the transitions ignores the gradient and is a random-walk Metropolis, so steps in the density and wrong
gradients do not stop the chains.
"""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.random import generator, normals
from ddnf.posterior.diagnosis import Sample
from ddnf.posterior.modes import LARGEST_FULL
from ddnf.posterior.target import Target

CHAINS = 256
ROAMING = 64
WARMUP = 10
TRANSITIONS = 30
_LEAPFROGS = 4
_ACCEPTANCE = 0.75
# Standard errors that a drift must exceed: hundreds of parameters are tested at once.
_SIGNIFICANT = 4.5
# Values are clipped at this many deviations: means of 256 chains with rare large squares have no reliable error.
_CLIP = 4.0


class Drift(NamedTuple):
    """How far the chains moved away from the fit.

    Attributes:
        mean: largest significant drift of a mean, in deviations of the fit; 0 if there is none.
        deviation: largest significant relative drift of a deviation; 0 if there is none.
        energy: significant drift of the mean log density, in its deviations; 0 if there is none.
        error: largest standard error of the drift of a mean.
        acceptance: mean acceptance rate of the chains.
        roaming: ends of the chains that started far from the fit.
        gradients: number of gradient evaluations.
    """

    mean: float
    deviation: float
    energy: float
    error: float
    acceptance: float
    roaming: Float[np.ndarray, "n dim"]
    gradients: int


class _Walk(NamedTuple):
    """All chains, and sums over the transitions after the warm-up."""

    u: Float[Array, "n dim"]
    log_p: Float[Array, " n"]
    gradient: Float[Array, "n dim"]
    log_step: Float[Array, ""]
    moved: Float[Array, "n dim"]
    squared: Float[Array, "n dim"]
    energy: Float[Array, " n"]
    acceptance: Float[Array, ""]


def run_chains(key: PRNGKeyArray, target: Target, sample: Sample, points: Float[np.ndarray, "m dim"]) -> Drift:
    """Runs 256 chains from draws of a fit, and 64 from `points` (such as modes) and from far away.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr, numpy as np
        >>> target = ddnf.Target(lambda z: -jnp.sum(z**2) / 2, 2)
        >>> z = np.random.default_rng(0).normal(size=(1000, 2))
        >>> fits = (Sample(z + shift, np.zeros(1000), -np.sum((z + shift) ** 2, axis=1) / 2) for shift in (0.0, 0.5))
        >>> right, wrong = (run_chains(jr.key(0), target, fit, z[:0]).mean for fit in fits)
        >>> right, 0.3 < wrong < 0.7
        (0.0, True)
    """
    z = sample.z
    center, deviation = z.mean(axis=0), np.maximum(z.std(axis=0), 1e-300)
    scale = _scale(z, deviation)
    starts = _starts(key, z, points, center, deviation)
    arrays = _arrays(center, scale, deviation, _solve(scale, starts - center))
    walk = _run(target.log_density, key, arrays, _steps())
    with np.errstate(invalid="ignore", over="ignore"):  # log densities of -inf
        moments = _drift(walk, sample, center, deviation)
    ends = center + _apply(scale, np.asarray(walk.u, float))
    return Drift(*moments, float(walk.acceptance) / _steps(), ends[CHAINS:], _steps() * _LEAPFROGS * len(starts))


def warm_compile_cache(key: PRNGKeyArray, target: Target) -> None:
    """Compiles the chains of a target by running them for no transition at all."""
    n, d = CHAINS + ROAMING, target.dim
    scale = np.eye(d) if d <= LARGEST_FULL else np.ones(d)
    _run(target.log_density, key, _arrays(np.zeros(d), scale, np.ones(d), np.zeros((n, d))), 0)


def _steps():
    return WARMUP + TRANSITIONS


def _arrays(*arrays):
    return [np.asarray(array, jnp.result_type(float)) for array in arrays]


def _scale(z, deviation):
    """The triangle of the draws' covariance; their deviations in many dimensions or where it is singular."""
    if z.shape[1] > LARGEST_FULL:
        return deviation
    try:
        return np.linalg.cholesky(np.atleast_2d(np.cov(z.T)) + 1e-10 * np.diag(deviation**2))
    except np.linalg.LinAlgError:
        return np.diag(deviation)


def _solve(scale, z):
    return np.linalg.solve(scale, z.T).T if scale.ndim == 2 else z / scale


def _apply(scale, u):
    return u @ scale.T if scale.ndim == 2 else u * scale


def _starts(key, z, points, center, deviation):
    spread = np.repeat([3.0, 10.0], ROAMING // 2)[:, None]
    far = center + deviation * spread * generator(key).normal(size=(ROAMING, z.shape[1]))
    points = points[: ROAMING // 4]
    return np.concatenate([z[:CHAINS], points, far[len(points) :]])


@eqx.filter_jit
def _run(log_density, key, arrays, steps) -> _Walk:
    center, scale, deviation, u = arrays

    def value_and_gradient(u):
        value, slope = jax.value_and_grad(lambda u: log_density(center + _apply(scale, u)))(u)
        return jnp.where(jnp.isnan(value), -jnp.inf, value), jnp.where(jnp.isfinite(slope), slope, 0.0)

    evaluate = jax.vmap(value_and_gradient)
    zeros = jnp.zeros_like(u)
    log_p, gradient = evaluate(u)
    scalar = jnp.zeros((), u.dtype)
    walk = _Walk(u, log_p, gradient, scalar + jnp.log(0.5), zeros, zeros, jnp.zeros_like(log_p), scalar)
    return lax.fori_loop(0, steps, partial(_transition, evaluate, key, scale, deviation), walk)


def _transition(evaluate, key, scale, deviation, number, walk: _Walk) -> _Walk:
    n, dim = walk.u.shape
    momentum_key, uniform_key = jr.split(jr.fold_in(key, number))
    momentum = normals(momentum_key, n, (dim,))
    size, kind, accept = jr.uniform(uniform_key, (3, n))
    guided = kind > 0.25
    # Steps of many sizes: a funnel needs small ones in its neck and large ones in its mouth.
    walk_step = 2.4 / np.sqrt(dim) / _LEAPFROGS * jnp.exp(-3 * size)
    step = jnp.where(guided, jnp.exp(walk.log_step) * (0.3 + 0.7 * size), walk_step)[:, None]
    force = guided[:, None]

    def leapfrog(_, carry):
        u, p, _, slope = carry
        p = p + step / 2 * force * slope
        u = u + step * p
        log_p, slope = evaluate(u)
        return u, p + step / 2 * force * slope, log_p, slope

    start = walk.u, momentum, walk.log_p, walk.gradient
    u, p, log_p, slope = lax.fori_loop(0, _LEAPFROGS, leapfrog, start)
    log_ratio = log_p - walk.log_p + jnp.sum(momentum**2 - p**2, axis=1) / 2
    probability = jnp.where(jnp.isnan(log_ratio), 0.0, jnp.exp(jnp.minimum(log_ratio, 0.0)))
    accepted = accept < probability
    u, slope = (jnp.where(accepted[:, None], a, b) for a, b in ((u, walk.u), (slope, walk.gradient)))
    log_p = jnp.where(accepted, log_p, walk.log_p)
    tuned = guided & (jnp.arange(n) < CHAINS)
    rate = jnp.sum(probability * tuned) / jnp.maximum(jnp.sum(tuned), 1)
    gain = jnp.where(number < WARMUP, 2 / jnp.sqrt(1.0 + number), 0.0)
    counted = number >= WARMUP
    moved = jnp.clip(_apply(scale, u) / deviation, -_CLIP, _CLIP)
    return _Walk(
        u,
        log_p,
        slope,
        (walk.log_step + gain * (rate - _ACCEPTANCE)).astype(walk.log_step.dtype),
        walk.moved + counted * moved,
        walk.squared + counted * moved**2,
        walk.energy + jnp.where(counted, log_p, 0.0),
        (walk.acceptance + jnp.mean(probability[:CHAINS])).astype(walk.acceptance.dtype),
    )


def _drift(walk: _Walk, sample: Sample, center, deviation) -> tuple[float, float, float, float]:
    standard = np.clip((sample.z - center) / deviation, -_CLIP, _CLIP)
    averages = [np.asarray(a, float)[:CHAINS] / TRANSITIONS for a in (walk.moved, walk.squared, walk.energy)]
    mean, mean_error = _compared(averages[0], standard)
    square, square_error = _compared(averages[1], standard**2)
    # The variance is taken about the new mean.
    variance = standard.var(axis=0)
    ratio = np.sqrt(np.maximum(1 + (square - mean**2) / variance, 0)) - 1
    energy = sample.log_weights + sample.log_q
    spread = max(float(np.std(energy)), 1e-300) if np.isfinite(energy).all() else np.nan
    rise, rise_error = _compared(averages[2][:, None], energy[:, None])
    return (
        _largest(mean, np.abs(mean) > _SIGNIFICANT * mean_error),
        _largest(ratio, np.abs(square) > _SIGNIFICANT * square_error),
        _largest(rise / spread, np.abs(rise) > _SIGNIFICANT * rise_error) if np.isfinite(spread) else 0.0,
        float(np.max(mean_error)),
    )


def _compared(averages, values):
    """Mean of the chains' averages minus the mean of the fit's values, and its standard error.

    The start of a chain is a control variate: slow chains stay near where they began, and the mean of the fit is known
    from many more draws than there are chains.
    """
    starts, reference = values[: len(averages)], values.mean(axis=0)
    centred = starts - starts.mean(axis=0)
    variance = np.maximum(np.mean(centred**2, axis=0), 1e-300)
    slope = np.clip(np.mean(centred * (averages - averages.mean(axis=0)), axis=0) / variance, 0, 1)
    adjusted = averages - slope * (starts - reference)
    own = values.std(axis=0) * (1 - slope) / np.sqrt(len(values))
    error = np.sqrt(adjusted.var(axis=0) / len(averages) + own**2)
    return adjusted.mean(axis=0) - reference, error


def _largest(values, significant) -> float:
    found = np.abs(np.where(significant & np.isfinite(values), values, 0.0))
    return float(found.max(initial=0.0))
