# %% [hidden]
import argparse
import warnings

parser = argparse.ArgumentParser(description="The eight schools as a PyMC model.")
parser.add_argument("--steps", type=int, default=None, help="training steps per round")
parser.add_argument("--draws", type=int, default=4000, help="posterior draws")
options = parser.parse_args()
warnings.filterwarnings("ignore", category=FutureWarning)

# %% [markdown]
# # The same with PyMC
#
# This page fits the [eight schools](numpyro_posterior.md) as a PyMC model. `from_pymc` compiles the model's log density to JAX and keeps
# its names and transforms.

# %%
import arviz as az
import jax.random as jr
import numpy as np
import pymc as pm

import ddnf

effect = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

with pm.Model() as model:
    mu = pm.Normal("mu", 0.0, 5.0)
    tau = pm.HalfCauchy("tau", 5.0)
    z = pm.Normal("z", 0.0, 1.0, shape=8)
    theta = pm.Deterministic("theta", mu + tau * z)
    pm.Normal("effect", theta, error, observed=effect)

# %%
posterior = ddnf.fit_posterior(jr.key(0), ddnf.from_pymc(model), steps=options.steps, progress=False)
print(posterior.summary())

# %% [markdown]
# `to_arviz` returns the same kind of object as `pm.sample`, so PyMC's own tools work with it.

# %%
idata = posterior.to_arviz(jr.key(1), options.draws)
az.plot_forest(idata, var_names=["theta", "mu", "tau"], combined=True)

# %%
with model:
    predictive = pm.sample_posterior_predictive(idata, random_seed=0, progressbar=False)
predicted = np.asarray(predictive.posterior_predictive["effect"]).reshape(-1, 8)
for school in range(3):
    low, high = np.quantile(predicted[:, school], [0.05, 0.95])
    print(f"school {school}: observed {effect[school]:.0f}, 90 % of predictions between {low:.0f} and {high:.0f}")
