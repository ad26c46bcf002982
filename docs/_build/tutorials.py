"""Tutorials: Python scripts with Markdown in their comments, executed cell by cell.

A script consists of cells. ``# %% [markdown]`` starts text (commented lines), ``# %%`` code, and ``# %% [hidden]`` code
that is run and not shown: the flags for sizes. A page shows the code with what it prints and draws.

    python docs/_build/tutorials.py docs/tutorials/table_density.py OUT_FOLDER
"""

import ast
import contextlib
import hashlib
import io
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
# MkDocs shows what its loggers say.
_LOG = logging.getLogger("mkdocs.tutorials")
_UNDATED: dict[str, Any] = {"metadata": {"Date": None}}


class Cell(NamedTuple):
    """A part of a script: "markdown", "code" or "hidden"."""

    kind: str
    text: str


def cells(source: str) -> list[Cell]:
    """Splits a script at its ``# %%`` lines.

    Example:
        >>> cells("# %% [markdown]\\n# Text\\n# %%\\n1 + 1")
        [Cell(kind='markdown', text='Text'), Cell(kind='code', text='1 + 1')]
    """
    found: list[Cell] = []
    for part in ("\n" + source).split("\n# %%")[1:]:
        head, _, body = part.partition("\n")
        kind = head.strip().strip("[]") or "code"
        if kind == "markdown":
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
        found.append(Cell(kind, body.strip("\n")))
    return found


def scripts(docs: Path) -> list[Path]:
    """The scripts that become pages."""
    return sorted([*(docs / "tutorials").glob("*.py"), *(docs / "guides").glob("*.py")])


def render_all(docs: Path, cache: Path) -> list[tuple[Path, str]]:
    """The pages of all scripts with their folders, one per core; those that have not changed come from the cache."""
    render_one = _unexecuted if os.environ.get("DDNF_DOCS_TUTORIALS") == "skip" else _executed
    with ThreadPoolExecutor(_cores()) as pool:
        pages = pool.map(lambda script: render_one(script, cache), scripts(docs))
        return [(page, script.parent.name) for page, script in zip(pages, scripts(docs), strict=True)]


def _cores() -> int:
    """Cores that this process may use; two at most, since each script uses several threads."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, 2)


def _executed(script: Path, cache: Path) -> Path:
    page = cache / _digest(script) / f"{script.stem}.md"
    if not page.exists():
        start = time.perf_counter()
        page.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "agg"}
        command = [sys.executable, __file__, str(script), str(page.parent)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{script.name} failed:\n{done.stderr[-3000:]}")
        seconds = time.perf_counter() - start
        _LOG.info("%s executed in %.0f s (processor time %s s)", script.name, seconds, done.stdout.split()[-1])
    return page


def _unexecuted(script: Path, cache: Path) -> Path:
    """The page without outputs, for a quick look at the rest of the site."""
    page = cache / "unexecuted" / f"{script.stem}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    shown = {"markdown": "{}", "code": "```python\n{}\n```"}
    parts = [shown[cell.kind].format(cell.text) for cell in cells(script.read_text("utf-8")) if cell.kind in shown]
    page.write_text("\n\n".join(parts) + "\n", "utf-8")
    return page


def _digest(script: Path) -> str:
    """Changes with the script, this file and the library."""
    hashed = hashlib.sha256()
    for path in (script, Path(__file__), *sorted((ROOT / "src" / "ddnf").rglob("*.py"))):
        hashed.update(path.read_bytes())
    return f"{script.stem}-{hashed.hexdigest()[:12]}"


def render(script: Path, out: Path) -> None:
    """Runs a script and writes its page and pictures."""
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    sys.argv = [str(script)]
    text = []
    for number, cell in enumerate(cells(script.read_text("utf-8"))):
        if cell.kind == "markdown":
            text.append(cell.text)
            continue
        printed, drawn = _run(cell.text, namespace, out / f"{script.stem}-{number}", str(script))
        if cell.kind == "hidden":
            continue
        text.append(f"```python\n{_with_values(cell.text, namespace)}\n```")
        if printed.strip():
            text.append(f"```text\n{_wrapped(printed.rstrip())}\n```")
        text += [f"![{script.stem.replace('_', ' ')}, figure]({name})" for name in drawn]
    source = f"docs/{script.parent.name}/{script.name}"
    text.append(f"---\n\nThis page is the output of `{source}`, executed when the site was built.")
    (out / f"{script.stem}.md").write_text("\n\n".join(text) + "\n", "utf-8")


def _with_values(code: str, namespace: dict[str, Any]) -> str:
    """The code with the values of its flags, `options.steps`, which only the hidden cell defines."""
    return re.sub(r"\boptions\.(\w+)", lambda match: repr(getattr(namespace["options"], match[1])), code)


def _wrapped(printed: str) -> str:
    """Long lines, such as warnings, wrapped to the width of a page."""
    return "\n".join(
        fill(line, 96, subsequent_indent="    ") if len(line) > 96 else line for line in printed.split("\n")
    )


def _run(code: str, namespace: dict[str, Any], stem: Path, name: str) -> tuple[str, list[str]]:
    """Runs a cell; returns what it printed, with the value of a last expression, and the names of its pictures."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        # Warnings of the library are part of the output; others are not the reader's business.
        warnings.showwarning = _print_warning
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None and not _is_drawing(value):
                print(value)
    return printed.getvalue(), _save_figures(stem)


def _is_drawing(value: Any) -> bool:
    """Whether a value is what a plotting function returns."""
    first = value[0] if isinstance(value, list | tuple) and len(value) else value
    first = first.flat[0] if isinstance(first, np.ndarray) and first.dtype == object and first.size else first
    return type(first).__module__.startswith(("matplotlib", "arviz"))


def _print_warning(message, category, *_) -> None:
    if issubclass(category, RuntimeWarning):
        print(f"{category.__name__}: {message}")


def _save_figures(stem: Path) -> list[str]:
    import matplotlib.pyplot as plt

    names = []
    for number in plt.get_fignums():
        figure = plt.figure(number)
        # Lines are SVG, which dark mode inverts; images keep their colours.
        kind, options = ("png", {"dpi": 150}) if any(axes.images for axes in figure.axes) else ("svg", _UNDATED)
        path = stem.with_name(f"{stem.name}-{number}.{kind}")
        figure.savefig(path, bbox_inches="tight", **options)
        names.append(path.name)
    plt.close("all")
    return names


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "ddnf"
    render(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{time.process_time():.0f}")
