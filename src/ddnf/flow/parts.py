"""The DDNFs inside a pytree: find them, or give all of them the exact log-determinant and inverse."""

import jax
from jaxtyping import PyTree

from ddnf.flow.bijection import DDNF
from ddnf.flow.log_det import Exact


def ddnf_parts(tree: PyTree) -> list[DDNF]:
    """All DDNFs in a pytree.

    Example:
        >>> import jax.random as jr
        >>> len(ddnf_parts([DDNF(jr.key(0), 2), "text"]))
        1
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, DDNF))
    return [leaf for leaf in leaves if isinstance(leaf, DDNF)]


def as_exact(tree: PyTree) -> PyTree:
    """The same maps with the exact log-determinant and inverse, whatever they were trained with.

    Example:
        >>> import jax.random as jr
        >>> from ddnf import Taylor
        >>> as_exact(DDNF(jr.key(0), 2, log_det=Taylor(1))).log_det
        Exact()
    """

    def exact(node):
        if not isinstance(node, DDNF):
            return node
        node = node.with_log_det(Exact())
        return node if node.inversion == "exact" else node.with_inverse("exact")

    return jax.tree.map(exact, tree, is_leaf=lambda node: isinstance(node, DDNF))
