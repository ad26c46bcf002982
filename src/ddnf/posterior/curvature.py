"""Values, gradients and curvature of a log density on the host."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ddnf.posterior.programs import Programs


class Derivatives:
    """Value, gradient and Hessian of a log density at NumPy points; counts the gradients.

    Where forward-mode differentiation is not possible, as in models with a `jax.custom_vjp` inside (every Diffrax solve
    with its default adjoint), the Hessian comes from central differences of gradients.

    Example:
        >>> derivatives = Derivatives(Programs(lambda z: -jnp.sum(z**2), 2))
        >>> derivatives.value_and_gradient(np.ones(2))[1].tolist(), np.diag(derivatives.hessian(np.ones(2))).tolist()
        ([-2.0, -2.0], [-2.0, -2.0])
    """

    def __init__(self, programs: Programs):
        self.count = 0
        self._by_differences = False
        self._programs = programs

    def value_and_gradient(self, z: np.ndarray) -> tuple[float, Float[np.ndarray, " dim"]]:
        self.count += 1
        return self._programs.gradient(z)

    def hessian(self, z: np.ndarray) -> Float[np.ndarray, "dim dim"] | None:
        """The Hessian; None where it is not finite."""
        if not self._by_differences:
            try:
                hessian = self._programs.hessian(z)
            except FloatingPointError:  # JAX_DEBUG_NANS
                raise
            except Exception:  # gradients have worked before, so forward mode is what fails
                self._by_differences = True
            else:
                return hessian if np.isfinite(hessian).all() else None
        return self._differences(z)

    def _differences(self, z):
        """Central differences of the gradient; the second time with steps in units of the deviations found at first."""
        precision = float(jnp.finfo(jnp.result_type(float)).eps) ** (1 / 3)
        steps = precision * np.maximum(1.0, np.abs(z))
        hessian = None
        for _ in range(2):
            shifts = np.diag(steps)
            gradients = self._programs.gradients(np.concatenate([z + shifts, z - shifts]))[1]
            self.count += len(gradients)
            ahead, behind = np.split(gradients, 2)
            hessian = (ahead - behind) / (2 * steps[:, None])
            if not np.isfinite(hessian).all():
                return None
            hessian = (hessian + hessian.T) / 2
            curvature = np.maximum(np.abs(np.diag(hessian)), 1e-12)
            # Steps must not vanish beside the point itself.
            steps = np.maximum(10 * precision / np.sqrt(curvature), precision**2 * np.abs(z))
        return hessian
