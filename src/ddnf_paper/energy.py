"""Fits of flows to the paper's first toy energy, and measurements of them that hold for folded maps too."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf import DDNF, Exact, LogDet, PrintedTaylor, Taylor, certify
from ddnf.posterior import ReverseKL
from ddnf.training import Fit, adam
from ddnf.training import fit as train
from ddnf.viz import plot
from ddnf_paper.plane import midpoint_grid
from ddnf_paper.record import plain
from ddnf_paper.targets.toy import ENERGIES

ENERGY = ENERGIES["energy1"]
RULES: dict[str, LogDet] = {
    "first order": Taylor(1),
    "second order as printed": PrintedTaylor(),
    "second order": Taylor(2),
    "exact": Exact(),
}
# Half-widths of the pictures, and of the squares where their grids and arrows start.
VIEW, SOURCE = 3.0, 2.5


@dataclasses.dataclass(frozen=True)
class Training:
    """How a flow is fitted, and how many draws it is evaluated with.

    The fit is by Adam, with a cosine schedule that decays to zero; the energy is tempered in the first half.
    """

    iterations: int
    batch: int = 256
    learning_rate: float = 1e-2
    chunk: int = 20
    draws: int = 1_000_000


@dataclasses.dataclass(frozen=True)
class FlowConfig:
    """The flow of an experiment on the first energy, and how often each fit is run."""

    training: Training
    runs: int
    blocks: int = 8
    steps: int = 1
    hidden: tuple[int, ...] = (2, 2)

    def make(self, rule: str, key: PRNGKeyArray) -> DDNF:
        """Builds the flow with one of the `RULES`."""
        return DDNF(key, 2, blocks=self.blocks, steps=self.steps, hidden=self.hidden, log_det=RULES[rule])


class Penalty(eqx.Module):
    """A regularizer times gamma; gamma is traced, so that changing it does not recompile."""

    gamma: Float[Array, ""]
    regularizer: Callable[[DDNF, Array], Array] = eqx.field(static=True)

    def __init__(self, gamma: float, regularizer: Callable[[DDNF, Array], Array]):
        self.gamma, self.regularizer = jnp.asarray(gamma, float), regularizer

    def __call__(self, flow: DDNF, x: Float[Array, " 2"]) -> Float[Array, ""]:
        return self.gamma * self.regularizer(flow, x)


def fit(key: PRNGKeyArray, flow: DDNF, training: Training, *, penalty: Penalty | None = None) -> Fit:
    """Minimizes KL(q|p), by the flow's own log-determinant, plus the penalty."""
    loss = ReverseKL(
        ENERGY.log_density,
        whitening=None,
        regularizer=penalty,
        batch=training.batch,
        gradient="total",
        temper=training.iterations // 2,
        spread=jnp.asarray(1.0),
    )
    optimizer = adam(training.learning_rate, training.iterations)
    with warnings.catch_warnings():
        # The number of skipped steps is part of the result.
        warnings.simplefilter("ignore", RuntimeWarning)
        return train(
            key, flow, loss, steps=training.iterations, optimizer=optimizer, chunk=training.chunk, progress=False
        )


def fits(
    seed: int,
    make: Callable[[PRNGKeyArray], DDNF],
    training: Training,
    *,
    runs: int,
    penalty: Penalty | None = None,
) -> Iterator[tuple[PRNGKeyArray, Fit]]:
    """The fits of several runs, each with a key to evaluate it; runs of one seed start alike for all penalties."""
    for run in range(runs):
        flow_key, fit_key, key = jr.split(jr.fold_in(jr.key(seed), run), 3)
        yield key, fit(fit_key, make(flow_key), training, penalty=penalty)


def measure(key: PRNGKeyArray, flow: DDNF, training: Training) -> dict[str, Any]:
    """The ELBO by the flow's rule, the exact one, the KL of the density that the map makes, and whether it folds.

    The energy is normalized, so the ELBO is -KL and at most 0. Where a map folds, the formula for the ELBO is not a
    bound, not even with the exact log-determinant; `kl` is right in any case (see `binned_kl`).
    """
    x = jr.normal(key, (min(training.draws, 20_000), 2))
    exact = flow.with_log_det(Exact())
    certificate = certify(exact, x)
    return dict(
        estimate=float(_elbo(flow, x)),
        exact=float(_elbo(exact, x)),
        kl=binned_kl(key, exact, draws=training.draws),
        folded=certificate.folded_share,
        smallest=certificate.min_determinant,
        verdict=certificate.verdict,
    )


def median(part: dict[str, Any], name: str) -> float:
    """The median of a value over the runs of a part that have it; NaN if none has.

    Example:
        >>> median(dict(runs=[dict(kl=1.0), dict(kl=3.0), dict(kl=None)]), "kl")
        2.0
    """
    known = [run[name] for run in part["runs"] if run[name] is not None]
    return float(np.median(known)) if known else float("nan")


@eqx.filter_jit
def _elbo(flow: DDNF, x: Float[Array, "n 2"]) -> Float[Array, ""]:
    z, log_det = flow.batch_transform_and_log_det(x)
    log_q = jnp.sum(jax.scipy.stats.norm.logpdf(x), axis=-1) - log_det
    return jnp.mean(jax.vmap(ENERGY.log_density)(z) - log_q)


def binned_kl(key: PRNGKeyArray, flow: DDNF, *, draws: int, resolution: int = 200) -> float:
    """KL(q|p) between the two distributions binned into small squares: at most the true one, with or without folds.

    Draws outside of the grid are counted in its outermost squares. The noise of n draws adds about
    (occupied squares) / 2n.

    Example:
        >>> import jax.random as jr
        >>> still = DDNF(jr.key(0), 2, blocks=1, output_scale=0.0)
        >>> round(binned_kl(jr.key(1), still, draws=10_000, resolution=20))  # a standard normal is far away
        20
    """
    share = _counts(key, flow, draws=draws, bound=ENERGY.bound, resolution=resolution) / draws
    occupied = share > 0
    return float(np.sum(share[occupied] * (np.log(share[occupied]) - _log_masses(resolution)[occupied])))


@lru_cache
def _log_masses(resolution: int) -> Float[np.ndarray, "n n"]:
    """The logarithm of the energy's mass in each square, by 4 x 4 midpoints."""
    corner = (ENERGY.bound, ENERGY.bound)
    points, area = midpoint_grid((-ENERGY.bound, -ENERGY.bound), corner, 4 * resolution)
    values = jax.jit(jax.vmap(ENERGY.log_density))(jnp.asarray(points)).reshape(resolution, 4, resolution, 4)
    return np.asarray(jax.nn.logsumexp(values, axis=(1, 3))) + np.log(area)


def _counts(key, flow, *, draws, bound, resolution) -> Float[np.ndarray, "n n"]:
    """How many draws of q fall into each square of [-bound, bound]^2, rows from the bottom."""
    total = np.zeros(resolution**2)
    for chunk in range(-(-draws // 100_000)):
        count = min(100_000, draws - chunk * 100_000)
        index = _square(jr.fold_in(key, chunk), flow, count, bound, resolution)
        total += np.bincount(np.asarray(index), minlength=resolution**2)
    return total.reshape(resolution, resolution)


@eqx.filter_jit
def _square(key, flow, count, bound, resolution):
    z = jax.vmap(flow.transform)(jr.normal(key, (count, 2)))
    column, row = jnp.clip((z + bound) / (2 * bound) * resolution, 0, resolution - 1).astype(int).T
    return row * resolution + column


def sketch(key: PRNGKeyArray, flow: DDNF, *, draws: int) -> dict[str, Any]:
    """Data for a picture of the map: images of a grid and of arrows' starts, and the density of the draws."""
    # The map does not depend on the rule: with one rule for all it compiles once.
    flow = flow.with_log_det(Exact())
    grid, start = (jnp.asarray(points) for points in (plot.regular_grid(source=SOURCE, points=61), arrow_starts()))
    counts = _counts(key, flow, draws=draws, bound=VIEW, resolution=60)
    # The outermost squares also hold the draws outside of the picture.
    counts[[0, -1]], counts[:, [0, -1]] = 0, 0
    return dict(
        grid=plain(_moved(flow, grid.reshape(-1, 2)).reshape(grid.shape), 4),
        arrows=plain(_moved(flow, start), 4),
        density=plain(counts / draws / (2 * VIEW / 60) ** 2, 3),
    )


@eqx.filter_jit
def _moved(flow: DDNF, points: Float[Array, "n 2"]) -> Float[Array, "n 2"]:
    return jax.vmap(flow.transform)(points)


def arrow_starts() -> Float[np.ndarray, "n 2"]:
    """Where the arrows of a displacement field start."""
    axis = np.linspace(-SOURCE, SOURCE, 12)
    return np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
