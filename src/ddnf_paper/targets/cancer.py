"""The cancer posterior (the paper's Fig. skwP and Table 2): stomach-cancer mortality in 20 cities of Missouri.

y_i deaths among n_i at risk are beta-binomial with mean m and precision L, and p(m, L) is proportional to
1 / (m (1 - m) (1 + L)^2). Both targets are densities over z = (logit m, log L), without the binomial coefficients:

- `table2` omits the Jacobian of the change of variables; the paper sampled it for its Table 2.
- `textbook` has the Jacobian m (1 - m) L; the mean of L does not exist, as the tail falls as 1 / L^2.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Tsutakawa, Shoop and Marienfeld (1985); Albert (2009).
AT_RISK = np.array(
    [1083, 855, 3461, 657, 1208, 1025, 527, 1668, 583, 582, 917, 857, 680, 917, 53637, 874, 395, 581, 588, 383]
)
DEATHS = np.array([0, 0, 2, 0, 1, 1, 0, 2, 1, 3, 0, 1, 1, 1, 54, 0, 0, 1, 3, 0])

# By quadrature: mean and deviation of logit m and log L, E[m], E[L] and log Z.
REFERENCE = {
    "table2": dict(mean=(-6.73034, 6.76961), deviation=(0.38298, 1.01983), m=1296.5e-6, L=1566.96, log_z=-571.20656),
    "textbook": dict(mean=(-6.81539, 7.9393), deviation=(0.29421, 1.4268), m=1147.4e-6, L=None, log_z=-570.7086),
}


def table2(z: Float[Array, " 2"]) -> Float[Array, ""]:
    """Prior times likelihood at (logit m, log L), without Jacobian.

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(table2(jnp.array([-6.7, 6.8]))), 2)
        -571.74
    """
    log_m, log_rest = jax.nn.log_sigmoid(z[0]), jax.nn.log_sigmoid(-z[0])
    return _log_likelihood(z) - log_m - log_rest - 2 * jax.nn.softplus(z[1])


def textbook(z: Float[Array, " 2"]) -> Float[Array, ""]:
    """The posterior density of (logit m, log L), with Jacobian.

    Example:
        >>> import jax.numpy as jnp
        >>> round(float(textbook(jnp.array([-6.7, 6.8])) - table2(jnp.array([-6.7, 6.8]))), 2)
        0.1
    """
    return table2(z) + jax.nn.log_sigmoid(z[0]) + jax.nn.log_sigmoid(-z[0]) + z[1]


def _log_likelihood(z):
    """Sum of log B(L m + y, L (1 - m) + n - y) - log B(L m, L (1 - m)).

    Differences of log Gamma lose digits in float32. By Stirling's series, log Gamma(a + y) - log Gamma(a) is
    (a - 1/2) log(1 + y / a) + y log(a + y) - y + small, and the large terms of the three differences cancel here.
    """
    precision = jnp.exp(z[1])
    a, b = precision * jax.nn.sigmoid(z[0]), precision * jax.nn.sigmoid(-z[0])
    # Cast to the precision of z: NumPy integers would keep the precision of the first call.
    y, n = (jnp.asarray(counts, z.dtype) for counts in (DEATHS, AT_RISK))
    rest = n - y
    total = precision + n
    terms = (
        _rise(a, y)
        + _rise(b, rest)
        - _rise(precision, n)
        + y * jnp.log((a + y) / total)
        + rest * jnp.log1p(-(a + y) / total)
    )
    return jnp.sum(terms)


def _rise(a, y):
    """log Gamma(a + y) - log Gamma(a) - y log(a + y) + y: small and smooth in y.

    Stirling's series needs large arguments; Gamma(a + 8) / Gamma(a) is the product of the eight factors between.
    """
    steps = jnp.arange(8.0)
    shift = jnp.sum(jnp.log1p(y[:, None] / (a + steps)), axis=1)
    c, high = a + 8, a + 8 + y
    main = (c - 0.5) * jnp.log1p(y / c) + y * jnp.log1p(8 / (a + y))
    return main - shift + _tail(high) - _tail(c)


def _tail(c):
    return 1 / (12 * c) - 1 / (360 * c**3) + 1 / (1260 * c**5)
