"""Fits of targets with many rows: the fit uses a subsample, and is checked with all rows.

All rows give the mode and the curvature there, which correct the subsample to second order (`subsample.py`). The usual
stages follow. If all rows disagree with the subsample at draws of the result, the fit is repeated with more rows, and
finally with all rows.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.random as jr
import numpy as np
from jaxtyping import Float, PRNGKeyArray
from scipy import optimize

from ddnf.flow.random import generator
from ddnf.posterior.curvature import Derivatives
from ddnf.posterior.diagnosis import Diagnosis, Sample, diagnose_sample
from ddnf.posterior.evaluate import clean, draw_in_parts
from ddnf.posterior.gaussian import best_gaussian
from ddnf.posterior.log import Log, Row
from ddnf.posterior.modes import Gaussian, Search, gaussians
from ddnf.posterior.narrow import Searched, near_gaussian
from ddnf.posterior.proper import check_proper
from ddnf.posterior.result import Posterior
from ddnf.posterior.rows import Rows
from ddnf.posterior.state import Settings, State
from ddnf.posterior.subsample import NOISE, Expansion, rows_needed, some_rows, subsample
from ddnf.posterior.target import Target

# With fewer rows than this, a fit uses all of them.
SMALLEST = 20_000
# Minimum rows of a subsample, in total and per dimension.
_FEWEST = 2000, 50
# A subsample of more than this share of the rows is not worth its noise.
_SHARE = 0.3
_BYTES = 2**30
# Rows times draws of the judgement by all rows, and the range of its draws.
_JUDGED = 10**9
_DRAWS = 400, 1000


def is_tall(settings: Settings) -> bool:
    """Whether a fit starts with a subsample of the rows."""
    rows = settings.target.rows
    return rows is not None and rows.count >= SMALLEST and settings.end is not None


def fit_tall(
    settings: Settings, run: Callable[[Settings, tuple[Gaussian, ...]], State], conclude: Callable[[State], Posterior]
) -> Posterior:
    """The fit of a target with many rows; `run` runs the usual stages, `conclude` makes a posterior of its end."""
    target, began = settings.target, time.perf_counter()
    rows = target.rows
    assert rows is not None
    rng = generator(jr.fold_in(settings.search_key, 1))
    derivatives = Derivatives(target.programs)
    at, found = _expansion(rng, settings, derivatives)
    if at is None:
        return conclude(run(settings, ()))
    is_alone = len(found.modes) == 1
    seconds = time.perf_counter() - began
    if is_alone and (posterior := near_gaussian(rng, settings, at, found, derivatives.count, seconds)) is not None:
        return posterior
    count, _ = rows_needed(rng, target, at)
    count, most = _rounded(count, rows), _most(rows)
    log = [Row("expand", time.perf_counter() - began, derivatives.count, decision=_shown(min(count, most), rows))]
    while True:
        count = min(count, most)
        few = subsample(target, _chosen(rng, rows, count), at)
        folder = None if settings.checkpoint is None else f"{settings.checkpoint}/rows-{count}"
        modes = (_gaussian(rng, few, at),) if is_alone else ()
        posterior = conclude(run(dataclasses.replace(settings, target=few, checkpoint=folder), modes))
        log += [row._replace(gradients=-(-row.gradients * count // rows.count)) for row in posterior.log]
        began = time.perf_counter()
        judged = _judge(settings.check_key, posterior, target, few, at)
        is_last = judged.agrees or count == most
        count = count if is_last else _more(judged, count, rows)
        row = Row("all rows", time.perf_counter() - began, judged.draws, *judged.figures)
        log.append(row._replace(decision="return" if is_last else _shown(min(count, most), rows)))
        if is_last:
            return judged.posterior(posterior, target, Log(log), _issues(judged, count, rows))


@dataclasses.dataclass(frozen=True)
class _Judged:
    """A fit by all rows: draws of its flow, and what all rows change in draws of the subsample's posterior.

    Attributes:
        fit: of the flow, against all rows.
        change: of the subsample, against all rows.
        noise: deviation of the difference of the log densities.
        log_mean: logarithm of the mean of the ratio of the densities.
        draws: how often all rows were evaluated.
    """

    fit: Diagnosis
    change: Diagnosis
    noise: float
    log_mean: float
    draws: int

    @property
    def agrees(self) -> bool:
        return self.change.is_good or (self.noise < NOISE and self.change.finite == 1)

    @property
    def figures(self) -> tuple[float, float, float]:
        return self.fit.elbo, self.fit.khat, self.fit.ess

    def posterior(self, found: Posterior, target: Target, log: Log, issues: tuple[str, ...]) -> Posterior:
        """The posterior with the figures of all rows."""
        fit, is_plain = self.fit, found.chains is None
        return dataclasses.replace(
            found,
            target=target,
            elbo=fit.elbo,
            elbo_error=fit.elbo_error,
            log_evidence=fit.log_evidence if is_plain else found.log_evidence + self.log_mean,
            log_evidence_error=fit.log_evidence_error if is_plain else found.log_evidence_error,
            khat=fit.khat,
            ess=fit.ess,
            issues=(*found.issues, *issues),
            log=log,
        )


def _expansion(rng, settings: Settings, derivatives: Derivatives) -> tuple[Expansion | None, Searched]:
    """The log density of all rows to second order around its mode, and the modes that a subsample shows.

    None where the density does not curve downwards at the mode.
    """
    target, rows = settings.target, settings.target.rows
    assert rows is not None
    few = some_rows(target, _chosen(rng, rows, _rounded(0, rows)))
    check_proper(settings.search_key, few)
    search = Search(few)
    searched = Searched(search, gaussians(settings.search_key, few, search, settings.searches))
    point, scale = searched.modes[0].mode, searched.modes[0].scale
    for _ in range(3):
        point = _climb(derivatives, point, scale)
        value, gradient = derivatives.value_and_gradient(point)
        hessian = derivatives.hessian(point)
        scale = None if hessian is None else _root(-hessian)
        if hessian is None or scale is None or not np.isfinite(value):
            return None, searched
        if np.linalg.norm(scale.T @ gradient) < 1:
            return Expansion(point, value, gradient, hessian, scale), searched
    return None, searched


def _gaussian(rng, few: Target, at: Expansion) -> Gaussian:
    return Gaussian(*best_gaussian(rng, few.programs, at.point, at.scale), mode=at.point)


def _climb(derivatives: Derivatives, start, scale) -> Float[np.ndarray, " dim"]:
    """The mode by all rows, in coordinates in which the density is nearly standard."""

    def negative(u):
        value, gradient = derivatives.value_and_gradient(start + scale @ u)
        is_finite = np.isfinite(value) and np.isfinite(gradient).all()
        return (-value, -scale.T @ gradient) if is_finite else (1e25, np.zeros_like(u))

    options = dict(maxiter=100, maxfun=200, ftol=1e-12, gtol=1e-2)
    found = optimize.minimize(negative, np.zeros_like(start), jac=True, method="L-BFGS-B", options=options)
    return start + scale @ found.x


def _root(precision) -> Float[np.ndarray, "dim dim"] | None:
    """A triangular L with L L^T = precision^-1; None if the precision is not positive."""
    try:
        root = np.linalg.cholesky(np.linalg.inv(precision))
    except np.linalg.LinAlgError:
        return None
    return root if np.isfinite(root).all() and (np.linalg.eigvalsh(precision) > 0).all() else None


def _chosen(rng, rows: Rows, count: int):
    return np.arange(rows.count) if count == rows.count else rng.choice(rows.count, count, replace=False)


def _rounded(count: int, rows: Rows) -> int:
    """A number of rows to train with: at least as many as asked for, in a few sizes, so that programs are shared."""
    least, each = _FEWEST
    count = max(count, least, each * rows.dim, rows.least or 0)
    count = int(2 ** np.ceil(np.log2(count)))
    return count if count < _SHARE * rows.count else rows.count


def _most(rows: Rows) -> int:
    """As many rows as may be in memory at once."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(rows.slice(0, 1)))
    return int(min(rows.count, max(1, _BYTES // max(size, 1))))


def _more(judged: _Judged, count: int, rows: Rows) -> int:
    """The number of rows that should suffice, given that noise falls with the square root of their number."""
    factor = (judged.noise / NOISE) ** 2 if np.isfinite(judged.noise) else np.inf
    return _rounded(int(count * np.clip(factor, 4, 1e6)), rows)


def _judge(key: PRNGKeyArray, posterior: Posterior, target: Target, few: Target, at: Expansion) -> _Judged:
    rows = target.rows
    assert rows is not None
    n = int(np.clip(_JUDGED // rows.count, *_DRAWS))
    z, log_q = (
        np.asarray(a, float) for a in draw_in_parts(posterior.flow, key, n, base=posterior.base, mesh=target.mesh)
    )
    exact = target.programs.values(z)
    fit = diagnose_sample(Sample(z, log_q, clean(exact - log_q)))
    if posterior.chains is not None:
        z = np.asarray(posterior.sample_unconstrained(key, n), float)
        exact = target.programs.values(z)
    near = few.programs.values(z)
    with np.errstate(invalid="ignore"):
        change = clean(exact - near)
    known = change[np.isfinite(change)]
    log_mean = float(known.max() + np.log(np.mean(np.exp(known - known.max()))))
    noise = float(known.std()) if len(known) == n else np.inf
    total = n if posterior.chains is None else 2 * n
    return _Judged(fit, diagnose_sample(Sample(z, near, change)), noise, log_mean, total)


def _issues(judged: _Judged, count: int, rows: Rows) -> tuple[str, ...]:
    if judged.agrees or count == rows.count:
        return ()
    return (
        f"The fit used {count} of {rows.count} rows, as many as fit into memory. The log density of all rows differs "
        f"by {judged.noise:.2g} (standard deviation over draws), and moves means by up to "
        f"{judged.change.mean_shift:.2f} standard deviations. Reparameterize the model, or use importance_sample.",
    )


def _shown(count: int, rows: Rows) -> str:
    return f"{count} of {rows.count} rows"
