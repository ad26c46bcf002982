"""One thread for the linear algebra of small matrices.

OpenBLAS splits even a 10 x 10 triangular solve between threads, which then wait for each other. If another program
keeps a core busy, microseconds become milliseconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from threadpoolctl import threadpool_limits

_LOCK = Lock()
_users: list[int] = []
_limits: list[threadpool_limits] = []


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keeps NumPy's and SciPy's linear algebra to one thread in the whole process, until the last user has left.

    Example:
        >>> with one_blas_thread():
        ...     pass
    """
    with _LOCK:
        if not _users:
            _limits.append(threadpool_limits(1, user_api="blas"))
        _users.append(1)
    try:
        yield
    finally:
        with _LOCK:
            _users.pop()
            if not _users:
                _limits.pop().restore_original_limits()
