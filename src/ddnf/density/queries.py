"""What one asks of a density, by its draws: the probability of a box, ranks of outliers, calibration."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray

from ddnf.density.encode import encode_fields, encode_rows
from ddnf.density.given import place_of
from ddnf.density.schema import check_levels
from ddnf.system.checks import check_count


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


class Calibration(NamedTuple):
    """How often rows lie in the central intervals of a density, beside how often they should.

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
    # With no draw inside, or all, the error is that of one draw.
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
    given = _given_rows(density, x, condition, scores.size)
    repeated = np.repeat(given, n, axis=0)
    drawn = density.sample_numbers(key, repeated, len(repeated))
    found = np.asarray(density.encoded_log_prob(drawn, repeated), float).reshape(-1, n)
    return np.mean(found < scores.reshape(-1, 1), axis=1).reshape(scores.shape)


def pit(density: Any, key: PRNGKeyArray, x: Any, condition: Any = None, *, n: int) -> Float[np.ndarray, "rows numbers"]:
    """Where each value lies among n draws given its condition, from 0 to 1; see `Density.pit`."""
    check_count(n=n)
    numbers, _, _ = encode_rows(density.schema, density.dim, x, condition)
    numbers = np.asarray(numbers, float).reshape(-1, len(density.columns))
    if density.condition_mean is None:
        draws = density.sample_numbers(key, None, n)[None]
    else:
        given = _given_rows(density, x, condition, len(numbers))
        draws = density.sample_numbers(key, np.repeat(given, n, axis=0), len(numbers) * n).reshape(len(numbers), n, -1)
    below, equal = np.sum(draws < numbers[:, None], axis=1), np.sum(draws == numbers[:, None], axis=1)
    noise = np.random.default_rng(0).uniform(size=numbers.shape)
    return (below + noise * (equal + 1)) / (n + 1)


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
    for place, number in enumerate(() if codes is None else density.schema.categories):
        check_levels(density.schema.fields[number], codes[..., place])
    return density.given_rows(given, codes, (count,))
