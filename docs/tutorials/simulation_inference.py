# %% [hidden]
import argparse

parser = argparse.ArgumentParser(description="A conditional density as an amortized posterior.")
parser.add_argument("--simulations", type=int, default=10_000, help="number of simulations")
parser.add_argument("--steps", type=int, default=4000, help="training steps")
options = parser.parse_args()

# %% [markdown]
# # Simulation-based inference
#
# A simulator generates data from parameters, but often has no tractable likelihood. Draw parameters from the prior, simulate data, and
# fit the density of the parameters *given* the data. The result is an amortized posterior for any observation. In this example, the
# simulator throws a ball: the parameters are the two initial speeds, and the data are noisy positions at three times. Here the exact
# posterior is known.

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
# `condition=` makes the density conditional. It is trained by maximum likelihood, like any other density.

# %%
density = ddnf.fit_density(jr.key(0), speeds, condition=positions, steps=options.steps, progress=False)
print(density)

# %% [markdown]
# ## A posterior for one observation
#
# The exact posterior is Gaussian, so we can compare the fit with it.

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
# In how many new simulations do the true parameters fall inside the 80 % interval of the fitted posterior?

# %%
inside = []
for number in range(50):
    theta = rng.normal([5.0, 8.0], 2.0, size=(1, 2))
    low, high = np.quantile(density.sample(jr.key(number), 200, condition=simulate(theta)[0]), [0.1, 0.9], axis=0)
    inside.append((theta[0] > low) & (theta[0] < high))
print(f"inside the 80 % interval: {np.mean(inside):.0%}")

# %% [markdown]
# ## Two moons
#
# This problem is harder: its posterior has the shape of two crescents (Greenberg et al. 2019). The prior is uniform on a square, which
# `support` declares, so draws stay inside the square. To draw from the exact posterior, draw the noise and solve for the parameters;
# there are two solutions.


# %%
def moons(theta):
    """A point on a noisy half circle, shifted by the parameters."""
    angle, radius = rng.uniform(-np.pi / 2, np.pi / 2, len(theta)), rng.normal(0.1, 0.01, len(theta))
    shift = np.stack([-np.abs(theta.sum(axis=1)), theta[:, 1] - theta[:, 0]], axis=1) / np.sqrt(2)
    return np.stack([radius * np.cos(angle) + 0.25, radius * np.sin(angle)], axis=1) + shift


def exact_moons(observed, n):
    away = moons(np.zeros((8 * n, 2))) - observed
    away = away[away[:, 0] > 0] * np.sqrt(2)
    total = away[:, 0] * rng.choice([-1.0, 1.0], len(away))
    theta = np.stack([total + away[:, 1], total - away[:, 1]], axis=1) / 2
    return theta[(np.abs(theta) <= 1).all(axis=1)][:n]


theta = rng.uniform(-1, 1, size=(options.simulations, 2))
density = ddnf.fit_density(
    jr.key(2), theta, condition=moons(theta), support=(-1.0, 1.0), steps=options.steps, progress=False
)
observed = moons(np.array([[0.2, 0.3]]))[0]
draws, truth = np.asarray(density.sample(jr.key(3), 1000, condition=observed)), exact_moons(observed, 1000)

# %% [markdown]
# Can a classifier distinguish the draws from exact ones? An accuracy of 0.5 means that it cannot.

# %%
from sklearn.model_selection import cross_val_score
from sklearn.neural_network import MLPClassifier

both, which = np.concatenate([draws, truth]), np.repeat([0, 1], [len(draws), len(truth)])
order = rng.permutation(len(both))
scaled = (both - both.mean(axis=0)) / both.std(axis=0)
accuracy = cross_val_score(MLPClassifier((20, 20), max_iter=300), scaled[order], which[order], cv=5).mean()
print(f"C2ST: {accuracy:.2f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(7, 3.5), sharex=True, sharey=True)
for panel, rows, name in zip(axes, (draws, truth), ("draws", "exact"), strict=True):
    panel.plot(*rows.T, ".", markersize=2)
    panel.set(xlabel=r"$\theta_1$", title=name)
axes[0].set_ylabel(r"$\theta_2$")
