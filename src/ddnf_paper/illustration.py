"""A regular grid and a Gaussian carried by a trained flow (the figure of the paper's Appendix A)."""

import dataclasses
import warnings
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from ddnf import DDNF, certify
from ddnf.posterior.target import Target
from ddnf.viz import plot
from ddnf.viz.view import frames
from ddnf_paper import compare
from ddnf_paper.experiment import Claim, Experiment, Picture, Profile, Record, Table
from ddnf_paper.plane import of_energy, shades
from ddnf_paper.record import plain
from ddnf_paper.targets.toy import ENERGIES

ABOUT = """A flow of K = 2 blocks with T = 8 cells and (16, 16) units is fitted to toy energies.
A regular grid and draws of the standard normal are followed through its cells: the grid bends but does not tear, and
the Gaussian becomes the density."""

PIXELS = 60
GRID = plot.regular_grid(lines=15, points=101)


@dataclasses.dataclass(frozen=True)
class Config:
    """The fits, and what is shown of them."""

    energies: tuple[str, ...] = ("energy1", "energy2")
    steps: int = 4000
    blocks: int = 2
    cells: int = 8
    times: int = 7
    draws: int = 200_000


PROFILES: dict[Profile, Config] = {
    "smoke": Config(("energy2",), steps=300, draws=20_000),
    "quick": Config(steps=2000),
    "full": Config(tuple(ENERGIES)),
}


def parts(config: Config, seed: int):
    """One part for each energy."""
    return {name: partial(_part, config, seed, name) for name in config.energies}


def _part(config: Config, seed: int, name: str) -> dict[str, Any]:
    energy = ENERGIES[name]
    settings = compare.Settings(steps=config.steps, cells=config.cells)
    build = partial(compare.make, "ddnf-wide", dim=2, layers=config.blocks, settings=settings)
    fit_key, key = jr.split(jr.key(seed))
    with warnings.catch_warnings():
        # What the fit complains of shows in the table.
        warnings.simplefilter("ignore", RuntimeWarning)
        target = Target(energy.log_density, 2)
        posterior = compare.fit(fit_key, target, "ddnf-wide", build, settings=settings, progress=False)
    flow: Any = posterior.flow
    plane = of_energy(energy)
    certificate = certify(flow, jr.normal(key, (10_000, 2)))
    return dict(
        # The energy is normalized, so -ELBO is KL(q|p).
        kl=-posterior.elbo,
        determinant=certificate.min_determinant,
        verdict=certificate.verdict,
        target=shades(plane.image(plane.log_density, PIXELS)),
        shown=energy.shown,
        **_way(key, flow, config, energy.shown),
        view=frames(flow, count=25),
    )


def _way(key, flow: DDNF, config: Config, shown: float) -> dict[str, Any]:
    """Where the grid and the draws are at times from 0 to K."""
    chosen = stops(config.blocks * config.cells, config.times)
    lines = carried(flow, jnp.asarray(GRID.reshape(-1, 2)), chosen)
    draws = carried(flow, jr.normal(key, (config.draws, 2)), chosen)
    return dict(
        times=[stop / config.cells for stop in chosen],
        grids=plain(np.asarray(lines).reshape(-1, *GRID.shape), 4),
        densities=[shades(counted(moment, shown)) for moment in np.asarray(draws)],
    )


def stops(cells: int, times: int) -> tuple[int, ...]:
    """After how many cells to look, evenly from the start to the end.

    Example:
        >>> stops(16, 5)
        (0, 4, 8, 12, 16)
    """
    return tuple(np.linspace(0, cells, times).round().astype(int).tolist())


@eqx.filter_jit
def carried(flow: DDNF, x: Float[Array, "n 2"], chosen: tuple[int, ...]) -> Float[Array, "times n 2"]:
    """Points after so many cells of the flow.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> carried(DDNF(jr.key(0), 2, blocks=2, steps=2), jnp.ones((3, 2)), (0, 2, 4)).shape
        (3, 3, 2)
    """

    def way(x):
        end, path = flow.path(x)
        return jnp.concatenate([path.points.reshape(-1, 2), end[None]])[np.array(chosen)]

    return jax.vmap(way, out_axes=1)(x)


def counted(points: Float[np.ndarray, "n 2"], bound: float) -> Float[np.ndarray, "pixels pixels"]:
    """How many points are in each pixel of [-bound, bound]^2, rows from the bottom.

    Example:
        >>> int(counted(np.array([[0.0, 2.99]]), 3.0)[-1, PIXELS // 2])
        1
    """
    return np.histogram2d(points[:, 1], points[:, 0], PIXELS, ((-bound, bound), (-bound, bound)))[0]


def tables(record: Record) -> list[Table]:
    """How good the fits are that are shown."""
    rows = [
        (name, f"{part['kl']:.4f}", f"{part['determinant']:.3f}", part["verdict"])
        for name, part in record["parts"].items()
    ]
    return [Table("The flows shown.", ("energy", "KL(q|p)", "smallest determinant of a cell", "is the map one?"), rows)]


def pictures(record: Record) -> list[Picture]:
    """A row with the grid and a row with the density for each energy."""
    return [_picture(name, part) for name, part in record["parts"].items()]


def _picture(name: str, part: dict[str, Any]) -> Picture:
    titles = [f"t = {time:.3g}" for time in part["times"]]
    grids = [partial(plot.grid_lines, grid=np.array(grid), bound=part["shown"]) for grid in part["grids"]]
    images = [*part["densities"], part["target"]]
    densities = [partial(plot.shade, values=np.array(image), bound=part["shown"]) for image in images]
    rows = dict(grid=dict(zip(titles, grids, strict=True)))
    rows["density"] = dict(zip([*titles, "target"], densities, strict=True))
    figure = plot.panels(rows)
    figure.axes[len(images) - 1].set_axis_off()  # above the target
    return Picture(
        name,
        figure,
        f"A regular grid and a Gaussian on their way through the flow that was fitted to {name}; each of its blocks "
        "lasts one unit of time.",
        "Two rows of panels over time: a regular grid that bends, and a Gaussian that becomes the target.",
    )


def claims(record: Record) -> list[Claim]:
    """The paper shows this figure without a claim."""
    return []


EXPERIMENT = Experiment(
    "illustration", "A grid and a Gaussian carried by a flow", ABOUT, PROFILES, parts, tables, pictures, claims
)
