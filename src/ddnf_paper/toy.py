"""Toy energies (the paper's Fig. toyDensity): DDNF and the baselines, KL(q|p) by quadrature."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax.random as jr
import numpy as np
from matplotlib.axes import Axes

from ddnf import Target
from ddnf.flows import DeepSigmoidal, masked
from ddnf.flows import make as make_baseline
from ddnf.viz import plot
from ddnf_paper.compare import run_on_target
from ddnf_paper.experiment import Claim, Experiment, Picture, Profile, Record, ReportTable
from ddnf_paper.models import FLOWS, MODELS, Build, Settings, split_by_layers
from ddnf_paper.plane import of_energy
from ddnf_paper.targets.toy import ENERGIES
from ddnf_paper.text import formatted

ABOUT = """Flows of K = 2, 8 and 10 blocks or layers are fitted to two-dimensional densities: the two of the paper's
Appendix A, and the four of Rezende and Mohamed, whose periodic waves are truncated here beyond |z_1| = 4. DDNF has
T = 8 steps per block and the paper's (2, 2) units, or (16, 16). All models are fitted in the same way, starting from a
standard normal: Adam with a cosine schedule that decays to zero, and the energy tempered in the first fifth of the
steps. The best ELBO of several starts is reported. MAF and continuous flows, which are slow to sample from, get one
start, and continuous flows also half of the steps. Rezende and Mohamed's densities get one start and half of the steps,
with NAF only at K = 2. The learning rate of each flow was selected from two to four values on the first two energies.
KL(q|p) is computed by quadrature in double precision, with exact log-determinants, on maps checked for folds. ESS is
the effective sample size of importance weights as a fraction; it does not reveal a mode that q misses. Each picture
gives the smallest determinant on 20,000 draws: of a cell for DDNF, of the whole map for the others. The times of the
full run were measured while other programs were running, with a load that varied between rows."""

# By number of blocks, flows with as many parameters as DDNF with (2, 2) units: layers of planar; layers, sigmoids and
# width of NAF.
_EQUAL = {2: (7, (1, 2, 2)), 8: (29, (3, 2, 2)), 10: (36, (2, 2, 4))}
_FEWER = Settings(steps=2000, starts=1)
_QUICK = ("ddnf", "ddnf-wide", "planar", "naf")


@dataclasses.dataclass(frozen=True)
class Config:
    """Which models are fitted to which energies, and how."""

    settings: Settings
    models: tuple[str, ...]
    layers: tuple[int, ...]
    energies: tuple[str, ...] = ("energy1", "energy2")
    others: tuple[str, ...] = ("potential1", "potential2", "potential3", "potential4")
    models_of_others: tuple[str, ...] = _QUICK
    settings_of_others: Settings = _FEWER
    equal: tuple[int, ...] = (2, 8, 10)


PROFILES: dict[Profile, Config] = {
    "smoke": Config(
        Settings(steps=1500, batch=64, cells=4, starts=1),
        ("ddnf", "ddnf-wide", "planar"),
        (2,),
        ("energy2",),
        others=(),
        equal=(),
    ),
    "quick": Config(_FEWER, (*_QUICK, "affine"), (2,), others=(), equal=(2,)),
    # Of the two spline flows only the one that is fast to sample from.
    "full": Config(Settings(), tuple(name for name in MODELS if name != "spline-maf"), (2, 8, 10)),
}


def parts(config: Config, seed: int):
    """One part per energy, model and K."""
    return {
        f"{energy}, {title}": partial(_part, config, seed, energy, name, title, layers, build)
        for energies, models in ((config.energies, config.models), (config.others, config.models_of_others))
        for energy in energies
        for name, title, layers, build in _candidates(config, models, is_main=energy in config.energies)
    }


def choose(models: Sequence[str]) -> Callable[[str], bool]:
    """Selects parts by name: those of these models; an empty sequence selects all.

    Example:
        >>> wanted = choose(["planar"])
        >>> wanted("energy1, planar, K=2"), wanted("energy1, planar, scale, shift, K=2")
        (True, False)
    """
    for model in models:
        if model not in MODELS:
            raise ValueError(f"Expected models of {', '.join(MODELS)}; got {model!r}.")

    def wanted(name: str) -> bool:
        title = name.partition(", ")[2] + ","
        found = [model for model in MODELS if title.startswith(MODELS[model] + ",")]
        return not models or max(found, key=lambda model: len(MODELS[model])) in models

    return wanted


def _candidates(
    config: Config, models: Sequence[str], *, is_main: bool
) -> Iterator[tuple[str, str, int | None, Build | None]]:
    layered, single = split_by_layers(models)
    for layers in config.layers:
        # NAF is good with two layers and slow with more.
        names = layered if is_main or layers == 2 else [name for name in layered if name != "naf"]
        yield from ((name, f"{MODELS[name]}, K={layers}", layers, None) for name in names)
    yield from ((name, MODELS[name], None, None) for name in single)
    for layers in config.equal if is_main else ():
        planar, (count, sigmoids, width) = _EQUAL[layers]
        small = partial(masked, dim=2, transformer=DeepSigmoidal(sigmoids), layers=count, size=width)
        yield "planar", f"planar, {planar} layers", None, partial(make_baseline, "planar", dim=2, layers=planar)
        yield "naf", f"NAF, {count} x {sigmoids} sigmoids, {width} units", None, small


def _part(
    config: Config, seed: int, energy: str, name: str, title: str, layers: int | None, build: Build | None
) -> dict[str, Any]:
    target = ENERGIES[energy]
    is_main = energy in config.energies
    row = run_on_target(
        jr.key(seed),
        Target(target.log_density, 2),
        name,
        layers=layers or 1,
        settings=config.settings if is_main else config.settings_of_others,
        plane=of_energy(target),
        build=build,
        progress=False,
    )
    return dict(
        energy=energy, model=name, title=title, layers=layers, is_equal=layers is None and build is not None, **row
    )


def tables(record: Record) -> list[ReportTable]:
    """One table per energy."""
    return [_table(record, energy) for energy in _energies(record)]


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda row: row["title"],
    "parameters": lambda row: formatted(row, "parameters", ",d"),
    "KL(q|p)": lambda row: formatted(row, "kl", ".4f"),
    "mass of q": lambda row: formatted(row, "mass", ".4f"),
    "ESS": lambda row: formatted(row, "ess", ".3f"),
    "smallest determinant": lambda row: formatted(row, "determinant", ".2g"),
    "of a cell": lambda row: formatted(row, "cell_determinant", ".2g"),
    "steps x starts": lambda row: f"{row['steps']:,} x {len(row['elbos'])}" if "elbos" in row else "",
    "one fit, s": lambda row: formatted(row, "fit_seconds", ".1f"),
    "one step, ms": lambda row: formatted(row, "step_ms", ".2f"),
}


def _table(record: Record, energy: str) -> ReportTable:
    rows = [tuple(column(row) for column in _COLUMNS.values()) for row in _rows(record, energy)]
    caption = (
        f"{energy}: KL(q|p) by quadrature, and cost. Smallest determinants on 20,000 draws, of the map and of a cell. "
        "NUTS has no density, so no KL; where q has left the grid, KL is estimated from its draws."
    )
    return ReportTable(caption, tuple(_COLUMNS), rows)


def _energies(record: Record) -> list[str]:
    return list(dict.fromkeys(part["energy"] for part in record["parts"].values()))


def _rows(record: Record, energy: str) -> list[dict[str, Any]]:
    return [part for part in record["parts"].values() if part["energy"] == energy]


def _drawn(record: Record, energy: str) -> list[dict[str, Any]]:
    """The rows that have a picture: all but models whose every start was lost."""
    return [row for row in _rows(record, energy) if "image" in row or "draws" in row]


def pictures(record: Record) -> list[Picture]:
    """The paper's figure, and one with all models per energy."""
    return [_figure(record), *(_gallery(record, energy) for energy in _energies(record))]


def _figure(record: Record) -> Picture:
    """DDNF, planar and NAF on the Appendix's energies: a row per energy and K, a column per model."""
    rows = {}
    for energy in record["config"]["energies"]:
        for layers in record["config"]["layers"]:
            found = {row["model"]: row for row in _drawn(record, energy) if row["layers"] == layers}
            panels = {"target": _target(energy)}
            for row in (found[model] for model in _QUICK if model in found):
                panels[f"{FLOWS[row['model']]}\nKL {row['kl']:.3g}, ESS {row['ess']:.2f}"] = _panel(row)
            rows[f"{energy}, K = {layers}"] = panels
    return Picture(
        "densities",
        plot.panels(rows),
        "DDNF, planar and NAF fitted to the energies of Appendix A; KL by quadrature and effective sample size.",
        "A row per energy and K: the target, then the fitted densities of DDNF, planar and NAF.",
    )


def _gallery(record: Record, energy: str) -> Picture:
    """All models on one energy; those with every K have a column for each."""
    every_layers = record["config"]["layers"]
    aligned, single, equal = _by_kind(_drawn(record, energy), len(every_layers))
    panels = {"target": _target(energy)} | _titled(single)
    # Blank panels, so that the first K of a model begins a column.
    panels |= {" " * (i + 1): Axes.set_axis_off for i in range(-len(panels) % len(every_layers))}
    figure = plot.gallery(panels | _titled(aligned) | _titled(equal))
    return Picture(energy, figure, f"All models on {energy}.", f"The densities of all models fitted to {energy}.")


def _by_kind(rows: list[dict[str, Any]], count: int) -> tuple[list[dict], list[dict], list[dict]]:
    """The rows of models with every K, model by model; all others; and those with an equal number of parameters."""
    layered = Counter(row["model"] for row in rows if row["layers"] is not None and not row["is_equal"])
    by_model = [[row for row in rows if row["model"] == name and not row["is_equal"]] for name in layered]
    aligned = [row for group in by_model if len(group) == count for row in group]
    equal = [row for row in rows if row["is_equal"]]
    return aligned, [row for row in rows if row not in aligned and row not in equal], equal


def _titled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"{row['title']}\n{_subtitle(row)}": _panel(row) for row in rows}


def _target(energy: str):
    plane = of_energy(ENERGIES[energy])
    return partial(plot.image, values=plane.image(plane.log_density), extent=plane.shown)


def _panel(row: dict[str, Any]):
    extent = of_energy(ENERGIES[row["energy"]]).shown
    if "image" in row:
        return partial(plot.image, values=np.array(row["image"]), extent=extent)
    return partial(plot.scatter, points=np.array(row["draws"]), extent=extent)


def _subtitle(row: dict[str, Any]) -> str:
    if "kl" not in row:
        return f"R-hat {row['r_hat']:.3f}"
    determinant = row.get("cell_determinant", row.get("determinant"))
    smallest = "" if determinant is None else f"\ndeterminant {determinant:.2g}"
    return f"KL {row['kl']:.3g}, ESS {row['ess']:.2f}{smallest}"


def claims(record: Record) -> list[Claim]:
    """The claims of the paragraph on toy energies."""
    made = [_well_at_most_layers(record), _few_layers(record)]
    if "affine" in record["config"]["models"]:
        made.append(_mean_field(record))
    if record["config"]["equal"]:
        made.append(_small_naf(record))
    return made


def _kls(record: Record, model: str, layers: int | None) -> list[float]:
    """KL of a model with K layers on the Appendix's energies."""
    found = {(part["energy"], part["model"], part["layers"]): part for part in record["parts"].values()}
    return [found[energy, model, layers].get("kl", np.inf) for energy in record["config"]["energies"]]


def _list(values: Sequence[float]) -> str:
    return " and ".join(f"{value:.3g}" for value in values)


def _judged(values: Sequence[float], good: float) -> Any:
    if max(values) < good:
        return "reproduced"
    return "partly" if min(values) < good else "not reproduced"


def _well_at_most_layers(record: Record) -> Claim:
    layers, models = max(record["config"]["layers"]), _present(record, ("ddnf", "ddnf-wide", "planar", "naf"))
    kls = {name: _kls(record, name, layers) for name in models}
    return Claim(
        f"DDNF, planar and NAF all perform well for K = {max(record['config']['layers'])}",
        "K = 10, judged by eye",
        "KL on the two energies: " + "; ".join(f"{FLOWS[name]} {_list(values)}" for name, values in kls.items()),
        _judged([max(values) for values in kls.values()], 0.1),
        "Reproduced means a KL below 0.1 for all on both energies, partly for some.",
    )


def _few_layers(record: Record) -> Claim:
    layers, models = min(record["config"]["layers"]), _present(record, ("ddnf", "naf"))
    kls = {name: _kls(record, name, layers) for name in models}
    wide = _list(_kls(record, "ddnf-wide", layers))
    return Claim(
        f"DDNF and NAF achieve high quality with K = {layers}, DDNF with (2, 2) units",
        "judged by eye",
        "KL on the two energies: " + "; ".join(f"{FLOWS[name]} {_list(values)}" for name, values in kls.items()),
        _judged([max(values) for values in kls.values()], 0.02),
        f"Reproduced means a KL below 0.02 for both, partly for one. DDNF with (16, 16) units has {wide}.",
    )


def _mean_field(record: Record) -> Claim:
    kls = _kls(record, "affine", None)
    return Claim(
        "The densities are hard to capture for mean field",
        "no value",
        f"KL {_list(kls)}",
        "reproduced" if min(kls) > 0.5 else "not reproduced",
        "The best Gaussian with independent coordinates. Reproduced means above 0.5 on both; 0.69 is one of two "
        "equal modes lost.",
    )


def _small_naf(record: Record) -> Claim:
    layers = min(record["config"]["layers"])
    full = max(_kls(record, "naf", layers))
    small = [part for part in record["parts"].values() if part["model"] == "naf" and part["is_equal"]]
    values = "; ".join(f"{part['parameters']} parameters on {part['energy']} {part['kl']:.3g}" for part in small)
    best = min(part["kl"] for part in small)
    return Claim(
        "The number of parameters of NAF cannot be reduced without compromising its performance",
        "no value",
        f"KL of NAF with as many parameters as DDNF with (2, 2) units: {values}",
        "reproduced" if best > 2 * full else "not reproduced",
        f"Reproduced means that each has more than twice the KL of the full NAF with K = {layers} ({full:.3g}).",
    )


def _present(record: Record, models: Sequence[str]) -> list[str]:
    return [name for name in models if name in record["config"]["models"]]


EXPERIMENT = Experiment("toy", "Toy energies", ABOUT, PROFILES, parts, tables, pictures, claims)
