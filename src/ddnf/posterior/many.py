"""Posteriors of many data sets of the same shape: fitted together, and checked one by one.

Mode searches, importance weights, training and chains are one compiled call for a group of data sets (`ensemble.py`).
A fit that fails a check is repeated on its own with `fit_posterior`.
"""

import time
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from flowjax.bijections import AbstractBijection, Chain
from jaxtyping import Array, Float, PRNGKeyArray
from tqdm.auto import tqdm

from ddnf.flow.folds import folded_share
from ddnf.flow.parts import as_exact
from ddnf.flow.random import generator, normal_log_prob
from ddnf.posterior.defaults import default_flow, default_learning_rate
from ddnf.posterior.diagnosis import EVALUATED, KHAT, QUICKLY, Diagnosis, Sample, diagnose_sample
from ddnf.posterior.drifts import drifts_of
from ddnf.posterior.ensemble import Ensemble
from ddnf.posterior.evaluate import LostFitError, clean, draw_in_parts
from ddnf.posterior.fit import fit_posterior
from ddnf.posterior.gaussian import reweighted
from ddnf.posterior.issues import MISSED, SAME, Evidence, find_issues, gradient_error, probe_points
from ddnf.posterior.log import Log, Row
from ddnf.posterior.modes import LARGEST_FULL, Search
from ddnf.posterior.objective import ReverseKL, Whitening, whitening
from ddnf.posterior.programs import Density
from ddnf.posterior.proper import tail_index
from ddnf.posterior.regions import Normal, missed_mass
from ddnf.posterior.result import Posterior
from ddnf.posterior.state import Exact
from ddnf.posterior.target import Target
from ddnf.system.checks import check_count, check_key
from ddnf.training import loop

# Data sets that share one compiled call.
_GROUP = 32
_REFINEMENTS = 3
# Starts of climbs that look for modes that a fit lacks: random ones, points far from the fit, points of large weight.
_STARTS = 12
_HEAVIEST = 6
_SPREAD = 1.0, 3.0, 10.0, 30.0
# A second mode matters if its evidence is at most this many nats below that of the best mode.
_MATTERS = 7.0


class _Fit(NamedTuple):
    """The fit of one data set: its flow, the Gaussian at its mode, draws with their weights, and what they say."""

    stage: str
    flow: AbstractBijection
    mode: Normal
    sample: Sample
    diagnosis: Diagnosis


def fit_posteriors(
    key: PRNGKeyArray,
    targets: Sequence[Target],
    *,
    steps: int = 600,
    batch: int = 32,
    learning_rate: float | None = None,
    searches: int = 4,
    exact: Exact = "auto",
    progress: bool = True,
) -> list[Posterior]:
    """Fits many posteriors at once: one model for many data sets of the same shape.

    Use it for simulation-based calibration, leave-one-out, or one model per group. Each step of the fits is one
    compiled call for many data sets. A Gaussian is tried first, then a flow. As in `fit_posterior`, importance weights
    of 10,000 draws, the drift of short MCMC chains, further searches for modes and the tails are checked for each fit.
    A fit that fails a check, or has several modes, is repeated on its own with `fit_posterior`.

    Args:
        key: random key.
        targets: targets of the same form: the same model, with data as arrays of the same shapes.
        steps: training steps of the flows.
        batch: draws per step and fit.
        learning_rate: peak learning rate of Adam; None for the default of `fit_posterior`.
        searches: number of random starts of each search for modes.
        exact: passed to `fit_posterior` for repeated fits; "always" fits every data set on its own.
        progress: whether to show a progress bar.

    Warns about the issues of each fit, with the number of the fit.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> from functools import partial
        >>> def log_density(y, z):
        ...     return -jnp.sum((y - z) ** 2) / 2 - z[0] ** 2 / 2
        >>> tables = jr.normal(jr.key(0), (5, 10))
        >>> targets = [ddnf.Target(partial(log_density, y), 1) for y in tables]
        >>> posteriors = ddnf.fit_posteriors(jr.key(1), targets, progress=False)
        >>> all(posterior.khat < 0.7 for posterior in posteriors)
        True
    """
    targets = list(targets)
    _check(key, targets, learning_rate)
    check_count(steps=steps, batch=batch, searches=searches)
    rate = default_learning_rate(targets[0].dim) if learning_rate is None else learning_rate
    found: list[Posterior | None] = [None] * len(targets)
    with tqdm(total=len(targets), desc="posteriors", disable=not progress) as bar:
        if exact != "always" and targets[0].dim <= LARGEST_FULL:
            together = _Together(key, targets, steps, batch, rate, searches)
            for numbers in together.groups():
                for number, posterior in zip(numbers, together.fit(numbers), strict=True):
                    found[number] = posterior
                    bar.update(posterior is not None)
        for number, target in enumerate(targets):
            if found[number] is None:
                options = dict(batch=batch, learning_rate=learning_rate, searches=searches, exact=exact)
                found[number] = _alone(jr.fold_in(key, number), target, number, options)
                bar.update()
    return [posterior for posterior in found if posterior is not None]


def _alone(key, target: Target, number: int, options: dict[str, Any]) -> Posterior:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        posterior = fit_posterior(key, target, progress=False, **options)
    for issue in posterior.issues:
        warnings.warn(f"Posterior {number}: {issue}", RuntimeWarning, stacklevel=3)
    return posterior


class _Together:
    """What the fits of all groups share."""

    def __init__(self, key, targets: list[Target], steps: int, batch: int, rate: float, searches: int):
        self.key, self.targets = key, targets
        self.steps, self.batch, self.rate, self.searches = steps, batch, rate, searches
        self.ensemble, self.dim = Ensemble(targets), targets[0].dim
        self.gradient_error: float | None = None

    def groups(self) -> list[list[int]]:
        count = len(self.targets)
        return [list(range(first, min(first + _GROUP, count))) for first in range(0, count, _GROUP)]

    def fit(self, numbers: list[int]) -> list[Posterior | None]:
        """The fits of a group; None for those that must be repeated on their own."""
        began, count = time.perf_counter(), len(numbers)
        numbers = np.resize(numbers, min(_GROUP, len(self.targets))).tolist()
        group, rng = self.ensemble.group(np.array(numbers)), generator(jr.fold_in(self.key, numbers[0]))
        modes = self._modes(group, numbers)
        fits = self._gaussians(rng, group, modes)
        if any(mode is not None and not fit.diagnosis.is_good for mode, fit in zip(modes, fits, strict=True)):
            fits = self._flows(group, numbers, fits)
        evidence = self._evidence(rng, group, numbers, fits)
        seconds = (time.perf_counter() - began) / count
        posteriors = []
        for number, mode, fit, found in zip(numbers[:count], modes, fits, evidence, strict=False):
            is_good = mode is not None and found.diagnosis.is_accurate and not find_issues(found)
            posteriors.append(self._posterior(number, fit, found, seconds) if is_good else None)
        return posteriors

    def _modes(self, group: Density, numbers) -> list[Normal | None]:
        """The Gaussian of the curvature at the mode of each; None where there are several modes, or none."""
        starts = np.stack([self._starts(number, self.searches) for number in numbers])
        climbed, found = self.ensemble.climb(group, starts), []
        for z, scale, mass in zip(climbed.z, climbed.scale, climbed.log_mass, strict=True):
            best = int(np.argmax(mass))
            normal = Normal(z[best], scale[best])
            others = z[mass > mass[best] - _MATTERS]
            apart = _distances(others, normal) > 4 * (self.dim + 3 * np.sqrt(2 * self.dim))
            found.append(normal if np.isfinite(mass[best]) and not apart.any() else None)
        return found

    def _starts(self, number: int, count: int) -> np.ndarray:
        key = jr.fold_in(self.key, number)
        return np.stack([self.targets[number].start(jr.fold_in(key, start)) for start in range(count)])

    def _gaussians(self, rng, group: Density, modes) -> list[_Fit]:
        """Gaussians at the modes, moved by importance weights as long as that makes them better."""
        standard = Normal(np.zeros(self.dim), np.eye(self.dim))
        normals = at_modes = [standard if mode is None else mode for mode in modes]
        best: list[_Fit | None] = [None] * len(modes)
        fits: list[_Fit] = []
        for _ in range(1 + _REFINEMENTS):
            x = rng.normal(size=(len(normals), QUICKLY, self.dim))
            z = np.stack([normal.mean + draws @ normal.scale.T for draws, normal in zip(x, normals, strict=True)])
            log_p, log_x = self.ensemble.values(group, z), np.asarray(normal_log_prob(jnp.asarray(x)), float)
            for i, normal in enumerate(normals):
                log_q = log_x[i] - np.sum(np.log(np.diag(normal.scale)))
                sample = Sample(z[i], log_q, _clean(log_p[i] - log_q))
                diagnosis, known = diagnose_sample(sample), best[i]
                if known is None or diagnosis.ess > known.diagnosis.ess:
                    whiten = whitening(normal.mean, normal.scale, "full")
                    flow = as_exact(whiten.merge(Chain([whiten.end()])))
                    best[i] = _Fit("base", flow, at_modes[i], sample, diagnosis)
            fits = [fit for fit in best if fit is not None]
            if all(fit.diagnosis.is_good or mode is None for fit, mode in zip(fits, modes, strict=True)):
                break
            normals = [_moved(fit) for fit in fits]
        return fits

    def _flows(self, group: Density, numbers, fits: list[_Fit]) -> list[_Fit]:
        """Replaces Gaussians that are not good enough by flows that start from them, trained in one program."""
        whiten = [_whitening(fit) for fit in fits]
        key = jr.fold_in(self.key, len(self.targets) + numbers[0])
        flow = Chain([default_flow(jr.fold_in(key, 0), self.dim), whiten[0].end()])
        stacked = jax.tree.map(lambda a: jnp.stack([a] * len(fits)) if eqx.is_array(a) else a, flow)
        loss = _SumOfLosses(group, jax.tree.map(lambda *leaves: jnp.stack(leaves), *whiten), self.batch)
        optimizer = loop.adam(self.rate, self.steps)
        result = loop.fit(
            key,
            stacked,
            loss,
            steps=self.steps,
            optimizer=_for_each(optimizer),
            progress=False,
            warn=False,
        )
        trained = jax.tree.map(lambda a: np.asarray(a) if eqx.is_array(a) else a, result.parameters)
        flows = [fit.flow for fit in fits]
        for i, fit in enumerate(fits):
            if not fit.diagnosis.is_good:
                one = jax.tree.map(lambda a, i=i: jnp.asarray(a[i]) if isinstance(a, np.ndarray) else a, trained)
                flows[i] = as_exact(whiten[i].merge(one))
        samples = self._samples(group, jr.fold_in(key, 1), flows, QUICKLY)
        found = []
        for fit, flow, sample in zip(fits, flows, samples, strict=True):
            new = _Fit("flow 1", flow, fit.mode, sample, diagnose_sample(sample))
            found.append(new if new.diagnosis.ess > fit.diagnosis.ess and not fit.diagnosis.is_good else fit)
        return found

    def _samples(self, group: Density, key, flows, count: int) -> list[Sample]:
        """Draws of each fit, and their weights."""
        parts = [draw_in_parts(flow, jr.fold_in(key, number), count) for number, flow in enumerate(flows)]
        z, log_q = (np.stack([np.asarray(part[k], float) for part in parts]) for k in range(2))
        pieces = [self.ensemble.values(group, z[:, k : k + QUICKLY]) for k in range(0, count, QUICKLY)]
        weights = np.concatenate(pieces, axis=1) - log_q
        return [Sample(a, b, _clean(w)) for a, b, w in zip(z, log_q, weights, strict=True)]

    def _evidence(self, rng, group: Density, numbers, fits: list[_Fit]) -> list[Evidence]:
        """The checks of each fit."""
        key = jr.fold_in(self.key, 2 * len(self.targets) + numbers[0])
        samples = self._samples(group, key, [fit.flow for fit in fits], EVALUATED)
        drifts, missed = drifts_of(key, group, samples), self._missed(rng, group, numbers, fits, samples)
        if self.gradient_error is None:
            target = self.targets[numbers[0]]
            self.gradient_error = gradient_error(key, target, Search(target), samples[0])
        found = []
        for number, fit, sample, drift, lacking in zip(numbers, fits, samples, drifts, missed, strict=True):
            folded = 0.0 if fit.stage == "base" else folded_share(fit.flow, probe_points(key, self.dim))
            tails = tail_index(jr.fold_in(self.key, number), self.targets[number])
            diagnosis = diagnose_sample(sample)
            found.append(Evidence(diagnosis, drift, lacking, folded, None, self.gradient_error, tails))
        return found

    def _missed(self, rng, group: Density, numbers, fits, samples):
        """Mass at modes that further climbs reach, and a fit lacks."""
        starts = []
        for number, sample in zip(numbers, samples, strict=True):
            spread = np.repeat(_SPREAD, _STARTS // len(_SPREAD))[:, None]
            far = sample.z.mean(axis=0) + sample.z.std(axis=0) * spread * rng.normal(size=(_STARTS, self.dim))
            heaviest = sample.z[np.argsort(-sample.log_weights)[:_HEAVIEST]]
            starts.append(np.concatenate([self._starts(number, self.searches + _STARTS)[-_STARTS:], far, heaviest]))
        climbed, found = self.ensemble.climb(group, np.stack(starts)), []
        for i, (fit, sample) in enumerate(zip(fits, samples, strict=True)):
            known, normals = [fit.mode], []
            for z, scale, is_mode in zip(climbed.z[i], climbed.scale[i], climbed.is_mode[i], strict=True):
                if is_mode and all(_distances(z[None], one)[0] > SAME for one in known):
                    known.append(Normal(z, scale))
                    normals.append(known[-1])
            missed = missed_mass(self.key, self.targets[numbers[i]], sample, normals) if normals else ()
            found.append(tuple(one for one in missed if one.least > MISSED))
        return found

    def _posterior(self, number: int, fit: _Fit, found: Evidence, seconds: float) -> Posterior:
        d, none = found.diagnosis, np.zeros(0)
        steps = self.steps * self.batch if fit.stage != "base" else 0
        log = Log([Row(fit.stage, seconds, steps, d.elbo, d.khat, d.ess, "return")])
        figures = d.elbo, d.elbo_error, d.log_evidence, d.khat, d.ess
        target, error = self.targets[number], d.log_evidence_error
        return Posterior(fit.flow, target, *figures, (), none, none, log=log, stage=fit.stage, log_evidence_error=error)


class _SumOfLosses(eqx.Module):
    """The losses of many fits, each with its own density, whitening and flow."""

    densities: Density
    whitenings: Whitening
    batch: int = eqx.field(static=True)

    def __call__(self, flows, draw: loop.Draw) -> Float[Array, ""]:
        def one(density, whiten, flow, key):
            loss = ReverseKL(density, whiten, None, self.batch, "path", 0, jnp.ones(()))
            return loss(flow, loop.Draw(key, draw.step, None))

        keys = jr.split(draw.key, len(self.whitenings.mean))
        return jnp.sum(eqx.filter_vmap(one)(self.densities, self.whitenings, flows, keys))


def _for_each(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer of many fits."""
    return optax.GradientTransformation(jax.vmap(optimizer.init), _each(optimizer.update))  # pyright: ignore[reportArgumentType]


@lru_cache
def _each(update):
    """The update of an optimizer for each of many fits."""
    return jax.vmap(lambda updates, state, parameters: update(updates, state, parameters))


def _clean(log_weights):
    """As `clean`; if the density is zero at all draws, one draw gets all weight, which fails every diagnosis."""
    try:
        return clean(log_weights)
    except LostFitError:
        return np.where(np.arange(len(log_weights)) == 0, 0.0, -np.inf)


def _moved(fit: _Fit) -> Normal:
    """The Gaussian of a fit, updated by its importance weights where these determine an update."""
    whiten = _whitening(fit)
    mean, scale = np.asarray(whiten.mean, float), np.asarray(whiten.scale, float)
    moments = reweighted(fit.sample, mean, scale) if fit.diagnosis.khat < KHAT and not fit.diagnosis.is_good else None
    return Normal(mean, scale) if moments is None else Normal(*moments)


def _whitening(fit: _Fit) -> Whitening:
    """Of a Gaussian."""
    end = fit.flow.bijections[-1]  # pyright: ignore[reportAttributeAccessIssue]
    return Whitening(end.loc, end.triangular)


def _distances(z, normal: Normal) -> np.ndarray:
    """Squared distances from the mean of a Gaussian, in its deviations."""
    return np.sum(np.linalg.solve(normal.scale, (z - normal.mean).T) ** 2, axis=0)


def _check(key, targets, learning_rate):
    check_key(key)
    if not targets or not all(isinstance(target, Target) for target in targets):
        raise ValueError("Expected a list of ddnf.Target (or from_numpyro, from_pymc), at least one.")
    if len({target.dim for target in targets}) > 1:
        raise ValueError(f"Expected targets of one dimension; got {sorted({target.dim for target in targets})}.")
    if learning_rate is not None and not learning_rate > 0:
        raise ValueError(f"Expected a positive learning_rate; got {learning_rate}.")
