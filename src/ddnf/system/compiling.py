"""Programs that compile faster and run more slowly, for work that is done once or a few hundred times."""

import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, lru_cache, update_wrapper
from typing import Any

import equinox as eqx
import jax

# LLVM gets one simple loop for each operation, instead of fused ones: half the compile time, up to three times the run
# time.
_QUICK = {"xla_cpu_use_fusion_emitters": False}


class Quick:
    """A function as `equinox.filter_jit` would make it, compiled in less time where XLA can."""

    def __init__(self, function: Callable):
        update_wrapper(self, function)
        self._function = function

    def __call__(self, *args, **kwargs) -> Any:
        return self._compiled(*args, **kwargs)

    def lower(self, *args, **kwargs) -> Any:
        """What `.compile()` compiles ahead of the first call with such arguments."""
        return self._compiled.lower(*args, **kwargs)

    @cached_property
    def _compiled(self) -> Any:
        options: Any = dict(compiler_options=_options())
        return eqx.filter_jit(self._function, **options)


def quick_jit(function: Callable) -> Quick:
    """As `equinox.filter_jit`, compiled in less time where XLA can. Not for calls from inside of another program.

    It can be compiled ahead of its first call: `.lower(*args).compile()`.

    Example:
        >>> float(quick_jit(lambda x: 2 * x)(1.5))
        3.0
    """
    return Quick(function)


@contextmanager
def compiling_ahead(compile_all: Callable[[], None]) -> Iterator[None]:
    """Runs a function that compiles programs in a background thread, which XLA does without Python's global lock.

    The end of the body waits for the function and raises its exceptions.

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
    except Exception:  # an unknown option can raise any error
        return {}
    return _QUICK
