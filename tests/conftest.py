"""Tests run in float64, with the shapes in annotations checked at run time and compiled code kept on disk."""

from pathlib import Path

import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

with install_import_hook("ddnf", "beartype.beartype"):
    import ddnf
    import ddnf.baselines
    import ddnf.baselines.numpyro
    import ddnf.bridges.numpyro
    import ddnf.bridges.pymc
    import ddnf.bridges.sklearn
    import ddnf.cli
    import ddnf.inference.diagnostics
    import ddnf.inference.export
    import ddnf.paper.compiling
    import ddnf.paper.reproduce
    import ddnf.paper.toy
    import ddnf.plot
    import ddnf.record
    import ddnf.side_by_side
    import ddnf.targets.cancer
    import ddnf.targets.images
    import ddnf.targets.toy
    import ddnf.view

ddnf.paper.compiling.compile_quickly()


@pytest.fixture
def as_users_run_it():
    """Without the run-time check of annotations, which would speak up first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
