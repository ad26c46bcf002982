"""A fitted density: its log density, draws, and what is known about the fit."""

import dataclasses
import warnings
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.density import likelihood
from ddnf.density import rows as rows_of
from ddnf.density.columns import Column, from_real, inside, to_real
from ddnf.density.mixture import Mixture
from ddnf.system.checks import check_count, check_key

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
            is cross-fitted, so that no row judges a decision in which it had a say (`ddnf.density.holdout`).
        train_log_likelihood: mean log-likelihood of the training rows.
        losses, values: negative log-likelihood in training and on the held-out rows after each chunk of training.
        seconds: wall time of each chunk of training; the first includes compilation.
        names: of the columns and then of the conditions, where they are known.
        issues: what is wrong with the table or the fit, each with what to do; empty if nothing was found.
        log_likelihood_error: standard error of `log_likelihood`.
        train_rows, held_out_rows: number of rows of each.
        base: the mixture of Gaussians that the flow starts from; None for a standard normal.
        is_trained: False if training did not make held-out rows likelier: then this is the mixture before training.
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

    def __repr__(self) -> str:
        names = self.names or [str(i) for i in range(self.dim + (self.condition_dim or 0))]
        shown = [f"{n}: {c}" for n, c in zip(names[: min(self.dim, 8)], self.columns, strict=False)]
        shown += ["..."] * (self.dim > 8)
        given = "" if self.condition_dim is None else f" given {', '.join(names[self.dim :][:8])}"
        lines = [
            f"Density of {self.dim} columns ({', '.join(shown)}){given}",
            f"  {self._kind()}, fitted to {self.train_rows} rows",
            f"  log-likelihood {self.describe_likelihood()}",
            *(f"  issue: {issue}" for issue in self.issues),
        ]
        return "\n".join(lines)

    def _kind(self) -> str:
        if self.base is None:
            return "a flow"
        base = f"a mixture of {len(self.base.logits)} Gaussians" if len(self.base.logits) > 1 else "a Gaussian"
        return f"a flow from {base}" if self.is_trained else f"{base}, which no flow improved on held-out rows"

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
        noise = likelihood.even_noise(self.columns, _INTEGER_POINTS).astype(flat.dtype)
        values = jnp.stack([self._real_log_prob(flat + shift, given) for shift in noise])
        mean = jax.nn.logsumexp(values, axis=0) - np.log(_INTEGER_POINTS)
        return jnp.where(_has_integers(self.columns, flat), mean, -jnp.inf).reshape(x.shape[:-1])

    def sample(self, key: PRNGKeyArray, n: int | None = None, condition: Any = None) -> Float[np.ndarray, "n dim"]:
        """n draws; with a condition (c,) n draws given it, with conditions (n, c) one draw for each."""
        if n is None:
            n = 1000 if condition is None or np.ndim(condition) < 2 else len(condition)
        check_key(key)
        check_count(n=n)
        u = likelihood.sample(likelihood.Model(self.flow, self.base), key, n, self._conditions(condition, (n,)))
        # On the host and in double precision: far from the origin single precision has wide steps.
        return from_real(self.columns, self.mean + np.asarray(u, float) @ self.scale.T)

    def save(self, path: str | PathLike, *, overwrite: bool = False) -> None:
        """Writes the fit to one file; see `ddnf.load`. Replaces a model; any other file only with `overwrite`."""
        from ddnf.storage.models import save

        save(path, self, overwrite=overwrite)

    def _real_log_prob(self, x, condition):
        is_inside = inside(self.columns, x).all(axis=-1)
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        centre = from_real(self.columns, self.mean)
        x = xp.where(is_inside[..., None], x, xp.asarray(centre))
        real, log_det = to_real(self.columns, x)
        u = jnp.asarray(likelihood.standardize(self.mean, self.scale, real), jnp.result_type(float))
        log_det = jnp.asarray(log_det - np.sum(np.log(np.diag(self.scale))), u.dtype)
        model = likelihood.Model(self.flow, self.base)
        return jnp.where(jnp.asarray(is_inside), likelihood.log_probs(model, u, condition) + log_det, -jnp.inf)

    def _conditions(self, condition, shape):
        """Standardized conditions, one for each row."""
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


def _has_integers(columns, x):
    """Which rows have integers in all integer columns."""
    integer = np.array([column.integer for column in columns])
    return jnp.asarray(((x == (np if isinstance(x, np.ndarray) else jnp).floor(x)) | ~integer).all(axis=-1))
