"""One optimisation loop for every objective: scanned, resumable, guarded against NaN, with a progress bar."""

import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from os import PathLike
from threading import Lock
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

from ddnf.system.checks import check_count, check_key
from ddnf.training.checkpoint import Checkpoints, fingerprint

TOO_MANY_BAD = "too many steps were not finite"

# Two chunks at once, from two threads, can wait for each other forever in the thread pool of a CPU with few cores.
_RUNNING = Lock()


class Draw(NamedTuple):
    """What a step's loss is computed from, besides the parameters."""

    key: PRNGKeyArray
    step: Int[Array, ""]
    rows: PyTree


class Fit(NamedTuple):
    """The result of `fit`.

    Attributes:
        parameters: the best by the validation value; without validation the last, or those from before a lasting rise
            of the loss.
        losses: mean training loss of each chunk of steps; NaN where no step of it was finite.
        values: the validation value after each chunk; a row of values where `validate` returns more than one.
        seconds: wall time of each chunk, NaN for those before a run was resumed; the first of a run compiles.
        steps: steps taken, including skipped ones.
        skipped: steps with a non-finite loss or gradient; they leave the parameters unchanged.
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


@lru_cache
def adam(learning_rate: float, steps: int, *, clip: float = 10.0, warmup: float = 0.02) -> optax.GradientTransformation:
    """Adam with a short warm-up, cosine decay to 0.001 of the peak learning rate, and clipped gradients.

    Equal arguments return the same object, so that a second fit of the same shape does not compile again.

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
    chunk: int = 100,
    patience: int | None = None,
    average: float | None = None,
    checkpoint: str | PathLike | None = None,
    checkpoint_seconds: float = 30.0,
    progress: bool = True,
    description: str = "fit",
    warn: bool = True,
) -> Fit:
    """Minimizes `loss(parameters, draw)` with optax, in compiled chunks of many steps.

    The host acts between chunks only: it updates the progress bar, compares validation values, writes checkpoints, and
    stops early or when more than half of a chunk's steps were not finite. A run that is killed and started again with
    the same arguments and `checkpoint` ends with the same parameters, bit for bit.

    Args:
        key: random key; each step derives its own.
        parameters: any pytree; its floating-point arrays are trained (those under `paramax.NonTrainable` not).
        loss: the loss of a step from the parameters and a `Draw` (key, step, rows of the data).
        steps: number of steps.
        optimizer: any optax optimizer.
        data: pytree of arrays with a common leading axis; each step sees `batch` rows, by random permutations.
        validate: value to minimize, from the parameters and `held_out`, computed after each chunk; decides which
            parameters are returned. Of an array of values the first decides; the others are only recorded.
        chunk: steps per compiled call.
        patience: stop after this many chunks without a better validation value.
        average: decay of a moving average of the parameters, such as 0.999; the average is what is validated and
            returned. It removes the noise that a constant learning rate leaves.
        checkpoint: folder for checkpoints (needs orbax-checkpoint); a run found there is resumed.
        checkpoint_seconds: time between checkpoints.
        progress: whether to show a progress bar.
        warn: whether to warn about steps that were not finite; a caller that trains again reports on its own result.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr, optax
        >>> result = fit(jr.key(0), jnp.ones(3), lambda x, draw: jnp.sum(x**2), steps=200,
        ...              optimizer=optax.sgd(0.1), progress=False)
        >>> bool(jnp.max(jnp.abs(result.parameters)) < 1e-6)
        True
    """
    check_key(key)
    check_count(steps=steps, chunk=chunk, batch=batch, patience=patience)
    _check(data, average)
    chunk = min(chunk, steps)
    arrays, static = eqx.partition(parameters, eqx.is_inexact_array, is_leaf=_is_frozen)
    seen = (
        jax.ShapeDtypeStruct((), float) if validate is None else eqx.filter_eval_shape(validate, parameters, held_out)
    )
    state = _initial_state(arrays, optimizer, -(-steps // chunk), seen.shape, None if average is None else arrays)
    run = _Chunk(loss, optimizer, validate, chunk, batch, steps, average)
    # Random numbers of a chunk derive from its number, so the state holds none.
    mark = fingerprint((jr.key_data(key), arrays, data, held_out), steps, chunk, batch)
    saved = Checkpoints(checkpoint, checkpoint_seconds, mark)
    state = saved.restore(state)
    seconds = [np.nan] * int(state.chunk)
    bar = tqdm(total=steps, initial=_done(state, chunk, steps), desc=description, disable=not progress, leave=None)
    with bar:
        reason = _reason(state, chunk, steps, patience)
        while reason is None:
            start = time.perf_counter()
            inputs = _inputs(key, state.chunk, data, chunk, batch)
            with _RUNNING:
                state = jax.block_until_ready(_run(run, state, static, data, held_out, inputs))
            seconds.append(time.perf_counter() - start)
            _show(bar, state, run)
            reason = _reason(state, chunk, steps, patience)
            saved.save(state, int(state.chunk), last=reason is not None)
    skipped, taken = int(state.skipped), _done(state, chunk, steps)
    if warn:
        _warn(skipped, taken, reason)
    done = int(state.chunk)
    losses, values = (_with_nan(array[:done]) for array in (state.losses, state.values))
    return Fit(eqx.combine(state.best, static), losses, values, np.array(seconds), taken, skipped, reason)


class _Chunk(NamedTuple):
    """What all chunks of a run share: static for the compiler."""

    loss: Callable
    optimizer: optax.GradientTransformation
    validate: Callable | None
    length: int
    batch: int
    steps: int
    average: float | None


@eqx.filter_jit
def _run(run: _Chunk, state: State, static: PyTree, data: PyTree, held_out: PyTree, inputs: PyTree) -> State:
    def loss(arrays, draw):
        return run.loss(eqx.combine(arrays, static), draw)

    def iterate(carry, inputs):
        step, (key, index) = inputs
        arrays, memory, average = carry
        draw = Draw(key, step, jax.tree.map(lambda a: a[index], data))
        value, gradient = jax.value_and_grad(loss)(arrays, draw)
        updates, new_memory = run.optimizer.update(gradient, memory, arrays)
        new_arrays = optax.apply_updates(arrays, updates)
        # The decay grows from 0.1, so that the average forgets the initial parameters.
        kept = jnp.minimum(run.average or 0.0, (1 + step) / (10 + step))
        new = new_arrays, new_memory, _averaged(average, new_arrays, kept)
        finite = jnp.isfinite(value + optax.tree.norm(gradient) + optax.tree.norm(updates))
        within = step < run.steps
        carry = jax.tree.map(lambda a, b: jnp.where(finite & within, a, b), new, carry)
        return carry, (jnp.where(finite & within, value, 0.0), finite & within, within)

    steps = state.chunk * run.length + jnp.arange(run.length)
    carry = state.parameters, state.memory, state.average
    (arrays, memory, average), (losses, finite, within) = lax.scan(iterate, carry, (steps, inputs))
    # Infinity stands for "no value": NaN in a result would stop a run under JAX_DEBUG_NANS.
    count = jnp.maximum(jnp.sum(finite), 1)
    mean = jnp.where(jnp.any(finite), jnp.sum(losses) / count, jnp.inf)
    candidate = arrays if run.average is None else average
    values = mean if run.validate is None else run.validate(eqx.combine(candidate, static), held_out)
    values = jnp.where(jnp.isnan(values), jnp.inf, values)
    value = jnp.ravel(values)[0]
    # Without validation the last parameters are returned, unless the loss has clearly risen since.
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


def _inputs(key, chunk, data, length, batch) -> tuple[PyTree, Int[Array, "steps batch"] | None]:
    """A key and row numbers for each step of a chunk."""
    count = None if data is None else jax.tree.leaves(data)[0].shape[0]
    return _drawn(key, chunk, count, length, batch)


@eqx.filter_jit
def _drawn(key, chunk, count, length, batch):
    # Not part of `_run`: random numbers take long to compile, and this program is the same for every model.
    step_key, row_key = jr.split(jr.fold_in(key, chunk))
    return jr.split(step_key, length), _rows(row_key, count, length, batch)


def _averaged(average, arrays, kept):
    return None if average is None else jax.tree.map(lambda a, b: kept * a + (1 - kept) * b, average, arrays)


def _rows(key, count, length, batch):
    """Row numbers for each step of a chunk, from successive permutations: every row is seen equally often."""
    if count is None:
        return None
    batch = min(batch, count)
    keys = jr.split(key, -(-length * batch // count))
    rows = jax.vmap(lambda key: jr.permutation(key, count))(keys)
    return rows.reshape(-1)[: length * batch].reshape(length, batch)


def _initial_state(arrays, optimizer, chunks, seen, average):
    dtype = jnp.result_type(float)
    losses, values = jnp.full(chunks, jnp.inf, dtype), jnp.full((chunks, *seen), jnp.inf, dtype)
    zero = jnp.zeros((), jnp.int32)
    no_value, no_share = jnp.array(jnp.inf, dtype), jnp.zeros((), dtype)
    memory = optimizer.init(arrays)
    return State(arrays, memory, average, arrays, no_value, zero, zero, zero, no_share, losses, values)


def _with_nan(values) -> np.ndarray:
    values = np.asarray(values)
    return np.where(np.isposinf(values), np.nan, values)


def _done(state, chunk, steps):
    return min(int(state.chunk) * chunk, steps)


def _reason(state, chunk, steps, patience) -> str | None:
    """Why a run ends here, or None if it goes on."""
    if int(state.chunk) > 0 and float(state.bad) > 0.5:
        return TOO_MANY_BAD
    if _done(state, chunk, steps) == steps:
        return "finished"
    if patience is not None and int(state.waited) >= patience:
        return "stopped early"
    return None


def _show(bar, state, run):
    bar.update(_done(state, run.length, run.steps) - bar.n)
    last = int(state.chunk) - 1
    shown = dict(loss=f"{float(state.losses[last]):.4g}")
    if run.validate is not None:
        shown |= dict(best=f"{float(state.best_value):.4g}")
    bar.set_postfix(shown)


def _warn(skipped, taken, reason):
    if reason == TOO_MANY_BAD:
        message = (
            f"Training stopped after {taken} steps because {skipped} of them had a non-finite loss or gradient. The "
            "result has the best parameters from before. Try a smaller learning rate, float64, or a finite loss."
        )
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    elif skipped:
        message = f"{skipped} of {taken} steps were skipped: their loss or gradient was not finite."
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _check(data, average):
    if average is not None and not 0 <= average < 1:
        raise ValueError(f"Expected average from 0 to below 1, or None; got {average}.")
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
    if len(lengths) > 1 or lengths & {(), (0,)}:
        raise ValueError(f"Expected data with one common number of rows, at least 1; got {sorted(lengths)}.")


def _is_frozen(leaf):
    return isinstance(leaf, paramax.NonTrainable)
