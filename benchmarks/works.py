"""The tasks that are timed in turn: training steps, samples and log densities, growth, and the machine."""

from collections.abc import Callable
from typing import Any

from benchmarks.turns import FULL, QUICK, Patience, Task, Workers, take_turns

JAX, TORCH = "jax_flows", "torch_flows"
# For the training step: every peer that solves an equation cell by cell.
CELLS = {
    JAX: (
        "ours",
        "Diffrax CNF, Euler, exact",
        "Diffrax CNF, Euler, exact, default adjoint",
        "Diffrax CNF, Euler, Hutchinson",
        "Diffrax CNF, Tsit5, exact",
        "Diffrax CNF, Tsit5, Hutchinson",
        "bijx CNF, RK4, exact",
        "jflows CNF, RK4, exact",
        "jflows CNF, RK4, Hutchinson",
    ),
    TORCH: (
        "torchflows DDNF",
        "torchflows FFJORD",
        "Zuko CNF, exact",
        "Zuko CNF, Hutchinson",
        "normflows residual",
    ),
}
SIZES = (
    dict(dim=2, hidden=(2, 2)),
    dict(dim=2, hidden=(16, 16)),
    dict(dim=10, hidden=(16, 16)),
    dict(dim=40, hidden=(16, 16)),
    dict(dim=200, hidden=(16,)),
)
# In the short run only the peers of a goal.
ASKED = (
    {JAX: ("ours",), TORCH: ("torchflows DDNF", "Zuko CNF, exact")},
    {JAX: ("ours", "Diffrax CNF, Euler, exact")},
    {},
    {},
    {JAX: ("ours", "Diffrax CNF, Euler, exact", "Diffrax CNF, Euler, Hutchinson")},
)
_64_CELLS = dict(blocks=8, steps=8)


def steps(workers: Workers, *, quick: bool) -> list[dict]:
    """A training step: value and gradient of mean(|y|^2 / 2 - log det), 64 cells, batch 256."""
    rows = []
    for size, asked in zip(SIZES, ASKED, strict=True):
        full_size = dict(**size, **_64_CELLS, batch=256)
        names = asked if quick else CELLS
        tasks = [Task(module, peer, "step", full_size) for module in names for peer in names[module]]
        if size["dim"] != 2:  # slow, and measured in two dimensions
            tasks = [one for one in tasks if not one.peer.endswith(("adjoint", "RK4, exact"))]
        if size["dim"] == 200:
            tasks = [one for one in tasks if not one.peer.endswith(("Tsit5, exact", "Zuko CNF, exact"))]
        rows += take_turns(workers, tasks, QUICK if quick else FULL, f"step, {size}")
    return rows


# Slow peers get fewer points, and their time is scaled to all of them.
POINTS = 100_000
FEWER = {
    ("torchflows DDNF", "sample"): 10,
    ("torchflows DDNF", "log_prob"): 10,
    ("torchflows FFJORD", "sample"): 10,
    ("torchflows FFJORD", "log_prob"): 10,
    ("Zuko CNF, exact", "sample"): 10,
    ("Zuko CNF, exact", "log_prob"): 10,
    ("Zuko CNF, Hutchinson", "sample"): 10,
    ("Zuko CNF, Hutchinson", "log_prob"): 10,
    ("normflows residual", "sample"): 10,
    ("normflows residual", "log_prob"): 10,
    ("Zuko NAF", "sample"): 10,
    ("FlowJAX BNAF", "sample"): 10,
}
DENSITIES = {
    JAX: (
        "ours",
        "ours, from points to noise",
        "Diffrax CNF, Euler, exact",
        "Diffrax CNF, Euler, Hutchinson",
        "Diffrax CNF, Tsit5, exact",
        "FlowJAX MAF-RQS",
        "FlowJAX BNAF",
    ),
    TORCH: (*CELLS[TORCH], "Zuko NSF", "Zuko NAF"),
}
_FEW_DENSITIES = {JAX: ("ours", "ours, from points to noise", "FlowJAX MAF-RQS", "FlowJAX BNAF"), TORCH: ("Zuko NSF",)}


def densities(workers: Workers, *, quick: bool) -> list[dict]:
    """100,000 samples, and log densities of as many points, in two dimensions; (16, 16) units, 64 cells."""
    rows, names = [], _FEW_DENSITIES if quick else DENSITIES
    patience = Patience(1, 2, 1.0) if quick else Patience(2, 4, 2.0)
    for work in ("sample", "log_prob"):
        tasks = []
        for module in names:
            for peer in names[module]:
                batch = POINTS // FEWER.get((peer, work), 1) // (10 if quick else 1)
                size = dict(dim=2, hidden=(16, 16), **_64_CELLS, batch=batch)
                tasks.append(Task(module, peer, work, size))
        rows += [_scaled(row, POINTS / row["batch"]) for row in take_turns(workers, tasks, patience, work)]
    return rows


def _scaled(row: dict, factor: float) -> dict:
    return row | {name: row[name] * factor for name in ("seconds", "low", "high") if name in row}


# Large enough that the work exceeds the overhead of a call.
_BASE = dict(dim=8, hidden=(8, 8), blocks=8, steps=8, batch=1024)
GROWTH: dict[str, tuple[Any, ...]] = {
    "blocks": (4, 12, 32),
    "steps": (4, 12, 32),
    "batch": (512, 1536, 4096),
    "dim": (8, 64, 512),
    "hidden": ((4, 4), (12, 12), (32, 32)),
}


def growth(workers: Workers, *, quick: bool) -> list[dict]:
    """Time and memory of our step as one size grows. The rank of the field stays 8 as the dimension grows."""
    rows = []
    for axis, values in GROWTH.items():
        if quick and axis == "hidden":
            continue
        sizes = [{**_BASE, axis: value} for value in (values[::2] if quick else values)]
        tasks = [Task(JAX, "ours", "step", size) for size in sizes]
        patience = QUICK if quick else Patience(3, 7, 1.5)
        rows += [dict(axis=axis, **row) for row in take_turns(workers, tasks, patience, f"growth, {axis}")]
    return rows


def compiling(workers: Workers, *, quick: bool) -> list[dict]:
    """Compile time of our step over K and T, each time from scratch; and memory with recomputation."""
    few = dict(dim=2, hidden=(16, 16), batch=256)
    rows = []
    for repetition in range(1 if quick else 3):
        for axis, other in (("blocks", "steps"), ("steps", "blocks")):
            for count in (2, 32):
                size = {**few, axis: count, other: 4, "fresh": repetition + 1}
                rows += _once(workers, size, "compile", axis)
    for count in (32, 1024):
        rows += _once(workers, dict(**few, blocks=1, steps=count, recompute="segments"), "memory", "steps")
    return rows


def _once(workers: Workers, size: dict, of: str, axis: str) -> list[dict]:
    return [
        dict(of=of, axis=axis, **row)
        for row in take_turns(workers, [Task(JAX, "ours", "step", size)], Patience(0, 0, 0.0), of)
    ]


_MACHINE = dict(dim=40, hidden=(64, 64), batch=1024)


def machine(workers: Workers, *, quick: bool) -> list[dict]:
    """Our step beside the products and the tanh of as many cells, for (64, 64) units, d = 40, batch 1,024."""
    cells = dict(blocks=4, steps=2) if quick else dict(blocks=4, steps=4)
    repeats = cells["blocks"] * cells["steps"]
    parts = ("products", "tanh") if quick else ("products", "products, batch at once", "products of the map", "tanh")
    tasks = [
        Task(JAX, "ours", "step", dict(**_MACHINE, **cells)),
        *(Task(JAX, part, "products", dict(**_MACHINE, repeats=repeats)) for part in parts),
    ]
    return take_turns(workers, tasks, QUICK if quick else Patience(3, 9, 8.0), "the machine")


EPOCH = 600
_VAES = {
    "vae_jax": ("ours plain", "ours plain + context", "ours DDNF + context"),
    "vae_torch": (
        "PyTorch plain",
        "PyTorch plain + context",
        "PyTorch, Pyro planar",
        "PyTorch, Zuko MAF + context",
        "PyTorch, Zuko NAF + context",
    ),
}
# A slow peer trains for fewer steps.
_STEPS = {"PyTorch, Zuko NAF + context": 10}


def vae(workers: Workers, *, quick: bool) -> list[dict]:
    """An epoch of the auto-encoder, 600 steps of 100 images, latent 40; a part of it is run, and its time scaled."""
    tasks = []
    for module in _VAES:
        for peer in _VAES[module]:
            steps = _STEPS.get(peer, 50 if quick else 300)
            tasks.append(Task(module, peer, "epoch", dict(batch=100, steps=steps, images=100 * steps)))
    if quick:
        tasks = [one for one in tasks if one.peer in ("ours plain", "ours DDNF + context")]
    rows = take_turns(workers, tasks, Patience(1, 3, 2.0) if quick else Patience(3, 4, 4.0), "auto-encoder")
    return [_scaled(row, EPOCH / row["steps"]) for row in rows]


WORKS: dict[str, Callable[..., list[dict]]] = dict(
    steps=steps, densities=densities, growth=growth, compiling=compiling, machine=machine, vae=vae
)
