"""One optimisation loop for all objectives: scanned, resumable, robust to NaN, with a progress bar."""

import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from os import PathLike
from threading import Lock
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import paramax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Scalar
from tqdm.auto import tqdm

from ddnf.system.checks import check_count, check_key
from ddnf.training.checkpoint import Checkpoints, fingerprint
from ddnf.training.chunk import Chunk, Draw, Oracle, State, run_chunk
from ddnf.training.devices import Devices, copy_to_all, gather, mesh_of
from ddnf.training.feed import Feed, Stream
from ddnf.training.processes import from_first, is_first, one_clear_end

TOO_MANY_BAD = "too many steps were not finite"

# Two chunks from two threads can deadlock in the thread pool of a CPU with few cores.
_RUNNING = Lock()


class Fit(NamedTuple):
    """The result of `fit`.

    Attributes:
        parameters: the best by the validation value. Without validation, the last, or those before a lasting rise of
            the loss.
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


class AdamState(NamedTuple):
    """The state of `adam`; its schedule is a part of it, so that all schedules share one compiled program."""

    inner: PyTree
    step: Int[Array, ""]
    peak: Float[Array, ""]
    steps: Int[Array, ""]
    warmup: Int[Array, ""]


def adam(
    learning_rate: float, steps: int, *, clip: float = 10.0, warmup: float = 0.02, b2: float = 0.999
) -> optax.GradientTransformation:
    """Adam with a short warm-up, cosine decay to 0.001 of the peak learning rate, and clipped gradients.

    `b2` is the decay of the mean square of gradients.

    Example:
        >>> optimizer = adam(1e-2, 1000)
    """
    init_inner, update = _adam(clip, b2)

    def init(params):
        numbers = [np.asarray(count, np.int32) for count in (0, max(2, steps), max(1, int(warmup * steps)))]
        start, *counts = jax.device_put(numbers)
        peak = jax.device_put(np.asarray(learning_rate, jnp.result_type(float)))
        return AdamState(init_inner(params), start, peak, *counts)

    return optax.GradientTransformation(init, update)


@lru_cache
def _adam(clip, b2):
    # Flattened: one update of all parameters compiles and runs faster than one for each array.
    inner = optax.flatten(optax.chain(optax.clip_by_global_norm(clip), optax.scale_by_adam(b2=b2)))
    init = jax.jit(inner.init)

    def update(updates, state, params=None):
        updates, new = inner.update(updates, state.inner, params)
        rate = -state.peak * _relative_rate(state.step, state.steps, state.warmup)
        updates = jax.tree.map(lambda u: (rate * u).astype(u.dtype), updates)
        return updates, state._replace(inner=new, step=state.step + 1)

    return init, update


def _relative_rate(step, steps, warmup):
    """From 0.1 to 1 in a straight line, then to 0.001 by half a cosine."""
    rising = 0.1 + 0.9 * step / warmup
    fraction = jnp.clip((step - warmup) / jnp.maximum(steps - warmup, 1), 0.0, 1.0)
    return jnp.where(step < warmup, rising, 1e-3 + (1 - 1e-3) * (1 + jnp.cos(jnp.pi * fraction)) / 2)


def fit(
    key: PRNGKeyArray,
    parameters: PyTree,
    loss: Callable[[PyTree, Draw], Scalar],
    *,
    steps: int,
    optimizer: optax.GradientTransformation,
    data: PyTree | Stream = None,
    oracle: Oracle | None = None,
    batch: int = 256,
    validate: Callable[[PyTree, PyTree], Float[Array, "*more"]] | None = None,
    held_out: PyTree = None,
    chunk: int = 100,
    patience: int | None = None,
    average: float | None = None,
    checkpoint: str | PathLike | None = None,
    checkpoint_seconds: float = 30.0,
    devices: Devices = None,
    progress: bool = True,
    description: str = "fit",
    warn: bool = True,
    capacity: int | None = None,
) -> Fit:
    """Minimizes `loss(parameters, draw)` with optax, in compiled chunks of many steps.

    Between chunks, the host updates the progress bar, compares validation values, writes checkpoints, and stops early
    or if more than half of a chunk's steps were not finite. An interrupted run that is started again with the same
    arguments and `checkpoint` ends with bitwise identical parameters; with other arguments it raises an error.

    Args:
        key: random key; each step derives its own.
        parameters: any pytree; its floating-point arrays are trained (those under `paramax.NonTrainable` not).
        loss: the loss of a step from the parameters and a `Draw` (key, step, rows of the data). With a `MeanLoss`,
            several devices exchange data once per step; otherwise, the compiler decides when they do.
        steps: number of steps.
        optimizer: any optax optimizer.
        data: pytree of arrays with a common leading axis; each step sees `batch` rows, by random permutations. Or a
            `Stream` of rows, which has its own order.
        oracle: an `Oracle` that each step queries before its loss is computed, instead of data. Steps are then
            dispatched one by one, and their program does not depend on the oracle, so it is compiled once for all.
        validate: value to minimize, from the parameters and `held_out`, computed after each chunk; decides which
            parameters are returned. For an array of values, the first decides, and the others are only recorded.
        chunk: steps per compiled call.
        patience: stop after this many chunks without a better validation value.
        average: decay of a moving average of the parameters, such as 0.999; the average is validated and returned. It
            removes the noise of a constant learning rate.
        checkpoint: folder for checkpoints (needs orbax-checkpoint); an interrupted run resumes from there.
        checkpoint_seconds: time between checkpoints.
        devices: the devices that share the rows of each step: "all", a number, or a mesh with one axis. None for JAX's
            default device. The result agrees with that of one device up to rounding. A run may be resumed with other
            devices. A loss or an oracle that makes its own rows must shard them itself.
        progress: whether to show a progress bar.
        warn: whether to warn about steps that were not finite; False for callers that report on their own results.
        capacity: number of steps that the state has room for, if more than `steps`; runs of one capacity share a
            program.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr, optax
        >>> result = fit(jr.key(0), jnp.ones(3), lambda x, draw: jnp.sum(x**2), steps=200,
        ...              optimizer=optax.sgd(0.1), progress=False)
        >>> bool(jnp.max(jnp.abs(result.parameters)) < 1e-6)
        True
    """
    check_key(key)
    check_count(steps=steps, chunk=chunk, batch=batch, patience=patience)
    _check(average)
    mesh = mesh_of(devices)
    chunk = min(chunk, steps)
    feed = Feed(key, data, length=chunk, batch=batch, mesh=mesh)
    arrays, static = eqx.partition(parameters, eqx.is_inexact_array, is_leaf=_is_frozen)
    seen = (
        jax.ShapeDtypeStruct((), float) if validate is None else eqx.filter_eval_shape(validate, parameters, held_out)
    )
    # Room for a multiple of 32 chunks: most runs share the programs that contain it.
    chunks = -(-max(steps, capacity or 0) // chunk // 32) * 32
    state = _initial_state(arrays, optimizer, chunks, seen.shape, None if average is None else arrays)
    run = Chunk(loss, optimizer.update, validate, chunk, jax.device_put(np.asarray(steps)), average, mesh)
    # Random numbers of a chunk derive from its number, so the state holds none.
    settings = dict(counts=(steps, chunk, batch, average), functions=(loss, validate, optimizer.update))
    mark = fingerprint((jr.key_data(key), arrays, state.memory, feed.mark, held_out), settings)
    saved = Checkpoints(checkpoint if is_first() else None, checkpoint_seconds, mark)
    state = copy_to_all(mesh, from_first(feed.processes, saved.restore(state)))
    held_out = copy_to_all(mesh, held_out)
    seconds = [np.nan] * int(state.chunk)
    shown: dict[str, Any] = dict(desc=description, disable=not (progress and is_first()), leave=None)
    with tqdm(total=steps, initial=_done(state, chunk, steps), **shown) as bar, one_clear_end(feed.processes):
        reason = _reason(state, chunk, steps, patience)
        while reason is None:
            start = time.perf_counter()
            inputs = feed.inputs(np.asarray(state.chunk))
            with _RUNNING:
                state = run_chunk(run, state, static, data=feed.table, held_out=held_out, inputs=inputs, oracle=oracle)
                jax.block_until_ready(state)
            seconds.append(time.perf_counter() - start)
            _show(bar, state, _done(state, chunk, steps), validate is not None)
            reason = _reason(state, chunk, steps, patience)
            saved.save(state, int(state.chunk), last=reason is not None)
    skipped, taken = int(state.skipped), _done(state, chunk, steps)
    if warn:
        _warn(skipped, taken, reason)
    state = gather(mesh, state)
    done = int(state.chunk)
    losses, values = (_with_nan(array)[:done] for array in (state.losses, state.values))
    return Fit(eqx.combine(state.best, static), losses, values, np.array(seconds), taken, skipped, reason)


def _initial_state(arrays, optimizer, chunks, seen, average):
    dtype = jnp.result_type(float)
    # From NumPy: each operation of JAX outside of a program would be compiled.
    losses, values, no_value = (np.full(shape, np.inf, dtype) for shape in (chunks, (chunks, *seen), ()))
    zero, no_share = np.zeros((), np.int32), np.zeros((), dtype)
    numbers = jax.device_put((no_value, zero, zero, zero, no_share, losses, values))
    return State(arrays, optimizer.init(arrays), average, arrays, *numbers)


def _with_nan(values) -> np.ndarray:
    values = np.asarray(values)
    return np.where(np.isposinf(values), np.nan, values)


def _done(state, chunk, steps):
    return min(int(state.chunk) * chunk, steps)


def _reason(state, chunk, steps, patience) -> str | None:
    """Why a run ends here, or None if it continues."""
    if int(state.chunk) > 0 and float(state.bad) > 0.5:
        return TOO_MANY_BAD
    if _done(state, chunk, steps) == steps:
        return "finished"
    if patience is not None and int(state.waited) >= patience:
        return "stopped early"
    return None


def _show(bar, state, done, is_validated):
    bar.update(done - bar.n)
    last = int(state.chunk) - 1
    shown = dict(loss=f"{np.asarray(state.losses)[last]:.4g}")
    if is_validated:
        shown |= dict(best=f"{float(state.best_value):.4g}")
    bar.set_postfix(shown)


def _warn(skipped, taken, reason):
    if reason == TOO_MANY_BAD:
        message = (
            f"Training stopped after {taken} steps because {skipped} of them had a non-finite loss or gradient. The "
            "result has the best earlier parameters. Try a smaller learning rate, float64, or a finite loss."
        )
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    elif skipped:
        message = f"{skipped} of {taken} steps were skipped because their loss or gradient was not finite."
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _check(average):
    if average is not None and not 0 <= average < 1:
        raise ValueError(f"Expected average from 0 to below 1, or None; got {average}.")


def _is_frozen(leaf):
    return isinstance(leaf, paramax.NonTrainable)
