# %% [hidden]
import argparse

parser = argparse.ArgumentParser(description="The density of a real table with mixed columns.")
parser.add_argument("--steps", type=int, default=800, help="training steps")
parser.add_argument("--rows", type=int, default=442, help="rows of the table")
options = parser.parse_args()

# %% [markdown]
# # A density of a table
#
# This page uses the diabetes data of Efron et al. (2004): 442 patients with their age in years, body mass index, blood pressure, a blood
# serum value, and a measure of disease progression. Some columns are integers, others are positive numbers.

# %%
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes

import ddnf

data = load_diabetes(scaled=False, as_frame=True)
table = data.frame[["age", "bmi", "bp", "s5", "target"]].iloc[: options.rows]
rows = table.to_numpy(float)
held_out, train = rows[: len(rows) // 5], rows[len(rows) // 5 :]
print(table.describe().loc[["mean", "std", "min", "max"]].round(1).to_string())

# %% [markdown]
# First, fit the table without any information about the columns. `fit_density` detects the integers and warns: integers have no density
# with respect to Lebesgue measure, so a flow could make their likelihood arbitrarily large.

# %%
density = ddnf.fit_density(jr.key(0), train, steps=options.steps, progress=False)

# %% [markdown]
# `support` declares which values a column can take: "count" for integers from 0, "positive" for positive numbers. The likelihood of a
# count is a probability, which is at most 1, and draws of counts are integers.

# %%
support = ["count", "positive", "positive", "positive", "count"]
density = ddnf.fit_density(jr.key(0), train, support=support, steps=options.steps, progress=False)
print(density)

# %% [markdown]
# ## Is it good?
#
# Compare the log-likelihood of held-out rows with the log-likelihood of the same rows under a Gaussian.

# %%
from scipy.stats import multivariate_normal

log_p = np.asarray(density.log_prob(held_out))
gaussian = multivariate_normal(train.mean(axis=0), np.cov(train.T)).logpdf(held_out)
for name, values in (("fit_density", log_p), ("Gaussian", gaussian)):
    print(f"{name:12} {values.mean():.2f} +- {values.std() / np.sqrt(len(values)):.2f} nats per row")

# %% [markdown]
# With so few rows, a Gaussian is hard to beat. The flow gains on skewed columns.
#
# ## New rows

# %%
new = np.asarray(density.sample(jr.key(1), len(rows)))
figure, axes = plt.subplots(1, 3, figsize=(9, 3))
for panel, (i, j) in zip(axes, ((0, 2), (1, 4), (3, 4)), strict=True):
    panel.plot(rows[:, i], rows[:, j], ".", markersize=3, label="data")
    panel.plot(new[:, i], new[:, j], ".", markersize=3, alpha=0.6, label="draws")
    panel.set(xlabel=table.columns[i], ylabel=table.columns[j])
axes[0].legend(frameon=False)
figure.tight_layout()

# %%
print("ages are integers:", bool(np.all(new[:, 0] == np.round(new[:, 0]))))

# %% [markdown]
# ## A frame, with categories
#
# `fit_density` also takes pandas and polars data frames. Draws have the same column names, order and types. Text, categories and booleans
# are modelled as p(categories) p(numbers | categories). Columns of an integer type are treated as integers unless `support` says
# otherwise. Missing values raise an error; `missing="drop"` drops these rows instead.

# %%
frame = table[["bmi", "bp"]].assign(sex=np.where(data.frame["sex"].iloc[: options.rows] == 1, "one", "two"))
density = ddnf.fit_density(
    jr.key(0), frame, support={"bmi": "positive", "bp": "positive"}, steps=options.steps, progress=False
)
print(density)
print(density.sample(jr.key(1), 3).to_string())

# %% [markdown]
# ## Queries
#
# A density can return the marginal density of some columns, draws of the other columns given some, the probability of a box, and a rank for
# detecting outliers: the share of draws that are less likely than a row.

# %%
print("log p(bmi = 25):", density.marginal("bmi").log_prob({"bmi": [25.0]}).round(2))
print(
    "mean blood pressure given a bmi of 35:", density.sample_given({"bmi": 35.0}, jr.key(2), 200)["bp"].mean().round(1)
)
print("P(bmi > 30, sex two):", density.probability({"bmi": (30.0, None), "sex": "two"}, jr.key(3), 2000))
print("ranks:", density.rank(frame.iloc[:5], jr.key(4)))

# %% [markdown]
# `density.plot` plots pairs of columns, with the table and draws side by side; `ddnf show model.ddnf table.csv` does the same.

# %%
density.plot(jr.key(5), frame)
