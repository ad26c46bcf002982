"""Velocity fields: smooth multilayer perceptrons whose Jacobian is known in factored form.

For hidden widths h_1, ..., h_m between d and d, J = W_(m+1) S_m W_m ... S_1 W_1 with S_i the diagonal of
activation slopes. Cut at its narrowest layer (r units, d included), J = A B with A (d x r) and B (r x d), so

    det(I_d + dt A B) = det(I_r + dt B A)        (Sylvester)
    (I_d + dt A B)^-1 = I_d - dt A (I_r + dt B A)^-1 B        (Woodbury)

and everything the flow needs costs O(d r) + O(r^3). The r x r matrix B A is the *core*.

A point is an array ``(dim,)``; further axes are lanes, points computed side by side: ``(dim, *lanes)``.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from math import prod, sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

# A core of at most this many columns is built column by column, which runs faster; a wider one by `vmap`,
# which compiles faster.
_MOST_SEPARATE_COLUMNS = 16


def _swish(a):
    gate = jax.nn.sigmoid(a)
    return a * gate, gate * (1 + a * (1 - gate))


def _gelu(a):
    below = jax.scipy.stats.norm.cdf(a)
    return a * below, below + a * jax.scipy.stats.norm.pdf(a)


def _tanh(a):
    h = jnp.tanh(a)
    return h, 1 - h * h


# Value and slope of each activation, and a bound on the absolute slope.
ACTIVATIONS: dict[str, tuple[Callable[[Array], tuple[Array, Array]], float]] = {
    "tanh": (_tanh, 1.0),
    "softplus": (lambda a: (jax.nn.softplus(a), jax.nn.sigmoid(a)), 1.0),
    "swish": (_swish, 1.09984),
    "gelu": (_gelu, 1.12905),
    "sin": (lambda a: (jnp.sin(a), jnp.cos(a)), 1.0),
}


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
        """All that is multiplied by the condition."""
        return (self.scale, self.shift) if self.update is None else (self.scale, self.shift, self.update[1])


class AbstractLayer(eqx.Module):
    """An affine layer."""

    weight: eqx.AbstractVar[Float[Array, "out in"]]
    offset: eqx.AbstractVar[Float[Array, "out *lanes"]]
    scale: eqx.AbstractVar[Float[Array, "out *lanes"] | None]
    update: eqx.AbstractVar[tuple[Array, Array, Array] | None]

    @property
    def plain(self) -> bool:
        """Whether the weights are the same for every lane."""
        return self.scale is None and self.update is None

    @abstractmethod
    def linear(self, x: Float[Array, "in *lanes"]) -> Float[Array, "out *more"]:
        """The layer without its offset."""

    @abstractmethod
    def norm(self) -> Float[Array, "*lanes"]:
        """An upper bound on the spectral norm (the norm itself where the layer is plain)."""

    def __call__(self, x: Float[Array, "in *lanes"]) -> Float[Array, "out *lanes"]:
        return _plus(self.linear(x), self.offset)


class Layer(AbstractLayer):
    """One affine layer at a given condition."""

    weight: Float[Array, "out in"]
    offset: Float[Array, "out *lanes"]
    scale: Float[Array, "out *lanes"] | None = None
    update: tuple[Array, Array, Array] | None = None

    def linear(self, x: Float[Array, "in *lanes"]) -> Float[Array, "out *more"]:
        y = _product(self.weight, x)
        if self.update is not None:
            left, gate, right = self.update
            y = _plus(y, _product(left, _times(gate, _product(right, x))))
        return y if self.scale is None else _times(self.scale, y)

    def norm(self) -> Float[Array, "*lanes"]:
        norm = spectral_norm(self.weight)
        if self.update is not None:
            left, gate, right = self.update
            norm = norm + spectral_norm(left) * _largest(gate) * spectral_norm(right)
        return norm if self.scale is None else _largest(self.scale) * norm


class Linearization(eqx.Module):
    """The velocity at a point and its Jacobian J = A B, as products that never build a d x d matrix."""

    velocity: Float[Array, "dim *lanes"]
    slopes: tuple[Array, ...]
    field: "Velocity"

    def right(self, x: Float[Array, "dim *lanes"]) -> Float[Array, "r *more"]:
        """B x."""
        for layer, slope in zip(self.field.layers[: self.field.narrow], self.slopes, strict=False):
            x = _times(slope, layer.linear(x))
        return x

    def left(self, w: Float[Array, "r *lanes"]) -> Float[Array, "dim *more"]:
        """A w."""
        narrow = self.field.narrow
        for layer, slope in zip(self.field.layers[narrow:-1], self.slopes[narrow:], strict=True):
            w = _times(slope, layer.linear(w))
        return self.field.gain * self.field.layers[-1].linear(w)

    def core(self) -> Sequence[Array] | Array:
        """B A, as a sequence (or leading axis) of its r columns."""
        field = self.field
        if field.start is None:
            return self._wide_core()
        columns, after = field.start, _order(field)
        slope = self._slope_after(after[0])
        for index in after[1:]:
            columns = _advance(field.layers[index], slope, columns)
            slope = self._slope_after(index)
        if len(columns) > 3 and columns[0].ndim == 1 and slope is not None:
            return field.gain * jnp.einsum("ji,i...->ji...", jnp.asarray(columns), slope)
        return [field.gain * (c if slope is None else _times(slope, c)) for c in columns]

    def _wide_core(self) -> Array:
        field = self.field
        if not all(layer.plain for layer in field.layers):
            eye = jnp.eye(field.layers[field.narrow].weight.shape[1], dtype=self.velocity.dtype)
            return jax.vmap(lambda e: self.right(self.left(e)))(eye)
        # All columns in the second axis, so that each layer is one large product.
        order = [*range(field.narrow, len(field.layers)), *range(field.narrow)]
        columns = field.layers[order[0]].weight
        for before, index in zip(order, [*order[1:], None], strict=True):
            slope = self._slope_after(before)
            if slope is not None and columns.ndim == 2:
                # By `einsum`, whose gradient has no weights broadcast to all lanes.
                columns = jnp.einsum("ij,i...->ij...", columns, slope)
            elif slope is not None:
                columns = _times(columns, jnp.expand_dims(slope, 1))
            columns = columns if index is None else field.layers[index].linear(columns)
        return field.gain * jnp.swapaxes(columns, 0, 1)

    def _slope_after(self, index):
        return self.slopes[index] if index < len(self.slopes) else None


class Velocity(eqx.Module):
    """An `MLPField` at one condition: z -> v(z), with everything that does not depend on z computed.

    Attributes:
        layers: the affine layers.
        gain: a factor of the whole velocity; -1 runs it backward.
        start: the core's columns as far as they do not depend on z; None for a wide core.
        narrow: how many layers come before the narrowest one.
        activation: name of the activation.
    """

    layers: tuple[AbstractLayer, ...]
    gain: Float[Array, "*lanes"]
    start: Sequence[Array] | Array | None
    narrow: int = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __call__(self, z: Float[Array, "dim *lanes"]) -> Float[Array, "dim *lanes"]:
        return self.linearize(z).velocity

    def linearize(self, z: Float[Array, "dim *lanes"]) -> Linearization:
        activation, _ = ACTIVATIONS[self.activation]
        slopes = []
        for layer in self.layers[:-1]:
            z, slope = activation(layer(z))
            slopes.append(slope)
        return Linearization(self.gain * self.layers[-1](z), tuple(slopes), self)

    def scaled(self, factor: Array | float) -> "Velocity":
        """The same field, `factor` times as fast."""
        return eqx.tree_at(lambda v: v.gain, self, self.gain * factor)

    def lipschitz(self) -> Float[Array, "*lanes"]:
        """An upper bound on |J|_2 that holds for all z: the product of the layers' norms and slopes."""
        _, steepest = ACTIVATIONS[self.activation]
        bound = jnp.abs(self.gain) * steepest ** (len(self.layers) - 1)
        for layer in self.layers:
            bound = bound * layer.norm()
        return bound


class MLPField(eqx.Module):
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
        _check_sizes(dim, hidden, condition_dim, activation, context_rank)
        widths = (dim, *hidden, dim)
        shapes = list(zip(widths[1:], widths[:-1], strict=True))
        key, context_key = jr.split(key)
        weight_key, bias_key = jr.split(key)
        gains = [1.0] * len(hidden) + [output_scale]
        biases = _pieces(jr.uniform(bias_key, (sum(widths[1:]),), minval=-1.0), [s[:1] for s in shapes])
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
            # The last layer's shift and update move the velocity itself: they start as small as its weights.
            contexts[-1] = jax.tree.map(lambda a: output_scale * a, contexts[-1])
            self.contexts = tuple(contexts)
        self.activation = activation

    def __call__(
        self, z: Float[Array, "dim *lanes"], condition: Float[Array, "condition *lanes"] | None = None
    ) -> Float[Array, "dim *lanes"]:
        return self.at(condition)(z)

    def at(self, condition: Float[Array, "condition *lanes"] | None = None) -> Velocity:
        """The field at one condition, with all that does not depend on z computed once."""
        return self.given(self.heard(condition))

    def heard(self, condition: Float[Array, "condition *lanes"] | None) -> Float[Array, "*more"] | None:
        """What a condition says to the layers, for one field or a stack of them: one product for all."""
        if self.contexts is None:
            return None
        if condition is None:
            raise ValueError("Expected a condition for this field; got None.")
        matrix = jnp.concatenate([m for context in self.contexts for m in context.matrices], axis=-2)
        said = jnp.tensordot(matrix.reshape(-1, matrix.shape[-1]), condition, 1)
        return said.reshape(*matrix.shape[:-1], *condition.shape[1:])

    def given(self, heard: Float[Array, "n *lanes"] | None) -> Velocity:
        """The field when its layers have `heard` what a condition says."""
        if self.contexts is None or heard is None:
            layers = tuple(Layer(w, b) for w, b in zip(self.weights, self.biases, strict=True))
        else:
            layers = _modulated(self.weights, self.biases, self.contexts, heard)
        narrow = self._narrow()
        gain = jnp.ones((), self.weights[0].dtype)
        return Velocity(layers, gain, first_columns(layers, narrow), narrow, self.activation)

    def jacobian_factors(
        self, z: Float[Array, " dim"], condition: Float[Array, " condition"] | None = None
    ) -> tuple[Float[Array, "dim r"], Float[Array, "r dim"]]:
        """A and B with J = A B, cut at the narrowest layer."""
        linear = self.at(condition).linearize(z)
        b = jax.vmap(linear.right, in_axes=1, out_axes=1)(jnp.eye(len(z), dtype=z.dtype))
        a = jax.vmap(linear.left, in_axes=1, out_axes=1)(jnp.eye(len(b), dtype=z.dtype))
        return a, b

    def _narrow(self) -> int:
        # Of equally narrow layers the last: a cut there spares one product.
        widths = [w.shape[1] for w in self.weights]
        return max(i for i, width in enumerate(widths) if width == min(widths))


def spectral_norm(matrix: Float[Array, "out in"]) -> Float[Array, ""]:
    """The largest singular value, with a gradient that is finite at zero.

    The top singular vector u is held constant: d|W^T u| is the derivative of the largest singular value.

    Example:
        >>> import jax.numpy as jnp
        >>> float(spectral_norm(jnp.diag(jnp.array([1.0, 3.0]))))
        3.0
    """
    small = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    gram = jax.lax.stop_gradient(small @ small.T)
    image = small.T @ jnp.linalg.eigh(gram)[1][:, -1]
    squared = jnp.sum(image * image)
    is_zero = squared == 0
    return jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, squared)))


def _largest(a: Float[Array, "n *lanes"]) -> Float[Array, "*lanes"]:
    """The largest absolute value along the first axis.

    The gradient of `jnp.max` looks for the values that equal the maximum; where these are computed once more in
    the backward pass, rounded otherwise, none may be found, and it is NaN. Here those close to it have their mean's.
    """
    sizes = jnp.abs(a)
    largest = jnp.max(jax.lax.stop_gradient(sizes), axis=0)
    among = jax.lax.stop_gradient(sizes) > (1 - 1e-6) * largest
    mean = jnp.sum(jnp.where(among, sizes, 0.0), axis=0) / jnp.maximum(jnp.sum(among, axis=0), 1)
    return largest + mean - jax.lax.stop_gradient(mean)


def _modulated(weights, biases, contexts: Sequence[Context], heard) -> tuple[Layer, ...]:
    sizes = [len(matrix) for context in contexts for matrix in context.matrices]
    pieces = iter(jnp.split(heard, list(accumulate(sizes))[:-1]))
    layers = []
    for weight, bias, context in zip(weights, biases, contexts, strict=True):
        scale, shift, update = 1 + next(pieces), next(pieces), context.update
        if update is not None:
            update = update[0], next(pieces), update[2]
        layers.append(Layer(weight, _times(scale, bias) + shift, scale, update))
    return tuple(layers)


def first_columns(layers: Sequence[AbstractLayer], narrow: int) -> Sequence[Array] | Array | None:
    """The columns of the core as far as they do not depend on z: those of the first layer after the cut.

    If that is the last layer, no activation follows it, and the first layer is taken in too.
    """
    r = layers[narrow].weight.shape[1]
    if r > _MOST_SEPARATE_COLUMNS:
        return None
    first = layers[narrow]
    taken = [first, layers[0]] if narrow == len(layers) - 1 else [first]
    eye = jnp.eye(r, dtype=first.weight.dtype)
    if first.scale is not None and first.update is None and len(taken) == 2:
        return _advance(layers[0], first.scale, first.weight.T)
    if r > 3 and all(layer.plain for layer in taken):
        return reduce(lambda columns, layer: layer.linear(columns), taken, eye).T
    return [reduce(lambda column, layer: layer.linear(column), taken, e) for e in eye]


def _order(field: Velocity) -> list[int]:
    """The layers that the core's columns pass: from the cut to the output, then from the input to the cut.

    The first of them is the last one that `first_columns` has taken in.
    """
    order = [*range(field.narrow, len(field.layers)), *range(field.narrow)]
    return order[1:] if field.narrow == len(field.layers) - 1 else order


def _advance(layer: AbstractLayer, slope: Array | None, columns: Sequence[Array] | Array) -> list[Array]:
    """Carries the core's columns over the activation's slope and through a layer."""
    if slope is None:
        return [layer.linear(c) for c in columns]
    if layer.update is None and columns[0].ndim == 1:
        # Columns that are the same for every lane: (W * c) slope for all c is one product with the slopes.
        stacked = jnp.concatenate([layer.weight * c for c in columns])
        products = jnp.split(jnp.tensordot(stacked, slope, 1), len(columns))
        return products if layer.scale is None else [_times(layer.scale, p) for p in products]
    return [layer.linear(_times(slope, c)) for c in columns]


def _product(matrix: Float[Array, "out in"], x: Float[Array, "in *lanes"]) -> Float[Array, "out *lanes"]:
    # Of two matrices: the gradient's product is then laid out like x, and needs no copy.
    return (matrix @ x.reshape(len(x), -1)).reshape(-1, *x.shape[1:])


def _match(a: Array, b: Array) -> tuple[Array, Array]:
    """Both with the same number of axes: what is the same for all lanes gets lanes of size 1."""
    ndim = max(a.ndim, b.ndim)
    return a.reshape(a.shape + (1,) * (ndim - a.ndim)), b.reshape(b.shape + (1,) * (ndim - b.ndim))


def _plus(a: Array, b: Array) -> Array:
    a, b = _match(a, b)
    return a + b


def _times(a: Array, b: Array) -> Array:
    a, b = _match(a, b)
    return a * b


def _normals(key, shapes):
    """Normal matrices that keep the size of what they multiply; from one draw, since each one would compile anew."""
    flat = jr.normal(key, (sum(rows * columns for rows, columns in shapes),))
    return [matrix / sqrt(matrix.shape[1]) for matrix in _pieces(flat, shapes)]


def _pieces(flat, shapes):
    ends = list(accumulate(prod(shape) for shape in shapes))
    return [piece.reshape(shape) for piece, shape in zip(jnp.split(flat, ends[:-1]), shapes, strict=True)]


def _check_sizes(dim, hidden, condition_dim, activation, context_rank):
    if dim < 1:
        raise ValueError(f"Expected dim of at least 1; got {dim}.")
    if len(hidden) == 0 or min(hidden) < 1:
        raise ValueError(f"Expected hidden to have one or more widths of at least 1; got {tuple(hidden)}.")
    if condition_dim is not None and condition_dim < 1:
        raise ValueError(f"Expected condition_dim of at least 1, or None; got {condition_dim}.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"Expected activation to be one of {', '.join(ACTIVATIONS)}; got {activation!r}.")
    if context_rank < 0:
        raise ValueError(f"Expected context_rank of at least 0; got {context_rank}.")
    if context_rank > 0 and condition_dim is None:
        raise ValueError(f"Expected a condition_dim with context_rank; got context_rank={context_rank} alone.")
