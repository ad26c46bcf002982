"""The parts that a description may name: for each class its settings, how they are read, and how it is built.

Only parts in this table are ever built from a file; nothing is imported by name or unpickled.
"""

import inspect
import math
from collections.abc import Callable
from operator import attrgetter
from reprlib import repr as short_repr
from typing import Any, NamedTuple, get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import paramax
from flowjax import bijections as fj
from flowjax.bijections.block_autoregressive_network import _LeakyTanh

from ddnf.density.regression import Regression
from ddnf.density.splines import ColumnSplines
from ddnf.density.whitening import Whitening
from ddnf.flow.bijection import DDNF
from ddnf.flow.field import MLPField
from ddnf.flow.log_det import Divergence, Exact, LogDet, PrintedTaylor, Taylor, Unbiased
from ddnf.flow.scaling import ScalingField
from ddnf.flow.solver import euler, midpoint, rk4
from ddnf.flows.affine import DiagonalAffine, FullAffine
from ddnf.flows.autoregressive import floored_affine, invert_autoregressive
from ddnf.flows.householder import Householder
from ddnf.flows.ode import CNF
from ddnf.flows.planar import Planar
from ddnf.flows.radial import Radial
from ddnf.flows.sigmoidal import DeepSigmoidal
from ddnf.flows.sylvester import Sylvester


def kind_of(part: Any) -> str:
    """The name under which a part is described."""
    name = type(part).__name__
    if type(part) is fj.Affine and isinstance(part.scale, paramax.Parameterize) and _is_floored(part.scale):
        name = "FlooredAffine"
    if type(part) is DDNF and type(part.fields) is ScalingField:
        name = "ScalingDDNF"
    if name not in KINDS or KINDS[name].cls is not type(part):
        raise UnknownPartError(f"a {type(part).__module__}.{type(part).__qualname__}")
    return name


def _is_floored(scale: paramax.Parameterize) -> bool:
    return scale.fn is floored_affine().scale.fn  # pyright: ignore[reportAttributeAccessIssue]


class UnknownPartError(ValueError):
    """The model has a part that a description cannot name."""

    def __init__(self, what: str):
        super().__init__(
            f"Expected a model of known parts; got {what}. Load it by passing like=, a model of its structure."
        )


class Setting(NamedTuple):
    """One setting of a part.

    Attributes:
        kind: type of the JSON value; a class of parts, or a list of one, for parts within the part.
        read: the value from a part.
        make: from the value to the argument of `build`.
    """

    kind: Any
    read: Callable[[Any], Any]
    make: Callable[[Any], Any] = lambda value: value


class Kind(NamedTuple):
    """One kind of part.

    Attributes:
        cls: its class.
        settings: by name; those named like in `build`'s arguments.
        build: makes a part of these settings, with arbitrary weights.
        is_closure: whether it keeps arrays in functions, so that a part traced for its shapes cannot be used.
    """

    cls: type
    settings: dict[str, Setting]
    build: Callable[..., Any]
    is_closure: bool = False


def named(value: Any, table: dict[str, Any], what: str) -> str:
    """The name of a value in a table."""
    for name, entry in table.items():
        if value is entry:
            return name
    raise UnknownPartError(f"{what} {getattr(value, '__qualname__', type(value).__qualname__)}")


def is_frozen(part: Any) -> bool:
    """Whether any parameter of a part is under `paramax.NonTrainable`."""

    def is_wrapped(node):
        return isinstance(node, paramax.NonTrainable)

    return any(map(is_wrapped, jax.tree.leaves(part, is_leaf=is_wrapped)))


def _one_of(table: dict[str, Any], read: Callable[[Any], Any], what: str) -> Setting:
    return Setting(str, lambda part: named(read(part), table, what), table.__getitem__)


def _sizes(sizes: list[int]) -> tuple[int, ...]:
    if any(size < 0 for size in sizes):
        raise ValueError(f"Expected sizes of at least 0; got {short_repr(sizes)}.")
    return tuple(sizes)


DIM = Setting(int, lambda part: part.shape[0])
SHAPE = Setting(list[int], attrgetter("shape"), _sizes)
CONDITION = Setting(int | None, lambda part: part.cond_shape and part.cond_shape[0])
FROZEN = Setting(bool, is_frozen)
INNER = Setting(fj.AbstractBijection, attrgetter("bijection"))
SEVERAL = {
    "bijections": Setting(list[fj.AbstractBijection], attrgetter("bijections")),
    "container": Setting(str, lambda part: type(part.bijections).__name__, {"list": list, "tuple": tuple}.__getitem__),
    "axis": Setting(int, attrgetter("axis")),
}
_ACTIVATIONS = {
    **{name: getattr(jax.nn, name) for name in ("relu", "gelu", "silu", "softplus", "elu", "sigmoid")},
    "tanh": jnp.tanh,
}


# The DDNF and its rules.


def _field(flow: DDNF) -> MLPField:
    if type(flow.fields) is not MLPField:
        name = getattr(flow.fields, "__qualname__", type(flow.fields).__qualname__)
        raise UnknownPartError(f"a DDNF with the field {name}")
    return paramax.unwrap(flow.fields)


def _context_rank(flow: DDNF) -> int:
    contexts = _field(flow).contexts
    return 0 if contexts is None or contexts[0].update is None else contexts[0].update[0].shape[-1]


_SHARED = {
    "dim": DIM,
    **{name: Setting(int, attrgetter(name)) for name in ("blocks", "steps")},
    "condition_dim": CONDITION,
    "solver": _one_of(dict(euler=euler, midpoint=midpoint, rk4=rk4), attrgetter("solver"), "a DDNF with the solver"),
    "log_det": Setting(LogDet, attrgetter("log_det")),
    "inverse": Setting(str, attrgetter("inversion")),
    "lipschitz": Setting(float | None, attrgetter("lipschitz")),
    "recompute": Setting(str, attrgetter("recompute")),
    "frozen": FROZEN,
}
_DDNF = _SHARED | {
    "hidden": Setting(list[int], lambda flow: [w.shape[-2] for w in _field(flow).weights[:-1]], _sizes),
    "activation": Setting(str, lambda flow: _field(flow).activation),
    "context_rank": Setting(int, _context_rank),
}
_SCALING = _SHARED | {"units": Setting(int, lambda flow: paramax.unwrap(flow.fields).rank)}


def _scaling_flow(dim, condition_dim, units, **settings) -> DDNF:
    field = eqx.Partial(ScalingField, dim=dim, units=units, condition_dim=condition_dim)
    return DDNF(jr.key(0), dim, condition_dim=condition_dim, field=field, **settings)


_PROBED = {
    "probes": Setting(int | None, attrgetter("probes")),
    "kind": Setting(str, attrgetter("kind")),
    "key": Setting(
        str | None,
        lambda rule: None if rule.key is None else str(jr.key_impl(rule.key)),
        lambda impl: None if impl is None else jr.key(0, impl=impl),
    ),
}


# FlowJAX's bijections.


def _scan(bijection: fj.AbstractBijection, length: int) -> fj.Scan:
    if length < 1:
        raise ValueError(f"Expected a length of at least 1; got {length}.")
    stacked = jax.tree.map(lambda a: jnp.broadcast_to(a, (length, *a.shape)) if eqx.is_array(a) else a, bijection)
    return fj.Scan(stacked)


def _first_layer(scan: fj.Scan) -> fj.AbstractBijection:
    return jax.tree.map(lambda a: a[0] if eqx.is_array(a) else a, scan.bijection)


def _length(scan: fj.Scan) -> int:
    lengths = {a.shape[:1] for a in jax.tree.leaves(scan.bijection) if eqx.is_array(a)}
    if len(lengths) != 1 or lengths == {()}:
        raise UnknownPartError("a Scan whose arrays do not have one leading axis")
    return lengths.pop()[0]


def _leaky_tanh(max_val: float, intercept: float, linear_grad: float, shape: tuple[int, ...]) -> fj.LeakyTanh:
    with jax.ensure_compile_time_eval():
        bijection = fj.LeakyTanh(max_val, shape)
    # FlowJAX computes these two in the current precision: they are restored exactly as they were.
    return eqx.tree_at(lambda b: (b.intercept, b.linear_grad), bijection, (intercept, linear_grad))


def _transformer(part: fj.MaskedAutoregressive) -> fj.AbstractBijection:
    count = int(part.masked_autoregressive_mlp.out_size) // part.shape[0]
    return part.transformer_constructor(jnp.zeros(count))


def _masked(dim, condition_dim, width, depth, activation, transformer) -> fj.MaskedAutoregressive:
    return fj.MaskedAutoregressive(
        jr.key(0),
        transformer=transformer,
        dim=dim,
        cond_dim=condition_dim,
        nn_width=width,
        nn_depth=depth,
        nn_activation=activation,
    )


_MASKED = {
    "dim": DIM,
    "condition_dim": CONDITION,
    "width": Setting(int, lambda part: part.masked_autoregressive_mlp.width_size),
    "depth": Setting(int, lambda part: part.masked_autoregressive_mlp.depth),
    "activation": _one_of(_ACTIVATIONS, lambda part: part.masked_autoregressive_mlp.activation, "the activation"),
    "transformer": Setting(fj.AbstractBijection, _transformer),
    "frozen": FROZEN,
}


def _block(dim, condition_dim, width, depth) -> fj.BlockAutoregressiveNetwork:
    return fj.BlockAutoregressiveNetwork(jr.key(0), dim=dim, cond_dim=condition_dim, depth=depth, block_dim=width)


def _block_width(part: fj.BlockAutoregressiveNetwork) -> int:
    if type(part.activation) is not _LeakyTanh:
        raise UnknownPartError("a BlockAutoregressiveNetwork with an activation of its own")
    return part.block_dim


_BLOCK = {
    "dim": DIM,
    "condition_dim": CONDITION,
    "width": Setting(int, _block_width),
    "depth": Setting(int, attrgetter("depth")),
    "frozen": FROZEN,
}
_INVERTERS = {"autoregressive": invert_autoregressive}


def _numerical_inverse(bijection, inverter) -> fj.NumericalInverse:
    return fj.NumericalInverse(bijection, inverter, use_implicit_differentation=False)


def _spline(knots: int, interval: list, min_derivative: float, min_width: float) -> fj.RationalQuadraticSpline:
    low, high = interval
    return fj.RationalQuadraticSpline(
        knots=knots, interval=(low, high), min_derivative=min_derivative, min_width=min_width
    )


def _min_derivative(spline: fj.RationalQuadraticSpline) -> float:
    function = getattr(spline.derivatives, "fn", None)
    # FlowJAX keeps this number in a closure only; after `paramax.unwrap` it has no effect any more.
    return 1e-3 if function is None else inspect.getclosurevars(function).nonlocals["min_derivative"]


_SPLINE = {
    "knots": Setting(int, attrgetter("knots")),
    "interval": Setting(list[int | float], attrgetter("interval")),
    "min_derivative": Setting(float, _min_derivative),
    "min_width": Setting(int | float, lambda part: getattr(part.x_pos, "min_width", 1e-3)),
    "frozen": FROZEN,
}


# The flows of `ddnf.flows`: their settings are the arguments of their constructors.


def _network_width(part: Any) -> int:
    network = part.parameters.network
    return 1 if network is None else network.width_size


_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "dim": DIM.read,
    "condition_dim": CONDITION.read,
    "size": lambda part: part.velocity.width_size if isinstance(part, CNF) else _network_width(part),
    "layers": lambda part: part.velocity.layers[0].weight.shape[0],
    "hutchinson": lambda part: part.probe_key is not None,
    "count": lambda part: part.shifts.shape[-1],
}


def _by_constructor(cls: type) -> Kind:
    """A class whose constructor takes a random key, if it has weights, and then its settings."""
    hints = get_type_hints(cls.__init__)
    names = [name for name in inspect.signature(cls).parameters if name != "key"]
    settings = {name: Setting(hints[name], _unwrapped(_ARGUMENTS.get(name, attrgetter(name)))) for name in names}
    takes_key = "key" in inspect.signature(cls).parameters
    # The key is made when it is used: importing the library must not start JAX.
    return Kind(
        cls, settings | {"frozen": FROZEN}, lambda **values: cls(jr.key(0), **values) if takes_key else cls(**values)
    )


def _unwrapped(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda part: read(paramax.unwrap(part))


KINDS = {
    "DDNF": Kind(DDNF, _DDNF, lambda **settings: DDNF(jr.key(0), **settings)),
    "ScalingDDNF": Kind(DDNF, _SCALING, _scaling_flow),
    "Exact": Kind(Exact, {}, Exact),
    "Taylor": Kind(Taylor, {"order": Setting(int, attrgetter("order"))} | _PROBED, Taylor),
    "PrintedTaylor": Kind(PrintedTaylor, _PROBED, PrintedTaylor),
    "Divergence": Kind(Divergence, _PROBED, Divergence),
    "Unbiased": Kind(
        Unbiased,
        {"terms": Setting(int, attrgetter("terms")), "keep": Setting(float, attrgetter("keep"))} | _PROBED,
        Unbiased,
    ),
    "Chain": Kind(fj.Chain, {"bijections": SEVERAL["bijections"]}, fj.Chain),
    "Invert": Kind(fj.Invert, {"bijection": INNER}, fj.Invert),
    "Scan": Kind(
        fj.Scan, {"bijection": Setting(fj.AbstractBijection, _first_layer), "length": Setting(int, _length)}, _scan
    ),
    **{
        cls.__name__: Kind(cls, SEVERAL, lambda bijections, container, axis, cls=cls: cls(container(bijections), axis))
        for cls in (fj.Stack, fj.Concatenate)
    },
    "Affine": Kind(fj.Affine, {"shape": SHAPE, "frozen": FROZEN}, lambda shape: fj.Affine(jnp.zeros(shape))),
    "FlooredAffine": Kind(fj.Affine, {"frozen": FROZEN}, floored_affine),
    "Loc": Kind(fj.Loc, {"shape": SHAPE, "frozen": FROZEN}, lambda shape: fj.Loc(jnp.zeros(shape))),
    "Scale": Kind(fj.Scale, {"shape": SHAPE, "frozen": FROZEN}, lambda shape: fj.Scale(jnp.ones(shape))),
    "TriangularAffine": Kind(
        fj.TriangularAffine,
        {"dim": DIM, "lower": Setting(bool, attrgetter("lower")), "frozen": FROZEN},
        lambda dim, lower: fj.TriangularAffine(0, jnp.eye(dim), lower=lower),
    ),
    "ColumnSplines": Kind(
        ColumnSplines,
        {
            "dim": DIM,
            "bins": Setting(int, lambda part: part.log_widths.shape[1]),
            "heavy": Setting(list[bool], attrgetter("heavy"), tuple),
        },
        ColumnSplines,
    ),
    "Regression": Kind(
        Regression, {"dim": DIM, "condition_dim": Setting(int, lambda part: part.cond_shape[0])}, Regression
    ),
    "Whitening": Kind(Whitening, {"dim": DIM}, lambda dim: Whitening(np.zeros(dim), np.eye(dim))),
    "Permute": Kind(
        fj.Permute, {"shape": SHAPE}, lambda shape: fj.Permute(jnp.arange(math.prod(shape)).reshape(shape))
    ),
    "LeakyTanh": Kind(
        fj.LeakyTanh,
        {name: Setting(float, attrgetter(name)) for name in ("max_val", "intercept", "linear_grad")} | {"shape": SHAPE},
        _leaky_tanh,
    ),
    **{
        cls.__name__: Kind(cls, {"shape": SHAPE}, cls)
        for cls in (fj.Flip, fj.Identity, fj.Exp, fj.SoftPlus, fj.Sigmoid, fj.Tanh)
    },
    "MaskedAutoregressive": Kind(fj.MaskedAutoregressive, _MASKED, _masked, is_closure=True),
    "BlockAutoregressiveNetwork": Kind(fj.BlockAutoregressiveNetwork, _BLOCK, _block, is_closure=True),
    "NumericalInverse": Kind(
        fj.NumericalInverse,
        {"bijection": INNER, "inverter": _one_of(_INVERTERS, attrgetter("inverter"), "a NumericalInverse with")},
        _numerical_inverse,
    ),
    "RationalQuadraticSpline": Kind(fj.RationalQuadraticSpline, _SPLINE, _spline),
    **{
        cls.__name__: _by_constructor(cls)
        for cls in (DiagonalAffine, FullAffine, Planar, Radial, Householder, Sylvester, CNF, DeepSigmoidal)
    },
}
