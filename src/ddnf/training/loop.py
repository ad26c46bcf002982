"""One optimisation loop for everything: scanned, resumable, proof against NaN, with a bar. Knows nothing of flows."""

import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from os import PathLike
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import paramax
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Scalar
from tqdm.auto import tqdm

from ddnf.training.checkpoint import Checkpoints, fingerprint

TOO_MANY_BAD = "too many steps were not finite"


class Draw(NamedTuple):
    """What a step's loss is computed from, besides the parameters."""

    key: PRNGKeyArray
    step: Int[Array, ""]
    rows: PyTree


class Fit(NamedTuple):
    """What came out of `fit`.

    Attributes:
        parameters: the best by the validation value. Without one the last, or those before the loss has risen for good.
        losses: mean training loss of each stretch.
        values: the validation value after each stretch; a row of them where `validate` gives more than one.
        seconds: wall time of each stretch, NaN for those before a run was resumed; the first of a run compiles.
        steps: steps taken, skipped ones included.
        skipped: steps whose loss or gradient was not finite; they changed nothing.
        reason: "finished", "stopped early" or `TOO_MANY_BAD`.
    """

    parameters: PyTree
    losses: Float[np.ndarray, " n"]
    values: Float[np.ndarray, "n *more"]
    seconds: Float[np.ndarray, " n"]
    steps: int
    skipped: int
    reason: str


class State(eqx.Module):
    """All that a run is: arrays only, so that it can be written down and taken up again, bit for bit."""

    parameters: PyTree
    memory: PyTree
    average: PyTree
    best: PyTree
    best_value: Float[Array, ""]
    stretch: Int[Array, ""]
    skipped: Int[Array, ""]
    waited: Int[Array, ""]
    bad: Float[Array, ""]
    losses: Float[Array, " n"]
    values: Float[Array, "n *more"]


@lru_cache
def adam(learning_rate: float, steps: int, *, clip: float = 10.0, warmup: float = 0.02) -> optax.GradientTransformation:
    """Adam with a short warm-up, a cosine down to nearly nothing, and clipped gradients.

    The same arguments give the same object, so that a second fit of the same shape need not compile again.

    Example:
        >>> optimizer = adam(1e-2, 1000)
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.1 * learning_rate, learning_rate, max(1, int(warmup * steps)), max(2, steps), 1e-3 * learning_rate
    )
    # Flattened: one update of all parameters compiles and runs faster than one for each array.
    return optax.flatten(optax.chain(optax.clip_by_global_norm(clip), optax.adam(schedule)))


def fit(
    key: PRNGKeyArray,
    parameters: PyTree,
    loss: Callable[[PyTree, Draw], Scalar],
    *,
    steps: int,
    optimizer: optax.GradientTransformation,
    data: PyTree = None,
    batch: int = 256,
    validate: Callable[[PyTree, PyTree], Float[Array, "*more"]] | None = None,
    held_out: PyTree = None,
    stretch: int = 100,
    patience: int | None = None,
    average: float | None = None,
    checkpoint: str | PathLike | None = None,
    checkpoint_seconds: float = 30.0,
    progress: bool = True,
    description: str = "fit",
) -> Fit:
    """Minimizes `loss(parameters, draw)` with optax, in compiled stretches of many steps.

    Between stretches, and only there, the host looks: it moves the bar, compares validation values, writes a
    checkpoint, and stops early or after too many steps without a finite gradient. A run that is killed and
    started again with the same arguments and `checkpoint` ends with the same parameters, bit for bit.

    Args:
        key: random key; each step gets a key of its own.
        parameters: any pytree; its floating-point arrays are trained (those under `paramax.NonTrainable` not).
        loss: the loss of a step from the parameters and a `Draw` (key, step, rows of the data).
        steps: number of steps.
        optimizer: any optax optimizer.
        data: pytree of arrays with a common leading axis; each step sees `batch` rows, by random permutations.
        validate: value to be minimized, from the parameters and `held_out`, looked at after each stretch; picks the
            parameters to return. Of several values in an array the first does; the others are noted only.
        stretch: steps between two looks of the host.
        patience: stop after so many stretches without a better validation value.
        average: keep a moving average of the parameters, with so much of it kept in a step, such as 0.999; it is what
            is validated and returned. Takes out the noise that a constant rate leaves.
        checkpoint: folder for checkpoints (needs orbax-checkpoint); a run found there is resumed.
        checkpoint_seconds: time between checkpoints.
        progress: whether to show a bar.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr, optax
        >>> result = fit(jr.key(0), jnp.ones(3), lambda x, draw: jnp.sum(x**2), steps=200,
        ...              optimizer=optax.sgd(0.1), progress=False)
        >>> bool(jnp.max(jnp.abs(result.parameters)) < 1e-6)
        True
    """
    _check(steps, stretch, batch, patience, data, average)
    stretch = min(stretch, steps)
    arrays, static = eqx.partition(parameters, eqx.is_inexact_array, is_leaf=_is_frozen)
    seen = (
        jax.ShapeDtypeStruct((), float) if validate is None else eqx.filter_eval_shape(validate, parameters, held_out)
    )
    state = _start(arrays, optimizer, -(-steps // stretch), seen.shape, None if average is None else arrays)
    run = _Stretch(loss, optimizer, validate, stretch, batch, steps, average)
    # The whole is drawn anew for each stretch from its number, so nothing random needs to be stored.
    mark = fingerprint((jr.key_data(key), arrays, data, held_out), steps, stretch, batch)
    saved = Checkpoints(checkpoint, checkpoint_seconds, mark)
    state = saved.restore(state)
    seconds = [np.nan] * int(state.stretch)
    bar = tqdm(total=steps, initial=_done(state, stretch, steps), desc=description, disable=not progress, leave=None)
    with bar:
        reason = _reason(state, stretch, steps, patience)
        while reason is None:
            start = time.perf_counter()
            inputs = _inputs(key, state.stretch, data, stretch, batch)
            state = jax.block_until_ready(_run(run, state, static, data, held_out, inputs))
            seconds.append(time.perf_counter() - start)
            _show(bar, state, run)
            reason = _reason(state, stretch, steps, patience)
            saved.save(state, int(state.stretch), last=reason is not None)
    skipped, taken = int(state.skipped), _done(state, stretch, steps)
    _warn(skipped, taken, reason, loss)
    done = int(state.stretch)
    losses, values = np.asarray(state.losses)[:done], np.asarray(state.values)[:done]
    return Fit(eqx.combine(state.best, static), losses, values, np.array(seconds), taken, skipped, reason)


class _Stretch(NamedTuple):
    """What stays the same in all stretches of a run: static for the compiler."""

    loss: Callable
    optimizer: optax.GradientTransformation
    validate: Callable | None
    length: int
    batch: int
    steps: int
    average: float | None


@eqx.filter_jit
def _run(run: _Stretch, state: State, static: PyTree, data: PyTree, held_out: PyTree, inputs: PyTree) -> State:
    def loss(arrays, draw):
        return run.loss(eqx.combine(arrays, static), draw)

    def iterate(carry, inputs):
        step, (key, index) = inputs
        arrays, memory, average = carry
        draw = Draw(key, step, jax.tree.map(lambda a: a[index], data))
        value, gradient = jax.value_and_grad(loss)(arrays, draw)
        updates, new_memory = run.optimizer.update(gradient, memory, arrays)
        new_arrays = optax.apply_updates(arrays, updates)
        # A short average at first: it forgets the start.
        kept = jnp.minimum(run.average or 0.0, (1 + step) / (10 + step))
        new = new_arrays, new_memory, _averaged(average, new_arrays, kept)
        finite = jnp.isfinite(value + optax.tree.norm(gradient) + optax.tree.norm(updates))
        within = step < run.steps
        carry = jax.tree.map(lambda a, b: jnp.where(finite & within, a, b), new, carry)
        return carry, (jnp.where(finite & within, value, 0.0), finite & within, within)

    steps = state.stretch * run.length + jnp.arange(run.length)
    carry = state.parameters, state.memory, state.average
    (arrays, memory, average), (losses, finite, within) = lax.scan(iterate, carry, (steps, inputs))
    mean = jnp.sum(losses) / jnp.sum(finite)
    candidate = arrays if run.average is None else average
    values = mean if run.validate is None else run.validate(eqx.combine(candidate, static), held_out)
    value = jnp.ravel(values)[0]
    # Without validation the last parameters count, unless the loss has clearly risen since. NaN is never better.
    noise = jnp.sqrt(jnp.sum(jnp.where(finite, (losses - mean) ** 2, 0.0))) / jnp.sum(finite)
    better = value < state.best_value + (4 * noise if run.validate is None else 0.0)
    missed = jnp.sum(within) - jnp.sum(finite)
    return State(
        arrays,
        memory,
        average,
        jax.tree.map(lambda a, b: jnp.where(better, a, b), candidate, state.best),
        jnp.fmin(value, state.best_value).astype(state.best_value.dtype),
        state.stretch + 1,
        state.skipped + missed,
        jnp.where(better, 0, state.waited + 1),
        (missed / jnp.sum(within)).astype(state.bad.dtype),
        state.losses.at[state.stretch].set(mean.astype(state.losses.dtype)),
        state.values.at[state.stretch].set(values.astype(state.values.dtype)),
    )


def _inputs(key, stretch, data, length, batch) -> tuple[PyTree, Int[Array, "steps batch"] | None]:
    """A key and row numbers for each step of a stretch."""
    count = None if data is None else jax.tree.leaves(data)[0].shape[0]
    return _drawn(key, stretch, count, length, batch)


@eqx.filter_jit
def _drawn(key, stretch, count, length, batch):
    # Apart from `_run`: random numbers take the compiler long, and these are the same program for every model.
    step_key, row_key = jr.split(jr.fold_in(key, stretch))
    return jr.split(step_key, length), _rows(row_key, count, length, batch)


def _averaged(average, arrays, kept):
    return None if average is None else jax.tree.map(lambda a, b: kept * a + (1 - kept) * b, average, arrays)


def _rows(key, count, length, batch):
    """Row numbers for each step of a stretch, from as many permutations as it takes: all rows are seen equally."""
    if count is None:
        return None
    batch = min(batch, count)
    keys = jr.split(key, -(-length * batch // count))
    rows = jax.vmap(lambda key: jr.permutation(key, count))(keys)
    return rows.reshape(-1)[: length * batch].reshape(length, batch)


def _start(arrays, optimizer, stretches, seen, average):
    dtype = jnp.result_type(float)
    losses, values = jnp.full(stretches, jnp.nan, dtype), jnp.full((stretches, *seen), jnp.nan, dtype)
    zero = jnp.zeros((), jnp.int32)
    infinite, none = jnp.array(jnp.inf, dtype), jnp.zeros((), dtype)
    return State(arrays, optimizer.init(arrays), average, arrays, infinite, zero, zero, zero, none, losses, values)


def _done(state, stretch, steps):
    return min(int(state.stretch) * stretch, steps)


def _reason(state, stretch, steps, patience) -> str | None:
    """Why a run ends here, or None if it goes on."""
    if int(state.stretch) > 0 and float(state.bad) > 0.5:
        return TOO_MANY_BAD
    if _done(state, stretch, steps) == steps:
        return "finished"
    if patience is not None and int(state.waited) >= patience:
        return "stopped early"
    return None


def _show(bar, state, run):
    bar.update(_done(state, run.length, run.steps) - bar.n)
    last = int(state.stretch) - 1
    shown = dict(loss=f"{float(state.losses[last]):.4g}")
    if run.validate is not None:
        shown |= dict(best=f"{float(state.best_value):.4g}")
    bar.set_postfix(shown)


def _warn(skipped, taken, reason, loss):
    if reason == TOO_MANY_BAD:
        warnings.warn(
            f"Training stopped after {taken} steps, {skipped} of which gave a loss or gradient that is not finite; "
            "the best parameters so far are returned. Try a smaller learning rate, float64, or a loss that is finite.",
            RuntimeWarning,
            stacklevel=4,
        )
    elif skipped:
        warnings.warn(
            f"{skipped} of {taken} steps gave a loss or gradient that is not finite, and were skipped.",
            RuntimeWarning,
            stacklevel=4,
        )


def _check(steps, stretch, batch, patience, data, average):
    if average is not None and not 0 <= average < 1:
        raise ValueError(f"Expected average from 0 to below 1, or None; got {average}.")
    for name, value in dict(steps=steps, stretch=stretch, batch=batch, patience=patience).items():
        if value is not None and value < 1:
            raise ValueError(f"Expected {name} to be at least 1; got {value}.")
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(lengths) > 1 or lengths & {(), (0,)}:
        raise ValueError(f"Expected data with one common number of rows, at least 1; got {sorted(lengths)}.")


def _is_frozen(leaf):
    return isinstance(leaf, paramax.NonTrainable)
