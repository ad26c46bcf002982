"""The start of a default fit: regression on conditions, splines on columns, whitening, and a mixture as the base."""

from collections.abc import Iterable, Sequence
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
_FEWEST_JUDGED, _MOST_FOLDS = 70, 10  # rows that evaluate candidates; with fewer held-out rows, there are several folds
_LARGEST = 500_000  # entries of all precision matrices
MOST_ROWS = 200_000  # rows that suffice for the quantiles, covariances and mixtures of a larger table
_CLIP = 10.0  # standard deviations; covariances ignore values farther out


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
        log_prob: log density of the held-out rows under each candidate, fitted without them.
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

    The column splines start as the identity or from the quantiles of the training rows. With a condition, they may
    follow a linear regression of the columns, or of the columns and their standard deviations. All combinations are
    tried with few Gaussians and with weaker priors of their covariances. For the best combination, more components are
    tried as long as the likelihood of held-out rows increases, and then components with heavier tails. With few
    held-out rows, candidates are evaluated by cross-validation.

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
    splits = [_candidate_splits(*split) for split in _folds(rows, held_out, given)]
    spaces = [_Space(several) for several in zip(*splits, strict=True)]
    tried = [candidate for space in spaces for size in sizes[:3] for candidate in space.candidates(rng, size)]
    best = max(tried, key=_value)
    for size in sizes[3:]:
        found = list(best[0].candidates(rng, size))
        tried += found
        if _value(max(found, key=_value)) < _value(best):
            break
        best = max(found, key=_value)
    size = len(best[1][0].weights)
    if size > max(sizes[:3]):  # few components preferred this space: do many?
        tried += [found for space in spaces if space is not best[0] for found in space.candidates(rng, size)]
        best = max(tried, key=_value)
    # A Gaussian can lose arbitrarily much on an outlier, and few held-out rows may have none: heavy tails get a bonus.
    bonus = _BONUS / len(best[2])
    for freedom in FREEDOMS:
        candidate = best[0].with_freedom(best[1], freedom)
        tried.append(candidate)
        if _value(candidate) + bonus < _value(best):
            break
        best, bonus = candidate, 0.0
    space, (mixture, *_), _ = best
    held = len(held_out)
    choice = Choice(space in spaces[1::2], len(mixture.weights), mixture.freedom, mixture.prior)
    return Start(space.splits[0].model(flow, mixture), np.stack([log_prob[:held] for *_, log_prob in tried]), choice)


def start_again(
    rng: np.random.Generator, flow: AbstractBijection, rows: Float[np.ndarray, "n dim"], choice: Choice
) -> Model:
    """The model of a choice, from other rows."""
    split = _candidate_splits(rows, rows[:1], None)[int(choice.has_quantiles)]
    mixture = fit_mixture(rng, split.rows, choice.components, prior=choice.prior)
    return split.model(flow, with_freedom(mixture, split.rows, choice.freedom))


def folds(rows: Float[np.ndarray, "n dim"], held: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Row numbers of the training and evaluation rows of each fold; the first fold evaluates on the last `held` rows.

    There are as many folds as needed for 70 evaluation rows, at most 10. Folds in which a column of the training rows
    would be constant are skipped.

    Example:
        >>> [judged.tolist() for _, judged in folds(np.arange(5.0)[:, None], 2)]
        [[3, 4], [0, 1]]
    """
    numbers = np.arange(len(rows))
    turns = min(-(-_FEWEST_JUDGED // held), _MOST_FOLDS, len(rows) // held)
    first = [len(rows) - held, *range(0, (turns - 1) * held, held)]
    found = [(np.delete(numbers, np.arange(i, i + held)), np.arange(i, i + held)) for i in first]
    return found[:1] + [turn for turn in found[1:] if np.ptp(rows[turn[0]], axis=0).all()]


def _folds(rows, held_out, given):
    """Training rows, evaluation rows, and the conditions of both."""
    every = np.concatenate([rows, held_out])
    known = None if given is None else np.concatenate(given)
    for trained, judged in folds(every, len(held_out)):
        yield every[trained], every[judged], None if known is None else (known[trained], known[judged])


def _regressions(rows, given) -> list[Regression | None]:
    if given is None:
        return [None]
    return [None, *(fit_regression(rows, given[0], has_scale=has_scale) for has_scale in (False, True))]


def _candidate_splits(rows, held_out, given) -> list["_Split"]:
    """For each regression, rows with splines that are the identity, and with those from quantiles."""
    found = []
    for regression in _regressions(rows, given):
        trained, judged, log_det = rows, held_out, np.zeros(len(held_out))
        if regression is not None:
            trained = residuals(regression, rows, given[0])[0]
            judged, log_det = residuals(regression, held_out, given[1])
        fitted = fit_splines(trained)
        for splines in (ColumnSplines(rows.shape[1], 8, fitted.heavy), fitted):
            found.append(_Split(regression, splines, trained, judged, log_det))
    return found


class _Split:
    """Training and evaluation rows, after regression, splines and whitening."""

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

    def model(self, flow, mixture) -> Model:
        # The whitening is stored as the map in the direction of training: a product, and no solve.
        whitening = Whitening(-self.whiten @ self.mean, self.whiten)
        regression = [] if self.regression is None else [Invert(self.regression)]
        return Model(Chain([flow, Invert(whitening), Invert(self.splines), *regression]), Mixture(*mixture[:4]))


class _Space:
    """Mixtures after one kind of regression and splines, fitted in each split."""

    def __init__(self, splits: Sequence[_Split]):
        self.splits = splits

    def candidates(self, rng, size) -> Iterable["_Candidate"]:
        """Mixtures of one size, with weaker priors as long as the held-out likelihood rises by two standard errors.

        Without this margin, few held-out rows would often choose components that are too narrow.
        """
        best = self._fitted(rng, size, 1.0)
        yield best
        for prior in PRIORS if size > 1 else ():
            found = self._fitted(rng, size, prior)
            gain = found[2] - best[2]
            if not gain.mean() > 2 * gain.std() / np.sqrt(len(gain)):
                break
            yield (best := found)

    def with_freedom(self, mixtures, freedom) -> "_Candidate":
        pairs = zip(mixtures, self.splits, strict=True)
        return self._judged([with_freedom(mixture, split.rows, freedom) for mixture, split in pairs])

    def _fitted(self, rng, size, prior) -> "_Candidate":
        return self._judged([fit_mixture(rng, split.rows, size, prior=prior) for split in self.splits])

    def _judged(self, mixtures) -> "_Candidate":
        pairs = zip(mixtures, self.splits, strict=True)
        log_probs = [mixture.log_prob(split.held_out) + split.log_det for mixture, split in pairs]
        return self, mixtures, np.concatenate(log_probs)


_Candidate = tuple[_Space, list[Components], np.ndarray]


def _value(candidate: _Candidate) -> float:
    return float(np.mean(candidate[2]))
