"""Programs that compile in less time."""

import jax
import jax.numpy as jnp
import pytest

from ddnf.system import compiling


@pytest.mark.parametrize("options", [compiling._QUICK, {"no_such_option": True}])
def test_values_do_not_depend_on_the_options(monkeypatch, options):
    """Nor does anything fail where the installed XLA does not know them."""
    monkeypatch.setattr(compiling, "_QUICK", options)
    compiling._options.cache_clear()
    x = jnp.linspace(0.0, 1.0, 7)
    value = compiling.quick_jit(lambda x: jnp.sum(jnp.tanh(x) ** 2))(x)
    assert abs(value - jnp.sum(jnp.tanh(x) ** 2)) < 1e-6
    known = jax.default_backend() == "cpu" and "no_such_option" not in options
    assert compiling._options() == (options if known else {})
    compiling._options.cache_clear()


def test_a_program_compiled_ahead_is_not_compiled_again(compilations):
    function = compiling.quick_jit(lambda x: jnp.cos(x) - 3 * x)
    with compiling.compiling_ahead(lambda: function.lower(jnp.ones(5)).compile()):
        pass
    compilations.clear()
    function(jnp.ones(5))
    assert not compilations


def test_what_compiling_ahead_raises_is_not_lost():
    with pytest.raises(ZeroDivisionError), compiling.compiling_ahead(lambda: 1 / 0):  # pyright: ignore[reportArgumentType]
        pass
