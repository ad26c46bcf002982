"""Toy energies (the paper's Fig. toyDensity): fits DDNF to both and measures KL(q|p) by quadrature.

python -m ddnf.paper.toy --out results
"""

import argparse
import dataclasses
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
from flowjax.distributions import StandardNormal, Transformed

from ddnf import DDNF, certify, plot
from ddnf.inference import train
from ddnf.inference.diagnostics import kl_by_quadrature
from ddnf.inference.reverse_kl import ReverseKL
from ddnf.targets.toy import ENERGIES, Energy


@dataclasses.dataclass(frozen=True)
class Config:
    """One fit: the size of the flow and how it is trained."""

    energy: str
    blocks: int
    hidden: tuple[int, ...]
    steps: int = 8
    iterations: int = 6000
    batch: int = 256
    learning_rate: float = 5e-3
    resolution: int = 400
    seed: int = 0


CONFIGS = {
    "DDNF, K=8, (2, 2) units": dict(blocks=8, hidden=(2, 2)),
    "DDNF, K=2, (16, 16) units": dict(blocks=2, hidden=(16, 16)),
}


def fit(config: Config, *, progress: bool = True) -> DDNF:
    """Minimizes KL(q|p) by Adam on samples of q, with a learning rate that falls to zero by a cosine.

    For the first fifth of the way the energy is tempered, so that q finds both modes before it narrows.
    """
    key, flow_key = jr.split(jr.key(config.seed))
    flow = DDNF(flow_key, 2, blocks=config.blocks, steps=config.steps, hidden=config.hidden)
    loss = ReverseKL(
        ENERGIES[config.energy].log_density,
        whitening=None,
        regularizer=None,
        batch=config.batch,
        gradient="path",
        temper=config.iterations // 5,
        spread=jnp.asarray(1.0),
    )
    optimizer = train.adam(config.learning_rate, config.iterations)
    name = f"{config.energy}, K={config.blocks}, {config.hidden} units"
    result = train.fit(
        key, flow, loss, steps=config.iterations, optimizer=optimizer, progress=progress, description=name
    )
    return result.parameters


def measure(flow: DDNF, config: Config) -> dict:
    """KL(q|p) by quadrature with the exact log-determinant, and the flow's certificate on samples."""
    energy = ENERGIES[config.energy]
    q = Transformed(StandardNormal((2,)), flow)
    kl, mass = kl_by_quadrature(q.log_prob, energy.log_density, bound=energy.bound + 2, resolution=config.resolution)
    certificate = certify(flow, jr.normal(jr.key(config.seed + 1), (10_000, 2)))
    return dict(kl=kl, mass=mass, verdict=certificate.verdict, min_determinant=certificate.min_determinant)


def draw(flows: dict[str, dict[str, DDNF]], results: list[dict]):
    """The figure: a row for each energy, with the target, and each flow's density and deformed grid."""
    kls = {(r["config"]["energy"], r["model"]): r["kl"] for r in results}
    rows = {}
    for name, models in flows.items():
        energy = ENERGIES[name]
        row = {"target": _density_panel(jax.vmap(energy.log_density), energy)}
        for model, flow in models.items():
            q = Transformed(StandardNormal((2,)), flow)
            row[f"{model}\nKL {kls[name, model]:.4f}"] = _density_panel(jax.vmap(q.log_prob), energy)
            transform = jax.jit(jax.vmap(flow.transform))
            row[f"{model}\nthe map"] = partial(plot.deformed_grid, transform=transform, bound=energy.bound)
        rows[name] = row
    return plot.panels(rows)


def _density_panel(log_density, energy: Energy):
    return partial(plot.density, log_density=jax.jit(log_density), bound=energy.bound)


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results")
    parser.add_argument("--iterations", type=int, default=Config.iterations, help="training steps of each fit")
    parser.add_argument("--resolution", type=int, default=Config.resolution, help="quadrature points for each axis")
    parser.add_argument("--seed", type=int, default=Config.seed)
    options = parser.parse_args(arguments)
    flows, results = {}, []
    for energy in ENERGIES:
        for model, size in CONFIGS.items():
            training = dict(iterations=options.iterations, resolution=options.resolution, seed=options.seed)
            config = Config(energy, **size, **training)
            start = time.perf_counter()
            flow = fit(config)
            seconds = time.perf_counter() - start
            results.append(
                dict(model=model, config=dataclasses.asdict(config), **measure(flow, config), fit_seconds=seconds)
            )
            flows.setdefault(energy, {})[model] = flow
    options.out.mkdir(parents=True, exist_ok=True)
    record = dict(
        command=f"python -m ddnf.paper.toy --iterations {options.iterations} --seed {options.seed}",
        versions=dict(jax=jax.__version__),
        results=results,
    )
    (options.out / "toy.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(flows, results).savefig(options.out / "toy.png", dpi=110)
    print("\nKL(q|p) by quadrature, exact log-determinant:")
    for r in results:
        trust = f"mass {r['mass']:.4f}, {r['verdict']}, smallest cell determinant {r['min_determinant']:.3f}"
        print(f"  {r['config']['energy']}  {r['model']:<28} KL {r['kl']:.4f}   ({trust})")
    print(f"figures and numbers: {options.out / 'toy.png'}, {options.out / 'toy.json'}")


if __name__ == "__main__":
    main()
