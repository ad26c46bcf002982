"""Descriptions of models: the names and settings of their parts in JSON, without the weights.

`rebuild` makes a template from a description, which `ddnf.storage.file.unpack` fills with arrays.
Names are looked up in one table of known classes: nothing is imported or unpickled.
"""

import math
from collections.abc import Callable
from operator import attrgetter
from reprlib import repr as brief
from types import GenericAlias, UnionType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import paramax
from flowjax import bijections as fj

from ddnf.flow.bijection import DDNF
from ddnf.flow.field import MLPField
from ddnf.flow.log_det import Divergence, Exact, LogDet, PrintedTaylor, Taylor, Unbiased
from ddnf.flow.solver import euler, midpoint, rk4
from ddnf.storage.file import is_array, is_key


def describe(bijection: fj.AbstractBijection) -> dict[str, Any]:
    """The names and settings of a bijection's parts, as JSON values, without its weights.

    Known are `DDNF` with the fields, solvers and rules of this library, and FlowJAX's affine, elementwise,
    permuting and composing bijections; each trainable, or frozen by `paramax.non_trainable`, or all of them "plain",
    after `paramax.unwrap`.

    Example:
        >>> describe(fj.Invert(fj.Affine(jnp.zeros(3))))
        {'type': 'Invert', 'bijection': {'type': 'Affine', 'shape': [3], 'frozen': False}}
    """
    description = _describe(bijection)
    for described in (description, description | {"plain": True}):
        if _alike(rebuild(described), bijection):
            return described
    raise _unknown(f"a {type(bijection).__name__} in which parts were replaced or stacked")


def rebuild(description: Any) -> fj.AbstractBijection:
    """A bijection of the described structure with shapes in place of weights, for `unpack` to fill.

    Example:
        >>> rebuild({"type": "Loc", "shape": [3], "frozen": False}).loc.shape
        (3,)
    """
    is_plain = isinstance(description, dict) and description.get("plain") is True
    settings = {key: value for key, value in description.items() if key != "plain"} if is_plain else description

    def build():
        bijection = _build(settings, fj.AbstractBijection)
        return paramax.unwrap(bijection) if is_plain else bijection

    try:
        return eqx.filter_eval_shape(build)
    except Exception as error:  # a malformed description can set off anything in the constructors
        raise ValueError(f"Expected a description of a bijection; got one with a fault: {error!r}") from error


def _unknown(what: str) -> ValueError:
    return ValueError(
        f"Expected a model of known parts; got {what}. Load it by passing like=, a model of its structure."
    )


def _alike(template, model) -> bool:
    """Whether two trees differ in nothing but the values of their arrays."""

    def outline(leaf):
        if is_array(leaf):
            return leaf.shape, is_key(leaf)
        # FlowJAX makes some functions anew for each bijection: functions are known by their names.
        return getattr(leaf, "__module__", None), getattr(leaf, "__qualname__", leaf)

    (ours, structure), (theirs, other) = jax.tree.flatten(template), jax.tree.flatten(model)
    return structure == other and list(map(outline, ours)) == list(map(outline, theirs))


def _describe(part) -> dict[str, Any]:
    name = type(part).__name__
    cls, settings, _ = _PARTS.get(name, (None, {}, None))
    if cls is not type(part):
        raise _unknown(f"a {type(part).__module__}.{type(part).__qualname__}")
    return {"type": name} | {setting: _plain(_READ.get(setting, attrgetter(setting))(part)) for setting in settings}


def _plain(value):
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _build(description, base: type):
    name = description.get("type") if isinstance(description, dict) else description
    if not isinstance(name, str) or name not in _PARTS or not issubclass(_PARTS[name][0], base):
        raise ValueError(f"Expected the type of a known {base.__name__}; got {brief(name)}.")
    _, settings, build = _PARTS[name]
    if description.keys() != {"type", *settings}:
        raise ValueError(f"Expected of {name} the settings {', '.join(settings)}; got {brief(list(description))}.")
    for setting, kind in settings.items():
        if not _fits(description[setting], kind):
            raise ValueError(f"Expected {setting} of {name} to be {kind}; got {brief(description[setting])}.")
    arguments = {setting: _MAKE.get(setting, lambda value: value)(description[setting]) for setting in settings}
    is_frozen = arguments.pop("frozen", False)
    return paramax.non_trainable(build(**arguments)) if is_frozen else build(**arguments)


def _fits(value, kind) -> bool:
    """Whether a JSON value is of a type, and if a number, finite; ranges are left to the constructors."""
    if isinstance(kind, UnionType):
        return any(_fits(value, option) for option in kind.__args__)
    if isinstance(kind, GenericAlias):
        return type(value) is list and all(_fits(item, kind.__args__[0]) for item in value)
    return type(value) is kind and (kind not in (int, float) or -math.inf < value < math.inf)


def _is_frozen(part) -> bool:
    def is_frozen(node):
        return isinstance(node, paramax.NonTrainable)

    return any(map(is_frozen, jax.tree.leaves(part, is_leaf=is_frozen)))


def _field(flow: DDNF) -> MLPField:
    if type(flow.fields) is not MLPField:
        raise _unknown(f"a DDNF with the field {getattr(flow.fields, '__qualname__', type(flow.fields).__qualname__)}")
    return paramax.unwrap(flow.fields)


def _context_rank(flow: DDNF) -> int:
    contexts = _field(flow).contexts
    return 0 if contexts is None or contexts[0].update is None else contexts[0].update[0].shape[-1]


def _solver(flow: DDNF) -> str:
    for name, solver in _SOLVERS.items():
        if flow.solver is solver:
            return name
    raise _unknown(f"a DDNF with the solver {getattr(flow.solver, '__qualname__', type(flow.solver).__qualname__)}")


def _shape(sizes: list[int]) -> tuple[int, ...]:
    if any(size < 0 for size in sizes):
        raise ValueError(f"Expected sizes of at least 0; got {brief(sizes)}.")
    return tuple(sizes)


def _leaky_tanh(max_val: float, intercept: float, linear_grad: float, shape: tuple[int, ...]) -> fj.LeakyTanh:
    with jax.ensure_compile_time_eval():
        bijection = fj.LeakyTanh(max_val, shape)
    # FlowJAX computes these two in the precision of the day: they come back as they were.
    return eqx.tree_at(lambda b: (b.intercept, b.linear_grad), bijection, (intercept, linear_grad))


_SOLVERS: dict[str, Callable] = {"euler": euler, "midpoint": midpoint, "rk4": rk4}

# How a setting is read from a part of a model, where it is not the attribute of that name.
_READ: dict[str, Callable[[Any], Any]] = {
    "frozen": _is_frozen,
    "dim": lambda part: part.shape[0],
    "hidden": lambda flow: [w.shape[-2] for w in _field(flow).weights[:-1]],
    "condition_dim": lambda flow: flow.cond_shape and flow.cond_shape[0],
    "activation": lambda flow: _field(flow).activation,
    "context_rank": _context_rank,
    "solver": _solver,
    "log_det": lambda flow: _describe(flow.log_det),
    "inverse": attrgetter("inversion"),
    "key": lambda rule: None if rule.key is None else str(jr.key_impl(rule.key)),
    "bijection": lambda part: _describe(part.bijection),
    "bijections": lambda part: [_describe(bijection) for bijection in part.bijections],
    "container": lambda part: type(part.bijections).__name__,
}

# How a setting of a description becomes an argument, where it is not one already.
_MAKE: dict[str, Callable[[Any], Any]] = {
    "shape": _shape,
    "hidden": _shape,
    "solver": _SOLVERS.__getitem__,
    "log_det": lambda value: _build(value, LogDet),
    "key": lambda kind: None if kind is None else jr.key(0, impl=kind),
    "bijection": lambda value: _build(value, fj.AbstractBijection),
    "bijections": lambda values: [_build(value, fj.AbstractBijection) for value in values],
    "container": {"list": list, "tuple": tuple}.__getitem__,
}

_SHAPE = {"shape": list[int]}
_FROZEN = {"frozen": bool}
_SEVERAL = {"bijections": list[dict], "container": str, "axis": int}
_PROBED = {"probes": int | None, "kind": str, "key": str | None}
_FLOW = {
    **{"dim": int, "blocks": int, "steps": int, "hidden": list[int], "condition_dim": int | None, "activation": str},
    **{
        "context_rank": int,
        "solver": str,
        "log_det": dict,
        "inverse": str,
        "lipschitz": float | None,
        "recompute": str,
    },
}

# All that a description may name: the class, its settings and their types, and how it is made of them.
_PARTS: dict[str, tuple[type, dict[str, Any], Callable]] = {
    cls.__name__: (cls, settings, build)
    for cls, settings, build in [
        (DDNF, _FLOW | _FROZEN, lambda **settings: DDNF(jr.key(0), **settings)),
        (Exact, {}, Exact),
        (Taylor, {"order": int} | _PROBED, Taylor),
        (PrintedTaylor, _PROBED, PrintedTaylor),
        (Divergence, _PROBED, Divergence),
        (Unbiased, {"terms": int, "keep": float} | _PROBED, Unbiased),
        (fj.Chain, {"bijections": list[dict]}, fj.Chain),
        (fj.Invert, {"bijection": dict}, fj.Invert),
        (fj.Stack, _SEVERAL, lambda bijections, container, axis: fj.Stack(container(bijections), axis)),
        (fj.Concatenate, _SEVERAL, lambda bijections, container, axis: fj.Concatenate(container(bijections), axis)),
        (fj.Affine, _SHAPE | _FROZEN, lambda shape: fj.Affine(jnp.zeros(shape))),
        (fj.Loc, _SHAPE | _FROZEN, lambda shape: fj.Loc(jnp.zeros(shape))),
        (fj.Scale, _SHAPE | _FROZEN, lambda shape: fj.Scale(jnp.ones(shape))),
        (
            fj.TriangularAffine,
            {"dim": int, "lower": bool} | _FROZEN,
            lambda dim, lower: fj.TriangularAffine(0, jnp.eye(dim), lower=lower),
        ),
        (fj.Permute, _SHAPE, lambda shape: fj.Permute(jnp.arange(math.prod(shape)).reshape(shape))),
        (fj.LeakyTanh, {"max_val": float, "intercept": float, "linear_grad": float} | _SHAPE, _leaky_tanh),
        *((cls, _SHAPE, cls) for cls in (fj.Flip, fj.Identity, fj.Exp, fj.SoftPlus, fj.Sigmoid, fj.Tanh)),
    ]
}
