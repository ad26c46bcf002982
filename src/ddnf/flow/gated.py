"""A field with gates, for densities whose scale changes from place to place, such as those of hierarchical models.

v(z) = W (h(P z + p) * (G z + g)) + b moves z by amounts that are linear in z, each switched on by an activation: near a
linear map where h is flat, and a change of scale where it is not. Its Jacobian is

    J = W (diag(h' * (G z + g)) P + diag(h) G) = A B        with A = W

so the r x r core is diag(h' * (G z + g)) P W + diag(h) G W, with P W and G W computed once.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.activation import ACTIVATIONS
from ddnf.flow.field import AbstractField
from ddnf.flow.layer import Layer, times
from ddnf.flow.step import AbstractBoundField, AutodiffStep, FactoredEulerStep, trace
from ddnf.system.checks import check_count, check_key


class GatedField(AbstractField):
    """v(z, c) = W (h(P z + p(c)) * (G z + g(c))) + b(c), with p, g and b linear in the condition.

    Its slope grows with |z|, so no Lipschitz constant holds for all z: `ddnf.certify` can refute a fold but not prove
    that there is none, and `DDNF(..., lipschitz=...)` does not take it.

    Args:
        key: random key of the initial weights.
        dim: dimension of z and v.
        units: number of gated units, the rank of the Jacobian.
        condition_dim: dimension of c; None for a field without condition.
        activation: "tanh", "softplus", "swish", "gelu" or "sin".
        output_scale: size of the initial velocities; small keeps the flow near the identity.

    Example:
        >>> import jax, jax.numpy as jnp, jax.random as jr
        >>> from functools import partial
        >>> from ddnf import DDNF
        >>> flow = DDNF(jr.key(0), 5, steps=2, field=partial(GatedField, dim=5, units=4))
        >>> y, log_det = flow.transform_and_log_det(jnp.ones(5))
        >>> bool(jnp.allclose(log_det, jnp.linalg.slogdet(jax.jacobian(flow.transform)(jnp.ones(5)))[1], atol=1e-5))
        True
    """

    weights: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]
    biases: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]
    contexts: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]] | None
    activation: str = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKeyArray,
        dim: int,
        *,
        units: int = 8,
        condition_dim: int | None = None,
        activation: str = "softplus",
        output_scale: float = 0.01,
    ):
        check_key(key)
        check_count(dim=dim, units=units, condition_dim=condition_dim)
        if activation not in ACTIVATIONS:
            raise ValueError(f"Expected activation to be one of {', '.join(ACTIVATIONS)}; got {activation!r}.")
        keys = jr.split(key, 7)
        shapes, gains = ((units, dim), (units, dim), (dim, units)), (1.0, 1.0, output_scale)
        p, g, w = (gain * jr.normal(k, s) / s[1] ** 0.5 for k, s, gain in zip(keys, shapes, gains, strict=False))
        self.weights = p, g, w
        self.biases = (
            jr.uniform(keys[3], (units,), minval=-1.0),
            jr.uniform(keys[4], (units,), minval=-1.0),
            jnp.zeros(dim),
        )
        if condition_dim is None:
            self.contexts = None
        else:
            p, g, w = (
                gain * jr.normal(k, (s[0], condition_dim)) / condition_dim**0.5
                for k, s, gain in zip(keys[4:], shapes, gains, strict=True)
            )
            self.contexts = p, g, w
        self.activation = activation

    def __call__(self, z: Float[Array, "dim *lanes"], condition: Array | None = None) -> Float[Array, "dim *lanes"]:
        return self.bind(condition)(z)

    def bind(self, condition: Float[Array, "condition *lanes"] | None = None) -> "BoundGated":
        """The field at one condition, with everything that does not depend on z computed once."""
        offsets = self.biases
        if self.contexts is not None:
            if condition is None:
                raise ValueError("Expected a condition for this field; got None.")
            offsets = tuple(
                jnp.tensordot(c, condition, 1) + b.reshape(b.shape + (1,) * (condition.ndim - 1))
                for c, b in zip(self.contexts, self.biases, strict=True)
            )
        return BoundGated(tuple(map(Layer, self.weights, offsets)), activation=self.activation)

    def bind_stack(self, condition, count):
        axes = (eqx.if_array(0), None)
        return eqx.filter_vmap(GatedField.bind, in_axes=axes, axis_size=count)(self, condition)

    @property
    def takes_lanes(self):
        return True

    @property
    def rank(self):
        return self.weights[0].shape[-2]


class BoundGated(AbstractBoundField):
    """A `GatedField` at one condition."""

    layers: tuple[Any, ...]
    gain: Float[Array, ""]
    products: tuple[Float[Array, "r r"], Float[Array, "r r"]]
    activation: str = eqx.field(static=True)

    def __init__(self, layers: tuple[Any, ...], *, activation: str):
        p, g, w = (layer.weight for layer in layers)
        self.layers, self.activation = layers, activation
        self.gain = jnp.ones((), w.dtype)
        self.products = p @ w, g @ w

    def __call__(self, z):
        return self.linearize(z).velocity

    def linearize(self, z: Float[Array, "dim *lanes"]) -> "LinearizedGated":
        """The velocity at z, with its Jacobian."""
        first, gate, last = self.layers
        h, slope = ACTIVATIONS[self.activation][0](first(z))
        gated = gate(z)
        return LinearizedGated(self.gain * last(h * gated), slope * gated, h, self)

    def step(self, solver, dt):
        return (FactoredEulerStep if solver.is_euler else AutodiffStep)(solver, self, dt)

    def divergence(self, z):
        linear = self.linearize(z)
        return linear.velocity, trace(linear.core())

    def reversed(self):
        return eqx.tree_at(lambda field: field.gain, self, -self.gain)

    def slowed_to(self, limit):
        raise ValueError("Expected a field with a Lipschitz constant; got a GatedField, whose slope has no bound.")

    def lipschitz(self):
        return jnp.array(jnp.inf)


class LinearizedGated(eqx.Module):
    """The velocity of a gated field at a point, and its Jacobian A B."""

    velocity: Float[Array, "dim *lanes"]
    first_slope: Float[Array, "r *lanes"]
    gate_slope: Float[Array, "r *lanes"]
    field: BoundGated

    def right(self, x: Float[Array, "dim *lanes"]) -> Float[Array, "r *more"]:
        """B x."""
        first, gate, _ = self.field.layers
        return times(self.first_slope, first.linear(x)) + times(self.gate_slope, gate.linear(x))

    def left(self, w: Float[Array, "r *lanes"]) -> Float[Array, "dim *more"]:
        """A w."""
        return self.field.gain * self.field.layers[2].linear(w)

    def core(self) -> Float[Array, "r r *lanes"]:
        """B A, with its columns along the first axis."""
        pw, gw = self.field.products
        first = jnp.einsum("ij,i...->ji...", pw, self.first_slope)
        return self.field.gain * (first + jnp.einsum("ij,i...->ji...", gw, self.gate_slope))
