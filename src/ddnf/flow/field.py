"""Velocity fields: what a flow integrates.

A field is any callable ``(z, condition) -> v``. `field.bind(condition)` computes once everything that does not depend
on z, and gives a bound field z -> v(z), which knows its steps. `MLPField` is the default; its Jacobian is factored.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod, sqrt
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.activation import ACTIVATIONS
from ddnf.flow.bound import BoundMLP
from ddnf.flow.layer import Layer, times
from ddnf.flow.step import AbstractBoundField, BoundFunction
from ddnf.system.checks import check_count, check_key


class AbstractField(eqx.Module):
    """A field that can be bound to a condition; one object may hold a stack of K fields."""

    @abstractmethod
    def bind_stack(self, condition: Array | None, count: int) -> AbstractBoundField:
        """All `count` fields of a stack, bound to one condition: a bound field whose arrays have a leading axis."""

    @property
    @abstractmethod
    def takes_lanes(self) -> bool:
        """Whether points may have trailing axes, ``(dim, *lanes)``, and conditions likewise."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of the Jacobian, which is the size of the small matrices."""


class FunctionField(AbstractField):
    """Any callable ``(z, condition) -> v``, or a stack of them."""

    field: Callable

    def bind_stack(self, condition, count):
        axes = (eqx.if_array(0), None)
        return eqx.filter_vmap(lambda f, c: BoundFunction(f, (c,)), in_axes=axes, axis_size=count)(
            self.field, condition
        )

    @property
    def takes_lanes(self):
        return False

    @property
    def rank(self):
        return 1


def check_field(make: Callable, key: PRNGKeyArray, dim: int, condition_dim: int | None) -> None:
    """Raises unless ``make(key)`` is a field ``(z, condition) -> v`` whose velocities have the shape of z."""
    dtype = jnp.result_type(float)
    z = jax.ShapeDtypeStruct((dim,), dtype)
    condition = None if condition_dim is None else jax.ShapeDtypeStruct((condition_dim,), dtype)
    expected = f"Expected field(key) to be a function (z, condition) -> v of shape ({dim},)"
    try:
        velocity = eqx.filter_eval_shape(lambda key, z, condition: make(key)(z, condition), key, z, condition)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{expected}; it raised {type(error).__name__}: {first}") from error
    if getattr(velocity, "shape", None) != (dim,):
        raise ValueError(f"{expected}; got {getattr(velocity, 'shape', type(velocity).__name__)}.")


def as_field(field: Any) -> AbstractField:
    """A field of this library as it is; any other callable as a `FunctionField`."""
    return field if isinstance(field, AbstractField) else FunctionField(field)


class Context(eqx.Module):
    """How a condition c enters one layer: a shift, a scale 1 + s(c), and U diag(g(c)) V added to the weights."""

    shift: Float[Array, "out condition"]
    scale: Float[Array, "out condition"]
    update: tuple[Float[Array, "out rank"], Float[Array, "rank condition"], Float[Array, "rank in"]] | None

    def __init__(self, key: PRNGKeyArray, shape: tuple[int, int], *, condition_dim: int, rank: int):
        out, into = shape
        shapes = [(out, condition_dim), (out, condition_dim), (out, rank), (rank, condition_dim), (rank, into)]
        self.shift, scale, *update = _normals(key, shapes if rank > 0 else shapes[:2])
        self.scale = 0.1 * scale
        self.update = (update[0], update[1], update[2]) if update else None

    @property
    def matrices(self) -> tuple[Array, ...]:
        """Everything that is multiplied by the condition."""
        return (self.scale, self.shift) if self.update is None else (self.scale, self.shift, self.update[1])


class MLPField(AbstractField):
    """A velocity field v(z, c): a smooth multilayer perceptron, close to zero at the start.

    With a condition c, every layer computes ``(1 + s(c)) * (W h + b) + t(c)``; with `context_rank` r > 0,
    W becomes W + U diag(g(c)) V with r columns in U. s, t and g are linear in c.

    Args:
        key: random key of the initial weights.
        dim: dimension of z and v.
        hidden: widths of the hidden layers. One narrow layer, as in (64, 8, 64), keeps log-determinants and
            inverses cheap: they cost as much as the narrowest layer.
        condition_dim: dimension of c; None for a field without condition.
        activation: "tanh", "softplus", "swish", "gelu" or "sin".
        context_rank: rank of the condition's update of the weights.
        output_scale: size of the last layer's initial weights; small keeps the flow near the identity.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> field = MLPField(jr.key(0), 3, hidden=(64, 2, 64))
        >>> field(jnp.ones(3)).shape
        (3,)
        >>> a, b = field.jacobian_factors(jnp.ones(3))
        >>> a.shape, b.shape
        ((3, 2), (2, 3))
    """

    weights: tuple[Array, ...]
    biases: tuple[Array, ...]
    contexts: tuple[Context, ...] | None
    activation: str = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKeyArray,
        dim: int,
        *,
        hidden: Sequence[int] = (16, 16),
        condition_dim: int | None = None,
        activation: str = "tanh",
        context_rank: int = 0,
        output_scale: float = 0.01,
    ):
        check_key(key)
        _check_sizes(dim, hidden, condition_dim, activation, context_rank)
        widths = (dim, *hidden, dim)
        shapes = list(zip(widths[1:], widths[:-1], strict=True))
        key, context_key = jr.split(key)
        weight_key, bias_key = jr.split(key)
        gains = [1.0] * len(hidden) + [output_scale]
        biases = _split(jr.uniform(bias_key, (sum(widths[1:]),), minval=-1.0), [s[:1] for s in shapes])
        self.weights = tuple(g * w for g, w in zip(gains, _normals(weight_key, shapes), strict=True))
        self.biases = tuple(g * b for g, b in zip(gains, biases, strict=True))
        if condition_dim is None:
            self.contexts = None
        else:
            context_keys = jr.split(context_key, len(shapes))
            contexts = [
                Context(k, s, condition_dim=condition_dim, rank=context_rank)
                for k, s in zip(context_keys, shapes, strict=True)
            ]
            # The last layer's shift and update change the velocity directly, so they start as small as its weights.
            contexts[-1] = jax.tree.map(lambda a: output_scale * a, contexts[-1])
            self.contexts = tuple(contexts)
        self.activation = activation

    def __call__(
        self, z: Float[Array, "dim *lanes"], condition: Float[Array, "condition *lanes"] | None = None
    ) -> Float[Array, "dim *lanes"]:
        return self.bind(condition)(z)

    def bind(self, condition: Float[Array, "condition *lanes"] | None = None) -> BoundMLP:
        """The field at one condition, with everything that does not depend on z computed once."""
        return self._bind_projected(self.project_condition(condition))

    def at(self, condition: Float[Array, "condition *lanes"] | None = None) -> BoundMLP:
        """Deprecated: `bind`."""
        warnings.warn("MLPField.at is deprecated: use bind.", DeprecationWarning, stacklevel=2)
        return self.bind(condition)

    def bind_stack(self, condition, count):
        return eqx.filter_vmap(MLPField._bind_projected, axis_size=count)(self, self.project_condition(condition))

    def project_condition(self, condition: Float[Array, "condition *lanes"] | None) -> Float[Array, "*more"] | None:
        """The scales, shifts and gates of all layers at a condition, for one field or a stack: one product."""
        if self.contexts is None:
            return None
        if condition is None:
            raise ValueError("Expected a condition for this field; got None.")
        matrix = jnp.concatenate([m for context in self.contexts for m in context.matrices], axis=-2)
        projected = jnp.tensordot(matrix.reshape(-1, matrix.shape[-1]), condition, 1)
        return projected.reshape(*matrix.shape[:-1], *condition.shape[1:])

    def _bind_projected(self, projected: Float[Array, "n *lanes"] | None) -> BoundMLP:
        if self.contexts is None or projected is None:
            layers = tuple(Layer(w, b) for w, b in zip(self.weights, self.biases, strict=True))
        else:
            layers = _modulated(self.weights, self.biases, self.contexts, projected)
        return BoundMLP(layers, activation=self.activation)

    def jacobian_factors(
        self, z: Float[Array, " dim"], condition: Float[Array, " condition"] | None = None
    ) -> tuple[Float[Array, "dim r"], Float[Array, "r dim"]]:
        """A and B with J = A B, cut at the narrowest layer."""
        linear = self.bind(condition).linearize(z)
        b = jax.vmap(linear.right, in_axes=1, out_axes=1)(jnp.eye(len(z), dtype=z.dtype))
        a = jax.vmap(linear.left, in_axes=1, out_axes=1)(jnp.eye(len(b), dtype=z.dtype))
        return a, b

    @property
    def takes_lanes(self):
        return True

    @property
    def rank(self):
        return min(min(weight.shape[-2:]) for weight in self.weights)


def _modulated(weights, biases, contexts: Sequence[Context], projected) -> tuple[Layer, ...]:
    sizes = [len(matrix) for context in contexts for matrix in context.matrices]
    pieces = iter(jnp.split(projected, list(accumulate(sizes))[:-1]))
    layers = []
    for weight, bias, context in zip(weights, biases, contexts, strict=True):
        scale, shift, update = 1 + next(pieces), next(pieces), context.update
        if update is not None:
            update = update[0], next(pieces), update[2]
        layers.append(Layer(weight, times(scale, bias) + shift, scale, update))
    return tuple(layers)


def _normals(key, shapes):
    """Normal matrices that preserve the scale of their inputs; from one draw, because each draw compiles separately."""
    flat = jr.normal(key, (sum(rows * columns for rows, columns in shapes),))
    return [matrix / sqrt(matrix.shape[1]) for matrix in _split(flat, shapes)]


def _split(flat, shapes):
    ends = list(accumulate(prod(shape) for shape in shapes))
    return [piece.reshape(shape) for piece, shape in zip(jnp.split(flat, ends[:-1]), shapes, strict=True)]


def _check_sizes(dim, hidden, condition_dim, activation, context_rank):
    check_count(dim=dim, condition_dim=condition_dim)
    if not isinstance(hidden, Sequence) or not hidden or not all(isinstance(w, int) and w >= 1 for w in hidden):
        raise ValueError(f"Expected hidden to be one or more widths of at least 1, such as (16, 16); got {hidden!r}.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"Expected activation to be one of {', '.join(ACTIVATIONS)}; got {activation!r}.")
    check_count(0, context_rank=context_rank)
    if context_rank > 0 and condition_dim is None:
        raise ValueError(f"Expected a condition_dim with context_rank; got context_rank={context_rank} alone.")
