"""Fits one model to a target or to data and measures it; every number comes from the exact log-determinant."""

import dataclasses
import time
import warnings
from functools import partial
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import Invert
from jax.scipy.stats import norm
from jaxtyping import Float, PRNGKeyArray

from ddnf import DDNF, Posterior, Target, certify, fit_density, fit_posterior
from ddnf.flows import for_evaluation, for_training
from ddnf.posterior import Diagnosis, LostFitError, diagnose, draw, find_issues, gather_evidence
from ddnf_paper.models import (
    MODELS,
    NUMPYRO,
    Build,
    Settings,
    count_parameters,
    is_fast,
    is_forward_fast,
    learning_rate_for,
    make,
    settings_for,
)
from ddnf_paper.plane import Plane, closeness
from ddnf_paper.record import plain

# Draws that are recorded for pictures.
_RECORDED = 1000
# Draws for moments, determinants and KL.
_EVALUATED = 20_000


def run_on_target(
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
    """Fits one model to a target and measures how close it is, as JSON values.

    Args:
        key: random key.
        target: what to fit.
        name: of a model in `MODELS`.
        layers: K, of the flows.
        settings: of the fit.
        plane: the normalized target in the plane, for KL(q|p) by quadrature.
        build: builds a flow other than the default one of this name.
        progress: whether to show progress bars.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> target = ddnf.Target(lambda z: -jnp.sum(z**2) / 2, 2)
        >>> row = run_on_target(jr.key(0), target, "planar", settings=Settings(steps=200), progress=False)
        >>> row["parameters"], row["ess"] > 0.5
        (10, True)
    """
    settings = Settings() if settings is None else settings
    if name not in MODELS:
        raise ValueError(f"Expected one of {', '.join(MODELS)}; got {name!r}.")
    with warnings.catch_warnings():
        # The issues of a fit are in its row.
        warnings.simplefilter("ignore", RuntimeWarning)
        if name == "nuts":
            return _run_nuts(key, target, progress)
        if name in NUMPYRO:
            return _run_advi(key, target, plane, full_rank=name == "advi-full", progress=progress)
        build = partial(make, name, dim=target.dim, layers=layers, settings=settings) if build is None else build
        settings = dataclasses.replace(settings, learning_rate=learning_rate_for(name, settings, layers))
        return _run_flow(key, target, name, build, settings, plane, progress)


def run_on_data(
    key: PRNGKeyArray,
    train: Float[np.ndarray, "n dim"],
    test: Float[np.ndarray, "m dim"],
    name: str,
    *,
    layers: int = 2,
    settings: Settings | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Fits one flow to rows by maximum likelihood and gives the exact log-likelihood of others, as JSON values.

    Example:
        >>> import jax.random as jr, numpy as np
        >>> rows = np.random.default_rng(0).normal(size=(300, 2))
        >>> row = run_on_data(jr.key(0), rows[:200], rows[200:], "maf", settings=Settings(steps=100), progress=False)
        >>> -4 < row["log_likelihood"] < -2
        True
    """
    settings = Settings() if settings is None else settings
    flow_key, fit_key = jr.split(key)
    flow = make(name, flow_key, train.shape[1], layers=layers, settings=settings)
    # Maximum likelihood maps points to noise: that must be the fast direction.
    flow = Invert(flow) if is_forward_fast(name) else flow
    rate = learning_rate_for(name, settings, layers)
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
        parameters=count_parameters(density.flow),
        issues=list(density.issues),
        learning_rate=rate,
        steps=settings.steps,
        draws=plain(density.sample(key, _RECORDED), 4),
        **_times(seconds, density.seconds, max(100, min(1000, len(train) // settings.batch))),
    )


def fit_flow(
    key: PRNGKeyArray, target: Target, name: str, build: Build, *, settings: Settings, progress: bool = True
) -> Posterior:
    """One fit of a flow of the kind `name`, made by `build`, from one initial flow."""
    flow_key, fit_key = jr.split(key)
    return fit_posterior(
        fit_key,
        target,
        flow=for_training(build(flow_key)),
        steps=settings.steps,
        batch=settings.batch,
        learning_rate=learning_rate_for(name, settings),
        rounds=1,
        exact="never",
        end=settings.end,
        gradient=None if is_fast(name) else "total",
        temper=settings.temper,
        progress=progress,
    )


def _run_flow(key, target, name, build, settings, plane, progress):
    settings = settings_for(name, settings)
    start = time.perf_counter()
    keys = [jr.fold_in(key, number) for number in range(settings.starts)]
    fits = [_fit_or_none(key, target, name, build, settings, progress) for key in keys]
    seconds = (time.perf_counter() - start) / len(fits)
    kept = [posterior for posterior in fits if posterior is not None]
    row = dict(
        parameters=count_parameters(build(key)),
        learning_rate=learning_rate_for(name, settings),
        steps=settings.steps,
        elbos=[None if posterior is None else posterior.elbo for posterior in fits],
    )
    if not kept:
        return row | dict(fit_seconds=seconds, issues=["Every start was lost where the target has no density."])
    best = max(kept, key=lambda posterior: posterior.elbo)
    flow = for_evaluation(best.flow)
    return dict(
        **row,
        **_times(seconds, best.seconds, 100),
        **_measure(key, flow, target, plane)[0],
        **_determinants(key, flow),
        issues=list(best.issues),
        losses=plain(best.losses),
    )


def _fit_or_none(key, target, name, build, settings, progress) -> Posterior | None:
    try:
        return fit_flow(key, target, name, build, settings=settings, progress=progress)
    except LostFitError:
        return None


def _run_advi(key, target, plane, *, full_rank, progress):
    from ddnf_paper.references import advi

    start = time.perf_counter()
    fit = advi(key, target.log_density, target.dim, full_rank=full_rank, progress=progress)
    seconds = time.perf_counter() - start
    losses = np.asarray(fit.losses, float).reshape(-1, 100).mean(axis=1)
    measured, _ = _measure(key, fit.flow, target, plane)
    issues = find_issues(gather_evidence(key, fit.flow, target, losses))
    row = dict(parameters=count_parameters(fit.flow), fit_seconds=seconds)
    return row | measured | dict(issues=list(issues), losses=plain(losses))


def _run_nuts(key, target, progress):
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
        draws=plain(run.draws[:: max(1, len(run.draws) // _RECORDED)], 4),
    )


def _measure(key, flow, target, plane) -> tuple[dict[str, Any], Diagnosis]:
    verdict = diagnose(key, flow, target)
    draws, log_q = (np.asarray(array, float) for array in draw(flow, key, _EVALUATED))
    row = dict(zip(("elbo", "elbo_error", "log_evidence", "khat", "ess"), verdict, strict=False))
    row |= dict(mean=draws.mean(axis=0).tolist(), deviation=draws.std(axis=0).tolist())
    if plane is None:
        row["draws"] = plain(draws[:_RECORDED], 4)
    else:
        row |= plain(closeness(flow, plane, draws, log_q)._asdict())
    return row, verdict


def _determinants(key, flow) -> dict[str, Any]:
    """The smallest determinant on draws, of the map and of a cell of a DDNF, and the verdict of its certificate."""
    # The noise that `draw` makes from this key.
    x = jr.normal(key, (_EVALUATED, *flow.shape))
    log_det = norm.logpdf(x).sum(axis=1) - draw(flow, key, len(x))[1]
    row: dict[str, Any] = dict(determinant=float(jnp.exp(jnp.min(log_det))))
    if isinstance(flow, DDNF):
        certificate = certify(flow, x)
        row |= dict(cell_determinant=certificate.min_determinant, verdict=certificate.verdict)
    return row


def _times(seconds: float, chunk_seconds: np.ndarray, steps_per_chunk: int) -> dict[str, float]:
    # The first chunk compiles.
    later = chunk_seconds[1:] if len(chunk_seconds) > 1 else chunk_seconds
    return dict(fit_seconds=seconds, step_ms=float(1000 * np.nanmedian(later) / steps_per_chunk))
