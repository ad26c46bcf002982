"""A fitted posterior: draws, densities, and how far to trust them."""

import dataclasses
import warnings
from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from flowjax.distributions import StandardNormal, Transformed
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.random import generator
from ddnf.posterior import evaluate
from ddnf.posterior.bridge import bridge
from ddnf.posterior.diagnosis import EVALUATED, KHAT, Sample
from ddnf.posterior.hmc import Space
from ddnf.posterior.importance import psis
from ddnf.posterior.issues import chain_issues, find_issues, gather_chain_evidence
from ddnf.posterior.log import Log
from ddnf.posterior.mixture import ModeMixture
from ddnf.posterior.polish import Chains, continue_chains, run_polish
from ddnf.posterior.sites import Site, constrain_sites
from ddnf.posterior.summary import Summary, summarize
from ddnf.posterior.target import Target
from ddnf.system.checks import check_count, check_key
from ddnf.training.devices import Devices, map_shared, mesh_of


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
        issues: problems with the fit, each with a remedy; empty if none was found.
        losses: the negative ELBO during training, in chunks of 100 steps.
        seconds: wall time of each chunk; the first includes compilation.
        log: the stages of the fit, with times, gradient evaluations and diagnoses; prints as a table.
        stage: the stage that produced the result.
        sites: names, shapes and transforms of the parameters, for named draws without the target.
        base: the distribution that the flow starts from: a mixture of Gaussians if there are several modes, None for
            the standard normal.
        log_evidence_error: standard error of `log_evidence`.
        chains: the Markov chains that draws come from (see `polish`); None if draws come from the flow.
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
    log_evidence_error: float = float("nan")
    chains: Chains | None = None

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
        lines.append(f"k-hat {self.khat:.2f}, ESS {self.ess:.1%} of the draws")
        if (chains := self.chains) is not None:
            size = f"{chains.z.shape[0]} Markov chains of {chains.z.shape[1]} draws"
            accepted = f"{chains.flow_acceptance:.0%} of the flow's proposals accepted"
            lines.append(f"{size}: R-hat {chains.rhat:.3f}, ESS {chains.ess:.0f}, {accepted}")
        return "\n".join([*lines, *issues])

    def sample(self, key: PRNGKeyArray, n: int = 1000, *, devices: Devices = None) -> Any:
        """n constrained draws, by the names of the model; or one array (n, dim) for a plain `Target`.

        `devices` shares the draws of a flow: "all", a number that divides 2,000, or a mesh with one axis.
        """
        return self.constrain(self.sample_unconstrained(key, n, devices=devices))

    def sample_unconstrained(
        self, key: PRNGKeyArray, n: int = 1000, *, devices: Devices = None
    ) -> Float[Array, "n dim"]:
        """n draws in the unconstrained space, from the chains if there are any; these are continued if n is larger."""
        check_key(key)
        check_count(n=n)
        if self.chains is None:
            return jnp.asarray(evaluate.draw_in_parts(self.flow, key, n, base=self.base, mesh=mesh_of(devices))[0])
        stored = self.chains.z.reshape(-1, self.dim)
        if n <= len(stored):
            return jnp.asarray(stored[generator(key).choice(len(stored), n, replace=False)])
        more = continue_chains(key, self._space(), self.chains, n - len(stored))
        return jnp.asarray(np.concatenate([stored, more]))

    def polish(self, key: PRNGKeyArray, n: int = 10_000, *, progress: bool = True) -> "Posterior":
        """The posterior with draws from Markov chains through the flow, which are exact for any flow.

        32 chains start from importance-resampled draws of the flow. They combine Hamiltonian trajectories in the space
        of its base with proposals from the flow, which move them between modes. They run until R-hat is below 1.01 and
        the effective sample size is 4,000, or until the budget is spent. `posterior.chains` has the diagnostics.
        `log_prob`, `importance_sample`, `khat` and `elbo` still refer to the flow.

        Args:
            key: random key.
            n: number of draws to keep.
            progress: whether to show a progress bar.

        Warns if the chains have not converged, or if any check finds that they miss part of the target, and says what
        to do.

        Example:
            >>> import ddnf, jax.numpy as jnp, jax.random as jr
            >>> target = ddnf.Target(lambda z: -jnp.sum(jnp.cosh(z)), 2)
            >>> posterior = ddnf.fit_posterior(jr.key(0), target, steps=200, rounds=1, exact="never", progress=False)
            >>> polished = posterior.polish(jr.key(1), 2000, progress=False)
            >>> polished.chains.rhat < 1.01
            True
        """
        check_key(key)
        check_count(n=n)
        chains = run_polish(key, self._space(), draws=n, progress=progress, khat=self.khat, ess=self.ess)
        z, log_q, log_weights = (np.asarray(a, float) for a in self._weighted_sample(jr.fold_in(key, 1), EVALUATED))
        fitted, target, no_losses = Sample(z, log_q, log_weights), self._known_target(), np.zeros(0)
        evidence = gather_chain_evidence(
            jr.fold_in(key, 2), self.flow, target, no_losses, fitted=fitted, chains=chains, base=self.base
        )
        issues = (*chain_issues(chains, self.khat), *find_issues(evidence))
        for issue in issues:
            warnings.warn(issue, RuntimeWarning, stacklevel=2)
        log_evidence, error = bridge(fitted, chains)
        return dataclasses.replace(
            self, chains=chains, issues=issues, stage="polish", log_evidence=log_evidence, log_evidence_error=error
        )

    def log_prob(
        self, z: Float[Array, "*batch dim"] | Mapping[str, Any], *, devices: Devices = None
    ) -> Float[Array, "*batch"]:
        """The fit's exact log density in the unconstrained space.

        Args:
            z: points in that space, or named draws as returned by `sample`, which are transformed first.
            devices: the devices that share the points: "all", a number, or a mesh with one axis.
        """
        points = self._unconstrained(z) if isinstance(z, Mapping) else jnp.asarray(z)
        if points.shape[-1:] != self.flow.shape:
            raise ValueError(f"Expected points of shape (..., {self.dim}); got {points.shape}.")
        flat, value = points.reshape(-1, self.dim), partial(evaluate.log_prob, self.distribution)
        mesh = mesh_of(devices)
        return (value(flat) if mesh is None else map_shared(value, mesh, flat)).reshape(points.shape[:-1])

    def importance_sample(self, key: PRNGKeyArray, n: int = 1000, *, weighted: bool = False) -> Any:
        """Draws that are corrected by Pareto-smoothed importance weights, closer to the target than `sample`.

        Args:
            key: random key.
            n: number of draws.
            weighted: whether to return ``(draws, weights)``, with weights that sum to 1, instead of n draws that are
                resampled from 4 n.
        """
        check_key(key)
        check_count(n=n)
        key, pick = jr.split(key)
        z, _, log_weights = self._weighted_sample(key, max(25, n if weighted else 4 * n))
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
        """Mean, standard deviation and quantiles of every parameter, below a line with the diagnostics of the fit.

        With Markov chains, this summarizes all draws and adds R-hat and effective sample sizes of every parameter.
        """
        figures = dict(elbo=self.elbo, elbo_error=self.elbo_error, khat=self.khat, ess=self.ess)
        if self.chains is None:
            return summarize(self.sample(jr.key(0) if key is None else key, n), figures)
        z = self.chains.z
        draws = self.constrain(jnp.asarray(z.reshape(-1, self.dim)))
        return summarize(draws, figures | dict(rhat=self.chains.rhat), chains=len(z))

    def to_arviz(self, key: PRNGKeyArray, n: int = 1000, *, predictive: bool = False) -> Any:
        """ArviZ InferenceData (DataTree from ArviZ 1): draws, log densities, likelihoods, data and diagnostics.

        Markov chains are exported with all draws; `predictive` adds draws of the data.
        """
        from ddnf.posterior.export import to_arviz

        return to_arviz(self, key, n, predictive=predictive)

    def save(self, path: str | PathLike, *, overwrite: bool = False) -> None:
        """Writes the fit to one file; see `ddnf.load`. Replaces a model, and any other file only with `overwrite`."""
        from ddnf.storage.models import save

        save(path, self, overwrite=overwrite)

    def constrain(self, z: Float[Array, "n dim"]) -> Any:
        """Unconstrained draws as `sample` returns them."""
        if self.target is not None:
            return z if self.target.constrain is None else self.target.map("constrain", z)
        named = jax.vmap(lambda point: constrain_sites(self.sites, point))(z)
        return named if named else z

    def _unconstrained(self, draws):
        if self.target is None or self.target.unconstrain is None:
            raise ValueError(
                f"Expected points in the unconstrained space, of shape (..., {self.dim}), as from "
                "sample_unconstrained; got named draws for a target that cannot invert its transforms. Pass "
                "Target(..., unconstrain=...)."
            )
        return self.target.map("unconstrain", draws)

    def _space(self) -> Space:
        return Space(self._known_target().programs.density, self.flow, self.base)

    def _known_target(self) -> Target:
        if self.target is None:
            raise ValueError(
                "Expected a posterior with its target; got one that was loaded without. Use "
                "ddnf.load(path, target=...)."
            )
        return self.target

    def _weighted_sample(self, key, n):
        target = self._known_target()
        z, log_q = map(jnp.asarray, evaluate.draw_in_parts(self.flow, key, n, base=self.base))
        return z, log_q, evaluate.clean(target.programs.values(z) - np.asarray(log_q, float))
