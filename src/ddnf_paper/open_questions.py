"""Open questions of the paper: its log-determinants over dt and T, Sobolev norms, and Runge-Kutta steps."""

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure

from ddnf import DDNF, Exact, MLPField, euler, inverse_consistency, midpoint, rk4, sobolev
from ddnf.viz import plot
from ddnf_paper.energy import RULES, Penalty, Training, fits, measure, median
from ddnf_paper.experiment import Claim, Experiment, Picture, Profile, Record, ReportTable

ABOUT = """Four questions. How fast do the paper's log-determinants converge as dt falls (random fields, float64)? For a
flow trained with each of them, how does the ELBO that it reports differ from the exact ELBO, over T? What does the
Sobolev norm of Appendix E add to the plain norm, over alpha and c (T = 1, printed second order, gamma = 0.1)? And are
Runge-Kutta steps better than Euler steps for the same number of field evaluations (exact log-determinant)?"""

PRINTED = "second order as printed"
# Field evaluations of one step.
SOLVERS = dict(euler=(euler, 1), midpoint=(midpoint, 2), rk4=(rk4, 4))
# The power of dt by which the error of one step's log-determinant falls.
ORDERS = {"first order": 2, PRINTED: 2, "second order": 3}


@dataclasses.dataclass(frozen=True)
class Config:
    """The flows, and the values for each question."""

    training: Training
    runs: int
    blocks: int = 8
    hidden: tuple[int, ...] = (2, 2)
    fields: int = 500
    halvings: int = 8
    steps: tuple[int, ...] = (1, 2, 4, 8)
    gamma: float = 0.1
    alphas: tuple[float, ...] = (-0.01, -0.1)
    powers: tuple[int, ...] = (1, 2)
    evaluations: int = 8


PROFILES: dict[Profile, Config] = {
    "smoke": Config(
        Training(100, batch=64, draws=20_000), 1, 2, fields=50, steps=(1,), alphas=(-0.1,), powers=(1,), evaluations=4
    ),
    "quick": Config(Training(600, draws=200_000), 1, 4, steps=(1, 4), alphas=(-0.1,), powers=(1,), evaluations=4),
    "full": Config(Training(2000), 2),
}


def parts(config: Config, seed: int):
    """The errors of the log-determinants, then one part per fit, with all its runs."""
    work = {"log-det errors": partial(_log_det_errors, config, seed)}
    for rule in RULES:
        for steps in config.steps:
            name = f"ELBO: {rule}, T = {steps}"
            work[name] = partial(_fits, config, seed, kind="elbo", rule=rule, steps=steps)
    for alpha, power in [(0.0, 1), *((alpha, power) for alpha in config.alphas for power in config.powers)]:
        name = f"Sobolev: alpha = {alpha:g}, c = {power}"
        work[name] = partial(_fits, config, seed, kind="sobolev", rule=PRINTED, steps=1, alpha=alpha, power=power)
    for solver, (_, cost) in SOLVERS.items():
        steps = config.evaluations // cost
        work[f"solver: {solver}"] = partial(
            _fits, config, seed, kind="solver", rule="exact", steps=steps, solver=solver
        )
    return work


def _log_det_errors(config: Config, seed: int) -> dict[str, Any]:
    """The median error of one step's log-determinant over dt, for random fields and points."""
    times = 0.5 ** np.arange(config.halvings + 1)
    with jax.enable_x64(True):
        keys = jr.split(jr.key(seed), config.fields)
        errors = np.asarray(_errors(keys, tuple(times.tolist()), config.hidden))
    return dict(kind="errors", dt=times, errors={rule: np.median(errors[:, i], 0) for i, rule in enumerate(ORDERS)})


@eqx.filter_jit
def _errors(keys: Array, times: tuple[float, ...], hidden: tuple[int, ...]) -> Float[Array, "fields rules times"]:
    def of_field(key):
        field_key, point_key = jr.split(key)
        z = jr.normal(point_key, (2,))

        def step(dt, rule):
            # A step of size dt with the velocity v is a step of size 1 with dt v.
            def scaled(_):
                return MLPField(field_key, 2, hidden=hidden, output_scale=dt)

            return DDNF(field_key, 2, blocks=1, steps=1, field=scaled, log_det=rule).transform_and_log_det(z)[1]

        def log_det(rule):
            return jnp.stack([step(dt, rule) for dt in times])

        exact = log_det(Exact())
        return jnp.abs(jnp.stack([log_det(RULES[rule]) - exact for rule in ORDERS]))

    return jax.vmap(of_field)(keys)


def _fits(
    config: Config,
    seed: int,
    *,
    kind: str,
    rule: str,
    steps: int,
    solver: str = "euler",
    alpha: float | None = None,
    power: int = 1,
) -> dict[str, Any]:
    """All runs of one fit; with alpha, penalized by the Sobolev norm."""
    penalty = None if alpha is None else Penalty(config.gamma, partial(sobolev, alpha=alpha, power=power))
    make = partial(_flow, config, steps, rule, solver)
    runs = []
    for key, result in fits(seed, make, config.training, runs=config.runs, penalty=penalty):
        measured = measure(key, result.parameters, config.training)
        # The map does not depend on the rule: with one rule for all it compiles once.
        exact = result.parameters.with_log_det(Exact())
        runs.append(measured | dict(reverse=float(_reverse_error(key, exact))))
    return dict(kind=kind, rule=rule, steps=steps, solver=solver, alpha=alpha, power=power, runs=runs)


def _flow(config: Config, steps: int, rule: str, solver: str, key: PRNGKeyArray) -> DDNF:
    blocks, hidden, (method, _) = config.blocks, config.hidden, SOLVERS[solver]
    return DDNF(key, 2, blocks=blocks, steps=steps, hidden=hidden, log_det=RULES[rule], solver=method)


@eqx.filter_jit
def _reverse_error(key: Array, flow: DDNF) -> Array:
    """The mean distance between points and their round trips by -v."""
    return jnp.mean(jax.vmap(lambda x: inverse_consistency(flow, x))(jr.normal(key, (5000, 2))))


def order(times: np.ndarray, errors: np.ndarray) -> float:
    """The power of dt by which an error falls, from dt = 1/8 on.

    Example:
        >>> times = 0.5 ** np.arange(8)
        >>> round(order(times, 3 * times**2), 6)
        2.0
    """
    small = times <= 1 / 8
    return float(np.polyfit(np.log(times[small]), np.log(errors[small]), 1)[0])


def _of_kind(record: Record, kind: str) -> list[dict]:
    return [part for part in record["parts"].values() if part["kind"] == kind]


def _gap(part: dict) -> float:
    """By how much the ELBO by the trained rule exceeds the exact one."""
    return median(part, "estimate") - median(part, "exact")


def _orders(record: Record) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, float]]:
    part = record["parts"]["log-det errors"]
    times, errors = np.array(part["dt"]), {rule: np.array(part["errors"][rule]) for rule in ORDERS}
    return times, errors, {rule: order(times, error) for rule, error in errors.items()}


def tables(record: Record) -> list[ReportTable]:
    """One table for each question."""
    times, errors, orders = _orders(record)
    rows = [(f"{dt:g}", *(f"{errors[rule][i]:.1e}" for rule in ORDERS)) for i, dt in enumerate(times)]
    rows.append(("falls as", *(f"dt^{orders[rule]:.2f}" for rule in ORDERS)))
    runs = record["config"]["runs"]
    return [
        ReportTable("Median error of the log-determinant of one step, random fields.", ("dt", *ORDERS), rows),
        _fit_table(f"The ELBO by the trained rule, and the exact one; medians of {runs} runs.", record, "elbo"),
        _fit_table(f"Sobolev norms, gamma = {record['config']['gamma']:g}, T = 1.", record, "sobolev"),
        _fit_table(f"Solvers at {record['config']['evaluations']} field evaluations a block.", record, "solver"),
    ]


def _fit_table(caption: str, record: Record, kind: str) -> ReportTable:
    labels = dict(elbo=("rule", "steps"), sobolev=("alpha", "power"), solver=("solver", "steps"))[kind]
    names = dict(rule="log-det", steps="T", power="c")
    measured = dict(estimate="ELBO by the rule", exact="exact ELBO", kl="KL of the draws", reverse="error of -v")
    rows = [
        (
            *(str(part[label]) for label in labels),
            *(f"{median(part, name):.3g}" for name in measured),
            f"{median(part, 'folded'):.2%}",
        )
        for part in _of_kind(record, kind)
    ]
    header = (*(names.get(label, label) for label in labels), *measured.values(), "folded cells")
    return ReportTable(caption, header, rows)


def pictures(record: Record) -> list[Picture]:
    """Errors of the log-determinants over dt, and ELBOs over T."""
    return [_error_curves(record), _elbo_curves(record)]


def _error_curves(record: Record) -> Picture:
    times, errors, orders = _orders(record)
    figure = Figure(figsize=(5.2, 3.8), layout="constrained")
    axes = figure.subplots()
    lines = {f"{rule}, dt$^{{{orders[rule]:.2f}}}$": (times, errors[rule]) for rule in ORDERS}
    plot.curves(axes, lines, x="dt", y="error of one step's log-det", log="xy")
    axes.set_xscale("log", base=2)
    return Picture(
        "log-det",
        figure,
        "Median error of the log-determinant of one step over dt, with the fitted power.",
        "Log-log plot of the errors over dt, a line for each rule.",
    )


def _elbo_curves(record: Record) -> Picture:
    figure = Figure(figsize=(2.8 * len(RULES), 3.2), layout="constrained")
    every = figure.subplots(1, len(RULES), sharey=True)
    for axes, rule in zip(every, RULES, strict=True):
        found = [part for part in _of_kind(record, "elbo") if part["rule"] == rule]
        steps = np.array([part["steps"] for part in found])
        lines = {
            label: (steps, np.array([sign * median(part, name) for part in found]))
            for label, name, sign in (
                ("by the rule", "estimate", 1),
                ("exact", "exact", 1),
                ("-KL of the draws", "kl", -1),
            )
        }
        plot.curves(axes, lines, x="steps T", y="")
        axes.axhline(0.0, color="0.3", linestyle=":", linewidth=1)
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set_xscale("log", base=2)
        axes.set_title(rule, fontsize=10)
        axes.get_legend().remove()
    every[0].set_ylabel("ELBO after training")
    every[-1].legend(fontsize=8, frameon=False, loc="upper right")
    return Picture(
        "elbo",
        figure,
        "The ELBO after training over T: by the trained rule, exact, and -KL of the draws. No true ELBO is above "
        "the dotted line.",
        "A plot over T for each rule, with the ELBO by the rule, the exact one and the negative KL of the draws.",
    )


def claims(record: Record) -> list[Claim]:
    """Remarks of the paper on these questions."""
    return [_order_claim(record), _steps_claim(record), *_sobolev_claims(record), _solver_claim(record)]


def _order_claim(record: Record) -> Claim:
    _, _, orders = _orders(record)
    return Claim(
        "Eq. (taylor) is the second-order expansion of the log-determinant",
        "error of the third order in dt",
        f"error dt^{orders[PRINTED]:.2f} as printed, dt^{orders['second order']:.2f} with tr(J J)",
        "reproduced" if orders[PRINTED] > 2.5 else "not reproduced",
        "The printed tr(J^T J) is tr(J J) for symmetric Jacobians only.",
    )


def _steps_claim(record: Record) -> Claim:
    found = {part["steps"]: part for part in _of_kind(record, "elbo") if part["rule"] == PRINTED}
    few, many = min(found), max(found)
    folded = median(found[many], "folded")
    good = folded == 0 and abs(_gap(found[many])) < 0.1
    return Claim(
        "The flow is stable for sufficient T",
        "an observation",
        f"printed log-det at T = {many}: ELBO too large by {_gap(found[many]):.3g}, {folded:.1%} of the cells fold; at "
        f"T = {few}: {_gap(found[few]):.3g}, {median(found[few], 'folded'):.1%}",
        "reproduced" if good else "partly" if _gap(found[many]) < _gap(found[few]) else "not reproduced",
        "Reproduced means no fold, and an ELBO that is right to 0.1.",
    )


def _sobolev_claims(record: Record) -> list[Claim]:
    without = next(part for part in _of_kind(record, "elbo") if (part["rule"], part["steps"]) == (PRINTED, 1))
    found = _of_kind(record, "sobolev")
    plain_norm = next(part for part in found if part["alpha"] == 0)
    best = min((part for part in found if part["alpha"] != 0), key=_gap)
    ratio = _gap(plain_norm) / _gap(without)
    better = _gap(best) < 0.9 * _gap(plain_norm), median(best, "folded") < 0.9 * median(plain_norm, "folded")
    return [
        Claim(
            "With few cells even the plain norm makes the Taylor expansion more accurate",
            "an observation",
            f"ELBO too large by {_gap(without):.3g} without, by {_gap(plain_norm):.3g} with gamma = "
            f"{record['config']['gamma']:g}",
            "reproduced" if ratio < 0.5 else "partly" if ratio < 0.9 else "not reproduced",
            "T = 1. Reproduced means less than half, partly less than 0.9 of it.",
        ),
        Claim(
            "The Laplacian in the norm encourages smoothness",
            "not tried (alpha = 0)",
            f"at best (alpha = {best['alpha']:g}, c = {best['power']}) too large by {_gap(best):.3g}, "
            f"{median(best, 'folded'):.1%} of the cells fold; {median(plain_norm, 'folded'):.1%} with alpha = 0",
            "reproduced" if all(better) else "partly" if any(better) else "not reproduced",
            "Reproduced means that both fall below 0.9 of what they are with alpha = 0, partly one of them. KL "
            f"{median(best, 'kl'):.2f}, and {median(plain_norm, 'kl'):.2f} with alpha = 0.",
        ),
    ]


def _solver_claim(record: Record) -> Claim:
    found = {part["solver"]: part for part in _of_kind(record, "solver")}
    kls = {name: median(part, "kl") for name, part in found.items()}
    ratio = min(kls["midpoint"], kls["rk4"]) / kls["euler"]
    misses = ", ".join(f"{median(part, 'reverse'):.2g} ({name})" for name, part in found.items())
    return Claim(
        "Runge-Kutta steps can improve the performance (left for future work)",
        "not tried",
        "KL " + ", ".join(f"{kl:.3g} ({name})" for name, kl in kls.items()) + " at equal cost",
        "reproduced" if ratio < 0.9 else "partly" if ratio < 1 else "not reproduced",
        f"Reproduced means a KL below 0.9 of Euler's. The error of -v is {misses}.",
    )


EXPERIMENT = Experiment(
    "open-questions", "What the paper leaves open", ABOUT, PROFILES, parts, tables, pictures, claims
)
