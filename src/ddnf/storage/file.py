"""Model files: one safetensors file with a JSON header, written atomically and read without running code."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import equinox as eqx
import flowjax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import PyTree

import ddnf
from ddnf.system.files import check_overwrite, write_atomic

FORMAT_VERSION = 1
# For each older format, a function (kind, header, arrays) -> the same in the next format.
UPGRADES: dict[int, Callable[[str, dict, dict], tuple[str, dict, dict]]] = {}

_LONGEST_HEADER = 5_000_000  # bytes; parsed, the worst of them takes 200 MB
_DTYPES = {"bool", "float16", "float32", "float64"} | {f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)}
_METADATA = ("format", "format_version", "kind", "versions", "header", "digest")


def write(
    path: str | os.PathLike[str],
    kind: str,
    header: dict[str, Any],
    arrays: dict[str, np.ndarray],
    *,
    overwrite: bool = False,
) -> None:
    """Writes a model file atomically: if that fails, `path` is unchanged.

    Args:
        path: the file; an existing model file is replaced.
        kind: what the file holds, such as "density".
        header: anything that JSON can hold.
        arrays: arrays of floats, integers or booleans by name.
        overwrite: whether a file that is not a model may be replaced too.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(f"{folder}/a.ddnf", "example", {"name": "Zoë"}, {"x": np.arange(3.0)})
        ...     read(f"{folder}/a.ddnf")
        ('example', {'name': 'Zoë'}, {'x': array([0., 1., 2.])})
    """
    if not overwrite:
        check_overwrite(path, kind="a ddnf model", is_ours=is_model, hint="Pass overwrite=True to replace it.")
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
    write_atomic(path, _serialize(arrays, metadata))


def is_model(path: Path) -> bool:
    """Whether a file starts like a model file. Its content is not checked."""
    with open(path, "rb") as file:
        return _read_metadata(file) is not None


def read(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """The kind, header and arrays of a model file (see `write`); raises a `ValueError` unless the file is intact."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise _error(path, "which is a folder or device")
    with open(path, "rb") as file:
        metadata = _read_metadata(file)
        if metadata is None:
            raise _error(path, "which is cut short, damaged or of another format")
        version = _version(path, metadata["format_version"])
        file.seek(0)
        content = _content(file.read(), version, metadata)
    if content is None:
        raise _error(path, "which is damaged: its checksum does not match")
    for step in range(version, FORMAT_VERSION):
        content = UPGRADES[step](*content)
    return content


def pack(tree: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a tree by their paths; random keys as their data.

    Example:
        >>> pack({"a": jnp.array([True]), "b": (np.arange(3.0), "text")})
        {"['a']": array([ True]), "['b'][0]": array([0., 1., 2.])}
    """
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path): np.asarray(_data(leaf)) for path, leaf in leaves if is_array(leaf)}


def unpack(like: PyTree, arrays: dict[str, np.ndarray]) -> PyTree:
    """The tree `like`, each array (or shape) in it replaced by the one in `arrays` of that path.

    All other leaves stay as they are in `like`. Without `jax_enable_x64`, 64-bit arrays become 32-bit ones.

    Example:
        >>> unpack({"a": jnp.array([True]), "b": "text"}, {"['a']": np.array([False])})
        {'a': Array([False], dtype=bool), 'b': 'text'}
    """
    check_arrays(like, arrays)
    leaves, structure = tree_flatten_with_path(like)
    filled = [_fill(leaf, arrays[keystr(path)]) if is_array(leaf) else leaf for path, leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def check_arrays(like: PyTree, arrays: dict[str, np.ndarray]) -> None:
    """Raises a ValueError unless `arrays` has exactly the arrays of the tree `like`, in kind and shape."""
    places = {keystr(path): leaf for path, leaf in tree_flatten_with_path(like)[0] if is_array(leaf)}
    for name in [*places, *sorted(arrays)]:
        if name not in arrays:
            raise ValueError(f"Expected an array {name!r}; got none of that name.")
        if name not in places:
            raise ValueError(f"Expected only arrays that the model has a place for; got {name!r}.")
        place = jax.eval_shape(_data, places[name]) if is_key(places[name]) else places[name]
        if (arrays[name].dtype.kind, arrays[name].shape) != (place.dtype.kind, place.shape):
            expected, got = (f"{array.dtype}{list(array.shape)}" for array in (place, arrays[name]))
            raise ValueError(f"Expected an array like {expected} for {name!r}; got {got}.")


def _error(path, what: str) -> ValueError:
    return ValueError(f"Expected a ddnf model file; got {os.fspath(path)!r}, {what}.")


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
    # safetensors writes metadata in random order; inserted here, the same model always gives the same file.
    head = json.dumps({"__metadata__": metadata} | json.loads(data[8:end])).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > _LONGEST_HEADER:
        raise ValueError(f"Expected a header of at most {_LONGEST_HEADER} bytes; got {len(head)}.")
    return len(head).to_bytes(8, "little") + head + data[end:]


def _read_metadata(file: BinaryIO) -> dict[str, str] | None:
    """The metadata at the start of a model file; None for any other file."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(os.fstat(file.fileno()).st_size - 8, _LONGEST_HEADER):
        return None
    try:
        metadata = json.loads(file.read(length).decode())["__metadata__"]
        is_ours = metadata["format"] == "ddnf" and all(isinstance(metadata[key], str) for key in _METADATA)
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return metadata if is_ours else None


def _version(path, text: str) -> int:
    version = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if version > FORMAT_VERSION:
        raise _error(
            path, f"which has format {version}; this version of ddnf reads up to {FORMAT_VERSION}: upgrade ddnf"
        )
    if any(step not in UPGRADES for step in range(version, FORMAT_VERSION)):
        raise _error(path, f"which has format {text[:10]!r}, unknown to this version of ddnf")
    return version


def _content(data: bytes, version: int, metadata: dict[str, str]) -> tuple[str, dict, dict] | None:
    """Kind, header and arrays; None if they do not match the digest."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    kind, text = metadata["kind"], metadata["header"]
    try:
        arrays, header = load(data), json.loads(text)
    except (SafetensorError, ValueError, TypeError, LookupError, RecursionError):
        return None
    is_intact = isinstance(header, dict) and _digest(kind, version, text, arrays) == metadata["digest"]
    return (kind, header, arrays) if is_intact else None


def is_array(leaf) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def is_key(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf):
    return jr.key_data(leaf) if is_key(leaf) else leaf


def _fill(leaf, array: np.ndarray):
    if isinstance(leaf, np.ndarray):
        return array.copy()
    with np.errstate(over="ignore"):  # from 64 bits to 32
        filled = jnp.array(array)
    return jr.wrap_key_data(filled, impl=eqx.filter_eval_shape(jr.key_impl, leaf)) if is_key(leaf) else filled
