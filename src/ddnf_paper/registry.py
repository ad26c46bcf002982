"""The experiments, in the order of the report."""

from ddnf_paper import (
    accuracy,
    illustration,
    inverse_consistency,
    open_questions,
    posterior,
    regularization,
    toy,
    vae,
)
from ddnf_paper.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (accuracy, illustration, toy, posterior, vae, regularization, inverse_consistency, open_questions)
}
