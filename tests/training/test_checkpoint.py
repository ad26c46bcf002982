"""Checkpoints remove what they wrote, and nothing else."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from numpy.testing import assert_array_equal

from ddnf.training.checkpoint import SUBFOLDER, Checkpoints, remove_checkpoints
from tests.bystanders import plant, snapshot

STATE = dict(x=jnp.arange(3.0))


def save(folder: Path, numbers=(1, 2, 3, 4), run="run") -> None:
    checkpoints = Checkpoints(folder, 0.0, run)
    for number in numbers:
        checkpoints.save(dict(x=STATE["x"] * number), number, last=True)


def numbers(folder: Path) -> set[str]:
    return {path.name for path in (folder / SUBFOLDER).iterdir() if path.is_dir()}


@pytest.mark.parametrize("name", ["thesis", "photos", "2022", "1", "3", "1.orbax-checkpoint-tmp-7", "2.old", "run.txt"])
def test_neighbours_of_the_subfolder_stay(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "chapter.txt").write_text("mine")
    before = snapshot(tmp_path)
    save(tmp_path)
    assert numbers(tmp_path) == {"3", "4"}
    assert_array_equal(Checkpoints(tmp_path, 0.0, "run").restore(STATE)["x"], 4 * STATE["x"])
    remove_checkpoints(tmp_path)
    assert snapshot(tmp_path) == before


def test_strangers_inside_stay(tmp_path):
    """Folders with names like ours, links, and files beside a state."""
    save(tmp_path, [5, 6])
    ours = tmp_path / SUBFOLDER
    before = plant(ours / "2022", seed=1) | plant(ours / "photos", seed=2) | plant(ours / "5" / "notes", seed=3)
    (ours / "2021").symlink_to(tmp_path)
    save(tmp_path, [7, 8, 9])
    assert numbers(tmp_path) >= {"8", "9", "2022"} and not (ours / "6").exists()
    assert_array_equal(Checkpoints(tmp_path, 0.0, "run").restore(STATE)["x"], 9 * STATE["x"])
    remove_checkpoints(tmp_path)
    assert {path: path.read_bytes() for path in before} == before and (ours / "2021").is_symlink()


@pytest.mark.parametrize("name", ["photo.jpg", "ddnf-checkpoint.json"])
def test_foreign_subfolder_is_refused(tmp_path, name):
    (tmp_path / SUBFOLDER / "1").mkdir(parents=True)
    (tmp_path / SUBFOLDER / name).write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="Expected") as raised:
        save(tmp_path)
    assert "\n" not in str(raised.value) and SUBFOLDER in str(raised.value)
    remove_checkpoints(tmp_path)
    assert snapshot(tmp_path) == before


def test_leftovers_of_a_killed_run_go(tmp_path):
    save(tmp_path, [1, 2])
    ours = tmp_path / SUBFOLDER
    (ours / "2" / "state").rename(ours / "2" / "state.orbax-checkpoint-tmp-1")  # killed while writing
    (ours / ".ddnf-0123456789abcdef.tmp").write_text("")
    save(tmp_path, [])
    assert numbers(tmp_path) == {"1"}
    (ours / "3").mkdir()  # killed before the marker was written
    save(tmp_path, [3])
    assert numbers(tmp_path) == {"1", "3"}


def test_other_runs_do_not_resume(tmp_path):
    save(tmp_path)
    with pytest.raises(ValueError, match="of this run"):
        save(tmp_path, run="another")
    (tmp_path / SUBFOLDER / "ddnf-checkpoint.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="of this run"):
        save(tmp_path)


def test_removes_nothing_where_there_is_nothing(tmp_path):
    remove_checkpoints(tmp_path / "missing")
    (tmp_path / "file").write_text("mine")
    remove_checkpoints(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
