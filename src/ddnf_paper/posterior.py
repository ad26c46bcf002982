"""The cancer posterior (the paper's Fig. skwP, Appendix B and Table 2): each method against quadrature."""

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float, PRNGKeyArray
from scipy.interpolate import CubicSpline
from scipy.special import expit

from ddnf import Posterior, Target, fit_posterior
from ddnf.posterior import KHAT, End, LostFitError, diagnose, draw
from ddnf.posterior import log_density as evaluate
from ddnf_paper.compare import fit_flow
from ddnf_paper.experiment import Experiment, Profile
from ddnf_paper.models import Settings, make
from ddnf_paper.plane import Plane, closeness, lattice, midpoints, of_cancer, shades
from ddnf_paper.posterior_claims import (
    ENDED,
    FULL_RANK,
    HOUSEHOLDER,
    MCMC,
    MEAN_FIELD,
    NAF,
    NARROW,
    OURS,
    PLANAR,
    QUADRATURE,
    SCALED,
    claims,
)
from ddnf_paper.posterior_shown import pictures, tables
from ddnf_paper.record import plain
from ddnf_paper.references import ADVI, NUTS, advi, nuts
from ddnf_paper.targets import cancer

ABOUT = """The posterior of the mortality m and precision L in a beta-binomial model of stomach cancer in 20 cities, as
a density of (logit m, log L). The paper's Table 2 used the density "table2": prior times likelihood, without the
Jacobian of the change of variables. With the Jacobian ("textbook"), the mean of L does not exist. Every method is
fitted to both densities with several seeds; quadrature gives the truth. "DDNF" is ddnf.fit_posterior with its defaults;
"DDNF, (2, 2) units" has K = 8 blocks of T = 8 cells with the paper's two layers of two units. Planar flows start from
the standard normal, as in the paper; all other flows use the same search for modes and final affine map as DDNF. NAF, K
= 2, gets an eighth of the steps. The target is not tempered, because one planar fit of five diverged with tempering. In
table2, L has a mean but no variance, so means of L converge slowly, also in MCMC."""

BINS, PIXELS = 60, 80


@dataclasses.dataclass(frozen=True)
class Config:
    """Which methods are run on which targets, and how long.

    Attributes:
        repetitions: number of fits of each method.
        methods: names in `METHODS`.
        targets: names in `cancer.REFERENCE`.
        steps: training steps of every flow but "DDNF"; NAF takes an eighth of them.
        own_steps: steps of each round of "DDNF"; the default is that of `fit_posterior`.
        samples: draws of each of four MCMC chains.
        draws: draws of every fit, for its means and quantiles.
    """

    repetitions: int
    methods: tuple[str, ...]
    targets: tuple[str, ...] = ("table2", "textbook")
    steps: int = 4000
    own_steps: int = 2500
    samples: int = 1000
    draws: int = 100_000


def _mcmc(key: PRNGKeyArray, target: Target, config: Config) -> NUTS:
    return nuts(key, target.log_density, target.dim, samples=config.samples)


def _ours(key: PRNGKeyArray, target: Target, config: Config) -> Posterior:
    return fit_posterior(key, target, steps=config.own_steps, exact="never", progress=False)


def _flow(
    model: str,
    key: PRNGKeyArray,
    target: Target,
    config: Config,
    *,
    layers: int = 8,
    end: End | None = "full",
    fewer: int = 1,
) -> Posterior:
    # No tempering: a flat target makes flows that start far away diverge.
    settings = Settings(steps=config.steps // fewer, end=end, temper=0.0)
    build = partial(make, model, dim=target.dim, layers=layers, settings=settings)
    return fit_flow(key, target, model, build, settings=settings, progress=False)


def _advi(key: PRNGKeyArray, target: Target, config: Config, *, full_rank: bool) -> ADVI:
    return advi(key, target.log_density, target.dim, full_rank=full_rank)


METHODS: Mapping[str, Callable[[PRNGKeyArray, Target, Config], NUTS | ADVI | Posterior]] = {
    MCMC: _mcmc,
    OURS: _ours,
    NARROW: partial(_flow, "ddnf"),
    PLANAR: partial(_flow, "planar", end=None),
    SCALED: partial(_flow, "planar-affine", end=None),
    ENDED: partial(_flow, "planar"),
    # Its steps are slow, and it needs few of them.
    NAF: partial(_flow, "naf", layers=2, fewer=8),
    HOUSEHOLDER: partial(_flow, "householder"),
    "Sylvester": partial(_flow, "sylvester"),
    MEAN_FIELD: partial(_advi, full_rank=False),
    FULL_RANK: partial(_advi, full_rank=True),
}
PROFILES: dict[Profile, Config] = {
    "smoke": Config(1, (MCMC, OURS, PLANAR), ("table2",), steps=300, own_steps=800, samples=500, draws=20_000),
    "quick": Config(2, (MCMC, OURS, PLANAR, SCALED, NAF, MEAN_FIELD), ("table2",), steps=2000),
    "full": Config(10, tuple(METHODS)),
}


def parts(config: Config, seed: int):
    """One part per target and method with all its repetitions, and one per target for quadrature."""
    work: dict[str, Callable[[], dict[str, Any]]] = {}
    for target in config.targets:
        work[f"{target}, {QUADRATURE}"] = partial(_truth, target)
        for method in config.methods:
            work[f"{target}, {method}"] = partial(_part, config, seed, target, method)
    return work


def _part(config: Config, seed: int, name: str, method: str) -> dict[str, Any]:
    target, plane = Target(getattr(cancer, name), 2), of_cancer(name)
    runs, first = [], {}
    for repetition in range(config.repetitions):
        run, sketch = _repetition(jr.fold_in(jr.key(seed), repetition), target, plane, method, config)
        runs.append(run)
        first = first or sketch
    return dict(target=name, method=method, runs=runs, **first)


def _repetition(key, target: Target, plane: Plane, method: str, config: Config) -> tuple[dict, dict]:
    """The figures of one fit, and data for its picture."""
    fit_key, draw_key = jr.split(key)
    start = time.perf_counter()
    with warnings.catch_warnings():
        # The figures show the quality of the fit.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            fit = METHODS[method](fit_key, target, config)
        except LostFitError:
            return dict(seconds=time.perf_counter() - start, lost=True), {}
        seconds = time.perf_counter() - start
        if isinstance(fit, NUTS):
            found, draws, sketch = _measure_chains(fit)
        else:
            # The inverse of NAF is a root search, too slow for quadrature.
            found, draws, sketch = _measure_flow(draw_key, fit, target, plane, config, by_draws=method == NAF)
    return dict(seconds=seconds) | found | figures(draws), sketch | histograms(draws, plane.shown)


def _measure_chains(run: NUTS) -> tuple[dict[str, Any], np.ndarray, dict[str, Any]]:
    found = dict(r_hat=float(run.r_hat.max()), effective=float(run.ess.min()), divergences=run.divergences)
    return found, run.draws, dict(draws=plain(run.draws[:: max(1, len(run.draws) // 1000)], 4))


def _measure_flow(key, fit: ADVI | Posterior, target, plane, config, *, by_draws: bool):
    """What is known of a fitted density, its draws, and its picture; KL by quadrature, or from the draws alone."""
    verdict = diagnose(key, fit.flow, target)
    z, log_q = draw(fit.flow, key, config.draws)
    draws = np.asarray(z)
    if by_draws:
        kl, image = float(jnp.mean(log_q - evaluate(plane.log_density, z))), _histogram(draws, plane)
    else:
        kl, _, image = closeness(fit.flow, plane, draws, np.asarray(log_q))
    found = dict(elbo=verdict.elbo, khat=verdict.khat, kl=kl)
    if isinstance(fit, Posterior) and verdict.khat < KHAT:
        m, precision = weighted_means(*fit.importance_sample(key, config.draws, weighted=True))
        found |= dict(weighted_m=m, weighted_L=precision)
    return found, draws, dict(image=image)


def _histogram(draws: Float[np.ndarray, "n 2"], plane: Plane) -> np.ndarray:
    """A coarse image of the density, from its draws."""
    left, right, bottom, top = plane.shown
    counts = np.histogram2d(draws[:, 1], draws[:, 0], PIXELS // 2, ((bottom, top), (left, right)))[0]
    return shades(counts)


def figures(draws: Float[np.ndarray, "n 2"]) -> dict[str, float]:
    """Means, deviations and quantiles of m and L from draws of (logit m, log L).

    Example:
        >>> found = figures(np.log([[1.0, 100.0], [3.0, 200.0], [1.0, 600.0]]))
        >>> round(found["m"], 4), round(found["L"]), round(found["median"])
        (0.5833, 300, 200)
    """
    draws = np.asarray(draws, float)
    (logit_m, log_L), (logit_m_sd, log_L_sd) = draws.mean(axis=0), draws.std(axis=0)
    with np.errstate(over="ignore"):
        low, median, high = np.exp(np.quantile(draws[:, 1], [0.05, 0.5, 0.95]))
        mean = np.exp(draws[:, 1]).mean()
    found = dict(m=expit(draws[:, 0]).mean(), L=mean, logit_m=logit_m, logit_m_sd=logit_m_sd, log_L=log_L)
    found |= dict(log_L_sd=log_L_sd, low=low, median=median, high=high)
    return {name: float(value) for name, value in found.items()}


def weighted_means(draws: Float[Any, "n 2"], weights: Float[Any, " n"]) -> tuple[float, float]:
    """E[m] and E[L] from draws of (logit m, log L) with weights of sum 1.

    Example:
        >>> m, precision = weighted_means(np.log([[1.0, 100.0], [3.0, 200.0]]), np.array([0.2, 0.8]))
        >>> round(m, 3), round(precision)
        (0.7, 180)
    """
    draws, weights = np.asarray(draws, float), np.asarray(weights, float)
    return float(weights @ expit(draws[:, 0])), float(weights @ np.exp(draws[:, 1]))


def histograms(draws: Float[np.ndarray, "n 2"], shown) -> dict[str, np.ndarray]:
    """Histogram densities of logit m and log L in equal bins over the extent shown.

    Example:
        >>> found = histograms(np.zeros((5, 2)), (-1.0, 2.0, -1.0, 5.0))
        >>> [round(float(found[name].max()), 2) for name in ("logit_m_density", "log_L_density")]
        [20.0, 10.0]
    """
    density = {}
    for name, column, bounds in zip(("logit_m", "log_L"), draws.T, (shown[:2], shown[2:]), strict=True):
        counts, edges = np.histogram(column, BINS, bounds)
        density[f"{name}_density"] = counts / len(column) / np.diff(edges)
    return density


def _truth(name: str) -> dict[str, Any]:
    """The reference for all methods, by the midpoint rule in double precision."""
    plane = of_cancer(name)
    with jax.enable_x64(True):
        axes = _axes(cancer.REFERENCE[name])
        log_p = evaluate(plane.log_density, jnp.asarray(lattice(*axes)))
        mass = np.exp(np.asarray(log_p)).reshape(len(axes[1]), -1)
        image = plane.image(plane.log_density, PIXELS)
    logit_m, log_L = (mass.sum(axis=axis) / mass.sum() for axis in (0, 1))
    run = _moments(axes, logit_m, log_L) | dict(L=float(log_L @ np.exp(axes[1])) if name == "table2" else None)
    across, up = (axis[1] - axis[0] for axis in axes)
    return dict(
        target=name,
        method=QUADRATURE,
        runs=[run],
        shown=list(plane.shown),
        image=shades(image),
        logit_m_curve=_within(plane.shown[:2], axes[0], logit_m / across),
        log_L_curve=_within(plane.shown[2:], axes[1], log_L / up),
    )


def _moments(axes, logit_m, log_L) -> dict[str, float]:
    means = logit_m @ axes[0], log_L @ axes[1]
    deviations = np.sqrt(logit_m @ (axes[0] - means[0]) ** 2), np.sqrt(log_L @ (axes[1] - means[1]) ** 2)
    cumulated, fine = CubicSpline(axes[1], log_L).antiderivative(), np.linspace(axes[1][0], axes[1][-1], 20_001)
    low, median, high = np.exp(np.interp([0.05, 0.5, 0.95], cumulated(fine) / cumulated(fine[-1]), fine))
    found = dict(m=logit_m @ expit(axes[0]), logit_m=means[0], logit_m_sd=deviations[0], log_L=means[1])
    found |= dict(log_L_sd=deviations[1], low=low, median=median, high=high)
    return {name: float(value) for name, value in found.items()}


def _axes(known: Mapping[str, Any], count: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Midpoints; far up along logit m, whose tail has little mass but contributes 0.2 % of E[m]."""
    mean, deviation = np.array(known["mean"]), np.array(known["deviation"])
    low, high = mean - [8, 12] * deviation, mean + [40, 16] * deviation
    logit_m, log_L = midpoints(low.tolist(), high.tolist(), count).T
    return logit_m, log_L


def _within(bounds, axis: np.ndarray, values: np.ndarray) -> np.ndarray:
    inside = (axis > bounds[0]) & (axis < bounds[1])
    return np.stack([axis[inside], values[inside]])


EXPERIMENT = Experiment("posterior", "Posterior of cancer rates", ABOUT, PROFILES, parts, tables, pictures, claims)
