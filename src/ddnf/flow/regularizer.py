"""Regularizers of the flow; each is a number for one point, to be averaged over points and added to a loss."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ddnf.flow.bijection import DDNF, Path
from ddnf.flow.layer import safe_norm


def geodesic(path: Path) -> Float[Array, ""]:
    """The paper's geodesic regularizer, Eq. (geodes): the time integral of |v|^2 along the path of a point.

    Each cell counts with its time dt, so the value does not depend on the number of steps to first order.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> flow = DDNF(jr.key(0), 2, field=lambda key: lambda z, condition: jnp.ones(2), blocks=3)
        >>> _, path = flow.path(jnp.zeros(2))
        >>> float(geodesic(path))  # three blocks of unit time, |v|^2 = 2
        6.0
    """
    steps = path.velocities.shape[1]
    return jnp.sum(path.velocities**2) / steps


def sobolev(
    flow: DDNF,
    x: Float[Array, " dim"],
    condition: Float[Array, " condition"] | None = None,
    *,
    alpha: float,
    power: int = 1,
    probes: int | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, ""]:
    """The regularizer of Appendix E: the time integral of v^T L v, L = (alpha Laplacian + I)^power, alpha <= 0.

    With alpha = 0 this is `geodesic`. The Laplacian acts on each component of v.

    Args:
        flow: the flow.
        x: where the path begins.
        condition: the flow's condition.
        alpha: at most 0; how strongly roughness counts.
        power: the integer c >= 0 of the appendix; each one costs two more derivatives of v.
        probes: None for the exact Laplacian (dim Hessian-vector products); M for its estimate by M Gaussian
            probes, the mean of w^T H w.
        key: randomness of the probes.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> flow = DDNF(jr.key(0), 2, output_scale=1.0)
        >>> rough = sobolev(flow, jnp.ones(2), alpha=-0.1, power=2)
        >>> bool(jnp.isfinite(rough))
        True
    """
    if alpha > 0:
        raise ValueError(f"Expected alpha of at most 0; got {alpha}.")
    if power < 0:
        raise ValueError(f"Expected power of at least 0; got {power}.")
    if probes is not None and key is None:
        raise ValueError("Expected a key with probes; got None.")
    _, path = flow.path(x, condition)

    def energy(velocity, z, key):
        smoothed = velocity
        for i in range(power):
            draw = None if probes is None else jr.normal(jr.fold_in(key, i), (probes, len(z)), z.dtype)
            smoothed = _smooth(smoothed, alpha, draw)
        return jnp.sum(velocity(z) * smoothed(z))

    keys = jr.split(jr.key(0) if key is None else key, path.points.shape[:2])
    over_steps = jax.vmap(energy, in_axes=(None, 0, 0))
    return jnp.sum(eqx.filter_vmap(over_steps)(flow.bind(condition), path.points, keys)) * flow.dt


def inverse_consistency(
    flow: DDNF, x: Float[Array, " dim"], condition: Float[Array, " condition"] | None = None
) -> Float[Array, ""]:
    """The paper's inverse consistency, Eq. (invConst): |x - psi(phi(x))| with psi the flow run with -v.

    Example:
        >>> import jax.numpy as jnp, jax.random as jr
        >>> coarse = DDNF(jr.key(0), 2, steps=1, output_scale=1.0)
        >>> bool(inverse_consistency(coarse, jnp.ones(2)) > 0.01)
        True
    """
    back, _ = flow.reverse_and_log_det(flow.transform(x, condition), condition)
    return safe_norm(x - back)


def _smooth(f: Callable, alpha: float, probes: Array | None) -> Callable:
    """z -> f(z) + alpha Laplacian f(z)."""

    def smoothed(z):
        directions = jnp.eye(len(z), dtype=z.dtype) if probes is None else probes
        total = jnp.sum(jax.vmap(lambda w: _second_derivative(f, z, w))(directions), axis=0)
        return f(z) + alpha * (total if probes is None else total / len(probes))

    return smoothed


def _second_derivative(f, z, w):
    """w^T H w for the Hessian H of each component of f."""

    def slope(z):
        return jax.jvp(f, (z,), (w,))[1]

    return jax.jvp(slope, (z,), (w,))[1]
