"""Markov chains of a posterior in its file: draws, diagnostics, and the state needed to continue them."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ddnf.posterior.convergence import Convergence
from ddnf.posterior.hmc import Kernel, Position
from ddnf.posterior.polish import Chains

CHAIN_FIGURES = ("acceptance", "flow_acceptance", "divergences", "narrow", "thin", "gradients")
_TABLES = {"convergence": Convergence, "weights_convergence": Convergence, "kernel": Kernel, "position": Position}


def pack_chains(chains: Chains) -> dict[str, np.ndarray]:
    """The arrays of chains by name."""
    arrays = {"z": chains.z, "log_weights": chains.log_weights, "divergent": chains.divergent}
    for name in _TABLES:
        table = getattr(chains, name)
        arrays |= {f"{name}.{field}": np.asarray(getattr(table, field)) for field in table._fields}
    return arrays


def unpack_chains(figures: dict[str, Any], arrays: dict[str, np.ndarray], dim: int) -> Chains:
    """Chains from arrays named by `pack_chains` after "chains."; raises a ValueError unless they fit together."""
    held = {name[7:]: array for name, array in arrays.items() if name.startswith("chains.")}
    tables = {name: cls(*(held[f"{name}.{field}"] for field in cls._fields)) for name, cls in _TABLES.items()}
    chains = Chains(
        held["z"],
        held["log_weights"],
        tables["convergence"],
        float(figures["acceptance"]),
        float(figures["flow_acceptance"]),
        int(figures["divergences"]),
        float(figures["narrow"]),
        held["divergent"],
        tables["weights_convergence"],
        int(figures["thin"]),
        int(figures["gradients"]),
        Kernel(*map(jnp.asarray, tables["kernel"])),
        Position(*map(jnp.asarray, tables["position"])),
    )
    _check(chains, dim)
    return chains


def _check(chains: Chains, dim: int) -> None:
    count = chains.z.shape[0] if chains.z.ndim == 3 else 0
    shapes = [(chains.z.shape[2:], (dim,)), (chains.log_weights.shape, chains.z.shape[:2])]
    shapes += [(chains.divergent.shape, chains.z.shape[:2])]
    shapes += [(figure.shape, (dim,)) for figure in chains.convergence]
    shapes += [(figure.shape, (1,)) for figure in chains.weights_convergence]
    position, kernel = chains.position, chains.kernel
    shapes += [(array.shape, (count, dim)) for array in (position.x, position.z, position.slope)]
    shapes += [(array.shape, (count,)) for array in (position.log_p, position.log_weight)]
    shapes += [(kernel.scale.shape, (dim,) * max(kernel.scale.ndim, 1)), (kernel.log_step.shape, ())]
    if count == 0 or chains.thin < 1 or any(found != wanted for found, wanted in shapes):
        raise ValueError(f"Expected draws of Markov chains in {dim} dimensions; got arrays that do not fit together.")
    is_within = 1 <= int(kernel.length) <= 1024 and 0 < float(kernel.jumps) <= 1 and 0 < float(kernel.target) < 1
    if not (is_within and math.isfinite(float(kernel.log_step))):
        raise ValueError("Expected settings of Markov chains within their limits; got others.")
    if not np.isfinite(chains.z).all():
        raise ValueError("Expected finite draws of Markov chains; got NaN or infinity.")
