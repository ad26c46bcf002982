"""A multilayer perceptron at one condition, and its Jacobian in factored form.

For hidden widths h_1, ..., h_m between d and d, J = W_(m+1) S_m W_m ... S_1 W_1 with S_i the diagonal of
activation slopes. Cut at its narrowest layer (r units, d included), J = A B with A (d x r) and B (r x d).
The r x r matrix B A is the *core*: its determinant, inverse and traces are all that a step needs.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddnf.flow.activation import ACTIVATIONS
from ddnf.flow.layer import Layer, times
from ddnf.flow.step import AbstractFactoredField

# With lanes, a core of up to this many columns is built column by column, which runs faster; a wider core is built at
# once, which compiles faster.
_MOST_SEPARATE_COLUMNS = 16


class BoundMLP(AbstractFactoredField):
    """z -> v(z), with everything that does not depend on z computed.

    Attributes:
        layers: the affine layers.
        gain: a factor of the whole velocity; -1 runs it backward.
        first_columns: the core's columns as far as they do not depend on z; None for a wide core.
        narrow: how many layers come before the narrowest one.
        activation: name of the activation.
    """

    layers: tuple[Layer, ...]
    gain: Float[Array, "*lanes"]
    first_columns: Sequence[Array] | Array | None
    narrow: int = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __init__(self, layers: tuple[Layer, ...], *, activation: str):
        # The last of equally narrow layers, because a cut there saves one product.
        widths = [layer.weight.shape[1] for layer in layers]
        self.narrow = max(i for i, width in enumerate(widths) if width == min(widths))
        self.layers, self.activation = layers, activation
        self.gain = jnp.ones((), layers[0].weight.dtype)
        self.first_columns = _first_columns(layers, self.narrow)

    @property
    def rank(self) -> int:
        """The rank r of the Jacobian."""
        return self.layers[self.narrow].weight.shape[1]

    def linearize(self, z: Float[Array, "dim *lanes"]) -> "LinearizedMLP":
        """The velocity at z, with its Jacobian."""
        activation, _ = ACTIVATIONS[self.activation]
        slopes = []
        for layer in self.layers[:-1]:
            z, slope = activation(layer(z))
            slopes.append(slope)
        return LinearizedMLP(self.gain * self.layers[-1](z), tuple(slopes), self)

    def reversed(self):
        return self._scaled(-1.0)

    def slowed_to(self, limit):
        bound = self.lipschitz()
        return self._scaled(jnp.where(bound > limit, limit / jnp.where(bound > 0, bound, 1.0), 1.0))

    def lipschitz(self):
        """The product of the layers' norms and of the largest slopes."""
        _, steepest = ACTIVATIONS[self.activation]
        bound = jnp.abs(self.gain) * steepest ** (len(self.layers) - 1)
        for layer in self.layers:
            bound = bound * layer.norm()
        return bound

    def _scaled(self, factor: Array | float) -> "BoundMLP":
        return eqx.tree_at(lambda v: v.gain, self, self.gain * factor)


class LinearizedMLP(eqx.Module):
    """The velocity at a point and its Jacobian J = A B, as products that never build a d x d matrix."""

    velocity: Float[Array, "dim *lanes"]
    slopes: tuple[Array, ...]
    field: BoundMLP

    def right(self, x: Float[Array, "dim *lanes"]) -> Float[Array, "r *more"]:
        """B x."""
        for layer, slope in zip(self.field.layers[: self.field.narrow], self.slopes, strict=False):
            x = times(slope, layer.linear(x))
        return x

    def left(self, w: Float[Array, "r *lanes"]) -> Float[Array, "dim *more"]:
        """A w."""
        narrow = self.field.narrow
        for layer, slope in zip(self.field.layers[narrow:-1], self.slopes[narrow:], strict=True):
            w = times(slope, layer.linear(w))
        return self.field.gain * self.field.layers[-1].linear(w)

    def core(self) -> Sequence[Array] | Array:
        """B A, as a sequence (or leading axis) of its r columns."""
        return self._wide_core() if self.field.first_columns is None else self._narrow_core()

    def _narrow_core(self) -> Sequence[Array] | Array:
        field, (first, *order) = self.field, _remaining_layers(self.field)
        columns: Any = field.first_columns
        slope = self._slope_after(first)
        for index in order:
            columns = _advance(field.layers[index], slope, columns)
            slope = self._slope_after(index)
        if len(columns) > 3 and columns[0].ndim < self.velocity.ndim and slope is not None:
            return field.gain * jnp.einsum("ji,i...->ji...", jnp.asarray(columns), slope)
        return [field.gain * (c if slope is None else times(slope, c)) for c in columns]

    def _wide_core(self) -> Array:
        field = self.field
        if not all(layer.is_plain for layer in field.layers):
            eye = jnp.eye(field.rank, dtype=self.velocity.dtype)
            return jax.vmap(lambda e: self.right(self.left(e)))(eye)
        # All columns in the second axis, so that each layer is one large product.
        order = _all_layers(field)
        columns = field.layers[order[0]].weight
        for before, index in zip(order, [*order[1:], None], strict=True):
            slope = self._slope_after(before)
            if slope is not None and columns.ndim == 2:
                # By `einsum`, whose gradient does not broadcast the weights to all lanes.
                columns = jnp.einsum("ij,i...->ij...", columns, slope)
            elif slope is not None:
                columns = times(columns, jnp.expand_dims(slope, 1))
            columns = columns if index is None else field.layers[index].linear(columns)
        return field.gain * jnp.swapaxes(columns, 0, 1)

    def _slope_after(self, index):
        return self.slopes[index] if index < len(self.slopes) else None


def _first_columns(layers: Sequence[Layer], narrow: int) -> Sequence[Array] | Array | None:
    """The columns of the core as far as they do not depend on z: those of the first layer after the cut.

    If that is the last layer, no activation follows it, and the first layer is included.
    """
    r = layers[narrow].weight.shape[1]
    if r > _MOST_SEPARATE_COLUMNS:
        return None
    first = layers[narrow]
    included = [first, layers[0]] if narrow == len(layers) - 1 else [first]
    eye = jnp.eye(r, dtype=first.weight.dtype)
    if first.scale is not None and first.update is None and len(included) == 2:
        return _advance(layers[0], first.scale, first.weight.T)
    if r > 3 and all(layer.is_plain for layer in included):
        return reduce(lambda columns, layer: layer.linear(columns), included, eye).T
    return [reduce(lambda column, layer: layer.linear(column), included, e) for e in eye]


def _all_layers(field: BoundMLP) -> list[int]:
    """The layers that the core's columns pass: from the cut to the output, then from the input to the cut."""
    return [*range(field.narrow, len(field.layers)), *range(field.narrow)]


def _remaining_layers(field: BoundMLP) -> list[int]:
    """As `_all_layers`, beginning with the last one that `_first_columns` includes."""
    order = _all_layers(field)
    return order[1:] if field.narrow == len(field.layers) - 1 else order


def _advance(layer: Layer, slope: Array | None, columns: Sequence[Array] | Array) -> list[Array]:
    """Multiplies the core's columns by the activation's slope and by a layer."""
    if slope is None:
        return [layer.linear(c) for c in columns]
    if layer.update is None and columns[0].ndim < slope.ndim:
        # Columns that are the same for every lane: (W * c) slope for all c is one product with the slopes.
        stacked = jnp.concatenate([layer.weight * c for c in columns])
        products = jnp.split(jnp.tensordot(stacked, slope, 1), len(columns))
        return products if layer.scale is None else [times(layer.scale, p) for p in products]
    return [layer.linear(times(slope, c)) for c in columns]
