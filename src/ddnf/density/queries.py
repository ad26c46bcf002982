"""Queries of a density from its draws: the probability of a box, ranks for outliers, calibration."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray

from ddnf.density.encode import encode_fields, encode_rows
from ddnf.density.given import place_of
from ddnf.density.schema import check_levels
from ddnf.system.checks import check_count

_AT_ONCE = 2_000_000  # numbers in the draws of some rows


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


class Calibration(NamedTuple):
    """How often rows lie in the central intervals of a density, compared with the nominal probabilities.

    Attributes:
        levels: probabilities of the intervals.
        coverage: share of the rows in each interval, for each column of numbers.
        p_values: Kolmogorov-Smirnov test of uniform PIT values, for each column of numbers; small if it is not.
    """

    levels: Float[np.ndarray, " levels"]
    coverage: Float[np.ndarray, "levels numbers"]
    p_values: Float[np.ndarray, " numbers"]


def probability(density: Any, key: PRNGKeyArray, box: Mapping[Any, Any], n: int, condition: Any = None) -> Estimate:
    """The share of n draws in a box; see `Density.probability`."""
    draws = density.sample(key, n, condition)
    inside = np.ones(n, bool)
    for column, wanted in box.items():
        inside &= _is_in(density, draws, place_of(density, column), wanted)
    share = float(inside.mean())
    # If no draw or all draws are inside, the error is that of one draw.
    return Estimate(share, float(np.sqrt(max(share * (1 - share), 1 / n) / n)))


def _is_in(density, draws, place: int, wanted: Any) -> Bool[np.ndarray, " n"]:
    field = None if density.schema is None else density.schema.fields[place]
    values = draws[:, place] if field is None or isinstance(draws, np.ndarray) else encode_fields([field], draws)[:, 0]
    if field is not None and field.kind == "category":
        levels = [wanted] if isinstance(wanted, str) or np.ndim(wanted) == 0 else list(wanted)
        codes = encode_fields([field], {field.name: levels})[:, 0]
        if (codes < 0).any():
            raise ValueError(
                f"Expected levels of {field.name!r} ({', '.join(map(str, field.levels))[:200]}); got {wanted!r}."
            )
        return np.isin(values, codes)
    if not isinstance(wanted, tuple | list) or len(wanted) != 2:
        raise ValueError(
            f"Expected an interval (low, high) for each column of numbers, None for no end; got {wanted!r}."
        )
    ends = [
        None if e is None else e if field is None else encode_fields([field], {field.name: [e]})[0, 0] for e in wanted
    ]
    low, high = (-np.inf if ends[0] is None else ends[0]), (np.inf if ends[1] is None else ends[1])
    return (values >= low) & (values <= high)


def rank(density: Any, key: PRNGKeyArray, x: Any, condition: Any = None, *, n: int) -> Float[np.ndarray, "*batch"]:
    """The share of n draws that are less likely than each row; see `Density.rank`."""
    check_count(n=n)
    scores = np.asarray(density.log_prob(x, condition), float)
    if density.condition_dim is None:
        draws = np.sort(np.asarray(density.log_prob(density.sample(key, n)), float))
        return np.searchsorted(draws, scores) / n
    found = np.empty(scores.size)
    for rows, given, draws in _draws_of_rows(density, key, _given_rows(density, x, condition, scores.size), n):
        drawn = np.asarray(density.encoded_log_prob(draws.reshape(-1, draws.shape[2]), given), float)
        own = scores.reshape(-1, 1)[rows]
        found[rows] = np.mean(drawn.reshape(-1, n)[: len(own)] < own, axis=1)
    return found.reshape(scores.shape)


def pit(density: Any, key: PRNGKeyArray, x: Any, condition: Any = None, *, n: int) -> Float[np.ndarray, "rows numbers"]:
    """The position of each value among n draws given its condition, from 0 to 1; see `Density.pit`."""
    check_count(n=n)
    numbers, _, _ = encode_rows(density.schema, density.dim, x, condition)
    numbers = np.asarray(numbers, float).reshape(-1, len(density.columns))
    noise = np.random.default_rng(0).uniform(size=numbers.shape)
    places = np.empty(numbers.shape)
    if density.condition_mean is None:
        for place, draws in enumerate(np.sort(density.sample_numbers(key, None, n), axis=0).T):
            below, most = (np.searchsorted(draws, numbers[:, place], side) for side in ("left", "right"))
            places[:, place] = below + noise[:, place] * (most - below + 1)
        return places / (n + 1)
    for rows, _, draws in _draws_of_rows(density, key, _given_rows(density, x, condition, len(numbers)), n):
        own = numbers[rows, None]
        below, equal = np.sum(draws[: len(own)] < own, axis=1), np.sum(draws[: len(own)] == own, axis=1)
        places[rows] = below + noise[rows] * (equal + 1)
    return places / (n + 1)


def _draws_of_rows(density, key, given, n) -> Iterator[tuple[slice, np.ndarray, Float[np.ndarray, "rows n numbers"]]]:
    """n draws for each condition, some rows at a time: their places, conditions and draws, the last padded."""
    size = max(1, min(len(given), _AT_ONCE // (n * len(density.columns))))
    for number, first in enumerate(range(0, len(given), size)):
        repeated = np.repeat(given[np.minimum(first + np.arange(size), len(given) - 1)], n, axis=0)
        own_key = jr.fold_in(key, number) if number else key
        draws = density.sample_numbers(own_key, repeated, len(repeated))
        yield slice(first, first + size), repeated, draws.reshape(size, n, -1)


def calibration(density: Any, key: PRNGKeyArray, x: Any, condition: Any = None, *, n: int) -> Calibration:
    """Coverage of central intervals; see `Density.calibration`."""
    from scipy.stats import kstest

    values = pit(density, key, x, condition, n=n)
    levels = np.array([0.5, 0.8, 0.9, 0.95])
    coverage = np.array([(np.abs(values - 0.5) <= level / 2).mean(axis=0) for level in levels])
    return Calibration(levels, coverage, np.array([kstest(column, "uniform").pvalue for column in values.T]))


def _given_rows(density, x, condition, count):
    """All conditions as numbers, one row for each row of x."""
    _, codes, given = encode_rows(density.schema, density.dim, x, condition)
    if codes is not None:
        for place, number in enumerate(density.schema.categories):
            check_levels(density.schema.fields[number], codes[..., place])
    return density.given_rows(given, codes, (count,))
