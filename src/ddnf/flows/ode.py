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
from ddnf.flows.together import together
from ddnf.system.optional import require

T = TypeVar("T")
TOLERANCE = 1e-5
_FIRST_STEP = 0.25


class CNF(AbstractBijection):
    """The time-1 maps of dz/dt = v_k(z, t, condition), k = 1..layers, one after another; each v_k is an MLP.

    The log-determinant is the integral of div v. Chen, Rubanova, Bettencourt and Duvenaud, "Neural ordinary
    differential equations", 2018; with `hutchinson` Grathwohl et al., "FFJORD", 2019. Solved by Tsitouras's 5(4)
    method; the inverse is the way back, as exact as the tolerances. As in FFJORD, the points of a batch under `vmap`
    are one system of equations with common steps, whose error is measured over all of them: a point's image depends on
    the others within the tolerances. A batch that needs more than `max_steps` steps comes out as infinite.

    The trace is exact, or e.J e with one sign vector e for each point (Hutchinson). As bijections take no
    key, e is drawn from the bijection's own and from the bits of the point: other points have other probes, and the
    same point has always the same, so that a log density is a function. The two directions see different
    points, so there their log-determinants differ by noise. `exactly` gives the same map with the exact trace.

    Args:
        key: random key of the weights and the probes.
        dim: dimension.
        layers: number of fields, each for one unit of time.
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
        rtol: float = TOLERANCE,
        atol: float = TOLERANCE,
        max_steps: int = 1024,
    ):
        require("diffrax", "diffrax")
        key, probe_key = jr.split(key)
        inputs = dim + 1 + (condition_dim or 0)
        make = eqx.filter_vmap(lambda key: eqx.nn.MLP(inputs, dim, size, 2, jnp.tanh, key=key))
        # Slow at first: nearly the identity.
        self.velocity = eqx.tree_at(
            lambda net: net.layers[-1].weight, make(jr.split(key, layers)), replace_fn=lambda w: 0.1 * w
        )
        self.probe_key = jr.split(probe_key, layers) if hutchinson else None
        self.shape, self.cond_shape = (dim,), condition_shape(condition_dim)
        self.rtol, self.atol, self.max_steps = rtol, atol, max_steps

    def transform_and_log_det(self, x: Any, condition: Any = None):
        return together(_there, self, x, condition)

    def inverse_and_log_det(self, y: Any, condition: Any = None):
        return together(_back, self, y, condition)


def _there(flow: CNF, z, condition):
    return _through(flow, z, condition, 0.0, 1.0)


def _back(flow: CNF, z, condition):
    return _through(flow, z, condition, 1.0, 0.0)


def _through(flow: CNF, z, condition, start: float, end: float):
    """Through all fields, the last one first on the way back; points may have leading axes."""
    arrays, static = eqx.partition(flow.velocity, eqx.is_array)

    def layer(carry, given):
        (z, total), (arrays, key) = carry, given
        z, log_det = _solve(flow, _change(eqx.combine(arrays, static), key, z, condition), z, start, end)
        return (z, total + log_det), None

    carry = z, jnp.zeros(z.shape[:-1], z.dtype)
    return lax.scan(layer, carry, (arrays, flow.probe_key), reverse=start > end)[0]


def _solve(flow: CNF, change: Callable, z, start: float, end: float):
    diffrax = require("diffrax", "diffrax")
    control = diffrax.PIDController(rtol=flow.rtol, atol=flow.atol, norm=_norm)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(change),
        diffrax.Tsit5(),
        start,
        end,
        _FIRST_STEP if start < end else -_FIRST_STEP,
        (z, jnp.zeros(z.shape[:-1], z.dtype)),
        stepsize_controller=control,
        max_steps=flow.max_steps,
        throw=False,
    )
    z, log_det = solution.ys
    return z[0], log_det[0]


def _change(net: eqx.nn.MLP, key: PRNGKeyArray | None, z, condition) -> Callable:
    """The velocity of points and the trace of its Jacobian, by hand.

    With two hidden layers, v = W3 tanh(W2 tanh(W1 z + ...) + b2) + b3, and with the slopes d1 and d2 of the units

        tr J = tr(W3 diag(d2) W2 diag(d1) W1) = d2^T M d1,  M_ij = W2_ij (W1 W3)_ji,

    where M is the same for all points and times: the exact trace costs as much as the velocity, in any dimension.
    So does the estimate e.J e = (d2 * W3^T e)^T W2 (d1 * W1 e).
    """
    first, second, last = net.layers
    assert first.bias is not None and second.bias is not None and last.bias is not None
    shift_out, shift_between = last.bias, second.bias
    dim = z.shape[-1]
    inward, of_time, of_condition = first.weight[:, :dim], first.weight[:, dim], first.weight[:, dim + 1 :]
    shift = first.bias if condition is None else first.bias + condition @ of_condition.T
    if key is None:
        before, after, mixed = 1.0, 1.0, second.weight * (inward @ last.weight).T
    else:
        signs = probe(key, z)
        before, after, mixed = signs @ inward.T, signs @ last.weight, second.weight

    def change(t, state, _):
        h1 = jnp.tanh(state[0] @ inward.T + t.astype(z.dtype) * of_time + shift)
        h2 = jnp.tanh(h1 @ second.weight.T + shift_between)
        trace = jnp.sum((1 - h2**2) * after * (((1 - h1**2) * before) @ mixed.T), axis=-1)
        return h2 @ last.weight.T + shift_out, trace

    return change


def probe(key: PRNGKeyArray, z) -> Float[Array, "*batch dim"]:
    """A sign vector for each point, from its bits."""
    bits = lax.bitcast_convert_type(z.astype(jnp.float32), jnp.uint32)
    # A random hash: odd factors, so that every bit counts.
    numbers = jnp.sum(bits * (jr.bits(key, bits.shape[-1:]) | 1), axis=-1, dtype=jnp.uint32)

    def signs(number):
        return jr.rademacher(jr.fold_in(key, number), z.shape[-1:], z.dtype)

    return jnp.vectorize(signs, signature="()->(dim)")(numbers)


def _norm(errors):
    """The root mean square; a point that is not a number does not stop the others."""
    finite = jax.tree.map(lambda error: jnp.where(jnp.isfinite(error), error, 0.0), errors)
    return require("optimistix", "diffrax").rms_norm(finite)


def exactly(tree: T) -> T:
    """The same maps with the exact trace, solved accurately, wherever there is a `CNF`: to judge what was trained.

    Example:
        >>> import jax.random as jr
        >>> exactly(CNF(jr.key(0), 2, hutchinson=True)).probe_key is None
        True
    """
    return _each(
        lambda cnf: _solved_to(TOLERANCE, eqx.tree_at(lambda c: c.probe_key, cnf, None, is_leaf=_is_none)), tree
    )


def loosely(tree: T, tolerance: float = 1e-4) -> T:
    """The same maps solved less accurately wherever there is a `CNF`: good enough for the steps of a training.

    Example:
        >>> import jax.random as jr
        >>> loosely(CNF(jr.key(0), 2)).rtol
        0.0001
    """
    return _each(lambda cnf: _solved_to(tolerance, cnf), tree)


def _each(change: Callable, tree):
    def changed(node):
        return change(node) if isinstance(node, CNF) else node

    return jax.tree.map(changed, tree, is_leaf=lambda node: isinstance(node, CNF))


def _solved_to(tolerance: float, cnf: CNF) -> CNF:
    return eqx.tree_at(lambda c: (c.rtol, c.atol), cnf, (tolerance, tolerance))


def _is_none(node: Any) -> bool:
    return node is None
