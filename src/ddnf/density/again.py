"""Small tables: cross-validation chooses the number of training steps, and the final fit uses all rows."""

import dataclasses

import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Float, PRNGKeyArray

from ddnf.density.problem import Problem, Schedule
from ddnf.density.result import Density
from ddnf.density.start import Start, folds, start_again
from ddnf.flow.random import generator


def fit_again(
    key: PRNGKeyArray,
    fitted: Density,
    problem: Problem,
    begin: Start,
    flow: AbstractBijection,
    schedule: Schedule,
    *,
    patience: int,
) -> Density:
    """Repeats the fit with all rows, and with the components and tails of the start.

    The number of steps is the best on the held-out rows of the first fit, or by cross-validation if these are few.

    Args:
        key: random key.
        fitted: the fit without the held-out rows.
        problem: its table.
        begin: its start.
        flow, schedule, patience: of that fit.
    """
    assert begin.choice is not None
    rng = generator(key)
    losses, values = [problem.losses(begin.model)], [fitted.values]
    for trained, judged in folds(problem.every_standard, len(problem.u))[1:]:
        turn = problem.turn(trained, judged)
        model = start_again(rng, flow, turn.standard, begin.choice)
        losses.append(turn.losses(model))
        values.append(schedule.run(key, model, turn, patience=patience).values[:, 0])
    chunks = best_chunks(float(np.mean(losses)), values)
    model = start_again(rng, flow, problem.every_standard, begin.choice)
    if chunks:
        model = schedule.run(key, model, problem._replace(training=problem.every_row), chunks=chunks).parameters
    again = dataclasses.replace(fitted, flow=model.flow, base=model.base, is_trained=chunks > 0, has_all_rows=True)
    training = np.asarray(again.encoded_log_prob(*problem.rows[0]), float).mean()
    return dataclasses.replace(again, train_log_likelihood=float(training)) if np.isfinite(training) else fitted


def best_chunks(initial: float, values: list[Float[np.ndarray, " _"]]) -> int:
    """The number of chunks of training after which the mean over several runs is least; 0 if it is not below `initial`.

    Example:
        >>> best_chunks(2.0, [np.array([1.0, 3.0]), np.array([1.5, 0.0, 0.0])])
        1
    """
    length = min(map(len, values))
    mean = np.mean([run[:length] for run in values], axis=0)
    mean = np.where(np.isfinite(mean), mean, np.inf)
    return int(np.argmin(mean)) + 1 if np.min(mean, initial=np.inf) < initial else 0
