"""Posteriors with so many rows that they are Gaussian, and need no subsample, flow or chains.

The Gaussian at the mode is evaluated on all rows at its own draws. If the weights of these draws are nearly equal,
chains from them would not change their moments. The remaining checks are for other modes, tails and wrong gradients.
"""

import time
from typing import NamedTuple

import numpy as np
from flowjax.bijections import Chain

from ddnf.flow.parts import as_exact
from ddnf.posterior.chains import Drift
from ddnf.posterior.diagnosis import Sample, diagnose_sample
from ddnf.posterior.evaluate import clean
from ddnf.posterior.gaussian import reweighted
from ddnf.posterior.issues import Evidence, find_issues, gradient_error, random_starts
from ddnf.posterior.log import Log, Row
from ddnf.posterior.modes import Gaussian, Search, with_more_modes
from ddnf.posterior.objective import whitening
from ddnf.posterior.proper import tail_index
from ddnf.posterior.result import Posterior
from ddnf.posterior.state import Settings
from ddnf.posterior.subsample import Expansion

# Draws of a first test whether more draws are worth their passes over all rows, and the effective share to pass it.
_FIRST = 64
_PROMISING = 0.98
_DRAWS, _LAST = 1000, 400
# A Gaussian that is off by d standard deviations has the effective share exp(-d^2). Above this share, the shift is less
# than the 0.05 standard deviations that chains would report.
_EQUAL = 0.9975
# Rows times draws of a round. Beyond this, a fit with a subsample is faster.
_MOST = 2 * 10**8
_NO_DRIFT = 0.0, 0.0, 0.0, 0.0, 1.0


class Searched(NamedTuple):
    """The search for modes of a subsample, and what it has found."""

    search: Search
    modes: list[Gaussian]


def near_gaussian(
    rng: np.random.Generator, settings: Settings, at: Expansion, found: Searched, passes: int, seconds: float
) -> Posterior | None:
    """The Gaussian posterior of a target with many rows; None where it is not nearly one, or a check objects.

    Args:
        rng: random numbers.
        settings: what the fit was asked for.
        at: the log density of all rows to second order around its mode.
        found: the modes of a subsample.
        passes, seconds: cost of the expansion.
    """
    target, began, dim = settings.target, time.perf_counter(), settings.target.dim
    rows = target.rows
    assert rows is not None
    is_free = settings.flow is None and settings.regularizer is None and settings.exact != "always"
    if not is_free or settings.end != "full" or rows.count * _DRAWS > _MOST or 10 * dim > _DRAWS:
        return None
    mean, scale, spent = at.point, at.scale, 0
    for count in (_FIRST, _DRAWS, _LAST):
        sample = _weighed(rng, target, mean, scale, count)
        diagnosis, spent = diagnose_sample(sample), spent + count
        if count != _FIRST and diagnosis.is_accurate and diagnosis.ess > _EQUAL:
            break
        if diagnosis.ess < _PROMISING:
            return None
        moments = reweighted(sample, mean, scale) if count == _DRAWS else (mean, scale)
        if moments is None:
            return None
        mean, scale = moments
    else:
        return None
    key, few = settings.check_key, found.search.target
    if len(with_more_modes(key, found.search, found.modes, random_starts(key, few))) > 1:
        return None
    tails, error = tail_index(key, few), gradient_error(key, few, found.search, sample)
    if find_issues(Evidence(diagnosis, Drift(*_NO_DRIFT, sample.z[:0], 0), (), 0.0, None, error, tails)):
        return None
    whiten, d, none = whitening(mean, scale, "full"), diagnosis, np.zeros(0)
    figures = d.elbo, d.elbo_error, d.log_evidence, d.khat, d.ess
    last = Row("all rows", time.perf_counter() - began, spent, d.elbo, d.khat, d.ess, "return")
    log = Log([Row("expand", seconds, passes, decision="nearly Gaussian"), last])
    flow, error = as_exact(whiten.merge(Chain([whiten.end()]))), d.log_evidence_error
    return Posterior(flow, target, *figures, (), none, none, log=log, stage="base", log_evidence_error=error)


def _weighed(rng, target, mean, scale, count: int) -> Sample:
    """Draws of a Gaussian, and their weights by all rows."""
    x = rng.normal(size=(count, len(mean)))
    z = mean + x @ scale.T
    log_q = -np.sum(x**2, axis=1) / 2 - len(mean) / 2 * np.log(2 * np.pi) - np.sum(np.log(np.diag(scale)))
    return Sample(z, log_q, clean(target.programs.values(z) - log_q))
