"""Checks that a loaded model is valid: consistent shapes, finite numbers and allowed ranges."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection

from ddnf.density.columns import Column
from ddnf.density.result import Density
from ddnf.posterior.mixture import ModeMixture
from ddnf.posterior.result import Posterior
from ddnf.posterior.sites import constrain_sites
from ddnf.storage.schema import check_schema
from ddnf.system.checks import expect


def check_flow(flow: AbstractBijection) -> None:
    """Raises a ValueError unless a flow maps vectors to vectors and has finite parameters."""
    expect(len(flow.shape) == 1 and flow.shape[0] >= 1, "a flow of vectors", f"one of shape {flow.shape}")
    expect(flow.cond_shape is None or len(flow.cond_shape) == 1, "a vector as condition", f"{flow.cond_shape}")
    check_finite(leaf for leaf in jax.tree.leaves(flow) if isinstance(leaf, jax.Array))


def check_finite(arrays: Iterable[np.ndarray | jax.Array]) -> None:
    """Raises a ValueError if any of the numbers in arrays is NaN or infinite."""
    for array in arrays:
        if jnp.issubdtype(array.dtype, jnp.floating):
            expect(bool(np.isfinite(array).all()), "a flow with finite parameters", "NaN or infinity")


def check_density(density: Density) -> None:
    """Raises a ValueError unless the parts of a density fit together."""
    dim, condition = len(density.columns), density.condition_mean
    for column in density.columns:
        check_column(column)
    expect(density.flow.shape == (dim,), f"a flow of {dim} dimensions, one for each column", f"{density.flow.shape}")
    _check_vector("mean", density.mean, dim)
    scale = density.scale
    expect(scale.shape == (dim, dim), f"a scale of {dim} x {dim}", f"{scale.shape}")
    is_triangular = np.isfinite(scale).all() and (np.triu(scale, 1) == 0).all()
    expect(is_triangular and (np.diag(scale) > 0).all(), "a triangular scale with a positive diagonal", "another")
    wanted = None if condition is None else condition.shape
    expect(density.flow.cond_shape == wanted, f"a flow with conditions of {wanted}", f"{density.flow.cond_shape}")
    expect((condition is None) == (density.condition_scale is None), "conditions with mean and scale", "one of them")
    if condition is not None and density.condition_scale is not None:
        _check_vector("condition_mean", condition, len(condition))
        _check_vector("condition_scale", density.condition_scale, len(condition))
        expect((density.condition_scale > 0).all(), "positive scales of the conditions", "others")
    count = dim + (0 if condition is None else len(condition))
    if density.schema is not None:
        check_schema(density)
        count = len(density.schema.names)
    names = density.names
    expect(names is None or (len(names) == count and _are_strings(names)), f"{count} names", f"{names!r:.80}")
    _check_course(density, ("losses", "values", "seconds"))


def check_posterior(posterior: Posterior) -> None:
    """Raises a ValueError unless the named parameters of a posterior take up its whole vector."""
    _check_course(posterior, ("losses", "seconds"))
    if posterior.base is not None:
        _check_mixture(posterior.base, posterior.dim)
    if not posterior.sites:
        return
    for site in posterior.sites:
        is_shape = all(type(size) is int and size >= 0 for size in site.shape)
        is_named = _are_strings((site.name, site.transform)) and isinstance(site.parameters, dict)
        expect(is_shape and is_named, "sites with a name, shape and transform", f"{tuple(site)!r:.80}")
    size = sum(math.prod(site.shape) for site in posterior.sites)
    expect(size == posterior.dim, f"sites of {posterior.dim} numbers in all", f"{size}")
    z = jax.ShapeDtypeStruct((posterior.dim,), jnp.result_type(float))
    jax.eval_shape(partial(constrain_sites, posterior.sites), z)


def _check_mixture(base: ModeMixture, dim: int) -> None:
    weights, means, scales = (np.asarray(a) for a in (base.log_weights, base.means, base.scales))
    count = weights.size
    is_shape = weights.shape == (count,) and means.shape == (count, dim) and scales.shape == (count, dim, dim)
    expect(is_shape, f"a mixture in {dim} dimensions", f"{weights.shape}, {means.shape}, {scales.shape}")
    is_finite = all(np.isfinite(array).all() for array in (weights, means, scales))
    is_positive = is_finite and bool((np.diagonal(scales, axis1=1, axis2=2) > 0).all())
    expect(is_positive, "a mixture with finite numbers and positive scales", "others")


def check_column(column: Column) -> None:
    """Raises a ValueError unless a column has an interval that is not empty."""
    ends = [end for end in (column.low, column.high) if end is not None]
    are_numbers = all(type(end) in (int, float) and math.isfinite(end) for end in ends)
    is_interval = are_numbers and (len(ends) < 2 or ends[0] < ends[1]) and type(column.integer) is bool
    expect(is_interval, "columns with an interval low < high", f"{tuple(column)!r:.80}")


def check_issues(issues: Any) -> None:
    """Raises a ValueError unless the issues of a fit are text."""
    expect(_are_strings(issues), "issues as text", f"{issues!r:.80}")


def _check_course(model: Any, names: tuple[str, ...]) -> None:
    for name in names:
        array = getattr(model, name)
        expect(array.ndim == 1 and array.dtype.kind == "f", f"{name} in one row", f"{array.dtype}{array.shape}")


def _are_strings(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _check_vector(name: str, array: np.ndarray, dim: int) -> None:
    expect(isinstance(array, np.ndarray) and array.shape == (dim,), f"{name} of {dim} numbers", f"{np.shape(array)}")
    expect(array.dtype.kind == "f" and bool(np.isfinite(array).all()), f"finite numbers in {name}", "others")
