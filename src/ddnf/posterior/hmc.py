"""Many Markov chains at once on a target pulled back through a flow.

With z = T(x), chains sample x from log p(T(x)) + log |det J_T(x)|, which has little structure left if the flow is good.
A transition starts with an independent proposal from the flow's base, so that z is a draw of the flow. This moves a
chain to any region that the flow covers, such as other modes. Hamiltonian Monte Carlo then explores the neighbourhood.
If such proposals are rare and the base is a mixture, the other transitions start with a proposal to swap components.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ddnf.flow import batch
from ddnf.flow.random import normal_log_prob, normals
from ddnf.posterior.evaluate import Base, draw_base
from ddnf.training.devices import on_all, shared_map, shared_rows

# Transitions of one compiled program.
CHUNK = 25
ACCEPTANCE = 0.8
# Share of the trajectories with small steps, for narrow regions, and the logarithm of the smallest of them, relative to
# the other steps.
SMALL_SHARE = 0.2
_SMALLEST_STEP = -4.0
# Beyond this many dimensions, momenta have deviations only, no correlations.
_LARGEST_FULL = 512
# A trajectory with a larger energy error diverges.
_DIVERGENT = 50.0


class Kernel(NamedTuple):
    """The tuned settings: a scaling of the momenta that standardizes x, the step size and the number of steps.

    Attributes:
        scale: triangular root of the covariance of x, or a vector of deviations.
        log_step: logarithm of the step size.
        length: leapfrog steps of a transition.
        jumps: share of the transitions that begin with a proposal from the flow.
        target: mean acceptance that the step size is tuned for.
    """

    scale: Float[Array, "dim *dim"]
    log_step: Float[Array, ""]
    length: Int[Array, ""]
    jumps: Float[Array, ""] | float = 1.0
    target: Float[Array, ""] | float = ACCEPTANCE


class Position(NamedTuple):
    """The state of the chains.

    Attributes:
        x, z: the points before and after the flow.
        log_p: pulled-back log density of x.
        log_weight: log p(z) - log q(z), of the target and the flow.
        slope: gradient of `log_p`.
    """

    x: Float[Array, "n dim"]
    z: Float[Array, "n dim"]
    log_p: Float[Array, " n"]
    log_weight: Float[Array, " n"]
    slope: Float[Array, "n dim"]


class Trace(NamedTuple):
    """The trace of a chunk of transitions: positions, divergences of HMC, those of small steps among them, and accepted
    proposals of the flow."""

    x: Float[Array, "t n dim"]
    z: Float[Array, "t n dim"]
    log_weight: Float[Array, "t n"]
    acceptance: Float[Array, "t n"]
    divergent: Bool[Array, "t n"]
    narrow: Bool[Array, "t n"]
    jumped: Bool[Array, "t n"]


class Space(eqx.Module):
    """A target pulled back through a flow, whose base is the standard normal if None. Devices share the points."""

    log_density: Any
    flow: AbstractBijection
    base: Base | None = None
    mesh: Mesh | None = eqx.field(static=True, default=None)

    def at(self, x: Float[Array, "n dim"]) -> Position:
        """The target at many points of the base's space; `log_weight` is left to `weighed`."""

        def total(x):
            z, log_det = batch.transform_and_log_det(self.flow, x)
            log_p = shared_map(self.mesh, lambda density, z: jax.vmap(density)(z), self.log_density, z) + log_det
            return jnp.sum(log_p), (z, log_p)

        x = shared_rows(self.mesh, x)
        (_, (z, log_p)), slope = jax.value_and_grad(total, has_aux=True)(x)
        is_known = jnp.isfinite(log_p) & jnp.isfinite(z).all(axis=1)
        log_p = jnp.where(is_known, log_p, -jnp.inf)
        return Position(x, z, log_p, log_p, jnp.where(jnp.isfinite(slope), slope, 0.0))

    def weighed(self, position: Position) -> Position:
        return position._replace(log_weight=position.log_p - self.base_log_prob(position.x))

    def base_log_prob(self, x: Float[Array, "n dim"]) -> Float[Array, " n"]:
        return normal_log_prob(x) if self.base is None else jax.vmap(self.base.log_prob)(x)


@eqx.filter_jit
def place(space: Space, z: Float[Array, "n dim"]) -> Position:
    """Chains at points of the target's space."""
    return space.weighed(space.at(batch.inverse_and_log_det(space.flow, z.astype(jnp.result_type(float)))[0]))


def initial_kernel(dim: int, jumps: float) -> Kernel:
    """An initial kernel, for x that is nearly standard."""
    dtype = jnp.result_type(float)
    scale = jnp.eye(dim, dtype=dtype) if dim <= _LARGEST_FULL else jnp.ones(dim, dtype)
    log_step, share, target = (jnp.asarray(value, dtype) for value in (-0.7 - np.log(dim) / 4, jumps, ACCEPTANCE))
    return Kernel(scale, log_step, jnp.asarray(8), share, target)


def with_moments(kernel: Kernel, draws: Float[np.ndarray, "chains draws dim"], ess: float) -> Kernel:
    """The kernel with momenta that suit x with the covariance of these draws."""
    deviation, scale = shrunk_moments(draws, ess)[1:]
    # The step size is relative to the scale: it stays as it is.
    return kernel._replace(scale=jnp.asarray(scale if kernel.scale.ndim == 2 else deviation, kernel.scale.dtype))


def shrunk_moments(draws: Float[np.ndarray, "chains draws dim"], ess: float) -> tuple[np.ndarray, ...]:
    """Mean, deviations, triangular root of the covariance; correlations shrink where few draws are independent."""
    dim = draws.shape[-1]
    x = np.asarray(draws, float).reshape(-1, dim)
    mean, deviation = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-30)
    share = dim / (dim + ess)
    correlation = (1 - share) * np.cov(((x - mean) / deviation).T, bias=True).reshape(dim, dim) + share * np.eye(dim)
    return mean, deviation, deviation[:, None] * np.linalg.cholesky(correlation)


def nowhere(chains: int, dim: int) -> Position:
    """Chains before their first transition, which accept any proposal of the flow."""
    points, values = jnp.zeros((chains, dim)), jnp.full(chains, -jnp.inf)
    return Position(points, points, values, values, points)


@eqx.filter_jit
def run(
    space: Space, key: PRNGKeyArray, kernel: Kernel, position: Position, gain: Float[Array, ""]
) -> tuple[Kernel, Position, Trace]:
    """A chunk of transitions of all chains; the step size is adapted with a gain above 0.

    Example:
        >>> import ddnf
        >>> space = Space(lambda z: -jnp.sum(z**2) / 2, ddnf.DDNF(jr.key(0), 2))
        >>> kernel = Kernel(jnp.ones(2), jnp.array(-1.0), jnp.array(4))
        >>> kernel, position, trace = run(space, jr.key(1), kernel, nowhere(8, 2), jnp.array(0.1))
        >>> trace.z.shape
        (25, 8, 2)
    """

    def transition(carry, number):
        kernel, before = carry
        position, acceptance, *flags = _transition(space, jr.fold_in(key, number), kernel, before)
        change = gain / jnp.sqrt(1.0 + number) * (jnp.mean(acceptance) - kernel.target)
        kernel = kernel._replace(log_step=(kernel.log_step + change).astype(kernel.log_step.dtype))
        trace = Trace(position.x, position.z, position.log_weight, acceptance, *flags)
        return (kernel, position), trace

    (kernel, position), trace = lax.scan(transition, (kernel, position), jnp.arange(CHUNK))
    return on_all(space.mesh, (kernel, position, trace))


def _transition(space: Space, key, kernel: Kernel, before: Position):
    """A proposal from the flow, independent of where the chain is, or of a swap; then a Hamiltonian trajectory.

    Some trajectories take small steps, which narrow places need. The proposal is the first iteration of the same loop,
    so that the flow and the target are compiled once; without proposals, that iteration is left out.
    """
    n, dim = before.x.shape
    dtype = before.x.dtype
    momentum_key, uniform_key, base_key = jr.split(key, 3)
    momentum = normals(momentum_key, n, (dim,)).astype(dtype)
    size, kind, jumps, *accept = jr.uniform(uniform_key, (5, n), dtype)
    is_jump = jumps < kernel.jumps
    proposal, correction = _proposal(space.base, base_key, before, is_jump)
    proposal_base = space.base_log_prob(proposal)
    is_small = kind < SMALL_SHARE
    step = (jnp.exp(kernel.log_step) * jnp.where(is_small, jnp.exp(_SMALLEST_STEP * size), 0.5 + 0.5 * size))[:, None]

    def evaluate(number, carry):
        position, start, p = carry
        is_first = number == 0
        half = p + step / 2 * _pull(kernel.scale, position.slope)
        new = space.at(jnp.where(is_first, proposal, position.x + step * _push(kernel.scale, half)))
        jump_gain = new.log_p - proposal_base - position.log_weight
        gain = jnp.where(is_jump, jump_gain, new.log_p - position.log_p + correction)
        position = _choose(~is_first | (jnp.log(accept[1]) < gain), new, position)
        p = jnp.where(is_first, p, half + step / 2 * _pull(kernel.scale, new.slope))
        return position, jax.tree.map(lambda a, b: jnp.where(is_first, a, b), position, start), p

    first = jnp.where((kernel.jumps > 0) | (space.base is not None), 0, 1)
    after, start, p = lax.fori_loop(first, kernel.length + 1, evaluate, (before, before, momentum))
    change = after.log_p - start.log_p + jnp.sum(momentum**2 - p**2, axis=1) / 2
    change = jnp.where(jnp.isnan(change), -jnp.inf, change)
    acceptance = jnp.exp(jnp.minimum(change, 0.0))
    jumped = is_jump & (start.x != before.x).any(axis=1)
    last = space.weighed(_choose(accept[0] < acceptance, after, start))
    is_divergent = change < -_DIVERGENT
    return last, acceptance, is_divergent, is_divergent & is_small, jumped


def _proposal(base: Base | None, key, before: Position, is_jump):
    """Draws of the base, or swaps of its components with their correction; without components, none but draws."""
    n, dim = before.x.shape
    draws = draw_base(base, key, n, (dim,))[0].astype(before.x.dtype)
    if base is None:
        return draws, jnp.full(n, -jnp.inf, before.x.dtype)
    swapped, correction = base.swap(jr.fold_in(key, 1), before.x)
    return jnp.where(is_jump[:, None], draws, swapped), correction


def _choose(accepted, after: Position, before: Position) -> Position:
    return jax.tree.map(lambda a, b: jnp.where(accepted.reshape(-1, *[1] * (a.ndim - 1)), a, b), after, before)


def _push(scale, p):
    return p @ scale.T if scale.ndim == 2 else p * scale


def _pull(scale, slope):
    return slope @ scale if scale.ndim == 2 else slope * scale
