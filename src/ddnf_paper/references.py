"""ADVI and NUTS for a plain log density, by NumPyro."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from flowjax.bijections import AbstractBijection, Affine, TriangularAffine
from jaxtyping import Array, Float, PRNGKeyArray
from scipy import stats

from ddnf.system import require


class ADVI(NamedTuple):
    """A Gaussian fitted by `advi`.

    Attributes:
        flow: affine map from a standard normal to the fit.
        losses: the negative ELBO of each step.
    """

    flow: AbstractBijection
    losses: Float[Array, " steps"]


def advi(
    key: PRNGKeyArray,
    log_density: Callable[[Array], Array],
    dim: int,
    *,
    full_rank: bool = False,
    steps: int = 5000,
    learning_rate: float = 5e-2,
    particles: int = 16,
    progress: bool = False,
) -> ADVI:
    """Automatic differentiation variational inference: a Gaussian that minimizes KL(q|p), by NumPyro's guides.

    Kucukelbir, Tran, Ranganath, Gelman and Blei, 2017. Trained by Adam with a cosine schedule that decays to zero.

    Args:
        key: random key.
        log_density: of one point of shape (dim,), on all of R^dim, up to a constant.
        dim: dimension.
        full_rank: whether the covariance is full rather than diagonal.
        steps: training steps.
        learning_rate: initial learning rate of Adam.
        particles: draws per step.
        progress: whether to show a progress bar.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> fit = advi(jr.key(0), lambda z: -jnp.sum((z - 3) ** 2) / 2, 2, steps=500)
        >>> bool(jnp.allclose(fit.flow.loc, 3.0, atol=0.2))
        True
    """
    _check(dim, dict(steps=steps, particles=particles))
    numpyro = require("numpyro", "numpyro")
    guides = require("numpyro.infer.autoguide", "numpyro")

    def model():
        anywhere = numpyro.distributions.Normal(jnp.zeros(dim), 1.0).to_event(1).mask(False)
        numpyro.factor("log_density", log_density(numpyro.sample("z", anywhere)))

    guide = (guides.AutoMultivariateNormal if full_rank else guides.AutoNormal)(model)
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))
    svi = numpyro.infer.SVI(model, guide, optimizer, numpyro.infer.Trace_ELBO(num_particles=particles))
    result = svi.run(key, steps, progress_bar=progress)
    found = result.params
    if full_rank:
        return ADVI(TriangularAffine(found["auto_loc"], found["auto_scale_tril"]), result.losses)
    return ADVI(Affine(found["z_auto_loc"], found["z_auto_scale"]), result.losses)


class NUTS(NamedTuple):
    """Draws and diagnostics of `nuts`.

    Attributes:
        draws: draws of all chains, one chain after another.
        r_hat: rank-normalized split R-hat of each coordinate; above 1.01 the chains have not converged.
        ess: bulk effective sample size of each coordinate.
        divergences: number of divergent transitions after the warm-up.
    """

    draws: Float[np.ndarray, "n dim"]
    r_hat: Float[np.ndarray, " dim"]
    ess: Float[np.ndarray, " dim"]
    divergences: int


def nuts(
    key: PRNGKeyArray,
    log_density: Callable[[Array], Array],
    dim: int,
    *,
    chains: int = 4,
    warmup: int = 1000,
    samples: int = 1000,
    progress: bool = False,
) -> NUTS:
    """Draws by the No-U-Turn sampler of NumPyro, from chains that start uniform on [-2, 2]^dim.

    Hoffman and Gelman, 2014; R-hat and effective sample size by Vehtari, Gelman, Simpson, Carpenter and Bürkner, 2021.

    Args:
        key: random key.
        log_density: of one point of shape (dim,), on all of R^dim, up to a constant.
        dim: dimension.
        chains: number of chains, run in parallel.
        warmup: adaptation steps of each chain, which are discarded.
        samples: draws of each chain.
        progress: whether to show a progress bar.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> run = nuts(jr.key(0), lambda z: -jnp.sum((z - 3) ** 2) / 2, 2, warmup=200, samples=200)
        >>> run.draws.shape, bool((run.r_hat < 1.1).all())
        ((800, 2), True)
    """
    _check(dim, dict(chains=chains, warmup=warmup, samples=samples))
    infer = require("numpyro.infer", "numpyro")
    start_key, run_key = jr.split(key)
    sampler = infer.MCMC(
        # Compiled here, because NumPyro evaluates it once outside of any compiled function.
        infer.NUTS(potential_fn=jax.jit(lambda z: -log_density(z))),
        num_warmup=warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=progress,
    )
    start = jr.uniform(start_key, (chains, dim), minval=-2.0, maxval=2.0)
    # NumPyro expects no chain axis for a single chain.
    sampler.run(run_key, init_params=start if chains > 1 else start[0], extra_fields=("diverging",))
    draws = np.asarray(sampler.get_samples(group_by_chain=True))
    divergences = int(np.sum(sampler.get_extra_fields()["diverging"]))
    return NUTS(draws.reshape(-1, dim), *_convergence(draws), divergences)


def _convergence(draws: Float[np.ndarray, "chains samples dim"]):
    diagnostics = require("numpyro.diagnostics", "numpyro")
    half = draws.shape[1] // 2
    split = np.concatenate([draws[:, :half], draws[:, -half:]])
    # Rank-normalized: normal scores of the ranks among all draws, with Blom's offsets.
    ranks = stats.rankdata(split.reshape(-1, split.shape[-1]), axis=0)
    scores = stats.norm.ppf((ranks - 0.375) / (len(ranks) + 0.25)).reshape(split.shape)
    return diagnostics.gelman_rubin(scores), diagnostics.effective_sample_size(scores)


def _check(dim, sizes):
    for name, value in dict(dim=dim, **sizes).items():
        if value < 1:
            raise ValueError(f"Expected {name} of at least 1; got {value}.")
