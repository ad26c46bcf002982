"""Marginals of some columns, and draws of the other columns given some: importance sampling, then MCMC."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np
from jaxtyping import Float, PRNGKeyArray
from scipy.special import logsumexp

from ddnf.density.columns import from_real, to_real
from ddnf.density.encode import encode_condition, encode_fields
from ddnf.density.proposal import (
    DRAWS,
    Proposal,
    chosen_rows,
    condition_on,
    draw_real,
    fit_proposal,
    scaled_log_prob,
)
from ddnf.density.schema import check_missing, one_hot
from ddnf.flow.random import generator
from ddnf.system.checks import check_count, check_key

_PER_POINT = 1024  # draws for the marginal density at a point
_ORDERS = {1: (48, 64), 2: (16, 24)}  # Gauss-Hermite points in each of one or two dimensions, for error and value
_MOVES = 20
_FEWEST_EFFECTIVE = 50


class GivenDraws(NamedTuple):
    """Draws given some columns, and their diagnostics.

    Attributes:
        draws: a table or array of all columns.
        effective: effective sample size of the importance draws that the MCMC started from; infinite if exact.
        acceptance: share of the MCMC's moves that were accepted.
    """

    draws: Any
    effective: float
    acceptance: float


class _Known(NamedTuple):
    """Values of some columns: places among the numbers and their values, places among the categories and levels."""

    places: list[int]
    values: Float[np.ndarray, "n known"]
    levels: dict[int, int]


def sample_given(
    density: Any, values: Mapping[Any, Any], key: PRNGKeyArray, n: int, condition: Any = None
) -> GivenDraws:
    """Draws of all columns given values of some; see `Density.sample_given`."""
    check_key(key)
    check_count(n=n)
    numbers, levels = split_values(density, values)
    rng = generator(jr.fold_in(key, 3))
    given = own_condition(density, condition)
    if not numbers:
        codes = None if density.categories is None else density.categories.sample(rng, n, levels)
        drawn = density.sample_numbers(key, _all_given(density, given, codes, n), n)
        return GivenDraws(density.as_table(drawn, codes), float("inf"), 1.0)
    places = list(numbers)
    proposal = _proposal(density, key, given, levels)
    v, codes, effective, acceptance = _chains(
        rng, density, proposal, _Known(places, np.array([*numbers.values()])[None], levels), given, n
    )
    drawn = from_real(density.columns, proposal.shift + proposal.scale * v)
    drawn[:, places] = list(numbers.values())
    if effective < _FEWEST_EFFECTIVE or acceptance < 0.01:
        warnings.warn(
            f"The draws given {', '.join(map(str, values))} may be wrong: the importance draws have an effective "
            f"sample size of {effective:.0f}, and {acceptance:.1%} of the MCMC moves were accepted. The given values "
            "may be far from all rows.",
            RuntimeWarning,
            stacklevel=3,
        )
    return GivenDraws(density.as_table(drawn, codes), effective, acceptance)


def _chains(rng, density, proposal, known: _Known, given, n):
    """The last states of n chains that start from importance draws."""
    rest = [i for i in range(len(density.columns)) if i not in known.places]

    def propose(count):
        a = _scaled(rng, density, proposal, known, count)
        conditional = condition_on(proposal, known.places, a)
        b = conditional.sample(rng)
        codes = None if density.categories is None else density.categories.sample(rng, count, known.levels)
        # The noise of a given integer is drawn in the units of its column.
        return (
            _joined(known.places, rest, a, b),
            codes,
            conditional.log_prob(b) - _change(density, proposal, known.places, a),
        )

    def log_prob(v, codes):
        return scaled_log_prob(density, proposal, v, _all_given(density, given, codes, len(v)))

    v, codes, log_q = propose(max(4 * n, DRAWS))
    log_weights = log_prob(v, codes) - log_q
    if not np.isfinite(log_weights).any():
        raise ValueError("Expected values that the density allows; got some where it is zero.")
    effective = float(np.exp(2 * logsumexp(log_weights) - logsumexp(2 * log_weights)))
    chosen = chosen_rows(rng, log_weights, n)
    v, codes, weight = v[chosen], None if codes is None else codes[chosen], log_weights[chosen]
    accepted = 0.0
    for _ in range(_MOVES):
        new, new_codes, log_q = propose(n)
        new_weight = log_prob(new, new_codes) - log_q
        is_better = np.log(rng.uniform(size=n)) < new_weight - weight
        v, weight = np.where(is_better[:, None], new, v), np.where(is_better, new_weight, weight)
        if codes is not None and new_codes is not None:
            codes = np.where(is_better[:, None], new_codes, codes)
        accepted += float(is_better.mean()) / _MOVES
    return v, codes, effective, accepted


@dataclasses.dataclass(frozen=True)
class Marginal:
    """The density of some columns of another density, the others integrated out.

    Exact if nothing is left to integrate. Quadrature integrates over one or two numeric columns if the marginal has
    neither categories nor integers; otherwise importance sampling does, with the same draws at each call.

    Attributes:
        density: the density of all columns.
        columns: places of the columns, in their order here.
        condition: the condition of the density; None without.
        proposal: the distribution that proposes the other columns.
        method: "auto", "quadrature" or "sampling".
    """

    density: Any
    columns: tuple[int, ...]
    condition: Any
    proposal: Proposal
    method: str = "auto"

    def log_prob(self, x: Any) -> Float[np.ndarray, " n"]:
        """The log density of rows (n, columns), or of a table with these columns."""
        return self.log_prob_and_error(x)[0]

    def log_prob_and_error(self, x: Any) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """The log density of rows, and its standard error (by quadrature, what a coarser rule differs by)."""
        rows = self._rows(x)
        found = [self._at(np.random.default_rng(0), row) for row in rows]
        return np.array([value for value, _ in found]), np.array([error for _, error in found])

    def sample(self, key: PRNGKeyArray, n: int) -> Any:
        """n draws, as a table with these columns, or an array."""
        return pick_columns(self.density.sample(key, n, self.condition), self.density, self.columns)

    def _rows(self, x):
        schema = self.density.schema
        if schema is not None:
            return encode_fields([schema.fields[i] for i in self.columns], x).reshape(-1, len(self.columns))
        rows = np.asarray(x, float).reshape(-1, len(self.columns))
        check_missing(self.columns, rows)
        return rows

    def _at(self, rng, row) -> tuple[float, float]:
        density, proposal = self.density, self.proposal
        numbers, levels = _by_kind(density, dict(zip(self.columns, row, strict=True)))
        places, values = list(numbers), np.array([*numbers.values()])
        categories = density.categories
        log_levels = categories.log_marginal(levels) if levels else 0.0
        if not numbers or log_levels == -np.inf or not _is_inside(density, places, values):
            return (log_levels, 0.0) if not numbers else (-np.inf, 0.0)
        if _uses_quadrature(density, self.columns, self.method):
            return self._integrated(places, values)
        count = _PER_POINT
        a = _scaled(rng, density, proposal, _Known(places, values[None], levels), count)
        change = _change(density, proposal, places, a)
        conditional = condition_on(proposal, places, a)
        rest = [i for i in range(len(density.columns)) if i not in places]
        b = conditional.sample(rng) if rest else np.zeros((count, 0))
        log_q = conditional.log_prob(b) if rest else np.zeros(count)
        codes = None if categories is None else categories.sample(rng, count, levels)
        given = _all_given(density, own_condition(density, self.condition), codes, count)
        log_p = scaled_log_prob(density, proposal, _joined(places, rest, a, b), given)
        terms = log_p - log_q + change
        mean = float(logsumexp(terms) - np.log(count))
        return log_levels + mean, float(np.std(np.exp(terms - mean)) / np.sqrt(count))

    def _integrated(self, places, values) -> tuple[float, float]:
        """Gauss-Hermite quadrature over the components of the proposal given the columns at `places`."""
        density, proposal = self.density, self.proposal
        a = _scaled(np.random.default_rng(0), density, proposal, _Known(places, values[None], {}), 1)
        conditional = condition_on(proposal, places, a)
        rest = [i for i in range(len(density.columns)) if i not in places]
        found = []
        for order in _ORDERS[len(rest)]:
            b, log_weights, mixture = conditional.nodes(order)
            given = _all_given(density, own_condition(density, self.condition), None, len(b))
            v = _joined(places, rest, np.broadcast_to(a, (len(b), len(places))), b)
            terms = scaled_log_prob(density, proposal, v, given) - mixture.log_prob(b) + log_weights
            found.append(float(logsumexp(terms)))
        return found[1] + float(_change(density, proposal, places, a)[0]), abs(found[1] - found[0])


def _uses_quadrature(density, columns, method) -> bool:
    is_plain = density.categories is None and not any(density.columns[i].integer for i in columns)
    is_possible = is_plain and len(density.columns) - len(columns) in _ORDERS
    if method == "quadrature" and not is_possible:
        raise ValueError("Expected one or two columns of numbers to integrate, and no integers or categories.")
    return is_possible and method != "sampling"


def marginal(density: Any, columns: Any, condition: Any = None, *, method: str = "auto") -> Marginal:
    """The marginal density of some columns; see `Density.marginal`."""
    if method not in ("auto", "quadrature", "sampling"):
        raise ValueError(f"Expected method to be 'auto', 'quadrature' or 'sampling'; got {method!r}.")
    chosen = [columns] if isinstance(columns, str | int | np.integer) else list(columns)
    places = tuple(place_of(density, column) for column in chosen)
    if not places or len(set(places)) < len(places):
        raise ValueError(f"Expected columns that differ; got {columns!r}.")
    _uses_quadrature(density, places, method)  # raises if it is asked for and not possible
    proposal = _proposal(density, jr.key(0), own_condition(density, condition), {})
    return Marginal(density, places, condition, proposal, method)


def place_of(density: Any, column: Any) -> int:
    """The place of a column, from its name or place."""
    names = () if density.names is None else density.names[: density.dim]
    if column in names:
        return names.index(column)
    if isinstance(column, bool) or not isinstance(column, int | np.integer) or not 0 <= column < density.dim:
        known = ", ".join(names) or f"0 to {density.dim - 1}"
        raise ValueError(f"Expected columns of the density ({known[:200]}); got {column!r}.")
    return int(column)


def split_values(density: Any, values: Mapping[Any, Any]) -> tuple[dict[int, float], dict[int, int]]:
    """Values by column: numbers by their place among the numbers, level numbers by their place among the categories."""
    encoded = {}
    for column, value in values.items():
        place = place_of(density, column)
        if density.schema is None:
            if np.ndim(value) != 0 or np.asarray(value).dtype.kind not in "biuf":
                raise ValueError(f"Expected a number for column {column!r}; got {value!r:.60}.")
            encoded[place] = float(value)
        else:
            field = density.schema.fields[place]
            encoded[place] = float(encode_fields([field], {field.name: [value]})[0, 0])
            if field.kind == "category" and encoded[place] < 0:
                known = ", ".join(map(str, field.levels))[:200]
                raise ValueError(f"Expected a level of {field.name!r} ({known}); got {value!r}.")
    numbers, levels = _by_kind(density, encoded)
    if not _is_inside(density, list(numbers), np.array([*numbers.values()])):
        raise ValueError(f"Expected values in their support; got {dict(values)!r:.200}.")
    return numbers, levels


def _by_kind(density, encoded: dict[int, Any]) -> tuple[dict[int, float], dict[int, int]]:
    if density.schema is None:
        return encoded, {}
    numbers, categories = density.schema.numbers, density.schema.categories
    return (
        {numbers.index(i): value for i, value in encoded.items() if i in numbers},
        {categories.index(i): int(value) for i, value in encoded.items() if i in categories},
    )


def _is_inside(density, places, values) -> bool:
    for place, value in zip(places, values, strict=True):
        low, high, integer = density.columns[place]
        middle = value + 0.5 * integer
        top = np.inf if high is None else high + integer
        is_fine = np.isfinite(value) and (-np.inf if low is None else low) < middle < top
        if not is_fine or (integer and value != np.floor(value)):
            return False
    return True


def own_condition(density: Any, condition: Any) -> Any:
    """The user's condition as numbers, (1, width); None without."""
    encoded = encode_condition(density.schema, condition)
    if (encoded is None) != (density.condition_dim is None):
        raise ValueError(f"Expected {'no' if encoded is not None else 'a'} condition; got {condition!r:.60}.")
    return None if encoded is None else np.asarray(encoded, float).reshape(1, -1)


def _all_given(density, given, codes, n):
    if codes is not None:
        return one_hot(codes, density.categories.sizes)
    return None if given is None else np.broadcast_to(given, (n, given.shape[1]))


def _proposal(density, key, given, levels) -> Proposal:
    rng = generator(jr.fold_in(key, 5))
    codes = None if density.categories is None else density.categories.sample(rng, DRAWS, levels)
    return fit_proposal(rng, draw_real(density, key, _all_given(density, given, codes, DRAWS), DRAWS))


def _filled_rows(density, places, values, noise):
    """Full rows, of which only the columns at `places` are used, integers with noise."""
    rows = np.tile(from_real(density.columns, density.mean), (len(noise), 1))
    integer = np.array([density.columns[i].integer for i in places], float)
    rows[:, places] = values + noise * integer
    return rows


def _scaled(rng, density, proposal, known: _Known, count):
    noise = rng.uniform(size=(count, len(known.places)))
    rows = _filled_rows(density, known.places, np.broadcast_to(known.values, noise.shape), noise)
    real = to_real(density.columns, rows)[0]
    return ((real - proposal.shift) / proposal.scale)[:, known.places]


def _change(density, proposal, places, a):
    """The log-determinant from the columns at `places` to the space of the proposal."""
    columns = [density.columns[i]._replace(integer=False, high=_top(density.columns[i])) for i in places]
    real = proposal.shift[places] + proposal.scale[places] * a
    return to_real(columns, from_real(columns, real))[1] - np.log(proposal.scale[places]).sum()


def _top(column):
    return column.high if column.high is None else column.high + column.integer


def _joined(places, rest, a, b):
    rows = np.empty((len(a), len(places) + len(rest)))
    rows[:, places], rows[:, rest] = a, b
    return rows


def pick_columns(draws: Any, density: Any, places: Sequence[int]) -> Any:
    """Some columns of draws, as the same kind of table."""
    if density.schema is None or density.schema.library == "array":
        return draws[:, list(places)]
    names = [density.schema.fields[i].name for i in places]
    return {name: draws[name] for name in names} if isinstance(draws, dict) else draws[names]
