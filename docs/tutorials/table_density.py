# %% [hidden]
import argparse

parser = argparse.ArgumentParser(description="The density of a real table with mixed columns.")
parser.add_argument("--steps", type=int, default=800, help="training steps")
parser.add_argument("--rows", type=int, default=442, help="rows of the table")
options = parser.parse_args()

# %% [markdown]
# # A density of a table
#
# The diabetes data of Efron et al. (2004): 442 patients with age in years, body mass index, blood pressure, a blood serum value, and a measure of the
# progression of the disease. Some columns are integers, some are positive numbers.

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
# A first try, with nothing said about the columns. `fit_density` looks at them and warns: integers have no density with respect to length, and a flow
# could make their likelihood as large as it likes.

# %%
density = ddnf.fit_density(jr.key(0), train, steps=options.steps, progress=False)

# %% [markdown]
# `support` says what values a column can take: "count" for integers from 0, "positive" for positive numbers. The likelihood of a count is a
# probability, never above 1, and its draws are integers.

# %%
support = ["count", "positive", "positive", "positive", "count"]
density = ddnf.fit_density(jr.key(0), train, support=support, steps=options.steps, progress=False)
print(density)

# %% [markdown]
# ## Is it good?
#
# Compare the log-likelihood of rows that the fit has not seen with that of a Gaussian.

# %%
from scipy.stats import multivariate_normal

log_p = np.asarray(density.log_prob(held_out))
gaussian = multivariate_normal(train.mean(axis=0), np.cov(train.T)).logpdf(held_out)
for name, values in (("fit_density", log_p), ("Gaussian", gaussian)):
    print(f"{name:12} {values.mean():.2f} +- {values.std() / np.sqrt(len(values)):.2f} nats per row")

# %% [markdown]
# With so few rows a Gaussian is a strong competitor; the flow gains where columns are skewed.
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
# Frames of pandas and polars go in as they are, and draws come with the same names, order and types. Text, categories and booleans are modelled as
# p(categories) p(numbers | categories); columns of an integer type are integers unless `support` says otherwise. Rows with missing values are refused,
# or left out with `missing="drop"`.

# %%
frame = table[["bmi", "bp"]].assign(sex=np.where(data.frame["sex"].iloc[: options.rows] == 1, "one", "two"))
density = ddnf.fit_density(
    jr.key(0), frame, support={"bmi": "positive", "bp": "positive"}, steps=options.steps, progress=False
)
print(density)
print(density.sample(jr.key(1), 3).to_string())

# %% [markdown]
# ## Questions
#
# The marginal density of some columns, draws of the others given some, the probability of a box, and a rank for outliers: the share of draws that
# are less likely.

# %%
print("log p(bmi = 25):", density.marginal("bmi").log_prob({"bmi": [25.0]}).round(2))
print(
    "mean blood pressure given a bmi of 35:", density.sample_given({"bmi": 35.0}, jr.key(2), 200)["bp"].mean().round(1)
)
print("P(bmi > 30, sex two):", density.probability({"bmi": (30.0, None), "sex": "two"}, jr.key(3), 2000))
print("ranks:", density.rank(frame.iloc[:5], jr.key(4)))

# %% [markdown]
# `density.plot` draws pairs of columns, the table beside draws; `ddnf show model.ddnf table.csv` does the same.

# %%
density.plot(jr.key(5), frame)
