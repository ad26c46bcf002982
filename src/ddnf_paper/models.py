"""The models of a comparison: DDNF, the flows of `ddnf.flows`, NumPyro's ADVI and NUTS; and how they are fitted."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import paramax
from flowjax.bijections import AbstractBijection
from jaxtyping import PRNGKeyArray

from ddnf import DDNF
from ddnf.flows import BASELINES
from ddnf.flows import make as make_baseline
from ddnf.posterior import End


class OurModel(NamedTuple):
    """A DDNF: title, hidden units, and the learning rate that trained best."""

    title: str
    hidden: tuple[int, ...]
    learning_rate: float


OURS: Mapping[str, OurModel] = {
    "ddnf": OurModel("DDNF, the paper's (2, 2) units", (2, 2), 2e-2),
    "ddnf-wide": OurModel("DDNF, (16, 16) units", (16, 16), 1e-2),
}
FLOWS: Mapping[str, str] = {name: own.title for name, own in OURS.items()} | {
    name: baseline.title for name, baseline in BASELINES.items()
}
NUMPYRO: Mapping[str, str] = {"advi": "ADVI", "advi-full": "ADVI, full rank", "nuts": "NUTS"}
MODELS: Mapping[str, str] = FLOWS | NUMPYRO
# From a key to a flow.
Build = Callable[[PRNGKeyArray], AbstractBijection]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How every model of a comparison is fitted.

    Attributes:
        steps: training steps.
        batch: draws (or rows) per step.
        learning_rate: peak learning rate of Adam; None for the one that each model trains best with.
        temper: fraction of the steps in which the target is tempered.
        end: affine map after the flow and a search for modes before, as in `fit_posterior`; None for the flow alone.
        size: width of the baselines, as in `ddnf.flows.make`; None for their defaults.
        cells: T, the steps of each block of DDNF.
        starts: number of fits from different initial flows, of which the one with the best ELBO counts.

    Slow baselines get fewer steps and starts: see `settings_for`.
    """

    steps: int = 4000
    batch: int = 256
    learning_rate: float | None = None
    temper: float = 0.2
    end: End | None = None
    size: int | None = None
    cells: int = 8
    starts: int = 3


def make(
    name: str, key: PRNGKeyArray, dim: int, *, layers: int, condition_dim: int | None = None, settings: Settings
) -> AbstractBijection:
    """Builds a flow of the comparison by its name in `FLOWS`; it maps noise to points.

    Example:
        >>> import jax.random as jr
        >>> make("ddnf", jr.key(0), 2, layers=3, settings=Settings(cells=4)).blocks
        3
    """
    if name not in FLOWS:
        raise ValueError(f"Expected one of {', '.join(FLOWS)}; got {name!r}.")
    if name in OURS:
        hidden = OURS[name].hidden
        return DDNF(key, dim, blocks=layers, steps=settings.cells, hidden=hidden, condition_dim=condition_dim)
    return make_baseline(name, key, dim, layers, condition_dim, settings.size)


def split_by_layers(models: Sequence[str]) -> tuple[list[str], list[str]]:
    """The models that have a number of layers, and the others.

    Example:
        >>> split_by_layers(["planar", "nuts", "ddnf"])
        (['planar', 'ddnf'], ['nuts'])
    """
    layered = [name for name in models if name in OURS or (name in BASELINES and BASELINES[name].has_layers)]
    return layered, [name for name in models if name not in layered]


def min_dim(name: str) -> int:
    """The smallest dimension that a model works in.

    Example:
        >>> min_dim("naf"), min_dim("nuts")
        (2, 1)
    """
    return BASELINES[name].min_dim if name in BASELINES else 1


def settings_for(name: str, settings: Settings) -> Settings:
    """The settings for one flow: one that is slow to sample from gets one start, a continuous one half of the steps.

    Example:
        >>> settings_for("cnf", Settings(steps=4000, starts=3)).steps
        2000
    """
    if is_fast(name):
        return settings
    steps = -(-settings.steps // 2) if is_continuous(name) else settings.steps
    return dataclasses.replace(settings, starts=1, steps=steps)


def is_forward_fast(name: str) -> bool:
    """Whether a flow is fast from noise to points."""
    return name in OURS or BASELINES[name].is_forward_fast


def is_continuous(name: str) -> bool:
    """Whether a flow solves a differential equation with adaptive steps, which is slow."""
    return name.startswith("cnf")


def is_fast(name: str) -> bool:
    """Whether a flow is fast enough for draws and the Jacobians of path gradients: not sequential, not adaptive."""
    return is_forward_fast(name) and not is_continuous(name)


def learning_rate_for(name: str, settings: Settings, layers: int = 1) -> float:
    """The learning rate of a flow with this many layers: that of the settings, or the flow's own.

    Example:
        >>> learning_rate_for("bnaf", Settings(), layers=8)
        0.005
    """
    if settings.learning_rate is not None:
        return settings.learning_rate
    if name in OURS:
        return OURS[name].learning_rate
    baseline = BASELINES[name]
    return baseline.learning_rate * (2 / max(2, layers) if baseline.rate_falls else 1)


def count_parameters(tree: Any) -> int:
    """The number of trained parameters.

    Example:
        >>> import jax.random as jr
        >>> count_parameters(DDNF(jr.key(0), 2, blocks=8, hidden=(2, 2)))
        144
    """
    trained = eqx.filter(tree, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable))
    return sum(leaf.size for leaf in jax.tree.leaves(trained))
