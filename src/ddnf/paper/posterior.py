"""The cancer posterior (the paper's Fig. skwP, Appendix B and Table 2): what each method makes of it, and the truth."""

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from flowjax.distributions import StandardNormal, Transformed
from jaxtyping import Float, PRNGKeyArray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.interpolate import CubicSpline
from scipy.special import expit

from ddnf import compare, plot
from ddnf.baselines.numpyro import ADVI, NUTS, advi, nuts
from ddnf.inference import judge
from ddnf.inference.posterior import Posterior, fit_posterior
from ddnf.inference.reverse_kl import End
from ddnf.inference.target import Target
from ddnf.paper.experiment import Experiment, Picture, Profile, Record, Table
from ddnf.paper.posterior_claims import (
    ENDED,
    FULL_RANK,
    HOUSEHOLDER,
    MCMC,
    MEAN_FIELD,
    NAF,
    NARROW,
    OURS,
    PAPER,
    PLANAR,
    QUADRATURE,
    SCALED,
    claims,
    of_target,
    spread,
    values,
)
from ddnf.plane import Plane, of_cancer
from ddnf.record import plain
from ddnf.targets import cancer

ABOUT = """The mortality m and precision L of a beta-binomial model of stomach cancer in 20 cities, over (logit m, log
L). The paper's Table 2 was made with the density "table2": prior times likelihood, without the Jacobian of the change
of variables. With it, in "textbook", the mean of L does not exist. Both are fitted by every method, again and again
from other random numbers; quadrature gives the truth. "DDNF" is what ddnf.fit_posterior does without being told
anything; beside it stand K = 8 blocks of T = 8 cells with the paper's two layers of two units. Planar flows start from
the standard normal, as in the paper; all other flows get the search for modes and the affine end that ours has. NAF, K
= 2, gets an eighth of the steps. The target is not tempered: with tempering one planar fit of five was lost far away,
which was seen before it was left out. In table2, L has a mean but no variance: means of L converge slowly, in MCMC
too."""

BINS, PIXELS = 60, 80


@dataclasses.dataclass(frozen=True)
class Config:
    """Which methods are run on which targets, and how long.

    Attributes:
        repetitions: of each method.
        methods: names in `METHODS`.
        targets: names in `cancer.REFERENCE`.
        steps: training steps of every flow but "DDNF"; NAF takes an eighth of them.
        own_steps: those of each round of "DDNF", by default as many as those of `fit_posterior`.
        samples: of each of four chains of MCMC.
        draws: of every fit, for its means and quantiles.
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
    return fit_posterior(key, target, steps=config.own_steps, progress=False)


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
    # Without warming up: a flat target sends some flows that start far from it farther, and they do not come back.
    settings = compare.Settings(steps=config.steps // fewer, end=end, temper=0.0)
    build = partial(compare.make, model, dim=target.dim, layers=layers, settings=settings)
    return compare.fit(key, target, model, build, settings=settings, progress=False)


def _advi(key: PRNGKeyArray, target: Target, config: Config, *, full_rank: bool) -> ADVI:
    return advi(key, target.log_density, target.dim, full_rank=full_rank)


METHODS: Mapping[str, Callable[[PRNGKeyArray, Target, Config], NUTS | ADVI | Posterior]] = {
    MCMC: _mcmc,
    OURS: _ours,
    NARROW: partial(_flow, "ddnf"),
    PLANAR: partial(_flow, "planar", end=None),
    SCALED: partial(_flow, "planar-affine", end=None),
    ENDED: partial(_flow, "planar"),
    # Its steps take long, and it needs few of them.
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
    """One part for each target and method with all its repetitions, and one for the truth of each target."""
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
    """The figures of one fit, and what a picture of it needs."""
    fit_key, draw_key = jr.split(key)
    with warnings.catch_warnings():
        # What a fit complains of shows in its figures.
        warnings.simplefilter("ignore", RuntimeWarning)
        start = time.perf_counter()
        try:
            fit = METHODS[method](fit_key, target, config)
        except judge.LostFitError:
            return dict(seconds=time.perf_counter() - start, lost=True), {}
        found: dict[str, Any] = dict(seconds=time.perf_counter() - start)
        if isinstance(fit, NUTS):
            found |= dict(r_hat=float(fit.r_hat.max()), effective=float(fit.ess.min()), divergences=fit.divergences)
            draws, sketch = fit.draws, dict(draws=plain(fit.draws[:: max(1, len(fit.draws) // 1000)], 4))
        else:
            verdict = judge.judge(draw_key, fit.flow, target)
            z, log_q = judge.draw(fit.flow, draw_key, config.draws)
            draws = np.asarray(z)
            kl, image = float(jnp.mean(log_q - judge.log_density(plane.log_density, z))), _counted(draws, plane)
            if method != NAF:  # whose inverse is a search for roots, too slow for that many points
                by_quadrature, mass, image = _on_plane(fit.flow, plane)
                # Quadrature does not see a q that has left the plane; its draws do.
                kl = by_quadrature if mass > 0.99 else kl
            found |= dict(elbo=verdict.elbo, khat=verdict.khat, kl=kl)
            sketch = dict(image=image)
        if isinstance(fit, Posterior) and found["khat"] < judge.KHAT:
            m, precision = weighted_means(*fit.importance_sample(draw_key, config.draws, weighted=True))
            found |= dict(weighted_m=m, weighted_L=precision)
    return found | figures(draws), sketch | histograms(draws, plane.shown)


def _on_plane(flow: AbstractBijection, plane: Plane) -> tuple[float, float, np.ndarray]:
    """KL(q|p), the mass of q, and q for a picture; in double precision, as far tails want it."""
    points, log_p, area = _cells(plane)
    pixels = _lattice(*(np.linspace(plane.shown[i], plane.shown[i + 1], PIXELS) for i in (0, 2)))
    with jax.enable_x64(True):
        flow = jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf, flow)
        # Compiled once for all repetitions, as the flow is an argument.
        both = jnp.asarray(np.concatenate([points, pixels]))
        log_q = np.asarray(judge.log_prob(Transformed(StandardNormal(flow.shape), flow), both))
    log_q, log_pixels = log_q[: len(points)], log_q[len(points) :]
    q = np.exp(log_q)
    kl = np.sum(np.where(q > 0, q * (log_q - log_p), 0.0)) * area
    return float(kl), float(q.sum() * area), _shades(np.exp(log_pixels).reshape(PIXELS, PIXELS))


@lru_cache
def _cells(plane: Plane, count: int = 200) -> tuple[np.ndarray, np.ndarray, float]:
    """Midpoints of a grid over the plane, the target there, and the area of a cell."""
    low, high = np.array(plane.low), np.array(plane.high)
    axes = low + (high - low) * (np.arange(count)[:, None] + 0.5) / count
    points = _lattice(*axes.T)
    with jax.enable_x64(True):
        log_p = np.asarray(judge.log_density(plane.log_density, jnp.asarray(points)))
    return points, log_p, float(np.prod((high - low) / count))


def _lattice(across: np.ndarray, up: np.ndarray) -> Float[np.ndarray, "n 2"]:
    return np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)


def _counted(draws: Float[np.ndarray, "n 2"], plane: Plane) -> np.ndarray:
    """A coarse picture of the density, from its draws."""
    left, right, bottom, top = plane.shown
    counts = np.histogram2d(draws[:, 1], draws[:, 0], PIXELS // 2, ((bottom, top), (left, right)))[0]
    return _shades(counts)


def _shades(image: np.ndarray) -> np.ndarray:
    return np.round(255 * image / max(image.max(), 1e-300)).astype(int)


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
    """Densities of logit m and log L, counted in equal bins over what is shown.

    Example:
        >>> counted = histograms(np.zeros((5, 2)), (-1.0, 2.0, -1.0, 5.0))
        >>> [round(float(counted[name].max()), 2) for name in ("logit_m_density", "log_L_density")]
        [20.0, 10.0]
    """
    density = {}
    for name, column, bounds in zip(("logit_m", "log_L"), draws.T, (shown[:2], shown[2:]), strict=True):
        counts, edges = np.histogram(column, BINS, bounds)
        density[f"{name}_density"] = counts / len(column) / np.diff(edges)
    return density


def _truth(name: str) -> dict[str, Any]:
    """All that the methods are measured by, from the midpoint rule on the plane, in double precision."""
    plane = of_cancer(name)
    with jax.enable_x64(True):
        axes = _axes(cancer.REFERENCE[name])
        log_p = judge.log_density(plane.log_density, jnp.asarray(_lattice(*axes)))
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
        image=_shades(image),
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
    """Midpoints; far up along logit m, whose tail has little mass, but makes 0.2 % of E[m]."""
    mean, deviation = np.array(known["mean"]), np.array(known["deviation"])
    low, high = mean - [8, 12] * deviation, mean + [40, 16] * deviation
    logit_m, log_L = (low + (high - low) * (np.arange(count)[:, None] + 0.5) / count).T
    return logit_m, log_L


def _within(bounds, axis: np.ndarray, values: np.ndarray) -> np.ndarray:
    inside = (axis > bounds[0]) & (axis < bounds[1])
    return np.stack([axis[inside], values[inside]])


def _median(part: Mapping[str, Any], name: str, form: str = ".3g") -> str:
    """Median and largest of the repetitions; empty for a figure that there is not."""
    every = values(part, name)
    found = every[~np.isnan(every)]
    if len(found) == 0:
        return ""
    return f"{np.median(found):{form}}" + (f" ({found.max():{form}})" if len(every) > 1 else "")


def tables(record: Record) -> list[Table]:
    """Table 2 with ours beside it, the moments and quantiles, and how close and how fast each method is."""
    times = f"Mean ± deviation over {record['config']['repetitions']} repetitions"
    shown = []
    for target in record["config"]["targets"]:
        found = of_target(record, target)
        shown += [_table2(found, times)] if target == "table2" else []
        shown += [_quantiles(target, found, times), _closeness(target, found)]
    return shown


def _table2(found: Mapping[str, dict], times: str) -> Table:
    header = ("method", "m, millionths", "paper", "weighted", "L", "paper", "weighted")
    rows = []
    for method, part in found.items():
        row = [method]
        for name, form, scale in (("m", ".1f", 1e6), ("L", ".1f", 1.0)):
            paper = "{} ± {}".format(*PAPER[method][name]) if method in PAPER else ""
            row += [spread(part, name, form, scale), paper, spread(part, f"weighted_{name}", form, scale)]
        rows.append(tuple(row))
    return Table(
        f"Table 2, on table2: posterior means. {times}; weighted: by importance weights, where k-hat allows it.",
        header,
        rows,
    )


def _quantiles(target: str, found: Mapping[str, dict], times: str) -> Table:
    header = ("method", "E[m], millionths", "E[logit m]", "deviation", "E[log L]", "deviation")
    rows = []
    for method, part in found.items():
        moments = (spread(part, name) for name in ("logit_m", "logit_m_sd", "log_L", "log_L_sd"))
        quantiles = (spread(part, name, ".0f") for name in ("median", "low", "high"))
        rows.append((method, spread(part, "m", ".1f", 1e6), *moments, *quantiles))
    return Table(f"Moments and quantiles on {target}. {times}.", (*header, "median of L", "5 %", "95 %"), rows)


def _closeness(target: str, found: Mapping[str, dict]) -> Table:
    header = ("method", "KL(q|p)", "ELBO", "k-hat", "R-hat", "first fit, s", "later fits, s")
    rows = []
    for method, part in found.items():
        if method == QUADRATURE:
            continue
        seconds = values(part, "seconds")
        later = f"{np.median(seconds[1:]):.1f}" if len(seconds) > 1 else ""
        closeness = _median(part, "kl"), spread(part, "elbo", ".3f"), _median(part, "khat"), _median(part, "r_hat")
        rows.append((method, *closeness, f"{seconds[0]:.1f}", later))
    caption = f"How close on {target}: medians (and the largest), ELBO mean ± deviation. The first fit compiles."
    lost = {method: sum(run.get("lost", False) for run in part["runs"]) for method, part in found.items()}
    caption += "".join(f" Lost far away: {count} of {method}." for method, count in lost.items() if count)
    return Table(f"{caption} log Z is {cancer.REFERENCE[target]['log_z']:.3f}.", header, rows)


def pictures(record: Record) -> list[Picture]:
    """Joint densities and marginals of each target."""
    drawn = []
    for target in record["config"]["targets"]:
        found = {method: part for method, part in of_target(record, target).items() if {"image", "draws"} & set(part)}
        drawn += [_joint(target, found), _marginals(target, found)]
    return drawn


def _joint(target: str, found: Mapping[str, dict]) -> Picture:
    shown = found[QUADRATURE]["shown"]
    panels = {method: partial(_panel, part=part, shown=shown) for method, part in found.items()}
    return Picture(
        f"joint-{target}",
        plot.gallery(panels),
        f"Joint density of logit m (across) and log L (up) on {target}, with KL(q|p): first repetition.",
        f"A panel for each method: its joint density of logit m and log L, beside that of {target}.",
    )


def _panel(axes: Axes, part: Mapping[str, Any], shown: list[float]) -> None:
    if "draws" in part:
        plot.scatter(axes, np.array(part["draws"]), extent=shown)
    else:
        plot.image(axes, np.array(part["image"]), extent=shown)
    kl = part["runs"][0].get("kl")
    axes.set_xlabel("" if kl is None else f"KL {kl:.2g}", fontsize=8)


def _marginals(target: str, found: Mapping[str, dict]) -> Picture:
    truth, shown = found[QUADRATURE], found[QUADRATURE]["shown"]
    methods = {method: part for method, part in found.items() if method != QUADRATURE}
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    labels = dict(logit_m=("logit m", shown[:2]), log_L=("log L", shown[2:]))
    for axes, (name, (label, bounds)) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        edges = np.linspace(bounds[0], bounds[1], BINS + 1)
        lines = {method: (edges, np.array(part[f"{name}_density"])) for method, part in methods.items()}
        plot.marginals(axes, lines, truth=np.array(truth[f"{name}_curve"]), x=label)
    figure.axes[1].legend(fontsize=7, frameon=False)
    return Picture(
        f"marginals-{target}",
        figure,
        f"Marginals of logit m and log L on {target}: quadrature (grey), and the draws of each method, first "
        "repetition.",
        "Two plots of densities: a grey area for the truth, and a line for each method.",
    )


EXPERIMENT = Experiment("posterior", "Posterior of cancer rates", ABOUT, PROFILES, parts, tables, pictures, claims)
