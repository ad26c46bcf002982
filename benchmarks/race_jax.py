"""The JAX side of the race. All flows are trained in a compiled scan, which is faster than their own loops.

python -m benchmarks.race_jax NAME energy1 [--limit SECONDS]
"""

from benchmarks import one_core

one_core.keep()

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import StandardNormal
from flowjax.flows import masked_autoregressive_flow

import ddnf
from benchmarks import race
from ddnf.flow import batch
from ddnf.flows import make
from ddnf.posterior import ReverseKL, best_gradient
from ddnf.training import Draw
from ddnf_paper.targets.toy import ENERGIES


def ours(key: Any) -> Any:
    return ddnf.DDNF(key, 2, blocks=4, steps=4, hidden=(16, 16))


def spline_maf(key: Any) -> Any:
    # Fast from noise to points, as sampling needs.
    spline = RationalQuadraticSpline(knots=8, interval=5)
    base = StandardNormal((2,))
    return masked_autoregressive_flow(
        key, base_dist=base, transformer=spline, flow_layers=3, nn_width=64, nn_depth=2, invert=False
    ).bijection


def from_catalog(name: str, layers: int) -> Callable[[Any], Any]:
    """A flow of `ddnf.flows`: BNAF is FlowJAX's network, the continuous flow is solved by Diffrax."""
    return lambda key: make(name, key, 2, layers)


def scanned(build: Callable, rate: race.Rate, energy: str, limit: float, seed: int) -> dict:
    """Adam on E_q[log q - log p] by draws of q; ours with path gradients, as in `fit_posterior`."""
    flow = build(jr.key(seed))
    gradient = best_gradient(flow) if isinstance(flow, ddnf.DDNF) else "total"
    loss = ReverseKL(ENERGIES[energy].log_density, None, None, race.BATCH, gradient, 0, jnp.asarray(1.0))
    arrays, static = eqx.partition(flow, eqx.is_inexact_array)
    optimizer = optax.adam(optax.cosine_decay_schedule(*rate, alpha=0.01))

    def step(carry, number):
        arrays, state = carry
        draw = Draw(jr.fold_in(jr.key(seed + 1), number), number, None)
        slope = jax.grad(lambda arrays: loss(eqx.combine(arrays, static), draw))(arrays)
        updates, state = optimizer.update(slope, state, arrays)
        return (optax.apply_updates(arrays, updates), state), None

    def chunk(carry, first):
        return jax.lax.scan(step, carry, first + jnp.arange(race.CHUNK))[0]

    carry = (arrays, optimizer.init(arrays))
    start = time.perf_counter()
    program = jax.jit(chunk).lower(carry, jnp.asarray(0)).compile()
    compile_seconds = time.perf_counter() - start
    kl = _divergence(static, energy)
    course: dict[str, Any] = dict(carry=carry, first=0)

    def train():
        course["carry"] = jax.block_until_ready(program(course["carry"], jnp.asarray(course["first"])))
        course["first"] += race.CHUNK

    def evaluate():
        arrays, _ = course["carry"]
        value = float(kl(arrays))
        return value if value > race.GOAL or not _folds(eqx.combine(arrays, static)) else float("inf")

    found = race.run(train, evaluate, limit=limit, compile_seconds=compile_seconds)
    return dict(**found, rate=rate[0], horizon=rate[1])


def _folds(flow: Any) -> bool:
    """Whether a DDNF folds, and so has no density; the other flows cannot."""
    return isinstance(flow, ddnf.DDNF) and ddnf.certify(flow, jnp.asarray(race.noise()[:4096])).verdict == "folds"


def _divergence(static: Any, energy: str) -> Callable:
    x = jnp.asarray(race.noise())

    @jax.jit
    def kl(arrays):
        z, log_det = batch.transform_and_log_det(eqx.combine(arrays, static), x)
        log_q = jnp.sum(jax.scipy.stats.norm.logpdf(x), axis=1) - log_det
        return jnp.mean(log_q - jax.vmap(ENERGIES[energy].log_density)(z))

    return kl


RACERS: dict[str, Callable[[str, float, int], dict]] = {
    "ours": partial(scanned, ours, (2e-2, 1500)),
    "FlowJAX MAF-RQS": partial(scanned, spline_maf, (5e-3, 2000)),
    "FlowJAX BNAF": partial(scanned, from_catalog("bnaf", 2), (2e-2, 4000)),
    "Diffrax CNF": partial(scanned, from_catalog("cnf", 1), (1e-2, 1000)),
    "planar": partial(scanned, from_catalog("planar", 32), (2e-2, 8000)),
}

if __name__ == "__main__":
    race.main(RACERS)
