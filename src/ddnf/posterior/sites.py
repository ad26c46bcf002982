"""Named parameters behind an unconstrained vector, described by data alone, so that a saved posterior keeps them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Parameters = dict[str, Any]


class Site(NamedTuple):
    """One parameter: its name, unconstrained shape, and the standard transform that constrains it.

    Example:
        >>> site = Site("scale", (2,), "exp", {})
        >>> constrain_sites((site,), jnp.zeros(2))["scale"].tolist()
        [1.0, 1.0]
    """

    name: str
    shape: tuple[int, ...]
    transform: str
    parameters: Parameters


def _affine(u, parameters: Parameters):
    return jnp.asarray(parameters.get("loc", 0.0)) + jnp.asarray(parameters.get("scale", 1.0)) * u


def _sticks(u, _):
    """NumPyro's simplex: pieces broken off a stick of length 1."""
    z = jax.nn.sigmoid(u - jnp.log(u.shape[-1] - jnp.arange(u.shape[-1])))
    rest = jnp.cumprod(1 - z, axis=-1)
    ones = jnp.ones_like(z[..., :1])
    return jnp.concatenate([z, ones], axis=-1) * jnp.concatenate([ones, rest], axis=-1)


def _softmax(u, _):
    """PyMC's simplex: the softmax of numbers that sum to zero."""
    return jax.nn.softmax(jnp.concatenate([u, -jnp.sum(u, axis=-1, keepdims=True)], axis=-1), axis=-1)


def _ordered(u, _):
    return jnp.cumsum(jnp.concatenate([u[..., :1], jnp.exp(u[..., 1:])], axis=-1), axis=-1)


def _lower(u):
    """Vectors as strictly lower triangles, and the size of these."""
    size = round((1 + (1 + 8 * u.shape[-1]) ** 0.5) / 2)
    rows, columns = np.tril_indices(size, -1)
    return jnp.zeros((*u.shape[:-1], size, size), u.dtype).at[..., rows, columns].set(u), size


def _corr_cholesky(u, _):
    """NumPyro's Cholesky factor of a correlation matrix: signed sticks."""
    t, size = _lower(jnp.tanh(u))
    rest = jnp.cumprod(jnp.sqrt(1 - t**2), axis=-1)
    shifted = jnp.concatenate([jnp.ones((*t.shape[:-1], 1), t.dtype), rest[..., :-1]], axis=-1)
    return (t + jnp.eye(size, dtype=t.dtype)) * shifted


def _lower_cholesky(u, _):
    size = round(((1 + 8 * u.shape[-1]) ** 0.5 - 1) / 2)
    lower, _ = _lower(u[..., :-size])
    return lower + jnp.exp(u[..., -size:])[..., None] * jnp.eye(size, dtype=u.dtype)


TRANSFORMS: dict[str, Callable[[Array, Parameters], Array]] = {
    "identity": lambda u, _: u,
    "affine": _affine,
    "exp": lambda u, parameters: _affine(jnp.exp(u), parameters),
    "sigmoid": lambda u, parameters: _affine(jax.nn.sigmoid(u), parameters),
    "sticks": _sticks,
    "softmax": _softmax,
    "ordered": _ordered,
    "corr_cholesky": _corr_cholesky,
    "lower_cholesky": _lower_cholesky,
}


def constrain_sites(sites: tuple[Site, ...], z: Float[Array, " dim"]) -> dict[str, Array]:
    """The constrained parameters of an unconstrained point; without those whose transform is unknown.

    Example:
        >>> sites = (Site("a", (), "identity", {}), Site("p", (1,), "sticks", {}))
        >>> {name: value.tolist() for name, value in constrain_sites(sites, jnp.array([3.0, 0.0])).items()}
        {'a': 3.0, 'p': [0.5, 0.5]}
    """
    values, first = {}, 0
    for site in sites:
        size = int(np.prod(site.shape, dtype=int))
        if site.transform in TRANSFORMS:
            part = z[first : first + size].reshape(site.shape)
            values[site.name] = TRANSFORMS[site.transform](part, site.parameters)
        first += size
    return values


def missing_names(sites: tuple[Site, ...]) -> list[str]:
    """Names of the parameters that cannot be computed from the description.

    Example:
        >>> missing_names((Site("a", (), "exp", {}), Site("b", (0,), "unknown", {})))
        ['b']
    """
    return [site.name for site in sites if site.transform not in TRANSFORMS]


def describe_target(target: Any) -> tuple[Site, ...]:
    """Sites that reproduce a target's `constrain`, compared with it at random points.

    What they do not reproduce has the transform "unknown"; functions of parameters take none of the vector: shape (0,).
    """
    if target.constrain is None:
        return ()
    rng = np.random.default_rng(0)
    points = [jnp.asarray(rng.normal(size=target.dim), jnp.result_type(float)) for _ in range(3)]
    wanted = [target.constrain(point) for point in points]
    if target.sites is None or not isinstance(wanted[0], dict):
        return (Site("draws", (target.dim,), "unknown", {}),)
    sites = target.sites()
    found = [constrain_sites(sites, point) for point in points]

    def is_right(name):
        pairs = [(known.get(name), want[name]) for known, want in zip(found, wanted, strict=True)]
        return all(a is not None and a.shape == b.shape and np.allclose(a, b, 1e-3, 1e-4) for a, b in pairs)

    right, own = {name for name in wanted[0] if is_right(name)}, {site.name for site in sites}
    kept = (site if site.name in right else site._replace(transform="unknown", parameters={}) for site in sites)
    return (*kept, *(Site(name, (0,), "unknown", {}) for name in wanted[0] if name not in own))
