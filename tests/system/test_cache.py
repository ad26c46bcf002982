"""The compilation cache: found again by another process, and never worth a result or a crash."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import ddnf

PROGRAM = """
import sys, jax, jax.numpy as jnp, ddnf
folder = ddnf.cache_compilation(sys.argv[1])
print(float(jax.jit(lambda x: jnp.linalg.slogdet(x @ x.T + jnp.eye(40))[1])(jnp.ones((40, 3)))))
"""


@pytest.fixture(autouse=True)
def _as_before():
    before = jax.config.values["jax_compilation_cache_dir"]
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def run(folder):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_entries_are_kept_and_corrupt_ones_do_no_harm(tmp_path):
    folder = tmp_path / "cache"
    first = run(folder)
    entries = [path for path in folder.rglob("*") if path.is_file() and path.name.endswith("-cache")]
    assert entries and folder.stat().st_mode & 0o777 == 0o700
    for path in entries:
        path.write_bytes(b"not a program")
    assert run(folder) == first


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="other users can write to the folder"):
        assert ddnf.cache_compilation(tmp_path) is None


def test_a_path_that_is_a_file_is_not_used(tmp_path):
    (tmp_path / "file").write_text("a bystander")
    with pytest.warns(RuntimeWarning, match="are not cached"):
        assert ddnf.cache_compilation(tmp_path / "file") is None
    assert (tmp_path / "file").read_text() == "a bystander"


def test_variable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in ("off", "0", "No", "false", "none"):
        monkeypatch.setenv("DDNF_CACHE", word)
        assert ddnf.cache_compilation() is None
    monkeypatch.setenv("DDNF_CACHE", str(tmp_path / "own"))
    assert ddnf.cache_compilation() == tmp_path / "own"
    monkeypatch.delenv("DDNF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for word in ("", "on", "1", "yes", "True"):
        monkeypatch.setenv("DDNF_CACHE", word)
        if sys.platform == "linux":
            assert ddnf.cache_compilation() == Path(tmp_path) / "ddnf" / "jax"
