"""Model files: one safetensors file with a JSON header, written whole or not at all, read without running code.

A model is stored as a *description*, the names and settings of its parts in JSON, and as its arrays, each under
its path in the tree. To load it, `rebuild` makes a template from the description and `unpack` fills that.
Names in a description are looked up in one table of known classes: nothing is imported or unpickled.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from reprlib import repr as brief
from types import GenericAlias, UnionType
from typing import Any

import equinox as eqx
import flowjax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import paramax
from flowjax import bijections as fj
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import PyTree

import ddnf
from ddnf.flow.bijection import DDNF
from ddnf.flow.field import MLPField
from ddnf.flow.log_det import Divergence, Exact, LogDet, PrintedTaylor, Taylor, Unbiased
from ddnf.flow.solver import euler, midpoint, rk4

FORMAT_VERSION = 1
# For each older format, a function (kind, header, arrays) -> the same in the next format.
UPGRADES: dict[int, Callable[[str, dict, dict], tuple[str, dict, dict]]] = {}

_LONGEST_HEADER = 100_000_000  # bytes; the same limit as in the safetensors library
_DTYPES = {"bool", "float16", "float32", "float64"} | {f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)}
_METADATA = ("format", "format_version", "kind", "versions", "header", "digest")


def write(path: str | os.PathLike[str], kind: str, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Writes a model file: afterwards `path` holds all of it, or, if that fails, what it held before.

    Args:
        path: where; what is there already is replaced.
        kind: what the file holds, such as "density".
        header: anything that JSON can hold.
        arrays: arrays of floats, integers or booleans by name.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(f"{folder}/a.ddnf", "example", {"name": "Zoë"}, {"x": np.arange(3.0)})
        ...     read(f"{folder}/a.ddnf")
        ('example', {'name': 'Zoë'}, {'x': array([0., 1., 2.])})
    """
    arrays = {name: _storable(name, array) for name, array in arrays.items()}
    text = json.dumps(header)
    versions = {module.__name__: module.__version__ for module in (ddnf, jax, eqx, flowjax)}
    metadata = {
        "format": "ddnf",
        "format_version": str(FORMAT_VERSION),
        "kind": kind,
        "versions": json.dumps(versions),
        "header": text,
        "digest": _digest(kind, FORMAT_VERSION, text, arrays),
    }
    _replace(Path(path), _serialize(arrays, metadata))


def read(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """The kind, header and arrays of a model file (see `write`); anything but an intact one is a `ValueError`."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise _fault(path, "a folder or device")
    with open(path, "rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        fits = length <= min(os.fstat(file.fileno()).st_size - 8, _LONGEST_HEADER)
        head += file.read(length if fits else 0)
        metadata = _metadata(head[8:])
        if metadata is None:
            raise _fault(path, "which is cut short, damaged or of another format")
        version = _version(path, metadata["format_version"])
        content = _content(head + file.read(), version, metadata)
    if content is None:
        raise _fault(path, "which is damaged: it does not hold what was written")
    for step in range(version, FORMAT_VERSION):
        content = UPGRADES[step](*content)
    return content


def describe(bijection: fj.AbstractBijection) -> dict[str, Any]:
    """The names and settings of a bijection's parts, as JSON values, without its weights.

    Known are `DDNF` with the fields, solvers and rules of this library, and FlowJAX's affine, elementwise,
    permuting and composing bijections; each trainable, or frozen by `paramax.non_trainable`.

    Example:
        >>> describe(fj.Invert(fj.Affine(jnp.zeros(3))))
        {'type': 'Invert', 'bijection': {'type': 'Affine', 'shape': [3], 'frozen': False}}
    """
    description = _describe(bijection)
    if not _alike(rebuild(description), bijection):
        raise _unknown(f"a {type(bijection).__name__} in which parts were replaced or stacked")
    return description


def rebuild(description: Any) -> fj.AbstractBijection:
    """A bijection of the described structure with shapes in place of weights, for `unpack` to fill.

    Example:
        >>> rebuild({"type": "Loc", "shape": [3], "frozen": False}).loc.shape
        (3,)
    """
    try:
        return eqx.filter_eval_shape(lambda: _build(description, fj.AbstractBijection))
    except Exception as error:  # a malformed description can set off anything in the constructors
        raise ValueError(f"Expected a description of a bijection; got one with a fault: {error!r}") from error


def pack(tree: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a tree by their paths; of random keys, their data.

    Example:
        >>> pack({"a": jnp.array([True]), "b": (np.arange(3.0), "text")})
        {"['a']": array([ True]), "['b'][0]": array([0., 1., 2.])}
    """
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path): np.asarray(_data(leaf)) for path, leaf in leaves if _is_array(leaf)}


def unpack(like: PyTree, arrays: dict[str, np.ndarray]) -> PyTree:
    """The tree `like`, each array (or shape) in it replaced by the one in `arrays` of that path.

    What is no array stays as it is in `like`. Where JAX's 64 bits are off, 64-bit arrays become 32-bit ones.

    Example:
        >>> unpack({"a": jnp.array([True]), "b": "text"}, {"['a']": np.array([False])})
        {'a': Array([False], dtype=bool), 'b': 'text'}
    """
    leaves, structure = tree_flatten_with_path(like)
    wanted = [keystr(path) for path, leaf in leaves if _is_array(leaf)]
    for name in [*wanted, *sorted(arrays)]:
        if name not in arrays:
            raise ValueError(f"Expected an array {name!r}; got none of that name.")
        if name not in wanted:
            raise ValueError(f"Expected only arrays that the model has a place for; got {name!r}.")
    filled = [_fill(keystr(path), leaf, arrays) if _is_array(leaf) else leaf for path, leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def _fault(path, what: str) -> ValueError:
    return ValueError(f"Expected a ddnf model file; got {os.fspath(path)!r}, {what}.")


def _unknown(what: str) -> ValueError:
    return ValueError(
        f"Expected a model of known parts; got {what}. Load it by passing like=, a model of its structure."
    )


def _storable(name: str, array) -> np.ndarray:
    array = np.asarray(array, order="C")
    if array.dtype.name not in _DTYPES or name == "__metadata__":
        raise ValueError(f"Expected arrays of floats, integers or booleans; got {name!r} of {array.dtype}.")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _digest(kind: str, version: int, header: str, arrays: dict[str, np.ndarray]) -> str:
    shapes = [(name, arrays[name].dtype.name, arrays[name].shape) for name in sorted(arrays)]
    digest = hashlib.sha256(json.dumps([kind, version, header, shapes]).encode())
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def _serialize(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    from safetensors.numpy import save

    data = save(arrays)
    end = 8 + int.from_bytes(data[:8], "little")
    # The library writes metadata in random order; set in here, the same model is always the same file.
    head = json.dumps({"__metadata__": metadata} | json.loads(data[8:end])).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > _LONGEST_HEADER:
        raise ValueError(f"Expected a header of at most {_LONGEST_HEADER} bytes; got {len(head)}.")
    return len(head).to_bytes(8, "little") + head + data[end:]


def _replace(path: Path, data: bytes) -> None:
    target = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
    if target.exists() and not target.is_file():
        raise OSError(errno.EISDIR, "Expected the path of a file; got a folder or device", str(path))
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise OSError(error.errno, f"Could not write the model: {error.strerror}", str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _metadata(head: bytes) -> dict[str, str] | None:
    try:
        metadata = json.loads(head.decode())["__metadata__"]
        is_ours = metadata["format"] == "ddnf" and all(isinstance(metadata[key], str) for key in _METADATA)
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return metadata if is_ours else None


def _version(path, text: str) -> int:
    version = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if version > FORMAT_VERSION:
        raise _fault(path, f"of format {version}: this version of ddnf reads up to {FORMAT_VERSION}, use a newer one")
    if any(step not in UPGRADES for step in range(version, FORMAT_VERSION)):
        raise _fault(path, f"of format {text[:10]!r}, from which this version of ddnf has no upgrade")
    return version


def _content(data: bytes, version: int, metadata: dict[str, str]) -> tuple[str, dict, dict] | None:
    """Kind, header and arrays; None where they are not what the digest was made of."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    kind, text = metadata["kind"], metadata["header"]
    try:
        arrays, header = load(data), json.loads(text)
    except (SafetensorError, ValueError, TypeError, LookupError, RecursionError):
        return None
    is_intact = isinstance(header, dict) and _digest(kind, version, text, arrays) == metadata["digest"]
    return (kind, header, arrays) if is_intact else None


def _is_array(leaf) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _is_key(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf):
    return jr.key_data(leaf) if _is_key(leaf) else leaf


def _fill(name: str, leaf, arrays: dict[str, np.ndarray]):
    array, place = arrays[name], jax.eval_shape(_data, leaf) if _is_key(leaf) else leaf
    if (array.dtype.kind, array.shape) != (place.dtype.kind, place.shape):
        expected, got = f"{place.dtype}{list(place.shape)}", f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"Expected an array like {expected} for {name!r}; got {got}.")
    if isinstance(leaf, np.ndarray):
        return array.copy()
    with np.errstate(over="ignore"):  # from 64 bits to 32
        filled = jnp.array(array)
    return jr.wrap_key_data(filled, impl=eqx.filter_eval_shape(jr.key_impl, leaf)) if _is_key(leaf) else filled


def _alike(template, model) -> bool:
    """Whether two trees differ in nothing but the values of their arrays."""

    def outline(leaf):
        if _is_array(leaf):
            return leaf.shape, _is_key(leaf)
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
