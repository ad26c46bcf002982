"""Several devices: rows are sharded over them, and parameters are replicated.

The program is written for one device, and the compiler distributes it. Computations on rows run on the device that
holds the rows, and gradients are summed over the devices. Random numbers do not depend on the number of devices. Where
the compiler would exchange many small arrays, `mean_of_devices` exchanges one.
"""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

AXIS = "rows"
Devices = Literal["all"] | int | Mesh | None


def mesh_of(devices: Devices) -> Mesh | None:
    """The mesh of the devices to use: all of them, the first n, or a mesh with one axis; None for JAX's default device.

    Example:
        >>> mesh_of(1).shape[AXIS]
        1
        >>> mesh_of(0)
        Traceback (most recent call last):
        ValueError: Expected devices to be 'all', a number from 1 to ..., or a mesh with one axis; got 0.
    """
    known = jax.devices() if devices is not None else []
    if devices is None:
        return None
    if isinstance(devices, Mesh) and len(devices.axis_names) == 1:
        return _checked(Mesh(devices.devices, (AXIS,)))
    if devices == "all":
        return Mesh(np.array(known), (AXIS,))
    if isinstance(devices, int) and not isinstance(devices, bool) and 1 <= devices <= len(known):
        return _checked(Mesh(np.array(known[:devices]), (AXIS,)))
    got = devices if isinstance(devices, int | str) else f"{type(devices).__name__} {devices}"
    raise ValueError(
        f"Expected devices to be 'all', a number from 1 to {len(known)}, or a mesh with one axis; got {got}."
    )


def _checked(mesh: Mesh) -> Mesh:
    if process_count(mesh) != jax.process_count():
        raise ValueError(
            f"Expected devices of all {jax.process_count()} processes, such as devices='all'; got {mesh.size}."
        )
    return mesh


def check_batch(mesh: Mesh | None, batch: int) -> None:
    """Raises unless the devices can share the rows of a step evenly."""
    if mesh is not None and batch % mesh.size:
        raise ValueError(f"Expected a batch that {mesh.size} devices can share evenly; got {batch} rows.")


def process_count(mesh: Mesh | None) -> int:
    """The number of processes whose devices are in a mesh.

    Example:
        >>> process_count(mesh_of(1))
        1
    """
    return 1 if mesh is None else len({device.process_index for device in mesh.devices.flat})


def share_rows(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Arrays sharded along their first axis; replicated if they cannot be split evenly."""
    if mesh is None:
        return tree

    def put(array):
        is_even = np.ndim(array) > 0 and np.shape(array)[0] % mesh.size == 0
        return jax.device_put(array, rows_sharding(mesh) if is_even else everywhere(mesh))

    return jax.tree.map(put, tree)


def share_steps(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Global arrays (steps, rows, ...) made of the rows that each process has for each step."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), tree)


def copy_to_all(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Arrays with a copy on each device."""
    if mesh is None or process_count(mesh) == 1:
        return tree if mesh is None else jax.device_put(tree, everywhere(mesh))

    def put(array):
        # With several processes, each has the array on its own device. Only host arrays can be replicated.
        if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jr.wrap_key_data(put(jr.key_data(array)), impl=jr.key_impl(array))
        return jax.device_put(np.asarray(array), everywhere(mesh))

    return jax.tree.map(put, tree)


def gather(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Arrays on the default device again."""
    return tree if mesh is None else jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), tree)


def shared_rows(mesh: Mesh | None, rows: Array) -> Array:
    """Inside a compiled function: rows that the devices share if they can be split evenly.

    Example:
        >>> shared_rows(None, jnp.zeros((3, 2))).shape
        (3, 2)
    """
    if mesh is None or len(rows) % mesh.size:
        return rows
    return lax.with_sharding_constraint(rows, rows_sharding(mesh))


def shared_map(mesh: Mesh | None, function: Callable[[PyTree, Array], PyTree], model: PyTree, rows: Array) -> PyTree:
    """Inside a compiled function: function(model, rows), which returns as many rows; each device computes its own.

    The function is compiled for one device, so the compiler need not be able to distribute it.

    Example:
        >>> shared_map(mesh_of(1), jnp.multiply, jnp.array(2.0), jnp.ones(2)).tolist()
        [2.0, 2.0]
    """
    if mesh is None or len(rows) % mesh.size:
        return function(model, rows)
    arrays, static = eqx.partition(model, eqx.is_array)
    everything, own = PartitionSpec(), PartitionSpec(AXIS)

    def part(arrays, rows):
        return function(eqx.combine(arrays, static), rows)

    return jax.shard_map(part, mesh=mesh, in_specs=(everything, own), out_specs=own, check_vma=False)(arrays, rows)


def mean_of_devices(
    mesh: Mesh | None, function: Callable[[PyTree, PyTree], PyTree], model: PyTree, rows: PyTree
) -> PyTree:
    """Inside a compiled function: function(model, rows), whose arrays are means over the rows.

    Each device computes them from its own rows, and one exchange of one vector averages them. Even a small exchange has
    the latency of a message, and the compiler would put one into every loop with a gradient.

    Example:
        >>> mean_of_devices(mesh_of(1), lambda model, rows: jnp.mean(model * rows), jnp.array(2.0), jnp.ones(2)).item()
        2.0
    """
    if mesh is None:
        return function(model, rows)
    arrays, static = eqx.partition(model, eqx.is_array)

    def part(arrays, rows):
        means, unravel = ravel_pytree(function(eqx.combine(arrays, static), rows))
        return unravel(lax.pmean(means, AXIS))

    specs = PartitionSpec(), PartitionSpec(AXIS)
    return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(arrays, rows)


def on_all(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Inside a compiled function: arrays that are replicated on all devices.

    Example:
        >>> on_all(None, jnp.ones(2)).tolist()
        [1.0, 1.0]
    """
    return tree if mesh is None else lax.with_sharding_constraint(tree, everywhere(mesh))


def wait_for(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Waits for the results of a program on several devices, because two such programs at once can deadlock in the
    thread pool of a CPU.

    Example:
        >>> wait_for(None, jnp.ones(2)).tolist()
        [1.0, 1.0]
    """
    return tree if mesh is None else jax.block_until_ready(tree)


def map_shared(function: Callable[..., Array], mesh: Mesh, *tables: Array | None) -> Array:
    """A function of the rows of some tables, on the devices of a mesh; its values are on the default device again.

    Example:
        >>> map_shared(lambda x: 2 * x, mesh_of(1), jnp.ones(3)).tolist()
        [2.0, 2.0, 2.0]
    """
    count = next(len(table) for table in tables if table is not None)
    again = np.minimum(np.arange(-(-count // mesh.size) * mesh.size), count - 1)
    filled = [None if table is None else share_rows(mesh, np.asarray(table)[again]) for table in tables]
    return gather(mesh, function(*filled))[:count]


def rows_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(AXIS))


def everywhere(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
