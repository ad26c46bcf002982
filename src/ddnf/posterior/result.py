"""A fitted posterior: draws, densities, and how far to trust them."""

import dataclasses
import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from flowjax.distributions import StandardNormal, Transformed
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.posterior import evaluate
from ddnf.posterior.diagnosis import KHAT
from ddnf.posterior.importance import psis
from ddnf.posterior.log import Log
from ddnf.posterior.mixture import ModeMixture
from ddnf.posterior.sites import Site, constrain_sites
from ddnf.posterior.summary import Summary, summarize
from ddnf.posterior.target import Target
from ddnf.system.checks import check_count, check_key


@dataclasses.dataclass(frozen=True, repr=False)
class Posterior:
    """A fitted posterior: draws, densities, and how far to trust them.

    Attributes:
        flow: the bijection from the base to the target's (unconstrained) space.
        target: what it was fitted to; None in a posterior loaded without it.
        elbo: the exact evidence lower bound, from fresh draws.
        elbo_error: its standard error.
        log_evidence: estimate of the log of the target's integral, by importance sampling.
        khat: PSIS diagnostic of the importance weights; above 0.7 they cannot be trusted.
        ess: effective sample size of the importance weights, as a share of the draws.
        issues: what was found wrong with the fit, each with what to do; empty if nothing was.
        losses: the negative ELBO in the course of training, in chunks of 100 steps.
        seconds: wall time of each chunk; the first one compiles.
        log: the stages of the fit, with times, gradient evaluations and diagnoses; prints as a table.
        stage: the stage that the result comes from.
        sites: names, shapes and transforms of the parameters, for named draws without the target.
        base: the distribution that the flow starts from: a mixture of Gaussians where there are several modes; None for
            the standard normal.
    """

    flow: AbstractBijection
    target: Target | None
    elbo: float
    elbo_error: float
    log_evidence: float
    khat: float
    ess: float
    issues: tuple[str, ...]
    losses: Float[np.ndarray, " n"]
    seconds: Float[np.ndarray, " n"]
    log: Log = dataclasses.field(default_factory=Log)
    stage: str = ""
    sites: tuple[Site, ...] = ()
    base: ModeMixture | None = None

    @property
    def dim(self) -> int:
        return self.flow.shape[0]

    @property
    def gradients(self) -> int:
        """Gradient evaluations of the target that the fit took."""
        return self.log.gradients

    @property
    def complaints(self) -> tuple[str, ...]:
        """Deprecated: use `issues`."""
        warnings.warn("Posterior.complaints is deprecated: use Posterior.issues.", DeprecationWarning, stacklevel=2)
        return self.issues

    @property
    def distribution(self) -> Transformed:
        """The fit as a FlowJAX distribution on the unconstrained space."""
        return Transformed(StandardNormal(self.flow.shape) if self.base is None else self.base, self.flow)

    def __repr__(self):
        origin = f", from stage {self.stage!r}" if self.stage else ""
        figures = f"ELBO {self.elbo:.5g} ± {self.elbo_error:.2g}, log evidence {self.log_evidence:.5g}"
        issues = [f"- {issue}" for issue in self.issues] or ["No issues found."]
        lines = [f"Posterior with {self.dim} dimensions{origin}", figures]
        return "\n".join([*lines, f"k-hat {self.khat:.2f}, ESS {self.ess:.1%} of the draws", *issues])

    def sample(self, key: PRNGKeyArray, n: int = 1000) -> Any:
        """n draws: arrays named as in the model, constrained; or one array (n, dim) for a plain `Target`."""
        return self.constrain(self.sample_unconstrained(key, n))

    def sample_unconstrained(self, key: PRNGKeyArray, n: int = 1000) -> Float[Array, "n dim"]:
        """n draws in the unconstrained space."""
        check_key(key)
        check_count(n=n)
        return evaluate.draw(self.flow, key, n, base=self.base)[0]

    def log_prob(self, z: Float[Array, "*batch dim"] | Mapping[str, Any]) -> Float[Array, "*batch"]:
        """The fit's exact log density in the unconstrained space.

        Args:
            z: points of that space; or draws by name as `sample` returns them, which are mapped there first.
        """
        z = self._unconstrained(z) if isinstance(z, Mapping) else jnp.asarray(z)
        if z.shape[-1:] != self.flow.shape:
            raise ValueError(f"Expected points of shape (..., {self.dim}); got {z.shape}.")
        return evaluate.log_prob(self.distribution, z.reshape(-1, self.dim)).reshape(z.shape[:-1])

    def importance_sample(self, key: PRNGKeyArray, n: int = 1000, *, weighted: bool = False) -> Any:
        """Draws corrected by Pareto-smoothed importance weights: closer to the target than `sample`.

        Args:
            key: random key.
            n: number of draws.
            weighted: return ``(draws, weights)`` with weights that sum to 1, instead of n draws resampled from 4 n.
        """
        check_key(key)
        check_count(n=n)
        key, pick = jr.split(key)
        z, log_weights = self._weighted(key, max(25, n if weighted else 4 * n))
        smoothed = psis(log_weights)
        if smoothed.khat > KHAT:
            message = f"k-hat is {smoothed.khat:.2f}, above {KHAT}: importance weights cannot be trusted here."
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        weights = np.exp(smoothed.log_weights)
        if weighted:
            return self.constrain(z), jnp.asarray(weights)
        chosen = jr.choice(pick, len(z), (n,), p=jnp.asarray(weights))
        return self.constrain(z[chosen])

    def summary(self, key: PRNGKeyArray | None = None, n: int = 4000) -> Summary:
        """Mean, deviation and quantiles of every parameter, under a line with the figures of the fit."""
        draws = self.sample(jr.key(0) if key is None else key, n)
        return summarize(draws, dict(elbo=self.elbo, elbo_error=self.elbo_error, khat=self.khat, ess=self.ess))

    def to_arviz(self, key: PRNGKeyArray, n: int = 1000) -> Any:
        """ArviZ InferenceData (DataTree from ArviZ 1): draws, log densities, log weights, and the fit's figures."""
        from ddnf.posterior.export import to_arviz

        return to_arviz(self, key, n)

    def save(self, path: str | PathLike, *, overwrite: bool = False) -> None:
        """Writes the fit to one file; see `ddnf.load`. Replaces a model; any other file only with `overwrite`."""
        from ddnf.storage.models import save

        save(path, self, overwrite=overwrite)

    def constrain(self, z: Float[Array, "n dim"]) -> Any:
        """Unconstrained draws as `sample` returns them."""
        if self.target is not None:
            return z if self.target.constrain is None else _map(self.target.constrain, z)
        named = jax.vmap(lambda point: constrain_sites(self.sites, point))(z)
        return named if named else z

    def _unconstrained(self, draws):
        if self.target is None or self.target.unconstrain is None:
            raise ValueError(
                f"Expected points of the unconstrained space, shape (..., {self.dim}), as from sample_unconstrained; "
                "got named draws, and the target has no inverse of its transforms: Target(..., unconstrain=...)."
            )
        return _map(self.target.unconstrain, {name: jnp.asarray(values) for name, values in draws.items()})

    def _weighted(self, key, n):
        if self.target is None:
            raise ValueError(
                "Expected a posterior with its target; got one loaded without: ddnf.load(path, target=...)."
            )
        z, log_q = evaluate.draw(self.flow, key, n, base=self.base)
        return z, evaluate.clean(evaluate.log_density(self.target.log_density, z) - log_q)


@eqx.filter_jit
def _map(function, points):
    return jax.vmap(function)(points)
