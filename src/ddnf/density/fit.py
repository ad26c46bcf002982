"""Densities in one call: a flow fitted to the rows of a table by maximum likelihood."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection, Invert
from jaxtyping import PRNGKeyArray

from ddnf.density import holdout, likelihood
from ddnf.density import rows as rows_of
from ddnf.density.columns import Spec, columns_from, to_real
from ddnf.density.issues import find_issues
from ddnf.density.result import Density
from ddnf.flow.bijection import DDNF
from ddnf.flow.folds import folded_share, reverse
from ddnf.flow.parts import as_exact
from ddnf.flow.random import generator
from ddnf.system.checks import check_count, check_key
from ddnf.training import loop as train

_MOST_JUDGED = 10_000  # training rows whose likelihood is reported
_FOLD_ROWS = 500


def fit_density(
    key: PRNGKeyArray,
    x: Any,
    condition: Any = None,
    *,
    flow: AbstractBijection | None = None,
    support: Spec | Sequence[Spec] | Mapping[int, Spec] | None = None,
    names: Sequence[str] | None = None,
    validation: float | Any = 0.1,
    steps: int = 5000,
    batch: int = 256,
    learning_rate: float = 5e-3,
    patience: int = 10,
    checkpoint: str | PathLike | None = None,
    progress: bool = True,
) -> Density:
    """Fits a flow to the rows of a table by maximum likelihood, and stops when held-out rows get no likelier.

    Bounded columns are mapped to unbounded space (logarithm or logit), integers get uniform noise in each step; then
    rows are standardized by their mean and covariance. The flow is trained in the direction from the data to the
    normal, which needs no inverse; `sample` inverts it exactly.

    Tied values, columns that are exact linear functions of others and extreme values make likelihoods meaningless or
    unstable. Each is found per column, warned about, and listed in `issues` of the result.

    Args:
        key: random key.
        x: rows, an array (n, dim) of numbers.
        condition: what the density is conditioned on, (n, condition_dim).
        flow: a bijection from a standard normal to standardized rows, with the condition's `cond_shape`.
        support: support of the columns: "real", "positive", "unit", "integer", "count" or (low, high); one for all, a
            list, or a dict from column numbers.
        names: of the columns and then of the conditions, for messages and for the result.
        validation: rows to hold out for early stopping and for the reported likelihood: a share (of at most 20,000
            rows), or a number of rows.
        steps: largest number of training steps.
        batch: rows per step.
        learning_rate: peak learning rate of Adam.
        patience: stop after so many validations without improvement; there is one every 100 steps or more.
        checkpoint: folder for checkpoints; a run found there is resumed.
        progress: whether to show a progress bar.

    Example:
        >>> import ddnf, jax.random as jr, numpy as np
        >>> x = np.random.default_rng(0).gamma(2.0, size=(500, 2))
        >>> density = ddnf.fit_density(jr.key(0), x, support="positive", steps=200, progress=False)
        >>> density.log_prob(x).shape, density.sample(jr.key(1), 10).shape
        ((500,), (10, 2))
        >>> float(density.log_prob([-1.0, 1.0]))
        -inf
    """
    check_key(key)
    check_count(steps=steps, batch=batch, patience=patience)
    rows_of.check_rate(learning_rate)
    rows = rows_of.finite_rows(x, "x")
    columns = columns_from(support, rows.shape[1])
    rows_of.check_rows(rows, columns)
    given = None if condition is None else rows_of.conditions(condition, len(rows))
    given_dim = None if given is None else given.shape[1]
    names = rows_of.check_names(names, rows.shape[1] + (given_dim or 0))
    held = holdout.held_out_count(validation, len(rows))
    flow_key, fit_key = jr.split(key)
    flow = default_flow(flow_key, rows.shape[1], given_dim) if flow is None else flow
    _check_flow(flow, rows.shape[1], given_dim)
    issues = find_issues(rows, columns, names)
    _warn(issues)

    order = generator(key).permutation(len(rows))
    noise = generator(jr.fold_in(key, 1)).uniform(size=rows.shape) * [column.integer for column in columns]
    mean, scale = likelihood.moments(to_real(columns, rows + noise)[0][order[held:]])
    spread = (None, None) if given is None else (given.mean(axis=0), np.maximum(given.std(axis=0), 1e-12))
    loss = likelihood.NegativeLogLikelihood(columns, jnp.asarray(mean), jnp.asarray(scale))
    data = loss.prepare(rows, given, spread)

    def pick(chosen):
        return jax.tree.map(lambda a: a[chosen], data)

    result = train.fit(
        fit_key,
        flow,
        loss,
        steps=steps,
        optimizer=train.adam(learning_rate, steps),
        data=pick(order[held:]),
        batch=batch,
        validate=loss.validate,
        held_out=pick(order[:held]),
        chunk=max(100, min(1000, (len(rows) - held) // batch)),
        patience=patience,
        checkpoint=checkpoint,
        progress=progress,
        description="density",
    )
    course = result.losses, result.values[:, 0], result.seconds
    fitted = Density(as_exact(result.parameters), columns, mean, scale, *spread, np.nan, np.nan, *course, names)
    fitted = _judged(fitted, rows, given, order, held, result.values[:, 1:])
    few = pick(order[: min(held, _FOLD_ROWS)])
    u, _ = loss.standardize(few[0], likelihood.even_noise(columns, len(few[0])))
    found = _issues_of_fit(fitted.log_likelihood, folded_share(reverse(fitted.flow), u, few[1]))
    _warn(found)
    return dataclasses.replace(fitted, issues=issues + found)


def _judged(density: Density, rows, given, order, held: int, parts) -> Density:
    """The same density with its likelihoods: held-out rows by cross-fitting, and some of the training rows."""

    def log_probs(chosen):
        return np.asarray(density.log_prob(rows[chosen], None if given is None else given[chosen]), float)

    held_out, training = log_probs(order[:held]), log_probs(order[held:][:_MOST_JUDGED])
    with np.errstate(invalid="ignore"):  # infinite values have no standard error
        error = float(held_out.std(ddof=1) / np.sqrt(held)) if held > 1 else float("nan")
    sizes = np.bincount(holdout.part_numbers(held)).astype(float)
    optimism = holdout.optimism(np.asarray(parts, float), sizes)
    return dataclasses.replace(
        density,
        log_likelihood=float(held_out.mean()) - (0.0 if np.isnan(optimism) else optimism),
        log_likelihood_error=error,
        train_log_likelihood=float(training.mean()),
        train_rows=len(order) - held,
        held_out_rows=held,
    )


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
    """The flow that `fit_density` uses by default: trained from the data to the normal, hence inverted.

    Its weights are bounded, so that it cannot fold: without bounds it may, in long training.
    """
    if hidden is None:
        hidden = (64, 64) if dim <= 3 else (64, 8, 64)
    if isinstance(hidden, str) or not isinstance(hidden, Sequence):
        raise ValueError(f"Expected hidden to be a sequence of widths, such as (64, 64); got {hidden!r}.")
    return Invert(
        DDNF(
            key,
            dim,
            blocks=blocks,
            steps=steps,
            hidden=tuple(hidden),
            condition_dim=condition_dim,
            activation=activation,
            lipschitz=0.97,
        )
    )


def _check_flow(flow, dim, condition_dim):
    if not isinstance(flow, AbstractBijection):
        raise ValueError(f"Expected flow to be a FlowJAX bijection such as ddnf.DDNF; got {type(flow).__name__}.")
    wanted = (dim,), (None if condition_dim is None else (condition_dim,))
    if (flow.shape, flow.cond_shape) != wanted:
        raise ValueError(
            f"Expected a flow of shape {wanted[0]} and condition {wanted[1]}; got {flow.shape}, {flow.cond_shape}."
        )


def _issues_of_fit(log_likelihood: float, folded: float) -> tuple[str, ...]:
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


def _warn(issues: Sequence[str]) -> None:
    for issue in issues:
        warnings.warn(issue, RuntimeWarning, stacklevel=3)
