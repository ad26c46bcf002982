"""The experiments, in the order of the report."""

from ddnf.paper import accuracy, inverse_consistency, open_questions, regularization, toy
from ddnf.paper.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (accuracy, toy, regularization, inverse_consistency, open_questions)
}
