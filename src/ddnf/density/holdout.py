"""Held-out rows: how many, and the likelihood to report if held-out rows also chose the parameters."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ddnf.density.rows import is_integer

PARTS = 5
MOST_HELD_OUT = 20_000


def held_out_count(validation: Any, count: int) -> int:
    """How many of `count` rows to hold out, from a share (of at most 20,000 rows) or a number.

    Example:
        >>> held_out_count(0.1, 60), held_out_count(7, 60)
        (6, 7)
    """
    is_share = isinstance(validation, float | np.floating) and 0 < validation < 1
    if not is_share and not (is_integer(validation) and validation > 0):
        raise ValueError(f"Expected validation to be a share between 0 and 1 or a number of rows; got {validation!r}.")
    held = min(int(np.ceil(validation * count)), MOST_HELD_OUT) if is_share else int(validation)
    if not 1 <= held <= count - 5:
        raise ValueError(f"Expected at least 5 rows to train on; got {count} rows, {held} of them held out.")
    return held


def part_numbers(count: int) -> Int[np.ndarray, " count"]:
    """Which of the parts of the held-out rows each row belongs to."""
    return np.arange(count) % min(PARTS, count)


def part_means(losses: Any) -> Any:
    """Mean losses of the parts of the held-out rows, over the last axis."""
    part = part_numbers(losses.shape[-1])
    member = np.eye(part.max() + 1)[part]
    return losses @ (member / member.sum(axis=0))


def optimism(values: Float[np.ndarray, "choices parts"], sizes: Float[np.ndarray, " parts"]) -> float:
    """The optimism of the best choice on the held-out rows, which arises because the same rows made the choice.

    `values` has the mean loss of each part of the held-out rows for each choice (such as the parameters after each
    chunk of training). For each part, the other parts choose and this part evaluates, so no row evaluates a choice that
    it took part in. The result is this cross-fitted mean loss minus the smallest mean loss over all parts. NaN with a
    single part, or if no choice is finite.

    Example:
        >>> optimism(np.array([[0.0, 3.0], [2.0, 2.0], [3.0, 0.0]]), np.ones(2))
        1.5
    """
    if len(sizes) < 2:
        return float("nan")
    losses = values[np.isfinite(values).all(axis=1)] * sizes
    if not len(losses):
        return float("nan")
    total = losses.sum(axis=1)
    chosen = np.argmin(total[:, None] - losses, axis=0)
    judged = losses[chosen, np.arange(len(sizes))].sum()
    return float((judged - total.min()) / sizes.sum())
