"""The results: pages made from the JSON files in `results/` and `benchmarks/`, with the caveats beside the tables."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

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


def write_assets(site: Path) -> None:
    """The moving flow of the first page, and the pictures of the speed page."""
    parts = _record("illustration")["parts"]
    shown = {name: parts[name]["view"] for name in ("energy1", "potential2") if name in parts}
    (site / "assets" / "flow.html").write_text(view.page(shown, "A flow in motion"), "utf-8")
    for name in ("bars.png", "growth.png"):
        (site / "results" / name).write_bytes((BENCHMARKS / name).read_bytes())


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

Every number on these pages comes from a JSON file of the repository, and every file names the command that made it.
Whatever trained a model, each ELBO, KL divergence and likelihood comes from the exact log-determinant, unless a table
calls it an estimate.

- [The paper's claims](claims.md): {verdicts}.
- [Experiments](experiments.md): the tables and figures behind them; the same as
  [one self-contained page](report/index.html) with flows to move.
- [Posteriors](posteriors.md): six posteriors of posteriordb beside NUTS and NumPyro's guides.
- [Densities](densities.md): two tables beside FlowJAX.
- [Speed](speed.md): training steps, samples and fits beside eight other libraries.
- [The baselines](baselines.md): what was found where a flow does worse than in its authors' figures.
"""


def _claims() -> str:
    parts = [
        "# The paper's claims",
        "The paper mostly judges by eye, so the limits behind each verdict are ours. ✓ reproduced, ≈ partly, ✗ not reproduced.",
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
    parts = ["# Experiments", "One section per experiment, with the command that made it. Long tables are folded."]
    for experiment in EXPERIMENTS.values():
        record = _record(experiment.name)
        parts += [f"## {experiment.title}", experiment.about, f"```sh\n{record['command']}\n```"]
        for path in sorted((RESULTS / "figures").glob(f"{experiment.name}-*.png")):
            parts.append(f"<figure markdown><img src='figures/{path.name}' alt='{path.stem}' loading='lazy'></figure>")
        for table in experiment.tables(record):
            rows = [tuple(map(_cell, row)) for row in table.rows]
            text = markdown_table([_cell(name) for name in table.header], rows)
            title = table.caption.split(".")[0].split(":")[0].replace('"', "'")
            body = "\n".join(f"    {line}" for line in f"{_cell(table.caption)}\n\n{text}".splitlines())
            parts.append(f'??? abstract "Table: {title}"\n\n{body}')
    return "\n\n".join(parts)


def _posteriors() -> str:
    record = _record("posteriors")
    methods = list(dict.fromkeys(row["method"] for row in record["rows"]))
    methods.sort(key=lambda name: (name != "ours", name != "NUTS"))
    names = list(dict.fromkeys(row["posterior"] for row in record["rows"]))
    found = {(row["posterior"], row["method"]): row for row in record["rows"]}

    def cell(name, method):
        row = found.get((name, method), {})
        values = [formatted(row, key, form) or "NaN" for key, form in (("mean", ".3f"), ("deviation", ".1%"))]
        return f"{', '.join(values)}, {row['seconds']:.0f} s" if row else ""

    rows = [(name.split("-")[0], *(cell(name, method) for method in methods)) for name in names]
    return f"""# Posteriors

Six posteriors of [posteriordb](https://github.com/stan-dev/posteriordb) with the default settings of `fit_posterior`, against 10,000
reference draws: the worst error of a mean (in reference deviations), the worst relative error of a deviation, and seconds from the model to
10,000 draws, compilation included. Two cores, one seed; NUTS has 5,000 draws, the guides have 5,000 steps of 16 draws.

{markdown_table(("posterior", *methods), rows)}

From `{record["command"]}` (`results/posteriors.json`). The guides' times were taken in another run, while other work was running. On one core
instead of two, `fit_posterior` may be slower than NUTS where most of its time is compilation (eight_schools, sblrc).
"""


def _densities() -> str:
    record = _record("density")
    rows = []
    for row in record["rows"]:
        value = f"{row['test']:.2f} ± {row['error']:.2f}"
        rows.append((row["table"], row["method"], value, f"{row['seconds']:.0f} s"))
    rows.sort(key=lambda row: (row[0], row[1] != "ours"))
    return f"""# Densities

Mean log-likelihood per row on held-out rows (nats, higher is better) with its standard error over the rows, and seconds of the fit.

{markdown_table(("table", "method", "log-likelihood", "time"), rows)}

From `{record["command"]}` (`results/density.json`), one seed; FlowJAX's rows are of an earlier run (8 layers, 8 knots, learning rate 0.001,
patience 5). On POWER splines win. The Lipschitz bound of our default was chosen with these two tables in view; without it the fit would report
a higher likelihood on POWER from a map that folds in 8 % of its cells, which is no likelihood. POWER is an excerpt of 34 days with the columns and the noise of MAF's POWER: it
is not comparable with published results. MINIBOONE is trained on MAF's validation rows and tested on its test rows. "ours" is `fit_density`
with its defaults, which cannot fold; "ours, unbounded" is the same flow without the Lipschitz bound.
"""


def _speed() -> str:
    record = _read(BENCHMARKS / "results.json")
    flow = _read(BENCHMARKS / "flow.json")
    header = ("comparison", "dim", "hidden", "batch", "ratio", "bound")
    rows = []
    for row in flow["rows"]:
        setting = [row.get(name, "") for name in header[1:4]]
        rows.append((row["comparison"], *setting, f"{row['ratio']:.3g}", f"{row['bound']:.3g}"))
    own = f"From `{flow['command']}`: our own rules compared, as ratios of times within one run on one core."
    return "\n\n".join([speed.page(record), "## Rules compared", own, markdown_table(header, rows)])
