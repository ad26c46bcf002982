"""Rows on disk: the same fit as in memory where they fit, a shuffled stream where they do not, and clear errors."""

from pathlib import Path

import jax.random as jr
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ddnf import cli, fit_density
from ddnf.density import default_flow, disk, open_rows, stream

RNG = np.random.default_rng(0)
ROWS = RNG.multivariate_normal([1.0, -2.0], [[2.0, 1.0], [1.0, 1.0]], size=6000)
QUICK = dict(adaptive=True, components=1, steps=100, progress=False)


def flow(condition_dim=None):
    return default_flow(jr.key(1), 2, condition_dim, blocks=1, steps=1, hidden=(4,))


def write(folder: Path, rows=ROWS, names=("a", "b"), files=3, group=500):
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(np.array_split(rows, files)):
        table = pa.table(dict(zip(names, part.T.copy(), strict=True)))
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)
    return folder


@pytest.fixture
def on_disk(monkeypatch):
    """No table is small enough for memory; windows hold three blocks of 500 rows."""
    monkeypatch.setattr(disk, "IN_MEMORY", 0)
    monkeypatch.setattr(disk, "BLOCK", 500)
    monkeypatch.setattr(stream, "WINDOW", 2 * 8 * 1500)


def test_small_tables_are_fitted_as_in_memory(tmp_path):
    np.save(tmp_path / "a.npy", ROWS[:200])
    expected = fit_density(jr.key(0), ROWS[:200], flow=flow(), **QUICK).log_prob(ROWS[:5])
    for x in (tmp_path / "a.npy", str(tmp_path / "a.npy"), np.load(tmp_path / "a.npy", mmap_mode="r")):
        assert_array_equal(fit_density(jr.key(0), x, flow=flow(), **QUICK).log_prob(ROWS[:5]), expected)
    folder = write(tmp_path / "files", ROWS[:200])
    fitted = fit_density(jr.key(0), folder, flow=flow(), **QUICK)
    assert_array_equal(fitted.log_prob({"a": ROWS[:5, 0], "b": ROWS[:5, 1]}), expected)


@pytest.mark.parametrize("kind", ["map", "folder", "dataset"])
def test_streamed_rows_are_fitted_as_well(tmp_path, on_disk, kind):
    np.save(tmp_path / "a.npy", ROWS)
    x = tmp_path / "a.npy" if kind == "map" else write(tmp_path / "files")
    x = ds.dataset(x) if kind == "dataset" else x
    fitted = fit_density(jr.key(0), x, flow=flow(), validation=600, **QUICK)
    assert (fitted.train_rows, fitted.held_out_rows) == (5400, 600)
    entropy = np.log(2 * np.pi * np.e) + np.log(np.linalg.det([[2.0, 1.0], [1.0, 1.0]])) / 2
    assert abs(fitted.log_likelihood + entropy) < 3 * fitted.log_likelihood_error


def test_conditions_on_disk(tmp_path, on_disk):
    np.save(tmp_path / "x.npy", ROWS)
    np.save(tmp_path / "y.npy", ROWS.sum(axis=1, keepdims=True))
    folder = write(tmp_path / "files", np.c_[ROWS, ROWS.sum(axis=1)], ("a", "b", "c"))
    options = dict(flow=flow(1), **QUICK | dict(steps=2))
    arrays = fit_density(jr.key(0), tmp_path / "x.npy", tmp_path / "y.npy", **options)
    named = fit_density(jr.key(0), folder, ["c"], **options)
    assert named.names == ("a", "b", "c") and arrays.condition_dim == named.condition_dim == 1


def test_every_training_row_once_an_epoch(tmp_path, on_disk):
    table = open_rows(write(tmp_path / "files"))
    found = stream.survey(np.random.default_rng(0), table, 1000, missing="raise")
    rows = stream.training_stream(0, table, found, np.arange(100), lambda x, _: (x["a"],), missing="raise", width=8 * 2)
    assert rows.count == 5900
    epochs = [
        np.concatenate([rows.take(first, 100)[0] for first in range(e * 5900, (e + 1) * 5900, 100)]) for e in (0, 1)
    ]
    expected = np.sort(np.setdiff1d(ROWS[:, 0], found.x["a"][:100]))
    for epoch in epochs:
        assert_array_equal(np.sort(epoch), expected)
    assert not np.array_equal(*epochs)
    # Where training resumes does not matter, and neighbours in the file are apart.
    assert_array_equal(rows.take(5850, 100)[0], np.r_[epochs[0][-50:], epochs[1][:50]])
    number = {value: i for i, value in enumerate(ROWS[:, 0])}
    apart = np.abs(np.diff([number[value] for value in epochs[0]]))
    assert np.median(apart) > 400


def test_processes_share_the_blocks(tmp_path, on_disk):
    table = open_rows(write(tmp_path / "files"))
    found = stream.survey(np.random.default_rng(0), table, 10, missing="raise")
    rows = stream.training_stream(0, table, found, np.arange(0), lambda x, _: (x["a"],), missing="raise", width=16)
    parts = [rows.part(rank, 2) for rank in range(2)]
    together = np.concatenate([part.take(0, part.count)[0] for part in parts])
    assert_array_equal(np.sort(together), np.sort(ROWS[:, 0]))
    with pytest.raises(ValueError, match="a block of rows for each of 100 processes; got 12"):
        rows.part(0, 100)


def test_sample_is_uniform(tmp_path, on_disk):
    values = np.arange(6000.0)
    table = open_rows(write(tmp_path / "files", values[:, None], ("a",)))
    means = [stream.survey(np.random.default_rng(s), table, 100, missing="raise").x["a"].mean() for s in range(50)]
    error = values.std() / np.sqrt(100 * 50)
    assert abs(np.mean(means) - values.mean()) < 4 * error
    assert_allclose(np.std(means), values.std() / 10, rtol=0.4)


def test_missing_values_are_dropped(tmp_path, on_disk):
    rows = ROWS.copy()
    rows[::100, 0] = np.nan
    folder = write(tmp_path / "files", rows)
    fitted = fit_density(jr.key(0), folder, flow=flow(), missing="drop", validation=100, **QUICK | dict(steps=2))
    assert (fitted.dropped_rows, fitted.train_rows) == (60, 5840)
    with pytest.raises(ValueError, match=r"Expected finite values; got NaN or infinity in column 'a'\."):
        fit_density(jr.key(0), folder, flow=flow(), **QUICK)


def test_a_rare_value_outside_of_the_support(tmp_path, on_disk):
    rows = np.abs(ROWS)
    rows[4321, 1] = -1.0
    with pytest.raises(ValueError, match="Expected x in its support; column 'b' has values outside of"):
        fit_density(jr.key(0), write(tmp_path / "files", rows), flow=flow(), support="positive", **QUICK)


def test_files_that_disagree_on_columns(tmp_path):
    folder = write(tmp_path / "files")
    write(folder / "more", names=("a", "c"), files=1)
    with pytest.raises(ValueError, match=r"Expected files with the same columns; .*0.parquet' differs .* in 'b'\."):
        fit_density(jr.key(0), folder)


def test_empty_files(tmp_path):
    folder = write(tmp_path / "files")
    pq.write_table(pa.table({"a": np.zeros(0), "b": np.zeros(0)}), folder / "none.parquet")
    assert sum(open_rows(folder).sizes) == len(ROWS)  # a Parquet file without rows adds none
    (folder / "zero.parquet").touch()
    with pytest.raises(ValueError, match=r"Expected Parquet files; got .*zero.parquet', which is empty"):
        open_rows(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.parquet", "is not there"),
        ("a.csv", r"Expected a \.npy or \.parquet file"),
        ("empty", r"Expected \.parquet files in the folder"),
        ("part.parquet", "got something else, or part of one"),
    ],
)
def test_bad_paths(tmp_path, name, message):
    (tmp_path / "a.csv").write_text("1,2\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "part.parquet").write_bytes((write(tmp_path / "files") / "0.parquet").read_bytes()[:-40])
    with pytest.raises(ValueError, match=message) as caught:
        fit_density(jr.key(0), tmp_path / name)
    assert "\n" not in str(caught.value)


def test_row_groups_that_are_too_large(tmp_path, on_disk, monkeypatch):
    monkeypatch.setattr(disk, "LARGEST_BLOCK", 1600)
    with pytest.raises(
        ValueError, match=r"Expected row groups of at most 100 rows, .*; got 500. Write the files again"
    ):
        open_rows(write(tmp_path / "files"))


def test_text_is_read_into_memory(tmp_path, on_disk):
    pq.write_table(pa.table({"a": ROWS[:20, 0], "kind": ["x", "y"] * 10}), tmp_path / "a.parquet")
    assert open_rows(tmp_path / "a.parquet").is_small


@pytest.mark.slow
def test_fit_command_takes_a_folder(tmp_path, on_disk, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "files", np.c_[ROWS, ROWS[:, 0] + RNG.normal(size=len(ROWS))], ("a", "b", "c"))
    cli.main(["fit", "files", "-o", "m.ddnf", "--columns", "c,a", "--condition", "b", "--steps", "2"])
    assert "rows            6000\ncolumns         c, a\ngiven           b" in capsys.readouterr().out
    np.save("a.npy", ROWS)
    cli.main(["fit", "a.npy", "-o", "m.ddnf", "--columns", "1", "--steps", "2"])
    assert "rows            6000\ncolumns         1" in capsys.readouterr().out
