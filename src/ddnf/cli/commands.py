"""The `ddnf` command: fits densities to tables in files, draws from them, and scores rows.

A subcommand is a function with `@app.command`: its arguments are the options, its docstring the help.
"""

import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import warnings
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import tyro
from flowjax.bijections import AbstractBijection, Chain, TriangularAffine
from jaxtyping import PRNGKeyArray
from tyro.conf import Positional, arg

from ddnf.density import Density, fit_density
from ddnf.density.columns import Column, Spec
from ddnf.density.tables import WRITERS, Table, as_number, by_ending, open_table, write_table
from ddnf.posterior.fit import Posterior
from ddnf.storage.models import load
from ddnf.system.optional import require
from ddnf.viz.view import frames, page
from ddnf_paper.experiment import Profile

app = tyro.extras.SubcommandApp()


@app.command
def fit(
    data: Positional[Path],
    /,
    *,
    output: Annotated[Path, arg(aliases=["-o"])],
    columns: str | None = None,
    condition: str | None = None,
    support: str | None = None,
    steps: int = 5000,
    batch: int = 256,
    learning_rate: float = 5e-3,
    validation: float = 0.1,
    patience: int = 10,
    seed: int = 0,
    checkpoint: Path | None = None,
    quiet: bool = False,
) -> None:
    """Fits a density to the rows of a table, and writes it to a file.

    Args:
        data: a table: .csv or .tsv (with or without a header), .npy or .parquet.
        output: where to write the model.
        columns: names or numbers (from 0) of columns to take, such as price,age; all but the conditions if left out.
        condition: names or numbers of columns to condition the density on.
        support: where columns live, such as price=positive,age=count,share=0:1; or one for all, such as positive; or
            JSON, such as '{"price": "positive", "share": [0, 1]}'. Known are real, positive, unit, integer, count.
        steps: most training steps.
        batch: rows for each step.
        learning_rate: of Adam, at its height.
        validation: share of the rows to hold out, or their number.
        patience: stop after so many looks at the held-out rows without a better value.
        seed: of the random numbers.
        checkpoint: folder to resume from, should the run be interrupted.
        quiet: show no bar and no summary.
    """
    start = time.perf_counter()
    _check_output(output)
    key = _key(seed)
    table = open_table(data)
    chosen, given = _split(table, columns, condition)
    labels = [table.label(number) for number in chosen]
    supports = _supports(support, table, chosen)
    values = table.read([*chosen, *given])
    try:
        density = fit_density(
            key,
            values[:, : len(chosen)],
            values[:, len(chosen) :] if given else None,
            support=supports,
            names=None if table.names is None else [table.names[number] for number in [*chosen, *given]],
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            validation=int(validation) if validation >= 1 and validation.is_integer() else validation,
            patience=patience,
            checkpoint=checkpoint,
            progress=not quiet,
        )
    except ValueError as error:
        # The library counts the columns of its array; users know those of their file.
        raise ValueError(
            re.sub(r"\bcolumn (\d+)", lambda match: f"column {labels[int(match[1])]!r}", str(error))
        ) from error
    density.save(output)
    if not quiet:
        print(f"rows            {len(values)}")
        print(f"columns         {', '.join(map(str, labels))}")
        if given:
            print(f"given           {', '.join(str(table.label(number)) for number in given)}")
        print(f"log-likelihood  {density.describe_likelihood()}")
        print(f"time            {time.perf_counter() - start:.1f} s")
        print(f"model           {output}")


@app.command
def compare(
    *,
    target: str,
    models: tuple[str, ...] = ("all",),
    layers: tuple[int, ...] = (2,),
    output: Annotated[Path, arg(aliases=["-o"])] = Path("results"),
    dim: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    learning_rate: float | None = None,
    size: int | None = None,
    starts: int | None = None,
    seed: int = 0,
    resume: bool = True,
) -> None:
    """Fits models to one target, or to one table, and shows them side by side.

    Args:
        target: energy1 or energy2 (the paper's), table2 or textbook (the cancer posterior), a table such as data.csv,
            or a log density of your own as file.py:name.
        models: names of models, such as ddnf planar naf; or all.
        layers: numbers of layers, K.
        output: folder for the numbers and the picture.
        dim: dimension of a log density of your own.
        steps: training steps of each fit.
        batch: draws, or rows, for each step.
        learning_rate: of Adam; left out, each model has the one it trains best with.
        size: width of the baselines; left out, each has its own.
        starts: fits of each model from different starts, of which the best counts.
        seed: of the random numbers.
        resume: keep the rows in the folder that were made with the same settings and seed; or begin anew.
    """
    from ddnf_paper import side_by_side

    subject = side_by_side.subject_of(target, dim=dim, seed=seed)
    chosen = dict(steps=steps, batch=batch, learning_rate=learning_rate, size=size, starts=starts)
    settings = dataclasses.replace(subject.settings, **{k: v for k, v in chosen.items() if v is not None})
    side_by_side.compare(subject, models, layers, out=output, settings=settings, seed=seed, resume=resume)


@app.command
def sample(
    model: Positional[Path],
    /,
    *,
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
    rows: Annotated[int, arg(aliases=["-n"])] = 1000,
    condition: str | None = None,
    seed: int = 0,
) -> None:
    """Draws rows from a fitted density.

    Args:
        model: a file that `ddnf fit` has written.
        output: where to write the draws: .csv, .tsv, .npy or .parquet; CSV to the standard output if left out.
        rows: how many.
        condition: what to condition on, a number for each condition: 1.5,2 or year=1.5,size=2.
        seed: of the random numbers.
    """
    _check_output(output, WRITERS)
    density = _density(model)
    given = None if condition is None else _conditions(condition, density)
    draws = density.sample(_key(seed), rows, condition=given)
    write_table(output, np.asarray(draws), density.names and density.names[: density.dim])


@app.command
def score(
    model: Positional[Path], data: Positional[Path], /, *, output: Annotated[Path | None, arg(aliases=["-o"])] = None
) -> None:
    """Computes the log density of the rows of a table, and prints their mean.

    Args:
        model: a file that `ddnf fit` has written.
        data: a table; where it and the model have names, columns are found by name, otherwise by order.
        output: where to write the log density of each row: .csv, .tsv, .npy or .parquet.
    """
    _check_output(output, WRITERS)
    density = _density(model)
    table = open_table(data)
    values = table.read(_places(density, table))
    given = None if density.condition_dim is None else values[:, density.dim :]
    scores = np.asarray(density.log_prob(values[:, : density.dim], given))
    if output is not None:
        write_table(output, scores[:, None], ("log_prob",))
    outside = int(np.sum(np.isneginf(scores)))
    note = f" ({outside} outside of the support)" if outside else ""
    print(f"mean log-likelihood of {len(scores)} rows: {np.mean(scores):.6g}{note}")


@app.command
def view(
    model: Positional[Path],
    /,
    *,
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
    condition: str | None = None,
    columns: str | None = None,
    no_open: bool = False,
) -> None:
    """Makes a page on which a fitted flow can be moved through time, and opens it in the browser.

    Args:
        model: a file with a density or a posterior.
        output: where to write the page; beside the model, ending in .html, if left out.
        condition: what to condition on, a number for each condition: 1.5,2 or year=1.5,size=2.
        columns: names or numbers (from 0) of two or more columns to show; the first six if left out.
        no_open: only write the page.
    """
    output = model.with_suffix(".html") if output is None else output
    _check_output(output)
    fitted = load(model)
    if output.exists() and output.samefile(model):
        raise ValueError(f"Expected another file than the model to write the page to; got {str(output)!r}.")
    flow, labels, given = _shown(fitted, condition)
    dims = None if columns is None else [_column(word, labels) for word in _words(columns)]
    output.write_text(page({model.stem: frames(flow, given, labels=labels, dims=dims)}, model.stem), "utf-8")
    print(f"page            {output}")
    has_display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not no_open and has_display:
        webbrowser.open(output.resolve().as_uri())


@app.command
def reproduce(
    names: Positional[tuple[str, ...]] = ("all",),
    /,
    *,
    profile: Profile = "quick",
    output: Annotated[Path, arg(name="out", aliases=["-o"])] = Path("results"),
    resume: bool = True,
    again: bool = False,
    seed: int = 0,
    models: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    dataset: tuple[str, ...] = (),
    optimizer: Literal["adam", "sgd"] = "adam",
    pixels: Literal["dynamic", "grey"] = "dynamic",
    data: Path | None = None,
) -> None:
    """Runs the paper's experiments: results as JSON, figures drawn from them, and a report.

    Args:
        names: of experiments, or all: accuracy, illustration, toy, posterior, vae, regularization,
            inverse-consistency, open-questions.
        profile: smoke (seconds), quick (minutes) or full (the paper's settings).
        output: folder for results, figures and the report.
        resume: take over the parts in the folder that were made with the same settings and seed; or begin anew.
        seed: of the random numbers.
        again: run these experiments anew, or of their parts those that the options below leave, and keep the rest.
        models: of the auto-encoders, only these, such as plain ddnf+context; without them of the toy energies.
        seeds: of the auto-encoders' runs, only these.
        dataset: of the auto-encoders' images, only these, such as mnist or mnist-2; or another set and dimension of the
            latent space, such as frey-20.
        optimizer: of the auto-encoders.
        pixels: what auto-encoders see of images: lit or not, anew in each epoch of the training, or grey values.
        data: folder with files of images; else that of the variable DDNF_DATA.
    """
    require("matplotlib", "paper")
    from ddnf_paper import reproduce as paper
    from ddnf_paper import toy, vae
    from ddnf_paper.compiling import compile_quickly

    if profile == "smoke":
        compile_quickly()
    _key(seed)
    if data is not None:
        if not data.is_dir():
            raise ValueError(f"Expected a folder with data; got {str(data)!r}.")
        os.environ["DDNF_DATA"] = str(data)
    if "vae" in paper.choose(names):
        wanted = dict(vae=vae.choose(models, seeds, dataset))
    else:
        wanted = dict(toy=toy.choose(models))
    figures = paper.reproduce(
        names,
        output,
        profile=profile,
        seed=seed,
        resume=resume,
        again=again,
        wanted=wanted,
        changes=dict(vae=vae.changes(profile, optimizer=optimizer, pixels=pixels, datasets=dataset)),
    )
    page = paper.report(output)
    print(f"results         {', '.join(str(output / f'{name}.json') for name in figures)}")
    print(f"figures         {', '.join(str(path) for paths in figures.values() for path in paths)}")
    if page is not None:
        print(f"report          {page}")


@app.command
def report(results: Positional[Path], /) -> None:
    """Writes the report on the paper's experiments: one page with all figures, ours beside the paper's numbers.

    Args:
        results: the folder that `ddnf reproduce` has written to.
    """
    from ddnf_paper.report import write

    print(f"report          {write(results)}")


@app.command
def bench(*, quick: bool = False, only: tuple[str, ...] = (), folder: Path | None = None) -> None:
    """Measures the speed beside that of other libraries, in an environment that is built for it: 20 minutes.

    Args:
        quick: fewer sizes and peers: 3 minutes.
        only: some parts of it: steps, densities, growth, compiling, machine, vae, race, posteriors, flow.
        folder: a checkout of the source; found by itself in the working folder, or where ddnf is installed from one.
    """
    places = [Path.cwd(), Path(__file__).parents[3]] if folder is None else [folder]
    found = [place for place in places if (place / "benchmarks" / "__main__.py").exists()]
    if not found:
        raise ValueError(
            f"Expected a checkout of the source, with its folder benchmarks; got {str(places[0])!r}: "
            "run this in one, or name it with --folder."
        )
    words = ["make", "-C", str(found[0]), "bench", f"QUICK={'1' if quick else ''}", f"ONLY={' '.join(only)}"]
    if code := subprocess.run(words, check=False).returncode:
        sys.exit(code)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command. What is wrong with the input is one line on the standard error, and exit code 2.

    Args:
        args: the words after `ddnf`; those of the process if None.
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
        try:
            app.cli(prog="ddnf", description=_DESCRIPTION, args=args, config=_CONFIG)
        except BrokenPipeError:
            # Whoever read our output has seen enough. Python would complain when it closes the stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            _say(f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error))
            sys.exit(2)
        except (ValueError, ImportError) as error:
            _say(str(error))
            sys.exit(2)
        except KeyboardInterrupt:
            _say("interrupted")
            sys.exit(130)


_CONFIG = (tyro.conf.DisallowNone,)
_DESCRIPTION = "Deep diffeomorphic normalizing flows: densities of tables, exact and invertible."


def _check_output(path: Path | None, endings: dict[str, Callable] | None = None) -> None:
    """Before any work is done: whether its result can be written."""
    if path is None:
        return
    if endings is not None:
        by_ending(path, endings)
        if path.suffix.lower() == ".parquet":
            require("pyarrow", "parquet")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"Expected a file in an existing folder to write to; got {str(path)!r}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"Expected a file that may be written; got {str(path)!r}.")


def _density(path: Path) -> Density:
    model = load(path)
    if not isinstance(model, Density):
        raise ValueError(f"Expected a density; got {str(path)!r}, which holds a {type(model).__name__.lower()}.")
    return model


def _shown(model: Posterior | Density, condition: str | None) -> tuple[AbstractBijection, list[str], Any]:
    """The whole flow of a model in unbounded space, the names of its coordinates, and a standardized condition."""
    if isinstance(model, Posterior):
        if condition is not None:
            raise ValueError("Expected no condition for a posterior; got one.")
        return model.flow, [f"z[{i}]" for i in range(model.dim)], None
    given = None if condition is None else _conditions(condition, model)
    if (None if given is None else len(given)) != model.condition_dim:
        raise ValueError(f"Expected {model.condition_dim or 'no'} numbers in --condition; got {len(given or ())}.")
    if given is not None:
        given = (np.array(given) - model.condition_mean) / model.condition_scale
    scaling = TriangularAffine(jnp.asarray(model.mean), jnp.asarray(model.scale))
    names = [f"column {i}" for i in range(model.dim)] if model.names is None else model.names[: model.dim]
    labels = [_unbounded(name, column) for name, column in zip(names, model.columns, strict=True)]
    return Chain([model.flow, scaling]), labels, given


def _unbounded(name: str, column: Column) -> str:
    """The name of a column where it has no bounds."""
    if column.low is not None and column.high is not None:
        return f"logit {name}"
    return name if column.low is None and column.high is None else f"log {name}"


def _column(word: str, labels: list[str]) -> int:
    """The number of a column, by its number or name; a name may follow what was done to it, as in "log price"."""
    found = [i for i, label in enumerate(labels) if word in (label, label.partition(" ")[2], str(i))]
    if not found:
        raise ValueError(f"Expected columns of the model ({', '.join(labels)[:200]}); got {word!r}.")
    return found[0]


def _key(seed: int) -> PRNGKeyArray:
    if not 0 <= seed < 2**32:
        raise ValueError(f"Expected a seed from 0 to {2**32 - 1}; got {seed}.")
    return jr.key(seed)


def _words(text: str) -> list[str]:
    """Words between commas; a comma within quotes is part of a word."""
    return [word.strip() for word in next(csv.reader([text], skipinitialspace=True), [])]


def _number(word: str, table: Table) -> int:
    """The number of a column, by its name or number."""
    if table.names is not None and word in table.names:
        return table.names.index(word)
    if word.isdecimal() and int(word) < table.width:
        return int(word)
    known = f"numbers from 0 to {table.width - 1}" if table.names is None else ", ".join(table.names)
    raise ValueError(f"Expected columns of {str(table.path)!r} ({known[:200]}); got {word!r}.")


def _split(table: Table, columns: str | None, condition: str | None) -> tuple[list[int], list[int]]:
    """The numbers of the columns to model, and of those to condition on."""
    given = [] if condition is None else [_number(word, table) for word in _words(condition)]
    if columns is None:
        chosen = [number for number in range(table.width) if number not in given]
    else:
        chosen = [_number(word, table) for word in _words(columns)]
    if not chosen or len({*chosen, *given}) < len(chosen) + len(given):
        raise ValueError("Expected at least one column, and none both in --columns and --condition or twice.")
    return chosen, given


def _supports(text: str | None, table: Table, chosen: list[int]) -> Spec | list[Spec] | dict[int, Spec] | None:
    """What `fit_density` takes for support, from what a user has written."""
    if text is None:
        return None
    if text.lstrip().startswith(("{", "[")):
        try:
            parts = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"Expected JSON for the support; got {text!r}: {error}.") from error
        if isinstance(parts, list):
            return [_spec(part) for part in parts]
    elif "=" not in text:
        return _spec(text)
    else:
        parts = {name: part for name, _, part in (word.partition("=") for word in _words(text))}
    places = {}
    for word, part in parts.items():
        number = _number(word.strip(), table)
        if number not in chosen:
            raise ValueError(f"Expected the support of columns that are modelled; got {word!r}, which is not.")
        places[chosen.index(number)] = _spec(part)
    return places


def _spec(part: Any) -> Any:
    """A support: a name, low:high, or what JSON has for an interval. `fit_density` speaks up if it is none."""
    if isinstance(part, list):
        return tuple(part)
    if isinstance(part, str) and ":" in part:
        low, _, high = part.partition(":")
        return _end(low), _end(high)
    return part.strip() if isinstance(part, str) else part


def _end(text: str) -> float | None:
    if text.strip() and as_number(text) is None:
        raise ValueError(f"Expected numbers as the ends of an interval; got {text!r}.")
    return as_number(text)


def _places(density: Density, table: Table) -> list[int]:
    """The numbers of a table's columns that a density is of, and then of those it is conditioned on."""
    if density.names is not None and table.names is not None:
        missing = [name for name in density.names if name not in table.names]
        if missing:
            raise ValueError(f"Expected a column {missing[0]!r} in {str(table.path)!r}; got {', '.join(table.names)}.")
        return [table.names.index(name) for name in density.names]
    wanted = density.dim + (density.condition_dim or 0)
    if table.width != wanted:
        raise ValueError(f"Expected {wanted} columns in {str(table.path)!r}; got {table.width}.")
    return list(range(wanted))


def _conditions(text: str, density: Density) -> list[float]:
    """The numbers to condition on, in the order of the density."""
    words = _words(text)
    names = [] if density.names is None else [*density.names[density.dim :]]
    if all("=" in word for word in words):
        parts = {name.strip(): number for name, _, number in (word.partition("=") for word in words)}
        if sorted(parts) != sorted(names):
            known = ", ".join(names) or "none has a name"
            raise ValueError(f"Expected a value for each condition ({known}); got {text!r}.")
        words = [parts[name] for name in names]
    numbers = [as_number(word) for word in words]
    if not all(number is not None and np.isfinite(number) for number in numbers):
        raise ValueError(f"Expected finite numbers to condition on; got {text!r}.")
    return [number for number in numbers if number is not None]


def _say(text: str) -> None:
    """One line on the standard error, whatever was in the text."""
    print(f"ddnf: {' '.join(text.split())}", file=sys.stderr)
