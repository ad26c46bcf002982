"""The start of a default fit: splines on the columns, whitening, and a mixture of Gaussians as the base of the flow."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from flowjax.bijections import AbstractBijection, Chain, Invert
from jaxtyping import Float

from ddnf.density.likelihood import Model, moments
from ddnf.density.mixture import Gaussians, Mixture, fit_mixture
from ddnf.density.splines import ColumnSplines, fit_splines, map_rows
from ddnf.density.whitening import Whitening

LADDER = (2, 4, 8, 16, 32, 64)  # numbers of components to try, besides one
_FEWEST_ROWS = 10  # per component
_LARGEST = 500_000  # entries of all precision matrices
_MOST_ROWS = 200_000  # of a larger table, so many rows are enough for quantiles, covariances and mixtures
_CLIP = 10.0  # standard deviations; values farther out do not count for covariances


class Start(NamedTuple):
    """A model before training.

    Attributes:
        model: the best candidate.
        log_prob: log density of the held-out rows under each candidate.
    """

    model: Model
    log_prob: Float[np.ndarray, "candidates n"]


def start(
    rng: np.random.Generator,
    flow: AbstractBijection,
    rows: Float[np.ndarray, "n dim"],
    held_out: Float[np.ndarray, "m dim"],
    *,
    components: int | None = None,
) -> Start:
    """The best of some cheap models on held-out rows, with a flow between the whitened rows and the mixture.

    Columns go through splines that start as the identity, or from the quantiles of the training rows. Both are tried
    with few components; with the better one, more components are tried as long as held-out rows get likelier.

    Args:
        rng: random numbers.
        flow: a bijection close to the identity.
        rows, held_out: standardized, column by column, and in random order.
        components: number of components; None to choose it.
    """
    rows = rows[:_MOST_ROWS]
    limit = min(len(rows) / _FEWEST_ROWS, _LARGEST / rows.shape[1] ** 2)
    sizes = [1, *(k for k in LADDER if k <= limit)] if components is None else [components]
    fitted = fit_splines(rows)
    identity = ColumnSplines(rows.shape[1], 8, fitted.heavy)
    spaces = [_Space(splines, rows, held_out) for splines in (identity, fitted)]
    tried = [candidate for space in spaces for candidate in space.candidates(rng, sizes[:3])]
    best = max(tried, key=_value)
    for candidate in best[0].candidates(rng, sizes[3:]):
        tried.append(candidate)
        if _value(candidate) < _value(best):
            break
        best = candidate
    return Start(Model(best[0].chain(flow), Mixture(*best[1])), np.stack([log_prob for *_, log_prob in tried]))


class _Space:
    """Rows after splines and whitening."""

    def __init__(self, splines, rows, held_out):
        mapped, _ = map_rows(splines, rows)
        judged, log_det = map_rows(splines, held_out)
        self.splines = splines
        self.mean, scale = moments(np.clip(mapped, -_CLIP, _CLIP))
        self.whiten = np.linalg.inv(scale)
        whitened = (mapped - self.mean) @ self.whiten.T
        self.rows = whitened[(np.abs(whitened) < 3 * _CLIP).all(axis=1)]
        self.held_out = (judged - self.mean) @ self.whiten.T
        self.log_det = log_det + np.sum(np.log(np.diag(self.whiten)))

    def candidates(self, rng, sizes) -> Iterable[tuple["_Space", Gaussians, np.ndarray]]:
        for size in sizes:
            mixture = fit_mixture(rng, self.rows, size)
            yield self, mixture, mixture.log_prob(self.held_out) + self.log_det

    def chain(self, flow) -> AbstractBijection:
        # The whitening is stored as the map in the direction of training: a product, and no solve.
        whitening = Whitening(-self.whiten @ self.mean, self.whiten)
        return Chain([flow, Invert(whitening), Invert(self.splines)])


def _value(candidate) -> float:
    return float(np.mean(candidate[2]))
