"""For all tests, doctests among them: compiled code does not pile up, and workers do not fight for the cores."""

import itertools
import os
from pathlib import Path

# Before NumPy is imported: threads of linear algebra in one worker would wait for those of another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

_MAPPINGS = Path("/proc/self/maps")
# Linux allows 65,530 a process; these take about 3 GB of memory.
_MOST_MAPPINGS = 10_000
# Within a file, where programs are used again, more are kept.
_MOST_WITHIN_FILE = 30_000
_EVERY = 10
_count = itertools.count(1)


def pytest_runtest_teardown(item, nextitem):
    """Frees compiled programs once there are many: a process may map only so many of them into memory."""
    is_last = nextitem is None or nextitem.path != item.path
    most = _MOST_MAPPINGS if is_last else _MOST_WITHIN_FILE
    if (is_last or next(_count) % _EVERY == 0) and _mappings() > most:
        jax.clear_caches()


def _mappings() -> float:
    return _MAPPINGS.read_bytes().count(b"\n") if _MAPPINGS.exists() else float("inf")
