"""Tests run in float64, with the shapes in annotations checked at run time and compiled code kept on disk."""

import importlib
import os
import pkgutil
from pathlib import Path

import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

os.environ["DDNF_CACHE"] = "off"
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

with install_import_hook(["ddnf", "ddnf_paper"], "beartype.beartype"):
    for package in ("ddnf", "ddnf_paper"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)

from ddnf_paper.compiling import compile_quickly  # noqa: E402

compile_quickly()


@pytest.fixture
def as_users_run_it():
    """Without the run-time check of annotations, which would speak up first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def fully_optimized():
    """Compiles as for users: for files of tests that run for long enough to pay for it, or that are timed."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def compilations():
    """The compilations of the test so far, as a list that grows."""
    found = []

    def listen(name, *_, **__):
        found.extend([name] * name.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)
