"""Accuracy of the forward and backward pass (the paper's Fig. ode_solver): random flows against an accurate solver."""

import dataclasses
from functools import lru_cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from ddnf import DDNF, certify, euler, midpoint, rk4
from ddnf.system import require
from ddnf.viz import plot
from ddnf_paper.experiment import Claim, Experiment, Picture, Profile, Record, ReportTable

ABOUT = """Random two-dimensional flows (one block, K = 1, two hidden layers of two tanh units, with weights that move
points by about one unit) map standard normal points in T steps. We compare the result with an adaptive eighth-order
solution of the same differential equation. Then z0 is recovered by the paper's backward pass (the same number of steps
with -v) and, if no step of the flow folds, by the exact inverse of each step. All computations use float64."""

SOLVERS = dict(euler=euler, midpoint=midpoint, rk4=rk4)
# Slopes of the mean squared error over T. A method of order p has error dt^p; forward and back with -v, the leading
# error term changes sign with dt if p is even, and cancels.
FORWARD_SLOPES = dict(euler=-2, midpoint=-4, rk4=-8)
REVERSE_SLOPES = dict(euler=-2, midpoint=-6, rk4=-10)
# Smaller errors are rounding, or the reference solver's own.
ROUNDING = 1e-20


@dataclasses.dataclass(frozen=True)
class Config:
    """The number of flows and points, and the numbers of steps."""

    flows: int = 50
    points: int = 100
    steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    hidden: tuple[int, ...] = (2, 2)
    output_scale: float = 2.0
    tolerance: float = 1e-12


PROFILES: dict[Profile, Config] = {
    "smoke": Config(flows=5, points=20, steps=(1, 16, 32)),
    "quick": Config(flows=20, steps=(1, 4, 16, 64)),
    "full": Config(),
}


class Truth(NamedTuple):
    """Points, and for each flow their images by the differential equation."""

    start: Float[Array, "points 2"]
    ends: Float[Array, "flows points 2"]


def parts(config: Config, seed: int):
    """One part per solver."""
    return {name: partial(_part, config, seed, name) for name in SOLVERS}


def _part(config: Config, seed: int, solver: str) -> dict[str, Any]:
    with jax.enable_x64(True):
        rows = [_errors(config, seed, solver, steps) for steps in config.steps]
    forward, reverse, exact = (np.array(column) for column in zip(*rows, strict=True))
    return dict(solver=solver, forward=forward, reverse=reverse, exact=exact, folds=np.mean(np.isnan(exact), axis=1))


def _errors(config: Config, seed: int, solver: str, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Mean squared errors of each flow: forward, back with -v, and back exactly (NaN where it folds)."""
    forward, reverse, exact = [], [], []
    start, ends = _truth(config, seed)
    for number, end in enumerate(ends):
        flow = _flow(config, seed, number, solver, steps)
        there, back = _passes(flow, start, end)
        forward.append(float(there))
        reverse.append(float(back))
        folds = certify(flow, start).verdict == "folds"
        exact.append(float("nan") if folds else float(_recovery(flow, start)))
    return forward, reverse, exact


def _flow(config: Config, seed: int, number: int, solver: str, steps: int) -> DDNF:
    key = jr.fold_in(jr.key(seed), number)
    hidden, scale = config.hidden, config.output_scale
    return DDNF(key, 2, blocks=1, steps=steps, hidden=hidden, solver=SOLVERS[solver], output_scale=scale)


@lru_cache
def _truth(config: Config, seed: int) -> Truth:
    """The reference solution; the same for all solvers, so computed once."""
    start = jr.normal(jr.fold_in(jr.key(seed), config.flows), (config.points, 2))
    flows = [_flow(config, seed, number, "euler", 1) for number in range(config.flows)]
    return Truth(start, jnp.stack([_solution(flow, start, config.tolerance) for flow in flows]))


@eqx.filter_jit
def _solution(flow: DDNF, start: Array, tolerance: float) -> Array:
    diffrax = require("diffrax", "paper")
    field = jax.tree.map(lambda leaf: leaf[0] if eqx.is_array(leaf) else leaf, flow.fields)
    term = diffrax.ODETerm(lambda t, z, args: field(z))
    control = diffrax.PIDController(rtol=tolerance, atol=tolerance)

    def end(z):
        solution = diffrax.diffeqsolve(term, diffrax.Dopri8(), 0.0, 1.0, None, z, stepsize_controller=control)
        return solution.ys[-1]

    return jax.vmap(end)(start)


@eqx.filter_jit
def _passes(flow: DDNF, start: Array, end: Array) -> tuple[Array, Array]:
    there = jax.vmap(flow.transform)(start)
    back, _ = jax.vmap(flow.reverse_and_log_det)(there)
    return jnp.mean((there - end) ** 2), jnp.mean((back - start) ** 2)


@eqx.filter_jit
def _recovery(flow: DDNF, start: Array) -> Array:
    back = jax.vmap(flow.inverse)(jax.vmap(flow.transform)(start))
    return jnp.mean((back - start) ** 2)


def slope(steps: np.ndarray, errors: np.ndarray) -> float:
    """The slope of log error over log T, for T of at least 16 and errors above rounding.

    Example:
        >>> steps = np.array([1, 16, 32, 64])
        >>> round(slope(steps, 0.1 / steps**2.0), 6)
        -2.0
    """
    fair = (steps >= 16) & (errors > ROUNDING)
    if np.sum(fair) < 2:
        return float("nan")
    return float(np.polyfit(np.log(steps[fair]), np.log(errors[fair]), 1)[0])


def _means(record: Record) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]:
    """The numbers of steps, and for each solver the errors averaged over the flows."""
    means = {
        name: {kind: _mean(part[kind]) for kind in ("forward", "reverse", "exact")}
        for name, part in record["parts"].items()
    }
    return np.array(record["config"]["steps"]), means


def _mean(errors: Any) -> np.ndarray:
    """The mean over the flows that have an error; NaN if none has."""
    known = np.ma.masked_invalid(np.array(errors, float))
    return known.mean(axis=1).filled(np.nan)


def tables(record: Record) -> list[ReportTable]:
    """Slopes, and errors over T."""
    steps, means = _means(record)
    orders = []
    for name, mean in means.items():
        forward, reverse = slope(steps, mean["forward"]), slope(steps, mean["reverse"])
        orders.append((name, f"{forward:.2f}", str(FORWARD_SLOPES[name]), f"{reverse:.2f}", str(REVERSE_SLOPES[name])))
    header = ("solver", "forward", "in theory", "back by -v", "in theory")
    rows = []
    for name, mean in means.items():
        for number, count in enumerate(steps):
            errors = (f"{mean[kind][number]:.1e}" for kind in ("forward", "reverse", "exact"))
            rows.append((name, str(count), *errors, f"{record['parts'][name]['folds'][number]:.0%}"))
    columns = ("solver", "T", "forward", "back by -v", "exact inverse", "flows that fold")
    return [
        ReportTable(
            "Fitted slopes of the mean squared error over T, for T of at least 16 and above rounding.", header, orders
        ),
        ReportTable(f"Mean squared errors, averaged over {record['config']['flows']} flows.", columns, rows),
    ]


def pictures(record: Record) -> list[Picture]:
    """The paper's two panels, and the exact inverse beside them."""
    steps, means = _means(record)
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    titles = dict(
        forward="forward: against the ODE", reverse="back by -v: against z0", exact="exact inverse: against z0"
    )
    for axes, (kind, title) in zip(figure.subplots(1, 3, sharey=True), titles.items(), strict=True):
        lines = {}
        for name, mean in means.items():
            fitted = "" if kind == "exact" else f", slope {slope(steps, mean[kind]):.2f}"
            lines[name + fitted] = steps, mean[kind]
        plot.curves(axes, lines, x="steps T", y="mean squared error" if kind == "forward" else "", log="xy")
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=8, frameon=False, loc="lower left" if kind != "exact" else "upper right")
    flows = record["config"]["flows"]
    return [
        Picture(
            "accuracy",
            figure,
            f"Mean squared errors over T, averaged over {flows} random flows (for the exact inverse, those that do not "
            "fold at that T).",
            "Three log-log plots of errors over T, a line for each solver: forward, back by -v, and exact inverse.",
        )
    ]


def claims(record: Record) -> list[Claim]:
    """The claims of the section on forward and backward flows, and one on the exact inverse."""
    steps, means = _means(record)
    forward, reverse = means["euler"]["forward"], means["euler"]["reverse"]
    falls = bool(np.all(np.diff(forward) < 0) and np.all(np.diff(reverse) < 0))
    slopes = {name: slope(steps, mean["forward"]) for name, mean in means.items()}
    right = all(abs(slopes[name] / FORWARD_SLOPES[name] - 1) < 0.1 for name in slopes)
    worst = max(np.nanmax(mean["exact"]) for mean in means.values())
    return [
        Claim(
            "The accuracy of the forward and backward pass increases with T",
            "errors fall with T",
            f"Euler's from {forward[0]:.1e} at T = {steps[0]} to {forward[-1]:.1e} at T = {steps[-1]} forward, and "
            f"from {reverse[0]:.1e} to {reverse[-1]:.1e} back",
            "reproduced" if falls else "not reproduced",
            f"The mean squared error falls as T^{slopes['euler']:.2f}, as a first-order method's does.",
        ),
        Claim(
            "The backward pass recovers z0 accurately",
            "a small error",
            f"mean squared error {reverse[-1]:.1e} at T = {steps[-1]}, where z0 has variance 1",
            "reproduced" if reverse[-1] < 1e-4 else "partly" if reverse[-1] < 1e-2 else "not reproduced",
            f"Reproduced means below 1e-4, partly below 1e-2. At T = {steps[0]} it is {reverse[0]:.1e}; at each T at "
            f"least {np.min(reverse / forward):.2g} times the forward error.",
        ),
        Claim(
            "A Runge-Kutta method is more accurate (left for future work)",
            "no figures",
            "slopes " + ", ".join(f"{value:.2f} ({name})" for name, value in slopes.items()),
            "reproduced" if right else "not reproduced",
            "In theory -2, -4 and -8; within 10 %.",
        ),
        Claim(
            "Where no step folds, the exact inverse recovers z0 (not in the paper)",
            "-v only",
            f"mean squared error at most {worst:.1e} at any T",
            "reproduced" if worst < 1e-20 else "not reproduced",
            f"At T = {steps[0]}, {record['parts']['euler']['folds'][0]:.0%} of Euler's flows fold; at T = {steps[-1]}, "
            f"{record['parts']['euler']['folds'][-1]:.0%}.",
        ),
    ]


EXPERIMENT = Experiment("accuracy", "Forward and backward flows", ABOUT, PROFILES, parts, tables, pictures, claims)
