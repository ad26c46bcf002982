"""Continuous normalizing flows: neural ODEs solved by Diffrax with adaptive steps."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from flowjax.bijections import AbstractBijection
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flows.parameters import condition_shape
from ddnf.system.optional import require

T = TypeVar("T")
EVALUATION_TOLERANCE, TRAINING_TOLERANCE = 1e-5, 1e-4
_FIRST_STEP = 0.25


class CNF(AbstractBijection):
    """The time-1 maps of dz/dt = v_k(z, t, condition), k = 1..layers, composed; each v_k is an MLP.

    The log-determinant is the integral of div v. Chen, Rubanova, Bettencourt and Duvenaud, "Neural ordinary
    differential equations", 2018; with `hutchinson`, Grathwohl et al., "FFJORD", 2019. The solver is Tsitouras's 5(4)
    method, and the inverse integrates backwards in time, accurate to the tolerances. Each point has its own adaptive
    steps, so that its image does not depend on the rest of a batch. (FFJORD's code solves a batch as one system with
    common steps; that is about a third faster, but there a point's density depends on its neighbours.) A point that
    needs more than `max_steps` steps is mapped to infinity.

    The trace is exact, or e.J e with one sign vector e per point (Hutchinson). As bijections take no key, e is drawn
    from the bijection's own key and from the bits of the point: different points have different probes, and the same
    point always has the same one, so that a log density is a function. The two directions see different
    points, so their log-determinants differ by noise. `for_evaluation` gives the same map with the exact trace.

    Args:
        key: random key of the weights and the probes.
        dim: dimension.
        layers: number of fields, each integrated over one unit of time.
        condition_dim: dimension of the condition, an input of the MLP; None for none.
        size: hidden units in each of the MLP's two layers.
        hutchinson: whether to estimate the trace.
        rtol, atol: tolerances of the solver; the defaults are FFJORD's.
        max_steps: maximum number of solver steps.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> flow = CNF(jr.key(0), 2)
        >>> y, log_det = flow.transform_and_log_det(jnp.array([1.0, -2.0]))
        >>> bool(jnp.allclose(flow.inverse(y), jnp.array([1.0, -2.0]), atol=1e-3))
        True
    """

    velocity: eqx.nn.MLP
    probe_key: PRNGKeyArray | None
    rtol: float
    atol: float
    shape: tuple[int, ...] = eqx.field(static=True)
    cond_shape: tuple[int, ...] | None = eqx.field(static=True)
    max_steps: int = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKeyArray,
        dim: int,
        *,
        layers: int = 1,
        condition_dim: int | None = None,
        size: int = 64,
        hutchinson: bool = False,
        rtol: float = EVALUATION_TOLERANCE,
        atol: float = EVALUATION_TOLERANCE,
        max_steps: int = 1024,
    ):
        require("diffrax", "diffrax")
        key, probe_key = jr.split(key)
        inputs = dim + 1 + (condition_dim or 0)
        make = eqx.filter_vmap(lambda key: eqx.nn.MLP(inputs, dim, size, 2, jnp.tanh, key=key))
        # Small output weights, so that the flow starts near the identity.
        self.velocity = eqx.tree_at(
            lambda net: net.layers[-1].weight, make(jr.split(key, layers)), replace_fn=lambda w: 0.1 * w
        )
        self.probe_key = jr.split(probe_key, layers) if hutchinson else None
        self.shape, self.cond_shape = (dim,), condition_shape(condition_dim)
        self.rtol, self.atol, self.max_steps = rtol, atol, max_steps

    def transform_and_log_det(self, x: Any, condition: Any = None):
        return _integrate(self, x, condition, 0.0, 1.0)

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        return _integrate(self, y, condition, 1.0, 0.0)


def _integrate(flow: CNF, z, condition, start: float, end: float):
    """Through all fields, in reverse order when integrating backwards in time."""
    arrays, static = eqx.partition(flow.velocity, eqx.is_array)

    def layer(carry, arrays_and_key):
        (z, total), (arrays, key) = carry, arrays_and_key
        z, log_det = _solve(flow, _velocity_and_trace(eqx.combine(arrays, static), key, z, condition), z, start, end)
        return (z, total + log_det), None

    carry = z, jnp.zeros((), z.dtype)
    return lax.scan(layer, carry, (arrays, flow.probe_key), reverse=start > end)[0]


def _solve(flow: CNF, velocity_and_trace: Callable, z, start: float, end: float):
    diffrax = require("diffrax", "diffrax")
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(velocity_and_trace),
        diffrax.Tsit5(),
        start,
        end,
        _FIRST_STEP if start < end else -_FIRST_STEP,
        (z, jnp.zeros((), z.dtype)),
        stepsize_controller=diffrax.PIDController(rtol=flow.rtol, atol=flow.atol),
        max_steps=flow.max_steps,
        throw=False,
    )
    z, log_det = solution.ys
    return z[0], log_det[0]


def _velocity_and_trace(net: eqx.nn.MLP, key: PRNGKeyArray | None, z, condition) -> Callable:
    """The velocity of a point and the trace of its Jacobian, without autodiff.

    With two hidden layers, v = W3 tanh(W2 tanh(W1 z + ...) + b2) + b3, and with the slopes d1 and d2 of the units

        tr J = tr(W3 diag(d2) W2 diag(d1) W1) = d2^T M d1,  M_ij = W2_ij (W1 W3)_ji,

    where M is the same for all points and times: the exact trace costs as much as the velocity, in any dimension.
    So does the estimate e.J e = (d2 * W3^T e)^T W2 (d1 * W1 e).
    """
    first, second, last = net.layers
    assert first.bias is not None and second.bias is not None and last.bias is not None
    second_bias, last_bias = second.bias, last.bias
    dim = z.shape[-1]
    of_point, of_time, of_condition = first.weight[:, :dim], first.weight[:, dim], first.weight[:, dim + 1 :]
    shift = first.bias if condition is None else first.bias + of_condition @ condition
    if key is None:
        before, after, mixed = 1.0, 1.0, second.weight * (of_point @ last.weight).T
    else:
        signs = probe(key, z)
        before, after, mixed = of_point @ signs, signs @ last.weight, second.weight

    def velocity_and_trace(t, state, _):
        h1 = jnp.tanh(of_point @ state[0] + t.astype(z.dtype) * of_time + shift)
        h2 = jnp.tanh(second.weight @ h1 + second_bias)
        trace = jnp.sum((1 - h2**2) * after * (mixed @ ((1 - h1**2) * before)))
        return last.weight @ h2 + last_bias, trace

    return velocity_and_trace


def probe(key: PRNGKeyArray, z: Float[Array, " dim"]) -> Float[Array, " dim"]:
    """A sign vector for a point, drawn from its bits."""
    bits = lax.bitcast_convert_type(z.astype(jnp.float32), jnp.uint32)
    # A random hash: odd factors, so that every bit counts.
    number = jnp.sum(bits * (jr.bits(key, bits.shape) | 1), dtype=jnp.uint32)
    return jr.rademacher(jr.fold_in(key, number), z.shape, z.dtype)


def for_evaluation(tree: T) -> T:
    """Replaces every `CNF` in a pytree by the same map with the exact trace, solved to a tolerance of 1e-5.

    Example:
        >>> import jax.random as jr
        >>> for_evaluation(CNF(jr.key(0), 2, hutchinson=True)).probe_key is None
        True
    """

    def exact(cnf: CNF) -> CNF:
        return eqx.tree_at(lambda c: c.probe_key, cnf, None, is_leaf=lambda node: node is None)

    return _map_cnfs(lambda cnf: _with_tolerance(EVALUATION_TOLERANCE, exact(cnf)), tree)


def for_training(tree: T, tolerance: float = TRAINING_TOLERANCE) -> T:
    """Replaces every `CNF` in a pytree by the same map solved to a looser tolerance, good enough for training steps.

    Example:
        >>> import jax.random as jr
        >>> for_training(CNF(jr.key(0), 2)).rtol
        0.0001
    """
    return _map_cnfs(lambda cnf: _with_tolerance(tolerance, cnf), tree)


def _map_cnfs(function: Callable[[CNF], CNF], tree):
    def mapped(node):
        return function(node) if isinstance(node, CNF) else node

    return jax.tree.map(mapped, tree, is_leaf=lambda node: isinstance(node, CNF))


def _with_tolerance(tolerance: float, cnf: CNF) -> CNF:
    return eqx.tree_at(lambda c: (c.rtol, c.atol), cnf, (tolerance, tolerance))
