"""One process of several that train together: `python worker.py FOLDER RANK PROCESSES PORT STEPS`."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import ddnf
from ddnf.training import adam, fit, is_first


def loss(parameters, draw):
    """Regression with noise of its own for each row."""
    x, y = draw.rows
    hidden = jnp.tanh(x @ parameters["in"] + 0.1 * jr.normal(draw.key, (len(x), 8)))
    return jnp.mean((hidden @ parameters["out"] - y) ** 2)


def run(folder: Path, devices, steps: int) -> dict:
    """Trains with a checkpoint after each chunk; the losses and parameters."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1001, 3))
    parameters = {"in": jnp.asarray(rng.normal(size=(3, 8))), "out": jnp.zeros(8)}
    result = fit(
        jr.key(0),
        parameters,
        loss,
        steps=steps,
        optimizer=adam(1e-2, steps),
        data=(x, np.sin(x).sum(axis=1)),
        batch=64,
        chunk=10,
        average=0.9,
        checkpoint=folder / "checkpoints",
        checkpoint_seconds=0.0,
        devices=devices,
        progress=False,
    )
    return dict(losses=result.losses.tolist(), parameters=[a.tolist() for a in result.parameters.values()])


def main(folder: Path, rank: int, processes: int, port: int, steps: int) -> None:
    jax.config.update("jax_enable_x64", True)
    ddnf.initialize(f"localhost:{port}", processes, rank, timeout=30)
    found = run(folder, "all", steps)
    if is_first():
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
