"""Faster compilation for short programs, whose time is mostly the compiler's."""

import os

import jax

# The version of JAX that accepts the flags. XLA aborts the process at an unknown flag.
_TESTED = (0, 10)
_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def compile_quickly() -> None:
    """Makes JAX compile in a fifth of the time, to programs that run two to three times as long.

    Affects this process and its children. Call it before JAX's first computation, for smoke runs and tests.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__[:2] == _TESTED and _FLAGS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAGS}".strip()
