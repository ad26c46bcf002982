"""Densities in one call: a flow fitted to the rows of a table by maximum likelihood."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection, Invert
from flowjax.distributions import StandardNormal, Transformed
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.density import rows as rows_of
from ddnf.density.columns import Column, Spec, columns_from, from_real, inside, to_real
from ddnf.flow.bijection import DDNF
from ddnf.flow.folds import folded_share, reverse
from ddnf.flow.parts import as_exact
from ddnf.flow.random import generator, normals
from ddnf.training import loop as train

# Points in [0, 1) at which the density of an integer's interval is averaged.
_INTEGER_POINTS = 64


@dataclasses.dataclass(frozen=True)
class Density:
    """A fitted density p(x), or p(x | condition).

    Attributes:
        flow: the bijection from a standard normal to standardized rows.
        columns: the support of each column.
        mean, scale: of the rows in unbounded space; `scale` is a triangular matrix.
        condition_mean, condition_scale: of the conditions; None without.
        log_likelihood: mean log-likelihood of the held-out rows, exact.
        train_log_likelihood: the same of the training rows.
        losses, values: negative log-likelihood in training and on the held-out rows over the course of training.
        seconds: wall time of each stretch of training between two looks at the held-out rows; the first compiles.
        names: of the columns and then of the conditions, where they are known.
        complaints: what was found wrong with the fit, each with what to do; empty if nothing was.
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
    complaints: tuple[str, ...] = ()

    @property
    def dim(self) -> int:
        return len(self.columns)

    @property
    def condition_dim(self) -> int | None:
        return None if self.condition_mean is None else len(self.condition_mean)

    def log_prob(self, x: Any, condition: Any = None) -> Float[Array, "*batch"]:
        """The exact log density at rows (..., dim); -inf outside of the support.

        With integer columns it is the log probability of the integers, the density integrated over the unit interval
        of each by 64 points: an estimate, the same at each call.
        """
        x = rows_of.table(x, self.dim, "x")
        flat = x.reshape(-1, self.dim)
        given = self._conditions(condition, x.shape[:-1])
        if not any(column.integer for column in self.columns):
            return self._real_log_prob(flat, given).reshape(x.shape[:-1])
        noise = _spread(self.columns, _INTEGER_POINTS).astype(flat.dtype)
        values = jnp.stack([self._real_log_prob(flat + shift, given) for shift in noise])
        whole = _whole(self.columns, flat)
        value = jnp.where(whole, jax.nn.logsumexp(values, axis=0) - np.log(_INTEGER_POINTS), -jnp.inf)
        return value.reshape(x.shape[:-1])

    def sample(self, key: PRNGKeyArray, n: int | None = None, condition: Any = None) -> Float[np.ndarray, "n dim"]:
        """n draws; with a condition (c,) n draws given it, with conditions (n, c) one draw for each."""
        if n is None:
            n = 1000 if condition is None or np.ndim(condition) < 2 else len(condition)
        if not rows_of.is_integer(n) or n < 1:
            raise ValueError(f"Expected at least 1 draw; got {n}.")
        u = _sample(self.flow, key, n, self._conditions(condition, (n,)))
        # On the host and in double precision: far from the origin single precision has wide steps.
        return from_real(self.columns, self.mean + np.asarray(u, float) @ self.scale.T)

    def save(self, path: str | PathLike) -> None:
        """Writes the fit to one file; see `ddnf.load`."""
        from ddnf.storage.models import save

        save(path, self)

    def _real_log_prob(self, x, condition):
        is_inside = inside(self.columns, x).all(axis=-1)
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        middle = from_real(self.columns, self.mean)
        x = xp.where(is_inside[..., None], x, xp.asarray(middle))
        real, log_det = to_real(self.columns, x)
        u = jnp.asarray(_standardized(self.mean, self.scale, real), jnp.result_type(float))
        log_det = jnp.asarray(log_det - np.sum(np.log(np.diag(self.scale))), u.dtype)
        return jnp.where(jnp.asarray(is_inside), _log_prob(self.flow, u, condition) + log_det, -jnp.inf)

    def _conditions(self, condition, shape):
        if (condition is None) != (self.condition_dim is None):
            wanted = "no condition" if self.condition_dim is None else f"a condition of {self.condition_dim} numbers"
            raise ValueError(f"Expected {wanted}; got {'none' if condition is None else 'one'}.")
        if condition is None:
            return None
        assert self.condition_dim is not None
        condition = rows_of.table(condition, self.condition_dim, "condition")
        if not isinstance(condition, Tracer) and not np.isfinite(condition).all():
            raise ValueError("Expected finite conditions; got NaN or infinity.")
        wanted = (*shape, self.condition_dim)
        if condition.ndim > len(wanted) or any(
            a not in (1, b) for a, b in zip(condition.shape[::-1], wanted[::-1], strict=False)
        ):
            raise ValueError(f"Expected conditions of shape {wanted}; got {condition.shape}.")
        assert self.condition_mean is not None and self.condition_scale is not None
        standard = jnp.asarray((condition - self.condition_mean) / self.condition_scale, jnp.result_type(float))
        return jnp.broadcast_to(standard, wanted).reshape(-1, self.condition_dim)


# Beyond so many dimensions, covariances are diagonal.
LARGEST_FULL = 128


def fit_density(
    key: PRNGKeyArray,
    x: Any,
    condition: Any = None,
    *,
    flow: AbstractBijection | None = None,
    support: Spec | Sequence[Spec] | Mapping[int, Spec] | None = None,
    validation: float | Any = 0.1,
    steps: int = 5000,
    batch: int = 256,
    learning_rate: float = 5e-3,
    patience: int = 10,
    checkpoint: str | PathLike | None = None,
    progress: bool = True,
) -> Density:
    """Fits a flow to the rows of a table by maximum likelihood, and stops when held-out rows get no likelier.

    Bounded columns go to unbounded space (logarithm or logit), integers get uniform noise in each step; then rows are
    standardized by their mean and covariance. The flow is trained in the direction from the data to the normal, which
    costs no inverse; `sample` inverts it exactly.

    Args:
        key: random key.
        x: rows, an array (n, dim) of numbers.
        condition: what the density is conditioned on, (n, condition_dim).
        flow: a bijection from a standard normal to standardized rows, with the condition's `cond_shape`.
        support: where columns live: "real", "positive", "unit", "integer", "count" or (low, high); one for all, a list,
            or a dict from column numbers.
        validation: share of the rows to hold out; or the number of them.
        steps: most training steps.
        batch: rows for each step.
        learning_rate: of Adam, at its height.
        patience: stop after so many looks at the held-out rows, one every 100 steps or more, without a better value.
        checkpoint: folder to resume from, should the run be interrupted.
        progress: whether to show a bar.

    Rows that repeat are allowed, but a density of repeated values has no bound: a warning says so.

    Example:
        >>> import ddnf, jax.random as jr, numpy as np
        >>> x = np.random.default_rng(0).gamma(2.0, size=(500, 2))
        >>> density = ddnf.fit_density(jr.key(0), x, support="positive", steps=200, progress=False)
        >>> density.log_prob(x).shape, density.sample(jr.key(1), 10).shape
        ((500,), (10, 2))
        >>> float(density.log_prob([-1.0, 1.0]))
        -inf
    """
    rows_of.check_numbers(dict(steps=steps, batch=batch, patience=patience), learning_rate)
    rows = rows_of.finite_rows(x, "x")
    columns = columns_from(support, rows.shape[1])
    rows_of.check_rows(rows, columns)
    given = None if condition is None else rows_of.conditions(condition, len(rows))
    order = generator(key).permutation(len(rows))
    held = rows_of.held_out(validation, len(rows))
    noise = generator(jr.fold_in(key, 1)).uniform(size=rows.shape) * [column.integer for column in columns]
    mean, scale = _moments(to_real(columns, rows + noise)[0][order[held:]])
    spread = None if given is None else (given.mean(axis=0), np.maximum(given.std(axis=0), 1e-12))
    flow_key, fit_key = jr.split(key)
    if flow is None:
        flow = default_flow(flow_key, rows.shape[1], None if given is None else given.shape[1])
    _check_flow(flow, rows.shape[1], None if given is None else given.shape[1])
    loss = _Likelihood(columns, jnp.asarray(mean), jnp.asarray(scale))
    data = loss.prepared(rows, given, spread)

    def pick(part):
        return jax.tree.map(lambda a: a[part], data)

    result = train.fit(
        fit_key,
        flow,
        loss,
        steps=steps,
        optimizer=train.adam(learning_rate, steps),
        data=pick(order[held:]),
        batch=batch,
        validate=loss.held_out,
        held_out=pick(order[:held]),
        chunk=max(100, min(1000, (len(rows) - held) // batch)),
        patience=patience,
        checkpoint=checkpoint,
        progress=progress,
        description="density",
    )
    final = as_exact(result.parameters)
    course = result.losses, result.values, result.seconds
    fitted = Density(final, columns, mean, scale, *(spread or (None, None)), 0.0, 0.0, *course)
    chosen = [order[:held], order[held:][:10_000]]
    likelihoods = [_mean_log_prob(fitted, rows[c], None if given is None else given[c]) for c in chosen]
    few = pick(order[: min(held, 500)])
    u, _ = loss.standardize(few[0], _spread(columns, len(few[0])))
    complaints = _complaints(likelihoods[0], folded_share(reverse(final), u, few[1]))
    for complaint in complaints:
        warnings.warn(complaint, RuntimeWarning, stacklevel=2)
    return dataclasses.replace(
        fitted, log_likelihood=likelihoods[0], train_log_likelihood=likelihoods[1], complaints=complaints
    )


class _Likelihood(eqx.Module):
    """Minus the mean log-likelihood, in standardized space and without the constant of the standardization."""

    columns: tuple[Column, ...] = eqx.field(static=True)
    mean: Array
    scale: Array

    def prepared(self, rows, given, spread):
        """Rows as the loss takes them: standardized already, unless integers need new noise in each step."""
        dtype = jnp.result_type(float)
        if not self._has_integers:
            rows = _standardized(np.asarray(self.mean), np.asarray(self.scale), to_real(self.columns, rows)[0])
        given = None if given is None else jnp.asarray((given - spread[0]) / spread[1], dtype)
        return jnp.asarray(rows, dtype), given

    def __call__(self, flow, draw: train.Draw):
        rows, given = draw.rows
        noise = jr.uniform(draw.key, rows.shape, rows.dtype) if self._has_integers else None
        rows, log_det = self.standardize(rows, noise)
        return -jnp.mean(_log_prob(flow, rows, given) + log_det)

    def held_out(self, flow, data):
        rows, given = data
        rows, log_det = self.standardize(rows, _spread(self.columns, len(rows)))
        return -jnp.mean(_log_prob(flow, rows, given) + log_det)

    def standardize(self, rows, noise):
        """Prepared rows in standardized space, integers with noise; and the log-determinant of what was left to do."""
        if not self._has_integers:
            return rows, 0.0
        integer = np.array([column.integer for column in self.columns])
        real, log_det = to_real(self.columns, rows + jnp.asarray(noise * integer, rows.dtype))
        return _standardized(self.mean, self.scale, real), log_det

    @property
    def _has_integers(self):
        return any(column.integer for column in self.columns)


def default_flow(
    key: PRNGKeyArray,
    dim: int,
    condition_dim: int | None = None,
    *,
    blocks: int = 8,
    steps: int = 2,
    hidden: Sequence[int] | None = None,
    activation: str = "softplus",
) -> AbstractBijection:
    """The flow that `fit_density` takes where none is given: trained from the data to the normal, hence inverted.

    Its weights are bounded, so that it can't fold: a flow that is free to, may in long training.
    """
    if hidden is None:
        hidden = (64, 64) if dim <= 3 else (64, 8, 64)
    return Invert(
        DDNF(
            key,
            dim,
            blocks=blocks,
            steps=steps,
            hidden=hidden,
            condition_dim=condition_dim,
            activation=activation,
            lipschitz=0.97,
        )
    )


def _standardized(mean, scale, real):
    if isinstance(real, np.ndarray):
        from scipy.linalg import solve_triangular

        return solve_triangular(np.asarray(scale), (real - np.asarray(mean)).T, lower=True).T
    return jax.scipy.linalg.solve_triangular(jnp.asarray(scale, real.dtype), (real - mean).T, lower=True).T


def _moments(real):
    """Mean and Cholesky factor of the covariance, drawn towards its diagonal where rows are few."""
    n, dim = real.shape
    covariance = np.atleast_2d(np.cov(real.T))
    share = 1.0 if dim > LARGEST_FULL else min(1.0, 1e-6 + dim / (n + dim) * (n < 10 * dim))
    covariance = (1 - share) * covariance + share * np.diag(np.diag(covariance))
    return real.mean(axis=0), np.linalg.cholesky(covariance)


def _spread(columns, count):
    """Points in [0, 1) for each integer column, evenly spread in all of them together; 0 for the others."""
    roots = np.sqrt([2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0, 23.0, 29.0])
    steps = np.array([roots[i % 10] * (1 + i // 10) for i in range(len(columns))])
    return ((np.arange(1, count + 1)[:, None] * steps + 0.5) % 1.0) * np.array([c.integer for c in columns])


@eqx.filter_jit
def _log_prob(flow, u, condition):
    distribution = Transformed(StandardNormal(flow.shape), flow)
    if condition is None:
        return jax.vmap(distribution.log_prob)(u)
    return jax.vmap(distribution.log_prob)(u, condition)


@eqx.filter_jit
def _sample(flow, key, n, condition):
    x = normals(key, n, flow.shape)
    return jax.vmap(flow.transform)(x) if condition is None else jax.vmap(flow.transform)(x, condition)


def _mean_log_prob(density, rows, given):
    return float(jnp.mean(density.log_prob(rows, given)))


def _whole(columns, x):
    """Which rows have integers where there should be some."""
    integer = np.array([column.integer for column in columns])
    return jnp.asarray(((x == (np if isinstance(x, np.ndarray) else jnp).floor(x)) | ~integer).all(axis=-1))


def _check_flow(flow, dim, condition_dim):
    if not isinstance(flow, AbstractBijection):
        raise ValueError(f"Expected flow to be a FlowJAX bijection such as ddnf.DDNF; got {type(flow).__name__}.")
    wanted = (dim,), (None if condition_dim is None else (condition_dim,))
    if (flow.shape, flow.cond_shape) != wanted:
        raise ValueError(
            f"Expected a flow of shape {wanted[0]} and condition {wanted[1]}; got {flow.shape}, {flow.cond_shape}."
        )


def _complaints(log_likelihood: float, folded: float) -> tuple[str, ...]:
    found = []
    if folded:
        found.append(
            f"The flow folds in {folded:.2g} of the cells on held-out rows: its densities are wrong there. Use more "
            "steps for each field, flow=Invert(ddnf.DDNF(..., steps=8)), or a guarantee, ddnf.DDNF(..., lipschitz=0.9)."
        )
    if not np.isfinite(log_likelihood):
        found.append(
            "The held-out rows have no finite likelihood: the fit has failed. Look for outliers, lower learning_rate, "
            "or use float64."
        )
    return tuple(found)
