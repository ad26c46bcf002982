"""A regular grid and a Gaussian transformed by a trained flow (the figure of the paper's Appendix A)."""

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

from ddnf import DDNF, Target, certify
from ddnf.viz import plot, view
from ddnf_paper.compare import fit_flow
from ddnf_paper.experiment import Claim, Experiment, Picture, Profile, Record, ReportTable
from ddnf_paper.models import Settings, make
from ddnf_paper.plane import of_energy, shades
from ddnf_paper.record import plain
from ddnf_paper.targets.toy import ENERGIES

ABOUT = """A flow of K = 2 blocks with T = 8 cells and (16, 16) units is fitted to toy energies. The figure follows a
regular grid and standard normal draws through its cells. The grid bends without folding, and the Gaussian becomes the
target density."""

PIXELS = 60
GRID = plot.regular_grid(lines=15, points=101)


@dataclasses.dataclass(frozen=True)
class Config:
    """The fits, and the times shown."""

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
    """One part per energy."""
    return {name: partial(_part, config, seed, name) for name in config.energies}


def _part(config: Config, seed: int, name: str) -> dict[str, Any]:
    energy = ENERGIES[name]
    settings = Settings(steps=config.steps, cells=config.cells)
    build = partial(make, "ddnf-wide", dim=2, layers=config.blocks, settings=settings)
    fit_key, key = jr.split(jr.key(seed))
    with warnings.catch_warnings():
        # The quality of the fit is in the table.
        warnings.simplefilter("ignore", RuntimeWarning)
        target = Target(energy.log_density, 2)
        posterior = fit_flow(fit_key, target, "ddnf-wide", build, settings=settings, progress=False)
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
        **_snapshots(key, flow, config, energy.shown),
        view=view.frames(flow, count=25),
    )


def _snapshots(key, flow: DDNF, config: Config, shown: float) -> dict[str, Any]:
    """The grid and the density of the draws at times from 0 to K."""
    chosen = stops(config.blocks * config.cells, config.times)
    lines = positions(flow, jnp.asarray(GRID.reshape(-1, 2)), chosen)
    draws = positions(flow, jr.normal(key, (config.draws, 2)), chosen)
    return dict(
        times=[stop / config.cells for stop in chosen],
        grids=plain(np.asarray(lines).reshape(-1, *GRID.shape), 4),
        densities=[shades(histogram(moment, shown)) for moment in np.asarray(draws)],
    )


def stops(cells: int, times: int) -> tuple[int, ...]:
    """Numbers of cells after which to look, evenly spaced.

    Example:
        >>> stops(16, 5)
        (0, 4, 8, 12, 16)
    """
    return tuple(np.linspace(0, cells, times).round().astype(int).tolist())


@eqx.filter_jit
def positions(flow: DDNF, x: Float[Array, "n 2"], chosen: tuple[int, ...]) -> Float[Array, "times n 2"]:
    """Points after these numbers of cells of the flow.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> positions(DDNF(jr.key(0), 2, blocks=2, steps=2), jnp.ones((3, 2)), (0, 2, 4)).shape
        (3, 3, 2)
    """

    def path(x):
        end, cells = flow.path(x)
        return jnp.concatenate([cells.points.reshape(-1, 2), end[None]])[np.array(chosen)]

    return jax.vmap(path, out_axes=1)(x)


def histogram(points: Float[np.ndarray, "n 2"], bound: float) -> Float[np.ndarray, "pixels pixels"]:
    """The number of points in each pixel of [-bound, bound]^2, rows from the bottom.

    Example:
        >>> int(histogram(np.array([[0.0, 2.99]]), 3.0)[-1, PIXELS // 2])
        1
    """
    return np.histogram2d(points[:, 1], points[:, 0], PIXELS, ((-bound, bound), (-bound, bound)))[0]


def tables(record: Record) -> list[ReportTable]:
    """The quality of the fits shown."""
    rows = [
        (name, f"{part['kl']:.4f}", f"{part['determinant']:.3f}", part["verdict"])
        for name, part in record["parts"].items()
    ]
    header = ("energy", "KL(q|p)", "smallest determinant of a cell", "certificate")
    return [ReportTable("The flows shown.", header, rows)]


def pictures(record: Record) -> list[Picture]:
    """For each energy a row with the grid and a row with the density."""
    return [_picture(name, part) for name, part in record["parts"].items()]


def _picture(name: str, part: dict[str, Any]) -> Picture:
    every = -(-len(part["times"]) // 4)
    titles = [f"t = {time:.3g}" for time in part["times"][::every]]
    grids = [partial(plot.grid_lines, grid=np.array(grid), bound=part["shown"]) for grid in part["grids"][::every]]
    images = [np.array(image) for image in (*part["densities"][::every], part["target"])]
    densities = [partial(plot.shade, values=image, bound=part["shown"]) for image in images]
    rows = dict(grid=dict(zip(titles, grids, strict=True)))
    rows["grid"]["on the target"] = partial(_grid_on_target, part)
    rows["density"] = dict(zip([*titles, "target"], densities, strict=True))
    figure = plot.panels(rows, size=1.8)
    return Picture(
        name,
        figure,
        f"A regular grid and a Gaussian transformed by the flow fitted to {name}; each block lasts one unit of time.",
        "Two rows of panels over time: a regular grid that bends, and a Gaussian that becomes the target.",
    )


def _grid_on_target(part: dict[str, Any], axes) -> None:
    plot.shade(axes, np.array(part["target"]), bound=part["shown"])
    plot.grid_lines(axes, np.array(part["grids"][-1]), bound=part["shown"])


def claims(record: Record) -> list[Claim]:
    """The paper shows this figure without a claim."""
    return []


EXPERIMENT = Experiment(
    "illustration", "A grid and a Gaussian transformed by a flow", ABOUT, PROFILES, parts, tables, pictures, claims
)
