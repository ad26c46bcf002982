"""The reference: one page per topic with every public name, and the help of every command."""

import os
import subprocess
import sys
from functools import lru_cache

import ddnf
from ddnf import flows

# Topics of the names in `ddnf.__all__`; a test checks that every name has one.
TOPICS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "flow": (
        "Flow",
        "The bijection, its fields, solvers, log-determinant rules, regularizers and certificate.",
        (
            "DDNF",
            "MLPField",
            "ScalingField",
            "Path",
            "euler",
            "midpoint",
            "rk4",
            "LogDet",
            "Exact",
            "Taylor",
            "PrintedTaylor",
            "Divergence",
            "Unbiased",
            "with_key",
            "certify",
            "Certificate",
            "geodesic",
            "sobolev",
            "inverse_consistency",
        ),
    ),
    "posterior": (
        "Posterior",
        "From a model to a fitted posterior.",
        ("fit_posterior", "fit_posteriors", "Posterior", "Target", "from_numpyro", "from_pymc", "cache_compilation"),
    ),
    "density": ("Density", "Densities of tables, and model files.", ("fit_density", "Density", "load", "initialize")),
    "vae": ("Auto-encoder", "Auto-encoders with any flow.", ("VAE", "fit_vae", "judge_vae")),
}
COMMANDS = ("fit", "sample", "score", "show", "view", "compare", "reproduce", "report", "bench")


def pages() -> dict[str, str]:
    """The pages by their paths."""
    made = {f"reference/{slug}.md": _page(title, about, names) for slug, (title, about, names) in topics().items()}
    made["reference/flows.md"] = _page(
        "Other flows",
        "Flows of the literature as FlowJAX bijections; `ddnf.flows.make` builds any of them by name.",
        [name for name in flows.__all__ if name != "BASELINES"],
        "ddnf.flows",
    )
    made["reference/commands.md"] = _commands()
    made["reference/index.md"] = _index()
    return made


def topics() -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """The topics, with names that have none yet under the first."""
    placed = {name for _, _, names in TOPICS.values() for name in names}
    new = tuple(name for name in ddnf.__all__ if name not in placed)
    title, about, names = TOPICS["flow"]
    return TOPICS | {"flow": (title, about, (*names, *new))}


def _page(title: str, about: str, names, package: str = "ddnf") -> str:
    return "\n\n".join([f"# {title}", about, *(f"::: {package}.{name}" for name in names)])


def _index() -> str:
    lines = ["# Reference", "Every public name, made from the docstrings.", ""]
    for slug, (title, about, names) in topics().items():
        links = ", ".join(f"[`{name}`]({slug}.md#ddnf.{name})" for name in names)
        lines += [f"**[{title}]({slug}.md)**: {about}", "", links, ""]
    lines += ["**[Other flows](flows.md)**: `ddnf.flows`.", "", "**[Commands](commands.md)**: `ddnf`.", ""]
    return "\n".join(lines)


def _commands() -> str:
    parts = ["# Commands", "The help of the `ddnf` command and of its subcommands."]
    for words in ([], *([name] for name in COMMANDS)):
        title = " ".join(["ddnf", *words])
        parts += [f"## {title}", f"```text\n{_help(*words)}\n```"]
    return "\n\n".join(parts)


@lru_cache
def _help(*words: str) -> str:
    environment = os.environ | {"COLUMNS": "88", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "ddnf", *words, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.rstrip()
