"""The former name of `ddnf.flows`, kept for one release."""

import warnings

from ddnf.flows import *  # noqa: F403
from ddnf.flows import BASELINES, Baseline, for_evaluation, for_training

warnings.warn("ddnf.baselines is deprecated and goes in 0.3: use ddnf.flows.", DeprecationWarning, stacklevel=2)

RIVALS, Rival, exactly, loosely = BASELINES, Baseline, for_evaluation, for_training
