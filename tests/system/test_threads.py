"""One thread for small matrices."""

import numpy as np  # noqa: F401  loads its linear algebra
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from ddnf.system.threads import one_blas_thread


def _threads():
    return {
        library["filepath"]: library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
    }


def test_one_thread_until_the_last_user_has_left():
    with threadpool_limits(2, user_api="blas"):
        before = _threads()
        if set(before.values()) != {2}:
            pytest.skip("This linear algebra does not take two threads.")
        first, second = one_blas_thread(), one_blas_thread()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert set(_threads().values()) == {1}
        second.__exit__(None, None, None)
        assert _threads() == before
