# %% [hidden]
import argparse

parser = argparse.ArgumentParser(description="A conditional density as an amortized posterior.")
parser.add_argument("--simulations", type=int, default=10_000, help="number of simulations")
parser.add_argument("--steps", type=int, default=4000, help="training steps")
options = parser.parse_args()

# %% [markdown]
# # Simulation-based inference
#
# A simulator gives data for parameters, but no likelihood. Draw parameters from the prior, simulate, and fit the density of the parameters *given*
# the data: an amortized posterior for any observation. Here the simulator is the path of a thrown ball with noise, so that we know the answer: the
# parameters are the initial speeds, and the data are noisy positions at three times.

# %%
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np

import ddnf

rng = np.random.default_rng(0)
times, noise = np.array([0.5, 1.0, 1.5]), 0.5


def simulate(speeds):
    """Positions (across, up) at three times."""
    across = speeds[:, :1] * times
    up = speeds[:, 1:] * times - 9.81 / 2 * times**2
    return np.concatenate([across, up], axis=1) + noise * rng.normal(size=(len(speeds), 6))


speeds = rng.normal([5.0, 8.0], [2.0, 2.0], size=(options.simulations, 2))
positions = simulate(speeds)

# %% [markdown]
# `condition=` makes a density conditional. It is trained by maximum likelihood, as any other.

# %%
density = ddnf.fit_density(jr.key(0), speeds, condition=positions, steps=options.steps, progress=False)
print(density)

# %% [markdown]
# ## A posterior for one observation
#
# The exact posterior is Gaussian here, so that we can compare.

# %%
truth = np.array([[6.5, 9.0]])
observed = simulate(truth)
draws = np.asarray(density.sample(jr.key(1), 2000, condition=observed[0]))


def exact(observed):
    """Mean and deviation of both speeds: normal prior, normal likelihood."""
    means, deviations = [], []
    for prior, values in ((5.0, observed[:3]), (8.0, observed[3:] + 9.81 / 2 * times**2)):
        precision = 1 / 2.0**2 + np.sum(times**2) / noise**2
        means.append((prior / 2.0**2 + np.sum(times * values) / noise**2) / precision)
        deviations.append(precision**-0.5)
    return np.array(means), np.array(deviations)


mean, deviation = exact(observed[0])
print("exact ", mean.round(2), deviation.round(2))
print("fitted", draws.mean(axis=0).round(2), draws.std(axis=0).round(2))

# %%
figure, axes = plt.subplots(figsize=(4, 4))
axes.plot(*draws.T, ".", markersize=2, alpha=0.4, label="draws")
axes.plot(*truth[0], "x", color="tab:red", markersize=10, label="truth")
axes.set(xlabel="speed across", ylabel="speed up")
axes.legend(frameon=False)

# %% [markdown]
# ## Is it calibrated?
#
# For many new simulations, how often is the truth inside of the 80 % interval of the fitted posterior?

# %%
inside = []
for number in range(50):
    theta = rng.normal([5.0, 8.0], 2.0, size=(1, 2))
    low, high = np.quantile(density.sample(jr.key(number), 200, condition=simulate(theta)[0]), [0.1, 0.9], axis=0)
    inside.append((theta[0] > low) & (theta[0] < high))
print(f"inside of the 80 % interval: {np.mean(inside):.0%}")
