"""The second diagnosis of a fit: short MCMC chains from its draws, which must not move its moments.

If q = p, a chain that starts from a draw of q and leaves p invariant ends with the distribution it started with. A
drift of the means, standard deviations or mean log density shows that q differs from p, whatever the importance weights
are. The chains only use the target, not the flow: they run Hamiltonian Monte Carlo in coordinates that standardize the
fit's draws. A quarter of the transitions are random-walk Metropolis steps without gradients, so discontinuities of the
density and wrong gradients do not block the chains. They run on the host, with the compiled gradients of the target.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ddnf.flow.random import generator
from ddnf.posterior.diagnosis import Sample
from ddnf.posterior.modes import LARGEST_FULL
from ddnf.posterior.target import Target

CHAINS = 192
ROAMING = 64
WARMUP = 6
TRANSITIONS = 14
_LEAPFROGS = 3
_ACCEPTANCE = 0.75
# Standard errors that a drift must exceed: hundreds of parameters are tested at once.
_SIGNIFICANT = 4.5
# Values are clipped at this many deviations: means of few chains with rare large squares have no reliable error.
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


class _Coordinates(NamedTuple):
    """z = center + scale u: coordinates u in which the fit's draws are standardized, and the target's gradient there.

    `scale` is triangular, or a vector in many dimensions.
    """

    target: Target
    center: Float[np.ndarray, " dim"]
    scale: Float[np.ndarray, "dim *dim"]

    def to_u(self, z):
        return (
            np.linalg.solve(self.scale, (z - self.center).T).T
            if self.scale.ndim == 2
            else (z - self.center) / self.scale
        )

    def to_z(self, u):
        return self.center + (u @ self.scale.T if self.scale.ndim == 2 else u * self.scale)

    def evaluate(self, u):
        """Log density and gradient, with NaN replaced by -inf and 0."""
        values, slopes = self.target.programs.gradients(self.to_z(u))
        slopes = slopes @ self.scale if self.scale.ndim == 2 else slopes * self.scale
        return np.where(np.isnan(values), -np.inf, values), np.where(np.isfinite(slopes), slopes, 0.0)


class _Walk(NamedTuple):
    """All chains: points, log densities and gradients."""

    u: Float[np.ndarray, "n dim"]
    log_p: Float[np.ndarray, " n"]
    gradient: Float[np.ndarray, "n dim"]


def run_chains(key: PRNGKeyArray, target: Target, sample: Sample, points: Float[np.ndarray, "m dim"]) -> Drift:
    """Runs chains from draws of a fit, and some from `points` (such as modes) and from far away.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr, numpy as np
        >>> target = ddnf.Target(lambda z: -jnp.sum(z**2) / 2, 2)
        >>> z = np.random.default_rng(0).normal(size=(1000, 2))
        >>> fits = (Sample(z + shift, np.zeros(1000), -np.sum((z + shift) ** 2, axis=1) / 2) for shift in (0.0, 0.5))
        >>> right, wrong = (run_chains(jr.key(0), target, fit, z[:0]).mean for fit in fits)
        >>> right, 0.3 < wrong < 0.7
        (0.0, True)
    """
    rng, z = generator(key), sample.z
    center, deviation = z.mean(axis=0), np.maximum(z.std(axis=0), 1e-300)
    coordinates = _Coordinates(target, center, _scale(z, deviation))
    starts = _starts(rng, z, points, center, deviation)
    with np.errstate(invalid="ignore", over="ignore"):  # log densities of -inf
        walk, averages, acceptance = _run(rng, coordinates, starts, deviation)
        moments = moments_moved(averages, sample, center, deviation)
    evaluations = (WARMUP + TRANSITIONS) * _LEAPFROGS * len(starts)
    return Drift(*moments, acceptance, coordinates.to_z(walk.u)[CHAINS:], evaluations)


def _run(rng, coordinates: _Coordinates, starts, deviation):
    """The chains' ends, means over their transitions (standardized points, squares, log densities), acceptance."""
    u = coordinates.to_u(starts)
    walk = _Walk(u, *coordinates.evaluate(u))
    log_step, rates, sums = np.log(0.5), [], [0.0, 0.0, 0.0]
    for number in range(WARMUP + TRANSITIONS):
        walk, probability, guided = _transition(rng, coordinates, walk, np.exp(log_step))
        rates.append(probability[:CHAINS].mean())
        if number < WARMUP:
            tuned = probability[:CHAINS][guided[:CHAINS]]
            log_step += 2 / np.sqrt(1 + number) * (tuned.mean() - _ACCEPTANCE) if len(tuned) else 0.0
            continue
        moved = np.clip((coordinates.to_z(walk.u) - coordinates.center) / deviation, -_CLIP, _CLIP)[:CHAINS]
        sums = [total + new for total, new in zip(sums, (moved, moved**2, walk.log_p[:CHAINS]), strict=True)]
    return walk, [total / TRANSITIONS for total in sums], float(np.mean(rates))


def _transition(rng, coordinates: _Coordinates, walk: _Walk, largest_step) -> tuple[_Walk, np.ndarray, np.ndarray]:
    n, dim = walk.u.shape
    momentum = rng.normal(size=(n, dim))
    size, kind, accept = rng.uniform(size=(3, n))
    guided = kind > 0.25
    # A funnel needs small steps in its neck and large steps in its mouth, so step sizes vary.
    walk_step = 2.4 / np.sqrt(dim) / _LEAPFROGS * np.exp(-3 * size)
    step = np.where(guided, largest_step * (0.3 + 0.7 * size), walk_step)[:, None]
    u, p, log_p, slope = walk.u, momentum, walk.log_p, walk.gradient
    for _ in range(_LEAPFROGS):
        p = p + step / 2 * guided[:, None] * slope
        u = u + step * p
        log_p, slope = coordinates.evaluate(u)
        p = p + step / 2 * guided[:, None] * slope
    log_ratio = log_p - walk.log_p + np.sum(momentum**2 - p**2, axis=1) / 2
    probability = np.where(np.isnan(log_ratio), 0.0, np.exp(np.minimum(log_ratio, 0.0)))
    accepted = accept < probability
    u, slope = (np.where(accepted[:, None], a, b) for a, b in ((u, walk.u), (slope, walk.gradient)))
    return _Walk(u, np.where(accepted, log_p, walk.log_p), slope), probability, guided


def _scale(z, deviation):
    """The triangle of the draws' covariance; their deviations in many dimensions or where it is singular."""
    if z.shape[1] > LARGEST_FULL:
        return deviation
    try:
        return np.linalg.cholesky(np.atleast_2d(np.cov(z.T)) + 1e-10 * np.diag(deviation**2))
    except np.linalg.LinAlgError:
        return np.diag(deviation)


def _starts(rng, z, points, center, deviation):
    spread = np.repeat([3.0, 10.0], ROAMING // 2)[:, None]
    far = center + deviation * spread * rng.normal(size=(ROAMING, z.shape[1]))
    points = points[: ROAMING // 4]
    return np.concatenate([z[:CHAINS], points, far[len(points) :]])


def moments_moved(averages, sample: Sample, center, deviation) -> tuple[float, float, float, float]:
    standard = np.clip((sample.z - center) / deviation, -_CLIP, _CLIP)
    count = len(sample.z) if sample.effective is None else min(sample.effective, len(sample.z))
    mean, mean_error = _compared(averages[0], standard, count)
    square, square_error = _compared(averages[1], standard**2, count)
    # The variance is taken about the new mean.
    variance = standard.var(axis=0)
    ratio = np.sqrt(np.maximum(1 + (square - mean**2) / variance, 0)) - 1
    energy = sample.log_weights + sample.log_q
    spread = max(float(np.std(energy)), 1e-300) if np.isfinite(energy).all() else np.nan
    rise, rise_error = _compared(averages[2][:, None], energy[:, None], count)
    return (
        _largest(mean, np.abs(mean) > _SIGNIFICANT * mean_error),
        _largest(ratio, np.abs(square) > _SIGNIFICANT * square_error),
        _largest(rise / spread, np.abs(rise) > _SIGNIFICANT * rise_error) if np.isfinite(spread) else 0.0,
        float(np.max(mean_error)),
    )


def _compared(averages, values, count):
    """Mean of the chains' averages minus the mean of the fit's values, and its standard error.

    The start of a chain is a control variate: slow chains stay near where they began, and the mean of the fit is known
    from many more draws than there are chains, worth `count` independent ones.
    """
    starts, reference = values[: len(averages)], values.mean(axis=0)
    centred = starts - starts.mean(axis=0)
    variance = np.maximum(np.mean(centred**2, axis=0), 1e-300)
    slope = np.clip(np.mean(centred * (averages - averages.mean(axis=0)), axis=0) / variance, 0, 1)
    adjusted = averages - slope * (starts - reference)
    own = values.std(axis=0) * (1 - slope) / np.sqrt(count)
    error = np.sqrt(adjusted.var(axis=0) / len(averages) + own**2)
    return adjusted.mean(axis=0) - reference, error


def _largest(values, significant) -> float:
    found = np.abs(np.where(significant & np.isfinite(values), values, 0.0))
    return float(found.max(initial=0.0))
