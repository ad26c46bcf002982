"""For all tests, doctests among them: compiled code does not pile up over the whole run."""

import jax


def pytest_runtest_teardown(item, nextitem):
    """Frees compiled programs at the end of each file: a process may map only so many of them into memory."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()
