"""A fitted density: its log density, draws, and what is known about the fit."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.density import likelihood
from ddnf.density import rows as rows_of
from ddnf.density.categories import Categories
from ddnf.density.columns import Column, from_real, inside, to_real
from ddnf.density.encode import encode_condition, encode_rows
from ddnf.density.frames import build_table
from ddnf.density.mixture import Mixture
from ddnf.density.schema import Schema, one_hot
from ddnf.flow.random import generator
from ddnf.system.checks import check_count, check_key
from ddnf.training.devices import Devices, mesh_of

if TYPE_CHECKING:
    from ddnf.density import given, queries

# Points in [0, 1) at which the density of an integer's interval is averaged.
_INTEGER_POINTS = 64


@dataclasses.dataclass(frozen=True, repr=False)
class Density:
    """A fitted density p(x), or p(x | condition).

    Attributes:
        flow: the bijection from the base to standardized rows.
        columns: the support of each column.
        mean, scale: of the rows in unbounded space; `scale` is a triangular matrix.
        condition_mean, condition_scale: of the conditions; None without.
        log_likelihood: mean log-likelihood of held-out rows. Held-out rows also decide when training stops; the value
            is cross-fitted, so that no row evaluates a decision that it took part in (`ddnf.density.holdout`).
        train_log_likelihood: mean log-likelihood of the training rows.
        losses, values: negative log-likelihood in training (with the penalty of large parameters, where there is one)
            and on the held-out rows after each chunk of training.
        seconds: wall time of each chunk of training; the first includes compilation.
        names: of the columns and then of the conditions, where they are known.
        issues: problems with the table or the fit, each with a remedy; empty if none was found.
        log_likelihood_error: standard error of `log_likelihood`.
        train_rows, held_out_rows: number of training and held-out rows.
        has_all_rows: whether the model was refitted to all rows after held-out rows had chosen the settings. The
            reported held-out likelihood is that of the first fit.
        base: the mixture of Gaussians or Student's t that the flow starts from; None for a standard normal.
        is_trained: False if training did not improve the likelihood of held-out rows; this is then the mixture before
            training.
        schema: the columns of the table; None for arrays. `columns`, `mean`, `scale` and the flow only cover its
            numeric columns, conditioned on the levels of its categories.
        categories: the probability of the categories; None if there are none.
        dropped_rows: number of rows that were dropped because of missing values.
    """

    flow: AbstractBijection
    columns: tuple[Column, ...]
    mean: Float[np.ndarray, " dim"]
    scale: Float[np.ndarray, "dim dim"]
    condition_mean: Float[np.ndarray, " condition"] | None
    condition_scale: Float[np.ndarray, " condition"] | None
    log_likelihood: float
    train_log_likelihood: float
    losses: Float[np.ndarray, " n"]
    values: Float[np.ndarray, " n"]
    seconds: Float[np.ndarray, " n"]
    names: tuple[str, ...] | None = None
    issues: tuple[str, ...] = ()
    log_likelihood_error: float = float("nan")
    train_rows: int = 0
    held_out_rows: int = 0
    base: Mixture | None = None
    is_trained: bool = True
    schema: Schema | None = None
    categories: Categories | None = None
    dropped_rows: int = 0
    has_all_rows: bool = False

    def __repr__(self) -> str:
        names = self.names or [str(i) for i in range(self.dim + (self.condition_dim or 0))]
        shown = [f"{n}: {c}" for n, c in zip(names, self.supports()[:8], strict=False)]
        shown += ["..."] * (self.dim > 8)
        dropped = f", {self.dropped_rows} more dropped with missing values" if self.dropped_rows else ""
        given = "" if self.condition_dim is None else f" given {', '.join(names[self.dim :][:8])}"
        lines = [
            f"Density of {self.dim} columns ({', '.join(shown)}){given}",
            f"  {self._kind()}, fitted to {self._fitted_rows()}{dropped}",
            f"  log-likelihood {self.describe_likelihood()}",
            *(f"  issue: {issue}" for issue in self.issues),
        ]
        return "\n".join(lines)

    def _kind(self) -> str:
        if self.base is None:
            return "a flow"
        count, is_normal = len(self.base.logits), self.base.log_freedoms is None
        kind = ("a Gaussian", "Gaussians") if is_normal else ("a Student's t", "Student's t")
        base = f"a mixture of {count} {kind[1]}" if count > 1 else kind[0]
        return f"a flow from {base}" if self.is_trained else f"{base}, which no flow improved on held-out rows"

    def _fitted_rows(self) -> str:
        if not self.has_all_rows:
            return f"{self.train_rows} rows"
        return f"all {self.train_rows + self.held_out_rows} rows, as {self.held_out_rows} held-out rows decided"

    def describe_likelihood(self) -> str:
        """The held-out log-likelihood with its standard error and number of rows, and that of the training rows."""
        held = f"{self.log_likelihood:.6g} +- {self.log_likelihood_error:.2g} on {self.held_out_rows} held-out rows"
        return f"{held}, {self.train_log_likelihood:.6g} in training"

    @property
    def complaints(self) -> tuple[str, ...]:
        """Deprecated name of `issues`."""
        warnings.warn("Density.complaints is deprecated: use Density.issues.", DeprecationWarning, stacklevel=2)
        return self.issues

    @property
    def dim(self) -> int:
        """The number of columns that are modelled."""
        return len(self.columns) if self.schema is None else len(self.schema.fields)

    @property
    def condition_dim(self) -> int | None:
        """The number of columns that the density is conditioned on; None without."""
        if self.schema is not None:
            return len(self.schema.given) or None
        return None if self.condition_mean is None else len(self.condition_mean)

    def supports(self) -> list[Column | str]:
        """The support of each column: an interval, or the levels of a category in words."""
        supports: list[Column | str] = list(self.columns)
        for place in () if self.schema is None else self.schema.categories:
            supports.insert(place, f"{self.schema.fields[place].width} levels")  # pyright: ignore
        return supports

    def log_prob(self, x: Any, condition: Any = None, *, devices: Devices = None) -> Float[Array, "*batch"]:
        """The exact log density at rows (..., dim), or at the rows of a table; -inf outside the support.

        With integer columns, it is the log probability of the integers: the integral of the density over their unit
        intervals, estimated with 64 fixed points. Categories contribute their probability. `devices` shares the rows:
        "all", a number, or a mesh with one axis.
        """
        numbers, codes, given = encode_rows(self.schema, self.dim, x, condition)
        shape = numbers.shape[:-1]
        known = self.given_rows(given, codes, shape)
        flat = numbers.reshape(-1, len(self.columns))
        codes = codes if codes is None else codes.reshape(len(flat), -1)
        return self.encoded_log_prob(flat, known, codes, devices=devices).reshape(shape)

    def encoded_log_prob(
        self, numbers: Any, given: Any, codes: Any = None, *, devices: Devices = None
    ) -> Float[Array, " n"]:
        """The log density of rows as they are fitted: numbers, all conditions as numbers, level numbers."""
        condition = None if given is None else self.standardized(given)
        value = self._integer_log_prob(numbers, condition, mesh_of(devices))
        if codes is None or self.categories is None:
            return value
        return value + jnp.asarray(self.categories.log_prob(codes), value.dtype)

    def sample(self, key: PRNGKeyArray, n: int | None = None, condition: Any = None, *, devices: Devices = None) -> Any:
        """n draws; with a condition (c,) n draws given it, with conditions (n, c) one draw for each.

        Returns an array (n, dim), or the same kind of table as was fitted, with its names and types. `devices` shares
        the draws if n is a multiple of their number: "all", a number, or a mesh with one axis.
        """
        given = encode_condition(self.schema, condition)
        if n is None:
            n = 1000 if given is None or np.ndim(given) < 2 else len(given)
        check_key(key)
        check_count(n=n)
        codes = None if self.categories is None else self.categories.sample(generator(jr.fold_in(key, 1)), n)
        numbers = self.sample_numbers(key, self.given_rows(given, codes, (n,)), n, devices=devices)
        return numbers if self.schema is None else self.as_table(numbers, codes)

    def sample_numbers(
        self, key: PRNGKeyArray, given: Any, n: int, *, devices: Devices = None
    ) -> Float[np.ndarray, "n numbers"]:
        """Draws of the columns of numbers, given all conditions as numbers."""
        condition = None if given is None else self.standardized(given)
        u = likelihood.sample(likelihood.Model(self.flow, self.base), key, n, condition, mesh_of(devices))
        # On the host and in double precision: far from the origin single precision has wide steps.
        return from_real(self.columns, self.mean + np.asarray(u, float) @ self.scale.T)

    def as_table(self, numbers: Float[np.ndarray, "n numbers"], codes: Any) -> Any:
        """Rows as a table of the kind that was fitted."""
        if self.schema is None:
            return numbers
        rows, integer = np.empty((len(numbers), self.dim)), np.zeros(self.dim, bool)
        rows[:, self.schema.numbers] = numbers
        integer[self.schema.numbers] = [column.integer for column in self.columns]
        if codes is not None:
            rows[:, self.schema.categories] = codes
        return build_table(self.schema, rows, integer.tolist())

    def marginal(
        self,
        columns: Sequence[str | int | np.integer] | str | int | np.integer,
        condition: Any = None,
        *,
        method: str = "auto",
    ) -> "given.Marginal":
        """The density of some columns, the others integrated out: its `log_prob` and `sample`.

        Args:
            columns: names or numbers of columns.
            condition: the condition, if the density has one.
            method: "quadrature" over one or two numeric columns, "sampling", or "auto" for quadrature if possible.
        """
        from ddnf.density import given

        return given.marginal(self, columns, condition, method=method)

    def sample_given(self, values: Mapping[Any, Any], key: PRNGKeyArray, n: int, condition: Any = None) -> Any:
        """n draws of all columns given the values of some, such as {"a": 1.0}; warns if they cannot be trusted.

        The draws are exact if only categories are given. Otherwise, one MCMC chain per draw starts from an importance
        draw from a mixture of Gaussians, which is fitted to draws of the density. `ddnf.density.given.sample_given`
        also returns diagnostics.
        """
        from ddnf.density import given

        return given.sample_given(self, values, key, n, condition).draws

    def probability(
        self, box: Mapping[Any, Any], key: PRNGKeyArray, n: int = 100_000, condition: Any = None
    ) -> "queries.Estimate":
        """The probability of a box, such as {"a": (0, 1), "b": (None, 5), "kind": ["x", "y"]}, and its error."""
        from ddnf.density import queries

        return queries.probability(self, key, box, n, condition)

    def rank(self, x: Any, key: PRNGKeyArray, condition: Any = None, *, n: int = 1000) -> Float[np.ndarray, "*batch"]:
        """For each row, the share of n draws that are less likely than the row; near 0 for outliers."""
        from ddnf.density import queries

        return queries.rank(self, key, x, condition, n=n)

    def pit(
        self, x: Any, key: PRNGKeyArray, condition: Any = None, *, n: int = 200
    ) -> Float[np.ndarray, "rows numbers"]:
        """Probability integral transform: the position of each number among n draws given its condition.

        If the density is correct, the values of each column are uniform from 0 to 1.
        """
        from ddnf.density import queries

        return queries.pit(self, key, x, condition, n=n)

    def calibration(self, x: Any, key: PRNGKeyArray, condition: Any = None, *, n: int = 200) -> "queries.Calibration":
        """How often held-out rows lie in central intervals, and a test of their PIT values."""
        from ddnf.density import queries

        return queries.calibration(self, key, x, condition, n=n)

    def plot(
        self,
        key: PRNGKeyArray,
        table: Any = None,
        *,
        columns: Sequence[str | int] | None = None,
        condition: Any = None,
    ) -> Any:
        """A Matplotlib figure of pairs of columns: the rows of a table together with draws.

        Args:
            key: random key of the draws.
            table: rows to compare with the draws; None to show only draws.
            columns: names or numbers of columns; None for the first six.
            condition: the condition, if the density has one.
        """
        from ddnf.density import plots

        return plots.plot_pairs(self, key, table, columns=columns, condition=condition)

    def save(self, path: str | PathLike, *, overwrite: bool = False) -> None:
        """Writes the fit to one file; see `ddnf.load`. Replaces a model, and any other file only with `overwrite`."""
        from ddnf.storage.models import save

        save(path, self, overwrite=overwrite)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies: describes the flow as in a file, because FlowJAX's layers contain local functions."""
        from ddnf.storage.description import describe
        from ddnf.storage.file import pack

        try:
            return self.__dict__ | dict(flow=(describe(self.flow), pack(self.flow)))
        except ValueError:  # a flow of the user's own
            return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        from ddnf.storage.description import restore

        is_described = isinstance(state["flow"], tuple)
        self.__dict__.update(state | dict(flow=restore(*state["flow"])) if is_described else state)

    def _real_log_prob(self, x, condition, mesh):
        is_inside = inside(self.columns, x).all(axis=-1)
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        centre = from_real(self.columns, self.mean)
        x = xp.where(is_inside[..., None], x, xp.asarray(centre))
        real, log_det = to_real(self.columns, x)
        u = jnp.asarray(likelihood.standardize(self.mean, self.scale, real), jnp.result_type(float))
        log_det = jnp.asarray(log_det - np.sum(np.log(np.diag(self.scale))), u.dtype)
        model = likelihood.Model(self.flow, self.base)
        return jnp.where(jnp.asarray(is_inside), likelihood.log_probs(model, u, condition, mesh) + log_det, -jnp.inf)

    def _integer_log_prob(self, flat, given, mesh):
        if not any(column.integer for column in self.columns):
            return self._real_log_prob(flat, given, mesh)
        noise = likelihood.even_noise(self.columns, _INTEGER_POINTS).astype(flat.dtype)
        values = jnp.stack([self._real_log_prob(flat + shift, given, mesh) for shift in noise])
        mean = jax.nn.logsumexp(values, axis=0) - np.log(_INTEGER_POINTS)
        return jnp.where(_has_integers(self.columns, flat), mean, -jnp.inf)

    def given_rows(self, condition: Any, codes: Any, shape: tuple[int, ...]) -> Any:
        """All conditions as numbers, one row for each: levels of the categories, and then the user's own."""
        own = None if self.condition_dim is None else len(self.condition_mean)  # pyright: ignore
        if (condition is None) != (own is None):
            wanted = "no condition" if own is None else f"a condition of {self.condition_dim} numbers"
            raise ValueError(f"Expected {wanted}; got {'none' if condition is None else 'one'}.")
        if codes is not None and self.categories is not None:
            return one_hot(codes, self.categories.sizes).reshape(-1, sum(self.categories.sizes))
        if own is None:
            return None
        condition = rows_of.table(condition, own, "condition")
        if not isinstance(condition, Tracer) and not np.isfinite(condition).all():
            raise ValueError("Expected finite conditions; got NaN or infinity.")
        wanted = (*shape, own)
        if condition.ndim > len(wanted) or any(
            a not in (1, b) for a, b in zip(condition.shape[::-1], wanted[::-1], strict=False)
        ):
            raise ValueError(f"Expected conditions of shape {wanted}; got {condition.shape}.")
        xp: Any = jnp if isinstance(condition, Tracer) else np
        return xp.broadcast_to(condition, wanted).reshape(-1, own)

    def standardized(self, given: Any) -> Any:
        """All conditions as the flow takes them, from all conditions as numbers."""
        return jnp.asarray((given - self.condition_mean) / self.condition_scale, jnp.result_type(float))


def _has_integers(columns, x):
    """Which rows have integers in all integer columns."""
    integer = np.array([column.integer for column in columns])
    return jnp.asarray(((x == (np if isinstance(x, np.ndarray) else jnp).floor(x)) | ~integer).all(axis=-1))
