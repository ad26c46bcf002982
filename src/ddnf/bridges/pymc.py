"""PyMC: its models as targets, through its JAX backend."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ddnf.flow.random import generator
from ddnf.posterior.target import Target
from ddnf.system.optional import require


def from_pymc(model: Any) -> Target:
    """The posterior of a PyMC model.

    The density is that of the unconstrained (transformed) variables, with all Jacobians; draws come back as a dict of
    the variables as they are named in the model, deterministics included. Data is taken as it is now: call again
    after `pm.set_data`. Searches start around the model's initial point, as PyMC's do.

    Args:
        model: a `pymc.Model` with continuous free variables. It is computed in JAX's precision, not in PyMC's.

    Example:
        >>> import warnings; warnings.simplefilter("ignore")  # PyMC's imports have much to say
        >>> import jax.numpy as jnp, pymc as pm
        >>> with pm.Model() as model:
        ...     scale = pm.HalfNormal("scale", 1.0)
        ...     y = pm.Normal("y", 0.0, scale, observed=[0.3, -0.5])
        >>> target = from_pymc(model)
        >>> target.dim
        1
        >>> list(target.constrain(jnp.zeros(1)))
        ['scale']
    """
    with _undisturbed():
        pymc = require("pymc", "pymc")
        backend = require("pymc.sampling.jax", "pymc")
    _check(pymc, model)
    start = model.initial_point(random_seed=0)
    flat, unravel = ravel_pytree([jnp.asarray(start[v.name], jnp.result_type(float)) for v in model.value_vars])
    shown = pymc.util.get_default_varnames(model.unobserved_value_vars, include_transformed=False)
    density = _jaxified(backend, model, [model.logp()])
    values = _jaxified(backend, model, shown)

    def log_density(z):
        return density(unravel(z.astype(flat.dtype)))[0].astype(flat.dtype)

    def constrain(z):
        return {v.name: value for v, value in zip(shown, values(unravel(z.astype(flat.dtype))), strict=True)}

    def initial(key):
        return np.asarray(flat, float) + generator(key).uniform(-1.0, 1.0, flat.size)

    return Target(log_density, int(flat.size), constrain=constrain, initial=initial)


def _check(pymc, model):
    if not isinstance(model, pymc.Model):
        raise ValueError(f"Expected a PyMC model; got {type(model).__name__}.")
    if discrete := [v.name for v in model.free_RVs if v.dtype.startswith(("int", "uint", "bool"))]:
        got = f"discrete {', '.join(discrete)}: sum them out, as pymc_extras.marginalize does"
        raise ValueError(f"Expected a PyMC model with continuous free variables; got {got}.")
    if not model.free_RVs:
        raise ValueError("Expected a PyMC model with free variables; got none.")


def _jaxified(backend, model, outputs) -> Callable[[list], list]:
    try:
        function = backend.get_jaxified_graph(inputs=model.value_vars, outputs=outputs)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"Expected a PyMC model that JAX can run; it raised {type(error).__name__}: {first}"
        raise ValueError(message) from error

    def call(values):
        with warnings.catch_warnings():
            # PyTensor's graphs ask for float64 and int64; without x64 JAX takes 32 bits, and that is meant.
            warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
            return function(*values)

    return call


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Undoes what importing PyMC's JAX backend does: turn x64 on, and ask for 100 devices; and ArviZ's daily notice."""
    x64, flags = jax.config.values["jax_enable_x64"], os.environ.get("XLA_FLAGS")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
            yield
    finally:
        jax.config.update("jax_enable_x64", x64)
        os.environ.pop("XLA_FLAGS", None) if flags is None else os.environ.update(XLA_FLAGS=flags)
