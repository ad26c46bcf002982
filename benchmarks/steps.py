"""A training step of DDNF with any log-determinant rule, and a plain implementation without this library.

A training step is the value and the gradient of mean(|y|^2 / 2 - log det) over a batch.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import ddnf
from ddnf.flow import has_probes


class Step(NamedTuple):
    """A compiled step to call, the seconds it took to compile, and the bytes of its intermediate values."""

    run: Callable[[], Any]
    compile_seconds: float
    bytes: int


def compiled(function: Callable, *arguments: Any) -> Step:
    """Compiles a function for its arguments, to be called without any."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory: Any = program.memory_analysis()
    return Step(lambda: jax.block_until_ready(program(*arguments)), seconds, int(memory.temp_size_in_bytes))


def training_step(
    rule: ddnf.LogDet, size: dict[str, Any], batch: int, *, blocks: int = 8, steps: int = 8, recompute: Any = "cells"
) -> Step:
    """Ours. `size` holds dim and hidden."""
    flow = ddnf.DDNF(jr.key(0), blocks=blocks, steps=steps, log_det=rule, output_scale=0.5, recompute=recompute, **size)
    x = jr.normal(jr.key(1), (batch, size["dim"]))
    keys = jr.split(jr.key(2), batch)
    arrays, static = eqx.partition(flow, eqx.is_inexact_array)

    def moved(flow):
        if not has_probes(flow):
            return flow.batch_transform_and_log_det(x)
        return jax.vmap(lambda key, x: ddnf.with_key(flow, key).transform_and_log_det(x))(keys, x)

    def loss(arrays):
        y, log_det = moved(eqx.combine(arrays, static))
        return jnp.mean(jnp.sum(y**2, axis=-1) / 2 - log_det)

    return compiled(jax.value_and_grad(loss), arrays)


def plain_step(size: dict[str, Any], batch: int, *, blocks: int = 8, steps: int = 8) -> Step:
    """What one would write first: a scan, the Jacobian by autodiff, LU. The same flow as `training_step` has."""
    flow = ddnf.DDNF(jr.key(0), blocks=blocks, steps=steps, output_scale=0.5, **size)
    weights, biases = flow.fields.weights, flow.fields.biases
    x = jr.normal(jr.key(1), (batch, size["dim"]))

    def cell(layers, z):
        h = z
        for weight, bias in layers[:-1]:
            h = jnp.tanh(weight @ h + bias)
        return z + (layers[-1][0] @ h + layers[-1][1]) / steps

    def sample(parameters, x):
        def one_cell(carry, layers):
            z, log_det = carry
            jacobian = jax.jacfwd(lambda z: cell(layers, z))(z)
            return (cell(layers, z), log_det + jnp.linalg.slogdet(jacobian)[1])

        def block(carry, layers):
            return jax.lax.scan(lambda carry, _: (one_cell(carry, layers), None), carry, length=steps)

        (y, log_det), _ = jax.lax.scan(block, (x, jnp.zeros((), x.dtype)), list(zip(*parameters, strict=True)))
        return jnp.sum(y**2) / 2 - log_det

    def loss(parameters):
        return jnp.mean(jax.vmap(lambda x: sample(parameters, x))(x))

    return compiled(jax.value_and_grad(loss), (weights, biases))


def milliseconds(runs: Sequence[Callable[[], Any]], *, seconds: float) -> list[float]:
    """Median time of each of several functions, called in turn for about `seconds` in all."""
    times = [[] for _ in runs]
    for run in runs:
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for run, record in zip(runs, times, strict=True):
            run()  # warms the CPU caches
            start = time.perf_counter()
            run()
            record.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(record) for record in times]
