"""Tables and pictures of the auto-encoders, beside the paper's values."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from ddnf.viz import plot
from ddnf_paper.experiment import Picture, Record, ReportTable
from ddnf_paper.vae_claims import PAPER, ROWS, Found, comparison, mean, values, with_deviation
from ddnf_paper.vae_models import MODELS
from ddnf_paper.vae_runs import (
    CLEAR_GAIN,
    Config,
    Setting,
    chosen,
    config_of,
    groups,
    runs,
    search_values,
    setting_text,
)

_CHOSEN = (
    "Rates and sizes are those chosen on validation images, by one search for all models (in a table of its own); "
    "where that is not complete, the defaults."
)
_DEFAULT = "Rates and sizes are the defaults."


def tables(record: Record) -> list[ReportTable]:
    """The comparison with the paper, one table per set of images and number of epochs, and the search for settings."""
    config = config_of(record)
    planned, done = len(runs(config)), len(record["parts"])
    missing = "" if done == planned else f" {done} of {planned} runs of this profile are finished."
    results = [_table(config, where, epochs, found) for (where, epochs), found in groups(record).items()]
    search = [table for where in config.search_sets for table in _search(config, where, record["parts"])]
    steady = [table for (where, epochs), found in groups(record).items() for table in _steadiness(where, epochs, found)]
    made = [*comparison(record), *results, *steady, *search]
    return [table._replace(caption=table.caption + missing) for table in made]


def _steadiness(where: str, epochs: int, found: Found) -> list[ReportTable]:
    """The stability of training, for sets with unstable runs."""
    jumps = {model: [_jumps(part["curves"]["train"]) for part in parts] for model, parts in found.items()}
    unsteady = [MODELS[model].title for model, counts in jumps.items() if any(counts)]
    if not unsteady:
        return []
    caption = (
        f"Stability of training, {where}: the second half of {epochs} epochs, one number per seed. Jumps are epochs "
        f"whose mean training loss exceeds that of the previous epoch by at least {CLEAR_GAIN} nats. The excess is the "
        "mean difference between the training loss (of the current parameters) and the -ELBO on validation images (of "
        f"their moving average). Models with jumps: {', '.join(unsteady)}. Sets without jumps have no such table. If "
        "seeds of one model differ as much as models do, the timing of the jumps may cause the differences. A flow can "
        "represent the identity, so a larger gap to -log p(x) than that of a Gaussian posterior with the same encoder "
        "suggests that the optimizer (a constant rate, no gradient clipping) is the cause, not capacity. It is no "
        "proof, because the decoders differ. The search with half the rate is the test."
    )
    rows = [
        (
            MODELS[model].title,
            ", ".join(map(str, counts)),
            _joined(_excess(part["curves"]) for part in found[model]),
            _joined(values(found[model], "negative_elbo")),
            _joined(values(found[model], "gap")),
        )
        for model, counts in jumps.items()
    ]
    return [ReportTable(caption, ("model", "jumps", "excess", "-ELBO, exact", "gap"), rows)]


def _joined(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)


def _jumps(losses: Sequence[float | None]) -> int:
    """How often a curve rises clearly from one epoch to the next in its second half."""
    return int(np.sum(np.diff(_second_half(losses)) >= CLEAR_GAIN))


def _excess(curves: Mapping[str, Sequence[float | None]]) -> float:
    """Mean difference of the training loss from the validation value in the second half."""
    return float(np.nanmean(_second_half(curves["train"]) - _second_half(curves["valid"])))


def _second_half(curve: Sequence[float | None]) -> np.ndarray:
    return np.array(curve[len(curve) // 2 :], float)


def _search(config: Config, where: str, done: Mapping[str, Any]) -> list[ReportTable]:
    """What the search found, if any of it is done."""
    rows = []
    for model in config.long_models:
        found = search_values(config, done, where, model)
        setting = chosen(config, done, where, model)
        best = "not complete" if setting is None else setting_text(model, setting)
        tried = [f"{setting_text(model, s)}: {v:.2f}" for s, v in found.items() if v is not None]
        rows += [(MODELS[model].title, best, "; ".join(tried))] if tried else []
    caption = (
        f"Settings of the long runs, chosen on {where}: the lowest -ELBO on validation images in "
        f"{config.search_epochs} epochs, seed 0, with the same search for all models. The rate {config.rate:g} (the "
        f"paper's) and our size stay unless another value is lower by at least {CLEAR_GAIN} nats, whatever the model. "
        "With 2 latent dimensions seeds differ by more than that, so a choice there may be luck. Other sets with as "
        "many latent dimensions use the same settings."
    )
    return [ReportTable(caption, ("model", "chosen", "tried"), rows)] if rows else []


def _table(config: Config, where: str, epochs: int, found: Found) -> ReportTable:
    header = ("model", "setting", "paper", "-ELBO, exact", "best test epoch", "training estimate", "-log p(x|z)", "KL")
    header += ("-log p(x)", "gap", "active", "folded", "parameters", "s an epoch")
    first = next(iter(found.values()))[0]
    caption = (
        f"{where}: {epochs} epochs of {first['train_images']:,} images ({first['images']}), nats on "
        f"{first['test_images']:,} test images; binarisation: {first['binarisation']}. Means over seeds, with their "
        "deviation if there are several, else with the standard error over the images. -log p(x) and the gap between "
        f"it and the -ELBO are for {first['weighted']:,} of the images. Seconds are of the process, compilation "
        "included; wall times were taken beside other work. "
    ) + (_CHOSEN if epochs == config.long_epochs else _DEFAULT)
    return ReportTable(caption, header, [_row(where, model, parts) for model, parts in found.items()])


def _row(where: str, model: str, parts: Sequence[dict]) -> tuple[str, ...]:
    paper = PAPER.get(where, {}).get(model)
    is_exact = abs(mean(parts, "estimate") - mean(parts, "negative_elbo")) < 1e-9
    return (
        MODELS[model].title,
        setting_text(model, Setting(parts[0]["rate"], parts[0]["size"])),
        "" if paper is None else f"{paper[0]:.2f}",
        with_deviation(parts) + (f" ({len(parts)} seeds)" if len(parts) > 1 else ""),
        f"{mean(parts, 'best_test'):.2f}",
        "" if is_exact else f"{mean(parts, 'estimate'):.2f}",
        f"{mean(parts, 'reconstruction'):.2f}",
        f"{mean(parts, 'kl'):.2f}",
        f"{mean(parts, 'negative_log_prob'):.2f}",
        f"{mean(parts, 'gap'):.2f}",
        f"{mean(parts, 'active'):.0f}",
        f"{max(values(parts, 'folded')):.2g}",
        f"{parts[0]['parameters']:,d}",
        _seconds(parts),
    )


def _seconds(parts: Sequence[dict]) -> str:
    """Process seconds of an epoch; wall time where a run has no such record."""
    if all(part.get("epoch_process_seconds") for part in parts):
        return f"{mean(parts, 'epoch_process_seconds'):.2f}"
    wall = [part["epoch_seconds"] for part in parts if part["epoch_seconds"]]
    return f"{np.median(wall):.2f} (wall)" if wall else ""


def pictures(record: Record) -> list[Picture]:
    """Learning curves, samples and reconstructions, and the latent planes."""
    shown = []
    for (where, epochs), found in groups(record).items():
        name = f"{where}-{epochs}"
        shown.append(_curves(name, where, found))
        firsts = {model: parts[0] for model, parts in found.items() if "samples" in parts[0]}
        drawn = {model: firsts[model] for model in ROWS if model in firsts}
        shown.append(_samples(name, where, drawn))
        if planes := {model: part for model, part in drawn.items() if "plane" in part}:
            shown.append(_planes(name, where, planes))
    return shown


def _curves(name: str, where: str, found: Found) -> Picture:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    # One colour per model; a pair, with and without context, has two shades of one.
    axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
    lines = {}
    for model, parts in found.items():
        values = np.array(parts[0]["curves"]["valid"], float)
        lines[MODELS[model].title] = (np.arange(1, len(values) + 1), values)
    plot.curves(axes, lines, x="epoch", y="-ELBO on the validation images, nats")
    ends = [values[np.isfinite(values)] for _, values in lines.values()]
    lowest, highest = min(v.min() for v in ends), max(v[min(len(v) - 1, len(v) // 10)] for v in ends)
    axes.set_ylim(lowest - 1, highest + 1)
    return Picture(
        f"curves-{name}",
        figure,
        f"{where}: -ELBO after each epoch, one draw for each validation image, by the log-determinant that trains the "
        "model; first seed.",
        "A falling curve for each model.",
    )


def _samples(name: str, where: str, drawn: Mapping[str, dict]) -> Picture:
    figure = Figure(figsize=(10, 1.3 * max(1, len(drawn))), layout="constrained")
    for axes, (model, part) in zip(np.atleast_1d(figure.subplots(max(1, len(drawn)), 1)), drawn.items(), strict=False):
        rows = [_images(part, "given"), _images(part, "again"), *np.split(_images(part, "samples"), 2)]
        picture = np.concatenate([np.concatenate(list(row), axis=1) for row in rows[:2]])
        samples = np.concatenate([np.concatenate(list(row), axis=1) for row in rows[2:]])
        gap = np.full((picture.shape[0], part["shape"][1] // 2), 255, np.uint8)
        axes.imshow(np.concatenate([picture, gap, samples], axis=1), cmap="gray", interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(MODELS[model].title, fontsize=9, loc="left")
    return Picture(
        f"images-{name}",
        figure,
        f"{where}: left, test images above and their reconstructions from one posterior draw below; right, samples "
        "from the prior.",
        "Rows of small images for each model.",
    )


def _images(part: dict, name: str) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(part[name]), np.uint8)
    return flat.reshape(-1, *part["shape"])


def _planes(name: str, where: str, planes: Mapping[str, dict]) -> Picture:
    figure = Figure(figsize=(2.6 * len(planes), 5.4), layout="constrained")
    grid = figure.subplots(2, len(planes), squeeze=False)
    for column, (model, part) in zip(grid.T, planes.items(), strict=True):
        for axes, stage in zip(column, ("before", "after"), strict=True):
            points = np.array(part["plane"][stage])
            colours = part["plane"]["labels"]
            axes.scatter(*points.T, c=colours, cmap="tab10", s=2, linewidths=0, rasterized=True)
            axes.set(xlim=(-4, 4), ylim=(-4, 4), xticks=[], yticks=[], aspect="equal")
        column[0].set_title(MODELS[model].title, fontsize=8)
    for axes, stage in zip(grid[:, 0], ("before the flow", "after the flow"), strict=True):
        axes.set_ylabel(stage, fontsize=8)
    return Picture(
        f"plane-{name}",
        figure,
        f"{where}: a posterior draw for each of 1,500 test images, coloured by class, before and after the flow.",
        "For each model two clouds of coloured points in the plane.",
    )
