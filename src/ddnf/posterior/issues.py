"""Issues of a fit, found by checks that fail in different ways."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.folds import folded_share
from ddnf.flow.random import generator
from ddnf.posterior.bridge import bridge
from ddnf.posterior.chains import Drift, run_chains
from ddnf.posterior.diagnosis import KHAT, Diagnosis, Sample, diagnose_sample, evaluate
from ddnf.posterior.evaluate import Base
from ddnf.posterior.modes import Gaussian, Search
from ddnf.posterior.polish import LEAST_ESS, RHAT, WEIGHTS_RHAT, Chains
from ddnf.posterior.proper import tail_index
from ddnf.posterior.regions import Missed, Normal, bulk_radius, missed_mass
from ddnf.posterior.target import Target

_PROBES = 12
# Points around a fit of few dimensions that are looked at for narrow modes.
_OUTLIERS = 4000
_FEW = 10
# Squared distance, in deviations, below which two modes are the same.
SAME = 0.1
# Climbs from points of large weight, to modes that a fit may lack.
_CLIMBS = 6
_SHIFT = 0.05
_ENERGY_DRIFT = 0.15
_LOW_ESS = 0.5
# Acceptance of a flow's proposals above which these reach places that are too narrow for the steps of the chains.
_HELPFUL = 0.1
# Share of divergent trajectories among those with small steps, beyond which chains may not enter narrow regions.
_NARROW = 0.02
# Below this tail index, the variance of draws converges too slowly to be of use.
_HEAVY = 2.9
MISSED = 0.03
_REMEDY = "Train longer (steps, rounds), use a larger flow, or reparameterize the model."


class Evidence(NamedTuple):
    """The results of all checks of a fit."""

    diagnosis: Diagnosis
    drift: Drift
    missed: tuple[Missed, ...]
    folded: float
    falling: float | None
    gradient_error: float
    tail_index: float


def gather_evidence(
    key: PRNGKeyArray,
    flow: AbstractBijection,
    target: Target,
    losses: Float[np.ndarray, " n"],
    *,
    search: Search | None = None,
    modes: tuple[Gaussian, ...] = (),
    sample: Sample | None = None,
    base: Base | None = None,
    probes: Float[Array, "m dim"] | None = None,
) -> Evidence:
    """Runs every check of a fit.

    Args:
        key: random key.
        flow: the fit.
        target: what it was fitted to.
        losses: mean losses in the course of training.
        search: the search that found the modes, if there was one; it caches its results.
        modes: the Gaussians that it found.
        sample: draws of the fit with their weights, if available.
        base: the distribution that the flow starts from; None for the standard normal.
        probes: points before the flow at which it is tested for folds; None for draws of the base.
    """
    probes = probe_points(key, target.dim, base) if probes is None else probes
    search = Search(target) if search is None else search
    sample = evaluate(key, flow, target, base=base) if sample is None else sample
    diagnosis = diagnose_sample(sample)
    points = np.stack([mode.mode for mode in modes]) if modes else np.zeros((0, target.dim))
    drift = run_chains(jr.fold_in(key, 1), target, sample, points)
    found = _normals_at_modes(key, target, search, sample, modes, drift.roaming)
    roaming = _normal_of(drift.roaming)
    missed = missed_mass(key, target, sample, found)
    if not any(one.least > MISSED for one in missed) and roaming is not None:
        missed = missed_mass(key, target, sample, [roaming])
    return Evidence(
        diagnosis,
        drift,
        tuple(one for one in missed if one.least > MISSED),
        folded_share(flow, probes),
        _still_falling(losses),
        gradient_error(key, target, search, sample),
        tail_index(key, target),
    )


def gather_chain_evidence(
    key: PRNGKeyArray,
    flow: AbstractBijection,
    target: Target,
    losses: Float[np.ndarray, " n"],
    *,
    fitted: Sample,
    chains: Chains,
    search: Search | None = None,
    modes: tuple[Gaussian, ...] = (),
    base: Base | None = None,
) -> Evidence:
    """Runs every check of draws of Markov chains through a flow, given `fitted` draws of that flow.

    They count as draws of a fit that is exact: every weight is the evidence.
    """
    log_evidence = bridge(fitted, chains).log_evidence
    z = chains.z.reshape(-1, target.dim).astype(float)
    # In random order: neighbours in a chain are alike, and checks begin with the first draws.
    z = generator(key).permutation(z)
    log_p = target.programs.values(z)
    weights = np.where(np.isfinite(log_p), log_evidence, -np.inf)
    sample = Sample(z, log_p - log_evidence, weights, chains.ess)
    # As many points as `probe_points` gives, so that nothing compiles again.
    x = np.asarray(chains.position.x)
    probes = jnp.asarray(np.resize(x, (500, x.shape[1])))
    return gather_evidence(
        key, flow, target, losses, search=search, modes=modes, sample=sample, base=base, probes=probes
    )


def find_issues(evidence: Evidence) -> tuple[str, ...]:
    """The issues that the checks found, each with a remedy."""
    diagnosis, drift, missed = evidence.diagnosis, evidence.drift, evidence.missed
    found = []
    if diagnosis.finite < 0.999:
        found.append(
            f"The log density is not finite at {1 - diagnosis.finite:.1%} of the draws. Transform bounded parameters "
            "to unbounded ones, or find out where the model returns NaN."
        )
    if evidence.gradient_error > 0.1:
        found.append(
            f"The gradient of the log density differs from finite differences by {evidence.gradient_error:.0%} at "
            "typical draws. Check custom derivatives, integer operations and stop_gradient in the model."
        )
    if evidence.tail_index < _HEAVY:
        found.append(
            f"The target has heavy tails: its tail mass falls like distance^-{evidence.tail_index:.1f}. Moments of "
            "that order do not exist, and the standard deviation of draws is too small. Use medians and quantiles."
        )
    if diagnosis.khat > KHAT and not _is_harmless(diagnosis, drift, missed):
        found.append(
            f"k-hat is {diagnosis.khat:.2f}, above {KHAT}: the fit misses part of the target, and importance weights "
            f"cannot correct for this. {_REMEDY}"
        )
    elif diagnosis.ess < _LOW_ESS or max(diagnosis.mean_shift, diagnosis.deviation_shift) > _SHIFT:
        found.append(
            f"Importance weights (ESS {diagnosis.ess:.0%}) change means by up to {diagnosis.mean_shift:.2f} standard "
            f"deviations, and standard deviations by up to {diagnosis.deviation_shift:.0%}, so plain draws are biased. "
            f"Use importance_sample. Alternatively: {_REMEDY}"
        )
    if max(drift.mean, drift.deviation) > _SHIFT or drift.energy > _ENERGY_DRIFT:
        found.append(
            f"Short MCMC chains from the fit's draws change means by up to {drift.mean:.2f} standard deviations, "
            f"standard deviations by up to {drift.deviation:.0%}, and the log density by {drift.energy:.2f} of its "
            f"standard deviations, so the fit differs from the target. {_REMEDY}"
        )
    if missed:
        place = np.array2string(missed[0].normal.mean, precision=3, threshold=6, max_line_width=1000)
        found.append(
            f"The fit misses about {missed[0].share:.0%} of the target's mass, around {place}. Search more widely "
            "(searches), temper the target (temper=0.5), use a larger flow, or set Target(initial=...) to start there."
        )
    if evidence.folded:
        found.append(
            f"A fraction of {evidence.folded:.2g} of the flow's cells folds: densities are wrong there. Use more "
            "steps, ddnf.DDNF(..., steps=16), or a guarantee, ddnf.DDNF(..., lipschitz=0.9)."
        )
    if evidence.falling is not None and not diagnosis.is_good:
        found.append(
            f"The loss has not settled: it fell by {evidence.falling:.2g} in the last tenth of training. "
            "Train longer: use more steps or rounds."
        )
    return tuple(found)


def chain_issues(chains: Chains, khat: float) -> tuple[str, ...]:
    """Issues of Markov chains through a flow of this k-hat, each with a remedy."""
    found = []
    if chains.rhat > RHAT or chains.ess < LEAST_ESS:
        found.append(
            f"Markov chains have not converged: R-hat is {chains.rhat:.3f} (limit {RHAT}), and the effective sample "
            f"size is {chains.ess:.0f} (at least {LEAST_ESS}). Use float64 or a larger flow, or reparameterize the "
            "model."
        )
    elif not chains.is_converged:
        weights = chains.weights_convergence
        effective = min(weights.ess_bulk[0], weights.ess_tail[0])
        found.append(
            f"Markov chains get stuck where the flow has too little density: R-hat of log p / q is "
            f"{weights.rhat[0]:.3f} (limit {WEIGHTS_RHAT}), and its effective sample size is {effective:.0f} (at least "
            f"{LEAST_ESS}). The mass of such regions is uncertain. Use a larger flow, or reparameterize the model."
        )
    elif chains.is_slow(khat):
        found.append(
            f"Markov chains mix slowly (effective sample size {chains.ess:.0f}), and the k-hat of the flow is "
            f"{khat:.2f}, above {KHAT}: both may miss the same part of the target. Use a larger flow, or "
            "reparameterize the model."
        )
    if chains.narrow > _NARROW and chains.flow_acceptance < _HELPFUL:
        found.append(
            f"{chains.narrow:.1%} of the trajectories with small steps diverged (limit {_NARROW:.0%}): Markov "
            "chains may not enter narrow parts of the target. Use float64, or reparameterize the model."
        )
    return tuple(found)


def missed_above(
    key: PRNGKeyArray,
    search: Search,
    sample: Sample,
    modes: tuple[Gaussian, ...],
    points: Float[np.ndarray, "n dim"],
    log_weights: Float[np.ndarray, " n"],
) -> tuple[Missed, ...]:
    """Mass that a fit misses at modes that climbs reach from the points of largest weight."""
    known = [Normal(mode.mean, mode.scale) for mode in modes]
    found = _with_modes_above(search, _heaviest(points, log_weights), known)[len(known) :]
    # A known Gaussian may be away from its mode, as in a funnel; that mode is not a new one.
    found = [normal for normal in found if all(_distance(mode.mode, normal) >= SAME for mode in modes)]
    missed = missed_mass(key, search.target, sample, found)
    return tuple(one for one in missed if one.least > MISSED)


def random_starts(key: PRNGKeyArray, target: Target) -> list[Float[np.ndarray, " dim"]]:
    """Starting points of searches that do not depend on the fit, so that they can run before it is finished."""
    return [target.start(jr.fold_in(key, number)) for number in range(_PROBES)]


def probe_points(key: PRNGKeyArray, dim: int, base: Base | None = None) -> Float[Array, "n dim"]:
    """Points of the base at which the flow is tested for folds."""
    if base is not None:
        return base.draw(key, 500)[0]
    return jax.device_put(np.asarray(generator(key).normal(size=(500, dim)), jnp.result_type(float)))


def _is_harmless(diagnosis, drift, missed) -> bool:
    """Whether all other checks contradict a k-hat above its limit, which is unreliable if weights are nearly equal."""
    agrees = max(drift.mean, drift.deviation, drift.energy) == 0 and not missed
    small = max(diagnosis.mean_shift, diagnosis.deviation_shift) < 0.03
    return diagnosis.khat < 1 and diagnosis.ess > 0.98 and agrees and small


def _normals_at_modes(key, target, search, sample, modes, roaming) -> list[Normal]:
    """Gaussians at known modes, and at modes that climbs reach from random points, far points and ends of chains."""
    center, deviation = sample.z.mean(axis=0), sample.z.std(axis=0)
    spread = np.repeat([1.0, 3.0, 10.0, 30.0], _PROBES // 4)[:, None]
    far = center + deviation * spread * generator(key).normal(size=(_PROBES, target.dim))
    found = [Normal(mode.mean, mode.scale) for mode in modes]
    starts = [*far, *random_starts(key, target), *_heaviest(sample.z, sample.log_weights)]
    found = _with_modes_above(search, starts, found)
    found = _with_modes_above(search, _outliers(key, target, center, deviation, found), found)
    elsewhere = 0
    for start in roaming:
        # Ends of chains in the bulk of a known mode lead back to it.
        if elsewhere < _PROBES and all(_distance(start, normal) >= bulk_radius(target.dim) for normal in found):
            elsewhere += 1
            found = _with_modes_above(search, [start], found)
    return found


def _outliers(key, target: Target, center, deviation, known: list[Normal]):
    """The most likely of many points around the fit, outside the bulk of known modes. In few dimensions, this finds
    narrow modes that climbs from elsewhere rarely reach."""
    if target.dim > _FEW:
        return np.zeros((0, target.dim))
    noise = generator(jr.fold_in(key, 2)).normal(size=(_OUTLIERS, target.dim))
    points = center + 2 * deviation * noise
    outside = [
        np.sum(np.linalg.solve(n.scale, (points - n.mean).T) ** 2, axis=0) > bulk_radius(target.dim) for n in known
    ]
    points = points[np.all(outside, axis=0)] if known else points
    return _heaviest(points, np.nan_to_num(target.programs.values(points), nan=-np.inf)) if len(points) else points


def _heaviest(points, log_weights):
    return np.asarray(points[np.argsort(-log_weights)[:_CLIMBS]], float)


def _with_modes_above(search: Search, starts, known: list[Normal]) -> list[Normal]:
    """The known Gaussians, and those at further modes that climbs reach."""
    found = list(known)
    for start in starts:
        mode = search.mode_from(start)
        if mode is None or any(_distance(mode, normal) < SAME for normal in found):
            continue
        if (normal := search.laplace(mode)) is not None:
            found.append(Normal(*normal))
    return found


def _distance(point, normal: Normal) -> float:
    return float(np.sum(np.linalg.solve(normal.scale, point - normal.mean) ** 2))


def _normal_of(points) -> Normal | None:
    """The Gaussian with the moments of the points; a diagonal one where they are few."""
    n, dim = points.shape
    covariance = np.atleast_2d(np.cov(points.T))
    if n < 3 * dim:
        covariance = np.diag(np.diag(covariance))
    try:
        return Normal(points.mean(axis=0), np.linalg.cholesky(1.5 * covariance))
    except np.linalg.LinAlgError:
        return None


def gradient_error(key, target, search: Search, sample: Sample, count: int = 16) -> float:
    """The median relative error of directional derivatives at draws of the fit, against central differences."""
    rng = generator(key)
    z = sample.z[np.isfinite(sample.log_weights)][:count]
    deviation = sample.z.std(axis=0)
    directions = deviation * rng.normal(size=z.shape)
    step = 1e-5 if jnp.result_type(float) == jnp.float64 else 3e-3
    near, far = (_directional(target, z, directions, size) for size in (step, 3 * step))
    slopes = np.array([direction @ search.value(point)[1] for point, direction in zip(z, directions, strict=True)])
    values = target.programs.values(z)
    # Differences with another step size show the effect of rounding.
    noise = 4 * jnp.finfo(jnp.result_type(float)).eps * np.abs(values) / step + 3 * np.abs(near - far)
    error = np.maximum(np.abs(slopes - near) - noise, 0) / (1 + np.abs(near))
    return float(np.median(error)) if np.isfinite(error).all() else 0.0


def _directional(target, z, directions, step):
    ahead, behind = (target.programs.values(z + s * directions) for s in (step, -step))
    return (ahead - behind) / (2 * step)


def _still_falling(losses: Float[np.ndarray, " n"]) -> float | None:
    """How much the loss fell in the last tenth, if this exceeds its noise and is large enough to matter."""
    tenth = len(losses) // 10
    if tenth < 1 or len(losses) < 10 or not np.isfinite(losses).all():
        return None
    before, after = losses[-3 * tenth : -tenth], losses[-tenth:]
    fall = before.mean() - after.mean()
    noise = np.std(losses[-3 * tenth :]) / np.sqrt(tenth)
    return float(fall) if fall > max(0.05, 3 * noise) else None
