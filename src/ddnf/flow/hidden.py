"""A block of steps among the hidden units of its field, where that costs less than among the points.

The steps of a block share one field, v(z) = W h(a) + b with a = P z + p, the inputs of its first activation. A step
moves a by dt (P W h(a) + P b): z itself is not needed. So a block may follow (a, s), with s the sum of dt h(a), from
(P z + p, 0), and at its end take z on by W s + b. The products with the d columns of P and rows of W are then needed
once in a block and not in each of its cells; P W is a matrix of hidden units by hidden units.

(a, s) moves by a field of the same kind, whose first layer picks a and whose last one is (P W, I). Its Jacobian has the
same eigenvalues but for zeros as that of v, so determinants and traces of powers are the same.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ddnf.flow.field import AbstractLayer, Velocity, first_columns, spectral_norm

_FEWEST_STEPS = 4


class _Pick(AbstractLayer):
    """A first layer that takes a of (a, s) as it is."""

    weight: Float[Array, "a a"]
    offset: Float[Array, " a"]
    scale: Array | None = None
    update: tuple[Array, Array, Array] | None = None

    def __init__(self, size: int, dtype: jnp.dtype):
        self.weight, self.offset = jnp.eye(size, dtype=dtype), jnp.zeros(size, dtype)

    def linear(self, x: Float[Array, "in *lanes"]) -> Float[Array, "a *lanes"]:
        return x[: len(self.offset)]

    def norm(self) -> Float[Array, ""]:
        return jnp.ones((), self.weight.dtype)


class _Spread(AbstractLayer):
    """A last layer that moves a, and takes down in s what has moved it.

    `weight` is the part that moves a: it is all that comes back to the first layer.
    """

    weight: Float[Array, "a last"]
    offset: Float[Array, " a+last"]
    scale: Array | None = None
    update: tuple[Array, Array, Array] | None = None

    def linear(self, x: Float[Array, "last *lanes"]) -> Float[Array, "out *lanes"]:
        return jnp.concatenate([jnp.tensordot(self.weight, x, 1), x])

    def norm(self) -> Float[Array, ""]:
        return spectral_norm(self.linear(jnp.eye(self.weight.shape[1], dtype=self.weight.dtype)))


def pays(velocity: Velocity, steps: int) -> bool:
    """Whether `steps` steps cost less among the hidden units than among the points, and are worth compiling more."""
    first, last = velocity.layers[0], velocity.layers[-1]
    if steps < _FEWEST_STEPS or velocity.narrow == 0 or not (first.plain and last.plain):
        return False
    into, out = len(first.weight), last.weight.shape[1]
    return into * out < (into + out) * len(last.weight)


def among_hidden(velocity: Velocity) -> Velocity:
    """The field of (a, s)."""
    first, *between, last = velocity.layers
    moved = jnp.concatenate([first.weight @ last.offset, jnp.zeros(last.weight.shape[1], last.offset.dtype)])
    pick, spread = _Pick(len(first.weight), moved.dtype), _Spread(first.weight @ last.weight, moved)
    layers = (pick, *between, spread)
    return Velocity(layers, velocity.gain, first_columns(layers, velocity.narrow), velocity.narrow, velocity.activation)


def enter(velocity: Velocity, z: Float[Array, "dim *lanes"]) -> Float[Array, "inner *lanes"]:
    """(a, 0) for a point."""
    a = velocity.layers[0](z)
    return jnp.concatenate([a, jnp.zeros((velocity.layers[-1].weight.shape[1], *a.shape[1:]), a.dtype)])


def leave(
    velocity: Velocity, z: Float[Array, "dim *lanes"], state: Float[Array, "inner *lanes"], *, time: float
) -> Float[Array, "dim *lanes"]:
    """Where the point z is when (a, s) has moved from `enter` to `state` in `time`."""
    first, last = velocity.layers[0], velocity.layers[-1]
    offset = time * velocity.gain * last.offset
    return z + last.linear(state[len(first.weight) :]) + offset.reshape((-1,) + (1,) * (z.ndim - 1))
