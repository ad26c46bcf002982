"""Continuous normalizing flows: a neural ODE solved by Diffrax with adaptive steps."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from flowjax.bijections import AbstractBijection
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.baselines.parameters import condition_shape
from ddnf.optional import require

T = TypeVar("T")


class CNF(AbstractBijection):
    """The time-1 map of dz/dt = v(z, t, condition), v an MLP; its log-determinant is the integral of div v.

    Chen, Rubanova, Bettencourt and Duvenaud, "Neural ordinary differential equations", 2018; with `hutchinson`
    Grathwohl et al., "FFJORD", 2019. Solved by Tsitouras's 5(4) method; the inverse is the way back, as exact as the
    tolerances. A point that needs more than `max_steps` steps comes out as infinite.

    The trace is exact, or e.J e with one sign vector e for each point (Hutchinson). As bijections take no
    key, e is drawn from the bijection's own and from the bits of the point: other points have other probes, and the
    same point has always the same, so that a log density is a function. The two directions see different
    points, so there their log-determinants differ by noise. `exactly` gives the same map with the exact trace.

    Args:
        key: random key of the weights and the probes.
        dim: dimension.
        condition_dim: dimension of the condition, an input of the MLP; None for a flow without.
        size: hidden units in each of the MLP's two layers.
        hutchinson: whether to estimate the trace.
        rtol, atol: tolerances of the solver; FFJORD's.
        max_steps: of the solver.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> flow = CNF(jr.key(0), 2)
        >>> y, log_det = flow.transform_and_log_det(jnp.array([1.0, -2.0]))
        >>> bool(jnp.allclose(flow.inverse(y), jnp.array([1.0, -2.0]), atol=1e-3))
        True
    """

    velocity: eqx.nn.MLP
    probe_key: PRNGKeyArray | None
    shape: tuple[int, ...] = eqx.field(static=True)
    cond_shape: tuple[int, ...] | None = eqx.field(static=True)
    rtol: float = eqx.field(static=True)
    atol: float = eqx.field(static=True)
    max_steps: int = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKeyArray,
        dim: int,
        *,
        condition_dim: int | None = None,
        size: int = 64,
        hutchinson: bool = False,
        rtol: float = 1e-5,
        atol: float = 1e-5,
        max_steps: int = 1024,
    ):
        require("diffrax", "diffrax")
        key, probe_key = jr.split(key)
        velocity = eqx.nn.MLP(dim + 1 + (condition_dim or 0), dim, size, 2, jnp.tanh, key=key)
        # Slow at first: nearly the identity.
        self.velocity = eqx.tree_at(lambda net: net.layers[-1].weight, velocity, replace_fn=lambda w: 0.1 * w)
        self.probe_key = probe_key if hutchinson else None
        self.shape, self.cond_shape = (dim,), condition_shape(condition_dim)
        self.rtol, self.atol, self.max_steps = rtol, atol, max_steps

    def transform_and_log_det(self, x: Any, condition: Any = None):
        return self._solve(x, condition, 0.0, 1.0)

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        return self._solve(y, condition, 1.0, 0.0)

    def _solve(self, z, condition, start, end):
        diffrax = require("diffrax", "diffrax")
        probes = self._probes(z)

        def change(t, state, _):
            t = t.astype(z.dtype)[None]
            given = [t] if self.cond_shape is None else [t, condition]
            # The trace from the probes alone: the sum of e.J e, the unit vectors if it is exact.
            velocity, push = jax.linearize(lambda z: self.velocity(jnp.concatenate([z, *given])), state[0])
            return velocity, jnp.sum(jax.vmap(push)(probes) * probes)

        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(change),
            diffrax.Tsit5(),
            start,
            end,
            None,
            (z, jnp.zeros((), z.dtype)),
            stepsize_controller=diffrax.PIDController(rtol=self.rtol, atol=self.atol),
            max_steps=self.max_steps,
            throw=False,
        )
        z, log_det = solution.ys
        return z[0], log_det[0]

    def _probes(self, z) -> Float[Array, "probes dim"]:
        if self.probe_key is None:
            return jnp.eye(len(z), dtype=z.dtype)
        bits = lax.bitcast_convert_type(z.astype(jnp.float32), jnp.uint32)
        # A random hash: odd factors, so that every bit counts.
        number = jnp.sum(bits * (jr.bits(self.probe_key, bits.shape) | 1), dtype=jnp.uint32)
        return jr.rademacher(jr.fold_in(self.probe_key, number), (1, len(z)), z.dtype)


def exactly(tree: T) -> T:
    """The same maps with the exact trace wherever there is a `CNF` with Hutchinson's: to judge what it has trained.

    Example:
        >>> import jax.random as jr
        >>> exactly(CNF(jr.key(0), 2, hutchinson=True)).probe_key is None
        True
    """

    def exact(node):
        if not isinstance(node, CNF) or node.probe_key is None:
            return node
        return eqx.tree_at(lambda cnf: cnf.probe_key, node, None)

    return jax.tree.map(exact, tree, is_leaf=lambda node: isinstance(node, CNF))
