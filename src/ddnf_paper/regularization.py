"""Velocity regularization (the paper's Fig. stability): flows of one step per block, with and without it."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from ddnf import DDNF, geodesic
from ddnf.viz import plot
from ddnf_paper.energy import RULES, VIEW, FlowConfig, Penalty, Training, arrow_starts, fits, measure, median, sketch
from ddnf_paper.experiment import Claim, Experiment, Picture, Profile, Record, ReportTable

ABOUT = """K blocks of a single Euler step (T = 1) are fitted to the first toy energy with each log-determinant rule,
without a regularizer (gamma = 0), with the paper's gamma = 0.1, and with a strong regularizer. The paper reports the
standard deviation of the ELBO during training, computed with the rule that is trained. We add the exact ELBO, the KL of
the density of the map's draws (by counting), and the share of cells that fold. The energy is normalized, so no true
ELBO is above 0. The paper does not state its optimizer settings. We chose a learning rate of 0.01, and tempering in the
first half of the steps, because lower rates and less tempering lost a mode."""

FIRST, PRINTED, RIGHT = "first order", "second order as printed", "second order"


@dataclasses.dataclass(frozen=True)
class Config(FlowConfig):
    """The flow, how often each fit is run, and the regularizer's weights."""

    gammas: tuple[float, ...] = (0.0, 0.1, 2.0)


PROFILES: dict[Profile, Config] = {
    "smoke": Config(Training(400, batch=64, draws=20_000), runs=1, gammas=(0.0, 0.1)),
    "quick": Config(Training(1200, draws=200_000), runs=2, gammas=(0.0, 0.1)),
    "full": Config(Training(5000), runs=3),
}


def parts(config: Config, seed: int):
    """One part per rule and gamma, with all its runs."""
    return {_name(rule, gamma): partial(_part, config, seed, rule, gamma) for rule in RULES for gamma in config.gammas}


def _name(rule: str, gamma: float) -> str:
    return f"{rule}, gamma {gamma:g}"


def _part(config: Config, seed: int, rule: str, gamma: float) -> dict[str, Any]:
    runs, curves, first = [], [], None
    make = partial(config.make, rule)
    for key, result in fits(seed, make, config.training, runs=config.runs, penalty=Penalty(gamma, path_energy)):
        elbo = -result.losses
        runs.append(measure(key, result.parameters, config.training) | stability(elbo) | dict(skipped=result.skipped))
        curves.append(elbo)
        first = first or sketch(key, result.parameters, draws=config.training.draws)
    return dict(rule=rule, gamma=gamma, runs=runs, curves=np.array(curves), sketch=first)


def path_energy(flow: DDNF, x: Float[Array, " 2"]) -> Float[Array, ""]:
    """The geodesic regularizer of the path of one point."""
    return geodesic(flow.path(x)[1])


def stability(elbo: np.ndarray) -> dict[str, float]:
    """How much the ELBO varies in the second half of training: its deviation, and that within windows of ten values.

    Example:
        >>> steady = stability(np.linspace(0.0, 1.0, 200))  # a trend without noise
        >>> steady["jitter"] < 0.2 * steady["deviation"]
        True
    """
    late = elbo[len(elbo) // 2 :]
    windows = late[: len(late) // 10 * 10].reshape(-1, 10)
    return dict(deviation=float(np.std(late)), jitter=float(np.mean(np.std(windows, axis=1))))


def tables(record: Record) -> list[ReportTable]:
    """The results of each rule and gamma, as medians over the runs."""
    header = ("log-det", "gamma", "deviation", "jitter", "ELBO by the rule", "exact ELBO", "KL of the draws")
    columns = ("deviation", "jitter", "estimate", "exact", "kl")
    rows = []
    for part in record["parts"].values():
        folds = f"{median(part, 'folded'):.2%}", f"{median(part, 'smallest'):.3g}"
        rows.append((part["rule"], f"{part['gamma']:g}", *(f"{median(part, name):.3g}" for name in columns), *folds))
    caption = (
        f"Medians of {record['config']['runs']} runs. Deviation: of the ELBO in the second half of training; jitter: "
        "the same within windows of ten chunks. The energy is normalized: the ELBO is at most 0, and is -KL."
    )
    return [ReportTable(caption, (*header, "folded cells", "smallest determinant"), rows)]


def pictures(record: Record) -> list[Picture]:
    """The paper's figure, and the training curves."""
    return [_maps(record), _training(record)]


def _maps(record: Record) -> Picture:
    rows: dict[str, dict] = {}
    for part in record["parts"].values():
        if part["gamma"] > 0.1:
            continue
        row, gamma, drawn = rows.setdefault(part["rule"], {}), f"$\\gamma$ = {part['gamma']:g}", part["sketch"]
        first = part["runs"][0]
        row[f"{gamma}: grid\n{first['folded']:.1%} of cells fold"] = partial(
            plot.grid_lines, grid=np.array(drawn["grid"]), bound=VIEW
        )
        row[f"{gamma}: displacement\n"] = partial(
            plot.displacement, start=arrow_starts(), end=np.array(drawn["arrows"]), bound=VIEW
        )
        row[f"{gamma}: density\nKL {first['kl']:.2f}"] = partial(
            plot.shade, values=np.array(drawn["density"]), bound=VIEW
        )
    return Picture(
        "stability",
        plot.panels(rows),
        "Deformed grid, displacement and density of the first run by each log-det rule, without and with the geodesic "
        "regularizer; K = 8, T = 1, first energy.",
        "A row for each log-det rule: deformed grid, arrows and density without regularizer, and the same with it.",
    )


def _training(record: Record) -> Picture:
    rules = list(dict.fromkeys(part["rule"] for part in record["parts"].values()))
    figure = Figure(figsize=(2.9 * len(rules), 3.0), layout="constrained")
    chunk = record["config"]["training"]["chunk"]
    for axes, rule in zip(np.ravel(figure.subplots(1, len(rules))), rules, strict=True):
        for number, part in enumerate(part for part in record["parts"].values() if part["rule"] == rule):
            elbos = np.array(part["curves"], float)
            steps = chunk * np.arange(1, elbos.shape[1] + 1)
            for run, elbo in enumerate(elbos):
                label = None if run else f"$\\gamma$ = {part['gamma']:g}"
                axes.plot(steps, elbo, color=f"C{number}", linewidth=0.8, alpha=0.8, label=label)
        axes.axhline(0.0, color="0.3", linestyle=":", linewidth=1)
        axes.set(title=rule, xlabel="iteration", yscale="symlog", ylim=(-200, 1e5))
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("ELBO by the rule trained")
    figure.axes[0].legend(fontsize=8, frameon=False, loc="lower right")
    return Picture(
        "training",
        figure,
        "The ELBO during training, by the rule that is trained. No true ELBO is above the dotted line.",
        "For each log-det rule, curves of the ELBO over the iterations, one for each gamma and run.",
    )


def claims(record: Record) -> list[Claim]:
    """The claims of the paragraph on velocity field regularization."""
    found = {(part["rule"], part["gamma"]): part for part in record["parts"].values()}
    return [*_order_claims(found), *_regularizer_claims(found)]


def _order_claims(found: dict) -> list[Claim]:
    """On the order of the log-determinant, without regularizer."""
    first, printed, right = (found[rule, 0.0] for rule in (FIRST, PRINTED, RIGHT))
    deviations = [median(part, "deviation") for part in (first, printed, right)]
    folds = [median(part, "folded") for part in (first, printed, right)]
    calmer, right_calmer = (deviation < deviations[0] / 2 for deviation in deviations[1:])
    return [
        Claim(
            "Leaving out the second order of the log-det makes training less stable",
            "larger deviation of the ELBO",
            f"deviation {deviations[0]:.3g} with the first order, {deviations[1]:.3g} with the second as printed",
            "reproduced" if calmer else "not reproduced",
            f"The first order rewards cells that fold: its ELBO is {median(first, 'estimate'):.3g}, the exact one "
            f"{median(first, 'exact'):.3g}, and 0 the largest possible.",
        ),
        Claim(
            "With the first order and T = 1 the flow is not invertible",
            "a twist in the grid",
            f"{folds[0]:.1%} of the cells fold",
            "reproduced" if folds[0] > 0 else "not reproduced",
            "Folds are counted by the sign of each cell's determinant.",
        ),
        Claim(
            "Adding the second order improves the stability, but the flow is highly irregular",
            "smaller deviation of the ELBO",
            f"deviation {deviations[1]:.3g} as printed, {deviations[2]:.3g} with the right second order; "
            f"{folds[1]:.1%} and {folds[2]:.1%} of the cells fold",
            ("reproduced" if right_calmer else "partly") if calmer else "not reproduced",
            "Partly: only as printed. That term, -|J|^2/2, is not the second order, but it is never positive: a "
            "penalty on large Jacobians. The right one, -tr(J J)/2, is positive where the field turns.",
        ),
    ]


def _regularizer_claims(found: dict) -> list[Claim]:
    """On the paper's gamma of 0.1."""
    falls = [median(found[rule, 0.1], "deviation") / median(found[rule, 0.0], "deviation") for rule in (FIRST, PRINTED)]
    folds, exact = median(found[FIRST, 0.1], "folded"), found["exact", 0.0]
    return [
        Claim(
            "gamma = 0.1 stabilizes both approximations",
            "smaller deviation of the ELBO",
            f"deviation times {falls[0]:.2g} with the first order, times {falls[1]:.2g} with the second as printed",
            "reproduced" if max(falls) < 0.5 else "partly" if max(falls) < 0.9 else "not reproduced",
            "Reproduced means less than half of the deviation for both, partly less than 0.9 of it.",
        ),
        Claim(
            "With gamma = 0.1 the flow is smooth even with T = 1 and the first order",
            "a smooth grid",
            f"{folds:.1%} of the cells fold, KL {median(found[FIRST, 0.1], 'kl'):.2f}",
            "reproduced" if folds == 0 else "not reproduced",
            f"With the exact log-determinant and no regularizer {median(exact, 'folded'):.1%} of the cells fold, KL "
            f"{median(exact, 'kl'):.2f}.",
        ),
    ]


EXPERIMENT = Experiment("regularization", "Velocity regularization", ABOUT, PROFILES, parts, tables, pictures, claims)
