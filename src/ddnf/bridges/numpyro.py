"""NumPyro: its models as targets, and a guide for its SVI."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree

from ddnf.inference.target import Target
from ddnf.optional import require

numpyro = require("numpyro", "numpyro")
util = require("numpyro.infer.util", "numpyro")


def from_numpyro(model: Callable, *args: Any, **kwargs: Any) -> Target:
    """The posterior of a NumPyro model, given the arguments of the model.

    The density is that of the unconstrained parameters, with all Jacobians; draws come back as a dict of the
    constrained ones, deterministic sites included.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> def model(y):
        ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        ...     numpyro.sample("y", dist.Normal(0.0, scale), obs=y)
        >>> target = from_numpyro(model, jnp.array([0.3, -0.5]))
        >>> target.dim
        1
        >>> list(target.constrain(jnp.zeros(1)))
        ['scale']
    """
    discrete: list[str] = []

    def prototype(key):
        info = util.initialize_model(key, model, model_args=args, model_kwargs=kwargs, validate_grad=False)
        discrete.extend(name for name, site in info.model_trace.items() if _is_discrete(site))
        return info.param_info.z

    # Shapes are all that is needed: nothing is compiled or run here.
    try:
        shapes = jax.eval_shape(prototype, jr.key(0))
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"Expected a NumPyro model that runs on the arguments; it raised {type(error).__name__}: {first}"
        raise ValueError(message) from error
    if discrete or not shapes:
        got = f"discrete {', '.join(discrete)}: sum them out" if discrete else "no parameters"
        raise ValueError(f"Expected a NumPyro model with continuous parameters; got {got}.")
    flat, unravel = ravel_pytree(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
    seeded = numpyro.handlers.seed(model, jr.key(0))

    def log_density(z):
        return -util.potential_energy(seeded, args, kwargs, unravel(z.astype(flat.dtype)))

    def constrain(z):
        return util.constrain_fn(seeded, args, kwargs, unravel(z.astype(flat.dtype)), return_deterministic=True)

    return Target(log_density, int(flat.size), constrain=constrain)


def _is_discrete(site) -> bool:
    return site["type"] == "sample" and not site["is_observed"] and site["fn"].support.is_discrete
