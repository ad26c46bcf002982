"""Model files: one safetensors file with a JSON header, written whole or not at all, read without running code."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flowjax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import PyTree

import ddnf

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


def pack(tree: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a tree by their paths; of random keys, their data.

    Example:
        >>> pack({"a": jnp.array([True]), "b": (np.arange(3.0), "text")})
        {"['a']": array([ True]), "['b'][0]": array([0., 1., 2.])}
    """
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path): np.asarray(_data(leaf)) for path, leaf in leaves if is_array(leaf)}


def unpack(like: PyTree, arrays: dict[str, np.ndarray]) -> PyTree:
    """The tree `like`, each array (or shape) in it replaced by the one in `arrays` of that path.

    What is no array stays as it is in `like`. Where JAX's 64 bits are off, 64-bit arrays become 32-bit ones.

    Example:
        >>> unpack({"a": jnp.array([True]), "b": "text"}, {"['a']": np.array([False])})
        {'a': Array([False], dtype=bool), 'b': 'text'}
    """
    leaves, structure = tree_flatten_with_path(like)
    wanted = [keystr(path) for path, leaf in leaves if is_array(leaf)]
    for name in [*wanted, *sorted(arrays)]:
        if name not in arrays:
            raise ValueError(f"Expected an array {name!r}; got none of that name.")
        if name not in wanted:
            raise ValueError(f"Expected only arrays that the model has a place for; got {name!r}.")
    filled = [_fill(keystr(path), leaf, arrays) if is_array(leaf) else leaf for path, leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def _fault(path, what: str) -> ValueError:
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


def is_array(leaf) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def is_key(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf):
    return jr.key_data(leaf) if is_key(leaf) else leaf


def _fill(name: str, leaf, arrays: dict[str, np.ndarray]):
    array, place = arrays[name], jax.eval_shape(_data, leaf) if is_key(leaf) else leaf
    if (array.dtype.kind, array.shape) != (place.dtype.kind, place.shape):
        expected, got = f"{place.dtype}{list(place.shape)}", f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"Expected an array like {expected} for {name!r}; got {got}.")
    if isinstance(leaf, np.ndarray):
        return array.copy()
    with np.errstate(over="ignore"):  # from 64 bits to 32
        filled = jnp.array(array)
    return jr.wrap_key_data(filled, impl=eqx.filter_eval_shape(jr.key_impl, leaf)) if is_key(leaf) else filled
