"""NumPyro: its models as targets, and a guide for its SVI."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection, Affine, Chain, TriangularAffine
from flowjax.distributions import StandardNormal, Transformed
from jax.flatten_util import ravel_pytree

from ddnf.bridges.numpyro_rows import TRACING, PlateRows, find_plate, with_all_members
from ddnf.flow.bijection import DDNF
from ddnf.posterior.defaults import default_flow
from ddnf.posterior.sites import Site
from ddnf.posterior.target import Details, Target
from ddnf.system.optional import require

numpyro = require("numpyro", "numpyro")
glue = require("flowjax.experimental.numpyro", "numpyro")
handlers, infer, util = numpyro.handlers, numpyro.infer, numpyro.infer.util
transforms = numpyro.distributions.transforms

# Members of a plate of rows up to which draws have a value for each.
_MEMBERS = 100_000


def from_numpyro(model: Callable, *args: Any, batch: int | dict[str, int] | None = None, **kwargs: Any) -> Target:
    """The posterior of a NumPyro model, given the arguments of the model.

    The density is over the unconstrained parameters and includes all Jacobians. Draws are a dict of the constrained
    parameters and deterministic sites. `numpyro.param` sites keep their initial values. You can fit several models in
    several threads, because tracing is serialized.

    The members of a large plate around observed sites are treated as rows. Training uses some of them; the search for
    the mode and the final check use all of them, in chunks (`Target(rows=...)`). If a plate has more than 100,000
    members, draws do not include deterministic sites, and `to_arviz` omits data, likelihoods and predictions, because
    these have one value per draw and member.

    Args:
        model: a function with NumPyro's primitives. Discrete sites that NumPyro can enumerate are summed out and do
            not appear in draws. This needs funsor: ``pip install 'ddnf[numpyro-discrete]'``.
        args, kwargs: arguments of the model.
        batch: minimum number of members of a plate to train with; a dict from plate names if there are several plates.
            Defaults to the `subsample_size` of the plate. Without either, training uses as many members as it needs
            from 20,000 on, and all members below. Arguments are sliced along their first axis; with a
            `subsample_size`, the model does this itself.

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
    faults, discrete, traces = [], {}, []

    def prototype(key):
        seeded = handlers.substitute(handlers.seed(model, key), substitute_fn=infer.init_to_uniform)
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        traces.append(trace)
        faults.extend(filter(None, map(_fault, trace.values())))
        if faults:
            return {}
        discrete.update({name: site for name, site in trace.items() if _is_discrete(site)})
        if discrete:
            discrete["model"] = _enumerated(model, trace)
        info = util.initialize_model(key, model, model_args=args, model_kwargs=kwargs, validate_grad=False)
        return info.param_info.z

    shapes = _shapes(prototype, faults)
    plate = find_plate(traces[0], batch, is_enumerated=bool(discrete))
    flat, unravel = _ravelled(shapes)
    whole = model if plate is None else with_all_members(model, plate)
    seeded = handlers.seed(whole, jr.key(0))
    summed = handlers.seed(discrete.pop("model"), jr.key(0)) if discrete else seeded

    def point(z):
        return unravel(z.astype(flat.dtype))

    def log_density(z):
        with TRACING:
            return -util.potential_energy(summed, args, kwargs, point(z), enum=bool(discrete))

    def constrain(z):
        with TRACING:  # without deterministic sites, which may depend on discrete ones
            return util.constrain_fn(seeded, args, kwargs, point(z), return_deterministic=not discrete)

    def unconstrain(draw):
        with TRACING:
            named = {name: draw[name] for name in shapes}
            return ravel_pytree(util.unconstrain_fn(seeded, args, kwargs, named))[0].astype(flat.dtype)

    def sites():
        with TRACING:
            started = handlers.substitute(seeded, substitute_fn=infer.init_to_uniform)
            trace = handlers.trace(started).get_trace(*args, **kwargs)
        # Flattened dicts are in the order of their keys.
        return tuple(_site(name, shapes[name].shape, trace[name]["fn"].support) for name in sorted(shapes))

    def details():
        with TRACING:
            return _details(whole, args, kwargs, constrain)

    functions: dict[str, Any] = dict(unconstrain=unconstrain, sites=sites)
    if plate is not None:
        tall = PlateRows(model, plate, args, kwargs, point)
        rows = tall.rows(int(flat.size), log_density if plate.is_cut else None)
        if rows is not None and plate.size > _MEMBERS:
            return Target(rows.log_prior, rows.dim, rows=rows, constrain=tall.constrain, **functions)
        if rows is not None:
            return Target(rows.log_prior, rows.dim, rows=rows, constrain=constrain, **functions, details=details)
    return Target(log_density, int(flat.size), constrain=constrain, **functions, details=None if discrete else details)


def _shapes(prototype, faults: list[str]) -> dict[str, Any]:
    """Shapes of the parameters; raises a clear error if the model fails to run or has no parameters."""
    # Only shapes are needed: nothing is compiled or run here.
    try:
        with TRACING:
            shapes = jax.eval_shape(prototype, jr.key(0))
    except ImportError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"Expected a NumPyro model that runs on the arguments; it raised {type(error).__name__}: {first}"
        raise ValueError(message) from error
    if not shapes:
        got = ", ".join(faults) or "no parameters"
        raise ValueError(f"Expected a NumPyro model with continuous parameters and all of its data; got {got}.")
    return shapes


def _ravelled(shapes) -> tuple[jax.ShapeDtypeStruct, Callable]:
    """The flat vector of parameters of these shapes, as a shape, and the function from vectors to parameters."""
    found = []

    def ravelled(parameters):
        flat, unravel = ravel_pytree(parameters)
        found.append(unravel)
        return flat

    return jax.eval_shape(ravelled, shapes), found[0]


def _details(model, args, kwargs, constrain) -> Details:
    """Plates are the axes of sites; likelihoods and predictions come from the model run with given draws."""

    seeded = handlers.seed(model, jr.key(0))

    def traced(**substitution):
        return handlers.trace(handlers.substitute(seeded, **substitution)).get_trace(*args, **kwargs)

    trace = traced(substitute_fn=infer.init_to_uniform)
    dims = {name: names for name, site in trace.items() if (names := _axes(name, site))}
    coords = {frame.name: range(frame.size) for site in trace.values() for frame in site.get("cond_indep_stack") or ()}
    data = {name: site for name, site in trace.items() if site["type"] == "sample" and site["is_observed"]}
    observed = {name: np.asarray(site["value"]) for name, site in data.items() if not _is_factor(site)}

    def log_likelihood(z):
        with TRACING:
            found = traced(data=constrain(z))
            return {name: found[name]["fn"].log_prob(found[name]["value"]) for name in data}

    def predict(key, draws):
        with TRACING:
            free = handlers.uncondition(model)
            return {
                name: values
                for name, values in infer.Predictive(free, draws)(key, *args, **kwargs).items()
                if name in observed
            }

    return Details(dims, coords, observed, log_likelihood, predict)


def _axes(name: str, site) -> list[str]:
    """Names of the axes of a site: its plates, then axes of its events; none where no plate names one."""
    frames = {frame.dim: frame.name for frame in site.get("cond_indep_stack") or ()}
    if site["type"] not in ("sample", "deterministic") or not frames:
        return []
    events = len(site["fn"].event_shape) if site["type"] == "sample" else 0
    rank = np.ndim(site["value"])
    return [frames.get(axis - rank + events, f"{name}_dim_{axis}") for axis in range(rank)]


def _is_factor(site) -> bool:
    return isinstance(site["fn"], numpyro.distributions.Unit)


class AutoDDNF(infer.autoguide.AutoContinuous):
    """A NumPyro guide: a standard normal mapped by a flow and an affine map, in the unconstrained space.

    Works with `SVI`, `Predictive` and `NeuTraReparam` like NumPyro's own guides. The affine map is triangular up to
    128 dimensions and diagonal above. Let the learning rate decay as in the example; otherwise the noise of the last
    steps remains in the fit.

    Args:
        model: a NumPyro model with continuous latent sites.
        flow: a bijection (dim,) -> (dim,) to train instead of the default for this dimension.
        blocks, steps, hidden, activation: settings of the `DDNF` if no flow is given; None for the defaults.
        prefix, init_loc_fn, init_scale: as in NumPyro's guides: names, initial location and deviation.

    Example:
        >>> import jax.random as jr, numpyro, numpyro.distributions as dist, optax
        >>> def model():
        ...     numpyro.sample("scale", dist.HalfNormal(1.0))
        >>> guide = AutoDDNF(model)
        >>> adam = optax.adam(optax.cosine_decay_schedule(2e-2, 50))
        >>> svi = numpyro.infer.SVI(model, guide, adam, numpyro.infer.Trace_ELBO(num_particles=16))
        >>> params = svi.run(jr.key(0), 50, progress_bar=False).params
        >>> guide.sample_posterior(jr.key(1), params, sample_shape=(5,))["scale"].shape
        (5,)
    """

    def __init__(
        self,
        model: Callable,
        *,
        flow: AbstractBijection | None = None,
        blocks: int | None = None,
        steps: int | None = None,
        hidden: Sequence[int] | None = None,
        activation: str | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable = infer.init_to_uniform,
        init_scale: float = 0.1,
    ):
        if not init_scale > 0:
            raise ValueError(f"Expected a positive init_scale; got {init_scale}.")
        if flow is not None and not isinstance(flow, AbstractBijection):
            raise ValueError(f"Expected flow to be a FlowJAX bijection such as ddnf.DDNF; got {type(flow).__name__}.")
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)
        self._flow, self._init_scale = flow, init_scale
        given = dict(blocks=blocks, steps=steps, hidden=hidden, activation=activation)
        self._options = {name: value for name, value in given.items() if value is not None}

    def _setup_prototype(self, *args, **kwargs):
        super()._setup_prototype(*args, **kwargs)
        loc, dim = self._init_latent, self.latent_dim
        flow = _flow(numpyro.prng_key(), dim, self._options) if self._flow is None else self._flow
        if flow.shape != (dim,) or flow.cond_shape is not None:
            raise ValueError(f"Expected a flow of shape ({dim},) without condition; got {flow.shape}.")
        full = dim <= 128  # without a search for modes, a triangle of many dimensions is slow to learn
        scale = self._init_scale * (jnp.eye(dim) if full else jnp.ones(dim))
        self._bijection = Chain([flow, TriangularAffine(loc, scale) if full else Affine(loc, scale)])

    def _get_posterior(self):
        bijection = glue.register_params(f"{self.prefix}_flow", self._bijection)
        # NumPyro's own base: FlowJAX's does not accept raw keys.
        transforms = glue.distribution_to_numpyro(Transformed(StandardNormal(bijection.shape), bijection)).transforms
        return numpyro.distributions.TransformedDistribution(self.get_base_dist(), transforms)

    def get_base_dist(self):
        return numpyro.distributions.Normal(jnp.zeros(self.latent_dim), 1.0).to_event(1)

    def median(self, params):
        return self.quantiles(params, [0.5])

    def quantiles(self, params, quantiles):
        raise NotImplementedError("AutoDDNF has no closed-form quantiles; compute them from sample_posterior's draws.")


def _flow(key, dim, options) -> DDNF:
    default = dict(blocks=16, steps=2, hidden=(3,), activation="softplus")
    return DDNF(key, dim, **(default | options)) if options else default_flow(key, dim)


def _is_discrete(site) -> bool:
    return site["type"] == "sample" and not site["is_observed"] and site["fn"].support.is_discrete


def _enumerated(model, trace):
    """The model with its discrete sites enumerated, in axes to the left of all plates."""
    require("funsor", "numpyro-discrete")
    enumeration = require("numpyro.contrib.funsor", "numpyro-discrete")
    frames = [frame for site in trace.values() for frame in site.get("cond_indep_stack") or ()]
    return enumeration.enum(enumeration.config_enumerate(model), min([0, *(frame.dim for frame in frames)]) - 1)


def _fault(site) -> str | None:
    if _is_discrete(site) and not site["fn"].has_enumerate_support:
        return f"discrete {site['name']}, which cannot be enumerated: sum it out"
    return None


def _site(name, shape, support) -> Site:
    """A site with the transform from the real numbers to its support; "unknown" if it is not a standard one."""
    return Site(name, tuple(shape), *_described(numpyro.distributions.biject_to(support)))


def _described(transform) -> tuple[str, dict[str, Any]]:
    if isinstance(transform, transforms.IndependentTransform):
        return _described(transform.base_transform)
    if isinstance(transform, transforms.ComposeTransform) and len(transform.parts) == 2:
        first, second = transform.parts
        name, parameters = _described(first)
        if isinstance(second, transforms.AffineTransform) and name in ("exp", "sigmoid") and not parameters:
            return name, dict(loc=jnp.asarray(second.loc).tolist(), scale=jnp.asarray(second.scale).tolist())
        return "unknown", {}
    return next((name for kind, name in _STANDARD.items() if type(transform) is kind), "unknown"), {}


_STANDARD = {
    transforms.IdentityTransform: "identity",
    transforms.ExpTransform: "exp",
    transforms.SigmoidTransform: "sigmoid",
    transforms.StickBreakingTransform: "sticks",
    transforms.OrderedTransform: "ordered",
    transforms.CorrCholeskyTransform: "corr_cholesky",
    transforms.LowerCholeskyTransform: "lower_cholesky",
}
