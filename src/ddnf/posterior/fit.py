"""Posteriors in one call: a flow fitted to a density known up to a constant."""

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from os import PathLike
from typing import Literal

import jax.random as jr
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array, PRNGKeyArray

from ddnf.posterior.bridge import Bridge, bridge
from ddnf.posterior.defaults import default_learning_rate, resolve_end
from ddnf.posterior.issues import chain_issues, find_issues
from ddnf.posterior.modes import Gaussian, Search
from ddnf.posterior.objective import End, Gradient
from ddnf.posterior.policy import next_stage, run_stage
from ddnf.posterior.result import Posterior
from ddnf.posterior.stages import training_issue
from ddnf.posterior.state import Exact, Settings, State
from ddnf.posterior.tall import fit_tall, is_tall
from ddnf.posterior.target import Target
from ddnf.system.checks import check_count, check_key
from ddnf.system.threads import one_blas_thread
from ddnf.training.devices import Devices, check_batch, gather, mesh_of


def fit_posterior(
    key: PRNGKeyArray,
    target: Target,
    *,
    flow: AbstractBijection | None = None,
    steps: int | None = None,
    batch: int = 32,
    learning_rate: float | None = None,
    rounds: int = 3,
    searches: int = 4,
    end: End | Literal["auto"] | None = "auto",
    gradient: Gradient | None = None,
    temper: float | None = None,
    regularizer: Callable[[AbstractBijection, Array], Array] | None = None,
    checkpoint: str | PathLike | None = None,
    exact: Exact = "auto",
    devices: Devices = None,
    progress: bool = True,
) -> Posterior:
    """Fits a flow to a target by minimizing KL(q|p): variational inference without tuning, corrected by MCMC if needed.

    1. A search for modes gives a Gaussian, which standardizes the target.
    2. From 25 dimensions on, Markov chains start from random points, and are returned if they converge.
    3. A flow that starts close to the identity, followed by an affine map, is trained on its own draws. If importance
       weights show that it is nearly good enough, training continues, for at most `rounds` rounds. It restarts with a
       smaller learning rate if the flow folds or has become worse than the Gaussian.
    4. If the flow is still not good enough, Markov chains run through it. If the flow is poor and the target is cheap,
       chains without the flow are tried first. If the chains do not converge, a larger flow is trained.

    `posterior.log` shows each stage.

    Args:
        key: random key.
        target: a `Target`, from `from_numpyro`, `from_pymc` or a log density.
        flow: a bijection (dim,) -> (dim,) to train instead of the default for this dimension.
        steps: training steps per round; None for 2,500, or above two dimensions for 600 in the first round and in a
            second round if little is missing.
        batch: draws per step; a larger flow uses twice as many.
        learning_rate: peak learning rate of Adam; None for 0.02, or less in more than 20 dimensions.
        rounds: maximum number of rounds of training.
        searches: number of random starts of the search for modes.
        end: the affine map after the flow: "full" (triangular), "diagonal" or "auto" (full up to 2,048 dimensions).
            None trains the flow alone, without an affine map and without a search for modes.
        gradient: "path" (path derivative, which has no variance if the fit is perfect) or "total" (plain
            reparameterization); None for "path" if the flow supports it.
        temper: share of the first round's steps in which the target is tempered, from nearly flat to itself; None for
            0.3 if the search has found several modes, and 0 otherwise.
        regularizer: a function of the flow and one standard normal draw that is added to the loss, such as
            ``lambda flow, x: 0.1 * ddnf.geodesic(flow.path(x)[1])``.
        checkpoint: folder for checkpoints; an interrupted run resumes from there.
        exact: whether draws come from Markov chains through the flow: "auto" (if the diagnosis of the flow is not
            good), "always" or "never". See `Posterior.polish`.
        devices: the devices that share draws, chains, and the rows of a `Target` with rows: "all", a number, or a mesh
            with one axis. None for JAX's default device. Training agrees with that of one device up to rounding.
        progress: whether to show progress bars.

    Warns if the result cannot be trusted, and suggests a remedy. The result must pass independent checks. The first is
    the importance weights of the fit's own draws (k-hat, ESS, changes of means and standard deviations), or the
    convergence of the chains (R-hat, effective sample sizes). The second uses other draws: short MCMC chains from the
    result, and the mass around modes that further searches find.

    Raises a `ValueError` if the target is improper or not finite anywhere.

    Example:
        >>> import ddnf, jax.numpy as jnp, jax.random as jr
        >>> target = ddnf.Target(lambda z: -jnp.sum(jnp.cosh(z)) - z[0] * z[1] / 2, 2)
        >>> posterior = ddnf.fit_posterior(jr.key(0), target, steps=1000, progress=False)
        >>> posterior.sample(jr.key(1), 10).shape
        (10, 2)
        >>> posterior.khat < 0.7
        True
    """
    _check(key, target, flow, end, gradient, temper, learning_rate, exact)
    check_count(steps=steps, batch=batch, rounds=rounds, searches=searches)
    end = resolve_end(end, target.dim)
    rest = end, gradient, temper, regularizer, checkpoint, exact, progress
    rate = default_learning_rate(target.dim) if learning_rate is None else learning_rate
    mesh = mesh_of(devices)
    check_batch(mesh, batch)
    settings = Settings(target.on(mesh), flow, steps, batch, rate, rounds, searches, *rest, *jr.split(key, 4))
    # Large matrices of a model are worth several threads.
    with nullcontext() if target.programs.has_large_matrices else one_blas_thread():
        posterior = fit_tall(settings, _run, _posterior) if is_tall(settings) else _posterior(_run(settings))
    for issue in posterior.issues:
        warnings.warn(issue, RuntimeWarning, stacklevel=2)
    return _on_one_device(posterior, target)


def _on_one_device(posterior: Posterior, target: Target) -> Posterior:
    """The posterior on one device, where its chains can be continued."""
    mesh, chains = None if posterior.target is None else posterior.target.mesh, posterior.chains
    if chains is not None:
        chains = dataclasses.replace(chains, kernel=gather(mesh, chains.kernel), position=gather(mesh, chains.position))
    return dataclasses.replace(posterior, target=target, chains=chains)


def _run(settings: Settings, modes: tuple[Gaussian, ...] = ()) -> State:
    state = State(settings, Search(settings.target), settings.learning_rate, modes)
    while (decision := next_stage(state)).stage is not None:
        state = run_stage(state, decision)
    return state


def _posterior(state: State) -> Posterior:
    assert state.evidence is not None
    exact = state.exact
    best = state.best if exact is None else exact.candidate
    if exact is None:
        issues, training = find_issues(state.evidence), training_issue(state)
        issues = issues if training is None else (*issues, training)
        log_evidence = Bridge(best.diagnosis.log_evidence, best.diagnosis.log_evidence_error)
    else:
        issues = (*chain_issues(exact.chains, best.khat_for_chains), *find_issues(state.evidence))
        log_evidence = bridge(best.sample, exact.chains)
    losses, seconds = (np.concatenate(parts) if parts else np.zeros(0) for parts in (state.losses, state.seconds))
    diagnosis = best.diagnosis
    return Posterior(
        best.flow,
        state.settings.target,
        diagnosis.elbo,
        diagnosis.elbo_error,
        log_evidence.log_evidence,
        diagnosis.khat,
        diagnosis.ess,
        issues,
        losses,
        seconds,
        log=state.log,
        stage=best.stage if exact is None else "polish",
        base=best.base,
        log_evidence_error=log_evidence.error,
        chains=None if exact is None else exact.chains,
    )


def _check(key, target, flow, end, gradient, temper, learning_rate, exact):
    check_key(key)
    if not isinstance(target, Target):
        raise ValueError(f"Expected a ddnf.Target (or from_numpyro, from_pymc); got {type(target).__name__}.")
    if exact not in ("auto", "always", "never"):
        raise ValueError(f"Expected exact to be auto, always or never; got {exact!r}.")
    is_number = isinstance(learning_rate, int | float) and not isinstance(learning_rate, bool)
    if learning_rate is not None and not (is_number and learning_rate > 0):
        raise ValueError(f"Expected a positive learning_rate; got {learning_rate}.")
    if end not in ("auto", "full", "diagonal", None):
        raise ValueError(f"Expected end to be auto, full, diagonal or None; got {end!r}.")
    if gradient not in ("path", "total", None):
        raise ValueError(f"Expected gradient to be path, total or None; got {gradient!r}.")
    if temper is not None and not 0 <= temper <= 1:
        raise ValueError(f"Expected temper between 0 and 1; got {temper}.")
    if flow is not None:
        if not isinstance(flow, AbstractBijection):
            raise ValueError(f"Expected flow to be a FlowJAX bijection such as ddnf.DDNF; got {type(flow).__name__}.")
        if flow.shape != (target.dim,) or flow.cond_shape is not None:
            raise ValueError(f"Expected a flow of shape ({target.dim},) without condition; got {flow.shape}.")
