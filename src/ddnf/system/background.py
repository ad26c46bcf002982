"""Work in a second thread while the first one is busy."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp


@contextmanager
def in_background(function: Callable, *arguments: Any) -> Iterator[None]:
    """Calls a function in a thread while the context runs, to fill compile caches; raises at the end what it raised.

    Example:
        >>> found = []
        >>> with in_background(found.append, 1):
        ...     pass
        >>> found
        [1]
    """
    double = jnp.result_type(float) == jnp.float64  # a context manager sets this for its own thread only

    def call():
        with jax.enable_x64(double):
            function(*arguments)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        yield
        future.result()
