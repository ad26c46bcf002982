"""Checks of arguments before anything is traced, with one-line errors."""

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_key(key: Any) -> None:
    """Raises unless `key` is one JAX random key, of the typed or of the old kind.

    Example:
        >>> check_key(jax.random.key(0))
        >>> check_key(0)
        Traceback (most recent call last):
        ValueError: Expected a random key such as jax.random.key(0); got 0.
    """
    if not (_is_typed_key(key) or _is_raw_key(key)):
        raise ValueError(f"Expected a random key such as jax.random.key(0); got {_short(key)}.")


def check_count(least: int = 1, **counts: Any) -> None:
    """Raises unless each of the named values is an integer of at least `least`; None is passed over.

    Example:
        >>> check_count(steps=100, patience=None)
        >>> check_count(steps=1.5)
        Traceback (most recent call last):
        ValueError: Expected steps to be an integer of at least 1; got 1.5.
    """
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"Expected {name} to be an integer of at least {least}; got {_short(value)}.")


def expect(is_fine: Any, expected: str, got: str) -> None:
    """Raises a ValueError unless a condition holds.

    Example:
        >>> expect(1 > 2, "a number above 2", "1")
        Traceback (most recent call last):
        ValueError: Expected a number above 2; got 1.
    """
    if not is_fine:
        raise ValueError(f"Expected {expected}; got {got}.")


def _is_typed_key(key) -> bool:
    return isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()


def _is_raw_key(key) -> bool:
    return isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32 and key.ndim == 1 and key.size in (2, 4)


def _short(value) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
