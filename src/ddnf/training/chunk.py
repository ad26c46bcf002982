"""A chunk of training steps: compiled as one program, or run step by step around an oracle."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Scalar

from ddnf.system.compiling import quick_jit
from ddnf.training.devices import mean_of_devices, share_rows, shared_rows, wait_for


class Draw(NamedTuple):
    """What a step's loss is computed from, besides the parameters."""

    key: PRNGKeyArray
    step: Int[Array, ""]
    rows: PyTree


class MeanLoss(eqx.Module):
    """A loss that is a mean over rows: each device computes it for its own rows, with one exchange per step.

    Random numbers are drawn beforehand for all rows together, so that they do not depend on the devices.
    """

    @abstractmethod
    def randomize(self, draw: Draw) -> PyTree:
        """The rows of a step with all that is random about each: arrays whose first axis is the rows."""

    @abstractmethod
    def of_rows(self, parameters: PyTree, step: Int[Array, ""], rows: PyTree) -> Scalar:
        """The mean over some rows from `randomize`; terms without rows may be added to it."""

    def __call__(self, parameters: PyTree, draw: Draw) -> Scalar:
        return self.of_rows(parameters, draw.step, self.randomize(draw))


class Oracle(NamedTuple):
    """Provides inputs of a step's loss that are not compiled with it, such as the log density of a user's model.

    Attributes:
        ask: from the parameters and a key to a query; compiled with the training.
        answer: from a query to a tuple of answers; a separate function. ``(query, *answers)`` are the `rows` of the
            step's `Draw`.
        rows: shapes and types of these.
        is_short: whether there are so few steps that they should compile faster and run more slowly.
    """

    ask: Callable[[PyTree, PRNGKeyArray], Any]
    answer: Callable[[Any], tuple]
    rows: PyTree
    is_short: bool = False


class State(eqx.Module):
    """The complete state of a run: arrays only, so that a checkpoint restores it bit for bit."""

    parameters: PyTree
    memory: PyTree
    average: PyTree
    best: PyTree
    best_value: Float[Array, ""]
    chunk: Int[Array, ""]
    skipped: Int[Array, ""]
    waited: Int[Array, ""]
    bad: Float[Array, ""]
    losses: Float[Array, " n"]
    values: Float[Array, "n *more"]


class Chunk(NamedTuple):
    """What all chunks of a run share.

    Attributes:
        loss: of the parameters and a `Draw`; a `MeanLoss` where the devices are to exchange once a step.
        update: of an optax optimizer.
        validate: of the parameters and held-out data.
        length: steps of a chunk.
        steps: steps of the whole run.
        average: decay of the moving average of the parameters.
        mesh: the devices that share the rows of a step; None for one device.
    """

    loss: Callable
    update: Callable
    validate: Callable | None
    length: int
    steps: Int[Array, ""]
    average: float | None
    mesh: Mesh | None = None


def run_chunk(
    run: Chunk, state: State, static: PyTree, *, data: PyTree, held_out: PyTree, inputs: PyTree, oracle: Oracle | None
) -> State:
    """The state after a chunk of steps; `inputs` are a key and row numbers for each of them, or rows without `data`."""
    if oracle is None:
        return _run(run, state, static, data, held_out, inputs)
    keys, first = inputs[0], np.int32(state.chunk) * np.int32(run.length)
    carry, records = (state.parameters, state.memory, state.average), []
    rows = share_rows(run.mesh, jax.tree.map(lambda row: np.zeros(row.shape, row.dtype), oracle.rows))
    step = _short_step if oracle.is_short else _long_step
    # An initial step changes nothing; it only computes the first query.
    for number in range(-1, run.length):
        taken = step(run, oracle.ask, carry, static, keys, np.int32(number), first, rows)
        carry, record, asked = wait_for(run.mesh, taken)
        rows = share_rows(run.mesh, (asked, *oracle.answer(asked))) if number + 1 < run.length else rows
        records.append(record)
    gathered = [np.array(values) for values in zip(*jax.device_get(records[1:]), strict=True)]
    return _end(run, state, static, held_out, carry, gathered)


@eqx.filter_jit
def _run(run: Chunk, state: State, static: PyTree, data: PyTree, held_out: PyTree, inputs: PyTree) -> State:
    def iterate(carry, inputs):
        step, (key, chosen) = inputs
        rows = chosen if data is None else jax.tree.map(lambda a: a[chosen], data)
        rows = jax.tree.map(partial(shared_rows, run.mesh), rows)
        draw = Draw(key, step, rows)
        return _iterate(run, static, carry, draw, step < run.steps)

    steps = state.chunk * run.length + jnp.arange(run.length)
    carry = state.parameters, state.memory, state.average
    carry, records = lax.scan(iterate, carry, (steps, inputs))
    return _end_of_chunk(run, state, static, held_out, carry, records)


def _step(run: Chunk, ask: Callable, carry, static, keys, number, first, rows):
    """One step, and the query of the next step."""
    draw = Draw(keys[number], first + number, rows)
    carry, record = _iterate(run, static, carry, draw, (number >= 0) & (draw.step < run.steps))
    asked = ask(eqx.combine(carry[0], static), keys[number + 1])
    return carry, record, jax.tree.map(partial(shared_rows, run.mesh), asked)


_long_step, _short_step = eqx.filter_jit(_step), quick_jit(_step)


@quick_jit
def _end(run, state, static, held_out, carry, records):
    return _end_of_chunk(run, state, static, held_out, carry, records)


def _iterate(run: Chunk, static, carry, draw: Draw, is_within):
    """A step of the optimizer; skipped if loss or gradient are not finite, or if the step is beyond the run."""
    arrays, memory, average = carry
    value, gradient = _value_and_gradient(run, static, arrays, draw)
    updates, new_memory = run.update(gradient, memory, arrays)
    new_arrays = optax.apply_updates(arrays, updates)
    # The decay grows from 0.1, so that the average forgets the initial parameters.
    kept = jnp.minimum(run.average or 0.0, (1 + draw.step) / (10 + draw.step))
    new = new_arrays, new_memory, _averaged(average, new_arrays, kept)
    finite = is_within & jnp.isfinite(value + optax.tree.norm(gradient) + optax.tree.norm(updates))
    carry = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, carry)
    return carry, (jnp.where(finite, value, 0.0), finite, is_within)


def _value_and_gradient(run: Chunk, static, arrays, draw: Draw):
    if not isinstance(run.loss, MeanLoss):
        return jax.value_and_grad(lambda arrays: run.loss(eqx.combine(arrays, static), draw))(arrays)

    def of_rows(model, rows):
        loss, static, arrays, step = model
        return jax.value_and_grad(lambda arrays: loss.of_rows(eqx.combine(arrays, static), step, rows))(arrays)

    return mean_of_devices(run.mesh, of_rows, (run.loss, static, arrays, draw.step), run.loss.randomize(draw))


def _end_of_chunk(run: Chunk, state: State, static, held_out, carry, records) -> State:
    (arrays, memory, average), (losses, finite, within) = carry, records
    # Infinity stands for "no value": NaN in a result would stop a run under JAX_DEBUG_NANS.
    count = jnp.maximum(jnp.sum(finite), 1)
    mean = jnp.where(jnp.any(finite), jnp.sum(losses) / count, jnp.inf)
    candidate = arrays if run.average is None else average
    values = mean if run.validate is None else run.validate(eqx.combine(candidate, static), held_out)
    values = jnp.where(jnp.isnan(values), jnp.inf, values)
    value = jnp.ravel(values)[0]
    # Without validation, the last parameters are returned unless the loss has clearly risen.
    noise = jnp.sqrt(jnp.sum(jnp.where(finite, (losses - mean) ** 2, 0.0))) / count
    better = value < state.best_value + (4 * noise if run.validate is None else 0.0)
    missed = jnp.sum(within) - jnp.sum(finite)
    return State(
        arrays,
        memory,
        average,
        jax.tree.map(lambda a, b: jnp.where(better, a, b), candidate, state.best),
        jnp.fmin(value, state.best_value).astype(state.best_value.dtype),
        state.chunk + 1,
        state.skipped + missed,
        jnp.where(better, 0, state.waited + 1),
        (missed / jnp.sum(within)).astype(state.bad.dtype),
        state.losses.at[state.chunk].set(mean.astype(state.losses.dtype)),
        state.values.at[state.chunk].set(values.astype(state.values.dtype)),
    )


def _averaged(average, arrays, kept):
    return None if average is None else jax.tree.map(lambda a, b: kept * a + (1 - kept) * b, average, arrays)
