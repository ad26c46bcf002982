# %% [hidden]
import argparse

parser = argparse.ArgumentParser(description="Failures of fits, and how they are reported.")
parser.add_argument("--steps", type=int, default=500, help="training steps")
options = parser.parse_args()

# %% [markdown]
# # Folds, certificates and k-hat
#
# A fitted flow can fail in three ways: the map is not one-to-one, the fit is too narrow, or the fit misses a part of the target. Each
# failure has its own check. This page provokes all three.

# %%
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np

import ddnf
from ddnf.viz import plot

# %% [markdown]
# ## Folds
#
# A step z + v(z) / T is one-to-one if the field changes slowly enough. With large weights and a single step, the step folds: some points
# have several preimages, and the change-of-variables formula counts only one of them.

# %%
x = jr.normal(jr.key(0), (2000, 2))
flows = {
    "a smooth flow": ddnf.DDNF(jr.key(3), 2, blocks=1, steps=8, hidden=(8, 8), output_scale=1.0),
    "a flow that folds": ddnf.DDNF(jr.key(3), 2, blocks=1, steps=1, hidden=(8, 8), output_scale=8.0),
    "the same, with a guarantee": ddnf.DDNF(
        jr.key(3), 2, blocks=1, steps=1, hidden=(8, 8), output_scale=8.0, lipschitz=0.9
    ),
}
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2))
for panel, (name, flow) in zip(axes, flows.items(), strict=True):
    plot.deformed_grid(panel, jax.vmap(flow.transform), bound=6.0)
    certificate = ddnf.certify(flow, x)
    panel.set_title(f"{name}\n{certificate.verdict}, {certificate.folded_share:.0%} of the cells fold", fontsize=9)

# %% [markdown]
# `certify` gives one of three verdicts: *proved* if a bound on the weights shows that the flow cannot fold anywhere, and otherwise *no fold
# seen* or *folds*, depending on the given points. `lipschitz=0.9` scales the weights such that the bound always holds. The default flow of
# `fit_density` satisfies such a bound or consists of splines, which cannot fold. `fit_posterior` checks its draws for folds and warns.
#
# ## k-hat and ESS
#
# The importance weights p(z) / q(z) of draws from the fit measure how well q covers p. k-hat is the shape of their tail: below 0.5 the
# weights have a finite variance; above 0.7 you should trust neither importance sampling nor the fit. Here a Gaussian (an affine map instead
# of a flow) is fitted to a target with heavy tails.


# %%
def heavy(z):
    """Student's t with two degrees of freedom, in each of two coordinates."""
    return -1.5 * jnp.sum(jnp.log1p(z**2 / 2))


gaussian = ddnf.flows.make("affine", jr.key(0), 2)
posterior = ddnf.fit_posterior(
    jr.key(0), ddnf.Target(heavy, 2), flow=gaussian, steps=options.steps, rounds=1, exact="never", progress=False
)
print(f"k-hat {posterior.khat:.2f}, ESS {posterior.ess:.2f}")

# %%
draws = posterior.sample(jr.key(1), 4000)
weights = jax.nn.softmax(jax.vmap(heavy)(draws) - posterior.log_prob(draws))
grid = np.linspace(-15, 15, 300)
figure, axes = plt.subplots(1, 2, figsize=(8, 3))
axes[0].hist(draws[:, 0], bins=60, density=True, color="0.7", label="draws of the fit")
axes[0].plot(grid, (1 + grid**2 / 2) ** -1.5 / np.sqrt(8), label="target")
axes[0].set(yscale="log", ylim=(1e-4, 1), xlabel="first coordinate", title="too narrow")
axes[0].legend(frameon=False, fontsize=8, loc="upper left")
axes[1].plot(jnp.linalg.norm(draws, axis=1), 100 * weights, ".", markersize=3)
axes[1].set(xlabel="distance from the centre", ylabel="weight, % of the sum", title="weights grow in the tails")
figure.tight_layout()

# %% [markdown]
# `fit_posterior` warns about it. A flow fits better. If the tails are too heavy for the flow, it warns as well.
#
# ## A missed mode
#
# Draws from the fit say nothing about regions where the fit has no draws: there, k-hat and ESS look perfect. `fit_posterior` therefore
# searches for modes away from the fit, and compares their mass with that of the fit.


# %%
def two_modes(z):
    """Two normals, twelve apart, with equal mass."""
    left, right = (-jnp.sum((z - jnp.array([centre, 0.0])) ** 2) / 2 for centre in (0.0, 12.0))
    return jnp.logaddexp(left, right)


affine = ddnf.flows.make("affine", jr.key(0), 2)
target = ddnf.Target(two_modes, 2)
posterior = ddnf.fit_posterior(
    jr.key(0), target, flow=affine, steps=options.steps, rounds=1, searches=1, exact="never", progress=False
)
print(f"k-hat {posterior.khat:.2f}, ESS {posterior.ess:.2f}")

# %%
x, y = np.meshgrid(np.linspace(-4, 16, 200), np.linspace(-4, 4, 80))
values = jax.vmap(jax.vmap(two_modes))(jnp.stack([x, y], axis=-1))
draws = np.asarray(posterior.sample(jr.key(1), 500))
figure, axes = plt.subplots(figsize=(7, 3))
axes.imshow(jnp.exp(values), extent=(-4, 16, -4, 4), origin="lower", cmap="magma")
axes.plot(*draws.T, ".", color="tab:cyan", markersize=2)
axes.set_title("the target, and draws of the fit")

# %% [markdown]
# Both numbers are perfect, although half of the target is missing. The warning reports where.
#
# To fix this, search more widely (`searches=`, 4 by default), temper the target (`temper=0.5`), or give initial points.
#
# ## Which check detects which failure
#
# | failure | `certify` | k-hat, ESS | search for modes | chains through the flow |
# |---|---|---|---|---|
# | the map folds | yes | no | no | no |
# | the fit is too narrow | no | yes | no | yes |
# | a mode is missed | no | no | yes | only if they reach it |
# | training has not settled | no | yes | no | yes |
