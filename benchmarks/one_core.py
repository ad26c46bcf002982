"""One core and one thread, for a fair comparison. Call it before importing JAX or PyTorch."""

import os


def keep() -> None:
    """Pins this process and its children to one core, and each library to one thread."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    if hasattr(os, "sched_setaffinity"):
        # The last core: interrupts tend to go to the first.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
