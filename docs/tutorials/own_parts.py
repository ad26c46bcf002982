# %% [hidden]
import argparse

parser = argparse.ArgumentParser(description="A field, a log-determinant rule, a solver and a bijection of your own.")
parser.add_argument("--steps", type=int, default=1500, help="training steps")
options = parser.parse_args()

# %% [markdown]
# # Your own parts
#
# ## A field
#
# A field is any callable `(z, condition) -> v`, usually an Equinox module. `field=` takes a function that builds a field from a random
# key. This field rotates points around learned centres, at a speed that decreases with the distance.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from flowjax.bijections import AbstractBijection

import ddnf


class Vortices(eqx.Module):
    centres: jax.Array
    speeds: jax.Array

    def __init__(self, key, count=5):
        self.centres, self.speeds = jr.normal(key, (count, 2)), jnp.zeros(count)

    def __call__(self, z, condition):
        offset = z - self.centres
        turned = jnp.stack([-offset[:, 1], offset[:, 0]], axis=1)
        return jnp.sum((self.speeds / (1 + jnp.sum(offset**2, axis=1)))[:, None] * turned, axis=0)


flow = ddnf.DDNF(jr.key(0), 2, blocks=4, steps=4, field=Vortices)
y, log_det = flow.transform_and_log_det(jnp.array([1.0, 0.5]))
print(y, log_det)

# %% [markdown]
# The log-determinant and the inverse are exact for any field. If no factorization of the Jacobian is known, automatic differentiation
# computes it.

# %%
print(jnp.abs(flow.inverse(y) - jnp.array([1.0, 0.5])).max() < 1e-4)

# %% [markdown]
# ## A log-determinant rule
#
# A rule is a `ddnf.LogDet` with a method `apply(step, z, cell=)`, which returns the point after one step and the log-determinant.
# `step.push(z)` returns that point and a function that multiplies by X, where I + X is the Jacobian of the step. `step.at(z)` has the
# determinant and solves linear systems. This rule is the first term of the series log det(I + X) = 2 tr(Y + Y^3 / 3 + ...) with Y = X /
# (2 I + X).


# %%
class Gregory(ddnf.LogDet):
    def apply(self, step, z, *, cell):
        end, push = step.push(z)
        transposed = jax.vmap(push)(jnp.eye(len(z)))
        return end, 2 * jnp.trace(jnp.linalg.solve(2 * jnp.eye(len(z)) + transposed, transposed))


# %% [markdown]
# Test an approximation by its order. The error of a step is O(dt^3), so doubling the number of steps makes the error of the flow four times
# smaller.

# %%
x = jr.normal(jr.key(1), (100, 2))
for steps in (2, 4, 8):
    flows = [
        ddnf.DDNF(jr.key(0), 2, blocks=2, steps=steps, hidden=(8, 8), output_scale=2.0, log_det=rule)
        for rule in (Gregory(), ddnf.Exact())
    ]
    ours, exact = (jax.vmap(flow.transform_and_log_det)(x)[1] for flow in flows)
    print(f"{steps} steps: mean error {float(jnp.abs(ours - exact).mean()):.5f}")

# %% [markdown]
# ## A solver
#
# A solver is a function `(velocity, z, dt) -> z_next` that takes one step. This is Heun's method:


# %%
def heun(velocity, z, dt):
    first = velocity(z)
    return z + dt / 2 * (first + velocity(z + dt * first))


flow = ddnf.DDNF(jr.key(0), 2, blocks=2, steps=4, solver=heun, output_scale=1.0)
x = jr.normal(jr.key(1), (100, 2))
print(ddnf.certify(flow, x).verdict)

# %% [markdown]
# ## A bijection
#
# `fit_posterior` and `fit_density` accept any FlowJAX bijection. This one is a shear with a learned curvature:


# %%
class Banana(AbstractBijection):
    bend: jax.Array
    shape: tuple[int, ...] = (2,)
    cond_shape: None = None

    def transform_and_log_det(self, x, condition=None):
        return x.at[1].add(self.bend * x[0] ** 2), jnp.zeros(())

    def inverse_and_log_det(self, y, condition=None):
        return y.at[1].add(-self.bend * y[0] ** 2), jnp.zeros(())


def log_density(z):
    return -(z[0] ** 2) / 2 - (z[1] - z[0] ** 2) ** 2 / 2


posterior = ddnf.fit_posterior(
    jr.key(0),
    ddnf.Target(log_density, 2),
    flow=Banana(jnp.zeros(())),
    end=None,
    steps=options.steps,
    learning_rate=0.02,
    progress=False,
)
print(f"bend {float(posterior.flow.bend):.3f} (truth 1), ESS {posterior.ess:.3f}, k-hat {posterior.khat:.2f}")
