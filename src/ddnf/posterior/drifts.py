"""The check of `chains.py` for many fits in one compiled call: short MCMC chains from their draws must not change their
moments.
"""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import Identity
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.random import normal_log_prob
from ddnf.posterior.chains import CHAINS, Drift, moments_moved
from ddnf.posterior.diagnosis import Sample
from ddnf.posterior.hmc import Kernel, Space, run
from ddnf.posterior.programs import Density


def drifts_of(key: PRNGKeyArray, group: Density, samples: list[Sample]) -> list[Drift]:
    """How much short chains from the draws of each fit change its moments."""
    centers, deviations = (np.stack([f(sample.z, axis=0) for sample in samples]) for f in (np.mean, np.std))
    scales = np.stack([np.linalg.cholesky(_covariance(sample.z)) for sample in samples])
    starts = np.stack([sample.z[:CHAINS] for sample in samples])
    u = np.stack([np.linalg.solve(s, (z - c).T).T for s, z, c in zip(scales, starts, centers, strict=True)])
    dtype, keys = jnp.result_type(float), jr.split(key, len(samples))
    arrays = (np.asarray(array, dtype) for array in (centers, scales, deviations, u))
    ran = [np.asarray(array, float) for array in _run_chains(group, keys, *arrays)]
    *averages, acceptance = ran
    found = []
    for i, sample in enumerate(samples):
        with np.errstate(invalid="ignore"):
            moments = moments_moved([a[i] for a in averages], sample, centers[i], deviations[i])
        found.append(Drift(*moments, float(acceptance[i]), sample.z[:0], 0))
    return found


class _Moved(eqx.Module):
    """A density in coordinates u, z = center + scale u."""

    density: Density
    center: Float[Array, " dim"]
    scale: Float[Array, "dim dim"]

    def __call__(self, u: Float[Array, " dim"]) -> Float[Array, ""]:
        return self.density(self.center + self.scale @ u)


@eqx.filter_jit
def _run_chains(group: Density, keys, centers, scales, deviations, starts):
    """Means over the transitions of each chain (standardized points, squares, log densities), and acceptance."""

    def one(density, key, center, scale, deviation, u):
        dim = u.shape[1]
        space = Space(_Moved(density, center, scale), Identity((dim,)))
        kernel = Kernel(
            jnp.ones(dim, u.dtype), jnp.log(jnp.asarray(0.5, u.dtype)), jnp.asarray(3), jnp.zeros((), u.dtype)
        )
        tuning, key = jr.split(key)
        kernel, position, _ = run(space, tuning, kernel, space.at(u), jnp.ones((), u.dtype))
        _, _, trace = run(space, key, kernel, position, jnp.zeros((), u.dtype))
        standard = jnp.clip(trace.x @ scale.T / deviation, -4.0, 4.0)
        log_p = trace.log_weight + normal_log_prob(trace.x)
        parts = standard, standard**2, log_p
        return *(jnp.mean(part, axis=0) for part in parts), jnp.mean(trace.acceptance)

    return eqx.filter_vmap(one)(group, keys, centers, scales, deviations, starts)


def _covariance(z):
    return np.atleast_2d(np.cov(z.T)) + 1e-10 * np.diag(z.var(axis=0))
