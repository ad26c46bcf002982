"""Programs that compile in less time and run more slowly, for work that is done once or a few hundred times."""

import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax

# LLVM gets one simple loop for each operation, instead of fused ones: half the compile time, up to three times the run
# time.
_QUICK = {"xla_cpu_use_fusion_emitters": False}


@runtime_checkable
class Quick(Protocol):
    """A compiled function, and its program for some arguments."""

    lower: Callable

    def __call__(self, *args, **kwargs) -> Any: ...


def quick_jit(function: Callable) -> Quick:
    """As `equinox.filter_jit`, compiled in less time where XLA can. Not for calls from inside of another program.

    It can be compiled ahead of its first call: `.lower(*args).compile()`.

    Example:
        >>> float(quick_jit(lambda x: 2 * x)(1.5))
        3.0
    """

    @lru_cache
    def compiled():
        options: Any = dict(compiler_options=_options())
        return eqx.filter_jit(function, **options)

    @wraps(function)
    def call(*args, **kwargs) -> Any:
        return compiled()(*args, **kwargs)

    call.lower = lambda *args, **kwargs: compiled().lower(*args, **kwargs)
    return call


@contextmanager
def compiling_ahead(compile_all: Callable[[], None]) -> Iterator[None]:
    """Runs a function that compiles programs in a thread beside the body, which XLA does without Python's lock.

    What it raises is raised at the end of the body, which waits for it.

    Example:
        >>> function = jax.jit(lambda x: 2 * x)
        >>> with compiling_ahead(lambda: function.lower(1.5).compile()):
        ...     pass
        >>> float(function(1.5))
        3.0
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(contextvars.copy_context().run, compile_all)
        yield
        future.result()


@lru_cache
def _options() -> dict[str, Any]:
    """The options, if this backend and this release of XLA know them."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda: 0, compiler_options=_QUICK)()
    except Exception:  # an unknown option, in whatever way it is refused
        return {}
    return _QUICK
