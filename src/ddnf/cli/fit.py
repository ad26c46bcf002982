"""`ddnf fit`: fits a table and writes a model file."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import OmitArgPrefixes, Positional

from ddnf.cli.options import Output, check_output, key_from_seed, parse_support, read_values, split_columns
from ddnf.density import fit_density
from ddnf.density.disk import DiskTable
from ddnf.density.lines import Format
from ddnf.density.tables import Table, open_table
from ddnf.storage.file import is_model
from ddnf.training import initialize, is_first


def fit(
    data: Positional[Path],
    /,
    *,
    output: Output,
    columns: str | None = None,
    condition: str | None = None,
    support: str | None = None,
    drop_missing: bool = False,
    reading: OmitArgPrefixes[Format] = Format(),  # noqa: B008
    steps: int | None = None,
    batch: int = 256,
    learning_rate: float | None = None,
    validation: float = 0.1,
    patience: int = 10,
    seed: int = 0,
    checkpoint: Path | None = None,
    distributed: bool = False,
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    quiet: bool = False,
    force: bool = False,
) -> None:
    """Fits a density to the rows of a table, and writes it to a model file.

    Args:
        data: a table: .csv or .tsv (with or without a header, or compressed as .csv.gz), .xlsx, .npy, .parquet, or a
            folder of .parquet files. Columns can hold numbers, text, booleans (true, false) and dates (2020-12-31).
            .npy and .parquet files larger than 128 MB are not read into memory.
        output: the model file to write; an existing model is replaced.
        columns: names or numbers (from 0) of the columns to model, such as price,age; by default, all columns except
            the conditions.
        condition: names or numbers of the columns to condition on.
        support: values that the columns can take: real, positive, unit, integer, count, or low:high. Give one for all
            columns (positive), one per column (price=positive,age=count,share=0:1), or JSON, such as
            '{"price": "positive", "share": [0, 1]}'.
        drop_missing: drop rows with empty cells, NA, NaN or null.
        reading: format of the values in the file.
        steps: maximum number of training steps; by default 2,000 to 5,000, depending on the number of rows.
        batch: rows per step.
        learning_rate: peak learning rate of Adam; by default 5e-3, or 2e-3 for more than 16 columns.
        validation: share or number of rows to hold out.
        patience: stop after this many evaluations on the held-out rows without improvement.
        seed: random seed.
        checkpoint: folder for checkpoints, which go to its subfolder ddnf-checkpoints. An interrupted run resumes from
            there.
        distributed: share the work with other processes that run the same command, on this or other machines. Under
            Slurm, Kubernetes and Open MPI, the processes find each other; otherwise set the next three options. The
            first process writes the model.
        coordinator: address and port of the first process, such as 10.0.0.1:1234.
        processes: number of processes.
        rank: number of this process, from 0.
        quiet: print no progress bar and no summary.
        force: overwrite the output even if it is not a model.
    """
    start = time.perf_counter()
    if distributed:
        initialize(coordinator, processes, rank)
    elif (coordinator, processes, rank) != (None, None, None):
        raise ValueError("Expected --distributed with --coordinator, --processes and --rank; got these without it.")
    quiet = quiet or not is_first()
    check_output(output, force=force, kind="a ddnf model", is_ours=is_model)
    key = key_from_seed(seed)
    table = open_table(data, reading)
    modelled, conditions = split_columns(table, columns, condition)
    labels = [table.label(number) for number in modelled]
    supports = parse_support(support, table, modelled)
    missing = "drop" if drop_missing else "raise"
    x, given = _values(table, modelled, conditions, missing, progress=not quiet)
    chosen = [*modelled, *conditions]
    is_plain = table.names is None and chosen == list(range(table.width))
    has_names = isinstance(x, dict) or (isinstance(x, DiskTable) and table.names is not None)
    try:
        density = fit_density(
            key,
            x,
            given,
            support=supports,
            names=None if is_plain or has_names else [table.name(number) for number in chosen],
            missing=missing,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            validation=int(validation) if validation >= 1 and validation.is_integer() else validation,
            patience=patience,
            checkpoint=checkpoint,
            devices="all" if distributed else None,
            progress=not quiet,
        )
    except ValueError as error:
        raise ValueError(_with_labels(str(error), labels)) from error
    if is_first():
        density.save(output, overwrite=force)
    if not quiet:
        dropped = f", {density.dropped_rows} dropped with missing values" if density.dropped_rows else ""
        print(f"rows            {density.train_rows + density.held_out_rows}{dropped}")
        print(f"columns         {', '.join(map(str, labels))}")
        if conditions:
            print(f"given           {', '.join(str(table.label(number)) for number in conditions)}")
        print(f"log-likelihood  {density.describe_likelihood()}")
        print(f"time            {time.perf_counter() - start:.1f} s")
        print(f"model           {output}")


def _values(
    table: Table, modelled: list[int], conditions: list[int], missing: str, *, progress: bool
) -> tuple[Any, Any]:
    """Arrays if all columns hold numbers, otherwise dicts of columns; a large table of numbers stays on disk."""
    disk = None if table.disk is None else table.disk(modelled, conditions)
    if disk is not None and not disk.is_small:
        return disk, None
    keep = "keep" if missing == "drop" else "raise"
    both = read_values(table, [*modelled, *conditions], missing=keep, progress=progress)
    chosen = [dict(list(both.items())[: len(modelled)]), dict(list(both.items())[len(modelled) :])]
    if all(column.dtype.kind == "f" for column in both.values()):
        chosen = [np.stack(list(part.values()), axis=1) if part else None for part in chosen]
    return chosen[0], chosen[1] if conditions else None


def _with_labels(message: str, labels: list[str | int]) -> str:
    # The library numbers the columns of its array; users know those of their file.
    message = message.replace("missing='drop'", "--drop-missing")
    message = re.sub(r"(?<!')\bcolumn (\d+)", lambda match: f"column {labels[int(match[1])]!r}", message)
    return re.sub(r"column 'column (\d+)'", r"column \1", message)
