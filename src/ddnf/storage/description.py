"""Descriptions of models: the names and settings of their parts in JSON, without the weights.

`rebuild` makes a template from a description, and `restore` fills one with the arrays of a file.
"""

import inspect
import math
from collections.abc import Iterator
from reprlib import repr as short_repr
from types import GenericAlias, UnionType
from typing import Any

import equinox as eqx
import jax
import numpy as np
import paramax
from flowjax.bijections import AbstractBijection
from jaxtyping import PyTree

from ddnf.storage.file import check_arrays, is_array, is_key, unpack
from ddnf.storage.parts import KINDS, UnknownPartError, kind_of

# Building a part or a hidden layer takes about 10 ms. The limit keeps a crafted file from taking minutes.
MAX_PARTS = 200


def describe(bijection: AbstractBijection) -> dict[str, Any]:
    """The names and settings of a bijection's parts, as JSON values, without its weights.

    Known are `DDNF` with the fields, solvers and rules of this library, the flows of `ddnf.flows`, and FlowJAX's
    affine, elementwise, permuting and composing bijections; each trainable, or frozen by `paramax.non_trainable`, or
    all of them "plain", after `paramax.unwrap`.

    Example:
        >>> from flowjax import bijections as fj
        >>> describe(fj.Invert(fj.Exp((3,))))
        {'type': 'Invert', 'bijection': {'type': 'Exp', 'shape': [3]}}
    """
    description = _describe(bijection)
    if _count_parts(description) > MAX_PARTS:
        raise UnknownPartError(f"more than {MAX_PARTS} parts and hidden layers")
    for described in (description, description | {"plain": True}):
        if _is_alike(rebuild(described), bijection):
            return described
    raise UnknownPartError(f"a {type(bijection).__name__} in which parts were replaced or stacked")


def rebuild(description: Any) -> AbstractBijection:
    """A bijection of the described structure with shapes in place of arrays. Computes nothing.

    Example:
        >>> rebuild({"type": "Loc", "shape": [3], "frozen": False}).loc.shape
        (3,)
    """
    return _build_model(description, eqx.filter_eval_shape)


def restore(description: Any, arrays: dict[str, np.ndarray]) -> AbstractBijection:
    """The described bijection with the given arrays, by their paths as from `ddnf.storage.file.pack`.

    Example:
        >>> restore({"type": "Loc", "shape": [2], "frozen": False}, {".loc": np.array([1.0, 2.0])}).loc.tolist()
        [1.0, 2.0]
    """
    template = rebuild(description)
    check_arrays(template, arrays)
    if any(KINDS[part["type"]].is_closure for part in _parts(description)):
        # Some functions in it hold arrays, which have to be computed. The arrays of the file bound their sizes.
        template = _build_model(description, lambda build: build())
    return unpack(template, arrays)


def _build_model(description: Any, evaluate) -> AbstractBijection:
    is_plain = isinstance(description, dict) and description.get("plain") is True
    settings = {key: value for key, value in description.items() if key != "plain"} if is_plain else description

    def build():
        bijection = _build(settings, AbstractBijection)
        return paramax.unwrap(bijection) if is_plain else bijection

    try:
        if _count_parts(settings) > MAX_PARTS:
            raise ValueError(f"Expected at most {MAX_PARTS} parts and hidden layers; got more")
        return evaluate(build)
    except ImportError:  # an optional library is missing
        raise
    except Exception as error:  # a malformed description can raise any error in the constructors
        raise ValueError(f"Expected a description of a bijection; got one with an error: {error!r:.300}") from error


def _is_alike(template: PyTree, model: PyTree) -> bool:
    """Whether two trees differ only in the values of their arrays."""

    def outline(leaf):
        if is_array(leaf):
            return leaf.shape, str(leaf.dtype) if is_key(leaf) else None
        # FlowJAX creates some functions again for each bijection: functions are compared by their names.
        return getattr(leaf, "__module__", None), getattr(leaf, "__qualname__", leaf)

    (ours, structure), (theirs, other) = jax.tree.flatten(template), jax.tree.flatten(model)
    return structure == other and list(map(outline, ours)) == list(map(outline, theirs))


def _describe(part: Any) -> dict[str, Any]:
    name = kind_of(part)
    described: dict[str, Any] = {"type": name}
    for setting, (kind, read, _) in KINDS[name].settings.items():
        value = read(part)
        if _is_part(kind):
            described[setting] = _describe(value)
        elif isinstance(kind, GenericAlias) and _is_part(kind.__args__[0]):
            described[setting] = [_describe(item) for item in value]
        else:
            described[setting] = _as_json(value)
    if "transformer" in described:
        _check_transformer(described["transformer"], KINDS[name].settings["transformer"].read(part))
    return described


def _check_transformer(description: dict[str, Any], transformer: AbstractBijection) -> None:
    # FlowJAX keeps the transformer's own parameters in a function, where they are not saved.
    rebuilt = _build(description, AbstractBijection)
    arrays, others = ([leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)] for tree in (rebuilt, transformer))
    if not _is_alike(rebuilt, transformer) or not all(map(np.allclose, arrays, others)):
        raise UnknownPartError("a MaskedAutoregressive whose transformer has parameters of its own")


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_as_json(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _build(description: Any, base: type) -> Any:
    name = description.get("type") if isinstance(description, dict) else description
    if not isinstance(name, str) or name not in KINDS or not issubclass(KINDS[name].cls, base):
        raise ValueError(f"Expected the type of a known {base.__name__}; got {short_repr(name)}.")
    _, settings, build, _ = KINDS[name]
    if description.keys() != {"type", *settings}:
        raise ValueError(f"Expected of {name} the settings {', '.join(settings)}; got {short_repr([*description])}.")
    arguments = {}
    for setting, (kind, _, make) in settings.items():
        value = description[setting]
        if not _fits(value, kind):
            raise ValueError(f"Expected {setting} of {name} to be {kind}; got {short_repr(value)}.")
        if _is_part(kind):
            value = _build(value, kind)
        elif isinstance(kind, GenericAlias) and _is_part(kind.__args__[0]):
            value = [_build(item, kind.__args__[0]) for item in value]
        arguments[setting] = make(value)
    frozen = arguments.pop("frozen", False)
    return paramax.non_trainable(build(**arguments)) if frozen else build(**arguments)


def _is_part(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, eqx.Module)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a kind, and if a number, finite; ranges are checked by the constructors."""
    if isinstance(kind, UnionType):
        return any(_fits(value, option) for option in kind.__args__)
    if isinstance(kind, GenericAlias):
        return type(value) is list and all(_fits(item, kind.__args__[0]) for item in value)
    if _is_part(kind):
        return type(value) is dict
    return type(value) is kind and (kind not in (int, float) or -math.inf < value < math.inf)


def _parts(description: Any) -> Iterator[dict[str, Any]]:
    """All parts in a description, at any depth."""
    pending = [description]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
        if isinstance(node, dict | list):
            pending.extend(node.values() if isinstance(node, dict) else node)


def _count_parts(description: Any) -> int:
    """The number of parts and of hidden layers."""
    count = 0
    for part in _parts(description):
        hidden, depth = part.get("hidden"), part.get("depth")
        count += 1 + (len(hidden) if isinstance(hidden, list) else 0) + (depth if isinstance(depth, int) else 0)
    return count
