"""The scalar root: to rounding whatever the function, and differentiated by the implicit function theorem."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from ddnf.flows.root import increasing_root

# Steep, flat, nearly flat at the root, of a slope that falls to 1e-6, and one on which plain Newton runs away.
FUNCTIONS = {
    "cube": lambda x: x**3,
    "sinh": jnp.sinh,
    "planar": lambda x: x - (1 - 1e-6) * jnp.tanh(x),
    "tails": lambda x: jnp.arctan(10 * x) + 1e-3 * x,
    "steep": lambda x: 1e4 * x + jnp.tanh(1e4 * x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_root_from_any_bracket(name):
    function = FUNCTIONS[name]
    x = jnp.array([-7.0, -0.3, 0.4, 6.0])

    @jax.jit
    @jax.vmap
    def run(x):
        y = function(x)
        roots = [
            increasing_root(lambda z: function(z) - y, low, high) for low, high in ((x - 1, x + 5), (x + 1, x + 2))
        ]
        return jnp.stack(roots)

    assert_allclose(run(x), np.stack([x, x], 1), rtol=1e-12)


def test_root_at_zero_and_at_an_end():
    at_zero = increasing_root(lambda x: x + jnp.tanh(x), jnp.array(-1.0), jnp.array(3.0))
    at_end = increasing_root(lambda x: x - 2.0, jnp.array(2.0), jnp.array(3.0))
    assert_allclose([at_zero, at_end], [0.0, 2.0], atol=1e-15)


def test_float32_ends_at_its_rounding():
    y = jnp.linspace(-30, 30, 50, dtype=jnp.float32)
    root = jax.jit(jax.vmap(lambda y: increasing_root(lambda x: x + 9 * jnp.tanh(x) - y, y - 9, y + 9)))(y)
    assert root.dtype == jnp.float32
    assert_allclose(root + 9 * jnp.tanh(root), y, atol=1e-5)


def test_gradients_of_first_and_second_order():
    """Of y -> c**(1/3) y**(1/3), the root of x^3 / c = y; and through an outer scan."""

    def root(y, c):
        return increasing_root(lambda x: x**3 / c - y, jnp.zeros(()), jnp.array(9.0))

    def repeated(y, c):
        return jax.lax.scan(lambda y, _: (root(y, c), None), y, None, length=2)[0]

    y, c = 8.0, 27.0
    assert_allclose(jax.jit(jax.grad(root, (0, 1)))(y, c), (6 / 24, 6 / 81), rtol=1e-12)
    assert_allclose(jax.jit(jax.grad(jax.grad(root)))(y, c), -2 / 9 * 6 / 64, rtol=1e-12)
    assert_allclose(jax.jit(jax.grad(repeated))(y, c), repeated(y, c) / (9 * y), rtol=1e-12)
