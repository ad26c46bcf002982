"""Programs that are run once and shortly: their time is the compiler's."""

import os

import jax

# Versions of JAX that were seen to know the flag. XLA ends the process at a flag that it does not know.
_KNOWING = (0, 10)
_FLAG = "--xla_cpu_use_fusion_emitters=false"


def compile_quickly() -> None:
    """From here on JAX compiles in a fifth of the time, to programs that take two to three times as long.

    For all of the process, and its children; to be called before JAX's first computation. For smoke runs and tests.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__[:2] == _KNOWING and _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}".strip()
