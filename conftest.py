"""For all tests, doctests among them: compiled code does not pile up, and workers do not fight for the cores."""

import os
from pathlib import Path

# Before NumPy is imported: threads of linear algebra in one worker would wait for those of another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

_MAPPINGS = Path("/proc/self/maps")
# Linux allows 65,530 a process; these take about 3 GB of memory.
_MOST_MAPPINGS = 10_000


def pytest_runtest_teardown(item, nextitem):
    """Frees compiled programs between files once there are many: a process may map only so many of them into memory."""
    if (nextitem is None or nextitem.path != item.path) and _are_many():
        jax.clear_caches()


def _are_many() -> bool:
    return not _MAPPINGS.exists() or _MAPPINGS.read_bytes().count(b"\n") > _MOST_MAPPINGS
