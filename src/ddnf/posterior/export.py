"""Posteriors in the format of ArviZ."""

import warnings
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PRNGKeyArray

from ddnf.posterior import evaluate
from ddnf.system.checks import check_count, check_key
from ddnf.system.optional import require

if TYPE_CHECKING:
    from ddnf.posterior.result import Posterior

_FIGURES = ("khat", "elbo", "elbo_error", "ess", "log_evidence")


def to_arviz(posterior: "Posterior", key: PRNGKeyArray, n: int = 1000, *, predictive: bool = False) -> Any:
    """A posterior's draws and figures for ArviZ: an InferenceData, or a DataTree from ArviZ 1 on.

    Draws of the flow are one chain of n; Markov chains come as they are, all draws. Group `posterior` has the
    parameters as named in the model, or "z" for a plain `Target`, with the axes that NumPyro's plates and PyMC's coords
    name. `sample_stats` has `lp`, the target's log density in the unconstrained space; for chains `diverging`; for
    draws of the flow `log_q`, its log density, and `log_weight`, their difference. Models with data add
    `log_likelihood` and `observed_data`.

    Args:
        posterior: what `fit_posterior` returned.
        key: random key.
        n: number of draws of a flow.
        predictive: whether to draw data from the model for group `posterior_predictive`.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> target = ddnf.Target(lambda z: -jnp.sum(z**2) / 2, 2)
        >>> posterior = ddnf.fit_posterior(jr.key(0), target, steps=20, rounds=1, exact="never", progress=False)
        >>> to_arviz(posterior, jr.key(1), 50).posterior["z"].shape
        (1, 50, 2)
    """
    from ddnf import __version__

    check_key(key)
    check_count(n=n)
    z, stats = _draws(posterior, key, n)
    chains, target = z.shape[:2], posterior.target
    flat = jnp.asarray(z.reshape(-1, z.shape[-1]))
    draws = posterior.constrain(flat)
    groups: dict[str, Any] = {"posterior": draws if isinstance(draws, dict) else {"z": draws}}
    details = None if target is None or target.details is None else target.details()
    if details is not None and details.observed:
        groups["log_likelihood"] = _map(details.log_likelihood, flat)
        if predictive:
            groups["posterior_predictive"] = details.predict(jr.fold_in(key, 1), draws)
    groups = jax.tree.map(lambda a: np.asarray(a).reshape(*chains, *np.shape(a)[1:]), groups)
    groups["sample_stats"] = stats
    if details is not None and details.observed:
        groups["observed_data"] = details.observed
    attributes = {name: float(getattr(posterior, name)) for name in _FIGURES}
    attributes |= {"inference_library": "ddnf", "inference_library_version": __version__}
    return _from_groups(groups, attributes, details)


def _draws(posterior: "Posterior", key, n) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Unconstrained draws (chain, draw, dim), and their log densities (chain, draw)."""
    target = posterior.target
    if posterior.chains is not None:
        z, stats = posterior.chains.z, {"diverging": posterior.chains.divergent}
        if target is not None:
            stats["lp"] = target.programs.values(z.reshape(-1, z.shape[-1])).reshape(z.shape[:2])
        return z, stats
    z, log_q = evaluate.draw_in_parts(posterior.flow, key, n, base=posterior.base)
    stats = {"log_q": log_q}
    if target is not None:
        lp = target.programs.values(z)
        stats |= {"lp": lp, "log_weight": evaluate.clean(lp - log_q)}
    return np.asarray(z)[None], {name: np.asarray(values)[None] for name, values in stats.items()}


@eqx.filter_jit
def _map(function, points):
    return jax.lax.map(function, points, batch_size=100)


def _from_groups(groups, attributes, details):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
        arviz = require("arviz", "arviz")
    names = {} if details is None else _names(groups, details)
    # Not by `hasattr(arviz, "InferenceData")`, which warns in ArviZ 1.
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.from_dict(**groups, **names, attrs=dict(attributes), posterior_attrs=attributes)
    return arviz.from_dict(groups, **names, attrs={"/": attributes, "posterior": attributes})


def _names(groups, details) -> dict[str, Any]:
    """Names of axes where they fit the arrays, and the labels along them."""
    shapes = {name: np.shape(a)[2:] for name, a in groups["posterior"].items()}
    shapes |= {name: np.shape(a) for name, a in details.observed.items()}
    dims = {name: axes for name, axes in details.dims.items() if len(shapes.get(name, ())) == len(axes)}
    sizes = {axis: size for name, axes in dims.items() for axis, size in zip(axes, shapes[name], strict=True)}
    coords = {name: list(labels) for name, labels in details.coords.items() if sizes.get(name) == len(labels)}
    return dict(dims=dims, coords=coords)
