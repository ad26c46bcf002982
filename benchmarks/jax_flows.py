"""Peers in JAX: ours, Diffrax, bijx, jflows and FlowJAX, as maps of a batch with log-determinants."""

# The peers are installed in a separate environment.
# pyright: reportMissingImports=false

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from flowjax.bijections import Invert, RationalQuadraticSpline
from flowjax.distributions import StandardNormal
from flowjax.flows import block_neural_autoregressive_flow, masked_autoregressive_flow

import ddnf
from benchmarks import roofline
from benchmarks.steps import compiled
from ddnf.flow import batch, has_probes

# A Tsitouras step evaluates the field six times, one of RK4 four times.
TSIT5_STEPS, RK4_STEPS = 6, 4


class Map(NamedTuple):
    """Parameters, and two functions (parameters, key, x) -> (y, log det) of a batch: from noise to points and back."""

    parameters: Any
    forward: Callable
    backward: Callable


def ours(size: dict[str, Any], *, rule: Any = None, turned: bool = False) -> Map:
    flow = ddnf.DDNF(
        jr.key(0),
        size["dim"],
        hidden=size["hidden"],
        blocks=size["blocks"],
        steps=size["steps"],
        log_det=rule,
        output_scale=0.5,
        recompute=size.get("recompute", "cells"),
    )
    return of_bijection(Invert(flow) if turned else flow)


def of_bijection(bijection: Any) -> Map:
    """A FlowJAX bijection, ours among them."""
    arrays, static = eqx.partition(bijection, eqx.is_inexact_array)

    def carry(method, arrays, key, x):
        whole = eqx.combine(arrays, static)
        if not has_probes(whole):
            return getattr(batch, method)(whole, x)

        def one(key, x):
            return getattr(ddnf.with_key(whole, key), method)(x)

        return jax.vmap(one)(jr.split(key, len(x)), x)

    return Map(arrays, partial(carry, "transform_and_log_det"), partial(carry, "inverse_and_log_det"))


def diffrax_cnf(
    size: dict[str, Any], *, solver: Any, evaluations: int, hutchinson: bool, all_checkpoints: bool = True
) -> Map:
    """A continuous flow as in Diffrax's own example: an MLP of (z, t), in constant steps.

    With a checkpoint for every step the gradient recomputes nothing, which was faster than Diffrax's default.
    """
    dim, cells = size["dim"], size["blocks"] * size["steps"]
    times = jnp.linspace(0.0, 1.0, max(1, round(cells / evaluations)) + 1)
    velocity = _mlp(dim, size["hidden"])

    def trace(field, z, probe):
        v, pull = jax.vjp(field, z)
        if hutchinson:
            return v, jnp.sum(pull(probe)[0] * probe)
        return v, jnp.trace(jax.vmap(pull)(jnp.eye(dim))[0])

    def one(velocity, times, key, x):
        probe = jr.rademacher(key, (dim,), x.dtype) if hutchinson else None

        def change(t, state, _):
            return trace(lambda z: velocity(jnp.append(z, t)), state[0], probe)

        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(change),
            solver(),
            times[0],
            times[-1],
            None,
            (x, jnp.zeros(())),
            stepsize_controller=diffrax.StepTo(ts=times),
            max_steps=len(times),
            adjoint=diffrax.RecursiveCheckpointAdjoint(len(times) if all_checkpoints else None),
        )
        return jax.tree.map(lambda a: a[0], solution.ys)

    def carry(times, velocity, key, x):
        return jax.vmap(partial(one, velocity, times))(jr.split(key, len(x)), x)

    return Map(velocity, partial(carry, times), partial(carry, times[::-1]))


class _Network(eqx.Module):
    """Layers of any widths with tanh between them."""

    layers: list[eqx.nn.Linear]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


def _mlp(dim: int, hidden: tuple[int, ...]) -> _Network:
    widths = [dim + 1, *hidden, dim]
    keys = jr.split(jr.key(0), len(widths))
    pairs = zip(widths[:-1], widths[1:], keys[1:], strict=True)
    return _Network([eqx.nn.Linear(n_in, n_out, key=key) for n_in, n_out, key in pairs])


def bijx_cnf(size: dict[str, Any]) -> Map:
    """Its own RK4 with the exact trace, as many evaluations as we have cells."""
    from bijx.bijections import continuous

    velocity = _mlp(size["dim"], size["hidden"])
    steps = max(1, round(size["blocks"] * size["steps"] / RK4_STEPS))
    arrays, static = eqx.partition(velocity, eqx.is_inexact_array)

    # Its gradient reaches the arguments of the field, not its closure.
    def field(t, x, arrays):
        network = eqx.combine(arrays, static)
        return jax.vmap(lambda z: network(jnp.append(z, t)))(x) if x.ndim > 1 else network(jnp.append(x, t))

    flow = continuous.ContFlowRK4(continuous.AutoJacVF(field), steps=steps)

    def carry(method, arrays, key, x):
        y, change = getattr(flow, method)(x, jnp.zeros(len(x)), arrays=arrays)
        return y, -change

    return Map(arrays, partial(carry, "forward"), partial(carry, "reverse"))


def jflows_cnf(size: dict[str, Any], *, exact: bool) -> Map:
    from jflows.flow import CNF

    steps = max(1, round(size["blocks"] * size["steps"] / RK4_STEPS))
    flow = CNF(
        jr.key(0), size["dim"], nt=steps, exact=exact, hidden_features=tuple(size["hidden"]), activation=jnp.tanh
    )
    arrays, static = eqx.partition(flow, eqx.is_inexact_array)

    def carry(method, arrays, key, x):
        return getattr(eqx.combine(arrays, static).with_trace_key(key), method)(x)

    return Map(arrays, partial(carry, "call_and_ladj"), partial(carry, "inv_and_ladj"))


def spline_maf(size: dict[str, Any]) -> Map:
    """FlowJAX's, three layers of splines with eight knots; fast from points to noise."""
    spline = RationalQuadraticSpline(knots=8, interval=5)
    base = StandardNormal((size["dim"],))
    flow = masked_autoregressive_flow(
        jr.key(0), base_dist=base, transformer=spline, flow_layers=3, nn_width=64, nn_depth=2
    )
    return of_bijection(flow.bijection)


def bnaf(size: dict[str, Any]) -> Map:
    """FlowJAX's with its defaults; fast from points to noise, bisection back."""
    return of_bijection(block_neural_autoregressive_flow(jr.key(0), base_dist=StandardNormal((size["dim"],))).bijection)


_EULER = partial(diffrax_cnf, solver=diffrax.Euler, evaluations=1)
_TSIT5 = partial(diffrax_cnf, solver=diffrax.Tsit5, evaluations=TSIT5_STEPS)
MAPS: dict[str, Callable[[dict[str, Any]], Map]] = {
    "ours": ours,
    "ours, from points to noise": partial(ours, turned=True),
    "Diffrax CNF, Euler, exact": partial(_EULER, hutchinson=False),
    "Diffrax CNF, Euler, exact, default adjoint": partial(_EULER, hutchinson=False, all_checkpoints=False),
    "Diffrax CNF, Euler, Hutchinson": partial(_EULER, hutchinson=True),
    "Diffrax CNF, Tsit5, exact": partial(_TSIT5, hutchinson=False),
    "Diffrax CNF, Tsit5, Hutchinson": partial(_TSIT5, hutchinson=True),
    "bijx CNF, RK4, exact": bijx_cnf,
    "jflows CNF, RK4, exact": partial(jflows_cnf, exact=True),
    "jflows CNF, RK4, Hutchinson": partial(jflows_cnf, exact=False),
    "FlowJAX MAF-RQS": spline_maf,
    "FlowJAX BNAF": bnaf,
}


def prepare(work: str, peer: str, size: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A compiled function that does the work once, and facts about it."""
    if work == "products":
        return roofline.prepare(peer, size)
    if size.get("fresh"):
        jax.clear_caches()
    flow = MAPS[peer](size)
    x = jr.normal(jr.key(1), (size["batch"], size["dim"]))
    step = compiled(_WORKS[work](flow), flow.parameters, jr.key(2), x)
    return step.run, dict(compile_seconds=step.compile_seconds, bytes=step.bytes)


def _step(flow: Map) -> Callable:
    def loss(parameters, key, x):
        y, log_det = flow.forward(parameters, key, x)
        return jnp.mean(jnp.sum(y**2, axis=1) / 2 - log_det)

    return jax.value_and_grad(loss)


def _sample(flow: Map) -> Callable:
    return lambda parameters, key, x: flow.forward(parameters, key, jr.normal(key, x.shape))[0]


def _log_prob(flow: Map) -> Callable:
    def log_prob(parameters, key, x):
        z, log_det = flow.backward(parameters, key, x)
        return jnp.sum(jax.scipy.stats.norm.logpdf(z), axis=1) + log_det

    return log_prob


_WORKS = dict(step=_step, sample=_sample, log_prob=_log_prob)
