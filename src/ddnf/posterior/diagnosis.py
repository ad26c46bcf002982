"""Is a fitted posterior to be trusted? Importance weights, folds, settling, and modes that it does not cover."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from flowjax.distributions import StandardNormal, Transformed
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.folds import folded_share
from ddnf.flow.random import generator, normals
from ddnf.posterior.importance import effective_share, psis
from ddnf.posterior.modes import Search
from ddnf.posterior.target import Target

EVALUATED = 10_000
_PROBES = 12
KHAT = 0.7
# k-hat is an estimate: a fit that is to pass for good keeps off the limit.
GOOD_KHAT = 0.6


class LostFitError(ValueError):
    """A fit that has gone where the target has no density at all."""


class Verdict(NamedTuple):
    """What fresh draws say of a fit: its exact ELBO, importance weights, and how far these would move its moments."""

    elbo: float
    elbo_error: float
    log_evidence: float
    khat: float
    ess: float
    mean_shift: float
    deviation_shift: float

    @property
    def is_good(self) -> bool:
        """Whether more training would not change what a user looks at."""
        # Where all weights are nearly equal there is hardly a tail to estimate k-hat from.
        limit = KHAT if self.ess > 0.999 else GOOD_KHAT
        return self.khat < limit and self.ess > 0.985 and self.mean_shift < 0.02 and self.deviation_shift < 0.02


def judge(key: PRNGKeyArray, flow: AbstractBijection, target: Target) -> Verdict:
    """Judges a fit by 10,000 draws of it."""
    z, log_q = draw(flow, key, EVALUATED)
    log_weights = clean(log_density(target.log_density, z) - log_q)
    smoothed = psis(log_weights)
    weights, z = np.exp(smoothed.log_weights), np.asarray(z, float)
    deviation = z.std(axis=0)
    mean = weights @ z
    weighted_deviation = np.sqrt(np.maximum(weights @ (z - mean) ** 2, 0))
    finite = log_weights[np.isfinite(log_weights)]
    share = len(finite) / len(log_weights)
    top = finite.max()
    return Verdict(
        float(finite.mean()) if share == 1 else -np.inf,
        float(finite.std() / np.sqrt(len(finite))),
        float(top + np.log(np.mean(np.exp(finite - top)) * share)),
        smoothed.khat,
        effective_share(log_weights),
        float(np.max(np.abs(mean - z.mean(axis=0)) / deviation)),
        float(np.max(np.abs(weighted_deviation / deviation - 1))),
    )


def is_sound(key: PRNGKeyArray, flow: AbstractBijection) -> bool:
    """Whether no cell of the flow folds on some draws."""
    return folded_share(flow, _few(key, flow.shape[0])) == 0


def warm_up(key: PRNGKeyArray, flow: AbstractBijection) -> None:
    """Compiles what `judge` and `complaints` will need of the flow, by judging one of the same structure.

    Not of the target: this may run in a thread of its own, and NumPyro's models are traced with global state.
    """
    draw(flow, key, EVALUATED)
    folded_share(flow, _few(key, flow.shape[0]))


def complaints(
    key: PRNGKeyArray,
    flow: AbstractBijection,
    target: Target,
    verdict: Verdict,
    losses: Float[np.ndarray, " n"],
    search: Search,
) -> tuple[str, ...]:
    """What is wrong with a fit, each with what to do about it."""
    found = []
    if verdict.khat > KHAT:
        found.append(
            f"k-hat is {verdict.khat:.2f}, above {KHAT}: the fit misses part of the target, and importance sampling "
            "can't mend it. Train longer (steps, rounds), use a larger flow, or reparameterize the model."
        )
    if folded := folded_share(flow, _few(key, target.dim)):
        found.append(
            f"The flow folds in {folded:.2g} of the cells: its densities are wrong there. Use more steps, "
            "ddnf.DDNF(..., steps=16), or a guarantee, ddnf.DDNF(..., lipschitz=0.9)."
        )
    if (fall := _still_falling(losses)) is not None:
        found.append(
            f"The loss has not settled: it fell by {fall:.2g} in the last tenth of the training. "
            "Train longer: more steps or rounds."
        )
    if (missed := missed_mode(key, flow, target, verdict, search)) is not None:
        found.append(missed)
    return tuple(found)


def random_starts(key: PRNGKeyArray, target: Target) -> list[Float[np.ndarray, " dim"]]:
    """Where `missed_mode` looks for modes whatever the fit is: its searches may be done beforehand."""
    return [target.start(jr.fold_in(key, number)) for number in range(_PROBES)]


def missed_mode(key, flow, target, verdict, search) -> str | None:
    """Looks for modes outside of the fit, which its own draws can't show: from far and from random points."""
    points = np.asarray(draw(flow, key, EVALUATED)[0], float)
    center, deviation = points.mean(axis=0), points.std(axis=0)
    spread = np.repeat([1.0, 3.0, 10.0, 30.0], _PROBES // 4)[:, None]
    far = center + deviation * spread * generator(key).normal(size=(_PROBES, target.dim))
    mean, covariance = center, np.atleast_2d(np.cov(points.T)) + 1e-12 * np.diag(deviation**2)
    precision = np.linalg.pinv(covariance)
    worst = None
    for start in [*far, *random_starts(key, target)]:
        mode = search.mode_from(start)
        if mode is None:
            continue
        distance = (mode - mean) @ precision @ (mode - mean)
        # A mode in the bulk of the fit is its own; so is one on its rim.
        if distance < 4 * (len(mode) + 3 * np.sqrt(2 * len(mode))):
            continue
        gaussian = search.gaussian(key, mode)
        if gaussian is not None and (worst is None or gaussian.elbo > worst.elbo):
            worst = gaussian
    if worst is None:
        return None
    share = 1 / (1 + np.exp(min(700.0, verdict.log_evidence - worst.elbo)))
    if share < 0.01:
        return None
    covered = float(log_prob(Transformed(StandardNormal(flow.shape), flow), jnp.asarray(worst.mean)[None])[0])
    height, _ = search.value(worst.mean)
    if covered > height - verdict.log_evidence - 3:
        return None
    place = np.array2string(worst.mean, precision=3, threshold=6, max_line_width=1000)
    return (
        f"The fit does not cover a mode with about {share:.0%} of the target's mass, at {place}. Search more widely "
        "(searches), warm the target up (temper=0.5), use a larger flow, or start near both with Target(initial=...)."
    )


def _few(key, dim):
    return jnp.asarray(generator(key).normal(size=(500, dim)), jnp.result_type(float))


def _still_falling(losses: Float[np.ndarray, " n"]) -> float | None:
    """By how much the loss fell in the last tenth, if that is more than its noise and than a user would care about."""
    tenth = len(losses) // 10
    if tenth < 1 or len(losses) < 10 or not np.isfinite(losses).all():
        return None
    before, after = losses[-3 * tenth : -tenth], losses[-tenth:]
    fall = before.mean() - after.mean()
    noise = np.std(losses[-3 * tenth :]) / np.sqrt(tenth)
    return float(fall) if fall > max(0.05, 3 * noise) else None


def draw(flow: AbstractBijection, key: PRNGKeyArray, n: int) -> tuple[Float[Array, "n dim"], Float[Array, " n"]]:
    """n draws of the flow, and their log density."""
    return _draw(flow, key, n)


@eqx.filter_jit
def _draw(flow, key, n):
    x = normals(key, n, flow.shape)
    z, log_det = jax.vmap(flow.transform_and_log_det)(x)
    return z, -jnp.sum(x**2, axis=-1) / 2 - x.shape[1] / 2 * jnp.log(2 * jnp.pi) - log_det


@eqx.filter_jit
def log_density(function: Callable, z: Float[Array, "n dim"]) -> Float[Array, " n"]:
    """A log density at many points, some hundred at a time."""
    return lax.map(function, z, batch_size=min(500, len(z)))


@eqx.filter_jit
def log_prob(distribution: Transformed, z: Float[Array, "n dim"]) -> Float[Array, " n"]:
    """A distribution's log density at many points."""
    return jax.vmap(distribution.log_prob)(z)


def clean(log_weights: Array) -> Float[np.ndarray, " n"]:
    """Log weights with NaN, where the target has none, as weight zero."""
    values = np.asarray(log_weights, float)
    values = np.where(np.isfinite(values), values, -np.inf)
    if not np.isfinite(values).any():
        raise LostFitError("Expected a log_density that is finite at some draws of the fit; got none of them.")
    return values
