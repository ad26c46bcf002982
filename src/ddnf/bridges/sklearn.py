"""scikit-learn: a density estimator that follows its conventions, for pipelines and parameter searches."""

import warnings
from typing import Any

import jax.random as jr
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from ddnf.density import default_flow, fit_density
from ddnf.density.rows import FEWEST_ROWS
from ddnf.system.optional import require

base = require("sklearn.base", "sklearn")
utils = require("sklearn.utils", "sklearn")
validation_tools = require("sklearn.utils.validation", "sklearn")


class DDNFDensity(base.DensityMixin, base.BaseEstimator):
    """A density fitted by maximum likelihood, as a scikit-learn estimator; see `ddnf.fit_density`.

    Args:
        blocks: velocity fields of the flow, K; None for the default.
        flow_steps: steps of each field, T; None for the default.
        hidden: widths of the fields' hidden layers; None for a default by the number of columns.
        activation: of the fields.
        support: support of the columns: "real", "positive", "unit", "integer", "count" or (low, high); one for all, a
            list, or a dict from column numbers or names.
        steps: largest number of training steps; None for 2,000 to 5,000, by the number of rows.
        batch: rows per training step.
        learning_rate: peak learning rate of Adam.
        validation: rows to hold out for early stopping: a share, or a number of rows.
        patience: stop after so many validations without improvement.
        random_state: an integer for the same fit each time, a `RandomState`, or None for NumPy's global one.
        verbose: whether to show a progress bar.
        iterations: deprecated name of `steps`.

    Attributes:
        density_: the fitted `ddnf.Density`.
        n_features_in_: number of columns.
        feature_names_in_: their names, where `fit` was given a table with names.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).normal(size=(40, 2))
        >>> model = DDNFDensity(blocks=1, hidden=(2,), steps=5, random_state=0).fit(x)
        >>> model.score_samples(x).shape, model.sample(3, random_state=1).shape
        ((40,), (3, 2))
    """

    density_: Any
    n_features_in_: int

    # No annotations: scikit-learn wants settings to be checked by `fit`, not here.
    def __init__(
        self,
        blocks=None,
        flow_steps=None,
        hidden=None,
        activation="softplus",
        support=None,
        steps=None,
        batch=256,
        learning_rate=5e-3,
        validation=0.1,
        patience=10,
        random_state=None,
        verbose=False,
        iterations=None,
    ):
        self.blocks = blocks
        self.flow_steps = flow_steps
        self.hidden = hidden
        self.activation = activation
        self.support = support
        self.steps = steps
        self.batch = batch
        self.learning_rate = learning_rate
        self.validation = validation
        self.patience = patience
        self.random_state = random_state
        self.verbose = verbose
        self.iterations = iterations

    def fit(self, X: Any, y: Any = None) -> "DDNFDensity":
        """Fits the density to rows (n, columns); `y` is ignored."""
        X = validation_tools.validate_data(self, X, dtype=np.float64, ensure_min_samples=FEWEST_ROWS)
        flow_key, fit_key = jr.split(_key(self.random_state))
        names = getattr(self, "feature_names_in_", None)
        self.density_ = fit_density(
            fit_key,
            X,
            names=None if names is None else [str(name) for name in names],
            flow=default_flow(
                flow_key,
                X.shape[1],
                blocks=self.blocks,
                steps=self.flow_steps,
                hidden=self.hidden,
                activation=self.activation,
            ),
            adaptive=True,
            support=self.support,
            validation=self.validation,
            steps=self._training_steps(),
            batch=self.batch,
            learning_rate=self.learning_rate,
            patience=self.patience,
            progress=bool(self.verbose),
        )
        return self

    def _training_steps(self):
        if self.iterations is None:
            return self.steps
        message = "DDNFDensity(iterations=) is deprecated: use steps=. What was steps= is now flow_steps=."
        warnings.warn(message, FutureWarning, stacklevel=3)
        return self.iterations

    def score_samples(self, X: Any) -> Float[np.ndarray, " n"]:
        """The log density of each row; -inf outside of the support."""
        validation_tools.check_is_fitted(self)
        X = validation_tools.validate_data(self, X, dtype=np.float64, reset=False)
        return np.asarray(self.density_.log_prob(X), np.float64)

    def score(self, X: Any, y: Any = None) -> float:
        """The log-likelihood of all rows together, as scikit-learn's `KernelDensity` has it; `y` is ignored."""
        return float(np.sum(self.score_samples(X)))

    def sample(
        self, n_samples: int = 1, random_state: int | np.random.RandomState | None = None
    ) -> Float[np.ndarray, "n columns"]:
        """Draws from the density, a row each."""
        validation_tools.check_is_fitted(self)
        return np.asarray(self.density_.sample(_key(random_state), n_samples), np.float64)


def _key(random_state) -> PRNGKeyArray:
    return jr.key(utils.check_random_state(random_state).randint(np.iinfo(np.int32).max))
