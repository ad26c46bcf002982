"""The probability of categories: counts of combinations, smoothed towards independent columns."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Categories(NamedTuple):
    """p(c) = (n(c) + a q(c)) / (n + a), where n(c) counts rows and q is the product of the columns' frequencies.

    It sums to one over all combinations, and gives combinations that never occurred some probability, unless one of
    their levels never occurred.

    Attributes:
        combinations: level numbers of the combinations that occurred.
        counts: how often each occurred, n(c).
        sizes: the number of levels of each column.
        strength: a.

    Example:
        >>> model = fit_categories(np.array([[0, 0], [0, 0], [1, 1], [1, 1]]), (2, 2))
        >>> every = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
        >>> round(float(np.exp(model.log_prob(every)).sum()), 6)
        1.0
    """

    combinations: Int[np.ndarray, "m k"]
    counts: Int[np.ndarray, " m"]
    sizes: tuple[int, ...]
    strength: float

    @property
    def shares(self) -> list[Float[np.ndarray, " _"]]:
        """The frequencies of the levels of each column."""
        found = [
            np.bincount(column, self.counts, size) for column, size in zip(self.combinations.T, self.sizes, strict=True)
        ]
        return [share / share.sum() for share in found]

    def log_prob(self, codes: Int[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
        """The log probability of combinations; -inf for levels that never occurred."""
        counted = {tuple(row): count for row, count in zip(self.combinations.tolist(), self.counts, strict=True)}
        n = np.array([counted.get(tuple(row), 0) for row in codes.tolist()], float)
        with np.errstate(divide="ignore"):
            return np.log(n + self.strength * self._independent(codes)) - np.log(self.counts.sum() + self.strength)

    def log_marginal(self, known: Mapping[int, int]) -> float:
        """The log probability of levels of some columns; -inf for levels that never occurred, such as -1."""
        counted, free = self._known(known)
        with np.errstate(divide="ignore"):
            return float(np.log(counted.sum() + free) - np.log(self.counts.sum() + self.strength))

    def _known(self, known):
        """Counts of the combinations with these levels, and the weight of all others with them."""
        match = np.all([self.combinations[:, i] == level for i, level in known.items()], axis=0) if known else True
        shares = [self.shares[i][level] if 0 <= level < self.sizes[i] else 0.0 for i, level in known.items()]
        return self.counts * match, self.strength * np.prod(shares)

    def sample(
        self, rng: np.random.Generator, n: int, known: Mapping[int, int] | None = None
    ) -> Int[np.ndarray, "n k"]:
        """n combinations; exact draws given the level numbers of some columns, where they are `known`."""
        known = {} if known is None else known
        (counts, free), shares = self._known(known), self.shares
        if not free:
            raise ValueError("Expected levels that occurred in the fitted rows; got one that did not.")
        total = counts.sum()
        drawn = np.stack([rng.choice(size, n, p=share) for size, share in zip(self.sizes, shares, strict=True)], axis=1)
        for i, level in known.items():
            drawn[:, i] = level
        if total:
            is_counted = rng.uniform(size=n) < total / (total + free)
            chosen = rng.choice(len(counts), int(is_counted.sum()), p=counts / total)
            drawn[is_counted] = self.combinations[chosen]
        return drawn

    def _independent(self, codes):
        inside = ((codes >= 0) & (codes < np.array(self.sizes))).all(axis=1)
        safe = np.where(inside[:, None], codes, 0)
        return inside * np.prod([share[column] for share, column in zip(self.shares, safe.T, strict=True)], axis=0)


def fit_categories(codes: Int[np.ndarray, "n k"], sizes: Sequence[int]) -> Categories:
    """Counts the combinations, and chooses the strength of the smoothing by leaving out each row in turn."""
    combinations, counts = np.unique(codes, axis=0, return_counts=True)
    n = int(counts.sum())
    start = Categories(combinations, counts, tuple(sizes), 1.0)
    independent = start._independent(combinations)

    def left_out(a):
        return float(np.sum(counts * np.log((counts - 1 + a * independent) / (n - 1 + a))))

    return start._replace(strength=max(np.geomspace(0.01, 10.0 * n, 60).tolist(), key=left_out))
