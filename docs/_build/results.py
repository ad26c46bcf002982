"""The results: pages made from the JSON files in `results/` and `benchmarks/`, with the caveats beside the tables."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import report as speed
from ddnf.viz import view
from ddnf_paper.registry import EXPERIMENTS
from ddnf_paper.text import formatted, markdown_table

ROOT = Path(__file__).parents[2]
RESULTS, BENCHMARKS = ROOT / "results", ROOT / "benchmarks"
SIGNS = {"reproduced": "✓", "partly": "≈", "not reproduced": "✗"}


@lru_cache
def pages() -> dict[str, str]:
    """The pages by their paths."""
    made = dict(
        index=_index(),
        claims=_claims(),
        experiments=_experiments(),
        posteriors=_posteriors(),
        densities=_densities(),
        speed=_speed(),
    )
    return {f"results/{name}.md": text for name, text in made.items()}


def assets(cache: Path) -> dict[str, Path]:
    """Files that the pages show, by their paths in the site: figures, report, and the moving flow of the first page."""
    parts = _record("illustration")["parts"]
    shown = {name: parts[name]["view"] for name in ("energy1", "potential2") if name in parts}
    cache.mkdir(exist_ok=True)
    (cache / "flow.html").write_text(view.page(shown, "A flow in motion"), "utf-8")
    figures = [path for name in ("figures", "report") for path in (RESULTS / name).rglob("*") if path.is_file()]
    made = {str(path.relative_to(ROOT)): path for path in figures}
    made |= {f"results/{name}": BENCHMARKS / name for name in ("bars.png", "growth.png")}
    return made | {"assets/flow.html": cache / "flow.html"}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def _record(name: str) -> dict[str, Any]:
    return _read(RESULTS / f"{name}.json")


def _cell(text: str) -> str:
    """Text that cannot end a cell of a Markdown table or start HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _index() -> str:
    counts = {verdict: 0 for verdict in SIGNS}
    for experiment in EXPERIMENTS.values():
        for claim in experiment.claims(_record(experiment.name)):
            counts[claim.verdict] += 1
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"""# Results

Every number on these pages comes from a JSON file in the repository, and every file names the command that made it.
Each ELBO, KL divergence and likelihood uses the exact log-determinant, however the model was trained, unless a table
calls it an estimate.

- [The paper's claims](claims.md): {verdicts}.
- [Experiments](experiments.md): the tables and figures behind the claims; also as
  [one self-contained page](report/index.html) with interactive flows.
- [Posteriors](posteriors.md): accuracy, verdicts and times on posteriors with known moments.
- [Densities](densities.md): seven tables, compared with FlowJAX, mixtures and kernels.
- [Speed](speed.md): training steps, samples and fits, compared with eight other libraries.
- [The baselines](baselines.md): why some flows do worse than in their authors' papers.
"""


def _claims() -> str:
    parts = [
        "# The paper's claims",
        "The paper mostly judges by eye, so we chose the limits behind each verdict. ✓ reproduced, ≈ partly, ✗ not reproduced.",
    ]
    for experiment in EXPERIMENTS.values():
        claims = experiment.claims(_record(experiment.name))
        if claims:
            parts += [f"## {experiment.title}", *map(_claim, claims)]
    return "\n\n".join(parts)


def _claim(claim) -> str:
    kind = {"reproduced": "success", "partly": "warning", "not reproduced": "failure"}[claim.verdict]
    title = claim.claim.replace('"', "'")
    rows = [("Paper", _cell(claim.paper)), ("Ours", _cell(claim.ours)), ("Limits", _cell(claim.why))]
    lines = [f"    **{name}:** {text}  " for name, text in rows]
    return "\n".join([f'!!! {kind} "{title}: {claim.verdict}"', "", *lines])


def _experiments() -> str:
    parts = ["# Experiments", "One section per experiment, with the command that made it. Click a table's title to open it."]
    for experiment in EXPERIMENTS.values():
        record = _record(experiment.name)
        parts += [f"## {experiment.title}", experiment.about, f"```sh\n{record['command']}\n```"]
        for path in sorted((RESULTS / "figures").glob(f"{experiment.name}-*.png")):
            source = f"figures/{path.name}"
            kind = " class='lines'" if _is_line_plot(path) else ""
            image = f"<img src='{source}' alt='{path.stem}' loading='lazy'{kind}>"
            parts.append(f"<figure><a href='{source}' title='In full size'>{image}</a></figure>")
        for table in experiment.tables(record):
            rows = [tuple(map(_cell, row)) for row in table.rows]
            text = markdown_table([_cell(name) for name in table.header], rows)
            title = table.caption.split(".")[0].split(":")[0].replace('"', "'")
            body = "\n".join(f"    {line}" for line in f"{_cell(table.caption)}\n\n{text}".splitlines())
            parts.append(f'??? abstract "Table: {title}"\n\n{body}')
    return "\n\n".join(parts)


def _is_line_plot(path: Path) -> bool:
    """Whether a picture is mostly white: dark mode inverts it. Images of densities keep their colours."""
    with Image.open(path) as image:
        return float(np.mean(np.asarray(image.convert("L")) > 240)) > 0.75


def _posteriors() -> str:
    record = _record("posteriors")
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        runs.setdefault((row["posterior"], row["method"]), []).append(row)
    several = len({method for _, method in runs}) > 1
    header = ("posterior", *(["method"] if several else []), "verdict", "mean", "deviation", "seconds", "ESS a second")
    rows = [(*(key if several else key[:1]), *_scores(found)) for key, found in runs.items()]
    shown = "" if several else " This file only has our results; other methods are below, and in [Speed](speed.md)."
    return f"""# Posteriors

Posteriors from [posteriordb](https://github.com/stan-dev/posteriordb), compared with reference draws, and densities with known moments,
all with default settings. The table shows the verdict, the worst error of a mean (in standard deviations of the reference), the worst
relative error of a standard deviation ("deviation"), and the processor time in seconds from the model to 10,000 draws, compilation
included. With several seeds, each value is that of the worst seed. The last column divides the smallest effective sample size by the
processor time.

GOOD: every mean is within 0.05 standard deviations and every standard deviation within 5 % of the reference, plus three Monte Carlo
errors. Otherwise the verdict is WARNED if the method reported a problem, and SILENT if it did not. Funnels and Student's t have such
heavy tails that the Monte Carlo error of their standard deviations is large for any method.{shown}

{markdown_table(header, rows)}

From `{record["command"]}` (`results/posteriors.json`).

{_waiting()}

{_honesty()}

{_calibration()}
"""


def _scores(runs: list[dict[str, Any]]) -> tuple[str, ...]:
    """Verdicts, the worst errors and the longest time of the runs; an error that is not finite is null in JSON."""
    worst = {
        key: max((row[key] for row in runs if row[key] is not None), default=None) for key in ("mean", "deviation")
    }
    errors = [formatted(worst, key, form) or "NaN" for key, form in (("mean", ".3f"), ("deviation", ".1%"))]
    seconds = max(row["processor_seconds"] for row in runs)
    rates = (row["ess"] / row["processor_seconds"] for row in runs)
    return (" ".join(row["verdict"] for row in runs), *errors, f"{seconds:.0f}", f"{min(rates):.0f}")


def _waiting() -> str:
    record = _record("waiting")
    cells = {(row["posterior"], row["cores"], row["caches"], row["method"]): row for row in record["rows"]}
    columns = sorted({key[1:3] for key in cells}, reverse=True)
    names = list(dict.fromkeys(key[0] for key in cells))
    rows = [(n, *(f"{cells[n, *c, m]['seconds']:.1f} s" for c in columns for m in ("ours", "nutpie"))) for n in names]
    header = [
        f"{m}, {caches}, {cores} core{'s' * (cores > 1)}" for cores, caches in columns for m in ("ours", "nutpie")
    ]
    return f"""## How long a user waits

Seconds from the model to 10,000 draws, compared with nutpie on the same models in PyMC. Each run is a new process; imports are not
counted. With warm caches, compiled programs are on disk: those of the same model for nutpie, and those of another model of the same
dimension for ours (`ddnf.cache_compilation()`).

{markdown_table(("posterior", *header), rows)}

From `{record["command"]}` (`results/waiting.json`), medians."""


def _honesty() -> str:
    record = _record("honesty")
    verdicts = list(dict.fromkeys(verdict for counts in record["summary"].values() for verdict in counts))
    rows = [
        (kind, *(str(counts.get(verdict, 0)) for verdict in verdicts)) for kind, counts in record["summary"].items()
    ]
    return f"""## Does it say so when it is wrong?

Fits of deliberately hard targets (steps, narrow modes inside broad ones, distant modes, funnels, heavy tails, improper densities, wrong
gradients, NaN) and of easy ones. A fit is wrong if a mean is off by more than 0.1 standard deviations or a standard deviation by more
than 10 %, plus three Monte Carlo errors. It is SILENT if it is wrong and reports no issue. A false alarm is an issue reported for a fit
that is right.

{markdown_table(("targets", *verdicts), rows)}

From `{record["command"]}` (`results/honesty.json`). The checks were tuned on targets of these kinds.
{record.get("note", "")}"""


def _calibration() -> str:
    record = _record("calibration")
    rows = [
        (name, *(str(model[key]) for key in ("simulations", "draws")), f"{model['p_value']:.2f}", _counted(model["stages"]))
        for name, model in record["models"].items()
    ]
    issues = sum(len(model["issues"]) for model in record["models"].values())
    return f"""## Simulation-based calibration

For each data set, parameters are drawn from the prior, data are simulated from them, and the model is fitted with default settings,
chains included. If every step is exact, the rank of a true parameter among the draws is uniform. The p-value is the smallest over all
parameters, multiplied by their number. The models are centred hierarchies.

{markdown_table(("model", "data sets", "draws", "p-value", "draws come from"), rows)}

From `{record["command"]}` (`results/calibration.json`). The fits reported {issues} issues."""


def _counted(stages: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(stages.items(), key=lambda pair: -pair[1]))


def _densities() -> str:
    record = _record("density")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        is_older = row["method"] == "ours" and row.get("older", False)
        method = "ours, before the last changes" if is_older else row["method"]
        groups.setdefault((row["table"], method), []).append(row)
    rows = []
    for (table, method), found in sorted(
        groups.items(), key=lambda group: (group[0][0], not group[0][1].startswith("ours"))
    ):
        done = [row for row in found if row["test"] is not None]
        if not done:
            rows.append((table, method, "not done", f"more than {found[0]['stopped_after']:.0f} s", str(len(found))))
            continue
        mean, error, seconds = (sum(row[name] for row in done) / len(done) for name in _DENSITY_FIGURES)
        rows.append((table, method, f"{mean:.2f} ± {error:.2f}", f"{seconds:.0f} s", str(len(done))))
    return f"""# Densities

Mean log-likelihood per test row (nats, higher is better) with its standard error over the rows, and processor seconds for fitting and
scoring on one core, compilation included. All values are means over seeds; each seed has its own split of the rows.

{markdown_table(("table", "method", "log-likelihood", "time", "seeds"), rows)}

{_ahead(groups)}

From `{record["command"]}` (`results/density.json`). "ours" is `fit_density` with its defaults, which cannot fold; no cell folded on the
test rows. FlowJAX's flows have 8 layers and 8 knots (BNAF: one layer), standardized rows and early stopping. Our default settings were
chosen by held-out rows on other splits of the same tables. POWER is an excerpt of 34 days with the columns and the noise of MAF's POWER,
so it is not comparable with published results. For MINIBOONE, flows are trained on MAF's validation rows and tested on its test rows.
`patches` are 20,000 patches of 8 x 8 pixels of the Frey faces.

{_draws()}"""


def _ahead(groups: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Where a peer has a higher likelihood than ours, or FlowJAX's spline MAF takes less time, on the seeds of both."""
    likelier, faster = [], []
    for (table, method), found in groups.items():
        ours = {row["seed"]: row for row in groups.get((table, "ours"), [])}
        pairs = [(row, ours[row["seed"]]) for row in found if row["seed"] in ours and row["test"] is not None]
        if method == "ours" or not pairs:
            continue
        peer, own = ([sum(row[name] for row in side) / len(side) for name in _DENSITY_FIGURES] for side in zip(*pairs))
        if peer[0] > own[0]:
            likelier.append(f"{method} on {table} ({peer[0]:.2f}; ours {own[0]:.2f})")
        if peer[2] < own[2] and method == "FlowJAX spline MAF":
            faster.append(f"{table} ({peer[2]:.0f} s; ours {own[2]:.0f} s)")
    return (
        f"Methods with a higher likelihood than ours: {', '.join(likelier) or 'none'}. Tables on which FlowJAX's spline MAF is faster:\n"
        f"{', '.join(faster) or 'none'}. Gaussians, mixtures of Gaussians and kernels are faster on all tables."
    )


_DENSITY_FIGURES = "test", "error", "process_seconds"


def _draws() -> str:
    record = _record("tables")
    groups: dict[str, list[dict[str, Any]]] = {}
    for label, row in record["rows"].items():
        groups.setdefault(label.rpartition("/")[0] or label, []).append(row)
    tables, conditional = [], []
    for label, found in groups.items():
        kind, _, name = label.partition("/")
        passed = f"{sum(row['passes'] for row in found)} of {len(found)}" if kind in ("table", "conditional") else ""
        if kind == "table":
            bound = record["rows"].get(f"bound/{name}")
            shares = [f"{bound[of]:.0%}" for of in ("generator", "table")] if bound else ["", ""]
            tables.append((name, passed + _older(found), *shares))
        if kind == "conditional":
            gap = sum(row["gap"] for row in found) / len(found)
            conditional.append(
                (name, "PIT values", f"{passed}, {gap:.3f} nats per row less than the truth{_older(found)}")
            )
        if kind == "two moons":
            (row,) = found
            conditional.append(
                ("two moons", "C2ST", f"{row['c2st']:.3f} (largest {row['largest']:.3f}){_older(found)}")
            )
    return f"""## Draws of awkward tables

The table shows how often a two-sample test (energy distance, 200 draws and 200 new rows) finds no difference at the 5 % level. For
comparison, it shows the same for 200 other rows from the generator, and for 200 rows drawn with replacement from the fitted table. A
density fitted to 300 rows is unlikely to do much better than the latter.

{markdown_table(("table", "ours", "the generator", "the table itself"), tables)}

## Conditional fits

Conditional densities of one number given another, fitted to 2,000 rows. The table shows how often a Kolmogorov-Smirnov test at the 5 %
level finds the PIT values of 500 new rows consistent with a uniform distribution. For two moons (10,000 simulations), it shows the
accuracy of a classifier that separates draws from exact draws (C2ST): the mean and the largest over ten observations; 0.5 is best.

{markdown_table(("problem", "measure", "ours"), conditional)}

From `{record["command"]}` (`results/tables.json`).
"""


def _older(rows: list[dict[str, Any]]) -> str:
    return " (before the last changes)" if any(row.get("older") for row in rows) else ""


def _speed() -> str:
    record = _read(BENCHMARKS / "results.json")
    flow = _read(BENCHMARKS / "flow.json")
    header = ("comparison", "dim", "hidden", "batch", "ratio", "bound")
    rows = []
    for row in flow["rows"]:
        setting = [row.get(name, "") for name in header[1:4]]
        rows.append((row["comparison"], *setting, f"{row['ratio']:.3g}", f"{row['bound']:.3g}"))
    own = f"From `{flow['command']}`: our own log-determinant rules, as ratios of times within one run on one core."
    return "\n\n".join([speed.page(record), "## Rules compared", own, markdown_table(header, rows), _batching()])


def _batching() -> str:
    record = _read(BENCHMARKS / "batching.json")
    names = list(dict.fromkeys(row["name"] for row in record["rows"]))
    sizes: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        size = f"d={row['dim']}, ({', '.join(map(str, row['hidden']))}), K={row['blocks']}, T={row['steps']}"
        sizes.setdefault(size, {})[row["name"]] = row["ratio"]
    rows = [(size, *(f"{ratios[name]:.2f}" for name in names)) for size, ratios in sizes.items()]
    return f"""## Ways to map a batch

Times of value and gradient over 256 points, as ratios to `batch_transform_and_log_det`: `vmap` in two orders, FlowJAX's
`Transformed.sample_and_log_prob`, a DDNF inside FlowJAX's `Scan`, and one gradient per point.

{markdown_table(("flow", *names), rows)}

From `{record["command"]}` (`benchmarks/batching.json`), on one core of a shared machine."""
