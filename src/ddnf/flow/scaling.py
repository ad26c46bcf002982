"""A field that moves and scales every coordinate, by amounts that depend on a few directions.

v(z) = W h(q) + b + (A g(q) + a) * z,    q = P z + p with r rows,    h softplus, g tanh

The first part bends, like an `MLPField`. The second scales each coordinate by its own factor, as in hierarchical
models, in which a few parameters set the scale of many. With s = A g + a, the Jacobian is the sum of a diagonal matrix
and a matrix of rank r,

    J = diag(s) + U P,    U = W diag(h') + diag(z) A diag(g')

so with D = I + dt diag(s) a step of Euler's has det(I + dt J) = det D det(I_r + dt P D^-1 U), in O(d r^2).
"""

from collections.abc import Callable
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow import linalg
from ddnf.flow.field import AbstractField
from ddnf.flow.layer import plus
from ddnf.flow.random import generator
from ddnf.flow.step import AbstractBoundField, AbstractStep, AbstractTangent, AutodiffStep
from ddnf.system.checks import check_count, check_key


class ScalingField(AbstractField):
    """v(z, c) = W h(q) + b(c) + (A g(q) + a(c)) * z with q = P z + p(c); p, b and a are linear in the condition.

    Its slope grows with |z|, so it has no global Lipschitz constant. `ddnf.certify` can find folds but cannot prove
    that there are none, and `DDNF(..., lipschitz=...)` does not support it.

    Args:
        key: random key of the initial weights.
        dim: dimension of z and v.
        units: number of directions, the rank r.
        condition_dim: dimension of c; None for a field without condition.
        output_scale: size of the initial velocities; small keeps the flow near the identity.

    Example:
        >>> import jax, jax.numpy as jnp, jax.random as jr
        >>> from functools import partial
        >>> from ddnf import DDNF
        >>> flow = DDNF(jr.key(0), 5, steps=2, field=partial(ScalingField, dim=5, units=2))
        >>> y, log_det = flow.transform_and_log_det(jnp.ones(5))
        >>> bool(jnp.allclose(log_det, jnp.linalg.slogdet(jax.jacobian(flow.transform)(jnp.ones(5)))[1], atol=1e-5))
        True
    """

    weights: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]
    biases: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]
    contexts: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]] | None

    def __init__(
        self,
        key: PRNGKeyArray,
        dim: int,
        *,
        units: int = 3,
        condition_dim: int | None = None,
        output_scale: float = 0.01,
    ):
        check_key(key)
        check_count(dim=dim, units=units, condition_dim=condition_dim)
        shapes, gains = _shapes(dim, units), (1.0, output_scale, output_scale)
        # One call draws all numbers: each call would be compiled.
        noise = jr.normal(key, (3 * units * dim + units + (2 * dim + units) * (condition_dim or 0),))
        *parts, p, w, a = _cut(noise, (*shapes, *((s[0], condition_dim or 0) for s in shapes[:3])))
        context = p, w, a
        self.weights, self.biases = _initial(parts, gains)
        self.contexts = None
        if condition_dim is not None:
            p, w, a = (gain * m / condition_dim**0.5 for m, gain in zip(context, gains, strict=True))
            self.contexts = p, w, a

    def __call__(self, z: Float[Array, "dim *lanes"], condition: Array | None = None) -> Float[Array, "dim *lanes"]:
        return self.bind(condition)(z)

    def bind(self, condition: Float[Array, "condition *lanes"] | None = None) -> "BoundScaling":
        """The field at one condition, with everything that does not depend on z computed once."""
        return BoundScaling(self.weights, bind_offsets(self.biases, self.contexts, condition))

    def bind_stack(self, condition, count):
        axes = (eqx.if_array(0), None)
        return eqx.filter_vmap(ScalingField.bind, in_axes=axes, axis_size=count)(self, condition)

    @property
    def takes_lanes(self):
        return True

    @property
    def rank(self):
        return self.weights[0].shape[-2]


def stacked_fields(key: PRNGKeyArray, count: int, dim: int, units: int, output_scale: float = 0.01) -> ScalingField:
    """Fields without condition, stacked, their initial weights drawn by NumPy: nothing is compiled.

    Example:
        >>> stacked_fields(jr.key(0), 8, 5, 2).weights[0].shape
        (8, 2, 5)
    """
    rng, gains = generator(key), (1.0, output_scale, output_scale)
    parts = [rng.normal(size=(count, *shape)).astype(jnp.result_type(float)) for shape in _shapes(dim, units)]
    blank = eqx.filter_eval_shape(ScalingField, key, dim, units=units)
    return eqx.tree_at(lambda field: (field.weights, field.biases), blank, jax.device_put(_initial(parts, gains)))


def _shapes(dim, units):
    """Of P, W, A and p."""
    return (units, dim), (dim, units), (dim, units), (units,)


def _initial(parts, gains):
    """Weights and biases from standard normal numbers, of one field or of many."""
    *matrices, bias = parts
    p, w, a = (gain * m / m.shape[-1] ** 0.5 for m, gain in zip(matrices, gains, strict=True))
    # Zeros of the shape of a column of W.
    return (p, w, a), (0.6 * bias, 0 * w[..., 0], 0 * a[..., 0])


def _cut(values, shapes):
    """Consecutive pieces of a vector, in these shapes."""
    ends = np.cumsum([prod(shape) for shape in shapes])
    return [values[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


def bind_offsets(biases: tuple[Any, ...], contexts: tuple[Any, ...] | None, condition: Array | None) -> tuple[Any, ...]:
    """Biases that are linear in a condition: c -> C c + b for each pair."""
    if contexts is None:
        return biases
    if condition is None:
        raise ValueError("Expected a condition for this field; got None.")
    return tuple(plus(jnp.tensordot(c, condition, 1), b) for c, b in zip(contexts, biases, strict=True))


class BoundScaling(AbstractBoundField):
    """A `ScalingField` at one condition; `products` are P_i * W_j and P_i * A_j for all pairs of rows and columns."""

    weights: tuple[Array, Array, Array]
    offsets: tuple[Array, Array, Array]
    gain: Float[Array, ""]
    products: tuple[Float[Array, "rr dim"], Float[Array, "rr dim"]]

    def __init__(self, weights, offsets):
        p, w, a = weights
        self.weights, self.offsets = weights, offsets
        self.gain = jnp.ones((), p.dtype)
        w_products, a_products = ((p[:, None] * m.T).reshape(-1, p.shape[1]) for m in (w, a))
        self.products = w_products, a_products

    def __call__(self, z):
        return self.linearize(z).velocity

    def linearize(self, z: Float[Array, "dim *lanes"]) -> "LinearizedScaling":
        """The velocity at z, with its Jacobian."""
        (p, w, a), (p0, b, a0) = self.weights, self.offsets
        q = plus(jnp.tensordot(p, z, 1), p0)
        g = jnp.tanh(q)
        scale = self.gain * plus(jnp.tensordot(a, g, 1), a0)
        velocity = self.gain * plus(jnp.tensordot(w, jax.nn.softplus(q), 1), b) + scale * z
        return LinearizedScaling(velocity, z, scale, jax.nn.sigmoid(q), 1 - g**2, self)

    def step(self, solver, dt):
        return (ScalingEulerStep if solver.is_euler else AutodiffStep)(solver, self, dt)

    def divergence(self, z):
        linear = self.linearize(z)
        core = linear.core(jnp.ones_like(z))
        return linear.velocity, jnp.sum(linear.scale, axis=0) + jnp.trace(core)

    def reversed(self):
        return eqx.tree_at(lambda field: field.gain, self, -self.gain)

    def slowed_to(self, limit):
        raise ValueError("Expected a field with a Lipschitz constant; got a ScalingField, whose slope has no bound.")

    def lipschitz(self):
        return jnp.array(jnp.inf)


class LinearizedScaling(eqx.Module):
    """The velocity of a scaling field at a point, and its Jacobian diag(scale) + U P."""

    velocity: Float[Array, "dim *lanes"]
    point: Float[Array, "dim *lanes"]
    scale: Float[Array, "dim *lanes"]
    bend_slope: Float[Array, "r *lanes"]
    scale_slope: Float[Array, "r *lanes"]
    field: BoundScaling

    def right(self, x: Float[Array, "dim *lanes"]) -> Float[Array, "r *lanes"]:
        """P x."""
        return jnp.tensordot(self.field.weights[0], x, 1)

    def left(self, y: Float[Array, "r *lanes"]) -> Float[Array, "dim *lanes"]:
        """U y."""
        _, w, a = self.field.weights
        bent, scaled = (jnp.tensordot(m, s * y, 1) for m, s in ((w, self.bend_slope), (a, self.scale_slope)))
        return self.field.gain * (bent + self.point * scaled)

    def core(self, weight: Float[Array, "dim *lanes"]) -> Float[Array, "r r *lanes"]:
        """P diag(weight) U."""
        rank, lanes = len(self.bend_slope), self.bend_slope.shape[1:]
        bent, scaled = self.field.products
        first = jnp.tensordot(bent, weight, 1).reshape(rank, rank, *lanes)
        second = jnp.tensordot(scaled, weight * self.point, 1).reshape(rank, rank, *lanes)
        return self.field.gain * (first * self.bend_slope + second * self.scale_slope)


class ScalingEulerStep(AbstractStep):
    """Euler's step of a field whose Jacobian is a diagonal and a matrix of low rank."""

    solver: Callable = eqx.field(static=True)
    field: Any
    dt: Any

    def at(self, z):
        linear = self.field.linearize(z)
        return ScalingTangent(z + self.dt * linear.velocity, linear, self.dt)


class ScalingTangent(AbstractTangent):
    """I + dt (diag(s) + U P), by way of D = I + dt diag(s) and the r x r matrix I + dt P D^-1 U."""

    end: Float[Array, "dim *lanes"]
    linear: LinearizedScaling
    dt: Any

    def slog_det(self):
        diagonal = self._diagonal()
        sign, log_det = linalg.slog_det(self._core())
        return sign * jnp.prod(jnp.sign(diagonal), axis=0), log_det + jnp.sum(jnp.log(jnp.abs(diagonal)), axis=0)

    def reduced(self):
        eye = jnp.eye(len(self.end), dtype=self.end.dtype)
        lanes = (1,) * (self.end.ndim - 1)
        columns = jax.vmap(lambda e: self._increment(jnp.broadcast_to(e.reshape(-1, *lanes), self.end.shape)))(eye)
        return jnp.swapaxes(columns, 0, 1)

    def square(self):
        return jnp.sum(self.reduced() ** 2, axis=(0, 1))

    def residual(self, y):
        return (self.linear.point - y) + self.dt * self.linear.velocity

    def solver(self):
        diagonal, inverse = self._diagonal(), linalg.inverse(self._core())

        def solve(u):
            u = u / diagonal
            small = jnp.sum(inverse * self.linear.right(u)[None], axis=1)
            return u - self.dt * self.linear.left(small) / diagonal

        return solve

    def _increment(self, x):
        return self.dt * (self.linear.scale * x + self.linear.left(self.linear.right(x)))

    def _diagonal(self):
        return 1 + self.dt * self.linear.scale

    def _core(self):
        core = self.linear.core(1 / self._diagonal())
        eye = jnp.eye(len(core), dtype=core.dtype)
        return self.dt * core + eye.reshape(eye.shape + (1,) * (core.ndim - 2))
