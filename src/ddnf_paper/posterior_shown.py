"""Tables and pictures of the cancer posterior."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddnf.viz import plot
from ddnf_paper.experiment import Picture, Record, ReportTable
from ddnf_paper.posterior_claims import PAPER, QUADRATURE, of_target, spread, values
from ddnf_paper.targets import cancer


def _median(part: Mapping[str, Any], name: str, form: str = ".3g") -> str:
    """Median and largest value of the repetitions; empty if there is none."""
    every = values(part, name)
    found = every[~np.isnan(every)]
    if len(found) == 0:
        return ""
    return f"{np.median(found):{form}}" + (f" ({found.max():{form}})" if len(every) > 1 else "")


def tables(record: Record) -> list[ReportTable]:
    """Table 2 beside our values, moments and quantiles, and the accuracy and time of each method."""
    times = f"Mean ± deviation over {record['config']['repetitions']} repetitions"
    shown = []
    for target in record["config"]["targets"]:
        found = of_target(record, target)
        shown += [_table2(found, times)] if target == "table2" else []
        shown += [_quantiles(target, found, times), _closeness(target, found)]
    return shown


def _table2(found: Mapping[str, dict], times: str) -> ReportTable:
    header = ("method", "m, millionths", "paper", "weighted", "L", "paper", "weighted")
    rows = []
    for method, part in found.items():
        row = [method]
        for name, form, scale in (("m", ".1f", 1e6), ("L", ".1f", 1.0)):
            paper = "{} ± {}".format(*PAPER[method][name]) if method in PAPER else ""
            row += [spread(part, name, form, scale), paper, spread(part, f"weighted_{name}", form, scale)]
        rows.append(tuple(row))
    return ReportTable(
        f"Table 2, on table2: posterior means. {times}; weighted: by importance weights, where k-hat permits.",
        header,
        rows,
    )


def _quantiles(target: str, found: Mapping[str, dict], times: str) -> ReportTable:
    header = ("method", "E[m], millionths", "E[logit m]", "deviation", "E[log L]", "deviation")
    rows = []
    for method, part in found.items():
        moments = (spread(part, name) for name in ("logit_m", "logit_m_sd", "log_L", "log_L_sd"))
        quantiles = (spread(part, name, ".0f") for name in ("median", "low", "high"))
        rows.append((method, spread(part, "m", ".1f", 1e6), *moments, *quantiles))
    return ReportTable(f"Moments and quantiles on {target}. {times}.", (*header, "median of L", "5 %", "95 %"), rows)


def _closeness(target: str, found: Mapping[str, dict]) -> ReportTable:
    header = ("method", "KL(q|p)", "ELBO", "k-hat", "R-hat", "first fit, s", "later fits, s")
    rows = []
    for method, part in found.items():
        if method == QUADRATURE:
            continue
        seconds = values(part, "seconds")
        later = f"{np.median(seconds[1:]):.1f}" if len(seconds) > 1 else ""
        closeness = _median(part, "kl"), spread(part, "elbo", ".3f"), _median(part, "khat"), _median(part, "r_hat")
        rows.append((method, *closeness, f"{seconds[0]:.1f}", later))
    caption = f"Accuracy on {target}: medians (largest values), ELBO mean ± deviation. The first fit compiles."
    lost = {method: sum(run.get("lost", False) for run in part["runs"]) for method, part in found.items()}
    caption += "".join(f" Diverged: {count} of {method}." for method, count in lost.items() if count)
    return ReportTable(f"{caption} log Z is {cancer.REFERENCE[target]['log_z']:.3f}.", header, rows)


def pictures(record: Record) -> list[Picture]:
    """Joint densities and marginals of each target."""
    drawn = []
    for target in record["config"]["targets"]:
        found = {method: part for method, part in of_target(record, target).items() if {"image", "draws"} & set(part)}
        drawn += [_joint(target, found), _marginals(target, found)]
    return drawn


def _joint(target: str, found: Mapping[str, dict]) -> Picture:
    shown = found[QUADRATURE]["shown"]
    panels = {method: partial(_panel, part=part, shown=shown) for method, part in found.items()}
    return Picture(
        f"joint-{target}",
        plot.gallery(panels),
        f"Joint density of logit m (across) and log L (up) on {target}, with KL(q|p): first repetition.",
        f"A panel for each method: its joint density of logit m and log L, beside that of {target}.",
    )


def _panel(axes: Axes, part: Mapping[str, Any], shown: list[float]) -> None:
    if "draws" in part:
        plot.scatter(axes, np.array(part["draws"]), extent=shown)
    else:
        plot.image(axes, np.array(part["image"]), extent=shown)
    kl = part["runs"][0].get("kl")
    axes.set_xlabel("" if kl is None else f"KL {kl:.2g}", fontsize=8)


def _marginals(target: str, found: Mapping[str, dict]) -> Picture:
    truth, shown = found[QUADRATURE], found[QUADRATURE]["shown"]
    methods = {method: part for method, part in found.items() if method != QUADRATURE}
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    labels = dict(logit_m=("logit m", shown[:2]), log_L=("log L", shown[2:]))
    for axes, (name, (label, bounds)) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        lines = {method: np.array(part[f"{name}_density"]) for method, part in methods.items()}
        lines = {method: (np.linspace(bounds[0], bounds[1], len(line) + 1), line) for method, line in lines.items()}
        plot.marginals(axes, lines, truth=np.array(truth[f"{name}_curve"]), x=label)
    figure.axes[1].legend(fontsize=7, frameon=False)
    return Picture(
        f"marginals-{target}",
        figure,
        f"Marginals of logit m and log L on {target}: quadrature (grey), and the draws of each method, first "
        "repetition.",
        "Two plots of densities: a grey area for the truth, and a line for each method.",
    )
