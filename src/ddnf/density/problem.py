"""The inputs of a fit: a table split into training and held-out rows, and the schedule of training."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ddnf.density import likelihood
from ddnf.density import rows as rows_of
from ddnf.density.categories import Categories, fit_categories
from ddnf.density.columns import to_real
from ddnf.density.prepare import Prepared
from ddnf.flow.random import generator
from ddnf.training import loop as train

MOST_JUDGED = 10_000  # training rows whose likelihood is reported


class Schedule(NamedTuple):
    """How a model is trained."""

    steps: int
    batch: int
    learning_rate: float
    average: float | None
    chunk: int
    devices: train.Devices
    progress: bool

    def run(self, key, model, problem: "Problem", *, chunks=None, patience=None, checkpoint=None) -> train.Fit:
        """Trains to the end of the schedule, or for some chunks of it."""
        return train.fit(
            key,
            model,
            problem.loss,
            steps=self.steps if chunks is None else min(self.steps, chunks * self.chunk),
            capacity=self.steps,
            optimizer=train.adam(self.learning_rate, self.steps),
            data=problem.training,
            batch=self.batch,
            validate=problem.loss.validate,
            held_out=problem.held_out,
            chunk=self.chunk,
            patience=patience,
            average=self.average,
            checkpoint=checkpoint,
            devices=self.devices,
            progress=self.progress,
            description="density" if chunks is None else "all rows",
        )


class Problem(NamedTuple):
    """A table split into training and held-out rows, in all the forms that a fit needs."""

    table: Prepared
    order: np.ndarray  # numbers of rows: those held out, and then those that train
    categories: Categories | None
    moments: tuple[Any, ...]
    loss: likelihood.NegativeLogLikelihood
    rows: tuple  # some of the training rows, and the held-out rows, each with conditions and level numbers
    training: Any  # tables, or a stream of rows on disk
    held_out: tuple
    standard: np.ndarray  # standardized training rows
    u: Array  # standardized held-out rows
    log_det: Any
    every_row: tuple | None = None  # for a second fit: all rows in the form of `training`

    def filled(self) -> "Problem":
        """The problem with as many training rows as all rows, by repeating the first of them.

        A second fit to all rows then has the same shapes and compiles nothing.
        """
        count = len(self.standard)
        again = np.arange(count + len(self.u)) % count
        every_row = jax.tree.map(lambda *parts: jnp.concatenate(parts), self.training, self.held_out)
        return self._replace(training=pick(self.training, again), every_row=every_row)

    def turn(self, trained: np.ndarray, judged: np.ndarray) -> "Problem":
        """A filled problem with other rows held out, in the same shapes."""
        count = len(self.standard) + len(self.u)
        held_out = pick(self.every_row, judged)
        u, log_det = self.loss.standardize(held_out[0], likelihood.even_noise(self.loss.columns, len(judged)))
        return self._replace(
            training=pick(self.every_row, trained[np.arange(count) % len(trained)]),
            held_out=held_out,
            standard=self.every_standard[trained],
            u=u,
            log_det=log_det,
        )

    @property
    def every_standard(self) -> np.ndarray:
        """Standardized rows in the order of `every_row`: those that train, and then those held out."""
        return np.concatenate([self.standard, np.asarray(self.u, float)])

    def losses(self, model: likelihood.Model) -> np.ndarray:
        """Minus the log density of each held-out row."""
        return np.asarray(-(likelihood.log_probs(model, self.u, self.held_out[1]) + self.log_det), float)


def split_table(key, table: Prepared, held: int, *, adaptive: bool, penalty: float) -> Problem:
    """Rows in random order, the first of them held out, standardized as those that train are."""
    rows, given, codes, columns = table.rows, table.given, table.codes, table.columns
    order = generator(key).permutation(len(rows))
    order = order if codes is None else _with_every_level(order, codes, held)
    order = _with_every_level(order, rows[:, np.ptp(rows[order[held:]], axis=0) == 0], held)
    noise = generator(jr.fold_in(key, 1)).uniform(size=rows.shape) * [column.integer for column in columns]
    every = to_real(columns, rows + noise)[0]
    real = every[order[held:]]
    mean, scale = (likelihood.robust_moments if adaptive else likelihood.moments)(real)
    rows_of.check_far((every - mean) / np.diag(scale), rows, table.number_names)
    spread = (None, None) if given is None else (given.mean(axis=0), _deviations(given))
    loss = likelihood.NegativeLogLikelihood(columns, jnp.asarray(mean), jnp.asarray(scale), penalty)
    data = loss.prepare(rows, given, spread)
    training, held_out = pick(data, order[held:]), pick(data, order[:held])
    whole = rows, given, codes
    judged = pick(whole, order[held:][:MOST_JUDGED]), pick(whole, order[:held])
    u, log_det = loss.standardize(held_out[0], likelihood.even_noise(columns, held))
    standard = np.asarray(likelihood.standardize(mean, scale, real))
    categories = None
    if codes is not None and table.schema is not None:
        categories = fit_categories(codes[order[held:]], table.schema.sizes)
    moments = mean, scale, *spread
    return Problem(table, order, categories, moments, loss, judged, training, held_out, standard, u, log_det)


def _with_every_level(order, codes, held):
    """An order in which training rows include each value of some columns.

    A level that only occurs in held-out rows would be impossible, and a column that is constant in training rows has no
    scale.
    """
    if not codes.shape[1]:
        return order
    last = [len(order) - 1 - np.unique(levels[order][::-1], return_index=True)[1] for levels in codes.T]
    kept = np.zeros(len(order), bool)
    kept[np.concatenate(last)] = True
    if not kept[:held].any() or kept.sum() > len(order) - held:
        return order
    return np.concatenate([order[~kept], order[kept]])


def _deviations(given):
    deviation = given.std(axis=0)
    return np.where(deviation > 0, deviation, 1.0)  # a level that never occurs


def pick(tables: Any, chosen: Any) -> Any:
    """Some rows of arrays in a pytree."""
    return jax.tree.map(lambda a: a[chosen], tables)
