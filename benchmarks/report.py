"""The page and the pictures, from the record alone.

python -m benchmarks.report [benchmarks/results.json]
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import summary
from ddnf.system import check_overwrite, contains_mark, write_atomic
from ddnf.viz import plot
from ddnf_paper.text import formatted, markdown_table

AXES = dict(blocks="K", steps="T", batch="batch", dim="d (rank 8)", hidden="width (two layers)")
_STEP_NOTE = """Value and gradient of mean(|y|^2 / 2 - log det), 64 cells (K = T = 8), batch 256, float32. Continuous
peers evaluate their field 64 times, in constant steps; Zuko's solver chooses its own steps, which are counted. `ratio`
is the time relative to ours, at equal evaluations. The last column, for PyTorch peers, is the largest derivative of the
mean log-determinant by a parameter: 0 means that the peer does less work than maximum likelihood needs."""


def write(record: dict, folder: Path) -> list[Path]:
    """Writes RESULTS.md and the pictures."""
    path = folder / "RESULTS.md"
    check_overwrite(path, kind="a page of `make bench`", is_ours=lambda path: contains_mark(path, b"`make bench`"))
    pictures = [bars(record, folder / "bars.png"), lines(record, folder / "growth.png")]
    write_atomic(path, page(record) + "\n")
    return [path, *pictures]


def page(record: dict) -> str:
    """The Markdown of RESULTS.md, which shows bars.png and growth.png."""
    return "\n\n".join([*_opening(record), *_sections(record)])


def verdicts(record: dict) -> str:
    """The goals, the measurements, and whether they are met."""
    words = {True: "yes", False: "**no**", None: ""}
    found = summary.verdicts(record)
    return markdown_table(("goal", "measured", "met"), [(v.asked, v.measured, words[v.met]) for v in found])


def _opening(record: dict) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    # Parts may have been measured on different days, each by a command of its own.
    days = {name: part["date"][:10] for name, part in record["parts"].items()}
    parts = "; ".join(
        f"{', '.join(name for name in days if days[name] == day)} on {day}" for day in dict.fromkeys(days.values())
    )
    return [
        "# Speed",
        f"Made by `{record['command']}` from `results.json`. One core; medians of runs taken in turn, with quartiles. "
        f"Parts: {parts} (`python -m benchmarks --only NAME` measures one of them).",
        f"Versions: Python {record['python']}, {record['machine']}; {versions}.",
        "## Goals and measurements",
        verdicts(record),
        "![training steps](bars.png)",
    ]


def _sections(record: dict) -> list[str]:
    return [
        "## Training step",
        _STEP_NOTE,
        _step_table(record),
        "## 100,000 samples, 100,000 log densities",
        "d = 2, (16, 16) units, 64 cells. Slow peers ran with fewer points, and their times are scaled up.",
        _density_table(record),
        "## Until KL <= 0.01",
        "Training from scratch on the toy energies, one process per run; evaluating the KL is not counted.",
        _race_table(record),
        "## Posteriors of posteriordb",
        "Times from the model to 10,000 draws. Within tolerance: means and standard deviations within 0.05 of the "
        "reference.",
        _posterior_table(record),
        "## An epoch of the auto-encoder",
        "600 steps of 100 images of random bytes with 40 latent dimensions and the paper's networks; scaled up from "
        "fewer steps.",
        _vae_table(record),
        "## Growth",
        _growth_table(record),
        "![growth](growth.png)",
        "## The machine",
        "(64, 64) units, d = 40, batch 1,024; `benchmarks/roofline.py` lists the products. The bound is for products "
        "in chunks that stay in the caches; as one product, they are limited by memory bandwidth.",
        _machine_table(record),
    ]


def _ms(row: dict, name: str = "seconds") -> str:
    return f"{1e3 * row[name]:,.{0 if row[name] > 1 else 2}f}" if name in row else ""


def _spread(row: dict) -> str:
    return f"{_ms(row)} ({_ms(row, 'low')} to {_ms(row, 'high')})" if "seconds" in row else row.get("error", "failed")


def _step_table(record: dict) -> str:
    lines = []
    for row in summary.rows(record, "steps"):
        size = {name: row[name] for name in ("dim", "hidden")}
        quotient = summary.ratio(record, row["peer"], size)
        shown = "" if quotient is None else f"{quotient:.3g}"
        gradient = f"{row['log_det_gradient']:.2g}" if "log_det_gradient" in row else ""
        more = [row.get("evaluations", ""), shown, f"{row.get('compile_seconds', 0):.1f}", gradient]
        lines.append((row["dim"], row["hidden"], row["peer"], _spread(row), *more))
    return markdown_table(("d", "units", "who", "ms", "evaluations", "ratio", "compile s", "log-det gradient"), lines)


def _density_table(record: dict) -> str:
    lines = [
        (row["work"], row["peer"], _spread(row), row["batch"], f"{row.get('compile_seconds', 0):.1f}")
        for row in summary.rows(record, "densities")
    ]
    return markdown_table(("work", "who", "ms", "points run", "compile s"), lines)


def _race_table(record: dict) -> str:
    lines = []
    for row in summary.rows(record, "race"):
        late = row.get("error") or f"not within {row.get('limit', 0):.0f} s"
        end = f"{row['seconds']:.1f} s" if row.get("reached") else late
        compiling = f"{row['compile_seconds']:.1f} s" if "compile_seconds" in row else ""
        kl = formatted(row, "kl", ".4f")
        lines.append((row["energy"], row["peer"], row["seed"], end, compiling, row.get("steps", ""), kl))
    return markdown_table(("energy", "who", "seed", "until KL <= 0.01", "of it compiling", "steps", "last KL"), lines)


def _posterior_table(record: dict) -> str:
    lines = []
    for row in summary.rows(record, "posteriors"):
        errors = [formatted(row, name, form) for name, form in (("mean", ".3f"), ("deviation", ".1%"))]
        error = row["error"] if "error" in row else ", ".join(text or "NaN" for text in errors)
        lines.append((row["posterior"], row["peer"], f"{row.get('seconds', 0):.1f}", error, row["within"]))
    return markdown_table(("posterior", "who", "s", "worst mean, deviation", "within tolerance"), lines)


def _vae_table(record: dict) -> str:
    lines = [(row["peer"], _spread(row), row["steps"]) for row in summary.rows(record, "vae")]
    return markdown_table(("who", "ms", "steps run"), lines)


def _growth_table(record: dict) -> str:
    shown = []
    for axis, title in AXES.items():
        slopes = [summary.slope(record, axis, figure) for figure in ("seconds", "bytes")]
        values = ", ".join(f"{summary.grown(row)}: {_ms(row)}" for row in summary.rows(record, "growth", axis=axis))
        shown.append((title, *("" if s is None else f"{s:.2f}" for s in slopes), values))
    return markdown_table(("over", "slope of time", "slope of memory", "ms"), shown)


def _machine_table(record: dict) -> str:
    lines = []
    for row in summary.rows(record, "machine"):
        speed = f"{row['flops'] / row['seconds'] / 1e9:.1f}" if {"flops", "seconds"} <= row.keys() else ""
        lines.append((row["peer"], _spread(row), speed))
    for part in ("products", "products, batch at once", "products of the map"):
        share = summary.machine_share(record, part)
        lines.append((f"ours / ({part} + tanh)", "" if share is None else f"{share:.2f} times", ""))
    return markdown_table(("what", "ms", "Gflop/s"), lines)


def bars(record: dict, path: Path) -> Path:
    """The training steps: a panel for each size."""
    found = [row for row in summary.rows(record, "steps") if "seconds" in row]
    sizes = list(dict.fromkeys((row["dim"], tuple(row["hidden"])) for row in found))
    figure, axes = _figure(max(1, len(sizes)))
    for ax, size in zip(axes, sizes, strict=False):
        rows = [row for row in found if (row["dim"], tuple(row["hidden"])) == size][::-1]
        colors = ["tab:red" if row["peer"] == "ours" else "tab:gray" for row in rows]
        ax.barh([row["peer"] for row in rows], [1e3 * row["seconds"] for row in rows], color=colors)
        # A logarithmic axis has no zero: all bars start at a tenth of the smallest.
        least = min(1e3 * row["seconds"] for row in rows)
        ax.set(xscale="log", xlim=(least / 10, None), xlabel="ms", title=f"d = {size[0]}, units {size[1]}")
        ax.minorticks_off()
    plot.save(figure, path, dpi=100.0)
    return path


def lines(record: dict, path: Path) -> Path:
    """Time and memory over each size, both axes logarithmic."""
    figure, axes = _figure(len(AXES))
    for ax, (axis, title) in zip(axes, AXES.items(), strict=True):
        rows = [row for row in summary.rows(record, "growth", axis=axis) if "seconds" in row]
        for name, factor, label in (("seconds", 1e3, "ms"), ("bytes", 1e-6, "MB")):
            ax.loglog([summary.grown(r) for r in rows], [factor * r[name] for r in rows], "o-", label=label)
        slope = summary.slope(record, axis)
        ax.set(xlabel=title, title="" if slope is None else f"slope of time {slope:.2f}")
        ax.legend()
    plot.save(figure, path, dpi=100.0)
    return path


def _figure(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * count, 4), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    return figure, list(axes[0])


if __name__ == "__main__":
    source = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("results.json"))
    for written in write(json.loads(source.read_text()), source.parent):
        print(f"written to {written}")
