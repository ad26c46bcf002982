"""Densities in one call: a flow fitted to the rows of a table by maximum likelihood."""

import dataclasses
import warnings
from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection, Identity
from jaxtyping import PRNGKeyArray

from ddnf.density import holdout, likelihood
from ddnf.density import rows as rows_of
from ddnf.density.again import fit_again
from ddnf.density.columns import Support, outside
from ddnf.density.default import FEW_ROWS, plan
from ddnf.density.disk import IN_MEMORY, DiskTable, on_disk, open_rows
from ddnf.density.encode import encode_rows
from ddnf.density.issues import find_issues
from ddnf.density.prepare import prepare
from ddnf.density.problem import Problem, Schedule, split_table
from ddnf.density.result import Density
from ddnf.density.start import MOST_ROWS, Start, start
from ddnf.density.stream import WINDOW, ShuffledRows, Survey, survey, training_stream
from ddnf.flow.folds import folded_share, reverse
from ddnf.flow.parts import as_exact, ddnf_parts
from ddnf.flow.random import generator
from ddnf.system.checks import check_count, check_key
from ddnf.training import loop as train

_FOLD_ROWS = 500


def fit_density(
    key: PRNGKeyArray,
    x: Any,
    condition: Any = None,
    *,
    flow: AbstractBijection | None = None,
    adaptive: bool | None = None,
    components: int | None = None,
    support: Support = None,
    names: Sequence[str] | None = None,
    missing: str = "raise",
    validation: float | Any = 0.1,
    steps: int | None = None,
    batch: int = 256,
    learning_rate: float | None = None,
    patience: int = 10,
    checkpoint: str | PathLike | None = None,
    devices: train.Devices = None,
    progress: bool = True,
) -> Density:
    """Fits a flow to the rows of a table by maximum likelihood, with early stopping on held-out rows.

    Bounded columns are mapped to unbounded space (logarithm or logit), and integers get uniform noise in each step.
    Each column is then transformed by a monotone spline, rows are whitened, and a flow maps them to a mixture of
    Student's t distributions. With a condition, a linear regression on it comes first. Splines start from quantiles
    and the mixture from expectation maximization; all parts are trained together. The best state on held-out rows is
    returned, which may be the start, so it is no worse there than a Gaussian or the mixture.
    For tables with fewer than 5,000 rows and up to 16 columns, without categories or conditions, held-out rows choose
    the number of training steps, and a second fit uses all rows. With fewer than 70 held-out rows, this choice uses
    cross-validation.
    The flow is trained in the direction from data to base, which needs no inverse; `sample` inverts it exactly. A
    custom `flow` is fitted to rows that are only whitened.

    pandas and polars data frames and dicts of columns may also contain text, categories, booleans, dates and times.
    For categories c and numbers x, the density is p(c) p(x | c), with p(c) from smoothed counts. Columns of an integer
    type and dates without a time are integers unless `support` says otherwise. Draws are returned as the same kind of
    table.

    Tied values, columns that are exact linear functions of others, and extreme values make likelihoods meaningless or
    unstable. They are detected per column, reported as warnings, and listed in the `issues` of the result.

    Args:
        key: random key.
        x: the rows: an array (n, dim) of numbers, a pandas or polars data frame, or a dict of columns. Or rows on disk:
            a .npy or .parquet file, a folder of .parquet files, a NumPy memory map, or a PyArrow dataset. Files larger
            than 128 MB are not read into memory.
        condition: what to condition on: an array (n, condition_dim), a frame, or names of columns of `x`.
        flow: a bijection from a standard normal to standardized rows, with a `cond_shape` that matches the condition.
        adaptive: whether trained splines transform the columns first, and the flow starts from a mixture. None: only
            with the default flow.
        components: number of components of the mixture; None to choose it by held-out rows (1 with a condition).
        support: support of the columns: "real", "positive", "unit", "integer", "count" or (low, high); one for all, a
            list, or a dict from column numbers or names.
        names: names of the columns of an array, then of the conditions, for messages and the result.
        missing: "raise" or "drop" for rows with missing values.
        validation: rows to hold out for early stopping and for the reported likelihood: a share (of at most 20,000
            rows), or a number of rows.
        steps: maximum number of training steps; None for 2,000 to 5,000, depending on the number of rows, and fewer
            for some tables with more than 16 columns and few rows.
        batch: rows per step.
        learning_rate: peak learning rate of Adam; None for 5e-3, or 2e-3 for the default flow of many columns.
        patience: stop after this many validations without improvement. Validations are at least 100 steps apart.
        checkpoint: folder for checkpoints; an interrupted run resumes from there.
        devices: the devices that share the rows of each step: "all", a number, or a mesh with one axis. None for JAX's
            default device. The result agrees with that of one device up to rounding.
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
    check_count(steps=steps, batch=batch, patience=patience, components=components)
    x, condition, disk = _from_disk(key, x, condition, validation, missing)
    table = prepare(x, condition, support=support, names=names, missing=missing)
    rows, given = table.rows, table.given
    given_dim = None if given is None else given.shape[1]
    count = len(rows) if disk is None else disk.row_count
    held = holdout.held_out_count(validation, count)
    adaptive = flow is None if adaptive is None else adaptive
    flow_key, fit_key = jr.split(key)
    planned = plan(flow_key, count, rows.shape[1], given_dim, flow=flow, batch=batch)
    flow = planned.flow
    learning_rate = planned.learning_rate if learning_rate is None else learning_rate
    rows_of.check_rate(learning_rate)
    steps = planned.steps if steps is None else steps
    _check_flow(flow, rows.shape[1], given_dim)
    issues = find_issues(rows, table.columns, table.number_names)
    _warn(issues)

    problem = split_table(key, table, held, adaptive=adaptive, penalty=planned.penalty)
    if adaptive and isinstance(flow, Identity) and count < FEW_ROWS:
        problem = problem.filled()
    begin = Start(likelihood.Model(flow), np.empty((0, held)), None)
    if adaptive:
        # The mixture does not depend on the condition: several components would be those of the marginal density.
        components = 1 if components is None and given is not None else components
        tables = problem.standard, np.asarray(problem.u, float)
        known = None if given is None else (np.asarray(problem.training[1]), np.asarray(problem.held_out[1]))
        begin = start(generator(jr.fold_in(key, 2)), flow, *tables, given=known, components=components)
    chunk = max(100, min(1000, (count - held) // batch))
    if disk is not None:
        problem = disk.training(key, problem, held, missing)
        chunk = max(1, min(chunk, WINDOW // (batch * problem.training.width)))
    schedule = Schedule(steps, batch, learning_rate, 0.995 if adaptive else None, chunk, devices, progress)
    result = schedule.run(fit_key, begin.model, problem, patience=patience, checkpoint=checkpoint)
    fitted = _chosen(problem, begin, result, adaptive=adaptive)
    if problem.every_row is not None and begin.choice is not None:
        fitted = fit_again(jr.fold_in(key, 3), fitted, problem, begin, flow, schedule, patience=patience)
    found = _issues_of_fit(fitted.log_likelihood, _folded(fitted.flow, problem))
    _warn(found)
    return dataclasses.replace(fitted, issues=issues + found)


class _Disk(NamedTuple):
    """A table on disk that does not fit in memory. Everything but the training rows comes from a sample of it."""

    table: DiskTable
    found: Survey

    @property
    def row_count(self) -> int:
        return int(self.found.counts.sum())

    def training(self, key, problem: "Problem", held: int, missing: str) -> "Problem":
        """The problem with all rows to train on."""
        table = problem.table._replace(dropped=self.found.dropped)
        columns, names, schema = table.columns, table.number_names, table.schema
        is_number = [schema is None or schema.fields[i].kind == "number" for i in range(len(columns))]
        ends = np.where(is_number, self.found.extremes[:, : len(columns)], table.rows[:2])

        def read(x, condition):
            rows, _, given = encode_rows(schema, len(columns), x, condition)
            if (fault := outside(columns, rows, names)) is not None:
                raise ValueError(f"Expected x in its support; {fault}.")
            return tuple(
                None if part is None else np.asarray(part) for part in problem.loss.prepare(rows, given, spread)
            )

        if (fault := outside(columns, ends, names)) is not None:
            raise ValueError(f"Expected x in its support; {fault}.")
        spread = problem.moments[2:]
        width = sum(leaf[0].nbytes for leaf in jax.tree.leaves(problem.training))
        seed, held_out = int(generator(key).integers(2**31)), problem.order[:held]
        stream = training_stream(seed, self.table, self.found, held_out, read, missing=missing, width=width)
        return problem._replace(table=table, training=stream)


def _from_disk(key, x, condition, validation, missing) -> tuple[Any, Any, _Disk | None]:
    """Rows and conditions in memory; for a large table on disk, a sample and the table."""
    if not on_disk(x):
        return x, condition, None
    table = x if isinstance(x, DiskTable) else open_rows(x, condition)
    if table.is_small:
        return *table.read(), None
    held = holdout.held_out_count(validation, sum(table.sizes))
    some = min(MOST_ROWS, IN_MEMORY // (8 * table.width))
    found = survey(generator(jr.fold_in(key, 4)), table, some + held, missing=missing)
    return found.x, found.condition if table.condition is None else list(table.condition), _Disk(table, found)


def _chosen(problem: Problem, begin: Start, result: train.Fit, *, adaptive) -> Density:
    """The best model on held-out rows, which may be the model before training, with its likelihoods."""
    initial = problem.losses(begin.model)
    values = result.values[:, 0]  # NaN after a chunk whose result was not finite
    is_better = not adaptive or np.min(values[np.isfinite(values)], initial=np.inf) < initial.mean()
    model = as_exact(result.parameters if is_better else begin.model)
    density = Density(
        model.flow,
        problem.table.columns,
        *problem.moments,
        log_likelihood=np.nan,
        train_log_likelihood=np.nan,
        losses=result.losses,
        values=values,
        seconds=result.seconds,
        names=problem.table.names,
        base=model.base,
        is_trained=bool(is_better),
        schema=problem.table.schema,
        categories=problem.categories,
        dropped_rows=problem.table.dropped,
    )
    training, held_out = (np.asarray(density.encoded_log_prob(*rows), float) for rows in problem.rows)
    count = len(held_out)
    with np.errstate(invalid="ignore"):  # infinite values have no standard error
        error = float(held_out.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan")
    before = [-(begin.log_prob + np.asarray(problem.log_det)), initial[None]] if adaptive else []
    tried = [*map(holdout.part_means, before), result.values[:, 1:]]
    optimism = holdout.optimism(np.concatenate(tried), np.bincount(holdout.part_numbers(count)).astype(float))
    return dataclasses.replace(
        density,
        log_likelihood=float(held_out.mean()) - (0.0 if np.isnan(optimism) else optimism),
        log_likelihood_error=error,
        train_log_likelihood=float(training.mean()),
        train_rows=problem.training.count if isinstance(problem.training, ShuffledRows) else len(problem.standard),
        held_out_rows=count,
    )


def _folded(flow, problem: Problem) -> float:
    """The share of folds on held-out rows; flows with bounded weights cannot fold and need no check."""
    if all(part.lipschitz is not None for part in ddnf_parts(flow)):
        return 0.0
    given = problem.held_out[1]
    return folded_share(reverse(flow), problem.u[:_FOLD_ROWS], None if given is None else given[:_FOLD_ROWS])


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
            f"A fraction of {folded:.2g} of the flow's cells folds on held-out rows: densities are wrong there. Use "
            "more steps per field, flow=Invert(ddnf.DDNF(..., steps=8)), or a guarantee, "
            "flow=Invert(ddnf.DDNF(..., lipschitz=0.9))."
        )
    if not np.isfinite(log_likelihood):
        found.append(
            "The held-out rows have no finite likelihood, so the fit has failed. Look for outliers, use a smaller "
            "learning_rate, or use float64."
        )
    return tuple(found)


def _warn(issues: Sequence[str]) -> None:
    for issue in issues:
        warnings.warn(issue, RuntimeWarning, stacklevel=3)
