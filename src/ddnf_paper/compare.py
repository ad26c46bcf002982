"""Ours and the baselines on one target or one table, through the same fit; every number with the exact log-determinant."""

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import paramax
from flowjax.bijections import AbstractBijection, Invert
from jax.scipy.stats import norm
from jaxtyping import Float, PRNGKeyArray

from ddnf import flows
from ddnf.density.fit import fit_density
from ddnf.flow.bijection import DDNF
from ddnf.flow.certificate import certify
from ddnf.posterior import diagnosis as judge
from ddnf.posterior.fit import Posterior, fit_posterior
from ddnf.posterior.modes import Search
from ddnf.posterior.objective import End
from ddnf.posterior.target import Target
from ddnf_paper.plane import Plane, closeness
from ddnf_paper.record import plain


class Own(NamedTuple):
    """A flow of ours: its name in tables, its hidden units, and the learning rate that it trained best with."""

    title: str
    hidden: tuple[int, ...]
    learning_rate: float


OURS: Mapping[str, Own] = {
    "ddnf": Own("DDNF, the paper's (2, 2) units", (2, 2), 2e-2),
    "ddnf-wide": Own("DDNF, (16, 16) units", (16, 16), 1e-2),
}
# Not bijections of K layers: NumPyro's own inference.
WITHOUT_LAYERS: Mapping[str, str] = {"advi": "ADVI", "advi-full": "ADVI, full rank", "nuts": "NUTS"}
FLOWS: Mapping[str, str] = {name: own.title for name, own in OURS.items()} | {
    name: baseline.title for name, baseline in flows.BASELINES.items()
}
MODELS: Mapping[str, str] = FLOWS | WITHOUT_LAYERS
# From a key to a flow.
Build = Callable[[PRNGKeyArray], AbstractBijection]
# Draws that are kept for pictures.
_DRAWN = 1000


@dataclasses.dataclass(frozen=True)
class Settings:
    """How every model of a comparison is fitted.

    Attributes:
        steps: training steps.
        batch: draws (or rows) for each step.
        learning_rate: of Adam, at its height; None for the one that each model trains best with.
        temper: share of the steps in which a target is warmed up.
        end: affine map after the flow and a search for modes before, as in `fit_posterior`; None for the flow alone.
        size: width of the baselines, as in `flows.make`; None for each one's own default.
        cells: T, the cells of each block of DDNF.
        starts: so many fits from different starts, of which the one with the best ELBO counts.

    Baselines that are slow by their nature get less: see `affordable`.
    """

    steps: int = 4000
    batch: int = 256
    learning_rate: float | None = None
    temper: float = 0.2
    end: End | None = None
    size: int | None = None
    cells: int = 8
    starts: int = 3


def make(
    name: str, key: PRNGKeyArray, dim: int, *, layers: int, condition_dim: int | None = None, settings: Settings
) -> AbstractBijection:
    """Any flow of the comparison by its name in `FLOWS`, from noise to points.

    Example:
        >>> import jax.random as jr
        >>> make("ddnf", jr.key(0), 2, layers=3, settings=Settings(cells=4)).blocks
        3
    """
    if name not in FLOWS:
        raise ValueError(f"Expected one of {', '.join(FLOWS)}; got {name!r}.")
    if name in OURS:
        hidden = OURS[name].hidden
        return DDNF(key, dim, blocks=layers, steps=settings.cells, hidden=hidden, condition_dim=condition_dim)
    return flows.make(name, key, dim, layers, condition_dim, settings.size)


def with_layers(models: Sequence[str]) -> tuple[list[str], list[str]]:
    """The models for which K means something, and the others.

    Example:
        >>> with_layers(["planar", "nuts", "ddnf"])
        (['planar', 'ddnf'], ['nuts'])
    """
    layered = [name for name in models if name in OURS or (name in FLOWS and flows.BASELINES[name].has_layers)]
    return layered, [name for name in models if name not in layered]


def affordable(name: str, settings: Settings) -> Settings:
    """The settings for one flow: one that is slow to draw from gets one start, and a continuous one half of the steps.

    Example:
        >>> affordable("cnf", Settings(steps=4000, starts=3)).steps
        2000
    """
    if is_quick(name):
        return settings
    steps = -(-settings.steps // 2) if is_continuous(name) else settings.steps
    return dataclasses.replace(settings, starts=1, steps=steps)


def on_target(
    key: PRNGKeyArray,
    target: Target,
    name: str,
    *,
    layers: int = 2,
    settings: Settings | None = None,
    plane: Plane | None = None,
    build: Build | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Fits one model to a target and says how close it came, as plain JSON values.

    Args:
        key: random key.
        target: what to fit.
        name: of a model in `MODELS`.
        layers: K, of the flows.
        settings: of the fit.
        plane: the normalized target in the plane, for KL(q|p) by quadrature.
        build: another flow of this kind than `make` gives.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> target = ddnf.Target(lambda z: -jnp.sum(z**2) / 2, 2)
        >>> row = on_target(jr.key(0), target, "planar", settings=Settings(steps=200), progress=False)
        >>> row["parameters"], row["ess"] > 0.5
        (10, True)
    """
    settings = Settings() if settings is None else settings
    if name not in MODELS:
        raise ValueError(f"Expected one of {', '.join(MODELS)}; got {name!r}.")
    with warnings.catch_warnings():
        # What a fit complains of is in its row.
        warnings.simplefilter("ignore", RuntimeWarning)
        if name == "nuts":
            return _nuts(key, target, progress)
        if name in WITHOUT_LAYERS:
            return _advi(key, target, plane, is_full=name == "advi-full", progress=progress)
        build = partial(make, name, dim=target.dim, layers=layers, settings=settings) if build is None else build
        settings = dataclasses.replace(settings, learning_rate=rate_of(name, settings, layers))
        return _flow(key, target, name, build, settings, plane, progress)


def on_table(
    key: PRNGKeyArray,
    train: Float[np.ndarray, "n dim"],
    test: Float[np.ndarray, "m dim"],
    name: str,
    *,
    layers: int = 2,
    settings: Settings | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Fits one flow to rows by maximum likelihood and gives the exact log-likelihood of others, as plain JSON values.

    Example:
        >>> import jax.random as jr, numpy as np
        >>> rows = np.random.default_rng(0).normal(size=(300, 2))
        >>> row = on_table(jr.key(0), rows[:200], rows[200:], "maf", settings=Settings(steps=100), progress=False)
        >>> -4 < row["log_likelihood"] < -2
        True
    """
    settings = Settings() if settings is None else settings
    flow_key, fit_key = jr.split(key)
    flow = make(name, flow_key, train.shape[1], layers=layers, settings=settings)
    # Likelihoods train from points to noise: that is to be the fast direction.
    is_forward_fast = name in OURS or flows.BASELINES[name].is_forward_fast
    flow = Invert(flow) if is_forward_fast else flow
    rate = rate_of(name, settings, layers)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        density = fit_density(
            fit_key,
            train,
            flow=flow,
            steps=settings.steps,
            batch=settings.batch,
            learning_rate=rate,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    log_p = np.asarray(density.log_prob(test))
    return dict(
        log_likelihood=float(log_p.mean()),
        log_likelihood_error=float(log_p.std() / np.sqrt(len(log_p))),
        parameters=count(density.flow),
        complaints=list(density.issues),
        learning_rate=rate,
        steps=settings.steps,
        draws=plain(density.sample(key, _DRAWN), 4),
        **_times(seconds, density.seconds, max(100, min(1000, len(train) // settings.batch))),
    )


def count(flow: AbstractBijection) -> int:
    """The number of trained parameters.

    Example:
        >>> import jax.random as jr
        >>> count(DDNF(jr.key(0), 2, blocks=8, hidden=(2, 2)))
        144
    """
    trained = eqx.filter(flow, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable))
    return sum(leaf.size for leaf in jax.tree.leaves(trained))


def fit(
    key: PRNGKeyArray, target: Target, name: str, build: Build, *, settings: Settings, progress: bool = True
) -> Posterior:
    """One fit of a flow of the kind `name`, made by `build`, from one start."""
    flow_key, fit_key = jr.split(key)
    return fit_posterior(
        fit_key,
        target,
        flow=flows.for_training(build(flow_key)),
        steps=settings.steps,
        batch=settings.batch,
        learning_rate=rate_of(name, settings),
        rounds=1,
        end=settings.end,
        gradient=None if is_quick(name) else "total",
        temper=settings.temper,
        progress=progress,
    )


def _flow(key, target, name, build, settings, plane, progress):
    settings = affordable(name, settings)
    start = time.perf_counter()
    keys = [jr.fold_in(key, number) for number in range(settings.starts)]
    fits = [_fit_or_none(key, target, name, build, settings, progress) for key in keys]
    seconds = (time.perf_counter() - start) / len(fits)
    kept = [posterior for posterior in fits if posterior is not None]
    known = dict(
        parameters=count(build(key)),
        learning_rate=rate_of(name, settings),
        steps=settings.steps,
        elbos=[None if posterior is None else posterior.elbo for posterior in fits],
    )
    if not kept:
        return known | dict(fit_seconds=seconds, complaints=["Every start was lost where the target has no density."])
    best = max(kept, key=lambda posterior: posterior.elbo)
    flow = flows.for_evaluation(best.flow)
    return dict(
        **known,
        **_times(seconds, best.seconds, 100),
        **_judged(key, flow, target, plane)[0],
        **_determinants(key, flow),
        complaints=list(best.complaints),
        losses=plain(best.losses),
    )


def _fit_or_none(key, target, name, build, settings, progress) -> Posterior | None:
    try:
        return fit(key, target, name, build, settings=settings, progress=progress)
    except judge.LostFitError:
        return None


def _advi(key, target, plane, *, is_full, progress):
    from ddnf_paper.references import advi

    start = time.perf_counter()
    fit = advi(key, target.log_density, target.dim, full_rank=is_full, progress=progress)
    seconds = time.perf_counter() - start
    losses = np.asarray(fit.losses, float).reshape(-1, 100).mean(axis=1)
    found, verdict = _judged(key, fit.flow, target, plane)
    complaints = judge.complaints(key, fit.flow, target, verdict, losses, Search(target))
    figures = dict(parameters=count(fit.flow), fit_seconds=seconds)
    return figures | found | dict(complaints=list(complaints), losses=plain(losses))


def _nuts(key, target, progress):
    from ddnf_paper.references import nuts

    start = time.perf_counter()
    run = nuts(key, target.log_density, target.dim, progress=progress)
    seconds = time.perf_counter() - start
    return dict(
        fit_seconds=seconds,
        mean=run.draws.mean(axis=0).tolist(),
        deviation=run.draws.std(axis=0).tolist(),
        r_hat=float(run.r_hat.max()),
        effective_draws=float(run.ess.min()),
        divergences=run.divergences,
        draws=plain(run.draws[:: max(1, len(run.draws) // _DRAWN)], 4),
    )


def _judged(key, flow, target, plane) -> tuple[dict[str, Any], judge.Verdict]:
    verdict = judge.judge(key, flow, target)
    draws, log_q = (np.asarray(array, float) for array in judge.draw(flow, key, 20_000))
    found = dict(zip(("elbo", "elbo_error", "log_evidence", "khat", "ess"), verdict, strict=False))
    found |= dict(mean=draws.mean(axis=0).tolist(), deviation=draws.std(axis=0).tolist())
    if plane is None:
        found["draws"] = plain(draws[:_DRAWN], 4)
    else:
        found |= plain(closeness(flow, plane, draws, log_q)._asdict())
    return found, verdict


def _determinants(key, flow) -> dict[str, Any]:
    """The smallest on draws: of the whole map, and, for ours, of a cell, with what that says."""
    # The noise that `judge.draw` makes of this key.
    x = jr.normal(key, (20_000, *flow.shape))
    log_det = norm.logpdf(x).sum(axis=1) - judge.draw(flow, key, len(x))[1]
    found: dict[str, Any] = dict(determinant=float(jnp.exp(jnp.min(log_det))))
    if isinstance(flow, DDNF):
        certificate = certify(flow, x)
        found |= dict(cell_determinant=certificate.min_determinant, verdict=certificate.verdict)
    return found


def is_quick(name: str) -> bool:
    """Whether draws, and the Jacobian that path gradients want, are cheap: no adaptive solver, no sequential map."""
    return name in OURS or (flows.BASELINES[name].is_forward_fast and not is_continuous(name))


def is_continuous(name: str) -> bool:
    """Whether a model solves a differential equation adaptively, which takes long."""
    return name.startswith("cnf")


def rate_of(name: str, settings: Settings, layers: int = 1) -> float:
    """The learning rate of a flow with so many layers: that of the settings, or the flow's own."""
    if settings.learning_rate is not None:
        return settings.learning_rate
    if name in OURS:
        return OURS[name].learning_rate
    baseline = flows.BASELINES[name]
    return baseline.learning_rate * (2 / max(2, layers) if baseline.rate_falls else 1)


def _times(seconds: float, stretches: np.ndarray, length: int) -> dict[str, float]:
    later = stretches[1:] if len(stretches) > 1 else stretches
    return dict(fit_seconds=seconds, step_ms=float(1000 * np.nanmedian(later) / length))


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> str:
    """Rows as a table of text; `columns` gives the header and format of each key, and what a row lacks is left empty.

    Example:
        >>> rows = [dict(model="planar", kl=0.25), dict(model="NUTS")]
        >>> print(table(rows, dict(model=("model", ""), kl=("KL", ".3f"))))
        | model  | KL    |
        | ------ | ----- |
        | planar | 0.250 |
        | NUTS   |       |
    """
    cells = [[header for header, _ in columns.values()]]
    for row in rows:
        found = [(row.get(key), form) for key, (_, form) in columns.items()]
        cells.append(["" if value is None else format(value, form) for value, form in found])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
