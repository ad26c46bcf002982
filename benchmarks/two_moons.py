"""Two moons (Greenberg et al. 2019, as in the sbi benchmark): simulator, exact posterior draws, and a classifier test.

theta ~ uniform on [-1, 1]^2,  a ~ uniform(-pi/2, pi/2),  r ~ normal(0.1, 0.01),
x = (r cos a + 0.25, r sin a) + (-|theta_1 + theta_2|, -theta_1 + theta_2) / sqrt 2.
"""

import jax.random as jr
import numpy as np

import ddnf


def simulate(rng, theta):
    """Data for each row of parameters."""
    angle, radius = rng.uniform(-np.pi / 2, np.pi / 2, len(theta)), rng.normal(0.1, 0.01, len(theta))
    moon = np.stack([radius * np.cos(angle) + 0.25, radius * np.sin(angle)], axis=1)
    shift = np.stack([-np.abs(theta.sum(axis=1)), theta[:, 1] - theta[:, 0]], axis=1) / np.sqrt(2)
    return moon + shift


def exact_draws(rng, observed, n):
    """Draws of the posterior: the noise is drawn, and the equation solved for theta, which has two solutions.

    The change of variables has a constant determinant, so that only the bounds of the prior reject draws.
    """
    found = np.empty((0, 2))
    while len(found) < n:
        moon = simulate(rng, np.zeros((4 * n, 2)))
        total, difference = np.sqrt(2) * (moon[:, 0] - observed[0]), np.sqrt(2) * (observed[1] - moon[:, 1])
        total = np.where(total < 0, np.nan, total) * rng.choice([-1.0, 1.0], len(moon))
        theta = np.stack([total - difference, total + difference], axis=1) / 2
        found = np.concatenate([found, theta[(np.abs(theta) <= 1).all(axis=1)]])
    return found[:n]


def c2st(a, b):
    """The accuracy of a classifier that tells two samples apart, over five folds; 0.5 if they are alike."""
    from sklearn.model_selection import cross_val_score
    from sklearn.neural_network import MLPClassifier

    rows = np.concatenate([a, b])
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    which = np.repeat([0, 1], [len(a), len(b)])
    model = MLPClassifier((20, 20), max_iter=1000, random_state=0)
    order = np.random.default_rng(0).permutation(len(rows))
    return float(cross_val_score(model, rows[order], which[order], cv=5).mean())


def try_two_moons(simulations, seed, observations=10):
    """C2ST of an amortized posterior at some observations."""
    rng = np.random.default_rng(seed)
    theta = rng.uniform(-1, 1, size=(simulations, 2))
    density = ddnf.fit_density(jr.key(seed), theta, simulate(rng, theta), support=(-1.0, 1.0), progress=False)
    values = []
    for number in range(observations):
        observed = simulate(rng, rng.uniform(-1, 1, size=(1, 2)))[0]
        draws = np.asarray(density.sample(jr.key(number), 1000, condition=observed))
        values.append(c2st(draws, exact_draws(rng, observed, 1000)))
    return dict(c2st=np.mean(values), largest=np.max(values), passes=bool(np.mean(values) <= 0.6))
