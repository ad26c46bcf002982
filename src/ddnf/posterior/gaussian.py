"""Gaussians that fit a skewed posterior better than the Gaussian with the curvature at the mode."""

import numpy as np
from jaxtyping import Array, Float

from ddnf.posterior.diagnosis import Sample
from ddnf.posterior.importance import psis
from ddnf.posterior.programs import Programs

_DRAWS = 512
_ROUNDS = 4
# A round that moves mean and scale by less than this, in deviations, is the last.
_SMALL = 0.02


def best_gaussian(
    rng: np.random.Generator, programs: Programs, mean: Float[np.ndarray, " dim"], scale: Float[np.ndarray, "dim dim"]
) -> tuple[Float[np.ndarray, " dim"], Float[np.ndarray, "dim dim"], float]:
    """Mean, triangular scale and ELBO of the best Gaussian, from one that is near, by natural gradient steps.

    In coordinates x in which q is standard, r(x) = grad log p + x is zero where p = q. The steps are the mean by E[r],
    and the precision by -E[x r^T] (Stein's identity: the mean curvature of log p, minus that of log q). r is small, and
    so is the noise of both.

    Example:
        >>> import jax.numpy as jnp
        >>> skewed = Programs(lambda z: jnp.sum(3 * z - jnp.exp(z)), 1)  # logarithm of a gamma variable
        >>> start = np.array([np.log(3.0)]), np.array([[3**-0.5]])
        >>> mean, scale, _ = best_gaussian(np.random.default_rng(0), skewed, *start)
        >>> bool(abs(mean[0] - 0.93) < 0.02)  # the mode is at 1.10
        True
    """
    dim = len(mean)
    best = mean, scale, -np.inf
    for _ in range(_ROUNDS):
        half = rng.normal(size=(max(_DRAWS, 4 * dim) // 2, dim))
        x = np.concatenate([half, -half])
        values, gradients = programs.gradients(mean + x @ scale.T)
        elbo = float(values.mean() + np.sum(np.log(np.diag(scale))) + dim / 2 * (1 + np.log(2 * np.pi)))
        if not np.isfinite(gradients).all() or not elbo > best[2] - 3 * values.std() / np.sqrt(len(values)):
            break
        best = mean, scale, elbo
        r = gradients @ scale + x
        bend = (x.T @ r + r.T @ x) / (2 * len(x))
        try:
            root = np.linalg.cholesky(np.linalg.inv(np.eye(dim) - bend))
        except np.linalg.LinAlgError:
            break
        move = r.mean(axis=0)
        mean, scale = mean + scale @ move, scale @ root
        if max(np.abs(move).max(), np.abs(np.diag(root) - 1).max()) < _SMALL:
            best = mean, scale, elbo
            break
    return best


def reweighted(
    sample: Sample, mean: Float[Array | np.ndarray, " dim"], scale: Float[Array | np.ndarray, "dim *dim"]
) -> tuple[Float[np.ndarray, " dim"], Float[np.ndarray, "dim dim"]] | None:
    """Mean and triangular scale of a Gaussian, updated by the change that weights make to the moments of its own draws.

    This change is more precise than the moments themselves, because the noise of the draws cancels. Returns None if the
    weights give no covariance.

    Example:
        >>> z = np.random.default_rng(0).normal(size=(5000, 1))
        >>> sample = Sample(z, -z[:, 0] ** 2 / 2, -((z[:, 0] - 0.1) ** 2) / 2 + z[:, 0] ** 2 / 2)
        >>> mean, scale = reweighted(sample, np.zeros(1), np.eye(1))
        >>> mean.round(2).tolist(), scale.round(2).tolist()
        ([0.1], [[1.0]])
    """
    center, root = np.asarray(mean, float), np.asarray(scale, float)
    root = root if root.ndim == 2 else np.diag(root)
    x = np.linalg.solve(root, (sample.z - center).T).T
    weights = np.exp(psis(sample.log_weights).log_weights)
    change = np.atleast_2d(np.cov(x.T, aweights=weights)) - np.atleast_2d(np.cov(x.T))
    try:
        return center + root @ (weights @ x - x.mean(axis=0)), root @ np.linalg.cholesky(np.eye(len(center)) + change)
    except np.linalg.LinAlgError:
        return None
