"""The start of a default fit: regression on conditions, splines on columns, whitening, and a mixture as the base."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from flowjax.bijections import AbstractBijection, Chain, Invert
from jaxtyping import Float

from ddnf.density.likelihood import Model, moments
from ddnf.density.mixture import Components, Mixture, fit_mixture, with_freedom
from ddnf.density.regression import Regression, fit_regression, residuals
from ddnf.density.splines import ColumnSplines, fit_splines, map_rows
from ddnf.density.whitening import Whitening

LADDER = (2, 4, 8, 16, 32, 64)  # numbers of components to try, besides one
PRIORS = (0.3, 0.1, 0.03, 0.01, 0.003)  # scales of the prior to try, besides 1
FREEDOMS = (30.0, 8.0, 3.0)  # degrees of freedom to try, besides Gaussians
_BONUS = 1.0  # of tails, in the log density of all held-out rows together
_FEWEST_ROWS = 10  # per component
_LARGEST = 500_000  # entries of all precision matrices
MOST_ROWS = 200_000  # of a larger table, so many rows are enough for quantiles, covariances and mixtures
_CLIP = 10.0  # standard deviations; values farther out do not count for covariances


class Choice(NamedTuple):
    """A candidate: whether splines start from quantiles; components, their degrees of freedom, scale of their prior."""

    has_quantiles: bool
    components: int
    freedom: float
    prior: float


class Start(NamedTuple):
    """A model before training.

    Attributes:
        model: the best candidate.
        log_prob: log density of the held-out rows under each candidate.
        choice: which candidate it is.
    """

    model: Model
    log_prob: Float[np.ndarray, "candidates n"]
    choice: Choice | None


def start(
    rng: np.random.Generator,
    flow: AbstractBijection,
    rows: Float[np.ndarray, "n dim"],
    held_out: Float[np.ndarray, "m dim"],
    *,
    given: tuple[np.ndarray, np.ndarray] | None = None,
    components: int | None = None,
) -> Start:
    """The best of some cheap models on held-out rows, with a flow between the whitened rows and the mixture.

    Columns go through splines that start as the identity, or from the quantiles of the training rows; with a condition,
    after a linear regression of the columns, or of the columns and their deviations, or none. All are tried with few
    Gaussians, and with weaker priors of their covariances; with the best, more of them are tried as long as held-out
    rows get likelier, and then components with heavier tails.

    Args:
        rng: random numbers.
        flow: a bijection close to the identity.
        rows, held_out: standardized, column by column, and in random order.
        given: standardized conditions of both.
        components: number of components; None to choose it.
    """
    rows, given = rows[:MOST_ROWS], None if given is None else (given[0][:MOST_ROWS], given[1])
    limit = min(len(rows) / _FEWEST_ROWS, _LARGEST / rows.shape[1] ** 2)
    sizes = [1, *(k for k in LADDER if k <= limit)] if components is None else [components]
    spaces = [space for regression in _regressions(rows, given) for space in _spaces(regression, rows, held_out, given)]
    tried = [candidate for space in spaces for size in sizes[:3] for candidate in space.candidates(rng, size)]
    best = max(tried, key=_value)
    for size in sizes[3:]:
        found = list(best[0].candidates(rng, size))
        tried += found
        if _value(max(found, key=_value)) < _value(best):
            break
        best = max(found, key=_value)
    size = len(best[1].weights)
    if size > max(sizes[:3]):  # few components preferred this space: do many?
        tried += [found for space in spaces if space is not best[0] for found in space.candidates(rng, size)]
        best = max(tried, key=_value)
    # Gaussians could lose infinitely much on a far row, and a few held-out rows have none: tails have a bonus.
    bonus = _BONUS / len(held_out)
    for freedom in FREEDOMS:
        candidate = best[0].with_freedom(best[1], freedom)
        tried.append(candidate)
        if _value(candidate) + bonus < _value(best):
            break
        best, bonus = candidate, 0.0
    choice = Choice(best[0] in spaces[1::2], len(best[1].weights), best[1].freedom, best[1].prior)
    return Start(best[0].model(flow, best[1]), np.stack([log_prob for *_, log_prob in tried]), choice)


def start_again(
    rng: np.random.Generator, flow: AbstractBijection, rows: Float[np.ndarray, "n dim"], choice: Choice
) -> Model:
    """The model of a choice, from other rows."""
    space = _spaces(None, rows, rows[:1], None)[int(choice.has_quantiles)]
    mixture = fit_mixture(rng, space.rows, choice.components, prior=choice.prior)
    return space.model(flow, with_freedom(mixture, space.rows, choice.freedom))


def _regressions(rows, given) -> list[Regression | None]:
    if given is None:
        return [None]
    return [None, *(fit_regression(rows, given[0], has_scale=has_scale) for has_scale in (False, True))]


def _spaces(regression, rows, held_out, given) -> tuple["_Space", "_Space"]:
    """Spaces with splines that are the identity, and with those from quantiles."""
    log_det = np.zeros(len(held_out))
    if regression is not None:
        rows = residuals(regression, rows, given[0])[0]
        held_out, log_det = residuals(regression, held_out, given[1])
    fitted = fit_splines(rows)
    identity = ColumnSplines(rows.shape[1], 8, fitted.heavy)
    return _Space(regression, identity, rows, held_out, log_det), _Space(regression, fitted, rows, held_out, log_det)


class _Space:
    """Rows after regression, splines and whitening."""

    def __init__(self, regression, splines, rows, held_out, log_det):
        mapped, _ = map_rows(splines, rows)
        judged, more = map_rows(splines, held_out)
        self.regression, self.splines = regression, splines
        self.mean, scale = moments(np.clip(mapped, -_CLIP, _CLIP))
        self.whiten = np.linalg.inv(scale)
        whitened = (mapped - self.mean) @ self.whiten.T
        self.rows = whitened[(np.abs(whitened) < 3 * _CLIP).all(axis=1)]
        self.held_out = (judged - self.mean) @ self.whiten.T
        self.log_det = log_det + more + np.sum(np.log(np.diag(self.whiten)))

    def candidates(self, rng, size) -> Iterable["_Candidate"]:
        """Mixtures of one size, with weaker priors as long as held-out rows get likelier by two standard errors.

        A few held-out rows would often prefer components that are too narrow.
        """
        best = self._judged(fit_mixture(rng, self.rows, size))
        yield best
        for prior in PRIORS if size > 1 else ():
            found = self._judged(fit_mixture(rng, self.rows, size, prior=prior))
            gain = found[2] - best[2]
            if not gain.mean() > 2 * gain.std() / np.sqrt(len(gain)):
                break
            yield (best := found)

    def with_freedom(self, mixture, freedom) -> "_Candidate":
        return self._judged(with_freedom(mixture, self.rows, freedom))

    def _judged(self, mixture) -> "_Candidate":
        return self, mixture, mixture.log_prob(self.held_out) + self.log_det

    def model(self, flow, mixture) -> Model:
        # The whitening is stored as the map in the direction of training: a product, and no solve.
        whitening = Whitening(-self.whiten @ self.mean, self.whiten)
        regression = [] if self.regression is None else [Invert(self.regression)]
        return Model(Chain([flow, Invert(whitening), Invert(self.splines), *regression]), Mixture(*mixture[:4]))


_Candidate = tuple[_Space, Components, np.ndarray]


def _value(candidate: _Candidate) -> float:
    return float(np.mean(candidate[2]))
