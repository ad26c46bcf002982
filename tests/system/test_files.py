"""Files are written whole or not at all, and nothing that is not ours is replaced."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import ddnf.storage.file as models
from ddnf.density.tables import write_table
from ddnf.system.files import check_overwrite, claim_folder, open_atomic, write_atomic
from tests.bystanders import snapshot

ROWS = np.arange(20_000.0).reshape(-1, 2)
# Each way to write a file of ours.
WRITERS = {
    "text": lambda path: write_atomic(path, "text"),
    "model": lambda path: models.write(path, "new", {}, {"x": ROWS}, overwrite=True),
    **{
        f"table{ending}": lambda path, ending=ending: write_table(
            path.with_suffix(ending), ROWS, ("a", "b"), overwrite=True
        )
        for ending in (".csv", ".tsv", ".npy", ".parquet")
    },
}


def _fail(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize("place", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("name", WRITERS)
def test_a_failed_write_changes_nothing(name, place, error, tmp_path, monkeypatch):
    path = tmp_path / "a"
    for ending in ("", ".csv", ".tsv", ".npy", ".parquet"):
        path.with_suffix(ending).write_text("old")
    before = snapshot(tmp_path)
    monkeypatch.setattr(os, place, _fail(error))
    with pytest.raises(type(error)) as raised:
        WRITERS[name](path)
    assert snapshot(tmp_path) == before
    if isinstance(error, OSError):
        assert "Could not write the file: No space left" in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_nothing(name, tmp_path, monkeypatch):
    """The disk is full after some thousand bytes."""

    def opened(path, mode):
        file = open(path, mode)  # noqa: SIM115
        return _Limited(file)

    monkeypatch.setattr("ddnf.system.files.open", opened, raising=False)
    if name == "text":
        with pytest.raises(OSError, match="No space left"):
            write_atomic(tmp_path / "a", "x" * 100_000)
    else:
        with pytest.raises(OSError, match="No space left"):
            WRITERS[name](tmp_path / "a")
    assert not list(tmp_path.iterdir())


class _Limited:
    """A file on a disk with room for 5,000 bytes."""

    def __init__(self, file):
        self.file, self.left = file, 5000

    def write(self, data):
        self.left -= len(data)
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def test_write_where_one_cannot(tmp_path):
    (tmp_path / "file").write_text("text")
    for path, error in [
        (tmp_path / "missing" / "a.ddnf", FileNotFoundError),
        (tmp_path / "file" / "a.ddnf", NotADirectoryError),
        (tmp_path, IsADirectoryError),
        (os.devnull, OSError),
    ]:
        with pytest.raises(error) as raised:
            write_atomic(path, "")
        assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_links_and_permissions_stay(tmp_path):
    (tmp_path / "plain").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomic(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "one"
    assert (tmp_path / "real").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "real").chmod(0o600)
    write_atomic(tmp_path / "link", "two")
    assert (tmp_path / "real").read_text() == "two" and (tmp_path / "real").stat().st_mode & 0o777 == 0o600


def test_what_is_written_appears_at_the_end(tmp_path):
    path = tmp_path / "a"
    with open_atomic(path) as file:
        file.write(b"text")
        assert not path.exists()
    assert path.read_text() == "text"


def test_check_overwrite(tmp_path):
    file = tmp_path / "a"
    check_overwrite(file)
    file.write_text("mine")
    check_overwrite(file, kind="a note", is_ours=lambda path: path.read_text() == "mine")
    with pytest.raises(ValueError, match=r"a new file, or a note to replace; .* is neither"):
        check_overwrite(file, kind="a note", is_ours=lambda _: False)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(ValueError, match="exists"):
        check_overwrite(tmp_path / "link")


def test_foreign_folders_are_not_claimed(tmp_path):
    assert claim_folder(tmp_path / "a" / "b", "marker", "1") == "1"
    assert claim_folder(tmp_path / "a" / "b", "marker", "2") == "1"
    for folder in (tmp_path, tmp_path / "a"):
        with pytest.raises(ValueError, match="contains other files"):
            claim_folder(folder, "marker", "1")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Expected a folder"):
        claim_folder(tmp_path / "file", "marker", "1")
    assert Path(tmp_path / "file").read_text() == ""
