"""PyMC: its models as targets, through its JAX backend."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ddnf.bridges.pymc_rows import minibatch_rows, without_minibatches
from ddnf.flow.random import generator
from ddnf.posterior.sites import Site
from ddnf.posterior.target import Details, Target
from ddnf.system.optional import require


def from_pymc(model: Any) -> Target:
    """The posterior of a PyMC model.

    The density is over the unconstrained (transformed) variables and includes all Jacobians. Draws are a dict of the
    model's variables, including deterministics. Data are read when this function is called; call it again after
    `pm.set_data`. Searches start around the model's initial point, like PyMC's. The data of a `pm.Minibatch` are
    treated as rows: training uses as many as it needs, and the final check uses all of them.

    Args:
        model: a `pymc.Model` with continuous free variables. It is computed in JAX's precision, not in PyMC's.

    Example:
        >>> import warnings; warnings.simplefilter("ignore")  # imports of PyMC warn
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
    jaxified = partial(_jaxified, backend)
    with _undisturbed():
        rows = minibatch_rows(model, jaxified, lambda z: unravel(z.astype(flat.dtype)), int(flat.size))
    if rows is not None:
        shown = without_minibatches(shown)
    values = jaxified(model.value_vars, shown)

    def constrain(z):
        return {v.name: value for v, value in zip(shown, values(unravel(z.astype(flat.dtype))), strict=True)}

    def initial(key):
        return np.asarray(flat, float) + generator(key).uniform(-1.0, 1.0, flat.size)

    def unconstrain(draw):
        named = [jnp.asarray(draw[v.name], flat.dtype) for v in model.free_RVs]
        return ravel_pytree(_forward(backend, model)(named))[0].astype(flat.dtype)

    def sites():
        ends = [constrain(jnp.full(flat.size, end, flat.dtype)) for end in (-30.0, 30.0)]
        named = zip(model.free_RVs, model.value_vars, strict=True)
        return tuple(_site(model, rv, start[value.name].shape, *(end[rv.name] for end in ends)) for rv, value in named)

    def details():
        with _undisturbed():
            return _details(pymc, backend, model, lambda z: unravel(z.astype(flat.dtype)))

    functions: dict[str, Any] = dict(constrain=constrain, initial=initial, unconstrain=unconstrain)
    if rows is not None:
        return Target(rows.log_prior, rows.dim, rows=rows, **functions, sites=sites)
    density = jaxified(model.value_vars, [model.logp()])

    def log_density(z):
        return density(unravel(z.astype(flat.dtype)))[0].astype(flat.dtype)

    return Target(log_density, int(flat.size), **functions, sites=sites, details=details)


def _details(pymc, backend, model, unravel) -> Details:
    names = [v.name for v in model.observed_RVs]
    likelihoods = _jaxified(backend, model.value_vars, model.logp(vars=model.observed_RVs, sum=False))
    dims = {name: [str(axis) for axis in axes] for name, axes in model.named_vars_to_dims.items() if None not in axes}
    coords = {name: list(labels) for name, labels in model.coords.items() if labels is not None}
    observed = {v.name: np.asarray(model.rvs_to_values[v].eval()) for v in model.observed_RVs}

    def log_likelihood(z):
        return dict(zip(names, likelihoods(unravel(z)), strict=True))

    def predict(key, draws):
        seed = int(generator(key).integers(2**31))
        known = {v.name for v in model.free_RVs}
        with _undisturbed(), model, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyMC 6: all free variables are given, as they should be
            trace = [
                {name: np.asarray(values[i]) for name, values in draws.items() if name in known}
                for i in range(len(next(iter(draws.values()))))
            ]
            found = pymc.sample_posterior_predictive(
                trace, var_names=names, random_seed=seed, progressbar=False, return_inferencedata=False
            )
            return {name: np.reshape(values, (len(trace), *np.shape(values)[2:])) for name, values in found.items()}

    return Details(dims, coords, observed, log_likelihood, predict)


def _forward(backend, model) -> Callable[[list], list]:
    """From constrained to unconstrained variables."""
    outputs, fresh = [], {rv: rv.type(rv.name) for rv in model.free_RVs}
    for rv in model.free_RVs:
        transform = model.rvs_to_transforms[rv]
        outputs.append(rv if transform is None else transform.forward(rv, *rv.owner.inputs))
    replaced = require("pytensor.graph.replace", "pymc").clone_replace(outputs, fresh)
    return _jaxified(backend, list(fresh.values()), replaced)


def _site(model, rv, shape, low, high) -> Site:
    """A variable with its transform; `low` and `high` are its values at -30 and 30."""
    transform = model.rvs_to_transforms[rv]
    name = "identity" if transform is None else transform.name
    if name != "interval":
        return Site(rv.name, shape, _STANDARD.get(name, "unknown"), {})
    low, high = np.asarray(low, float), np.asarray(high, float)
    if (np.abs(high) > 1e10).all():
        kind, loc, scale = "exp", low, np.sign(high)
    else:
        kind, loc, scale = "sigmoid", low, high - low
    return Site(rv.name, shape, kind, dict(loc=loc.tolist(), scale=scale.tolist()))


_STANDARD = {
    "identity": "identity",
    "log": "exp",
    "logodds": "sigmoid",
    "simplex": "softmax",
    "ordered": "ordered",
}


def _check(pymc, model):
    if not isinstance(model, pymc.Model):
        raise ValueError(f"Expected a PyMC model; got {type(model).__name__}.")
    if discrete := [v.name for v in model.free_RVs if v.dtype.startswith(("int", "uint", "bool"))]:
        got = f"discrete {', '.join(discrete)}: sum them out, as pymc_extras.marginalize does"
        raise ValueError(f"Expected a PyMC model with continuous free variables; got {got}.")
    if not model.free_RVs:
        raise ValueError("Expected a PyMC model with free variables; got none.")


def _jaxified(backend, inputs, outputs) -> Callable[[list], list]:
    try:
        function = backend.get_jaxified_graph(inputs=inputs, outputs=outputs)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"Expected a PyMC model that JAX can run; it raised {type(error).__name__}: {first}"
        raise ValueError(message) from error

    def call(values):
        with warnings.catch_warnings():
            # PyTensor's graphs ask for float64 and int64; without x64 JAX computes in 32 bits, as intended.
            warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
            return function(*values)

    return call


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Undoes side effects of importing PyMC's JAX backend: it turns x64 on and asks for 100 devices."""
    x64, flags = jax.config.values["jax_enable_x64"], os.environ.get("XLA_FLAGS")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
            yield
    finally:
        jax.config.update("jax_enable_x64", x64)
        os.environ.pop("XLA_FLAGS", None) if flags is None else os.environ.update(XLA_FLAGS=flags)
