"""Posteriors in the format of ArviZ."""

import warnings
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from ddnf.posterior import evaluate
from ddnf.system.checks import check_count, check_key
from ddnf.system.optional import require

if TYPE_CHECKING:
    from ddnf.posterior.result import Posterior

_FIGURES = ("khat", "elbo", "elbo_error", "ess", "log_evidence")


def to_arviz(posterior: "Posterior", key: PRNGKeyArray, n: int = 1000) -> Any:
    """A posterior's draws and figures for ArviZ: one chain in an InferenceData, or a DataTree from ArviZ 1 on.

    Group `posterior` has the parameters as named in the model, or "z" for a plain `Target`. Group `sample_stats` has
    `lp`, the target's log density in the unconstrained space, `log_q`, that of the fit, and `log_weight`, their
    difference; of a posterior without its target it has `log_q` alone.

    Args:
        posterior: what `fit_posterior` returned.
        key: random key.
        n: number of draws.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> target = ddnf.Target(lambda z: -jnp.sum(z**2) / 2, 2)
        >>> posterior = ddnf.fit_posterior(jr.key(0), target, steps=20, rounds=1, progress=False)
        >>> to_arviz(posterior, jr.key(1), 50).posterior["z"].shape
        (1, 50, 2)
    """
    from ddnf import __version__

    check_key(key)
    check_count(n=n)
    z, log_q = evaluate.draw(posterior.flow, key, n, base=posterior.base)
    stats, target = {"log_q": log_q}, posterior.target
    if target is not None:
        lp = evaluate.log_density(target.log_density, z)
        stats |= {"lp": lp, "log_weight": evaluate.clean(lp - log_q)}
    draws = posterior.constrain(z)
    groups = {"posterior": draws if isinstance(draws, dict) else {"z": draws}, "sample_stats": stats}
    attributes = {name: float(getattr(posterior, name)) for name in _FIGURES}
    attributes |= {"inference_library": "ddnf", "inference_library_version": __version__}
    return _from_groups(jax.tree.map(lambda values: np.asarray(values)[None], groups), attributes)


def _from_groups(groups, attributes):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
        arviz = require("arviz", "arviz")
    # Not by `hasattr(arviz, "InferenceData")`, which warns in ArviZ 1.
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.from_dict(**groups, attrs=dict(attributes), posterior_attrs=attributes)
    return arviz.from_dict(groups, attrs={"/": attributes, "posterior": attributes})
