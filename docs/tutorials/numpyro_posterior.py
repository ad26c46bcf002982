# %% [hidden]
import argparse
import warnings

parser = argparse.ArgumentParser(description="A hierarchical NumPyro model, from start to plots.")
parser.add_argument("--steps", type=int, default=None, help="training steps per round")
parser.add_argument("--draws", type=int, default=4000, help="posterior draws")
options = parser.parse_args()
warnings.filterwarnings("ignore", category=FutureWarning, module="arviz")

# %% [markdown]
# # A posterior with NumPyro
#
# Eight schools (Rubin, 1981) estimated the effect of coaching on test scores, with standard errors. How large is the effect in each
# school, if the schools are similar but not the same? The model is hierarchical. Its non-centred form avoids the funnel between the
# effects and their common scale.

# %%
import arviz as az
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import Predictive

import ddnf

effect = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def model(error, effect=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(error)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        theta = numpyro.deterministic("theta", mu + tau * z)
        numpyro.sample("effect", dist.Normal(theta, error), obs=effect)


# %% [markdown]
# `from_numpyro` turns the model and its data into a target: a log density over unconstrained parameters, and a map back to the named
# parameters. `fit_posterior` needs nothing else.

# %%
target = ddnf.from_numpyro(model, error, effect=effect)
posterior = ddnf.fit_posterior(jr.key(0), target, steps=options.steps, progress=False)
print(posterior.summary())

# %% [markdown]
# The first line is the verdict. A k-hat below 0.7 means that the importance weights of the draws are well behaved. An ESS near 1 means that
# they are nearly equal, so you can use the draws as they are. `fit_posterior` would have warned about any problem.
#
# ## ArviZ
#
# `to_arviz` converts draws for ArviZ, so its plots and statistics work as they do for MCMC.

# %%
idata = posterior.to_arviz(jr.key(1), options.draws)
az.plot_forest(idata, var_names=["theta", "mu", "tau"], combined=True)

# %% [markdown]
# The funnel that makes this model hard is still visible: where tau is small, the effects are close to mu.

# %%
draws = posterior.sample(jr.key(2), options.draws)
figure, axes = plt.subplots(figsize=(5, 3.5))
axes.plot(draws["theta"][:, 0], np.log(draws["tau"]), ".", markersize=2, alpha=0.3)
axes.set(xlabel="theta of the first school", ylabel="log tau")

# %% [markdown]
# ## Posterior predictive check
#
# NumPyro's `Predictive` takes the draws and simulates new data, which we compare with the observed data.

# %%
latent = {name: draws[name] for name in ("mu", "tau", "z")}
predicted = Predictive(model, latent)(jr.key(3), error)["effect"]
low, high = np.quantile(predicted, [0.05, 0.95], axis=0)
figure, axes = plt.subplots(figsize=(6, 3))
axes.vlines(np.arange(8), low, high, color="0.7", linewidth=6, label="90 % of predictions")
axes.plot(np.arange(8), effect, "o", label="observed")
axes.set(xlabel="school", ylabel="effect")
axes.legend(frameon=False)

# %%
inside = float(np.mean((effect > low) & (effect < high)))
print(f"{inside:.0%} of the observations are inside their 90 % interval")
